"""What each id of a tokenizer stands for, so that two vocabularies can be compared by content."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

# The UTF-8 bytes of a token's text, or the content of a special token, which stands for no text.
Meaning = bytes | str

SPACE_MARK = "\u2581"  # sentencepiece writes it for a space
BYTE_SPACE = "\u0120"  # byte-level BPE writes it for the byte 0x20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The meaning of every id of a tokenizer. All it needs of one is `get_vocab()`; more is used where there is more.

    Attributes:
        tokens: id -> token as the tokenizer writes it, None where there is none.
        meanings: id -> meaning. Several ids may mean the same, as "a" and "<0x61>".
        owners: meaning -> the one id that is used for it: the first that is not a byte's, else the first.
    """

    def __init__(self, tokenizer: Any, num_ids: int) -> None:
        """Read a tokenizer's ids below `num_ids`, those that the model has a row for."""
        self._tokenizer = tokenizer
        vocab = {i: t for t, i in tokenizer.get_vocab().items() if i < num_ids}
        self.tokens: list[Any] = [vocab.get(i) for i in range(max(vocab, default=-1) + 1)]
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = {i for i, token in added.items() if getattr(token, "special", False)}
        special |= set(getattr(tokenizer, "all_special_ids", None) or ())
        alphabet = _alphabet(tokenizer, self.tokens)
        self.meanings: list[Meaning | None] = [
            None if token is None else str(token) if i in special else _text(token, "" if i in added else alphabet)
            for i, token in enumerate(self.tokens)
        ]
        self.owners: dict[Meaning, int] = {}
        for i, meaning in enumerate(self.meanings):
            if meaning is not None:
                owner = self.owners.setdefault(meaning, i)
                if _is_byte(self.tokens[owner]) and not _is_byte(self.tokens[i]):
                    self.owners[meaning] = i
        self._longest = max((len(m) for m in self.owners if isinstance(m, bytes)), default=0)

    def __len__(self) -> int:
        """Return the number of ids that are tokens."""
        return len(self.tokens) - self.tokens.count(None)

    def meaning(self, token_id: int) -> Meaning | None:
        return self.meanings[token_id] if 0 <= token_id < len(self.meanings) else None

    def role(self, name: str) -> int | None:
        """Return the id of "bos", "eos" or "unk", or None if the tokenizer has none or the model no row for it."""
        token_id = getattr(self._tokenizer, f"{name}_token_id", None)
        return token_id if isinstance(token_id, int) and self.meaning(token_id) is not None else None

    def spell(self, text: bytes) -> list[int]:
        """Return ids whose texts together are `text`: the tokenizer's own choice, else longest tokens first.

        Bytes that no token has are left out, so the answer may be empty.
        """
        return self._encoded(text) or self._longest_first(text)

    def _encoded(self, text: bytes) -> list[int] | None:
        """Return what the tokenizer makes of `text`, or None where it adds, changes or cannot read something."""
        encode = getattr(self._tokenizer, "encode", None)
        if encode is None:
            return None
        try:
            ids = encode(text.decode("utf-8"), add_special_tokens=False)
        except Exception:  # part of a character; and tokenizers that know no unknown token raise their own kinds
            return None
        meanings = [self.meaning(i) for i in ids]
        return ids if b"".join(m for m in meanings if isinstance(m, bytes)) == text and None not in meanings else None

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            found = next((end for end in ends if text[at:end] in self.owners), None)
            if found is not None:
                ids.append(self.owners[text[at:found]])
            at = found or at + 1
        return ids


def _is_byte(token: Any) -> bool:
    return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None


def _alphabet(tokenizer: Any, tokens: list[Any]) -> str:
    """Return the character that a tokenizer writes for a space: BYTE_SPACE, SPACE_MARK, or "" = it marks none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "decoder")]
    state = b"".join(part.__getstate__() for part in parts if part is not None)
    if b'"ByteLevel"' in state:
        return BYTE_SPACE
    if SPACE_MARK.encode() in state:
        return SPACE_MARK
    first = [token[:1] for token in tokens if isinstance(token, str)]
    marks = {mark: first.count(mark) for mark in (BYTE_SPACE, SPACE_MARK)}
    best = max(marks, key=lambda mark: marks[mark])
    return best if marks[best] else ""


def _text(token: Any, alphabet: str) -> bytes:
    if isinstance(token, bytes):  # tokenizers over tiktoken
        return token
    if alphabet == BYTE_SPACE:
        values = [_byte_of().get(character) for character in token]
        return token.encode() if None in values else bytes(v for v in values if v is not None)
    if alphabet == SPACE_MARK:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()
    return str(token).encode()


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable bytes stand for themselves, the others for 256 and on, in order.

    Source: Radford et al. 2019, GPT-2, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
