"""A service over `specdec.Engine`: a bounded queue, clients that come and go, a metrics line. No web framework needed.

Run: python docs/examples/serving.py [MODEL]
"""

import asyncio
import sys

import specdec

engine = specdec.Engine(
    sys.argv[1] if len(sys.argv) > 1 else "smollm2",
    drafter="ngram",
    max_batch_size=4,
    max_waiting=4,
    prefix_caching=True,
)
SYSTEM = "You answer in plain words, without lists and without headings."


async def client(name: str, question: str, patience: int = 99) -> tuple[str, str]:
    """Read an answer; after `patience` pieces the client goes away, which ends its request."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    text, stream = "", engine.stream(engine.llm.chat_token_ids(messages), max_new_tokens=24)
    try:
        async for piece in stream:
            text += piece.text
            patience -= 1
            if not patience:
                return name, f"{text!r} ... and gone"
    except specdec.QueueFullError:
        return name, "busy, try again later"  # at once: nothing waits for a place it will not get
    finally:
        await stream.aclose()
    return name, repr(text)


async def main() -> list[tuple[str, str]]:
    early = [asyncio.create_task(client(f"early {i}", f"What is {i} plus {i}?")) for i in range(3)]
    early.append(asyncio.create_task(client("impatient", "Why is the sky blue?", patience=3)))
    while engine.num_running < len(early):
        await asyncio.sleep(0.001)
    crowd = [asyncio.create_task(client(f"late {i}", f"Tell me about the number {i}.")) for i in range(12)]
    return await asyncio.gather(*early, *crowd)


answers = asyncio.run(main())
for name, answer in answers:
    print(f"{name}: {answer}")
metrics = engine.metrics()
print(
    f"{metrics.num_finished} answered, {metrics.num_aborted} gone, {metrics.engine.num_cached_tokens} prompt tokens "
    f"shared, median TTFT {metrics.ttft_s['p50'] or 0:.3f} s, KV blocks in use {metrics.kv['num_used']:.0f}"
)
num_busy = sum("busy" in answer for _, answer in answers)
assert metrics.num_finished >= 3, "the early ones were answered"
assert metrics.num_aborted == 1, "the impatient one went away"
assert num_busy > 0, "not all of the crowd found room"
assert metrics.num_finished + metrics.num_aborted + num_busy == len(answers)
assert metrics.engine.num_cached_tokens > 0, "the system prompt was computed once"
assert metrics.kv["num_used"] == 0, "whoever is gone holds nothing"
engine.check_integrity()
