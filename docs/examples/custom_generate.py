"""specdec inside transformers' own `generate()`: what goes through, and what has to be written in another way.

Run: python docs/examples/custom_generate.py [MODEL]
"""

import sys

import torch
from transformers import StoppingCriteriaList, StopStringCriteria, TextStreamer

import specdec

loaded = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
model, tokenizer = loaded.model, loaded.tokenizer
batch = tokenizer(["A, B, C, D, A, B, C,", "Water boils at"], return_tensors="pt", padding=True, padding_side="left")
options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.05}

# 1. Everything that transformers prepares goes through: masks, processors, criteria, num_return_sequences.
want = model.generate(**batch, **options)
got = model.generate(**batch, **options, custom_generate=specdec.custom_generate, drafter="ngram")
assert torch.equal(got, want)
print(tokenizer.batch_decode(got, skip_special_tokens=True))

# 2. Stop strings: transformers does not hand its tokenizer on, so make the criterion yourself.
one = tokenizer("A, B, C, D, A, B, C,", return_tensors="pt")
stop = tokenizer.decode(model.generate(**one, **options)[0, one.input_ids.shape[1] :][4:6])
want = model.generate(**one, **options, stop_strings=[stop], tokenizer=tokenizer)
criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
got = model.generate(
    **one, **options, stopping_criteria=criteria, custom_generate=specdec.custom_generate, drafter="ngram"
)
assert torch.equal(got, want)
print(f"stopped at {stop!r}: {tokenizer.decode(got[0])!r}")

# 3. A streamer: under the name spec_streamer, because `streamer` would get the prompt only.
streamer = TextStreamer(tokenizer, skip_prompt=True)
model.generate(**one, **options, custom_generate=specdec.custom_generate, drafter="ngram", spec_streamer=streamer)

# 4. A draft model: by the drafter's name, because `assistant_model` would be dropped. Here the target drafts itself.
drafting = {"drafter": "draft_model", "drafter_options": {"model": model}, "max_draft_tokens": 3}
got, stats = model.generate(
    **one, **options, custom_generate=specdec.custom_generate, **drafting, spec_tokenizer=tokenizer, return_stats=True
)
assert torch.equal(got, model.generate(**one, **options))
print(f"acceptance rate {stats[0].acceptance_rate:.2f}, {stats[0].acceptance_length:.2f} tokens per step")
