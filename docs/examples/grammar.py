"""Output that follows a grammar, with drafting: a processor that advances an automaton by every token.

The grammar is a regular expression, or the one of a JSON schema; the automaton is that of outlines-core, and other
libraries' fit in the same way. Drafts that the grammar forbids are rejected like any wrong draft, and the processor is
called as in plain decoding: once per emitted token, in order, never about a token that is not emitted.

Needs: pip install outlines-core
Run: python docs/examples/grammar.py [MODEL]
"""

import json
import sys

import torch
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema
from torch import Tensor
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

import specdec

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "horse"]},
        "legs": {"enum": [2, 4, 6, 8]},
        "wild": {"type": "boolean"},
    },
    "required": ["animal", "legs", "wild"],
}


def vocabulary(tokenizer, eos_token_id: int) -> Vocabulary:
    """Return every token's bytes, for tokenizers that work on bytes (GPT-2's kind), special tokens left out."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens: dict[bytes, list[int]] = {}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id not in tokenizer.all_special_ids and all(c in byte_of for c in token):
            tokens.setdefault(bytes(byte_of[c] for c in token), []).append(token_id)
    return Vocabulary(eos_token_id, tokens)


class Grammar(LogitsProcessor):
    """Allows what the automaton allows next. Keeps a state, so make a new one for every prompt."""

    def __init__(self, index: Index) -> None:
        self.guide = Guide(index)
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.num_calls > 0:
            self.guide.advance(int(input_ids[0, -1]))
        self.num_calls += 1
        allowed = torch.tensor(self.guide.get_tokens(), device=scores.device)
        return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores.index_select(1, allowed))


llm = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model, tokenizer = llm.model, llm.tokenizer
eos = tokenizer.eos_token_id  # allowed by the automaton where the grammar may end
index = Index(build_regex_from_schema(json.dumps(SCHEMA)), vocabulary(tokenizer, eos))

prompt = tokenizer("A description of a horse as JSON:\n", return_tensors="pt").input_ids
options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": eos, "pad_token_id": eos}

plain = Grammar(index)
before = model.generate(prompt, attention_mask=torch.ones_like(prompt), logits_processor=[plain], **options)
drafted = Grammar(index)
after, stats = specdec.generate(
    model, prompt, logits_processor=[drafted], drafter="ngram", tokenizer=tokenizer, return_stats=True, **options
)

text = tokenizer.decode(after[0, prompt.shape[1] :], skip_special_tokens=True)
print(text)
print(f"{stats[0].num_accepted_tokens} of {stats[0].num_draft_tokens} draft tokens accepted")
assert torch.equal(after, before), "the ids are those of transformers"
assert drafted.num_calls == plain.num_calls == after.shape[1] - prompt.shape[1], "one call per token"
answer = json.loads(text)
assert answer.keys() == SCHEMA["properties"].keys()
assert all(answer[name] in rule.get("enum", (True, False)) for name, rule in SCHEMA["properties"].items())
