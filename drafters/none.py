"""No drafting: the baseline, on the same path and at the same cost as plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.interfaces import DrafterContext, DraftRequest, FeatureSpec, Noise, Observation, TokenTree, empty_tree


class NoneDrafter:
    """Proposes nothing."""

    name = "none"
    features = FeatureSpec()
    max_position: int | None = -1  # no position can be drafted from, so `propose` is not even called
    shares_target_kv = False
    samples = False

    @classmethod
    def build(cls, context: DrafterContext) -> NoneDrafter:
        return cls()

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree:
        return empty_tree(requests)

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def release(self, request_id: int) -> None: ...

    def reset(self) -> None: ...
