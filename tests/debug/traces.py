"""Traces written by hand: small, and with texts that no page may trip over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NASTY = {
    1: "</script><script>document.title = 'broken out'</script>",
    2: "<!-- <script>",
    3: "\ud800",
    4: " a\n",
    5: "\u202eright to left",
    6: "<img src=http://absent.invalid/x.png onerror=\"document.title = 'broken out'\">",
    7: "é",
    8: "\u2028\x00\x1b[31m",
    9: "",
}


def header(run: str = "r1", **more: Any) -> dict[str, Any]:
    return {
        "type": "header",
        "format": 1,
        "run": run,
        "model": "some/tiny",
        "drafter": "ngram",
        "dtype": "float32",
        "device": "cpu",
        "verifiers": {"greedy": "match", "seeded": "match", "sampled": "rejection"},
        "lossless": {"greedy": True, "seeded": True, "sampled": True},
        "engine": {"max_draft_tokens": 4},
        "time": "2026-01-01T00:00:00+00:00",
        **more,
    }


def entry(position: int, emitted: Sequence[int], request_id: int = 0, **more: Any) -> dict[str, Any]:
    drafted = more.get("draft_token_ids", [])
    said = {
        "request_id": request_id,
        "phase": "decode",
        "num_rows": 1,
        "max_draft_tokens": 4,
        "root_position": position,
        "root_token_id": 7,
        "draft_token_ids": [],
        "draft_parents": list(range(len(drafted))),
        "draft_probs": [None] * len(drafted),
        "target_probs": [0.5] * len(drafted),
        "accepted": [],
        "emitted": list(emitted),
        "emitted_probs": [0.25] * len(emitted),
        "emitted_at_s": 0.1 * position,
        "top_token_ids": list(emitted),
        "top_gaps": [1.5] * len(emitted),
        "finish_reason": None,
        "draft_texts": [NASTY.get(token, f" t{token}") for token in drafted],
        "emitted_texts": [NASTY.get(token, f" t{token}") for token in emitted],
    }
    return said | more


def first(position: int, emitted: Sequence[int], request_id: int = 0, **more: Any) -> dict[str, Any]:
    """Return the entry of a prefill: the prompt ends at `position`."""
    sampling = {"temperature": 0.0, "seed": 2**60 + 1, "seed_given": False, "processors": []}
    own = {"phase": "prefill", "num_rows": position + 1, "num_prompt_tokens": position + 1, "sampling": sampling}
    return entry(position, emitted, request_id, **own, **more)


def step(number: int, *entries: dict[str, Any], run: str = "r1", **more: Any) -> dict[str, Any]:
    times = {"draft_s": 0.01, "verify_s": 0.05, "total_s": 0.07}
    return {"type": "step", "run": run, "step": number, **times, "requests": list(entries), **more}


def write(path: Path, *lines: Any) -> Path:
    """Write lines; a text stands as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def nasty(path: Path) -> Path:
    """Write a trace of which every token text is of the kind that breaks pages."""
    return write(
        path,
        header(drafter="</script><b>", model="<!--"),
        step(1, first(2, [1], prompt_text="</script></noscript><b id=out>\ud800\x00")),
        step(2, entry(3, [2, 3], draft_token_ids=[2, 5, 6], accepted=[1])),
        step(3, entry(5, [4, 6], draft_token_ids=[4, 8, 9], draft_parents=[0, 0, 2], accepted=[1])),
        step(4, entry(7, [5, 8, 9], draft_token_ids=[5, 8, 9], accepted=[1, 2, 3], finish_reason="stop")),
    )
