"""In which order variants run: interleaved, balanced for place and for who ran just before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One variant's run on one batch."""

    repeat: int
    batch: int
    place: int
    variant: str


def orders(count: int) -> list[list[int]]:
    """Return orders of `count` things in which each comes at each place, and directly after each other, equally often.

    An odd count needs twice as many orders. Of one thing there is one order.

    Source: Williams 1949, "Experimental designs balanced for the estimation of residual effects of treatments".
    """
    first = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    square = [[(own + shift) % count for own in first] for shift in range(count)]
    return square if count % 2 == 0 or count == 1 else square + [row[::-1] for row in square]


def turns(variants: Sequence[str], conversations: Sequence[Sequence[str]], repeats: int) -> Iterator[Turn]:
    """Yield every variant on every batch, `repeats` times.

    Which order of variants a batch gets is shuffled, so that it goes with nothing that alternates in the prompts, and
    is another one in each repeat: a variant comes at another place for the same batch. Batches are shuffled too, in
    each repeat anew, since drafters that learn from answers do better later; turns of one conversation stay in order.

    Args:
        variants: their names.
        conversations: of each batch, whose prompts are in it.
        repeats: of every batch.
    """
    found = orders(len(variants))
    source = random.Random(0)
    given: list[int] = []
    while len(given) < len(conversations):
        given += source.sample(range(len(found)), len(found))
    together = _together(conversations)
    for repeat in range(repeats):
        for batch in (b for part in source.sample(together, len(together)) for b in part):
            for place, own in enumerate(found[(given[batch] + repeat) % len(found)]):
                yield Turn(repeat, batch, place, variants[own])


def _together(conversations: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the batches in groups: neighbours that share a conversation are in one."""
    groups: list[list[int]] = []
    for batch, names in enumerate(conversations):
        if groups and set(names) & set(conversations[batch - 1]):
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return groups
