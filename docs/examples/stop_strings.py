"""Stop strings: where an answer ends, what its text and its tokens hold, and what a stream holds back.

Run: python docs/examples/stop_strings.py [MODEL]
"""

import sys

import specdec

llm = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", drafter="ngram", max_draft_tokens=6)
prompt = "Once upon a time there was"
free = llm.generate(prompt, max_new_tokens=40)[0]
middle = len(free.text) // 2
stop = free.text[middle : middle + 3]  # something that this model does say

done = llm.generate(prompt, max_new_tokens=40, stop=[stop, "<never>"])[0]
print(f"stop={stop!r}: {done.text!r}, finish_reason={done.finish_reason!r}")
assert done.finish_reason == "stop"
assert stop not in done.text, "the text ends before the stop string"
assert free.text.startswith(done.text)
assert done.token_ids == free.token_ids[: len(done.token_ids)], "the tokens keep the one that completed it"
assert stop in llm.tokenizer.decode(done.token_ids)

# A stream never shows a text that it would have to take back: what could begin a stop string waits.
shown = ""
for piece in llm.stream(prompt, max_new_tokens=40, stop=stop):
    shown += piece.text
    assert done.text.startswith(shown)
assert shown == done.text
print("the stream showed the same, and at no time more")
