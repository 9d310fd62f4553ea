"""The one runner: every variant on every batch of cases, in turn, each sample written before the next begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from specdec.eval.cases import Cases
from specdec.eval.records import Dropped, End, RecordWriter, RequestRecord, Sample
from specdec.eval.schedule import Turn, turns
from specdec.eval.variants import Variant

log = logging.getLogger("specdec")

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
        gave_up: names of the peers that it dropped: they are not run again.
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
        gave_up: Collection[str] = (),
    ) -> None:
        self._variants = {variant.info.name: variant for variant in variants}
        self._cases, self._max_new_tokens = cases, max_new_tokens
        self._batches = cases.batches(batch_size)
        names = [[cases.cases[i].name for i in batch] for batch in self._batches]
        self._turns = list(turns(list(self._variants), names, repeats))
        self._done = {(s.variant, s.repeat, s.batch) for s in earlier}
        self._inside_s = sum(s.total_s for s in earlier)
        self._num_samples = len(earlier)
        self._before_s = max((s.start_s + s.total_s for s in earlier), default=0.0)  # the clock goes on from there
        self._gave_up = set(gave_up)
        self._untold: list[Dropped] = []  # of these, whom the records do not name yet
        wanted = {(t.variant, t.repeat) for t in self._turns if not self._is_done(t)}
        self._learned = {
            (name, repeat) for name, repeat in wanted if self._variants[name].remembers
        }  # whose earlier answers must be given again: what they left in the engine is gone

    @property
    def num_turns(self) -> int:
        """How many samples there are in the end if no peer gives up."""
        return len(self._turns)

    def _is_done(self, turn: Turn) -> bool:
        return (turn.variant, turn.repeat, turn.batch) in self._done

    def warm_up(self) -> None:
        """Run every variant once, uncounted; a peer that fails already here is dropped."""
        for variant in self._variants.values():
            if variant.info.name not in self._gave_up:
                self._try(variant, 0, min(_WARM_UP_TOKENS, self._max_new_tokens))

    def measure(self, writer: RecordWriter, setup_s: float, advance: Callable[[], None]) -> None:
        """Run what is not done yet and write it, then the end of the records.

        What a variant learned from answers is forgotten before each repeat: the next ones are to the same prompts.

        Args:
            writer: of the point's records.
            setup_s: what came before.
            advance: called after each sample, those done before and those that a dropped peer no longer gives included.
        """
        begin, repeat = time.perf_counter(), -1
        self._tell(writer)
        for turn in self._turns:
            if turn.repeat != repeat:
                repeat = turn.repeat
                for variant in self._variants.values():
                    variant.reset()
            variant = self._variants[turn.variant]
            if self._is_done(turn):
                if (turn.variant, turn.repeat) in self._learned:
                    again_s = self._learn_again(variant, turn.batch)
                    begin, setup_s = begin + again_s, setup_s + again_s  # the clock of what is measured stands still
            elif turn.variant not in self._gave_up:
                self._sample(variant, turn, begin, writer)
            advance()
        wall = time.perf_counter() - begin + self._before_s
        writer.write(End(self._num_samples, wall, wall - self._inside_s, setup_s))

    def _learn_again(self, variant: Variant, batch: int) -> float:
        """Let a variant give a batch's answers again, uncounted; return the seconds that it took."""
        start = time.perf_counter()
        self._run(variant, batch, self._max_new_tokens)
        return time.perf_counter() - start

    def _sample(self, variant: Variant, turn: Turn, begin: float, writer: RecordWriter) -> None:
        """Write a variant's sample, or that it gave up."""
        start = time.perf_counter() - begin + self._before_s
        requests = self._try(variant, turn.batch, self._max_new_tokens)
        if requests is None:
            self._inside_s += time.perf_counter() - begin + self._before_s - start
            self._tell(writer)
            return
        sample = Sample(turn.variant, turn.batch, turn.repeat, turn.place, start, requests)
        self._inside_s += sample.total_s
        self._num_samples += 1
        writer.write(sample)

    def _try(self, variant: Variant, batch: int, max_new_tokens: int) -> list[RequestRecord] | None:
        """Return a variant's answers; None of a peer that failed, which is dropped.

        What an engine of ours raises is the point's failure, and so is want of memory, whoever asked for it last.
        """
        try:
            return self._run(variant, batch, max_new_tokens)
        except MemoryError:
            raise
        except Exception as error:  # whatever a library makes of it
            if variant.info.kind != "peer":
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = variant.info.name
        log.warning("%s gave up, the others go on: %s", name, reason)
        self._gave_up.add(name)
        self._untold.append(Dropped(name, reason))
        variant.close()  # what it holds, and perhaps still does, is nobody else's to bear
        return None

    def _tell(self, writer: RecordWriter) -> None:
        """Write who gave up since it was last told."""
        for dropped in self._untold:
            writer.write(dropped)
        self._untold.clear()

    def _run(self, variant: Variant, batch: int, max_new_tokens: int) -> list[RequestRecord]:
        members = self._batches[batch]
        return variant.run(members, [self._cases.token_ids[i] for i in members], max_new_tokens)
