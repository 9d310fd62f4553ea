"""Other libraries' engines as variants of a point."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.eval.peers import Peer
from specdec.eval.record_checks import check_request
from specdec.eval.records import RequestRecord, VariantInfo
from specdec.repetition import first_repeat

log = logging.getLogger("specdec")


@dataclass(slots=True)
class PeerVariant:
    """Another library's engine."""

    peer: Peer
    counts: Sequence[int | None] = ()  # by case: how many tokens it is asked for

    @property
    def info(self) -> VariantInfo:
        return self.peer.info

    @property
    def remembers(self) -> bool:
        return False

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        """Return one answer per prompt; see `Variant`.

        Raises:
            RuntimeError: it gave another number of tokens than it was asked for.
            ValueError: what it says of them cannot be.
        """
        counts = [min(self.counts[case] or max_new_tokens, max_new_tokens) for case in cases]
        answers = self.peer.run(prompts, counts)
        found = [len(answer.token_ids) for answer in answers]
        if found != counts:
            raise RuntimeError(f"answers of {found} tokens where {counts} were asked for")
        records = [
            RequestRecord(case, answer.token_ids, "length", answer.emissions, cut=first_repeat(answer.token_ids))
            for case, answer in zip(cases, answers, strict=True)
        ]
        for record in records:
            check_request(record)  # here it costs the peer, in the file it would cost the point
        return records

    def reset(self) -> None: ...

    def close(self) -> None:
        """Give back what it holds; that it cannot is said, and no reason to lose what was measured."""
        try:
            self.peer.close()
        except Exception as error:  # whatever a library makes of it
            log.warning("%s did not close: %s: %s", self.info.name, type(error).__name__, error)


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A peer that was dropped in an earlier session: it is named, so that the order of turns stays, and never run."""

    info: VariantInfo

    @property
    def remembers(self) -> bool:
        return False

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        raise AssertionError(f"{self.info.name} gave up and must not be run")

    def reset(self) -> None: ...

    def close(self) -> None: ...
