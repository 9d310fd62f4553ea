"""The settings of a comparison, checked: what the runner measures, whichever command it runs for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from specdec.build import split_options
from specdec.errors import ConfigError
from specdec.eval.peers import OPTIONS, PEERS
from specdec.eval.setting_checks import check_amount, check_flag, check_integer
from specdec.registry import DRAFTERS, VERIFIERS, named_parameters, refuse_unknown

_LEAST = {"batch_size": 1, "max_new_tokens": 2, "context_tokens": 1, "seed": 0, "repeats": 1}
_METHODS = ("drafter", "drafter_options", "verifier", "verifier_options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig:
    """What the runner compares. One default per knob, here."""

    beside: dict[str, Any] = field(default_factory=dict)  # more variants, by name, each with what differs
    peers: list[str] = field(default_factory=list)  # other libraries: specdec.eval.peers, see docs/peers.md
    peer_options: dict[str, Any] = field(default_factory=dict)  # by peer: {num_draft_tokens: 4, draft_model: PATH}
    control: bool = True  # the undrafted engine a second time: its ratio shows what noise does
    batch_size: int = 1  # prompts per call
    max_new_tokens: int = 128
    ignore_eos: bool = False  # True: all of max_new_tokens; False: as many tokens as the undrafted answer has
    context_tokens: int | None = None  # prompts are filled up to so many tokens with other prompts of the set
    temperature: float = 0.0
    seed: int | None = None  # with a seed `auto` is `match`
    repeats: int = 3  # of every variant on every batch, in balanced order
    step_times: bool = True  # measure t(M), read bandwidth and FLOP/s
    near_tie: float | None = None  # largest difference of two logits that is a tie; by dtype (float32: 2e-4)
    question: str | None = None  # that the report prints as its title

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least, optional=name in ("context_tokens", "seed"))
        for name in ("control", "ignore_eos", "step_times"):
            check_flag(name, getattr(self, name))
        check_amount("temperature", self.temperature)
        check_amount("near_tie", self.near_tie, optional=True)
        if self.question is not None and not isinstance(self.question, str):
            raise ConfigError(f"question={self.question!r}; allowed: a text or null")
        _check_peers(self.peers)
        _check_peer_options(self.peer_options)
        if not isinstance(self.beside, dict):
            raise ConfigError(f"beside={self.beside!r}; allowed: {{NAME: {{setting: value}}}}")
        for name, settings in self.beside.items():
            check_beside(str(name), settings)


def check_beside(name: str, settings: Any) -> None:
    """Raise ConfigError for settings of the variant `name` that no engine has, or with values that none takes.

    Args:
        name: in `beside`, and of its drafter unless it says another.
        settings: of the engine, and drafter, drafter_options, verifier, verifier_options; None = none.
    """
    if settings is None:
        return
    before = f"beside.{name}"
    if not isinstance(settings, dict):
        raise ConfigError(f"{before}={settings!r}; allowed: settings such as {{max_draft_tokens: 4}}, or {{}}")
    of_engine = {f.name for usual in split_options({}) for f in fields(usual)}
    refuse_unknown(f"the variant {name!r}", settings, {*_METHODS, *of_engine}, before=f"{before}.")
    for key in ("drafter", "verifier"):
        if key in settings and not isinstance(settings[key], str):
            raise ConfigError(f"{before}.{key}={settings[key]!r}; allowed: the name of a {key}")
    for key in ("drafter_options", "verifier_options"):
        if not isinstance(settings.get(key, {}), dict):
            raise ConfigError(f"{before}.{key}={settings[key]!r}; allowed: {{option: value}}")
    with dotted(before, of_engine):
        split_options({key: value for key, value in settings.items() if key in of_engine})
    _check_method_options(name, settings)


@contextmanager
def dotted(group: str, names: Collection[str]) -> Iterator[None]:
    """Put the group's name before a setting's, with which a ConfigError from within begins."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        begins = any(text.startswith((f"{name}=", f"{name} ", f"{name}[")) for name in names)
        if not group or not begins:
            raise
        raise ConfigError(f"{group}.{text}") from error


def _check_method_options(name: str, settings: dict[str, Any]) -> None:
    """Raise ConfigError for an option that the variant's drafter or verifier does not have."""
    drafter, verifier = settings.get("drafter", name), settings.get("verifier")
    for what, method, registry, reserved in (("drafter", drafter, DRAFTERS, 1), ("verifier", verifier, VERIFIERS, 0)):
        options = settings.get(f"{what}_options", {})
        if options and method in registry.names():
            kind = registry.load(method)
            named = named_parameters(kind.build if what == "drafter" else kind, reserved)
            if named is not None:
                before = f"beside.{name}.{what}_options."
                refuse_unknown(f"{what} {method!r}", options, (p.name for p in named), before=before)


def _check_peers(peers: Any) -> None:
    if not isinstance(peers, list):
        raise ConfigError(f"peers={peers!r}; allowed: a list such as [transformers]")
    for name in peers:
        if name not in PEERS:
            close = get_close_matches(str(name), PEERS, n=1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"peers={peers} has the unknown {name!r};{hint} available: {', '.join(PEERS)}")
    if len(set(peers)) < len(peers):
        raise ConfigError(f"peers={peers} has a name twice; give each once")


def _check_peer_options(options: Any) -> None:
    """Raise ConfigError for an option that its peer does not have, or does not take with such a value."""
    if not isinstance(options, dict):
        raise ConfigError(f"peer_options={options!r}; allowed: {{PEER: {{option: value}}}}")
    refuse_unknown("this comparison", map(str, options), PEERS, before="peer_options.")
    for name, settings in options.items():
        before = f"peer_options.{name}"
        if not isinstance(settings, dict):
            raise ConfigError(f"{before}={settings!r}; allowed: {{option: value}}, or {{}}")
        refuse_unknown(f"the peer {name!r}", settings, OPTIONS.get(str(name), ()), before=f"{before}.")
        check_integer(f"{before}.num_draft_tokens", settings.get("num_draft_tokens"), 1, optional=True)
        model = settings.get("draft_model")
        if model is not None and not isinstance(model, str):
            raise ConfigError(f"{before}.draft_model={model!r}; allowed: a path or name, or null")
