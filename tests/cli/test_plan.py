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
from tests.cli.running import as_json, refused, run
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
        "fits most: 25 requests of 4,096 tokens",
        "TTFT at least 58.16 ms: prefill of 4,096 tokens is compute-bound",
        "TPOT at least 14.20 ms: decode of 16 after 4,096 tokens is memory-bound",
        "pays: 6 draft tokens, 2.45x over no drafting",
        "breaks even at acceptance 0.04",
        "assumed: floors: the vendor's peak rates",
    ):
        assert text in words, text
    tables = [line for line in result.stdout.splitlines() if ": " not in line and "; " not in line]
    assert max(map(len, tables)) <= 110


def test_json_is_the_plan(llama: str) -> None:
    found = as_json(run("plan", llama, *ISSUE, "--json"))
    load = Workload(context=4096, batch=16, dtype="fp16", drafter="eagle3")
    expected = make_plan(read_model(llama), find_device("h100"), load).to_dict()
    assert found == json.loads(json.dumps(expected))


def test_what_does_not_fit_is_said(llama: str) -> None:
    words = " ".join(run("plan", llama, "--device", "t4", "--context", "4096", "--batch", "8").stdout.split())
    assert "does not fit: by memory alone 3 such devices are needed" in words
    assert "warning: it does not fit: " in words


def test_no_drafter_no_table_of_drafts(llama: str) -> None:
    assert "Drafter" not in run("plan", llama, "--device", "h100").stdout


def test_drafting_that_does_not_pay(llama: str) -> None:
    words = " ".join(
        run("plan", llama, "--device", "h100", "--drafter", "ngram", "--acceptance", "0", "--batch", "2").stdout.split()
    )
    assert "does not pay: best is not to draft" in words
    assert "pays at no batch size" in words


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
    own = ("--bandwidth", "3350", "--flops", "989.4", "--memory", "80")
    same = [as_json(run("plan", llama, *device, "--json")) for device in (own, ("--device", "h100"))]
    assert same[0]["decode"] == same[1]["decode"]
    faster = as_json(run("plan", llama, "--device", "h100", "--bandwidth", "6700", "--json"))
    assert faster["decode"]["tpot_floor_s"] == pytest.approx(same[0]["decode"]["tpot_floor_s"] / 2)
    assert "--bandwidth, --flops is missing" in refused(run("plan", llama, "--memory", "80"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h10"), "did you mean 'h100'? available: this, h200, h100"),
        (("--device", "t4", "--dtype", "bf16"), "has no dense rate in bf16"),
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
