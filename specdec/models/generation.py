"""What a transformers GenerationConfig means for one request: sampling parameters, processors and stop rules."""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import ConfigError, InputError
from specdec.interfaces import SamplingParams
from specdec.models.clone import device_of
from specdec.models.compatibility import refuse_unsupported
from specdec.noise import fold_seed
from specdec.request import StopRules
from specdec.sampling import check_sampling, warn_without_effect

# Options of generate() that change what is computed and that this engine does not do, with what to do instead.
REFUSED = {
    "num_beams": "beam search keeps several hypotheses; use num_beams=1",
    "num_beam_groups": "beam search keeps several hypotheses; leave it out",
    "penalty_alpha": "contrastive search ranks candidates by hidden states; leave it out",
    "dola_layers": "DoLa contrasts layers; leave it out",
    "guidance_scale": "classifier-free guidance runs a second, unconditional context; leave it out",
    "inputs_embeds": "drafters need token ids; pass input_ids",
    "past_key_values": "the KV cache is specdec's own; pass the whole prompt as input_ids",
    "output_attentions": "attention weights are never materialised; call the model's forward for them",
    "output_hidden_states": "call the model's forward for them",
    "output_scores": "not supported yet",
    "output_logits": "not supported yet",
    "return_dict_in_generate": "not supported yet; the return value is the ids",
    "stop_strings": "not supported yet; pass eos_token_id",
    "max_time": "not supported yet; pass max_new_tokens",
    "assistant_model": "pass drafter='draft_model' and drafter_options={'model': ...}",
    "assistant_early_exit": "not supported yet",
    "prompt_lookup_num_tokens": "pass drafter='ngram'",
    "stopping_criteria": "not supported yet; pass eos_token_id or max_new_tokens",
    "streamer": "not supported here yet; specdec.LLM.generate takes one",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "synced_gpus": "not supported",
    "token_healing": "not supported",
}
# Processors with a state of their own: drafting asks them about tokens that are then never emitted.
STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_NEUTRAL: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "num_beam_groups": (1,), "guidance_scale": (1, 1.0)}
# Set and meaningless here: the engine always uses its own cache.
_WITHOUT_EFFECT = ("trust_remote_code",)
_OWN_OPTIONS = ("drafter", "drafter_options", "verifier", "max_draft_tokens", "seed", "tokenizer")
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A call of generate() as the engine understands it, one entry per returned sequence."""

    prompts: list[list[int]]  # without padding, each as often as sequences are to be returned
    sampling: list[SamplingParams]
    stop: list[StopRules]
    num_return_sequences: int
    pad_token_id: int


def eos_token_ids(model: Any) -> frozenset[int]:
    """Return the model's EOS set: its generation config's, else its config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset()


def resolve(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig | None,
    logits_processor: Any | None,
    seed: int | None,
    kwargs: dict[str, Any],
) -> Resolved:
    """Return what to run; changes nothing of the caller's.

    Args:
        model: whose generation config fills what is not given.
        input_ids: [B, n] int64, left- or right-padded.
        attention_mask: [B, n], zero at padding; None = as transformers infers it.
        generation_config: as in transformers' generate().
        logits_processor: a LogitsProcessorList of the caller's.
        seed: of every row, or None.
        kwargs: generation options.

    Raises:
        ConfigError: an option is unknown or refused.
        InputError: the prompts do not fit.
        UnsupportedModelError: the model cannot run here, which is said before its options are.
    """
    refuse_unsupported(model)
    if model.generation_config is None:
        raise ConfigError("the model's generation_config is None; set a GenerationConfig, or use specdec.LLM")
    given = {k: v for k, v in kwargs.items() if v is not None}
    _refuse(given)
    prefix_function = given.pop("prefix_allowed_tokens_fn", None)
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ConfigError(f"generation_config is a GenerationConfig, got {type(generation_config).__name__}")
    own = copy.deepcopy(generation_config)
    try:
        config, unknown = model._prepare_generation_config(own, **copy.copy(given))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generate(): {error}") from error
    unknown = {k: v for k, v in unknown.items() if k not in _WITHOUT_EFFECT}
    if unknown:
        name = next(iter(unknown))
        close = difflib.get_close_matches(name, [*_OWN_OPTIONS, *GenerationConfig().to_dict()], n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"generate() has no option {name!r};{hint} known are transformers' GenerationConfig fields and specdec's "
            f"own ({', '.join(_OWN_OPTIONS)}, ...)"
        )
    _refuse({name: getattr(config, name, None) for name in REFUSED})
    explicit_length = "max_length" in given or (own is not None and own.max_length is not None)
    explicit_length = explicit_length or getattr(model.generation_config, "max_length", None) is not None
    rows = _unpad(input_ids, attention_mask, config)
    width = int(input_ids.shape[1])
    # True, or it warns of a missing mask, which is inferred here as transformers infers it.
    model._prepare_special_tokens(config, True, device=input_ids.device)
    eos = config._eos_token_tensor
    stop_ids = frozenset(int(t) for t in eos) if eos is not None else frozenset()
    pad = config._pad_token_tensor
    most_new = _max_new_tokens(model, config, width, explicit_length)
    check_sampling(SamplingParams(seed=seed))
    num_return = int(config.num_return_sequences or 1)
    prompts = [row for row in rows for _ in range(num_return)]
    sampling: list[SamplingParams] = []
    for i, prompt in enumerate(prompts):
        # Processors of its own for every sequence: what one of them remembers must not reach another.
        prefix = _for_row(prefix_function, i)
        own_seed = None if seed is None else fold_seed(seed, i % num_return)
        sampling.append(_sampling(model, config, prompt, width, most_new, prefix, logits_processor, own_seed))
    for params in sampling[:1]:
        check_sampling(params)
    for name in ("cache_implementation", "cache_config", "use_cache"):
        if getattr(config, name, None) not in (None, True):
            warn_without_effect(f"{name}={getattr(config, name)!r}", "here, the KV cache is specdec's own")
    return Resolved(
        prompts=prompts,
        sampling=sampling,
        stop=[StopRules(max_new_tokens=most_new, eos_token_ids=stop_ids) for _ in prompts],
        num_return_sequences=num_return,
        pad_token_id=int(pad) if pad is not None else 0,
    )


