"""The one runner: every variant on every batch of cases, in turn, each sample written before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specdec.eval.cases import Cases
from specdec.eval.records import End, RecordWriter, Sample
from specdec.eval.schedule import Turn, turns
from specdec.eval.variants import Variant

Key = tuple[str, int, int]  # variant, batch, repeat
_WARM_UP_TOKENS = 16


def run_turns(
    variants: Sequence[Variant],
    cases: Cases,
    batch_size: int,
    max_new_tokens: int,
    repeats: int,
    writer: RecordWriter,
    done: dict[Key, float],
    advance: Callable[[], None],
) -> None:
    """Run what is not done yet and write it, then the end of the records.

    Every variant warms up first, uncounted. What a drafter learned from answers is forgotten before each repeat: the
    next ones are to the same prompts.

    Args:
        variants: in the order of the header.
        cases: the prompts.
        batch_size: prompts per call.
        max_new_tokens: of an answer.
        repeats: of every batch.
        writer: of the point's records.
        done: samples of an earlier session, with when they ended.
        advance: called after each sample, those done before included.
    """
    by_name = {variant.info.name: variant for variant in variants}
    batches = cases.batches(batch_size)
    before = max(done.values(), default=0.0)  # the clock goes on from there
    for variant in variants:
        prompts = [cases.token_ids[i] for i in batches[0]]
        variant.run(batches[0], prompts, min(_WARM_UP_TOKENS, max_new_tokens))
    begin, inside, repeat = time.perf_counter(), 0.0, -1
    for turn in turns(list(by_name), len(batches), repeats):
        if turn.repeat != repeat:
            repeat = turn.repeat
            for variant in variants:
                variant.reset()
        if (turn.variant, turn.batch, turn.repeat) not in done:
            sample = _sample(*(by_name[turn.variant], cases, batches[turn.batch], max_new_tokens, turn, begin - before))
            inside += sample.total_s
            writer.write(sample)
        advance()
    wall = time.perf_counter() - begin
    writer.write(End(len(by_name) * len(batches) * repeats, wall, wall - inside))


def _sample(
    variant: Variant, cases: Cases, batch: Sequence[int], max_new_tokens: int, turn: Turn, zero: float
) -> Sample:
    start = time.perf_counter()
    requests = variant.run(batch, [cases.token_ids[i] for i in batch], max_new_tokens)
    return Sample(turn.variant, turn.batch, turn.repeat, turn.place, start - zero, requests)
