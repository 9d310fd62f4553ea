"""Prompt lookup: the tokens that followed the last occurrence of the current suffix."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.history import TokenHistory
from specdec.errors import ConfigError
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees


class NgramDrafter:
    """Looks the longest suffix of the text up in the text itself.

    An index from n-gram to the position after its last occurrence is kept up to date, so a lookup costs the same
    at any context length.

    Source: Saxena 2023, prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
    """

    name = "ngram"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not (isinstance(max_ngram, int) and isinstance(min_ngram, int)) or not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"ngram drafter: min_ngram={min_ngram!r}, max_ngram={max_ngram!r}; allowed: integers with "
                "1 <= min_ngram <= max_ngram"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._history = TokenHistory()
        self._indexed: dict[int, int] = {}  # request -> tokens indexed
        self._after: dict[int, dict[tuple[int, ...], int]] = {}  # request -> n-gram -> position after it

    @classmethod
    def build(cls, context: DrafterContext, max_ngram: int = 3, min_ngram: int = 1) -> NgramDrafter:
        return cls(max_ngram, min_ngram)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        trees: list[tuple[list[int], list[int]]] = []
        for request in requests:
            found = self._lookup(request.request_id, request.max_draft_tokens)
            token_ids = [request.root_token_id, *found]
            trees.append((token_ids, list(range(-1, len(token_ids) - 1))))
        return stack_trees(trees)

    def _lookup(self, request_id: int, most: int) -> list[int]:
        tokens = self._history.of(request_id)
        after = self._index(request_id, tokens)
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            start = after.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + most]
        return []

    def _index(self, request_id: int, tokens: list[int]) -> dict[tuple[int, ...], int]:
        """Enter every n-gram that something follows; the suffix itself is entered when its next token is known."""
        after = self._after.setdefault(request_id, {})
        for end in range(self._indexed.get(request_id, 1), len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                after[tuple(tokens[end - n : end])] = end
        self._indexed[request_id] = max(1, len(tokens))
        return after

    def observe(self, seen: Sequence[Observation]) -> None:
        for observation in seen:
            if observation.start < self._indexed.get(observation.request_id, 0):
                # Told anew after a failed step: what was indexed may not have happened.
                self._indexed.pop(observation.request_id, None)
                self._after.pop(observation.request_id, None)
        self._history.observe(seen)

    def release(self, request_id: int) -> None:
        self._history.release(request_id)
        self._indexed.pop(request_id, None)
        self._after.pop(request_id, None)

    def reset(self) -> None:
        self._history.clear()
        self._indexed.clear()
        self._after.clear()
