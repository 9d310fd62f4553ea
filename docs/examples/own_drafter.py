"""A drafter of your own, by its import path: the class of docs/add_a_drafter.md, outside of the package.

Run: python docs/examples/own_drafter.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import specdec
from specdec.drafters.history import TokenHistory
from specdec.errors import ConfigError
from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree
from specdec.tree import stack_trees


class BigramDrafter:
    """Drafts after each token what followed it the last time, in the request's own text."""

    name = "bigram"
    features = FeatureSpec()
    max_position: int | None = None
    shares_target_kv = False
    samples = False

    def __init__(self, longest: int = 8) -> None:
        if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
            raise ConfigError(f"bigram drafter: longest={longest!r}; allowed: an integer >= 1")
        self.longest = longest
        self._history = TokenHistory()

    @classmethod
    def build(cls, context: DrafterContext, longest: int = 8) -> BigramDrafter:
        return cls(longest)

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        trees: list[tuple[list[int], list[int]]] = []
        for request in requests:
            tokens = self._history.of(request.request_id)
            follower = dict(pairwise(tokens))  # of a token that occurs often, the last one
            token_ids = [request.root_token_id]
            while len(token_ids) <= min(self.longest, request.max_draft_tokens) and token_ids[-1] in follower:
                token_ids.append(follower[token_ids[-1]])
            trees.append((token_ids, list(range(-1, len(token_ids) - 1))))  # a chain: each token below the one before
        return stack_trees(trees)

    def observe(self, seen: Sequence[Observation]) -> None:
        self._history.observe(seen)

    def release(self, request_id: int) -> None:
        self._history.release(request_id)

    def reset(self) -> None:
        self._history.clear()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    llm = specdec.LLM(model, drafter="own_drafter:BigramDrafter", drafter_options={"longest": 4})
    prompt = "do re mi do re mi do re mi do re"
    done = llm.generate(prompt, max_new_tokens=32)[0]
    print(done.text)
    print(f"{done.stats.num_accepted_tokens} of {done.stats.num_draft_tokens} draft tokens accepted")
    assert done.stats.num_draft_tokens > 0
    assert done.stats.num_rejected_drafts == 0, "no proposal was invalid"
    plain = specdec.LLM(llm.model, tokenizer=llm.tokenizer).generate(prompt, max_new_tokens=32)[0]
    assert done.token_ids == plain.token_ids, "a drafter changes the speed only"


if __name__ == "__main__":
    main()
