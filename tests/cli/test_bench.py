"""`specdec bench serve`: what it prints, what it takes, how it ends."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specdec import ConfigError
from specdec.cli.bench import parse_bytes, serve_command
from specdec.engine import EngineConfig
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
    options = ("--prompts-file", str(prompts), "--seed", "3", "--abort-share", "0.5", "--kv-memory", "1MiB")
    options += ("--prefix-caching", "--prefill-chunk-tokens", "8", "--max-batch-size", "2", "--slo-ttft", "9")
    found = as_json(run("bench", "serve", "--model", model, *QUICK, *options, "--json"))
    assert found["load"]["seed"] == 3
    assert found["load"]["slo_ttft_s"] == 9
    assert found["engine"]["prefill_chunk_tokens"] == 8
    assert found["engine"]["max_waiting"] == MAX_WAITING
    assert found["num_arrived"] == 6
    assert found["num_aborted"] > 0
    assert "git_sha" in found["provenance"]


def test_bad_input(model: str) -> None:
    assert "is no size" in refused(run("bench", "serve", "--model", model, "--kv-memory", "lots"))
    assert "did you mean 'burst'" in refused(run("bench", "serve", "--model", model, "--arrivals", "bursts"))
    assert "rate=0" in refused(run("bench", "serve", "--model", model, "--rate", "0"))
    assert "did you mean 'smollm2'" in refused(run("bench", "serve", "--model", "smolm2"))


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


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("512MiB", 2**29), ("2 GB", 2 * 10**9), ("1.5KiB", 1536), ("10k", 10_000), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1MiB", "MiB", "1TiBB", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


def test_result_has_no_infinite_numbers(model: str) -> None:
    found = run("bench", "serve", "--model", model, "--num-requests", "1", "--max-new-tokens", "1", "--json")
    assert json.loads(found.stdout)["tpot_s"] == {"p50": None, "p90": None, "p99": None}
