"""What a transformers GenerationConfig means for one request: sampling parameters, processors and stop rules."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import ConfigError, InputError
from specdec.interfaces import SamplingParams
from specdec.models.clone import device_of
from specdec.models.rows import PaddedProcessor, RowCriteria, processor_for_row
from specdec.noise import fold_seed
from specdec.record import Keep
from specdec.request import StopRules
from specdec.sampling import check_sampling, warn_without_effect

# Options of generate() that change what is computed and that this engine does not do, with what to do instead.
REFUSED = {
    "num_beams": "beam search keeps several hypotheses; use num_beams=1",
    "num_beam_groups": "beam search keeps several hypotheses; leave it out",
    "constraints": "they need beam search; use prefix_allowed_tokens_fn or a logits processor",
    "force_words_ids": "it needs beam search; use prefix_allowed_tokens_fn or a logits processor",
    "penalty_alpha": "contrastive search ranks candidates by hidden states; leave it out",
    "dola_layers": "DoLa contrasts layers; leave it out",
    "guidance_scale": "classifier-free guidance runs a second, unconditional context; leave it out",
    "inputs_embeds": "drafters need token ids; pass input_ids",
    "past_key_values": "the KV cache is specdec's own; pass the whole prompt as input_ids",
    "output_attentions": "attention weights are never materialised; call the model's forward for them",
    "output_hidden_states": "call the model's forward for them",
    "assistant_ensemble_weight": "mixing the draft into the target changes what is generated; leave it out",
    "use_mtp": "name a drafter instead",
    "speculation_type": "name a drafter instead",
    "is_assistant": "it is for models that draft inside transformers; leave it out",
    "negative_prompt_ids": "classifier-free guidance runs a second, unconditional context; leave it out",
    "negative_prompt_attention_mask": "classifier-free guidance runs a second, unconditional context; leave it out",
    "synced_gpus": "one engine runs in one process; leave it out",
    "token_healing": "heal the prompt first: model.heal_tokens(input_ids, tokenizer)",
}
# Processors with a state of their own for a whole batch: rows are asked about one at a time here.
STATEFUL = (
    *("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "ClassifierFreeGuidanceLogitsProcessor",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "num_beam_groups": (1,), "guidance_scale": (1, 1.0)}
# Meaningless here: arguments that are no fields of a GenerationConfig, and fields, with why.
_WITHOUT_EFFECT = ("trust_remote_code",)
_OWN_CACHE, _OWN_LOOP = "here, the KV cache is specdec's own", "here, the forward is specdec's own"
FIELDS_WITHOUT_EFFECT = {
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len"), _OWN_CACHE),
    **dict.fromkeys(("compile_config", "disable_compile", "continuous_batching_config", "low_memory"), _OWN_LOOP),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), "here, draft models share the target's tokenizer"),
    "prefill_chunk_size": "here; set prefill_chunk_tokens",
}
_OWN_OPTIONS = (
    *("drafter", "drafter_options", "verifier", "max_draft_tokens", "draft_length", "seed", "tokenizer"),
    *("return_stats", "output_logprobs"),
)
# What transformers raises at values it was not written for.
_TRANSFORMERS_ERRORS = (ValueError, TypeError, AttributeError, RuntimeError, IndexError, KeyError)
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of generate() with transformers' defaults filled in."""

    config: GenerationConfig  # a copy; max_length counts the padded prompt
    processors: list[Any]
    criteria: list[Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A call of generate() as the engine understands it, one entry per returned sequence."""

    prompts: list[list[int]]  # without padding, each as often as sequences are to be returned
    sampling: list[SamplingParams]
    stop: list[StopRules]
    num_return_sequences: int
    pad_token_id: int
    keep: Keep


def eos_token_ids(model: Any) -> frozenset[int]:
    """Return the model's EOS set: its generation config's, else its config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset()


def read_config(
    model: Any, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, set[str]]:
    """Return the effective GenerationConfig of a call, and the names that the call itself sets.

    Args:
        model: whose generation config fills what is not given.
        generation_config: as in transformers' generate(); not changed.
        options: its fields as keyword arguments.

    Raises:
        ConfigError: an option is unknown or refused.
    """
    if model.generation_config is None:
        raise ConfigError("the model's generation_config is None; set a GenerationConfig, or use specdec.LLM")
    given = {k: v for k, v in options.items() if v is not None}
    _refuse(given)
    # None overrides what a config says, as in transformers.
    cleared = {k: None for k, v in options.items() if v is None and is_generation_field(k)}
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ConfigError(f"generation_config is a GenerationConfig, got {type(generation_config).__name__}")
    own = copy.deepcopy(generation_config)
    try:
        config, unknown = model._prepare_generation_config(copy.deepcopy(own), **given, **cleared)
    except _TRANSFORMERS_ERRORS as error:
        raise ConfigError(f"generate(): {error}") from error
    _refuse(unknown)  # some that a GenerationConfig carries are handed on to the model
    unknown = {k: v for k, v in unknown.items() if k not in _WITHOUT_EFFECT}
    if unknown:
        name = next(iter(unknown))
        close = difflib.get_close_matches(name, [*_OWN_OPTIONS, *GenerationConfig().to_dict()], n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"generate() has no option {name!r};{hint} known are transformers' GenerationConfig fields and specdec's "
            f"own ({', '.join(_OWN_OPTIONS)}, ...)"
        )
    refuse_config(config)
    names = set(given) | {k for k, v in (own.to_dict() if own is not None else {}).items() if v is not None}
    for name in sorted(names & FIELDS_WITHOUT_EFFECT.keys()):
        if getattr(config, name, None) not in (None, False):
            warn_without_effect(f"{name}={getattr(config, name)!r}", FIELDS_WITHOUT_EFFECT[name])
    return config, names


def is_generation_field(name: str) -> bool:
    """Tell whether transformers' GenerationConfig has a field of that name."""
    return name in GenerationConfig().to_dict()


def refuse_config(config: GenerationConfig) -> None:
    """Raise ConfigError for the first option of an effective config that is refused; warn of use_cache=False."""
    _refuse({name: getattr(config, name, None) for name in REFUSED})
    if config.use_cache is False:
        warn_without_effect("use_cache=False", _OWN_CACHE)


def _refuse(options: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        value = options.get(name)
        if value is None or value is False:
            continue
        if isinstance(value, Tensor) or value not in _NEUTRAL.get(name, ()):
            shown = "a tensor" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise ConfigError(f"generate({name}={shown}) is not supported: {reason}")


def prepare(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    explicit: set[str],
    *,
    attention_mask: Tensor | None = None,
    logits_processor: Any | None = None,
    stopping_criteria: Any | None = None,
    prefix_allowed_tokens_fn: Any | None = None,
    tokenizer: Any | None = None,
) -> Call:
    """Return processors and criteria of a call as transformers' generate() builds them, for the padded batch.

    Args:
        model: a transformers model.
        input_ids: [B, n] int64, each row as often as sequences are to be returned.
        config: from `read_config`; completed here.
        explicit: the names that the call sets, from `read_config`.
        attention_mask: [B, n]; transformers has the repetition penalty leave padding out.
        logits_processor: the caller's own.
        stopping_criteria: the caller's own.
        prefix_allowed_tokens_fn: as in transformers.
        tokenizer: for stop strings.

    Raises:
        ConfigError: transformers refuses the combination.
        InputError: there is no room for new tokens.
    """
    width = int(input_ids.shape[1])
    has_length = "max_length" in explicit or getattr(model.generation_config, "max_length", None) is not None
    config.max_length = width + _max_new_tokens(model, config, width, has_length)
    if config.min_new_tokens is not None:
        config.min_length = width + int(config.min_new_tokens)
    # The "encoder" of a decoder is its prompt.
    reads_prompt = config.encoder_repetition_penalty not in (None, 1.0) or bool(config.encoder_no_repeat_ngram_size)
    try:
        # True, or it warns of a missing mask, which is inferred here as transformers infers it.
        model._prepare_special_tokens(config, True, device=input_ids.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=width,
            encoder_input_ids=input_ids.to(device_of(model)) if reads_prompt else None,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=LogitsProcessorList(as_processors(logits_processor)),
            device=str(device_of(model)),
            # Zeros first, as rows are shown to processors.
            model_kwargs={"attention_mask": None if attention_mask is None else attention_mask.sort(dim=1).values},
        )
        criteria = model._get_stopping_criteria(
            generation_config=config,
            stopping_criteria=StoppingCriteriaList(_as_criteria(stopping_criteria)),
            tokenizer=tokenizer,
        )
    except _TRANSFORMERS_ERRORS as error:
        raise ConfigError(f"generate(): {error}") from error
    return Call(config, as_processors(list(processors)), list(criteria))


def resolve(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    call: Call,
    seed: int | None,
    num_return_sequences: int = 1,
    keep: Keep = Keep(),
) -> Resolved:
    """Return what to run; changes nothing of the caller's.

    Args:
        model: a transformers model.
        input_ids: [B, n] int64, left- or right-padded, each row as often as sequences are to be returned.
        attention_mask: [B, n], zero at padding, from `mask_of`.
        call: from `prepare`, or as transformers hands it to a custom_generate function.
        seed: of every row, or None.
        num_return_sequences: how many rows in turn are one prompt's.
        keep: what is kept of each token.

    Raises:
        ConfigError: the seed or a number of the config is out of range.
    """
    check_sampling(SamplingParams(seed=seed))
    config = call.config
    rows = _unpad(input_ids, attention_mask)
    limits = [c.max_length for c in call.criteria if isinstance(c, MaxLengthCriteria)] or [config.max_length]
    most_new = min(limits) - int(input_ids.shape[1])
    if most_new < 1 and min(limits) != config.max_length:
        most_new = 1  # a criterion of the caller's: transformers asks it after the first token
    eos = frozenset(
        int(t) for c in call.criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.reshape(-1)
    )
    others = [c for c in call.criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    device = device_of(model)
    sampling: list[SamplingParams] = []
    stop: list[StopRules] = []
    for i, (_, padding) in enumerate(rows):
        own_seed = None if seed is None else fold_seed(seed, i % num_return_sequences)
        params = split_processors(
            [processor_for_row(p, i, len(rows)) for p in call.processors], bool(config.do_sample), own_seed
        )
        if padding:
            params = replace_processors(params, [PaddedProcessor(p, padding) for p in params.processors])
        sampling.append(params)
        criteria = (RowCriteria(others, padding, device),) if others else ()
        stop.append(StopRules(max_new_tokens=most_new, eos_token_ids=eos, criteria=criteria))
    for params in sampling[:1]:
        check_sampling(params)
    pad = config._pad_token_tensor
    return Resolved(
        prompts=[ids for ids, _ in rows],
        sampling=sampling,
        stop=stop,
        num_return_sequences=num_return_sequences,
        pad_token_id=int(pad) if pad is not None else 0,
        keep=keep,
    )


def _max_new_tokens(model: Any, config: GenerationConfig, width: int, explicit_length: bool) -> int:
    """Return how many tokens may be emitted, by transformers' rules on max_new_tokens, max_length and defaults."""
    if config.max_new_tokens is not None:
        most = int(config.max_new_tokens)
        if most < 0:
            raise InputError(f"max_new_tokens={most} is negative")
        return most
    if not explicit_length:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        total = width + int(config.max_length)
        if limit and width >= limit:
            raise InputError(f"the prompts are {width} tokens wide, the model's context limit is {limit}; shorten them")
        return (min(total, limit) if limit else total) - width
    if config.max_length <= width:
        raise InputError(
            f"the prompts are {width} tokens wide and max_length is {config.max_length}; raise it or set max_new_tokens"
        )
    return int(config.max_length) - width


def mask_of(input_ids: Tensor, attention_mask: Any, config: GenerationConfig) -> Tensor:
    """Return the mask [B, n] of a padded batch, checked, or inferred as transformers infers it.

    Raises:
        InputError: ids or mask have another shape or dtype, or a row is padding only.
    """
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; "
            "allowed: [batch, length] integers"
        )
    if attention_mask is None:
        pad, eos = config.pad_token_id, config.eos_token_id
        eos_set = set(eos if isinstance(eos, list | tuple) else [eos])
        inferable = pad is not None and pad not in eos_set and bool((input_ids == pad).any())
        attention_mask = (input_ids != pad).to(torch.int64) if inferable else torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor):
        raise InputError(f"attention_mask is a [batch, length] tensor, got {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}; "
            "allowed: equal shapes"
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise InputError("attention_mask holds values other than 0 (padding) and 1; additive masks are not supported")
    empty = (attention_mask == 0).all(dim=1).nonzero()
    if empty.numel() and input_ids.shape[1]:
        raise InputError(f"row {int(empty[0, 0])} of input_ids is padding only; give it at least one token")
    return attention_mask.to(input_ids.device)


def _unpad(input_ids: Tensor, mask: Tensor) -> list[tuple[list[int], list[int]]]:
    """Return (token ids, masked ids) per row; masked ones count as padding on the left, wherever they stand."""
    return [(ids[kept].tolist(), ids[~kept].tolist()) for ids, kept in zip(input_ids, mask.bool(), strict=True)]


def criteria_for(model: Any, stopping_criteria: Any | None) -> tuple[RowCriteria, ...]:
    """Return stopping criteria of the caller's as an engine's, for a row without padding."""
    criteria = _as_criteria(stopping_criteria)
    return (RowCriteria(criteria, (), device_of(model)),) if criteria else ()


def _as_criteria(given: Any) -> list[Any]:
    if given is None:
        return []
    criteria = [given] if callable(given) and not isinstance(given, list) else given
    if not isinstance(criteria, list | tuple) or not all(callable(c) and not isinstance(c, type) for c in criteria):
        raise ConfigError(f"stopping_criteria={given!r}; allowed: a StoppingCriteria or a list of them")
    return list(criteria)


def as_processors(given: Any) -> list[Any]:
    """Return a list of logits processors from one, several or none.

    Raises:
        ConfigError: something in it cannot be called, or keeps a state that drafting cannot roll back.
    """
    if given is None:
        return []
    # A LogitsProcessorList can be called, too.
    processors = [given] if callable(given) and not isinstance(given, list) else given
    if not isinstance(processors, list | tuple) or not all(callable(p) and not isinstance(p, type) for p in processors):
        raise ConfigError(f"logits_processor={given!r}; allowed: a LogitsProcessor or a list of them")
    for processor in processors:
        if type(processor).__name__ in STATEFUL:
            raise ConfigError(
                f"{type(processor).__name__} keeps a state from call to call, which drafting cannot roll back; "
                "leave it out"
            )
    return list(processors)


def replace_processors(params: SamplingParams, processors: Sequence[Any]) -> SamplingParams:
    """Return `params` with other processors."""
    return dataclasses.replace(params, processors=tuple(processors))


def split_processors(processors: list[Any], do_sample: bool, seed: int | None) -> SamplingParams:
    """Return SamplingParams with the trailing temperature, top-k, top-p and min-p as numbers.

    Anything else, or any other order, stays a processor and runs as it is.
    """
    if not do_sample:
        return SamplingParams(temperature=0.0, seed=seed, processors=tuple(processors))
    tail: list[Any] = []
    remaining = list(processors)
    for kind in reversed(_WARPERS):
        if remaining and type(remaining[-1]) is kind and getattr(remaining[-1], "min_tokens_to_keep", 1) == 1:
            tail.append(remaining.pop())
    by_type = {type(w): w for w in tail}

    def value(kind: type, attribute: str, default: Any) -> Any:
        warper = by_type.get(kind)
        return default if warper is None else getattr(warper, attribute)

    return SamplingParams(
        temperature=float(value(TemperatureLogitsWarper, "temperature", 1.0)),
        top_k=int(value(TopKLogitsWarper, "top_k", 0)),
        top_p=float(value(TopPLogitsWarper, "top_p", 1.0)),
        min_p=float(value(MinPLogitsWarper, "min_p", 0.0)),
        seed=seed,
        processors=tuple(remaining),
    )
