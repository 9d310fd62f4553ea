"""Accept draft tokens by chance: what an engine gains at a given acceptance, whatever the drafter says."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.interfaces import Noise, NoiseKey, Stream, TargetRows, TokenTree, VerifyResult
from specdec.tree import children_table, paths_to


class SyntheticVerifier:
    """Accept each draft token with probability `rate`, siblings in drawn order; LOSSY, for measurements only.

    The token after the last accepted one is the target's own choice there, so it costs what a real rule costs; the
    text is nonsense.
    """

    name = "synthetic"
    lossless = False
    needs_all_rows = False
    couples_draft = True

    def __init__(self, rate: float = 0.7) -> None:
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0.0 <= rate <= 1.0:
            raise ConfigError(f"synthetic verifier: rate={rate!r}; allowed: a probability, 0 to 1")
        self.rate = float(rate)

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        """Walk every tree of the step down from its root.

        Args:
            tree: B requests, M nodes.
            target: asked once, for the last accepted nodes.
            noise: asked at offset depth + 1 under ACCEPT with the sibling's ordinal as index, then under TOKEN.

        Returns:
            The accepted paths and the token after each of them.
        """
        children = children_table(tree)
        everyone = torch.arange(tree.num_nodes.shape[0], device=tree.num_nodes.device)
        nodes = torch.zeros_like(tree.num_nodes)
        rows, depth = everyone, 0
        while rows.numel():
            child = self._accepted(children[rows, nodes[rows]], rows, noise, depth)
            rows, child = rows[child >= 0], child[child >= 0]
            nodes[rows] = child
            depth += 1
        path, num_accepted = paths_to(tree.parents, nodes)
        tokens = target.top(everyone, nodes)
        if tokens is None:
            key = NoiseKey(everyone, num_accepted + 1, Stream.TOKEN)
            tokens = noise.choose(target.probs(everyone, nodes), key)
        return VerifyResult(path, num_accepted, tokens)

    def _accepted(self, siblings: Tensor, rows: Tensor, noise: Noise, depth: int) -> Tensor:
        """Return [L] int64, of siblings [L, C] (-1 = none) the first accepted one of each row, or -1."""
        accepted = torch.full_like(rows, -1)
        for ordinal in range(siblings.shape[1]):
            tried = ((siblings[:, ordinal] >= 0) & (accepted < 0)).nonzero()[:, 0]
            if not tried.numel():
                break
            rate = torch.full(tried.shape, self.rate, dtype=torch.float64, device=rows.device)
            passed = noise.accept(rate, torch.ones_like(rate), NoiseKey(rows[tried], depth + 1, Stream.ACCEPT, ordinal))
            accepted[tried[passed]] = siblings[tried[passed], ordinal]
        return accepted
