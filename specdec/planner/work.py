"""The FLOPs and bytes of a model's forwards."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.planner.kv import KvStorage
from specdec.planner.model import PlannedModel
from specdec.planner.roofline import Part, Phase, Rates, total


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model in a number format, on a device."""

    model: PlannedModel
    weight_bytes: float  # of one weight
    kv: KvStorage
    rates: Rates

    def experts_read(self, rows: int) -> float:
        """Return the share of routed experts that `rows` rows choose, if each chooses evenly and on its own.

        Each of E experts is left out by a row that chooses k with probability 1 - k/E.
        """
        experts = self.model.shape.experts
        return 0.0 if experts is None else 1 - (1 - experts.chosen / experts.num) ** rows

    def linear(self, rows: int, logit_rows: int) -> list[Part]:
        """Return what is multiplied with weights: each matrix is read once for all rows."""
        weights, shape = self.model.weights, self.model.shape
        looked_up = min(rows * shape.hidden_size, weights.embedding)
        parts = [Part("dense layers", 2 * weights.dense * rows, (weights.dense + looked_up) * self.weight_bytes)]
        if weights.experts:
            routed = 2 * weights.experts * self.model.chosen_share * rows
            parts.append(Part("experts", routed, weights.experts * self.experts_read(rows) * self.weight_bytes))
        if logit_rows:
            matrix = weights.output_matrix(shape)
            parts.append(Part("output matrix", 2 * matrix * logit_rows, matrix * self.weight_bytes))
        return parts

    def decode(self, batch: int, context: int, rows: int = 1) -> Phase:
        """Return a step of `batch` requests after `context` tokens, each of `rows` rows: last token and drafts."""
        kv = self.kv
        attention = Part(
            "attention",
            batch * kv.pairs(context, rows) * kv.flops_per_pair,
            batch * (kv.bytes_read(context) + rows * kv.bytes_per_token),
        )
        return Phase((*self.linear(batch * rows, batch * rows), attention), self.rates)

    def prefill(self, num_tokens: int, chunk_tokens: int) -> Phase:
        """Return one prompt, in chunks: each reads the weights once, and the keys and values of those before it."""
        kv, phases = self.kv, []
        for start in range(0, num_tokens, chunk_tokens):
            rows = min(chunk_tokens, num_tokens - start)
            is_last = start + rows == num_tokens
            attention = Part(
                "attention",
                kv.pairs(start, rows) * kv.flops_per_pair,
                kv.bytes_read(start) + rows * kv.bytes_per_token,
            )
            phases.append(Phase((*self.linear(rows, int(is_last)), attention), self.rates))
        return Phase(tuple(total(phases)), self.rates)
