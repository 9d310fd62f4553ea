"""The script for CUDA machines, tried on the CPU: its checks pass, can fail, and end in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import gpu_attention, gpu_check, gpu_exactness
from specdec.eval.gpu_rig import Rig
from specdec.eval.gpu_sections import (
    ABSENT,
    FAILED,
    MEASURED,
    NOT_RUN,
    NOT_TIMED,
    PASSED,
    Check,
    Clock,
    Finding,
    NotHere,
    run_section,
)
from specdec.eval.gpu_timings import timing_checks
from specdec.kv.cache import KVCache
from specdec.kv.flash import AttentionChoice, FlashBackend
from specdec.kv.plan import StepPlan
from specdec.models import build as building
from tests.kv.flash_emulation import Emulated, flash_attn_varlen_func

SMALL = ("device=cpu", "max_new_tokens=6", "half_dtypes=[bfloat16]", "drafters=[none,token_recycling,eagle3]")
TIMED = ("timings=true", "rows=[1,2]", "context_tokens=16", "prefill_tokens=40", "batch_sizes=[1,2]")


def config(*overrides: str) -> Any:
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("gpu_check", [*SMALL, *overrides])


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def without_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32_checks", "half_checks", "attention_checks", "kv_checks"):
        monkeypatch.setattr(gpu_check, name, lambda rig: iter([("it", lambda: Finding(True, "right"))]))


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {f"{o['section']}: {o['name']}": o["verdict"] for o in result["outcomes"]}


def test_the_script_on_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    result = gpu_check.measure(config(*TIMED))
    json.dumps(result)
    found = verdicts(result)
    timings = {name for name in found if name.startswith(("timings", "load"))}
    absent = {name for name, verdict in found.items() if verdict == ABSENT}
    assert all("eagle3" in name or "flash-attn" in name or "attention=auto" in name for name in absent)
    assert {found[name] for name in timings - absent} == {MEASURED}
    assert {found[name] for name in found.keys() - timings - absent} == {PASSED}
    assert {"float32: none", "float32: preemption", "half: token_recycling in bfloat16", "kv: KV in int4"} <= set(found)
    decoding = {"one by one", "batch 2", "batch 2, KV int8"}
    assert {"timings: t(M), attention=sdpa", *(f"timings: decode, none, {how}" for how in decoding)} <= set(found)
    rows = next(o["values"]["seconds_by_rows"] for o in result["outcomes"] if o["name"] == "t(M), attention=sdpa")
    assert set(rows) == {"1", "2"} and all(s > 0 for s in rows.values())
    assert gpu_check.show(result)
    out = capsys.readouterr().out
    assert "says nothing of a GPU" in out and "verdict: good" in out
    details = {f"{o['section']}: {o['name']}": o["detail"] for o in result["outcomes"]}
    assert details["load: attention in bfloat16"].startswith("SDPA")
    assert details["float32: preemption"].endswith("1 preemptions")


def test_time_that_is_over_is_not_good() -> None:
    result = gpu_check.measure(config("limit_s=0", "large=null"))
    assert set(verdicts(result).values()) == {NOT_RUN}
    assert not gpu_check.show(result)


def test_timings_that_were_not_taken_are_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_exactness(monkeypatch)
    monkeypatch.setitem(gpu_check._BUDGETS_S, "timings", -1)
    result = gpu_check.measure(config(*TIMED))
    timed = {o["verdict"] for o in result["outcomes"] if o["section"] == "timings"}
    assert timed == {NOT_TIMED}
    assert gpu_check.show(result)
    out = " ".join(capsys.readouterr().out.split())
    assert "do not count against the verdict" in out and "verdict: good" in out


class TestWhateverGoesWrongIsAFinding:
    def test_the_target_does_not_fit(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(gpu_check, "Rig", raising(torch.OutOfMemoryError("CUDA out of memory")))
        result = gpu_check.measure(config())
        json.dumps(result)
        assert verdicts(result) == {"load: the target": FAILED}
        assert not gpu_check.show(result)
        assert "CUDA out of memory" in capsys.readouterr().out

    def test_a_dtype_cannot_be_asked_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_check, "check", raising(RuntimeError("no kernel image")))
        without_exactness(monkeypatch)
        found = verdicts(gpu_check.measure(config()))
        assert found["load: attention in float32"] == found["load: attention in bfloat16"] == FAILED
        assert found["kv: it"] == PASSED  # the rest goes on

    def test_making_checks_fails(self) -> None:
        def checks() -> Iterator[Check]:
            yield "a", lambda: Finding(True, "right")
            raise ValueError("no texts")

        outcomes = run_section("s", checks(), 60, Clock(60), print)
        assert [(o.verdict, o.detail) for o in outcomes] == [(PASSED, "right"), (FAILED, "ValueError: no texts")]

    def run_large(self, monkeypatch: pytest.MonkeyPatch, free: float, rig: Callable[..., Any]) -> list[Any]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
        monkeypatch.setattr(gpu_check, "Rig", rig)
        found = []
        for name, checks in gpu_check.large_sections(config("large=random:8b", *TIMED), torch.bfloat16):
            found.append([(o.name, o.verdict) for o in run_section(name, checks, 60, Clock(60), print, NOT_TIMED)])
        return found

    def test_no_room_for_the_large_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.run_large(monkeypatch, 1e9, raising(AssertionError("it is not loaded")))
        assert found == [[("random:8b", ABSENT)]]

    def test_the_large_model_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.run_large(monkeypatch, 1e12, raising(KeyError("no such thing")))
        assert found == [[("random:8b", FAILED)]]

    def test_loading_the_large_model_takes_nothing_from_its_timings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slow(*_: Any) -> Rig:
            now[0] += 1000
            return Rig(config("drafters=[]", "rows=[1]", "context_tokens=8", "prefill_tokens=8", "batch_sizes=[]"))

        now = [0.0]
        monkeypatch.setattr("specdec.eval.gpu_sections.time.perf_counter", lambda: now[0])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1e12, 1e12))
        monkeypatch.setattr(gpu_check, "Rig", slow)
        found = [
            [o.verdict for o in run_section(name, checks, 30, Clock(3000), print, NOT_TIMED)]
            for name, checks in gpu_check.large_sections(config("large=random:8b"), torch.float32)
        ]
        assert found[0] == [MEASURED] and NOT_TIMED not in found[1]


def test_nothing_is_timed_twice() -> None:
    rig = Rig(config("batch_sizes=[1,2,8]", "drafters=[none,ngram]"))
    calls = [call for _, call in timing_checks(rig, torch.float32)]
    assert all(isinstance(call, partial) for call in calls)
    told = [(call.func.__name__, call.args[1:], tuple(call.keywords.items())) for call in calls]  # type: ignore[attr-defined]
    assert len(told) == len(set(told))


class TestACheckThatTriedNothingFails:
    def verdict(self, call: Callable[[], Finding]) -> str:
        (outcome,) = run_section("s", [("it", call)], 60, Clock(60), print)
        return outcome.verdict

    @pytest.fixture
    def rig(self) -> Rig:
        return Rig(config())

    def test_without_preemptions(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVCache, "usage", lambda cache: {"num_free": 0})  # so that nothing is taken
        assert self.verdict(partial(gpu_exactness._preempted, rig)) == FAILED

    def test_without_drafts(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = rig.llm
        monkeypatch.setattr(rig, "llm", lambda dtype, drafter="none", **k: whole(dtype, "none", **k))
        assert self.verdict(partial(gpu_exactness._greedy, rig, torch.float32, "ngram")) == FAILED
        assert self.verdict(partial(gpu_exactness._quantised, rig, "int8")) == FAILED


def test_half_precision_is_as_loading_gives_it() -> None:
    rig = Rig(config())
    half = rig.of(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    exact = rig.exact(torch.bfloat16).model
    assert all(torch.equal(a, b.float()) for a, b in zip(exact.parameters(), half.parameters(), strict=True))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device here.*device=cpu"):
        gpu_check.measure(config("device=cuda"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=tpu", "allowed: cuda, cpu"),
        ("large=random:7b", "random:8b"),
        ("half_dtypes=[float8]", "allowed: float16, bfloat16"),
        ("half_dtypes=[]", "float16, bfloat16 or both"),
        ("batch_sizes=[8,0]", "integers >= 1"),
        ("max_new_tokens=2", "integers >= 6"),
        ("timings=perhaps", "allowed: auto, true, false"),
        ("model=random:3b", "allowed: 'tiny', '1b', '8b'"),
    ],
)
def test_bad_options(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_check.measure(config(override))


class TestFlash:
    def verdict(self, backend: FlashBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
        def choose(device: Any, dtype: Any, wanted: str, block_tokens: Any) -> AttentionChoice:
            return AttentionChoice(backend if wanted == "auto" and dtype == torch.float16 else None, "")

        monkeypatch.setattr(building, "choose_attention", choose)
        rig = Rig(config("half_dtypes=[float16]"))
        (outcome,) = run_section("attention", gpu_attention.attention_checks(rig), 60, Clock(60), print)
        return outcome.verdict, outcome.detail

    def test_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict, detail = self.verdict(Emulated(), monkeypatch)
        assert verdict == PASSED, detail

    def test_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = Emulated()
        # Every row sees the two rows behind it.
        backend._function = lambda *a, **k: flash_attn_varlen_func(*a, **{**k, "causal": False, "window_size": (-1, 2)})
        verdict, detail = self.verdict(backend, monkeypatch)
        assert verdict == FAILED, detail

    def test_wrong_in_chains_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken(Emulated):
            def attend(self, plan: StepPlan, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
                out = super().attend(plan, q, *args, **options)
                for s in plan.segments:
                    if 1 < s.num_rows < min(s.kv_len, 10):  # chunks of a prompt have more
                        out[s.first_row : s.first_row + s.num_rows] *= 1.2
                return out

        verdict, detail = self.verdict(Broken(), monkeypatch)
        assert verdict == FAILED
        assert detail.startswith("chains too far off; undrafted: 60 rows")

    def test_chains_that_never_reach_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Shy(Emulated):
            def supports(self, plan: StepPlan, *args: Any, **options: Any) -> bool:
                chains = any(1 < s.num_rows < min(s.kv_len, 10) for s in plan.segments)
                return not chains and super().supports(plan, *args, **options)

        verdict, detail = self.verdict(Shy(), monkeypatch)
        assert verdict == FAILED
        assert detail.startswith("not every step with chains ran the kernel")

    def test_without_chains(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_attention.KnownAnswers, "_known", lambda self, request: [])
        verdict, detail = self.verdict(Emulated(), monkeypatch)
        assert verdict == FAILED
        assert detail.startswith("no chain was verified")


def test_a_section_goes_on_after_a_failure_and_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specdec.eval.gpu_sections.time.perf_counter", lambda: now[0])

    def fails() -> Finding:
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    def absent() -> Finding:
        raise NotHere("no such head")

    def slow() -> Finding:
        now[0] += 11
        return Finding(False, "wrong")

    checks = [("a", fails), ("b", absent), ("c", lambda: Finding(None, "1 ms")), ("d", slow), ("e", absent)]
    told: list[str] = []
    outcomes = run_section("s", checks, 10, Clock(100), told.append)
    assert [o.verdict for o in outcomes] == [FAILED, ABSENT, MEASURED, FAILED, NOT_RUN]
    assert outcomes[0].detail == "RuntimeError: CUDA error: an illegal memory access"
    assert outcomes[3].seconds == 11
    assert told == ["s: a", "s: b", "s: c", "s: d"]
