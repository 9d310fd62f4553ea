"""An engine that is reset knows nothing of past requests."""

from __future__ import annotations

import pytest

from specdec.errors import InputError
from tests.decoding import add, drain, engine_of, private_runner, prompts
from tests.models.architectures import model_of, named


def test_reset_forgets_what_was_learned_and_needs_an_idle_engine() -> None:
    runner = private_runner(model_of(named("llama")))
    runner.cache.prefix_caching = True
    engine = engine_of(None, "suffix", {"share": True}, runner=runner, max_draft_tokens=8)

    def run(prompt: list[int]) -> tuple[int, int]:
        """Return how many steps it took, and how much of the prompt was found."""
        request = add(engine, prompt, 24)
        drain(engine)
        engine.forget(request.request_id)
        return request.stats.num_steps, request.stats.num_cached_tokens

    prompt = prompts(40)[0]
    first, again = run(prompt), run(prompt)
    assert again[0] < first[0]
    assert again[1] > first[1] == 0
    engine.reset()
    assert run(prompt) == first
    add(engine, prompt, 4)
    with pytest.raises(InputError, match="1 requests are unfinished"):
        engine.reset()
