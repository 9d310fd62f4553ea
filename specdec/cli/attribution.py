"""Which part of a text was drafted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from specdec.stream import TextStream

if TYPE_CHECKING:
    from specdec.api import Piece

Span = tuple[str, bool]  # a text, and whether it was drafted and accepted


class Attribution:
    """Splits one answer's pieces by who said them, token by token.

    Text belongs to the token that made it certain, so that a character spelt by several tokens is the last one's.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._stream = TextStream(tokenizer)  # without stop strings: what they hold back, the pieces hold back
        self._waiting: deque[Span] = deque()
        self._last = False

    def push(self, piece: Piece) -> list[Span]:
        """Return the piece's text in spans."""
        for token, drafted in zip(piece.token_ids, piece.from_draft, strict=True):
            self._add(self._stream.push([token]), drafted)
            self._last = drafted
        if piece.completion is not None:
            self._add(self._stream.finish(stopped=False), self._last)
        return self._release(len(piece.text))

    def rest(self) -> list[Span]:
        """Return what is still held back when nothing more will come."""
        self._add(self._stream.finish(stopped=False), self._last)
        return self._release(sum(len(text) for text, _ in self._waiting))

    def _add(self, text: str, drafted: bool) -> None:
        if text:
            self._waiting.append((text, drafted))

    def _release(self, num_chars: int) -> list[Span]:
        spans: list[Span] = []
        while num_chars and self._waiting:
            text, drafted = self._waiting.popleft()
            if len(text) > num_chars:
                self._waiting.appendleft((text[num_chars:], drafted))
                text = text[:num_chars]
            spans.append((text, drafted))
            num_chars -= len(text)
        return spans
