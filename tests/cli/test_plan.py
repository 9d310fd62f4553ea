"""`specdec plan`: what it prints, what it refuses, and that it does without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.planner import find_device, make_plan, read_model
from specdec.planner.plan import Workload
from tests.cli.running import as_json, refused, run, terminal, without_colours
from tests.planner import configs


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "llama-2-7b").mkdir()
    (tmp_path / "llama-2-7b" / "config.json").write_text(json.dumps(configs.LLAMA2_7B))
    return str(tmp_path / "llama-2-7b")


ISSUE = ("--device", "h100", "--context", "4096", "--batch", "16", "--dtype", "fp16", "--drafter", "eagle3")


def test_it_says_what_fits_what_bounds_and_what_pays(llama: str) -> None:
    result = run("plan", llama, *ISSUE, "--acceptance", "0.7")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for text in (
        "6.74 billion weights (llama, MHA, 32 layers",
        "balanced at 295 FLOP/byte",
        "512 KiB per token, 2 GiB per request",
        "most: 25 requests of 4,096 tokens",
        "Prefill of 4,096 tokens TFLOP GB moved FLOP/byte bound by at least, ms",
        "Decode of 16 after 4,096 tokens GFLOP GB moved FLOP/byte bound by at least, ms",
        "the last of 16 that come together waits 929.0 ms",
        "it breaks even at acceptance 0.04",
        "it pays at every batch from 1 to 25 (as many as fit) after 4,096 tokens",
        "assumed: floors: the vendor's peak rates",
    ):
        assert text in words, text
    assert result.stdout.splitlines()[:3] == [
        "fits: 49.9 of 72.0 GB usable",
        "TTFT at least 58.06 ms (compute-bound), TPOT at least 14.20 ms (memory-bound)",
        "drafting pays: 6 draft tokens, 2.48x at acceptance 0.7 and batch 16",
    ]
    tables = [line for line in result.stdout.splitlines() if ": " not in line and "; " not in line]
    assert max(map(len, tables)) <= 80
    assert "reading" not in result.stderr
    assert result.stdout.count("drafter's keys and values") == 1


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_verdict_is_three_lines_of_a_terminal(llama: str, columns: str) -> None:
    with terminal("plan", llama, *ISSUE, COLUMNS=columns) as shown:
        lines = without_colours(shown.read_until(None)).splitlines()
    assert [line.split(" ")[0] for line in lines[:3]] == ["fits:", "TTFT", "drafting"]
    assert not lines[3].strip()
    assert max(map(len, lines)) <= int(columns)


def test_one_unit_per_column(llama: str) -> None:
    lines = run("plan", llama, *ISSUE).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("draft tokens"))
    assert lines[start].split() == [
        "draft",
        "tokens",
        "tokens/step",
        "verify,",
        "ms",
        "draft,",
        "ms",
        "TPOT,",
        "ms",
        "speedup",
    ]
    for line in lines[start + 1 : start + 8]:
        assert not set(line) - set("0123456789.,x ")


def test_a_drafter_without_memory_has_no_rows_of_memory(llama: str) -> None:
    assert "drafter's" not in run("plan", llama, "--device", "h100", "--drafter", "ngram").stdout


def test_json_is_the_plan(llama: str) -> None:
    found = as_json(run("plan", llama, *ISSUE, "--json"))
    load = Workload(context=4096, batch=16, dtype="fp16", drafter="eagle3")
    expected = make_plan(read_model(llama), find_device("h100"), load).to_dict()
    assert found == json.loads(json.dumps(expected))


def test_what_does_not_fit_is_said(llama: str) -> None:
    """Once, and without numbers of requests or tokens that are none."""
    for device, batch, words in (
        ("t4", "8", "not one request of 4,096 tokens fits; most: 8 of 209 tokens"),
        ("a10", "8", "most: 3 requests of 4,096 tokens, or 8 of 1,925 tokens"),
        ("l4", "100000", "100,000 requests do not fit however short; most: 3 requests of 4,096 tokens"),
    ):
        result = run("plan", llama, "--device", device, "--context", "4096", "--batch", batch)
        shown = " ".join(result.stdout.split())
        assert shown.startswith("does not fit: "), device
        assert "such devices TTFT at least" in shown
        assert shown.count("does not fit") == 1
        assert words in shown
    result = run("plan", llama, "--bandwidth", "100", "--flops", "10", "--memory", "8", "--drafter", "ngram")
    words = " ".join(result.stdout.split())
    assert "not one request fits, however short" in words
    assert "1 to 4,096 (no larger ones were tried)" in words


def test_no_drafter_no_table_of_drafts(llama: str) -> None:
    assert "Drafter" not in run("plan", llama, "--device", "h100").stdout


def test_drafting_that_does_not_pay(llama: str) -> None:
    words = " ".join(
        run("plan", llama, "--device", "h100", "--drafter", "ngram", "--acceptance", "0", "--batch", "2").stdout.split()
    )
    assert "drafting does not pay at acceptance 0 and batch 2" in words
    assert "it pays at no batch from 1 to 27 (as many as fit)" in words


def test_a_model_may_be_the_drafter(llama: str, tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(configs.LLAMA32_1B))
    small = str(tmp_path / "small.json")
    one = as_json(run("plan", llama, *ISSUE[:-1], small, "--json"))
    other = as_json(run("plan", llama, *ISSUE[:-1], "draft_model", "--drafter-option", f"model={small}", "--json"))
    assert one["speculation"] == other["speculation"]
    assert any("another vocabulary" in text for text in one["assumptions"])


def test_windows_and_latent_attention_show_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.MISTRAL_7B))
    words = " ".join(run("plan", str(tmp_path), "--device", "h100", "--context", "32768").stdout.split())
    assert "4 GiB as specdec stores them, 512 MiB with windows cut" in words


def test_own_figures(llama: str) -> None:
    own = ("--bandwidth", "3350", "--flops", "989.5", "--memory", "80")
    same = [as_json(run("plan", llama, *device, "--json")) for device in (own, ("--device", "h100"))]
    assert same[0]["decode"] == same[1]["decode"]
    faster = as_json(run("plan", llama, "--device", "h100", "--bandwidth", "6700", "--json"))
    assert faster["decode"]["tpot_floor_s"] == pytest.approx(same[0]["decode"]["tpot_floor_s"] / 2)
    assert "--bandwidth, --flops is missing" in refused(run("plan", llama, "--memory", "80"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h10"), "did you mean 'h100'? available: this, h200, h100"),
        (("--device", ""), "unknown device ''"),
        (("--device", "t4", "--dtype", "bf16"), "has no dense rate in bf16"),
        (("--device", "t4", "--dtype", "bf16", "--bandwidth", "500"), "T4 has no dense rate in bf16; available: fp16"),
        (("--device", "h100", "--dtype", "int8"), "weights in fewer bits are not planned for"),
        (("--device", "h100", "--memory", "-1"), "memory of -1 GB (--memory); allowed: 0.000001 to"),
        (("--device", "h100", "--memory", "nan"), "memory of nan GB (--memory)"),
        (("--device", "h100", "--memory", "inf"), "memory of inf GB (--memory)"),
        (("--device", "h100", "--memory", "1e300"), "memory of 1e+300 GB (--memory)"),
        (("--device", "h100", "--bandwidth", "0"), "bandwidth of 0 GB/s (--bandwidth)"),
        (("--device", "h100", "--context", "1" + 20 * "0"), "allowed: a whole number from 1 to 1,000,000,000"),
        (("--device", "h100", "--drafter", ""), "unknown drafter ''"),
        (("--device", "h100", "--drafter", "eagel3", "--cost-ratio", "0.1"), "did you mean 'eagle3'?"),
        (("--device", "h100", "--drafter", "eagle3", "--drafter-option", "tree=1", "--cost-ratio", "0.1"), "'tree'"),
        (("--device", "h100", "--drafter", "draft_model", "--drafter-option", "model=5"), "model=5 is no name"),
        (("--device", "h100", "--cost-ratio", "nan"), "cost_ratio=nan"),
        (("--device", "h100", "--batch", "0"), "batch=0; allowed: a whole number from 1"),
        (("--device", "h100", "--acceptance", "1.5"), "acceptance=1.5; allowed: 0 to 1"),
        (("--device", "h100", "--context", "0"), "context=0"),
        (("--device", "h100", "--drafter", "egale3"), "did you mean 'eagle3'?"),
        (("--device", "h100", "--dtype", "fp8"), "weights in fewer bits are not planned for"),
    ],
    ids=lambda v: v.split(";")[0] if isinstance(v, str) else None,
)
def test_bad_input_is_one_line(llama: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(run("plan", llama, *arguments))


def test_bad_models(tmp_path: Path) -> None:
    assert "did you mean 'smollm2'?" in refused(run("plan", "smollm", "--device", "h100"))
    assert "the model has no name" in refused(run("plan", "", "--device", "h100"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    assert "recurrent state" in refused(run("plan", str(tmp_path), "--device", "h100"))
    missing = {name: value for name, value in configs.LLAMA2_7B.items() if name != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(missing))
    assert "has no hidden_size" in refused(run("plan", str(tmp_path), "--device", "h100"))


def test_this_machine_is_measured(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.planner import this_device

    asked: list[Any] = []
    monkeypatch.setattr(this_device, "matmul_flops_per_s", lambda dtype, place: asked.append(dtype) or 4e11)
    monkeypatch.setattr(this_device, "read_bandwidth_bytes_per_s", lambda place: 5e10)
    monkeypatch.setattr(this_device, "has_accelerator", lambda: False)
    found = as_json(run("plan", llama, "--json"))
    assert str(asked) == "[torch.float32]"  # what a CPU loads, not the checkpoint's
    assert (found["device"]["name"], found["device"]["measured"]) == ("this", True)
    assert found["device"]["flops_per_byte_balance"] == 8
    assert found["decode"]["tpot_floor_s"] == pytest.approx(found["decode"]["num_bytes"] / 5e10)
    assert any("the checkpoint is fp16" in text for text in found["warnings"])
    shown = " ".join(run("plan", llama, "--drafter", "self_int8").stdout.split())
    assert "drafting may pay (on a CPU less, or not): " in shown
    assert "warning: on CPUs a forward of a few rows costs more than these times say" in shown
    changed = as_json(run("plan", llama, "--device", "this", "--drafter", "self_int8", "--bandwidth", "100", "--json"))
    assert any("on CPUs a forward" in text for text in changed["warnings"])
    assert not any("runs self_int8 on CPUs only" in text for text in changed["warnings"])
    h100 = as_json(run("plan", llama, "--device", "h100", "--drafter", "self_int8", "--json"))
    assert any("runs self_int8 on CPUs only" in text for text in h100["warnings"])
    assert not any("on CPUs a forward" in text for text in h100["warnings"])


def test_a_setting_without_effect_warns(llama: str) -> None:
    words = " ".join(run("plan", llama, "--device", "h100", "--acceptance", "0.7").stdout.split())
    assert "warning: --acceptance has no effect without a drafter; give --drafter" in words


def test_experts_show_both_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.MIXTRAL_8X7B))
    words = " ".join(run("plan", str(tmp_path), "--device", "h200", "--batch", "8").stdout.split())
    assert words.count("if rows choose experts evenly") == 2


def test_machine_rates_are_real() -> None:
    import torch

    from specdec.models import machine

    assert 1e8 < machine.matmul_flops_per_s(torch.float32) < 1e15


def test_no_torch_for_a_plan(llama: str) -> None:
    code = (
        "import sys\nfrom specdec.cli import app, completion\n"
        "assert completion.devices('h1') == ['h100', 'h100-pcie', 'h100-sxm']\n"
        "assert completion.kv_dtypes('int') == ['int8', 'int4']\n"
        "assert completion.planned_dtypes('f') == ['fp32', 'fp16']\n"
        f"try:\n    app(['plan', {llama!r}, '--device', 'h100', '--drafter', 'self_int8'])\nexcept SystemExit as end:\n"
        "    assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_says_what_it_is() -> None:
    words = run("plan", "--help").stdout
    for text in ("--device", "--bandwidth", "--acceptance", "Times are floors"):
        assert text in words


def test_drafters_that_ship_for_a_built_in_model_are_planned_as_they_are() -> None:
    """As the drafters themselves take them: nothing has to be named."""
    found = as_json(run("plan", "smollm2", "--device", "l4", "--drafter", "draft_model", "--json"))
    named = as_json(run("plan", "smollm2", "--device", "l4", "--drafter", "smollm2-draft_model", "--json"))
    assert found["speculation"] == named["speculation"]
    assert found["memory"] == named["memory"]
