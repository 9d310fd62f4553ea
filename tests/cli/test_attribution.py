"""Text belongs to the token that completed it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec import Piece
from specdec.cli.attribution import Attribution
from specdec.stream import TextStream
from tests.tiny_chat_model import save_tiny_chat_model

TEXT = "naïve 漢字 🙂 café, stop or no stop — end"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte: most characters of TEXT are spelt by several."""
    return AutoTokenizer.from_pretrained(save_tiny_chat_model(Path(tmp_path_factory.mktemp("words")) / "tiny"))


def pieces_of(tokenizer: Any, tokens: list[int], drafted: list[bool], sizes: list[int], stop: tuple[str, ...]) -> Any:
    """Yield what LLM.stream makes of tokens that come in steps of some sizes."""
    stream, at = TextStream(tokenizer, stop), 0
    for i, size in enumerate(sizes):
        text = stream.push(tokens[at : at + size])
        is_last = i == len(sizes) - 1
        if is_last:
            text += stream.finish(stopped=bool(stop))
        done: Any = object() if is_last else None
        yield Piece(0, text, tokens[at : at + size], drafted[at : at + size], done)
        at += size


@pytest.mark.parametrize("stop", [(), ("stop!",), ("no",), ("🙂",)])
def test_spans_are_the_pieces_texts(tokenizer: Any, stop: tuple[str, ...]) -> None:
    tokens = tokenizer(TEXT).input_ids
    choice = random.Random(1)
    for _ in range(20):
        drafted = [choice.random() < 0.5 for _ in tokens]
        sizes: list[int] = []
        while sum(sizes) < len(tokens):
            sizes.append(min(choice.randint(1, 6), len(tokens) - sum(sizes)))
        attribution = Attribution(tokenizer)
        for piece in pieces_of(tokenizer, tokens, drafted, sizes, stop):
            assert "".join(text for text, _ in attribution.push(piece)) == piece.text


def test_a_character_is_its_last_tokens(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT).input_ids
    last_byte = [len(TEXT[: i + 1].encode()) - 1 for i in range(len(TEXT))]
    drafted = [i % 3 == 0 for i in range(len(tokens))]
    attribution = Attribution(tokenizer)
    owners: list[bool] = []
    for piece in pieces_of(tokenizer, tokens, drafted, [4] * (len(tokens) // 4) + [len(tokens) % 4], ()):
        for text, own in attribution.push(piece):
            assert "\N{REPLACEMENT CHARACTER}" not in text
            owners += [own] * len(text)
    assert owners == [drafted[at] for at in last_byte]


def test_rest_is_what_was_held_back(tokenizer: Any) -> None:
    tokens = tokenizer("so st").input_ids
    stream, attribution = TextStream(tokenizer, ("stop",)), Attribution(tokenizer)
    piece = Piece(0, stream.push(tokens), tokens, [True] * len(tokens), None)
    assert "".join(text for text, _ in attribution.push(piece)) == "so "
    assert "".join(text for text, _ in attribution.rest()) == "st"
