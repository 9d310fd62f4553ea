"""Log-probabilities of every emitted token, and transformers' scores and logits, with drafting as without.

Run: python docs/examples/logprobs.py [MODEL]
"""

import sys

import torch

import specdec

llm = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", drafter="ngram")
prompt = "Monday, Tuesday, Wednesday, Monday, Tuesday,"

# Through LLM: one record per token, with the n likeliest ones.
done = llm.generate(prompt, max_new_tokens=12, temperature=0.8, seed=3, logprobs=2)[0]
for record, drafted in zip(done.logprobs, done.from_draft, strict=True):
    best = ", ".join(f"{llm.tokenizer.decode([t])!r} {p:.2f}" for t, p in record.top)
    mark = "drafted" if drafted else "       "
    print(f"{llm.tokenizer.decode([record.token_id])!r:>12} {mark} raw {record.raw_logprob:6.2f} ", end="")
    print(f"processed {record.logprob:6.2f}   likeliest: {best}")
assert [r.token_id for r in done.logprobs] == done.token_ids

# Through generate(): transformers' own output, and its own helper on it.
model, tokenizer = llm.model, llm.tokenizer
inputs = tokenizer(prompt, return_tensors="pt")
options = {
    "max_new_tokens": 12,
    "do_sample": False,
    "repetition_penalty": 1.2,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}
want = model.generate(**inputs, **options)
got = specdec.generate(model, **inputs, **options, drafter="ngram", output_logprobs=True)
assert torch.equal(got.sequences, want.sequences)
for ours, theirs in zip((*got.scores, *got.logits), (*want.scores, *want.logits), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # float32, in another order of summation
transition = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
torch.testing.assert_close(transition, got.logprobs, rtol=1e-3, atol=1e-3)
print("sum of log-probabilities:", float(got.logprobs.sum()), "finish reasons:", got.finish_reasons)
