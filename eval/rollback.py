"""What rollback and commit cost as the context grows: a benchmark of the KV cache.

python -m specdec.eval.rollback
"""

from __future__ import annotations

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from specdec.api import LLM
from specdec.interfaces import Segment

console = Console()
CONTEXTS = (128, 512, 1024, 2048, 4096)
_REQUEST_ID = -3
_ROUNDS = 200


def measure(llm: LLM, contexts: tuple[int, ...] = CONTEXTS, num_drafts: int = 4) -> list[dict[str, float]]:
    """Return, per context length, median microseconds of rejecting all drafts and of committing part of a chain.

    Each round opens a reservation, runs nothing, and rewinds or commits: what is timed is bookkeeping.
    """
    runner = llm.engine.target
    cache = runner.cache
    rows = []
    ids = torch.arange(512) % runner.vocab_size
    chain = torch.arange(num_drafts + 1)
    for context in contexts:
        cache.open(_REQUEST_ID, context + _ROUNDS * (num_drafts + 1) + 1)
        try:
            for start in range(0, context, 512):
                n = min(512, context - start)
                cache.reserve(_REQUEST_ID, n)
                runner.forward([Segment(_REQUEST_ID, ids[:n], None, torch.arange(1))])
                cache.commit(_REQUEST_ID, torch.arange(n))
            times: dict[str, list[float]] = {"rewind_us": [], "commit_us": []}
            segment = Segment(_REQUEST_ID, ids[: num_drafts + 1], None, chain[:1])
            for _ in range(_ROUNDS):
                cache.reserve(_REQUEST_ID, num_drafts + 1)
                cache.plan([segment])
                start_s = time.perf_counter()
                cache.rewind(_REQUEST_ID)
                times["rewind_us"].append(time.perf_counter() - start_s)
                cache.plan([segment])
                start_s = time.perf_counter()
                cache.commit(_REQUEST_ID, chain[:3])
                times["commit_us"].append(time.perf_counter() - start_s)
                cache.restore(_REQUEST_ID, context)
            rows.append({"context": context, **{k: 1e6 * statistics.median(v) for k, v in times.items()}})
        finally:
            cache.release(_REQUEST_ID)
    return rows


def main() -> None:
    """Measure on the built-in model and print."""
    table = Table(title="chain rollback and commit, median microseconds")
    for column in ("context tokens", "rewind", "commit of 3 of 5 rows"):
        table.add_column(column, justify="right")
    for row in measure(LLM("smollm2")):
        table.add_row(str(int(row["context"])), f"{row['rewind_us']:.2f}", f"{row['commit_us']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
