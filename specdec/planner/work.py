"""The FLOPs and bytes of a model's forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.planner.kv import KvStorage
from specdec.planner.model import PlannedModel
from specdec.planner.roofline import Part, Phase, Rates
from specdec.planner.weights import PARTS


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model in a number format, on a device."""

    model: PlannedModel
    weight_bytes: float  # of one weight that is not quantised
    kv: KvStorage
    rates: Rates
    experts_differ: bool = False  # False: all rows choose the same experts, which is the least that can be read

    def expected(self) -> ModelWork:
        """Return the same with rows that choose experts evenly and independently: an estimate, no floor."""
        return replace(self, experts_differ=True)

    def experts_read(self, rows: int) -> float:
        """Return the share of routed experts that `rows` rows choose.

        At least those of one row, k of E. If each row chooses evenly and on its own, each expert is left out by a row
        with probability 1 - k/E.
        """
        experts = self.model.shape.experts
        if experts is None:
            return 0.0
        share = experts.chosen / experts.num
        return 1 - (1 - share) ** rows if self.experts_differ else share

    def decode(self, batch: int, context: int, rows: int = 1) -> Phase:
        """Return a step of `batch` requests after `context` tokens, each of `rows` rows: last token and drafts."""
        kv = self.kv
        attention = Part(
            "attention",
            batch * kv.flops(context, rows),
            batch * (kv.bytes_read(context) + rows * kv.bytes_per_token),
        )
        total = batch * rows
        return Phase((*self._linear([(total, 1)], logit_rows=total, logit_forwards=1), attention), self.rates)

    def prefill(self, num_tokens: int, chunk_tokens: int, batch: int = 1) -> Phase:
        """Return the prefill of `batch` prompts whose rows are packed into chunks, one forward each.

        Each forward reads the weights once. Each prompt's chunks read the keys and values of those before them; how
        prompts lie in chunks is not known, so the cut that makes them read least is taken. Nothing is looped over:
        contexts may be as long as numbers are.
        """
        kv = self.kv
        full, rest = divmod(batch * num_tokens, chunk_tokens)
        forwards = [(chunk_tokens, full), (rest, 1 if rest else 0)]
        attention = Part(
            "attention",
            batch * kv.prefill_flops(num_tokens, chunk_tokens),
            batch * (kv.bytes_read_again(num_tokens, chunk_tokens) + num_tokens * kv.bytes_per_token),
        )
        ending = min(batch, full + (rest > 0))  # forwards in which some prompt ends, whose last row has logits
        return Phase((*self._linear(forwards, logit_rows=batch, logit_forwards=ending), attention), self.rates)

    def _linear(self, forwards: list[tuple[int, int]], logit_rows: int, logit_forwards: int) -> list[Part]:
        """Return what is multiplied with weights: each matrix is read once by each forward, for all of its rows.

        Args:
            forwards: (rows, how many forwards of so many).
            logit_rows: that the output matrix multiplies, over all of them.
            logit_forwards: that have such rows.
        """
        weights, shape = self.model.weights, self.model.shape
        rows = sum(r * count for r, count in forwards)
        looked_up = sum(min(r * shape.hidden_size, weights.embedding) * count for r, count in forwards)
        dense, experts, embedding = (weights.bytes_each(part, self.weight_bytes) for part in PARTS[:3])
        read = weights.dense * sum(count for _, count in forwards) * dense + looked_up * embedding
        parts = [Part("dense layers", 2 * weights.dense * rows, read)]
        if weights.experts:
            routed = 2 * weights.experts * self.model.chosen_share * rows
            shares = sum(self.experts_read(r) * count for r, count in forwards)
            parts.append(Part("experts", routed, weights.experts * shares * experts))
        matrix = weights.output_matrix(shape)
        num_bytes = matrix * logit_forwards * weights.output_bytes_each(self.weight_bytes)
        parts.append(Part("output matrix", 2 * matrix * logit_rows, num_bytes))
        return parts
