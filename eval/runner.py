"""The one runner: every variant on every batch of cases, in turn, each sample written before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specdec.eval.cases import Cases
from specdec.eval.records import End, RecordWriter, RequestRecord, Sample
from specdec.eval.schedule import Turn, turns
from specdec.eval.variants import Variant

_WARM_UP_TOKENS = 16


class Run:
    """A point's timed part, from where an earlier session stopped.

    Args:
        variants: in the order of the header.
        cases: the prompts.
        batch_size: prompts per call.
        max_new_tokens: of an answer.
        repeats: of every batch.
        earlier: samples of a session that was killed.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        cases: Cases,
        *,
        batch_size: int,
        max_new_tokens: int,
        repeats: int,
        earlier: Sequence[Sample] = (),
    ) -> None:
        self._variants = {variant.info.name: variant for variant in variants}
        self._cases, self._max_new_tokens = cases, max_new_tokens
        self._batches = cases.batches(batch_size)
        names = [[cases.cases[i].name for i in batch] for batch in self._batches]
        self._turns = list(turns(list(self._variants), names, repeats))
        self._done = {(s.variant, s.repeat, s.batch) for s in earlier}
        self._inside_s = sum(s.total_s for s in earlier)
        self._before_s = max((s.start_s + s.total_s for s in earlier), default=0.0)  # the clock goes on from there
        wanted = {(t.variant, t.repeat) for t in self._turns if not self._is_done(t)}
        self._learned = {
            (name, repeat) for name, repeat in wanted if self._variants[name].remembers
        }  # whose earlier answers must be given again: what they taught is gone

    @property
    def num_samples(self) -> int:
        return len(self._turns)

    def _is_done(self, turn: Turn) -> bool:
        return (turn.variant, turn.repeat, turn.batch) in self._done

    def warm_up(self) -> None:
        """Run every variant once, uncounted."""
        for variant in self._variants.values():
            self._run(variant, 0, min(_WARM_UP_TOKENS, self._max_new_tokens))

    def measure(self, writer: RecordWriter, setup_s: float, advance: Callable[[], None]) -> None:
        """Run what is not done yet and write it, then the end of the records.

        What a variant learned from answers is forgotten before each repeat: the next ones are to the same prompts.

        Args:
            writer: of the point's records.
            setup_s: what came before.
            advance: called after each sample, those done before included.
        """
        begin, repeat = time.perf_counter(), -1
        for turn in self._turns:
            if turn.repeat != repeat:
                repeat = turn.repeat
                for variant in self._variants.values():
                    variant.reset()
            variant = self._variants[turn.variant]
            if not self._is_done(turn):
                sample = self._sample(variant, turn, begin)
                self._inside_s += sample.total_s
                writer.write(sample)
            elif (turn.variant, turn.repeat) in self._learned:
                self._run(variant, turn.batch, self._max_new_tokens)
            advance()
        wall = time.perf_counter() - begin + self._before_s
        writer.write(End(self.num_samples, wall, wall - self._inside_s, setup_s))

    def _sample(self, variant: Variant, turn: Turn, begin: float) -> Sample:
        start = time.perf_counter() - begin + self._before_s
        requests = self._run(variant, turn.batch, self._max_new_tokens)
        return Sample(turn.variant, turn.batch, turn.repeat, turn.place, start, requests)

    def _run(self, variant: Variant, batch: int, max_new_tokens: int) -> list[RequestRecord]:
        members = self._batches[batch]
        return variant.run(members, [self._cases.token_ids[i] for i in members], max_new_tokens)
