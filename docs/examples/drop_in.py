"""An existing transformers program, and the same one with `specdec.generate` in the place of `model.generate`.

Run: python docs/examples/drop_in.py [MODEL]
"""

import sys

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import specdec


class NoDigits(LogitsProcessor):
    """Any processor will do; this one forbids the digits."""

    def __init__(self, digits: list[int]) -> None:
        self.digits = digits

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.digits] = -torch.inf
        return scores


# In your program: AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...)
loaded = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model, tokenizer = loaded.model, loaded.tokenizer

texts = ["The planets of the solar system are", "def fibonacci(n):", "red, green, blue, red, green, blue, red,"]
batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
digits = sorted({tokenizer(d, add_special_tokens=False).input_ids[-1] for d in "0123456789"})
options = {
    "max_new_tokens": 40,
    "do_sample": False,
    "repetition_penalty": 1.02,
    "bad_words_ids": [tokenizer(" very", add_special_tokens=False).input_ids],
    "logits_processor": LogitsProcessorList([NoDigits(digits)]),
    "stop_strings": ["\n\n"],
    "tokenizer": tokenizer,
}

before = model.generate(**batch, **options)
after, stats = specdec.generate(model, **batch, **options, drafter="ngram", return_stats=True)

assert torch.equal(after, before), "the ids are those of transformers"
width = batch.input_ids.shape[1]
for text, row, own in zip(texts, after, stats, strict=True):
    print(f"{text!r} -> {tokenizer.decode(row[width:], skip_special_tokens=True)!r}")
    print(f"    {own.num_accepted_tokens} of {own.num_draft_tokens} draft tokens accepted in {own.num_steps} steps")
