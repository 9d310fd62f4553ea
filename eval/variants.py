"""The ways to generate that a point compares: engines with and without a drafter, and other libraries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from omegaconf import OmegaConf

from specdec.api import LLM
from specdec.build import named_drafter
from specdec.errors import ConfigError, SpecdecError
from specdec.eval.comparison import check_beside
from specdec.eval.llm_options import llm_options
from specdec.eval.peer_variants import GaveUp, PeerVariant
from specdec.eval.peers import Peer, PeerAbsent, build_peer
from specdec.eval.peers.interface import wait_for
from specdec.eval.records import BASELINE, CONTROL, RequestRecord, VariantInfo
from specdec.eval.step_log import StepLog
from specdec.interfaces import SamplingParams
from specdec.repetition import first_repeat
from specdec.running import run
from specdec.sampling import warn_without_effect

# Settings that say how drafts are made: the undrafted engine has none of them, lest it pays for a policy.
_OF_DRAFTING = ("drafter", "drafter_options", "verifier", "verifier_options")
_OF_DRAFT_LENGTH = ("max_draft_tokens", "draft_length", "confidence_threshold")


class Variant(Protocol):
    """One of them."""

    @property
    def info(self) -> VariantInfo: ...

    @property
    def remembers(self) -> bool:
        """True if what one answer left behind decides on how the next is drafted, or on what is computed of it."""
        ...

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        """Return one answer per prompt, run together; `cases` are the prompts' numbers."""
        ...

    def reset(self) -> None:
        """Forget what was learned from answers: the next ones may be to the same prompts."""
        ...

    def close(self) -> None:
        """Give back what another library holds; it is not run after, and may be told so twice."""
        ...


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """An engine of ours."""

    info: VariantInfo
    llm: LLM
    options: dict[str, Any]  # temperature, seed and ignore_eos

    @property
    def remembers(self) -> bool:
        engine = self.llm.engine
        learns = engine.draft_length.remembers or getattr(engine.drafter, "remembers", False)
        return engine.config.prefix_caching or learns

    def run(self, cases: Sequence[int], prompts: Sequence[list[int]], max_new_tokens: int) -> list[RequestRecord]:
        device = self.llm.model.device
        options = {**self.options, "max_new_tokens": max_new_tokens}
        wait_for(device)
        start = time.perf_counter()
        jobs = [self.llm.job("eval", prompt, 0, True, options)[0] for prompt in prompts]
        engine = self.llm.refresh()
        before = engine.trace
        engine.trace = log = StepLog(before)
        try:
            requests = run(engine, jobs)
            wait_for(device)
        finally:
            engine.trace = before
        return [
            _record(case, request, steps, start)
            for case, request, steps in zip(cases, requests, log.steps(), strict=True)
        ]

    def reset(self) -> None:
        self.llm.engine.reset()

    def close(self) -> None: ...


def _record(case: int, request: Any, steps: list[list[int]], start: float) -> RequestRecord:
    stats, ids = request.stats, list(request.new_tokens)
    record = RequestRecord(
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
        num_drafter_errors=stats.num_drafter_errors,
        num_rejected_drafts=stats.num_rejected_drafts,
        num_missed_drafts=stats.num_missed_drafts,
    )
    ours = record.stats()
    for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "reached_at"):
        assert getattr(ours, name) == getattr(stats, name), f"{name} of the steps is not the engine's"
    return record


