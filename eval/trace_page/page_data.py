"""What a page holds of a trace: runs, their requests and each one's steps, as the page's scripts read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.debug.read_trace import TraceContents, TracedRun, read_trace
from specdec.errors import InputError
from specdec.eval.trace_page.entry import Entry
from specdec.eval.trace_page.traced_request import TracedRequest, requests_of
from specdec.stats import total

_TEXTS = (
    *(("root_token_id", "root_text"), ("draft_token_ids", "draft_texts")),
    *(("emitted", "emitted_texts"), ("top_token_ids", "top_texts")),
)
_WALL = ("draft_s", "verify_s", "total_s")


def page_data(path: str | Path, run: str | None = None, request_id: int | None = None) -> dict[str, Any]:
    """Return the data of the page of a trace file.

    Args:
        path: of the trace.
        run: only this one: its number in the file, from 1, or its id.
        request_id: only this request of each run that has it.

    Raises:
        InputError: the file cannot be read, holds no step, or not what was asked for.
    """
    contents = read_trace(path)
    if not any(part.steps for part in contents.runs):
        lines = contents.num_broken_lines
        what = f"{lines} lines, none of a trace" if lines and not contents.runs else "no step"
        raise InputError(
            f"{str(path)!r} holds {what}; give a file that SPECDEC_TRACE named while something was generated"
        )
    runs = []
    for number, part in _chosen(contents, run):
        requests = requests_of(part)
        kept = [r for r in requests if r.entries and request_id in (None, r.request_id)]
        if kept:
            runs.append(_run(number, part, kept, sum(r.num_unreadable for r in requests)))
    if not runs:
        raise InputError(_nothing(path, contents, run, request_id))
    return {"file": Path(path).name, "broken_lines": contents.broken_lines, "runs": runs}


def _chosen(contents: TraceContents, wanted: str | None) -> list[tuple[int, TracedRun]]:
    """Return the numbered runs, or the wanted one."""
    numbered = list(enumerate(contents.runs, 1))
    if wanted is None:
        return numbered
    found = [(number, part) for number, part in numbered if part.header.get("run") == wanted]
    found = found or [(number, part) for number, part in numbered if str(number) == wanted]
    if not found:
        ids = ", ".join(f"{number} ({part.header.get('run')})" for number, part in numbered[:20])
        raise InputError(f"the trace has no run {wanted!r}; it has {ids}{', ...' if len(numbered) > 20 else ''}")
    return found


def _nothing(path: str | Path, contents: TraceContents, run: str | None, request_id: int | None) -> str:
    if request_id is None:
        return f"{str(path)!r}: no step can be read; its lines lack fields that docs/debug.md names"
    ids = sorted({found for _, part in _chosen(contents, run) for found in part.request_ids})
    shown = ", ".join(map(str, ids[:20])) + (f", ... {ids[-1]}" if len(ids) > 20 else "")
    return f"the trace has no request {request_id} that can be read; it has {shown}"


def _run(number: int, run: TracedRun, requests: Sequence[TracedRequest], num_unreadable: int) -> dict[str, Any]:
    everything = total(request.stats for request in requests)
    wall = {name: sum(_number(step.get(name)) for step in run.steps) for name in _WALL}
    return {
        "number": number,
        "header": run.header,
        "num_steps": len(run.steps),
        "num_unreadable": num_unreadable,
        "acceptance_rate": everything.acceptance_rate,
        "acceptance_length": everything.acceptance_length,
        "num_emitted_tokens": everything.num_emitted_tokens,
        "wall": wall,
        "texts": _texts(run),
        "requests": [_request(request) for request in requests],
    }


def _request(request: TracedRequest) -> dict[str, Any]:
    new = [e for e in request.entries if e.emitted]
    return {
        "id": request.request_id,
        "rule": " or ".join(request.rules) or None,
        "lossless": request.lossless,
        "sampling": request.sampling,
        "prompt_text": request.prompt_text,
        "prompt_token_ids": None if request.prompt_text is not None else request.prompt_token_ids,
        "num_new_tokens": sum(len(e.emitted) for e in new),
        "finish_reason": request.entries[-1].finish_reason,
        "figures": request.figures,
        "steps": _steps(request),
    }


def _steps(request: TracedRequest) -> list[dict[str, Any]]:
    gaps = request.gaps()
    return [_step(request, entry, gap) for entry, gap in zip(request.entries, gaps, strict=True)]


def _step(request: TracedRequest, e: Entry, gap: int) -> dict[str, Any]:
    """Return a step under short names: there may be thousands."""
    draft_s, verify_s, total_s = e.times
    said: dict[str, Any] = {
        "n": e.step,
        "prefill": e.phase == "prefill",
        "rows": e.num_rows,
        "batch": e.num_requests,
        "t": [draft_s, verify_s, max(0.0, float(f"{total_s - draft_s - verify_s:.6g}"))],
    }
    if gap:
        said["gap"] = gap
    if e.emitted:
        said |= {"root": e.root, "position": e.root_position, "out": e.emitted, "out_p": e.emitted_probs}
        said |= {"top": e.tops, "top_gap": e.gaps, "at": e.emitted_at_s, "end": e.finish_reason}
    if e.drafted:
        said |= {"ids": e.drafted, "parents": e.parents, "q": e.draft_probs, "p": e.target_probs}
        said |= {"accepted": e.accepted, "state": request.states(e)}
    return said


def _texts(run: TracedRun) -> dict[str, str]:
    """Return the text of each token id for which the run says one."""
    found: dict[str, str] = {}
    for step in run.steps:
        for entry in step["requests"]:
            for ids, texts in ((entry.get(name), entry.get(text)) for name, text in _TEXTS):
                pairs = zip(ids, texts, strict=False) if isinstance(ids, list) and isinstance(texts, list) else ()
                for token, text in pairs or [(ids, texts)]:
                    if isinstance(token, int) and isinstance(text, str):
                        found.setdefault(str(token), text)
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0
