"""Answers that go round in circles: where one begins to repeat itself, and a rule that ends it there.

A text repeats itself at position s if its `n` tokens from s on stand in it once before, beginning anywhere earlier;
the two may overlap. Small models do this in most greedy answers, and drafters that copy then look better than they
are: an answer is therefore cut at s, before the repetition, and what comes after counts apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import ConfigError

REPETITION = "repetition"  # the finish reason
NUM_REPEATED = 8  # tokens that make a repetition


def _check(n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"n={n!r}; allowed: an integer >= 1, the number of tokens that make a repetition")


def first_repeat(token_ids: Sequence[int], n: int = NUM_REPEATED) -> int | None:
    """Return the first position at which n tokens begin that stood there before, or None.

    It is how many tokens are left when the text is cut before its repetition, which is complete n tokens later: of
    1 2 3 1 2 3 with n=2 it is 3, and of 7 7 7 it is 1.

    Args:
        token_ids: of an answer, without its prompt.
        n: how many tokens make a repetition.

    Raises:
        ConfigError: n is no positive integer.
    """
    _check(n)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(token_ids) - n + 1):
        gram = tuple(token_ids[start : start + n])
        if gram in seen:
            return start
        seen.add(gram)
    return None


class RepeatWatch:
    """A stop criterion that ends one request when a repetition is complete; its reason is "repetition".

    The tokens that complete it are emitted; `first_repeat` of the new tokens says where to cut. One call per new token
    costs the same however long the answer is. A step that failed may be run again: tokens that were shown and did not
    come to be are forgotten.

    Args:
        num_prompt_tokens: of the request; what the prompt holds is no repetition.
        n: how many tokens make a repetition.

    Raises:
        ConfigError: n is no positive integer, or num_prompt_tokens is negative.
    """

    def __init__(self, num_prompt_tokens: int, n: int = NUM_REPEATED) -> None:
        _check(n)
        if num_prompt_tokens < 0:
            raise ConfigError(f"num_prompt_tokens={num_prompt_tokens}; allowed: at least 0")
        self.num_prompt_tokens, self.n = num_prompt_tokens, n
        self._grams: list[tuple[int, ...]] = []  # [s]: the n new tokens from s on
        self._first: dict[tuple[int, ...], int] = {}  # where each of them stood first

    def __call__(self, tokens: Sequence[int]) -> bool | str:
        """Return the reason if the last of all tokens, prompt included, completes a repetition, else False."""
        last = len(tokens) - self.num_prompt_tokens - self.n  # where the newest n tokens begin
        while len(self._grams) > max(last, 0):
            start = len(self._grams) - 1
            gram = self._grams.pop()
            if self._first[gram] == start:
                del self._first[gram]
        while len(self._grams) <= last:  # once, unless tokens went by unseen
            start = len(self._grams)
            first = self.num_prompt_tokens + start
            gram = tuple(tokens[first : first + self.n])
            self._grams.append(gram)
            self._first.setdefault(gram, start)
        return REPETITION if last >= 0 and self._first[self._grams[last]] < last else False
