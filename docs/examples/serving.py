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
SYSTEM = "You answer in one short sentence, in plain words, without lists and without headings. "


async def client(name: str, question: str, patience: int = 24) -> tuple[str, str]:
    """Read an answer; after `patience` pieces the client goes away, which ends its request."""
    text, stream = "", engine.stream(SYSTEM + question, max_new_tokens=24)
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
    early = [asyncio.create_task(client(f"early {i}", f"What is {i} plus {i}?")) for i in range(4)]
    early.append(asyncio.create_task(client("impatient", "What is the sky?", patience=3)))
    while not engine.num_running:
        await asyncio.sleep(0.001)
    crowd = [asyncio.create_task(client(f"late {i}", f"Is {i} even?")) for i in range(12)]
    return await asyncio.gather(*early, *crowd)


answers = asyncio.run(main())
for name, answer in answers:
    print(f"{name}: {answer}")
metrics = engine.metrics()
print(
    f"{metrics.num_finished} answered, {metrics.num_aborted} gone, {metrics.engine.num_cached_tokens} prompt tokens "
    f"shared, median TTFT {metrics.ttft_s['p50'] or 0:.3f} s, KV blocks in use {metrics.kv['num_used']:.0f}"
)
assert metrics.num_finished + metrics.num_aborted + sum("busy" in answer for _, answer in answers) == len(answers)
assert metrics.num_finished >= 4
assert metrics.kv["num_used"] == 0, "whoever is gone holds nothing"
engine.check_integrity()
