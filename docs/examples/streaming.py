"""Text as it comes: which tokens were drafted, several prompts at once, an abandoned stream.

Run: python docs/examples/streaming.py [MODEL]
"""

import sys

import specdec

llm = specdec.LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", drafter="ngram")
prompt = "Red, green, blue, red, green, blue, red,"
done = llm.generate(prompt, max_new_tokens=32)[0]
green, plain = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")

text, token_ids = "", []
for piece in llm.stream(prompt, max_new_tokens=32):
    text += piece.text
    token_ids += piece.token_ids
    # A piece is what one step gave; all of it but the last token was drafted.
    print(f"{green if any(piece.from_draft) else ''}{piece.text}{plain}", end="|", flush=True)
print()
assert (text, token_ids) == (done.text, done.token_ids), "the pieces together are the answer"
print(f"{sum(done.from_draft)} of {len(done.token_ids)} tokens were drafted and accepted")

# Several prompts take turns in one batch; `index` says whose piece it is.
prompts = [prompt, "The capital of France is", "1 2 3 4 5 6"]
answers = [""] * len(prompts)
for piece in llm.stream(prompts, max_new_tokens=16):
    answers[piece.index] += piece.text
    if piece.completion is not None:
        print(f"{piece.index} ended: {piece.finish_reason}, {answers[piece.index]!r}")
assert answers == [c.text for c in llm.generate(prompts, max_new_tokens=16)]

# Leaving the loop ends the request: its memory is free and the engine takes the next call.
for piece in llm.stream(prompt, max_new_tokens=1000):
    if len(piece.token_ids):
        break
assert not llm.engine.has_unfinished
assert llm.generate(prompt, max_new_tokens=32)[0].token_ids == done.token_ids
