"""A short form of the soak: `specdec bench serve --duration 1800` at overload with aborts is the long one.

20 seconds of real time, not a minute: of the tiny model, which does more steps in them than the built-in one in half an
hour. Memory that creeps up with time and not with steps is for the long one to find.
"""

from __future__ import annotations

import itertools

from specdec import Engine
from specdec.eval.load import LoadConfig
from specdec.eval.serve import serve
from tests.decoding import prompts
from tests.models.architectures import model_of, named
from tests.tiny_chat_model import tiny_tokenizer

_SECONDS = 20.0
_MIB = 2**20


def test_soak_at_overload_with_aborts() -> None:
    """More comes than can be answered, callers go away, KV runs out: memory stays flat, no block is lost."""
    engine = Engine(
        model_of(named("llama")),
        tokenizer=tiny_tokenizer(),
        drafter="ngram",
        max_waiting=8,
        max_batch_size=6,
        prefill_chunk_tokens=32,
        kv_memory_bytes=160 * 512,
        prefix_caching=True,
    )
    some = prompts(*range(3, 60, 4))
    some += [[*long, *short] for long, short in itertools.product(some[-2:], some[:3])]
    load = LoadConfig(rate=400.0, duration_s=_SECONDS, max_new_tokens=30, abort_share=0.3, temperature=0.8)
    result = serve(engine, some, load)
    assert result["num_arrived"] > 1.5 * (result["num_complete"] + result["num_aborted"]), "no overload"
    assert result["refused"].keys() == {"QueueFullError"}
    for happened in ("num_complete", "num_aborted", "num_preemptions", "num_cached_tokens"):
        assert result[happened] > 0, happened
    assert result["num_failed"] == 0
    assert (result["fault"], result["kv"]["num_left"], result["kv"]["num_left_drafter"]) == (None, 0, 0)
    rss = result["rss_bytes"]
    assert rss["end"] - rss["middle"] < 8 * _MIB, rss
    assert rss["end"] - rss["start"] < 32 * _MIB, rss
    core = engine.llm.engine
    assert not engine.has_unfinished
    assert not core._requests