def _for_row(prefix_function: Any, row: int) -> Any:
    """Return a prefix_allowed_tokens_fn that is told its row: the processor sees one request at a time, as row 0."""
    return None if prefix_function is None else lambda _, token_ids: prefix_function(row, token_ids)


def _refuse(options: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False and value not in _NEUTRAL.get(name, ()):
            raise ConfigError(f"generate({name}={value!r}) is not supported: {reason}")


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


def _unpad(input_ids: Tensor, attention_mask: Tensor | None, config: GenerationConfig) -> list[list[int]]:
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; "
            "allowed: [batch, length] integers"
        )
    if attention_mask is None:
        pad, eos = config.pad_token_id, config.eos_token_id
        eos_set = set(eos if isinstance(eos, list | tuple) else [eos])
        inferable = pad is not None and pad not in eos_set and bool((input_ids == pad).any())
        attention_mask = input_ids != pad if inferable else torch.ones_like(input_ids)
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
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _sampling(
    model: Any,
    config: GenerationConfig,
    prompt: list[int],
    width: int,
    most_new: int,
    prefix_function: Any,
    logits_processor: Any | None,
    seed: int | None,
) -> SamplingParams:
    """Return one row's sampling, with lengths counted without its padding."""
    own = copy.copy(config)
    length = len(prompt)
    own.max_length = length + most_new
    if own.min_new_tokens is not None:
        own.min_length = length + int(own.min_new_tokens)
    elif own.min_length:
        own.min_length = max(0, int(own.min_length) - (width - length))
    processors = _build_processors(model, own, prompt, prefix_function, logits_processor)
    return split_processors(processors, bool(own.do_sample), seed)


def _build_processors(
    model: Any, config: GenerationConfig, prompt: list[int], prefix_function: Any, logits_processor: Any | None
) -> list[Any]:
    """Return transformers' own list of processors for one unpadded prompt."""
    device = device_of(model)
    # The "encoder" of a decoder is its prompt.
    reads_prompt = config.encoder_repetition_penalty not in (None, 1.0) or bool(config.encoder_no_repeat_ngram_size)
    try:
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], device=device) if reads_prompt else None,
            prefix_allowed_tokens_fn=prefix_function,
            logits_processor=LogitsProcessorList(as_processors(logits_processor)),
            device=str(device),
            model_kwargs={},
        )
    except ValueError as error:
        raise ConfigError(f"generate(): {error}") from error
    return as_processors(list(processors))


def config_processors(model: Any, prompt: list[int], max_new_tokens: int) -> list[Any]:
    """Return the processors that the model's own generation config asks for, temperature and the like left out."""
    if model.generation_config is None:
        return []
    config, _ = model._prepare_generation_config(None, do_sample=False)
    model._prepare_special_tokens(config, True, device=device_of(model))
    return list(_sampling(model, config, prompt, len(prompt), max_new_tokens, None, None, None).processors)


def as_processors(given: Any) -> list[Any]:
    """Return a list of logits processors from one, several or none.

    Raises:
        ConfigError: something in it cannot be called, or keeps a state that drafting cannot roll back.
    """
    if given is None:
        return []
    processors = [given] if callable(given) else given
    if not isinstance(processors, list | tuple) or not all(callable(p) for p in processors):
        raise ConfigError(f"logits_processor={given!r}; allowed: a LogitsProcessor or a list of them")
    for processor in processors:
        if type(processor).__name__ in STATEFUL:
            raise ConfigError(
                f"{type(processor).__name__} keeps a state from call to call, which drafting cannot roll back; "
                "leave it out"
            )
    return list(processors)


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
