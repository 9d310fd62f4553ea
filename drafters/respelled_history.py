"""The tokens of each request in a draft model's own ids. Shared by drafters; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.interfaces import Observation


class RespelledHistory:
    """Token lists by request, as `TokenHistory`, where a token of the target may be several of the draft model's.

    What a token becomes does not depend on its neighbours, so tokens heard again replace exactly what they were.
    """

    def __init__(self, spell: Callable[[int], Sequence[int]]) -> None:
        """`spell`: a target's token id -> the draft model's ids, at least one."""
        self._spell = spell
        self._ids: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}  # request -> length of `_ids` after each of the target's tokens

    def observe(self, seen: Sequence[Observation]) -> None:
        """Take in new tokens. An observation may start before the end of what is known, never after it."""
        for o in seen:
            ids, ends = self._ids.setdefault(o.request_id, []), self._ends.setdefault(o.request_id, [])
            assert o.start <= len(ends), f"request {o.request_id}: tokens from {o.start} on, but {len(ends)} are known"
            del ids[ends[o.start - 1] if o.start else 0 :]
            del ends[o.start :]
            for token_id in o.token_ids.tolist():
                ids += self._spell(token_id)
                ends.append(len(ids))

    def of(self, request_id: int) -> list[int]:
        """Return the draft model's ids of a request's known tokens, oldest first; the list is the history's own."""
        return self._ids.get(request_id, [])

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self._ids.pop(request_id, None)
        self._ends.pop(request_id, None)
