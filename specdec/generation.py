"""The doors for programs that call transformers' generate(): `generate` in its place, `custom_generate` inside it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from specdec.acceptance import VerifierChoice
from specdec.build import OWN_FIELDS, build_engine, build_verifiers, split_options
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError, InputError
from specdec.interfaces import Drafter, Verifier
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.compatibility import refuse_unsupported
from specdec.models.generate_output import GenerateOutput, output_of, sequences_of
from specdec.models.generation import (
    Call,
    Resolved,
    as_processors,
    mask_of,
    prepare,
    read_config,
    refuse_config,
    resolve,
)
from specdec.models.wrapped import refuse_inputs, unwrapped
from specdec.record import Keep
from specdec.running import Job, check_streamer, run
from specdec.sampling import warn_ignored, warn_without_effect


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts for a call, and how it is verified."""

    drafter: str | Drafter = "none"
    options: dict[str, Any] | None = None
    verifiers: VerifierChoice = field(default_factory=lambda: build_verifiers("auto"))
    engine: EngineConfig = field(default_factory=EngineConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    tokenizer: Any | None = None


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    drafter: str | Drafter | None = None,
    verifier: str | Verifier = "auto",
    verifier_options: dict[str, Any] | None = None,
    drafter_options: dict[str, Any] | None = None,
    tokenizer: Any | None = None,
    generation_config: Any | None = None,
    logits_processor: Any | None = None,
    stopping_criteria: Any | None = None,
    prefix_allowed_tokens_fn: Any | None = None,
    assistant_model: Any | None = None,
    assistant_tokenizer: Any | None = None,
    streamer: Any | None = None,
    seed: int | None = None,
    return_stats: bool = False,
    output_logprobs: bool = False,
    **kwargs: Any,
) -> Any:
    """Generate as transformers' `model.generate()` does, with drafting, and return the same ids.

    Args:
        model: a transformers causal LM; never modified.
        input_ids: [B, n] int64; rows may be left- or right-padded. `inputs` is another name for it. None begins with
            the BOS token.
        attention_mask: [B, n], zero at padding; None = as transformers infers it.
        drafter: a registered name, "package.module:Class", a head's folder or hub id, or a Drafter; None = as
            transformers' own options say (`assistant_model`, `prompt_lookup_num_tokens`, `assistant_early_exit`), else
            "none".
        verifier: "auto", a registered name or a Verifier.
        verifier_options: keyword arguments of a verifier that is named.
        drafter_options: keyword arguments of the drafter.
        tokenizer: for stop strings; lets drafters check vocabularies and calibrate on text.
        generation_config: as in transformers.
        logits_processor: as in transformers, but called with one row [1, n] at a time.
        stopping_criteria: likewise.
        prefix_allowed_tokens_fn: as in transformers.
        assistant_model: the draft model, drafter "draft_model".
        assistant_tokenizer: its tokenizer; with another one than `tokenizer`, only tokens of both are drafted.
        streamer: as in transformers, for one row.
        seed: of every row; None draws one per row from torch's global generator.
        return_stats: return (result, list of RequestStats, one per sequence).
        output_logprobs: with return_dict_in_generate, also `logprobs` and `raw_logprobs` [B, m].
        kwargs: GenerationConfig fields (max_new_tokens, do_sample, temperature, stop_strings, ...) and fields of
            `EngineConfig` and `RunnerConfig` (max_draft_tokens, ...).

    Returns:
        [B * num_return_sequences, n + m] int64: `input_ids`, padding included, then the new tokens, padded on the
        right with the pad token. With return_dict_in_generate a `GenerateOutput`.

    Raises:
        ConfigError: an option is unknown or not supported, by name.
        InputError: the prompts do not fit.
        UnsupportedModelError: the model cannot run on this engine, by feature.
    """
    if input_ids is not None and kwargs.get("inputs") is not None:
        raise ConfigError("generate() was given input_ids and inputs, which are two names of one thing")
    input_ids = kwargs.pop("inputs", None) if input_ids is None else input_ids
    own_options = {k: kwargs.pop(k) for k in sorted(OWN_FIELDS) if k in kwargs}
    engine, runner = split_options(own_options)
    verifiers = build_verifiers(verifier, verifier_options)
    chosen = Speculation("none" if drafter is None else drafter, drafter_options, verifiers, engine, runner, tokenizer)
    model = unwrapped(model)
    refuse_unsupported(model)
    config, explicit = read_config(model, generation_config, refuse_inputs(model, kwargs))
    asked = _transformers_spelling(config, _length_settings(model, config, explicit, assistant_model), assistant_model)
    if assistant_tokenizer is not None:
        asked = _with_tokenizer(asked, assistant_tokenizer)
    chosen = _merge(chosen, asked, drafter, explicit, own_options)
    ids = _input_ids(input_ids, config)
    mask = mask_of(ids, attention_mask, config)
    num_return = _num_return_sequences(config)
    check_streamer(streamer, len(ids), num_return)
    ids, mask = (t.repeat_interleave(num_return, dim=0) for t in (ids, mask))
    call = prepare(
        model,
        ids,
        config,
        explicit,
        attention_mask=mask,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        tokenizer=tokenizer,
    )
    keep = _keep(config, output_logprobs)
    resolved = resolve(model, ids, mask, call, seed, num_return, keep)
    return _generate(model, ids, resolved, chosen, config, streamer, return_stats)


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: str | Drafter | None = None,
    verifier: str | Verifier = "auto",
    verifier_options: dict[str, Any] | None = None,
    drafter_options: dict[str, Any] | None = None,
    max_draft_tokens: int | None = None,
    draft_length: str | None = None,
    engine_options: dict[str, Any] | None = None,
    spec_tokenizer: Any | None = None,
    spec_streamer: Any | None = None,
    seed: int | None = None,
    return_stats: bool = False,
    output_logprobs: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decode inside transformers' generate(): `model.generate(..., custom_generate=specdec.custom_generate)`.

    transformers prepares prompts, processors and stopping criteria and calls this. It does not hand on `streamer`,
    `tokenizer` and `assistant_model` to a function, hence the names `spec_streamer` and `spec_tokenizer` here, and
    `drafter="draft_model", drafter_options={"model": ...}`. Nor does it build a criterion from `stop_strings`: pass
    stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)].

    Args:
        model: the model whose generate() was called.
        input_ids: [B, n] int64, expanded by num_return_sequences.
        logits_processor: prepared by transformers.
        stopping_criteria: prepared by transformers.
        generation_config: prepared by transformers.
        drafter: as for `generate`, like every other option here.
        verifier: likewise.
        verifier_options: likewise.
        drafter_options: likewise.
        max_draft_tokens: likewise.
        draft_length: likewise.
        engine_options: further fields of `EngineConfig` and `RunnerConfig`.
        spec_tokenizer: the tokenizer, for drafters.
        spec_streamer: gets the tokens; the prompt is put here, too.
        seed: likewise.
        return_stats: likewise.
        output_logprobs: likewise.
        model_kwargs: from transformers: attention_mask, and what a specdec engine does not need.

    Returns:
        As transformers' generate().
    """
    options = dict(engine_options or {})
    given = {"max_draft_tokens": max_draft_tokens, "draft_length": draft_length}
    options |= {k: v for k, v in given.items() if v is not None}
    engine, runner = split_options(options)
    model = unwrapped(model)
    _refuse_model_kwargs(model, model_kwargs)
    refuse_unsupported(model)
    refuse_config(generation_config)
    call = Call(generation_config, as_processors(logits_processor), list(stopping_criteria))
    num_return = _num_return_sequences(generation_config)
    keep = _keep(generation_config, output_logprobs)
    # An absent mask means all ones here: transformers has inferred it already.
    given_mask = model_kwargs.get("attention_mask")
    given_mask = torch.ones_like(input_ids) if given_mask is None else given_mask
    mask = mask_of(input_ids, given_mask, generation_config)
    _check_positions(model_kwargs.get("position_ids"), mask)
    resolved = resolve(model, input_ids, mask, call, seed, num_return, keep)
    chosen = Speculation(
        "none" if drafter is None else drafter,
        drafter_options,
        build_verifiers(verifier, verifier_options),
        engine,
        runner,
        spec_tokenizer,
    )
    # Which of the other settings are the caller's cannot be seen here.
    chosen = _merge(chosen, _transformers_spelling(generation_config, {}, None), drafter, set(), options)
    check_streamer(spec_streamer, len(input_ids) // num_return, num_return)
    return _generate(model, input_ids, resolved, chosen, generation_config, spec_streamer, return_stats)


def _generate(
    model: Any,
    input_ids: Tensor,
    resolved: Resolved,
    chosen: Speculation,
    config: Any,
    streamer: Any | None,
    return_stats: bool,
) -> Any:
    runner = runner_for(model, chosen.runner, chosen.tokenizer).with_own_cache()
    engine = build_engine(
        runner,
        chosen.drafter,
        chosen.verifiers,
        chosen.engine,
        tokenizer=chosen.tokenizer,
        drafter_options=chosen.options,
    )
    for sampling in resolved.sampling[:1]:
        warn_ignored(sampling)
    rows = zip(resolved.prompts, resolved.sampling, resolved.stop, strict=True)
    requests = run(engine, [Job(*row, resolved.keep) for row in rows], streamer)
    sequences = sequences_of(input_ids, requests, resolved.pad_token_id)
    result: Tensor | GenerateOutput = sequences
    if config.return_dict_in_generate:
        result = output_of(sequences, requests)
    return (result, [r.stats for r in requests]) if return_stats else result


def _input_ids(input_ids: Any, config: Any) -> Tensor:
    if input_ids is None:
        bos = config.bos_token_id
        if bos is None:
            raise InputError("generate() needs input_ids: the model has no BOS token to begin with")
        return torch.tensor([[bos if isinstance(bos, int) else bos[0]]])
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids is a [batch, length] tensor, got {type(input_ids).__name__}")
    return input_ids


def _check_positions(position_ids: Any, mask: Tensor) -> None:
    """Raise ConfigError unless positions are those that follow from the mask, as transformers makes them."""
    if position_ids is None:
        return
    expected = mask.to(torch.int64).cumsum(dim=1) - 1
    given = position_ids[..., -expected.shape[1] :].to(expected.device)
    if given.dim() != 2 or bool(((given != expected) & mask.bool()).any()):
        raise ConfigError("position_ids are not those that follow from attention_mask; leave them out")


def _num_return_sequences(config: Any) -> int:
    value = 1 if config.num_return_sequences is None else config.num_return_sequences
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"num_return_sequences={value!r}; allowed: an integer >= 1")
    return value


def _keep(config: Any, output_logprobs: bool) -> Keep:
    if not config.return_dict_in_generate:
        if output_logprobs:
            raise ConfigError("output_logprobs=True needs return_dict_in_generate=True, which has a place for them")
        return Keep()
    return Keep(
        logits=bool(config.output_logits),
        scores=bool(config.output_scores),
        logprobs=0 if output_logprobs else None,
    )


_LENGTH_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def _length_settings(model: Any, config: Any, explicit: set[str], assistant_model: Any | None) -> dict[str, Any]:
    """Return transformers' settings of the draft length: the call's, else the model's, else the assistant's own."""
    found: dict[str, Any] = {}
    for name in _LENGTH_SETTINGS:
        own = getattr(getattr(assistant_model, "generation_config", None), name, None)
        if name in explicit or getattr(model.generation_config, name, None) is not None:
            found[name] = getattr(config, name)
        elif own is not None:
            found[name] = own
    return found


def _transformers_spelling(config: Any, lengths: dict[str, Any], assistant_model: Any | None) -> Speculation | None:
    """Return the drafter that transformers' own options ask for, or None. At most one may."""
    asked: dict[str, Speculation] = {}
    engine: dict[str, Any] = {}
    if assistant_model is not None:
        asked["assistant_model"] = Speculation("draft_model", {"model": assistant_model})
    if config.assistant_early_exit is not None:
        asked["assistant_early_exit"] = Speculation("early_exit", {"num_layers": config.assistant_early_exit})
    if config.prompt_lookup_num_tokens is not None:
        size = config.max_matching_ngram_size
        asked["prompt_lookup_num_tokens"] = Speculation("ngram", {"max_ngram": size} if size else None)
        engine["max_draft_tokens"] = config.prompt_lookup_num_tokens
    elif "num_assistant_tokens" in lengths:
        engine["max_draft_tokens"] = lengths["num_assistant_tokens"]
    if len(asked) > 1:
        raise ConfigError(f"generate() was given {' and '.join(asked)}; one of them can draft")
    if not asked:
        return None
    if lengths.get("num_assistant_tokens_schedule") not in (None, "constant"):
        engine["draft_length"] = "cost_aware"  # what the heuristics of transformers are for
    threshold = lengths.get("assistant_confidence_threshold")
    if threshold and "prompt_lookup_num_tokens" not in asked:
        engine["confidence_threshold"] = threshold
        engine.setdefault("draft_length", "confidence")
    return replace(next(iter(asked.values())), engine=EngineConfig(**engine))


