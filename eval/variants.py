"""The ways to generate that a point compares: engines with and without a drafter, and other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import OmegaConf

from specdec.api import LLM
from specdec.errors import ConfigError
from specdec.eval.llm_options import llm_options
from specdec.eval.peers import Peer, PeerAbsent, build_peer
from specdec.eval.peers.interface import wait_for
from specdec.eval.records import BASELINE, CONTROL, RequestRecord, VariantInfo
from specdec.eval.step_log import StepLog
from specdec.interfaces import SamplingParams
from specdec.repetition import first_repeat
from specdec.running import run


class Variant(Protocol):
    """One of them."""

    @property
    def info(self) -> VariantInfo: ...

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        """Return one answer per prompt, run together; `cases` are the prompts' numbers."""
        ...

    def reset(self) -> None:
        """Forget what was learned from answers: the next ones may be to the same prompts."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """An engine of ours."""

    info: VariantInfo
    llm: LLM
    options: dict[str, Any]  # temperature, seed and ignore_eos

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        options = {**self.options, "max_new_tokens": max_new_tokens}
        jobs = [self.llm.job("eval", prompt, 0, True, options)[0] for prompt in prompts]
        engine = self.llm.refresh()
        before = engine.trace
        engine.trace = log = StepLog(before)
        wait_for(self.llm.model.device)
        start = time.perf_counter()
        try:
            requests = run(engine, jobs)
            wait_for(self.llm.model.device)
        finally:
            engine.trace = before
        records = []
        for case, request, steps in zip(cases, requests, log.steps(), strict=True):
            stats, ids = request.stats, list(request.new_tokens)
            records.append(
                RequestRecord(
                    case=case,
                    token_ids=ids,
                    finish_reason=request.finish_reason or "abort",
                    emissions=[[at - start, count] for at, count in stats.emissions],
                    steps=steps,
                    prefill_s=stats.prefill_s,
                    draft_s=stats.draft_s,
                    verify_s=stats.verify_s,
                    other_s=stats.other_s,
                    cut=first_repeat(ids),
                )
            )
            ours = records[-1].stats()
            for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "reached_at"):
                assert getattr(ours, name) == getattr(stats, name), f"{name} of the steps is not the engine's"
        return records

    def reset(self) -> None:
        engine = self.llm.engine
        engine.drafter.reset()
        for cache in (engine.target.cache, getattr(engine.drafter, "own_cache", None)):
            if cache is not None:
                cache.forget_prefixes()

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerVariant:
    """Another library's engine."""

    info: VariantInfo
    peer: Peer
    counts: Sequence[int | None]  # by case: how many tokens it is asked for

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        counts = [min(self.counts[case] or max_new_tokens, max_new_tokens) for case in cases]
        return [
            RequestRecord(case, answer.token_ids, "length", answer.emissions, cut=first_repeat(answer.token_ids))
            for case, answer in zip(cases, self.peer.run(prompts, counts), strict=True)
        ]

    def reset(self) -> None: ...

    def close(self) -> None:
        self.peer.close()


def build_variants(base: LLM, config: Any, counts: Sequence[int | None]) -> tuple[list[Variant], list[dict[str, str]]]:
    """Return the variants of a config, the undrafted engine first, and the peers that are absent, with reasons.

    Args:
        base: the undrafted target.
        config: of the comparison.
        counts: by case, how many tokens peers are asked for.

    Raises:
        ConfigError: two have one name, or one cannot be built.
    """
    sampling = {"temperature": config.temperature, "seed": config.seed}
    options = llm_options(config) | {"dtype": None}
    plain = {k: v for k, v in options.items() if not k.startswith(("drafter", "verifier"))}
    how = {**sampling, "ignore_eos": config.ignore_eos}
    found: list[Variant] = [EngineVariant(_info(BASELINE, base, plain, plain, sampling), base, how)]

    def add(name: str, own: dict[str, Any]) -> None:
        if any(variant.info.name == name for variant in found):
            raise ConfigError(f"beside.{name}: this run has a variant of this name already; give it another")
        llm = LLM(base.model, tokenizer=base.tokenizer, **own)
        found.append(EngineVariant(_info(name, llm, own, plain, sampling), llm, how))

    if config.control:
        add(CONTROL, plain)
    drafter = str(options.get("drafter", "none"))
    if drafter != "none":
        add(drafter, options)
    for name, settings in (OmegaConf.to_container(config.beside, resolve=True) or {}).items():
        _beside(str(name), settings or {}, options, add)
    absent = []
    for name in config.peers:
        try:
            peer = _peer(str(name), base, config)
        except PeerAbsent as error:
            absent.append({"name": str(name), "reason": str(error)})
        else:
            found.append(PeerVariant(peer.info, peer, counts))
    return found, absent


def _beside(
    name: str, settings: dict[str, Any], options: dict[str, Any], add: Callable[[str, dict[str, Any]], None]
) -> None:
    """Add a variant that is described by how it differs; its drafter is that of its name unless it says another."""
    if not isinstance(settings, dict):
        raise ConfigError(f"beside.{name}={settings!r}; allowed: settings such as max_draft_tokens: 4, or nothing")
    own = dict(options) | {"drafter": name, "drafter_options": {}}
    if "drafter" in settings and settings["drafter"] == options.get("drafter"):
        own["drafter_options"] = options.get("drafter_options") or {}
    if settings.get("verifier", options.get("verifier")) != options.get("verifier"):
        own["verifier_options"] = {}
    add(name, own | settings)


def _peer(name: str, base: LLM, config: Any) -> Peer:
    peer = build_peer(
        name,
        base,
        source=config.target.name,
        temperature=config.temperature,
        seed=config.seed,
        num_draft_tokens=OmegaConf.select(config, "engine.max_draft_tokens"),
        draft_model=config.drafter.options.get("model") if config.drafter.name == "draft_model" else None,
    )
    if config.batch_size > peer.max_batch:
        peer.close()
        raise PeerAbsent(f"takes {peer.max_batch} prompts at once, batch_size is {config.batch_size}")
    return peer


def _info(name: str, llm: LLM, own: dict[str, Any], plain: dict[str, Any], sampling: dict[str, Any]) -> VariantInfo:
    engine = llm.engine
    rule = engine.verifiers.of(SamplingParams(**sampling), engine.drafter.samples)
    differing = {k: v for k, v in own.items() if k not in ("drafter", "verifier") and v and v != plain.get(k)}
    most = engine.config.max_draft_tokens if engine.drafter.name != "none" else 0
    options = {k: str(v) if not isinstance(v, int | float | str | dict | list) else v for k, v in differing.items()}
    return VariantInfo(name, "engine", engine.drafter.name, rule.name, rule.lossless, most, options)