@dataclass(slots=True)
class Variants:
    """All of a point, the undrafted engine first, and those that are absent, with reasons. Closes its peers."""

    found: list[Variant] = field(default_factory=list)
    absent: list[dict[str, str]] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Variants:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what peers hold."""
        self._held.close()

    @property
    def infos(self) -> list[VariantInfo]:
        return [variant.info for variant in self.found]

    def add(self, variant: Variant) -> None:
        self._held.callback(variant.close)
        self.check_name(variant.info.name)
        self.found.append(variant)

    def check_name(self, name: str) -> None:
        """Raise ConfigError if there is a variant of this name already."""
        if any(info.name == name for info in self.infos):
            raise ConfigError(f"this run has two variants called {name!r}; give the one in beside another name")

    def expect(self, counts: Sequence[int | None]) -> None:
        """Tell peers how many tokens to give, by case."""
        for variant in self.found:
            if isinstance(variant, PeerVariant):
                variant.counts = counts


def build_variants(base: LLM, config: Any, gave_up: Sequence[VariantInfo] = ()) -> Variants:
    """Return the variants of a config; a drafter under `beside` or a peer that does not fit the target is absent.

    Args:
        base: the undrafted target.
        config: of the comparison.
        gave_up: peers that an earlier session dropped: they keep their place and are not built.

    Raises:
        ConfigError: two have one name, or one cannot be built.
    """
    variants = Variants()
    try:
        _add_engines(variants, base, config)
        options: Any = OmegaConf.to_container(config.peer_options, resolve=True)
        for name in sorted(options.keys() - set(config.peers)):
            warn_without_effect(f"peer_options.{name}", f"where peers={list(config.peers)}")
        usual = {"draft_model": _draft_model(variants.infos)}
        dropped = {info.name: info for info in gave_up}
        for name in map(str, config.peers):
            variants.check_name(name)
            if name in dropped:
                variants.add(GaveUp(dropped[name]))
                continue
            try:
                variants.add(PeerVariant(_peer(name, base, config, usual | options.get(name, {}))))
            except PeerAbsent as error:
                variants.absent.append({"name": name, "reason": str(error)})
    except BaseException:
        variants.close()
        raise
    return variants


def _add_engines(variants: Variants, base: LLM, config: Any) -> None:
    sampling = {"temperature": config.temperature, "seed": config.seed}
    how = {**sampling, "ignore_eos": config.ignore_eos}
    options = {k: v for k, v in llm_options(config).items() if k != "dtype"}
    plain = {k: v for k, v in options.items() if k not in (*_OF_DRAFTING, *_OF_DRAFT_LENGTH)}

    def add(name: str, own: dict[str, Any]) -> None:
        llm = LLM(base.model, tokenizer=base.tokenizer, **own)
        variants.add(EngineVariant(_info(name, llm, own, plain, sampling), llm, how))

    add(BASELINE, plain)
    if config.control:
        add(CONTROL, plain)
    drafter = str(options.get("drafter", "none"))
    if drafter != "none":
        add(drafter, options)
    for name, settings in (OmegaConf.to_container(config.beside, resolve=True) or {}).items():
        variants.check_name(str(name))
        own = _beside(str(name), settings or {}, options)
        named_drafter(own["drafter"], own["drafter_options"])  # a name that nobody has is an error, not an absence
        try:
            add(str(name), own)
        except SpecdecError as error:
            variants.absent.append({"name": str(name), "reason": str(error)})


def _beside(name: str, settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a variant that is described by how it differs.

    Its drafter is that of its name unless it says another; whatever else it does not name is the config's.
    """
    check_beside(name, settings)
    own = dict(options) | {"drafter": name, "drafter_options": {}}
    if "drafter" in settings and settings["drafter"] == options.get("drafter"):
        own["drafter_options"] = options.get("drafter_options") or {}
    if settings.get("verifier", options.get("verifier")) != options.get("verifier"):
        own["verifier_options"] = {}
    return own | settings


def _draft_model(infos: Sequence[VariantInfo]) -> str | None:
    """Return what the first variant whose drafter is `draft_model` drafts with; None: the model that ships."""
    for info in infos:
        if info.drafter == "draft_model":
            model: str | None = info.options.get("drafter_options", {}).get("model")
            return model
    return None


def _peer(name: str, base: LLM, config: Any, options: dict[str, Any]) -> Peer:
    return build_peer(
        name,
        base,
        source=config.target.name,
        temperature=config.temperature,
        seed=config.seed,
        num_draft_tokens=options.get("num_draft_tokens"),
        draft_model=options.get("draft_model"),
        batch_size=config.batch_size,
    )


def _info(name: str, llm: LLM, own: dict[str, Any], plain: dict[str, Any], sampling: dict[str, Any]) -> VariantInfo:
    engine = llm.engine
    asked = SamplingParams(**sampling), engine.drafter.samples
    rule, keeps_law = engine.verifiers.of(*asked), engine.verifiers.is_lossless(*asked)
    drafts = engine.drafter.name != "none"
    differing = {k: v for k, v in own.items() if k not in ("drafter", "verifier") and v != plain.get(k) and v != {}}
    options = {k: str(v) if not isinstance(v, int | float | str | dict | list) else v for k, v in differing.items()}
    most = engine.config.max_draft_tokens if drafts else 0
    # Where keys and values are stored in fewer bits than the baseline's, the model is another, whatever the rule.
    lossless = (keeps_law or not drafts) and own.get("kv_dtype") == plain.get("kv_dtype")
    return VariantInfo(name, "engine", engine.drafter.name, rule.name, lossless, most, options)
