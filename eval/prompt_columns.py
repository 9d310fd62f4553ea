"""Which columns of a row hold what: found by the names that data sets usually have, or as the config says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError
from specdec.eval.prompt_rows import Row

# In the order in which they are looked for: a row may have its first turn as a prompt beside the whole conversation.
_USUAL: dict[str, tuple[str, ...]] = {
    "turns": ("turns",),
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "prompt": ("prompt", "question", "instruction", "text"),
    "category": ("category",),
    "name": ("question_id", "id", "task_id", "prompt_id", "name"),
    "system": ("system", "system_prompt"),
    "reference": ("reference", "answer", "canonical_solution", "response", "output", "completion"),
}
_SAID = ("turns", "messages", "conversations", "prompt")  # roles that hold what the user says
_HEARD = ("messages", "conversations")  # with the assistant's part; some are empty
_OTHERS = ("category", "name", "system", "reference")
ROLES = (*_SAID, *_OTHERS)
USERS = ("user", "human")
ASSISTANTS = ("assistant", "model", "ai", "bot", "gpt", "chatgpt", "bing", "bard")
_SYSTEMS = {"system", "developer"}
_ROLE_CHARS = 40  # of an unknown one that are shown


@dataclass(frozen=True, slots=True)
class Said:
    """What the user says in a row."""

    turns: tuple[str, ...]  # empty where a conversation does not begin with the user
    is_conversation: bool  # not one bare text
    system: str | None = None
    end: str | None = None  # the message at which a conversation was cut, or what kept it from beginning


class Columns:
    """Reads the rows of one source.

    Args:
        given: role -> column, of the config; a role without a column is looked for.
        source: of the rows, for messages.
        rows: all of them; not empty.

    Raises:
        ConfigError: a column of the config is in no row, or nothing is there that a user could say.
    """

    def __init__(self, given: Mapping[str, str | None], source: str, rows: Sequence[Row]) -> None:
        seen = dict.fromkeys(name for row in rows for name in row.values)
        for role, column in given.items():
            if column is not None and column not in seen:
                raise ConfigError(
                    f"{source} has no column {column!r}, which is prompts.columns.{role}; its columns are {_list(seen)}"
                )
        chosen = {role: column for role, column in given.items() if column is not None}
        named = [(role, chosen[role]) for role in _SAID if role in chosen]
        self._said = named or [(role, column) for role in _SAID for column in _USUAL[role]]
        self._others = {role: (chosen[role],) if role in chosen else _USUAL[role] for role in _OTHERS}

    def said(self, row: Row) -> Said:
        """Return what the user says in a row.

        Raises:
            ConfigError: it has no text, or something else in its place.
        """
        role, column = next(((r, c) for r, c in self._said if row.values.get(c) is not None), (None, None))
        if column is None:
            nulls = [c for _, c in self._said if c in row.values]
            if nulls:
                raise ConfigError(f"{row.place}, column {nulls[0]!r} is null; a prompt needs text")
            raise ConfigError(
                f"{row.place} has nothing under {_list(c for _, c in self._said)}; its columns are "
                f"{_list(row.values)}. Name the one with the text: prompts.columns.prompt=NAME"
            )
        value, where = row.values[column], f"{row.place}, column {column!r}"
        if isinstance(value, str):
            if not value.strip():
                raise ConfigError(f"{where} is empty; a prompt needs text")
            return Said((_with_input(_whole(value), column, row),), is_conversation=False)
        if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
            if not all(turn.strip() for turn in value):
                raise ConfigError(f"{where}: turn {[bool(t.strip()) for t in value].index(False)} is empty")
            return Said(tuple(map(_whole, value)), is_conversation=True)
        if isinstance(value, list) and (value or role in _HEARD) and all(isinstance(turn, dict) for turn in value):
            return _heard(value)
        raise ConfigError(
            f"{where} is {_short(value)}; allowed: a text, a list of texts, or a list of messages with 'role' and "
            "'content' or 'from' and 'value'"
        )

    def text(self, row: Row, role: str) -> str | None:
        """Return what a row has for the role "category", "name", "system" or "reference"; of a list the first."""
        for name in self._others[role]:
            value = row.values.get(name)
            while isinstance(value, list):  # one per turn, or several that would do, or both
                value = value[0] if value else None
            if value is not None and not isinstance(value, dict) and str(value).strip():
                return _whole(str(value))
        return None


def _heard(messages: Sequence[dict[str, Any]]) -> Said:
    """Return the user's turns of a conversation, up to the first message that nobody could answer for the target.

    What another speaker (a tool) says, or a text that is missing, cannot be made up, and what follows depends on it.
    """
    turns: list[str] = []
    system = None
    for message in messages:
        speaker = str(message.get("role") or message.get("from") or "").lower()
        content = message.get("content") or message.get("value") or ""
        text = (_whole(content) if content.strip() else "") if isinstance(content, str) else None
        if (speaker in ASSISTANTS and turns) or (speaker in _SYSTEMS and text == ""):
            continue  # the target answers instead; an empty system message says nothing
        if speaker in USERS and text:
            turns.append(text)
        elif speaker in _SYSTEMS and text and not turns and system is None:
            system = text
        else:
            return Said(tuple(turns), True, system, _obstacle(speaker, text))
    return Said(tuple(turns), True, system, None if turns else "no message of the user")


def _obstacle(speaker: str, text: str | None) -> str:
    """Return what a message is at which a conversation ends; `text` is None if it has something else."""
    if not speaker:
        return "a message without 'role' or 'from'"
    if speaker in _SYSTEMS:
        return "a system message that is not the first text"
    if speaker in ASSISTANTS:
        return "a message of the assistant before the first turn"
    if speaker in USERS:
        return "an empty text of the user" if text == "" else "a message of the user that is no text"
    return f"the role {speaker[:_ROLE_CHARS]!r}"


def _with_input(text: str, column: str, row: Row) -> str:
    """Return an instruction with what it is about, as Alpaca's rows have it beside."""
    more = row.values.get("input")
    return f"{text}\n\n{_whole(more)}" if column == "instruction" and isinstance(more, str) and more.strip() else text


def _whole(text: str) -> str:
    """Return a text without halves of characters (surrogates), which JSON can hold and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _list(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
