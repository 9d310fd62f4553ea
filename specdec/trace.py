"""What happened in a step, for whoever watches an engine, and a file of it: SPECDEC_TRACE=FILE; see docs/debug.md."""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.acceptance import Verdict, VerifierChoice
from specdec.errors import ConfigError
from specdec.interfaces import Drafter, TokenTree
from specdec.scheduler import Work
from specdec.target_rows import StepRows

log = logging.getLogger("specdec")

VARIABLE = "SPECDEC_TRACE"
FORMAT = 1  # of the lines; raised when a field changes its meaning or goes


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step that happened. `tree` and `rows` cover the work items that chose a token, in order."""

    number: int  # steps of this engine so far, this one included
    work: Sequence[Work]  # one per request of the step
    verdicts: Sequence[Verdict]  # one per work item
    tree: TokenTree
    rows: StepRows
    draft_s: float
    verify_s: float
    total_s: float


class Trace(Protocol):
    """Gets every step that happened, after its tokens were committed; must not raise."""

    def record(self, event: StepEvent) -> None: ...


class TraceFile:
    """Appends a header and then each step to a file, one JSON object per line.

    A line is written whole, by one call that appends, before the next step begins: engines and processes may share a
    file on a local disk, and a run that is killed leaves whole lines. What cannot be written ends the trace, never
    the run.

    Args:
        path: of the file; created if absent.
        header: what `run_header` returns.
        tokenizer: adds the texts of tokens.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: dict[str, Any], tokenizer: Any | None = None) -> None:
        self.path = Path(path).expanduser()
        self._run = uuid.uuid4().hex[:12]
        self._header, self._tokenizer = header, tokenizer
        self._file: int | None = None
        self._stopped = False
        try:
            os.close(self._open())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the trace {str(path)!r} cannot be written ({error}); name a file in a directory that exists and may "
                f"be written to, or unset {VARIABLE}"
            ) from error

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def record(self, event: StepEvent) -> None:
        if self._stopped:
            return
        try:
            if self._file is None:
                self._begin()
            self._write({"type": "step", "run": self._run, **_step(event, self._tokenizer)})
        except Exception as error:  # whatever it is, tokens are worth more than their trace
            self._stopped = True
            log.warning("the trace %s ends here, generation goes on: %s", self.path, error)

    def _begin(self) -> None:
        self._file = self._open()
        weakref.finalize(self, os.close, self._file)
        if not _ends_a_line(self.path):
            os.write(self._file, b"\n")  # behind what an earlier run could not finish
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._write({"type": "header", "format": FORMAT, "run": self._run, "pid": os.getpid(), "time": time}, True)

    def _write(self, line: dict[str, Any], with_header: bool = False) -> None:
        assert self._file is not None, "the file is opened before anything is written"
        data = (json_text(line | self._header if with_header else line) + "\n").encode()
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")


def trace_from_environment(
    target: Any, drafter: Drafter, verifiers: VerifierChoice, config: Any, tokenizer: Any | None = None
) -> TraceFile | None:
    """Return the trace of an engine of these parts if SPECDEC_TRACE names a file, else None.

    Args:
        target: the engine's ModelRunner.
        drafter: who proposes.
        verifiers: the acceptance rules.
        config: the EngineConfig.
        tokenizer: adds the texts of tokens.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = os.environ.get(VARIABLE)
    return TraceFile(path, run_header(target, drafter, verifiers, config), tokenizer) if path else None


def run_header(target: Any, drafter: Drafter, verifiers: VerifierChoice, config: Any) -> dict[str, Any]:
    """Return what a trace says about an engine of these parts, see `trace_from_environment`."""
    rules = {when: getattr(verifiers, when) for when in ("greedy", "seeded", "sampled")}
    return {
        "versions": {
            "specdec": _version("torch-specdec"),
            "torch": torch.__version__,
            "transformers": _version("transformers"),
        },
        "model": getattr(target.config, "_name_or_path", None) or None,
        "model_class": None if target.model is None else type(target.model).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "drafter": drafter.name,
        "verifiers": {when: rule.name for when, rule in rules.items()},
        "lossless": {when: bool(getattr(rule, "lossless", False)) for when, rule in rules.items()},
        "engine": asdict(config),
    }


def json_text(value: Any) -> str:
    """Return `value` as JSON on one line; NaN and infinities, which JSON has no words for, become null."""
    return json.dumps(_finite(value), allow_nan=False)


def top_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two best tokens [n, 2] and by how much the first one leads [n] float64, of logits [n, V]."""
    values, ids = logits.double().topk(min(2, logits.shape[-1]), dim=-1)
    return ids, values[:, 0] - values[:, 1] if ids.shape[1] == 2 else torch.full_like(values[:, 0], torch.inf)


