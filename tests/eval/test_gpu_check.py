"""The script for CUDA machines, tried on the CPU: its checks pass, can fail, and end in time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from specdec import ConfigError
from specdec.eval import gpu_check, gpu_exactness
from specdec.eval.gpu_rig import Rig
from specdec.eval.gpu_sections import ABSENT, FAILED, MEASURED, NOT_RUN, PASSED, Clock, Finding, NotHere, run_section
from specdec.kv.flash import AttentionChoice, FlashBackend
from specdec.models import build as building
from tests.kv.flash_emulation import Emulated, flash_attn_varlen_func

SMALL = ("device=cpu", "max_new_tokens=6", "half_dtypes=[bfloat16]", "drafters=[none,token_recycling,eagle3]")
TIMED = ("timings=true", "rows=[1,2]", "context_tokens=16", "prefill_tokens=40", "batch_sizes=[1,2]")


def config(*overrides: str) -> Any:
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose("gpu_check", [*SMALL, *overrides])


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {f"{o['section']}: {o['name']}": o["verdict"] for o in result["outcomes"]}


def test_the_script_on_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    result = gpu_check.measure(config(*TIMED))
    json.dumps(result)
    found = verdicts(result)
    timings = {name for name in found if name.startswith("timings")}
    absent = {name for name, verdict in found.items() if verdict == ABSENT}
    assert all("eagle3" in name or "flash-attn" in name or "attention=auto" in name for name in absent)
    assert {found[name] for name in timings - absent} == {MEASURED}
    assert {found[name] for name in found.keys() - timings - absent} == {PASSED}
    assert {"float32: none", "float32: preemption", "half: token_recycling in bfloat16", "kv: KV in int4"} <= set(found)
    assert {"timings: t(M), attention=sdpa", "timings: decode, ngram, batch 2", "timings: decode, KV int8"} <= set(
        found
    )
    rows = next(o["values"]["seconds_by_rows"] for o in result["outcomes"] if o["name"] == "t(M), attention=sdpa")
    assert set(rows) == {"1", "2"} and all(s > 0 for s in rows.values())
    assert gpu_check.show(result)
    out = capsys.readouterr().out
    assert "says nothing of a GPU" in out and "verdict: good" in out
    assert "attention in bfloat16: SDPA" in out


def test_time_that_is_over_is_not_good() -> None:
    result = gpu_check.measure(config("limit_s=0", "large=null"))
    assert set(verdicts(result).values()) == {NOT_RUN}
    assert not gpu_check.show(result)


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
        (outcome,) = run_section("attention", gpu_exactness.attention_checks(rig), 60, Clock(60), print)
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
