"""What token ids mean across tokenizers that write spaces, bytes and special tokens differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.models.token_text import TokenTexts
from specdec.models.vocabulary import SharedTokens

NOWHERE = 10**6


def byte_level(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose BPE knows no merges: "Ġ" is a space."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sentencepiece(words: list[str], merges: list[tuple[str, str]] | None = None, **special: str) -> Any:
    """Return one in sentencepiece's manner: "▁" is a space and one goes before every text; bytes are "<0x..>"."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges or [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def shared(draft: Any, target: Any) -> SharedTokens:
    return SharedTokens(TokenTexts(draft, NOWHERE), TokenTexts(target, NOWHERE), len(target))


def mapped(draft: Any, target: Any) -> dict[str, str]:
    """Return the shared tokens as the draft tokenizer and the target's write them."""
    found = shared(draft, target)
    pairs = zip(found._draft_ids.tolist(), found.target_ids.tolist(), strict=True)
    return {draft.convert_ids_to_tokens(d): target.convert_ids_to_tokens(t) for d, t in pairs}


def test_spaces_and_bytes_are_one_however_written() -> None:
    bpe = byte_level(["a", "Ġ", "Ġa", "Ċ", "Ã©", "Ã", "z"])
    piece = sentencepiece(["<0x0A>", "<0xC3>", "▁a", "a", "▁", "é", "q"])
    assert mapped(piece, bpe) == {"<0x0A>": "Ċ", "<0xC3>": "Ã", "▁a": "Ġa", "a": "a", "▁": "Ġ", "é": "Ã©"}
    assert mapped(bpe, piece) == {v: k for k, v in mapped(piece, bpe).items()}


def test_a_letter_is_no_mark_in_the_other_alphabet() -> None:
    """Maltese has the letter that byte-level BPE writes for a space."""
    assert mapped(sentencepiece(["Ġ", "▁", "▁Ġ"]), byte_level(["Ġ", "Äł", "ł"])) == {"▁": "Ġ", "Ġ": "Äł"}


def test_a_byte_gives_way_to_the_character() -> None:
    piece = sentencepiece(["<0x61>", "<0x62>", "a"])
    assert mapped(piece, byte_level(["a", "b"])) == {"a": "a", "<0x62>": "b"}
    found = shared(byte_level(["b", "a"]), piece)
    assert [found.spell(i) for i in range(3)] == [[1], [0], [1]]  # both of the target's ids for "a" are read


def test_special_tokens_are_no_text() -> None:
    plain = byte_level(["<s>", "a", "</s>"])
    special = byte_level(["a", "<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    assert mapped(plain, special) == {"a": "a"}
    assert mapped(special, special) == {"a": "a", "<s>": "<s>", "</s>": "</s>"}


def test_roles_stand_in_for_names() -> None:
    ours = byte_level(["<s>", "</s>", "a"], bos_token="<s>", eos_token="</s>")
    theirs = byte_level(["a", "<|end|>", "<|begin|>"], bos_token="<|begin|>", eos_token="<|end|>")
    assert mapped(ours, theirs) == {"a": "a", "</s>": "<|end|>", "<s>": "<|begin|>"}
    swapped = byte_level(["</s>", "<s>"], bos_token="</s>", eos_token="<s>")
    assert mapped(ours, swapped) == {"<s>": "<s>", "</s>": "</s>"}  # a name counts for more


def test_added_tokens_are_raw_text() -> None:
    bpe, piece = byte_level(["a", "Ġ"]), sentencepiece(["a", "▁"])
    for tokenizer in (bpe, piece):
        tokenizer.add_tokens([AddedToken("two words", special=False), AddedToken("<x>", special=True)])
    assert mapped(piece, bpe) == {"a": "a", "▁": "Ġ", "two words": "two words", "<x>": "<x>"}


def test_ids_without_a_row_and_ids_without_a_token() -> None:
    draft, target = byte_level(["a", "b", "c"]), byte_level(["c", "b", "a"])
    found = SharedTokens(TokenTexts(draft, 2), TokenTexts(target, 2), 5)
    assert (found._draft_ids.tolist(), found.target_ids.tolist()) == ([1], [1])
    logits = torch.arange(3.0)[None]
    assert found.fit(logits).tolist() == [[1.0]]
    assert [found.spell(i) for i in range(5)] == [[0], [1], [0], [0], [0]]  # "c" and padding: anything will do


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("Ġab", ["▁", "ab"]),  # the tokenizer's own choice puts a space before the space, and is not taken
        ("ab", ["ab"]),
        ("abé", ["ab", "<0xC3>", "<0xA9>"]),
        ("Ã", ["<0xC3>"]),  # half a character
        ("aĠa", ["a", "▁", "a"]),
        ("aZb", ["a", "b"]),  # what no token has is left out
        ("Z", ["<unk>"]),
    ],
)
def test_a_token_that_the_draft_model_lacks_is_spelled(word: str, spelled: list[str]) -> None:
    piece = sentencepiece(["<unk>", "▁", "a", "b", "ab", "<0xC3>", "<0xA9>"], [("a", "b")], unk_token="<unk>")
    target = byte_level(["Ã", "a", "Ġ", "b", "Z", *({word.replace("é", "Ã©")} - set("ÃaĠbZ"))])
    found = shared(piece, target)
    token_id = target.convert_tokens_to_ids(word.replace("é", "Ã©"))
    assert piece.convert_ids_to_tokens(found.spell(token_id)) == spelled


def test_the_draft_tokenizer_chooses_where_it_can() -> None:
    """Longest first would be "abc", "d"; its merges say otherwise."""
    words = ["a", "b", "c", "d", "cd", "ab", "abc"]
    merges = [("c", "d"), ("a", "b"), ("ab", "c")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    draft = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert draft.convert_ids_to_tokens(TokenTexts(draft, 10).spell(b"abcd")) == ["ab", "cd"]


def test_what_can_be_drafted_is_read_as_it_was_drafted() -> None:
    """Accepted drafts keep their KV: one id, and the one that was run."""
    bpe = byte_level(["a", "Ġ", "Ġa", "Ċ", "Ã©", "Ã", "z", "<e>"], eos_token="<e>")
    piece = sentencepiece(["<0x0A>", "<0xC3>", "▁a", "a", "▁", "é", "<0x61>", "</s>"], eos_token="</s>")
    for draft, target in ((bpe, piece), (piece, bpe)):
        found = shared(draft, target)
        assert len(found) == 7
        for d, t in zip(found._draft_ids.tolist(), found.target_ids.tolist(), strict=True):
            assert found.spell(t) == [d]
            assert found.to_draft(torch.tensor([t])).tolist() == [d]
