"""The two doors in Python: `LLM` for text, `generate` for the user's own model and ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from specdec.acceptance import VerifierChoice
from specdec.engine import Engine, EngineConfig
from specdec.errors import ConfigError, InputError
from specdec.interfaces import Drafter, DrafterContext, SamplingParams, Verifier
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.generation import as_processors, config_processors, eos_token_ids, resolve
from specdec.models.loading import load_model
from specdec.models.machine import measure_step_times, read_bandwidth_bytes_per_s, weight_bytes_per_step
from specdec.models.matmul import cpu_name
from specdec.models.runner import ModelRunner
from specdec.registry import DRAFTERS, VERIFIERS, check_options, refuse_unknown
from specdec.request import Request, StopRules
from specdec.sampling import check_sampling, warn_ignored
from specdec.stats import RequestStats

__all__ = [
    "LLM",
    "Completion",
    "build_drafter",
    "build_verifiers",
    "cpu_name",
    "generate",
    "measure_step_times",
    "read_bandwidth_bytes_per_s",
    "run",
    "weight_bytes_per_step",
]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer. `finish_reason`: "stop" at an EOS token, "length" at a limit."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: RequestStats


def build_verifiers(verifier: str | Verifier) -> VerifierChoice:
    """Return the acceptance rules of an engine: "auto", a registered name, or an instance."""
    if verifier == "auto":
        match, rejection = VERIFIERS.load("match")(), VERIFIERS.load("rejection")()
        return VerifierChoice(greedy=match, seeded=match, sampled=rejection)
    rule: Any = VERIFIERS.load(verifier) if isinstance(verifier, str) else verifier
    if isinstance(verifier, str) and isinstance(rule, type):
        rule = rule()
    if isinstance(rule, type) or not hasattr(rule, "verify"):
        raise ConfigError(f"verifier={verifier!r}; allowed: 'auto', a name ({', '.join(VERIFIERS.names())}), an object")
    return VerifierChoice(greedy=rule, seeded=rule, sampled=rule)


def build_drafter(
    drafter: str | Drafter, runner: ModelRunner, tokenizer: Any | None, options: dict[str, Any] | None = None
) -> Drafter:
    """Return a drafter for a target: a registered name with options, or an instance as it is.

    Raises:
        ConfigError: the name or an option is unknown.
        IncompatibleDrafterError: it does not fit the target.
    """
    if not isinstance(drafter, str):
        if isinstance(drafter, type) or not hasattr(drafter, "propose"):
            raise ConfigError(f"drafter={drafter!r}; allowed: a name ({', '.join(DRAFTERS.names())}) or a Drafter")
        if options:
            raise ConfigError(f"drafter_options={options!r} go with a drafter's name; this one is built already")
        return drafter
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ConfigError(f"drafter_options={options!r}; allowed: a dict of the drafter's options")
    kind = DRAFTERS.load(drafter)
    if not callable(getattr(kind, "build", None)):
        raise ConfigError(f"drafter={drafter!r} names {kind!r}, which has no build(context, **options)")
    check_options(f"drafter {drafter!r}", kind.build, options, reserved=1)

    def load(name: Any, dtype: Any = None) -> tuple[Any, Any]:
        key = (str(name), str(dtype))
        if key not in runner.loaded:
            device = None if runner.device.type == "cpu" else runner.device
            runner.loaded[key] = load_model(name, dtype=dtype, device=device)
        found: tuple[Any, Any] = runner.loaded[key]
        return found

    built: Drafter = kind.build(DrafterContext(runner, runner.vocab_size, tokenizer, load), **options)
    return built


def _split_options(options: dict[str, Any]) -> tuple[EngineConfig, RunnerConfig]:
    """Return the engine's and the runner's configs from keyword arguments; unknown ones are refused."""
    engine = {f.name for f in fields(EngineConfig)}
    runner = {f.name for f in fields(RunnerConfig)}
    refuse_unknown("specdec", options, engine | runner)
    return (
        EngineConfig(**{k: v for k, v in options.items() if k in engine}),
        RunnerConfig(**{k: v for k, v in options.items() if k in runner}),
    )


class LLM:
    """A model, a drafter and an engine, for prompts as text or ids.

    Belongs to the thread that first generates with it.

    Args:
        model: "smollm2", a hub id, a local directory, a .gguf file or a model object.
        drafter: a registered name, "package.module:Class" or a Drafter.
        verifier: "auto", a registered name or a Verifier.
        tokenizer: for a model object that comes without one.
        dtype: of a model that is loaded here; default float32 on CPU, else the checkpoint's.
        device: where it goes.
        device_map: placement by Accelerate instead.
        drafter_options: keyword arguments of the drafter.
        trust_remote_code: run code that comes with a checkpoint.
        options: fields of `EngineConfig` and `RunnerConfig`, such as max_draft_tokens or kv_memory_bytes.

    Attributes:
        model: the transformers model, never modified.
        tokenizer: the transformers tokenizer, or None.
        engine: the `Engine`, with its `stats`.
    """

    def __init__(
        self,
        model: Any,
        *,
        drafter: str | Drafter = "none",
        verifier: str | Verifier = "auto",
        tokenizer: Any | None = None,
        dtype: Any | None = None,
        device: Any | None = None,
        device_map: Any | None = None,
        drafter_options: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._engine_config, self._runner_config = _split_options(options)
        self._verifiers = build_verifiers(verifier)
        if isinstance(drafter, str):
            DRAFTERS.load(drafter)  # an unknown name is refused before a model is loaded for minutes
        self.model, found = load_model(
            model, dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code
        )
        self.tokenizer = tokenizer or found
        self._base: ModelRunner | None = None
        self._drafter, self._drafter_options = drafter, drafter_options
        self._refresh()

    def _refresh(self) -> None:
        """Build the engine, at first and whenever the model's weights or modules have changed since."""
        base = runner_for(self.model, self._runner_config)
        if base is not self._base:
            runner = base.with_own_cache()
            drafter = build_drafter(self._drafter, runner, self.tokenizer, self._drafter_options)
            self.engine = Engine(runner, drafter, self._verifiers, self._engine_config)
            self._base = base

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        logits_processor: Sequence[Any] = (),
        streamer: Any | None = None,
        **unknown: Any,
    ) -> list[Completion]:
        """Return one Completion per prompt, in order.

        Of the model's generation config the EOS tokens and the logits processors (repetition_penalty,
        suppress_tokens, ...) apply, as in transformers; temperature and the like are this call's own.

        Args:
            prompts: a text, a list of texts, a list of token ids or a list of those.
            max_new_tokens: 0 gives empty completions.
            temperature: 0 is greedy.
            top_k: 0 is off.
            top_p: 1 is off.
            min_p: 0 is off.
            seed: applies to each prompt as if it were alone; None draws one from torch's global generator.
            ignore_eos: run to max_new_tokens.
            logits_processor: transformers LogitsProcessors, called with one row [1, n], a node's exact token path.
            streamer: a transformers streamer, for one prompt.
            unknown: refused by name.

        Raises:
            InputError: a prompt is empty, too long or of the wrong type; nothing has run.
            ConfigError: an option is unknown or out of range.
        """
        if unknown:
            refuse_unknown("LLM.generate", unknown, set(signature(LLM.generate).parameters) - {"self", "unknown"})
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"tokenizer={self.tokenizer!r}; allowed: a transformers tokenizer")
        ids = [self._encode(p) for p in _as_list(prompts)]
        if streamer is not None and len(ids) != 1:
            raise ConfigError(f"a streamer takes one prompt, {len(ids)} were given")
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ConfigError(f"streamer={streamer!r}; allowed: a transformers streamer, with put() and end()")
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            processors=tuple(as_processors(logits_processor)),
        )
        check_sampling(sampling)
        warn_ignored(sampling)
        _check_count("max_new_tokens", max_new_tokens)
        stop = StopRules(
            max_new_tokens=max_new_tokens, eos_token_ids=frozenset() if ignore_eos else eos_token_ids(self.model)
        )
        self._refresh()
        jobs = []
        for prompt in ids:
            own = config_processors(self.model, prompt, max_new_tokens)
            jobs.append((prompt, replace(sampling, processors=(*own, *sampling.processors)), stop))
        requests = run(self.engine, jobs, streamer)
        return [self._completion(request) for request in requests]

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Completion:
        """Return the answer to one conversation, through the tokenizer's own chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], the last one the user's.
            options: as for `generate`.

        Raises:
            InputError: the messages are malformed, or the tokenizer has no chat template.
        """
        return self.generate(self.chat_token_ids(messages), **options)[0]

    def chat_token_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the prompt ids of a conversation, the cue for the answer included."""
        tokenizer = self._need_tokenizer("chat")
        well_formed = isinstance(messages, list | tuple) and all(isinstance(m, dict) and "role" in m for m in messages)
        if not well_formed or not messages:
            raise InputError("chat takes one conversation: a non-empty list of {'role': ..., 'content': ...}")
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template; format the prompt yourself and use generate()")
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program of the model's own and raises what it likes
            raise InputError(
                f"the tokenizer's chat template does not take these messages ({error}); most take "
                "{'role': 'user' or 'assistant', 'content': a text}"
            ) from error
        return list(encoded["input_ids"])

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InputError(f"{what} needs a tokenizer and the model came without one; pass LLM(..., tokenizer=)")
        return self.tokenizer

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is an empty string; give at least one token")
            try:
                prompt.encode()
            except UnicodeError as error:
                raise InputError(f"the prompt is not valid Unicode ({error})") from error
            return list(self._need_tokenizer("a text prompt")(prompt).input_ids)
        if isinstance(prompt, Tensor):
            prompt = prompt.tolist()
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if is_list and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return list(prompt)
        raise InputError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}")

    def _completion(self, request: Request) -> Completion:
        new = request.new_tokens
        text = "" if self.tokenizer is None else self.tokenizer.decode(new, skip_special_tokens=True)
        prompt = request.tokens[: request.num_prompt_tokens]
        return Completion(prompt, new, text, request.finish_reason or "abort", request.stats)


def _as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts, whether one or several were given."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"prompts is a text, token ids or a list of those, got {type(prompts).__name__}")
    if prompts and all(isinstance(t, int) for t in prompts):
        return [prompts]
    return list(prompts)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}={value!r}; allowed: an integer >= 0")


def run(
    engine: Engine, prompts: Sequence[tuple[list[int], SamplingParams, StopRules]], streamer: Any | None = None
) -> list[Request]:
    """Run prompts to their ends and return their requests; the engine holds nothing of them afterwards.

    All prompts are checked before anything runs. Prompts with nothing to generate are answered without running.
    """
    ids: list[int] = []
    requests: list[Request] = []
    try:
        for prompt, sampling, stop in prompts:
            requests.append(engine.add_request(prompt, sampling, stop))
            ids.append(requests[-1].request_id)
        if streamer is not None:
            streamer.put(torch.tensor([prompts[0][0]]))
        while any(r.finish_reason is None for r in requests):
            for output in engine.step():
                if streamer is not None and output.request_id == ids[0]:
                    streamer.put(torch.tensor(output.token_ids))
        if streamer is not None:
            streamer.end()
    finally:
        with ExitStack() as stack:  # every request is forgotten, also if forgetting one of them fails
            for request_id in ids:
                stack.callback(engine.forget, request_id)
    return requests


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    drafter: str | Drafter = "none",
    verifier: str | Verifier = "auto",
    drafter_options: dict[str, Any] | None = None,
    tokenizer: Any | None = None,
    generation_config: Any | None = None,
    logits_processor: Any | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Generate as transformers' `model.generate()` does, with drafting, and return the same ids.

    Args:
        model: a transformers causal LM; never modified.
        input_ids: [B, n] int64; rows may be left- or right-padded.
        attention_mask: [B, n], zero at padding; None = as transformers infers it.
        drafter: a registered name, "package.module:Class" or a Drafter.
        verifier: "auto", a registered name or a Verifier.
        drafter_options: keyword arguments of the drafter.
        tokenizer: lets drafters check vocabularies and calibrate on text.
        generation_config: as in transformers.
        logits_processor: as in transformers, but called with one row [1, n] at a time.
        seed: of every row; None draws one per row from torch's global generator.
        kwargs: GenerationConfig fields (max_new_tokens, do_sample, temperature, ...) and fields of `EngineConfig` and
            `RunnerConfig` (max_draft_tokens, ...).

    Returns:
        [B * num_return_sequences, n + m] int64: `input_ids`, padding included, then the new tokens, padded on the
        right with the pad token.

    Raises:
        ConfigError: an option is unknown or not supported, by name.
        InputError: the prompts do not fit.
        UnsupportedModelError: the model cannot run on this engine, by feature.
    """
    own_fields = {f.name for config in (EngineConfig, RunnerConfig) for f in fields(config)}
    engine_config, runner_config = _split_options({k: v for k, v in kwargs.items() if k in own_fields})
    verifiers = build_verifiers(verifier)
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids is a [batch, length] tensor, got {type(input_ids).__name__}")
    rest = {k: v for k, v in kwargs.items() if k not in own_fields}
    call = resolve(model, input_ids, attention_mask, generation_config, logits_processor, seed, rest)
    runner = runner_for(model, runner_config).with_own_cache()
    engine = Engine(runner, build_drafter(drafter, runner, tokenizer, drafter_options), verifiers, engine_config)
    for sampling in call.sampling[:1]:
        warn_ignored(sampling)
    requests = run(engine, list(zip(call.prompts, call.sampling, call.stop, strict=True)))
    longest = max((len(r.new_tokens) for r in requests), default=0)
    tail = torch.full((len(requests), longest), call.pad_token_id, dtype=input_ids.dtype)
    for row, request in zip(tail, requests, strict=True):
        row[: len(request.new_tokens)] = torch.tensor(request.new_tokens, dtype=input_ids.dtype)
    head = input_ids.repeat_interleave(call.num_return_sequences, dim=0)
    return torch.cat([head, tail.to(input_ids.device)], dim=1)
