"""Many callers, one engine: concurrent `astream` calls in one process share its batches. No web framework needed.

Run: python docs/examples/async_server.py [MODEL]
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import specdec


class Service:
    """What a handler of a web framework would call."""

    def __init__(self, model: str) -> None:
        self.llm = specdec.LLM(model, drafter="ngram", max_batch_size=8)

    async def answer(self, prompt: str, max_new_tokens: int) -> AsyncIterator[str]:
        """Yield text; a client that goes away closes this and thereby ends its request."""
        async for piece in self.llm.astream(prompt, max_new_tokens=max_new_tokens, temperature=0.7, seed=1):
            yield piece.text


async def client(service: Service, prompt: str, order: list[str]) -> str:
    text = ""
    async for piece in service.answer(prompt, 24):
        order.append(prompt[0])
        text += piece
    return text


async def impatient(service: Service) -> None:
    async for _ in service.answer("Tell me everything.", 1000):
        pass


async def main(service: Service, prompts: list[str]) -> list[str]:
    order: list[str] = []
    too_long = asyncio.create_task(impatient(service))
    answers = await asyncio.gather(*(client(service, prompt, order) for prompt in prompts))
    too_long.cancel()  # its request ends, the others never noticed
    await asyncio.gather(too_long, return_exceptions=True)
    print("pieces came in this order:", "".join(order))
    assert len({*order[: 2 * len(prompts)]}) > 1, "callers take turns"
    return answers


service = Service(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
prompts = ["Apples are", "Bread is", "Cheese was"]
together = asyncio.run(main(service, prompts))
for prompt, text in zip(prompts, together, strict=True):
    print(f"{prompt!r} -> {text!r}")

# Afterwards the engine belongs to whoever calls next; the same seed gives the same text alone and in company.
alone = [c.text for c in service.llm.generate(prompts, max_new_tokens=24, temperature=0.7, seed=1)]
assert alone == together
