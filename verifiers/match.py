"""Draw the target's own token at each node and follow the draft while it holds that token."""

from __future__ import annotations

from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.verifiers.walk import follow


class MatchVerifier:
    """Accept a draft token exactly when it is the token the target draws at its place.

    The token drawn never depends on the draft, so any tree is verified without loss, whatever its tokens came from,
    and with noise keyed by position the output equals the undrafted run's. For point-mass drafts it accepts as much
    as rejection sampling; for sampled drafts it accepts the sum of p * q instead of min(p, q), unless the drafter
    draws with the same noise (`couples_draft`).

    Source: the target-token form of EAGLE-2's tree rule, Li et al. 2024, arXiv 2406.16858, evaluate_posterior;
    the Gumbel coupling of draft and target is Daliri, Musco and Suresh 2024, arXiv 2408.07978.
    """

    name = "match"
    lossless = True
    needs_all_rows = False
    couples_draft = True

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Walk every tree of the step down from its root.

        Args:
            tree: B requests, M nodes.
            target: asked once per depth, for the current node of every request still walking.
            noise: asked under stream TOKEN at offset depth + 1, as in plain decoding.

        Returns:
            The accepted paths and the token after each of them.
        """

        def draw(rows: Tensor, nodes: Tensor, depth: int) -> Tensor:
            top = target.top(rows, nodes)
            if top is not None:
                return top
            return noise.choose(target.probs(rows, nodes), NoiseKey(rows, depth + 1, Stream.TOKEN))

        return follow(tree, draw)
