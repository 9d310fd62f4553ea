"""Fault 27: acceptance of a scripted run on a model whose every answer, loops included, is known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from transformers import LlamaForCausalLM

from specdec import LLM, ConfigError
from specdec.eval import acceptance
from specdec.eval.answers import Answer, Step, answer, summarise
from specdec.eval.prompts import stratify
from specdec.eval.ratios import micro_interval
from tests.tiny_chat_model import save_tiny_chat_model

EOS = 0
ROWS = [
    {"question_id": 7, "category": "loop", "prompt": "xxA"},
    {"question_id": 8, "category": "free", "prompt": "yB"},
    {"question_id": 9, "category": "long", "prompt": "z" * 30},
    {"question_id": 10, "category": "free", "prompt": "C"},
]


def save_known_model(folder: Path) -> Path:
    """Write a model whose next token depends on the last one only.

    After A it goes round nine tokens, after B through forty, and after C through five tokens to EOS.
    """
    save_tiny_chat_model(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    ids = LLM(str(folder)).tokenizer("ABC").input_ids
    used = {EOS, *ids}
    spare = [t for t in range(2, size) if t not in used]
    rings = [[ids[0], *spare[:8]], [ids[1], *spare[8:47]], [ids[2], *spare[47:52], EOS]]
    after = list(range(size))
    for ring in rings:
        for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
            after[here] = there
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.lm_head.weight[torch.tensor(after)] = 8 * rows
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_known_model(tmp_path_factory.mktemp("known"))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


def config(known: Path, *overrides: str) -> Any:
    target = [f"target.name={known}", "target.dtype=float64", "max_new_tokens=30"]
    prompts = ["prompts=jsonl", f"prompts.path={known}/prompts.jsonl", "prompts.chat=false"]
    drafter = ["drafter=scripted", "drafter.options.accept_counts=[2,0,1]"]
    if any(o.startswith("drafter=") for o in overrides):
        drafter = []
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("acceptance", [*target, *prompts, *drafter, "prompts.max_prompt_tokens=20", *overrides])


@pytest.fixture(scope="module")
def result(known: Path) -> dict[str, Any]:
    return acceptance.measure(config(known, "batch_size=2"))


def counts(view: dict[str, Any]) -> tuple[int, int, int, int]:
    return tuple(view[f"num_{name}"] for name in ("steps", "draft_tokens", "accepted_tokens", "emitted_tokens"))  # type: ignore[return-value]


def test_fault_27_every_number_is_known(result: dict[str, Any]) -> None:
    # A and B: 29 tokens after prefill's as (3 + 1 + 2) x 4 + 3 + 1 + 1. Of the last two steps one may draft a single
    # token and the other none: what is drafted is never more than what may be emitted.
    # C: 3 + 1, then EOS is the accepted draft token, so no next token counts: 5 in 3 steps.
    # A repeats itself at token 9 = prefill's, 3, 1, 2 and two of the three tokens of step 4.
    loop, free = result["categories"]["loop"], result["categories"]["free"]
    assert set(result["categories"]) == {"loop", "free"}
    assert (loop["num_prompts"], loop["num_loops"], free["num_prompts"], free["num_loops"]) == (1, 1, 2, 0)
    assert counts(loop["all"]) == (15, 53, 14, 29)
    assert counts(loop["cut"]) == (4, 16, 5, 8)
    assert counts(loop["no_loops"]) == (0, 0, 0, 0)
    assert loop["no_loops"]["acceptance_length"] is None
    for view in ("cut", "all", "no_loops"):
        assert counts(free[view]) == (15 + 3, 53 + 12, 14 + 3, 29 + 5)
    total = result["total"]
    assert counts(total["cut"]) == (22, 81, 22, 42)
    assert total["cut"]["acceptance_length"] == pytest.approx(42 / 22)
    assert total["all"]["acceptance_length"] == pytest.approx(63 / 33)
    assert total["no_loops"]["acceptance_length"] == pytest.approx(34 / 18)
    assert total["cut"]["acceptance_rate"] == pytest.approx(22 / 81)
    # Accepted at depth 1 in 3 + 9 + 2 steps of 22, at depth 2 in 2 + 5 + 1; one of the 22 steps drafted nothing.
    assert total["cut"]["acceptance_at_unconditional"] == pytest.approx([14 / 22, 8 / 22, 0, 0])
    assert total["cut"]["acceptance_at_conditional"] == [pytest.approx(14 / 21), pytest.approx(8 / 14), 0, None]
    # Resampled, three answers can be all A (2) or all C (5 / 3).
    low, high = total["cut"]["acceptance_length_interval"]
    assert 5 / 3 <= low < 42 / 22 < high <= 2
    assert loop["cut"]["acceptance_length_interval"] is None  # one prompt says nothing about others


def test_answers_prompts_and_what_was_left_out_are_named(result: dict[str, Any]) -> None:
    assert [(a["name"], a["cut"], a["num_tokens"], a["finish_reason"]) for a in result["answers"]] == [
        ("7", 9, 30, "length"),
        ("8", None, 30, "length"),
        ("10", None, 6, "stop"),
    ]
    assert result["left_out"] == [{"name": "9", "category": "long", "num_tokens": 30, "num_words": 1}]
    assert (result["drafter"], result["verifier"], result["max_draft_tokens"]) == ("scripted", "match", 4)
    assert result["provenance"]["versions"]["torch"] == torch.__version__


def test_tables_and_check(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(result))
    assert result["check"] == {"equal": 3, "of": 3, "parted": []}
    assert acceptance.show(result)
    shown = capsys.readouterr().out
    assert "left out for their length: 1 of long (9)" in shown
    assert "3 of 3 answers have the undrafted run's ids" in shown


def test_check_finds_what_is_not_the_targets(known: Path) -> None:
    result = acceptance.measure(config(known, "verifier=synthetic", "drafter=random"))
    assert result["check"]["equal"] < 3
    assert not any(d["is_near_tie"] for d in result["check"]["parted"])
    assert acceptance.show(result)  # a lossy rule may
    assert not acceptance.show({**result, "lossless": True})


def test_sampled_runs_and_draft_length(known: Path) -> None:
    sampled = ["temperature=1.0", "seed=3", "verifier=rejection", "engine.max_draft_tokens=2", "prompts.limit=1"]
    result = acceptance.measure(config(known, "drafter=random", *sampled))
    assert (result["check"], result["verifier"], result["max_draft_tokens"]) == (None, "rejection", 2)
    assert result["total"]["num_prompts"] == 1
    assert result["total"]["cut"]["acceptance_length"] >= 1
    assert acceptance.show(result)


def test_the_callers_trace_goes_on(known: Path) -> None:
    class Steps:
        num = 0

        def record(self, event: Any) -> None:
            self.num += 1

    llm = LLM(str(known))
    llm.engine.trace = trace = Steps()
    (only,) = answer(llm, 5, [[4, 5]], max_new_tokens=3)
    assert (only.prompt, len(only.steps), trace.num) == (5, 2, 3)
    assert llm.engine.trace is trace


def test_cut_at_every_token() -> None:
    # prefill's token, then 3 = 2 drafted + next, then 2 of 2 drafted before a stop
    whole = Answer(0, list(range(6)), "stop", [Step(4, 4, 2, 3), Step(2, 2, 2, 2)], None)
    expected = {1: (0, 0, 0), 2: (1, 1, 1), 3: (1, 2, 2), 4: (1, 2, 3), 5: (2, 3, 4), 6: (2, 4, 5)}
    for num_tokens, (steps, accepted, emitted) in expected.items():
        stats = whole.counted(num_tokens)
        assert (stats.num_steps, stats.num_accepted_tokens, stats.num_emitted_tokens) == (steps, accepted, emitted)
    assert whole.counted() == whole.counted(6)


def test_answers_without_decode_steps() -> None:
    found = summarise([Answer(0, [1], "stop", [], None)])
    assert found["cut"]["acceptance_length"] is None
    assert found["cut"]["acceptance_length_interval"] is None


def test_a_limit_is_dealt_to_the_categories() -> None:
    categories = [*"aaaaaaaa", *"bb", *"cccc"]
    assert stratify(categories, 3) == [0, 8, 10]
    assert stratify(categories, 9) == [0, 2, 4, 6, 8, 9, 10, 11, 12]  # a: 4 of 8, b: both, c: 3 of 4
    assert stratify(categories, None) == stratify(categories, 99) == list(range(14))
    with pytest.raises(ConfigError, match="limit=0"):
        stratify(categories, 0)


def test_micro_interval_resamples_pairs() -> None:
    assert micro_interval([(4.0, 2.0)] * 5) == (2.0, 2.0)
    low, high = micro_interval([(1.0, 1.0), (30.0, 10.0)])
    assert (low, high) == (1.0, 3.0)


def test_spec_bench_reports_mt_bench_as_one(known: Path, tmp_path: Path) -> None:
    rows = [{"category": c, "prompt": "abc"} for c in ("writing", "stem", "qa")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = config(known, f"prompts.path={tmp_path}/p.jsonl")
    chosen, _ = acceptance._choose(LLM(str(known)), wanted)
    assert [(p.name, p.category) for p, _ in chosen] == [("0", "mt_bench"), ("1", "mt_bench"), ("2", "qa")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts.max_prompt_tokens=0", "max_prompt_tokens=0"),
        ("prompts.max_prompt_tokens=null", "max_prompt_tokens=None"),
        ("batch_size=0", "batch_size=0"),
        ("max_new_tokens=1", "max_new_tokens=1"),
        ("prompts.limit=0", "limit=0"),
        ("prompts.max_words=0", "no prompt of at most 20 tokens and 0 words in 4 rows"),
    ],
)
def test_bad_settings_are_refused(known: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        acceptance.measure(config(known, override))