def _step(event: StepEvent, tokenizer: Any | None) -> dict[str, Any]:
    """Return the line of a step but for its type and run."""
    requests = []
    row = 0
    for w, verdict in zip(event.work, event.verdicts, strict=True):
        request = w.request
        entry: dict[str, Any] = {
            "request_id": request.request_id,
            "phase": "prefill" if w.is_prefill else "decode",
            "num_rows": w.num_rows,
            "max_draft_tokens": w.max_draft_tokens,
        }
        # Its first step: behind a found prefix too, and not again when a preempted request is resumed.
        if w.is_prefill and request.stats.num_prefill_tokens == w.num_rows:
            entry |= _beginning(w, tokenizer)
        if w.samples:
            entry |= _choice(event, row, w, verdict)
            if tokenizer is not None:
                entry |= {
                    "root_text": tokenizer.decode([entry["root_token_id"]]),
                    "draft_texts": [tokenizer.decode([token]) for token in entry["draft_token_ids"]],
                    "emitted_texts": [tokenizer.decode([token]) for token in verdict.tokens],
                    "top_texts": [tokenizer.decode([token]) for token in entry["top_token_ids"]],
                }
            row += 1
        requests.append(entry)
    times = {"draft_s": event.draft_s, "verify_s": event.verify_s, "total_s": event.total_s}
    return {"step": event.number, **times, "requests": requests}


def _beginning(work: Work, tokenizer: Any | None) -> dict[str, Any]:
    """Return what is said about a request once: its prompt and how its tokens are drawn."""
    request = work.request
    params, prompt = request.sampling, request.tokens[: request.num_prompt_tokens]
    sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")} | {
        "seed": request.seed,  # the one that was drawn where none was given
        "seed_given": params.seed is not None,
        "processors": [type(p).__name__ for p in params.processors],
    }
    said = {"num_prompt_tokens": len(prompt), "sampling": sampling, "prompt_token_ids": prompt}
    return said if tokenizer is None else said | {"prompt_text": tokenizer.decode(prompt)}


def _choice(event: StepEvent, row: int, work: Work, verdict: Verdict) -> dict[str, Any]:
    """Return what was drafted for request `row` of the step's trees, how likely it was, and what came of it."""
    tree, rows = event.tree, event.rows
    size = verdict.drafted + 1
    ids, parents = tree.token_ids[row, :size].tolist(), tree.parents[row, :size].tolist()
    path = [] if verdict.path is None else verdict.path.tolist()
    # Each token was chosen after the node of the one before it.
    before = [0, *path][: len(verdict.tokens)]
    best, gaps = top_two(rows.logits(row, before))
    pairs = list(zip([*parents[1:], *before], [*ids[1:], *verdict.tokens], strict=True))
    probs = _target_probs(rows, row, pairs)
    stats = work.request.stats
    return {
        # Its emitted tokens are committed by now; the root is the one before them.
        "root_position": len(work.request.tokens) - len(verdict.tokens) - 1,
        "root_token_id": ids[0],
        "draft_token_ids": ids[1:],
        "draft_parents": parents[1:],
        "draft_probs": _draft_probs(tree, row, ids, parents),
        "target_probs": probs[: size - 1],
        "accepted": path,
        "emitted": verdict.tokens,
        "emitted_probs": probs[size - 1 :],
        "emitted_at_s": stats.emissions[-1][0] - stats.arrival_s if verdict.tokens else None,
        "top_token_ids": best[:, 0].tolist(),
        "top_gaps": gaps.tolist(),
        "finish_reason": verdict.finish_reason,
    }


def _draft_probs(tree: TokenTree, row: int, ids: list[int], parents: list[int]) -> list[float | None]:
    """Return the probability each draft token was drawn with, None where it was not drawn."""
    if tree.draft_probs is None or tree.draft_row is None:
        return [None] * (len(ids) - 1)
    drawn_from = tree.draft_row[row].tolist()
    found: list[float | None] = []
    for token, parent in zip(ids[1:], parents[1:], strict=True):
        source = drawn_from[parent]
        found.append(None if source < 0 else float(tree.draft_probs[source, token]))
    return found


def _target_probs(rows: StepRows, row: int, pairs: list[tuple[int, int]]) -> list[float]:
    """Return the target's probability of each token after a node, `pairs`; NaN where no processor has run yet.

    It is the softmax of what the token is chosen by: of the logits themselves when greedy.
    """
    nodes = sorted({node for node, _ in pairs})
    if not nodes:
        return []
    probs = rows.judged_scores(row, nodes).softmax(dim=-1)
    where = {node: i for i, node in enumerate(nodes)}
    index = torch.tensor([[where[node], token] for node, token in pairs], device=probs.device)
    found: list[float] = probs[index[:, 0], index[:, 1]].tolist()
    return found


def _finite(value: Any) -> Any:
    """Return `value` with None for floats that are not finite, and no more digits than a float32 has."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ends_a_line(path: Path) -> bool:
    """Whether a file is empty or ends with a line break; True for what is no file or cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return True
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:
        return True
