"""Which prompts a point was run on, whether those of several points are the same, and how many an interval takes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from specdec.eval.conversations import PromptsConfig
from specdec.eval.ratios import num_needed
from specdec.eval.records import Header
from specdec.eval.report.setting_text import in_short

if TYPE_CHECKING:
    from specdec.eval.report.gather import Point

_DIGEST = 8  # characters
# Overrides that choose prompts, or change the answers that later turns of a conversation follow.
_CHOOSING = ("prompts", "target", "context_tokens", "temperature", "seed", "max_new_tokens", "ignore_eos")
_TOLD = ("texts", "path", "groups")  # in other words, or, as names of categories, no choice of prompts
_USUAL = {f.name: None if f.default is MISSING else f.default for f in fields(PromptsConfig)}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a point."""

    settings: str  # for example "spec_bench: question.jsonl, limit=24"
    num_conversations: int
    num_prompts: int
    digest: str | None  # of the token ids of all prompts, in their order; None: the records do not tell

    @classmethod
    def of(cls, header: Header, config: dict[str, Any]) -> PromptSet:
        """Return what a header, and a config.yaml if there is one, say of the prompts."""
        digests = [case.digest for case in header.cases]
        whole = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:_DIGEST] if all(digests) else None
        return cls(_settings(header, config), len({case.name for case in header.cases}), len(digests), whole)

    @property
    def whole_text(self) -> str:
        """All of it, such as "small_prompts.jsonl, limit=8 (8 conversations, 11 prompts, digest 1a2b3c4d)"."""
        counts = f"{self.num_conversations} conversations, {self.num_prompts} prompts"
        return f"{self.settings} ({counts}, digest {self.digest or 'not known'})"


def _settings(header: Header, config: dict[str, Any]) -> str:
    """Return the name that the command line gave, the file's name, and what is set to something else than usual."""
    own, name = config.get("prompts"), header.overrides.get("prompts")
    before = f"{name}: " if isinstance(name, str) else ""
    if not isinstance(own, dict):
        return f"{before}not known"
    texts, path = own.get("texts"), own.get("path")
    source = f"{len(texts)} texts" if isinstance(texts, list) else "not known"
    if isinstance(path, str):
        source = PurePosixPath(path).name or path
    others = {key: value for key, value in own.items() if key not in _TOLD and value != _USUAL.get(key)}
    return before + ", ".join([source, *in_short(others)])


def prompt_differences(points: Sequence[Point]) -> list[str]:
    """Return what differs between the prompts of points, for example "the prompts: a; b"; nothing if they are the same.

    A sweep may set the prompts of each of its points: then they are a setting like any other, and no difference.
    Between runs that are named apart they always are one.
    """
    by_choice: dict[Hashable, set[str | None]] = {}
    by_run: dict[str, set[str | None]] = {}
    for point in points:
        overrides = point.records.header.overrides
        chosen = frozenset(f"{key}={overrides[key]}" for key in overrides if key.partition(".")[0] in _CHOOSING)
        by_choice.setdefault(chosen, set()).add(point.prompts.digest)
        by_run.setdefault(point.run, set()).add(point.prompts.digest)
    are_chosen = all(len(digests) == 1 for digests in by_choice.values())
    if are_chosen and len({frozenset(digests) for digests in by_run.values()}) == 1:
        return []
    return [f"the prompts: {'; '.join(dict.fromkeys(point.prompts.whole_text for point in points))}"]


def prompts_needed(header: Header, level: float = 0.95) -> str:
    """Return how many prompts an interval takes: it is over conversations, or over full batches of several prompts."""
    count = num_needed(level)
    return f"{count} conversations" if header.batch_size == 1 else f"{count * header.batch_size} prompts"
