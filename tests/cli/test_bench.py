"""`specdec bench serve`: what it prints, what it takes, how it ends."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.bench import serve_command
from specdec.engine_config import EngineConfig
from specdec.eval.load import LoadConfig
from specdec.serving.engine import MAX_WAITING
from tests.cli.running import as_json, refused, run

QUICK = ("--rate", "100", "--num-requests", "6", "--max-new-tokens", "8")


def test_tables_and_plot(model: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = run("bench", "serve", "--model", model, *QUICK, "--drafter", "ngram", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    for word in ("prefill", "TTFT", "decode", "TPOT", "ITL", "goodput", "longest gap", "KV occupancy", "clean"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_and_prompts(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('one two one two\n{"prompt": "three"}\n{"messages": [{"role": "user", "content": "four"}]}\n')
    options = (
        "--prompts-file",
        str(prompts),
        "--seed",
        "3",
        "--abort-share",
        "0.5",
        "--kv-memory",
        "1MiB",
        "--kv-dtype",
        "int8",
    )
    options += ("--prefix-caching", "--prefill-chunk-tokens", "8", "--max-batch-size", "2", "--slo-ttft", "9")
    found = as_json(run("bench", "serve", "--model", model, *QUICK, *options, "--json"))
    assert found["load"]["seed"] == 3
    assert found["load"]["slo_ttft_s"] == 9
    assert found["engine"]["prefill_chunk_tokens"] == 8
    assert found["engine"]["max_waiting"] == MAX_WAITING
    assert found["num_arrived"] == 6
    assert found["num_aborted"] > 0
    assert found["settings"]["kv_dtype"] == "int8"
    assert "git_sha" in found["provenance"]


def test_bad_input(model: str) -> None:
    assert "--kv-memory='lots'" in refused(run("bench", "serve", "--model", model, "--kv-memory", "lots"))
    assert "kv_dtype='int3'" in refused(run("bench", "serve", "--model", model, "--kv-dtype", "int3"))
    assert "did you mean 'burst'" in refused(run("bench", "serve", "--model", model, "--arrivals", "bursts"))
    assert "rate=0" in refused(run("bench", "serve", "--model", model, "--rate", "0"))
    assert "did you mean 'smollm2'" in refused(run("bench", "serve", "--model", "smolm2"))


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--rate", "nan", "rate=nan; allowed: a number over 0"),
        ("--rate", "inf", "rate=inf"),
        ("--duration", "nan", "duration_s=nan"),
        ("--slo-ttft", "nan", "slo_ttft_s=nan"),
        ("--temperature", "nan", "temperature=nan; allowed: 0"),
        ("--abort-share", "nan", "abort_share=nan"),
        ("--plot", "/", "no file that ends in .png"),
        ("--plot", "/nowhere/plot.png", "'/nowhere' is no folder that can be written to"),
        ("--plot", "plot.svg", "no file that ends in .png"),
    ],
)
def test_nothing_runs_on_bad_numbers_and_paths(option: str, value: str, complaint: str) -> None:
    """Not even the model is loaded: a load of half an hour must not end in an error that could be seen before."""
    assert complaint in refused(run("bench", "serve", "--model", "gone", option, value))


def test_help_says_the_defaults() -> None:
    """They stand in the configs, which the help cannot import: torch takes seconds."""
    shown = {
        name: parameter.annotation.__metadata__[0].show_default
        for name, parameter in inspect.signature(serve_command, eval_str=True).parameters.items()
    }
    defaults: dict[str, Any] = {f.name: f.default for kind in (EngineConfig, LoadConfig) for f in fields(kind)}
    defaults |= {"slo_ttft": defaults["slo_ttft_s"], "slo_tpot": defaults["slo_tpot_s"], "max_waiting": MAX_WAITING}
    for name in ("rate", "max_new_tokens", "abort_share", "seed", "temperature", "max_batch_size", "max_waiting"):
        assert shown[name] == f"{defaults[name]:g}", name
    for name in ("slo_ttft", "slo_tpot", "prefill_chunk_tokens", "arrivals"):
        assert shown[name] == (defaults[name] if name == "arrivals" else f"{defaults[name]:g}"), name


def test_result_has_no_infinite_numbers(model: str) -> None:
    found = run("bench", "serve", "--model", model, "--num-requests", "1", "--max-new-tokens", "1", "--json")
    assert json.loads(found.stdout)["tpot_s"] == {"p50": None, "p90": None, "p99": None}