def _with_tokenizer(asked: Speculation | None, tokenizer: Any) -> Speculation:
    """Return a draft model's speculation with its tokenizer, which is compared with the target's."""
    if asked is None or asked.drafter != "draft_model":
        raise ConfigError("assistant_tokenizer goes with assistant_model, which was not given")
    return replace(asked, options={**(asked.options or {}), "tokenizer": tokenizer})


def _merge(
    chosen: Speculation, asked: Speculation | None, drafter: Any, explicit: set[str], own_options: dict[str, Any]
) -> Speculation:
    """Return what drafts: `asked` in transformers' terms, with what the caller set in specdec's own."""
    if asked is None:
        for name in _LENGTH_SETTINGS:
            if name in explicit and drafter is not None:
                warn_without_effect(name, "beside drafter=; set max_draft_tokens, draft_length, confidence_threshold")
        return chosen
    if drafter is not None:
        raise ConfigError(
            f"generate() was given drafter={drafter!r} and transformers' own options for drafter {asked.drafter!r}; "
            "leave one of them out"
        )
    own = {f.name: own_options[f.name] for f in fields(EngineConfig) if f.name in own_options}
    options = {**(asked.options or {}), **(chosen.options or {})}
    return replace(chosen, drafter=asked.drafter, options=options or None, engine=replace(asked.engine, **own))


_FROM_TRANSFORMERS = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
)


def _refuse_model_kwargs(model: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for inputs of the model's forward that the engine would not run."""
    others = {k: v for k, v in model_kwargs.items() if k not in _FROM_TRANSFORMERS}
    for name, value in refuse_inputs(model, others).items():
        if value is not None:
            own = sorted(set(inspect.signature(custom_generate).parameters) - {"model", "model_kwargs"})
            raise ConfigError(
                f"custom_generate was handed {name!r}, which the engine does not run; it takes token ids and "
                f"attention_mask, and the options {', '.join(own)}"
            )
