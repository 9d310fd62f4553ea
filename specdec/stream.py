"""Text of tokens as they come, and stop strings in it. Holds a tokenizer, knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.errors import ConfigError

_MOST_HALVES = 4  # no character has more bytes, so what is unfinished for longer stays so
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how decoders show bytes that are no whole character yet


def as_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple.

    Raises:
        ConfigError: something in it is no text, or empty.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop={stop!r}; allowed: a non-empty text, or a list of those")
    try:
        "".join(strings).encode()
    except UnicodeError as error:
        raise ConfigError(f"stop={stop!r} is not valid Unicode ({error})") from error
    return tuple(strings)


class StopStrings:
    """A stop criterion: the generated text holds a stop string, special tokens written out.

    Looks at the end of the text only, far enough back for a stop string whose every byte is a token of its own; an
    earlier one would have ended the request. Remembers nothing, so it can be asked again.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], num_prompt_tokens: int) -> None:
        self._tokenizer, self._strings, self._num_prompt_tokens = tokenizer, strings, num_prompt_tokens
        self._window = 4 + max(len(s.encode()) for s in strings)

    def __call__(self, tokens: Sequence[int]) -> bool:
        tail = tokens[max(self._num_prompt_tokens, len(tokens) - self._window) :]
        text = self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(s in text for s in self._strings)


class TextStream:
    """Turns tokens into pieces of text, never taking one back.

    Held back are bytes that are no whole character yet and text that a stop string could begin with. The pieces
    together are `text`. Special tokens are left out.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._prefix = self._read = 0  # tokens[:read] are in _decoded; decoding begins at prefix, for context
        self._decoded = ""
        self.text = ""  # handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became certain with more tokens."""
        if self._tokenizer is None:
            return ""
        for token in token_ids:
            self._tokens.append(token)
            self._extend(final=False)
        return self._hand_out(self._certain())

    def finish(self, stopped: bool) -> str:
        """Return the rest of the text. `stopped`: the request ended at a stop, so text is cut before a stop string."""
        if self._tokenizer is None:
            return ""
        self._extend(final=True)
        end = len(self._decoded)
        if stopped and self._stop:
            end = self._cut()
        return self._hand_out(max(end, len(self.text)))

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _extend(self, final: bool) -> None:
        """Decode what is new behind a few tokens of context: alone, a token may lose its leading space."""
        known = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        waits_in_vain = len(self._tokens) - self._read > _MOST_HALVES
        if len(now) > len(known) and (final or waits_in_vain or not now.endswith(_UNFINISHED)):
            self._decoded += now[len(known) :]
            self._prefix, self._read = self._read, len(self._tokens)

    def _first_stop(self) -> int | None:
        places = [at for at in (self._decoded.find(s) for s in self._stop) if at >= 0]
        return min(places, default=None)

    def _certain(self) -> int:
        """Return how much of the decoded text no stop string can still begin in."""
        stop = self._first_stop()
        if stop is not None:
            return stop
        longest = max((len(s) for s in self._stop), default=0)
        for start in range(max(0, len(self._decoded) - longest + 1), len(self._decoded)):
            if any(s.startswith(self._decoded[start:]) for s in self._stop):
                return start
        return len(self._decoded)

    def _cut(self) -> int:
        """Return where the text ends that a stop string ended."""
        stop = self._first_stop()
        if stop is not None:
            return stop
        # Written with special tokens, which the text leaves out: cut at the token in which it begins.
        raw = self._decode(self._tokens, skip_special_tokens=False)
        places = [at for at in (raw.find(s) for s in self._stop) if at >= 0]
        if not places:
            return len(self._decoded)  # an EOS token ended it
        num_kept = len(self._tokens)
        while num_kept and len(self._decode(self._tokens[:num_kept], skip_special_tokens=False)) > min(places):
            num_kept -= 1
        return min(len(self._decode(self._tokens[:num_kept])), len(self._decoded))

    def _hand_out(self, end: int) -> str:
        piece = self._decoded[len(self.text) : end]
        self.text += piece
        return piece


def text_of(tokenizer: Any | None, token_ids: Sequence[int], stop: Sequence[str], stopped: bool) -> str:
    """Return the text of finished tokens, as a `TextStream` hands it out."""
    stream = TextStream(tokenizer, stop)
    stream._tokens.extend(token_ids)  # all at once: the pieces in between are nobody's
    return stream.finish(stopped)
