"""What the stepping thread has for streams, which are read in event loops of other threads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from specdec.api import Piece
from specdec.worker import storable

_Item = Piece | BaseException


class Mailbox:
    """Where the pieces of one stream arrive. Made in its event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()

    async def next(self) -> Piece:
        """Return the next piece, or raise what ended the stream."""
        item = await self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


class Mail:
    """The mailboxes of open streams by request id. Belongs to the thread that steps."""

    def __init__(self) -> None:
        self._boxes: dict[int, Mailbox] = {}
        self._of_loop: defaultdict[asyncio.AbstractEventLoop, set[int]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._boxes)

    def open(self, request_id: int, box: Mailbox) -> None:
        """Have a request's pieces go to a mailbox."""
        self._boxes[request_id] = box
        self._of_loop[box.loop].add(request_id)

    def close(self, request_id: int) -> None:
        """Forget a request's mailbox, if it has one."""
        box = self._boxes.pop(request_id, None)
        if box is not None:
            own = self._of_loop[box.loop]
            own.discard(request_id)
            if not own:
                del self._of_loop[box.loop]

    def orphans(self) -> list[int]:
        """Return the requests whose event loops are closed, so that nobody will ever read them."""
        return [request_id for loop, own in self._of_loop.items() if loop.is_closed() for request_id in own]

    def send(self, pieces: Iterable[Piece]) -> None:
        """Put pieces into the mailboxes that are still open."""
        addressed = ((self._boxes.get(piece.index), piece) for piece in pieces)
        _send([(box, piece) for box, piece in addressed if box is not None])

    def fail(self, error: BaseException) -> list[int]:
        """Tell every stream of an error, forget all and return their requests."""
        _send([(box, storable(error)) for box in self._boxes.values()])
        request_ids = list(self._boxes)
        self._boxes.clear()
        self._of_loop.clear()
        return request_ids


def _send(items: Sequence[tuple[Mailbox, _Item]]) -> None:
    """Hand items over, all of an event loop's at once: waking it costs more than everything else."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Mailbox, _Item]]] = defaultdict(list)
    for box, item in items:
        by_loop[box.loop].append((box, item))
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # closed: see `Mail.orphans`
            loop.call_soon_threadsafe(_put, own)


def _put(items: Sequence[tuple[Mailbox, _Item]]) -> None:
    for box, item in items:
        box.queue.put_nowait(item)
