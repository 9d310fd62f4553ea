"""Prompt sets: from a `prompts` config to conversations, whatever their rows look like; see docs/prompts.md."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdec.errors import ConfigError
from specdec.eval.prompt_columns import ASSISTANTS, ROLES, USERS, Columns
from specdec.eval.prompt_rows import read_rows
from specdec.registry import refuse_unknown

log = logging.getLogger("specdec")
_REASONS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    """Which prompts. One default per knob, here."""

    texts: list[str] | None = None  # the prompts themselves, instead of `path`
    path: str | None = None  # file or pattern of files, folder, pkg://PACKAGE/FILE, or a dataset's hub id
    config_name: str | None = None  # of a dataset that has several, such as GSM8K's "main"
    split: str = "train"  # of a dataset or a folder; a file has one only
    columns: dict[str, str | None] = field(default_factory=dict)  # role -> column; None: found by the usual names
    category: str = "other"  # of rows that have none
    groups: dict[str, list[str]] = field(default_factory=dict)  # category -> those that are reported as it
    instruction: str | None = None  # comes before prompts that are one text; conversations have their own
    max_rows: int | None = None  # no more are read
    max_turns: int | None = None  # of a conversation
    limit: int | None = None  # conversations that are run, dealt to the categories in turn
    max_words: int | None = None  # longer prompts are left out and counted
    max_prompt_tokens: int | None = None  # the same in tokens, chat template included
    chat: bool = True  # through the tokenizer's chat template, where it has one

    def __post_init__(self) -> None:
        if self.texts is None and self.path is None:
            raise ConfigError(
                "this prompt set needs prompts.path: a file, a folder or a dataset's hub id; or take prompts=small"
            )
        if self.texts is not None and self.path is not None:
            raise ConfigError(
                f"prompts.texts and prompts.path={self.path!r} are both set; take prompts=jsonl prompts.path=... for "
                "rows of a file, or leave prompts.path away"
            )
        if self.texts is not None and not self.texts:
            raise ConfigError("prompts.texts=[] is an empty prompt set; give at least one text")
        for name in ("max_rows", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"prompts.{name}={value}; allowed: null, which takes all, or at least 1")
        refuse_unknown("prompts.columns", self.columns, ROLES)
        members = [member for group in self.groups.values() for member in group]
        for member in members:
            if members.count(member) > 1:
                raise ConfigError(f"prompts.groups has the category {member!r} twice; it can be part of one group")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a prompt set: what the user says, turn by turn. The answers are the target's own."""

    name: str  # its id, else its row number; unique in the set
    category: str  # after `groups`
    turns: tuple[str, ...]  # none is empty
    system: str | None = None
    reference: str | None = None  # somebody's answer to the first turn


def load_conversations(config: Any) -> list[Conversation]:
    """Return every conversation of a `prompts` config, in the order of the rows.

    Conversations that do not begin with a text of the user are left out, others are cut before what cannot be played;
    how many and why is logged.

    Args:
        config: a `PromptsConfig`, or anything with some of its fields; fields it lacks have their defaults.

    Raises:
        ConfigError: the source cannot be read, a row has no text, columns are missing, or nothing is left.
    """
    settings = _settings(config)
    if settings.texts is not None:
        found = [_of_text(text, i, settings) for i, text in enumerate(settings.texts)]
    else:
        found = _of_rows(settings)
    group_of = {member: group for group, members in settings.groups.items() for member in members}
    names = _unique([conversation.name for conversation in found])
    return [
        replace(c, name=name, category=group_of.get(c.category, c.category), turns=c.turns[: settings.max_turns])
        for c, name in zip(found, names, strict=True)
    ]


def _settings(config: Any) -> PromptsConfig:
    if isinstance(config, PromptsConfig):
        return config
    known = [f.name for f in fields(PromptsConfig)]
    if isinstance(config, DictConfig):
        needed = sorted(OmegaConf.missing_keys(config) - {"path"})
        if needed:
            raise ConfigError(f"prompts.{needed[0]} has no value; give it one")
        given: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
        if given.get("path") == "???":
            given["path"] = None
    elif isinstance(config, Mapping):
        given = dict(config)
    else:
        given = {name: getattr(config, name) for name in known if hasattr(config, name)}
    refuse_unknown("prompts", given, known)
    # None where the default is something else means the default.
    return PromptsConfig(**{name: value for name, value in given.items() if value is not None})


def _of_text(text: Any, number: int, settings: PromptsConfig) -> Conversation:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"prompts.texts[{number}]={text!r} is no text; allowed: texts that are not empty")
    return Conversation(str(number), settings.category, (_instructed(text, settings),))


def _of_rows(settings: PromptsConfig) -> list[Conversation]:
    assert settings.path is not None, "a prompt set is texts or a path"
    rows = list(read_rows(settings.path, settings.config_name, settings.split, settings.max_rows))
    if not rows:
        raise ConfigError(f"prompts.path={settings.path!r} has no rows; a prompt set needs at least one")
    columns = Columns(settings.columns, settings.path, rows)
    found, cut, left_out = [], Counter[str](), Counter[str]()
    for number, row in enumerate(rows):
        said = columns.said(row)
        if said.end is not None:
            (cut if said.turns else left_out)[said.end] += 1
        if not said.turns:
            continue
        turns = said.turns if said.is_conversation else (_instructed(said.turns[0], settings),)
        name, category, reference = (columns.text(row, role) for role in ("name", "category", "reference"))
        system = said.system or columns.text(row, "system")
        found.append(Conversation(name or str(number), category or settings.category, turns, system, reference))
    if not found:
        raise ConfigError(
            f"prompts.path={settings.path!r}: none of its {len(rows)} conversations begins with a text of the user: "
            f"{_counts(left_out)}. Remove what comes before it, or rename roles: {', '.join(USERS)} for the user, "
            f"{', '.join(ASSISTANTS)} for who answers"
        )
    if left_out:
        log.info(
            "%s: %d of %d conversations left out, they do not begin with a text of the user: %s",
            settings.path, left_out.total(), len(rows), _counts(left_out),
        )  # fmt: skip
    if cut:
        log.info(
            "%s: %d of %d conversations end before their last message, at %s",
            settings.path, cut.total(), len(rows), _counts(cut),
        )  # fmt: skip
    return found


def _counts(reasons: Counter[str]) -> str:
    """Return the most frequent reasons, each with its number."""
    shown = [f"{reason} ({count})" for reason, count in reasons.most_common(_REASONS_SHOWN)]
    return ", ".join([*shown, "..."] if len(reasons) > _REASONS_SHOWN else shown)


def _instructed(text: str, settings: PromptsConfig) -> str:
    return text if settings.instruction is None else f"{settings.instruction}\n\n{text.strip(chr(10))}"


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, a repeated one with "#2" and so on behind it."""
    taken = set(names)
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        own = name
        while seen[name] > 1 and own in taken:
            own = f"{name}#{seen[name]}"
            seen[name] += own in taken
        taken.add(own)
        found.append(own)
    return found
