"""The tokens of each request as a drafter has heard of them. Shared by drafters; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.interfaces import Observation


class TokenHistory:
    """Token lists by request, kept true by observations: what is heard again replaces what was known."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def observe(self, seen: Sequence[Observation]) -> None:
        """Take in new tokens. An observation may start before the end of what is known, never after it."""
        for observation in seen:
            known = self._tokens.setdefault(observation.request_id, [])
            assert observation.start <= len(known), (
                f"request {observation.request_id}: tokens from {observation.start} on, but {len(known)} are known"
            )
            known[observation.start :] = observation.token_ids.tolist()

    def of(self, request_id: int) -> list[int]:
        """Return the known tokens of a request, oldest first; the list is the history's own."""
        return self._tokens.get(request_id, [])

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self._tokens.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._tokens.clear()
