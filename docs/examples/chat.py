"""A conversation of two turns through the model's own chat template.

Run: python docs/examples/chat.py [MODEL]
"""

import sys

import specdec

llm = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", drafter="suffix", drafter_options={"share": True})
messages = [{"role": "system", "content": "You answer in one sentence."}]
for question in ("Why is the sky blue?", "Repeat that, word by word."):
    messages.append({"role": "user", "content": question})
    answer = llm.chat(messages, max_new_tokens=48)
    messages.append({"role": "assistant", "content": answer.text})
    print(f"> {question}\n{answer.text}\n")
    print(f"  [{answer.finish_reason}, {answer.stats.acceptance_length:.2f} tokens per step]\n")

plain = specdec.LLM(llm.model, tokenizer=llm.tokenizer)
assert plain.chat(messages[:-1], max_new_tokens=48).text == answer.text, "the drafter changes the speed only"
