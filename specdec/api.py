"""The door for text: `LLM`, a model with a drafter and an engine."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from torch import Tensor

from specdec.build import build_engine, build_verifiers, named_drafter, split_options
from specdec.engine import Engine
from specdec.errors import ConfigError, InputError
from specdec.interfaces import Drafter, SamplingParams, Verifier
from specdec.models.build import is_current, runner_for
from specdec.models.config_processors import ConfigProcessors
from specdec.models.generation import as_processors, criteria_for, eos_token_ids, is_generation_field
from specdec.models.loading import gguf_path, load_model, load_tokenizer_of
from specdec.models.machine import (
    matmul_flops_per_s,
    measure_step_times,
    read_bandwidth_bytes_per_s,
    weight_bytes_per_step,
)
from specdec.models.matmul import cpu_name
from specdec.models.random_model import random_model
from specdec.models.runner import ModelRunner
from specdec.record import Keep, TokenRecord
from specdec.registry import refuse_unknown
from specdec.request import Request, StopRules
from specdec.running import Follower, Job, check_streamer, forget, run, start
from specdec.sampling import check_sampling, warn_ignored
from specdec.stats import RequestStats
from specdec.stream import StopStrings, TextStream, as_stop_strings, text_of
from specdec.worker import Worker

__all__ = [
    "LLM",
    "Completion",
    "Piece",
    "cpu_name",
    "gguf_path",
    "load_tokenizer_of",
    "matmul_flops_per_s",
    "measure_step_times",
    "random_model",
    "read_bandwidth_bytes_per_s",
    "weight_bytes_per_step",
]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer.

    `finish_reason`: "stop" at an EOS token, a stop string or a stopping criterion, "length" at a limit, "time" at a
    time limit, "abort" where it was ended from outside, "error" where `error` ended it. `token_ids` keep the token that
    completed a stop string; `text` ends before it.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: RequestStats
    from_draft: list[bool] = field(default_factory=list)  # per token: drafted and accepted, or the target's own
    logprobs: list[TokenRecord] | None = None  # per token, if asked for
    error: BaseException | None = None  # what a logits processor or criterion of its own raised, above all


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one prompt's answer. Its pieces' texts and tokens together are those of the Completion."""

    index: int  # of the prompt
    text: str  # may be empty: text is held back while a character is unfinished or a stop string may begin
    token_ids: list[int]
    from_draft: list[bool]
    completion: Completion | None  # in the last piece of a prompt
    stats: RequestStats | None = None  # the prompt's counters so far; they go on counting
    logprobs: list[TokenRecord] | None = None  # per token, if asked for

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else self.completion.finish_reason


Stops = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    """The checked options of one call."""

    sampling: SamplingParams
    stop: StopRules
    stop_strings: tuple[str, ...]
    keep: Keep


class LLM:
    """A model, a drafter and an engine, for prompts as text or ids.

    Belongs to the thread that first generates with it. The methods beginning with `a` are for asyncio: they run the
    model in a thread of their own, and concurrent calls share its batches.

    Args:
        model: "smollm2", a hub id, a local directory, a .gguf file or a model object.
        drafter: a registered name, "package.module:Class", a Drafter, or a trained head: its folder or hub id.
        verifier: "auto", a registered name or a Verifier.
        verifier_options: keyword arguments of a verifier that is named.
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
        verifier_options: dict[str, Any] | None = None,
        tokenizer: Any | None = None,
        dtype: Any | None = None,
        device: Any | None = None,
        device_map: Any | None = None,
        drafter_options: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._engine_config, self._runner_config = split_options(options)
        self._verifiers = build_verifiers(verifier, verifier_options)
        if isinstance(drafter, str):
            named_drafter(drafter, {})  # an unknown name is refused before a model is loaded for minutes
        self.model, found = load_model(
            model, dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code
        )
        self.tokenizer = tokenizer or found
        self._base: ModelRunner | None = None
        self._worker = Worker()
        self._drafter, self._drafter_options = drafter, drafter_options
        self._config_processors = ConfigProcessors(self.model)
        self.refresh()

    def refresh(self) -> Engine:
        """Return the engine, built at first and whenever the model's weights or modules have changed since."""
        base = runner_for(self.model, self._runner_config, self.tokenizer)
        if base is not self._base:
            self.engine: Engine = build_engine(
                base.with_own_cache(),
                self._drafter,
                self._verifiers,
                self._engine_config,
                tokenizer=self.tokenizer,
                drafter_options=self._drafter_options,
            )
            self._base = base
        return self.engine

    @property
    def is_current(self) -> bool:
        """True while the engine is that of the model's weights and modules as they are now."""
        return self._base is not None and is_current(self.model, self._base)

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
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        logprobs: int | None = None,
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
            stop: texts that end an answer when it comes to hold one; special tokens count as they are written.
            ignore_eos: run to max_new_tokens.
            logits_processor: transformers LogitsProcessors, called with one row [1, n], a node's exact token path.
            stopping_criteria: transformers StoppingCriteria, called with one row [1, n] after each emitted token.
            logprobs: keep the log-probabilities of each token and of the n likeliest ones; None keeps none.
            streamer: a transformers streamer, for one prompt.
            unknown: refused by name.

        Raises:
            InputError: a prompt is empty, too long or of the wrong type; nothing has run.
            ConfigError: an option is unknown or out of range.
        """
        _refuse_unknown("LLM.generate", unknown)
        self._worker.settle(self.engine)
        options = self._options(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            logprobs=logprobs,
        )
        jobs = self._jobs(prompts, options)
        check_streamer(streamer, len(jobs))
        return [self._completion(r, options.stop_strings) for r in run(self.refresh(), jobs, streamer)]

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Completion:
        """Return the answer to one conversation, through the tokenizer's own chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], the last one the user's.
            options: as for `generate`.

        Raises:
            InputError: the messages are malformed, or the tokenizer has no chat template.
        """
        return self.generate(self.chat_token_ids(messages), **options)[0]

    def stream(self, prompts: Any, **options: Any) -> Iterator[Piece]:
        """Yield pieces of the answers as they come; those of several prompts take turns.

        Closing or abandoning the iterator ends its requests and leaves the engine as it was; several may be open at
        once and share batches.

        Args:
            prompts: as for `generate`.
            options: as for `generate`, without `streamer`.

        Raises:
            InputError: as for `generate`, when the first piece is asked for.
            ConfigError: an option is unknown or out of range; at once.
        """
        checked = self._stream_options("LLM.stream", options)
        return self._stream(self._jobs(prompts, checked), checked)

    def _stream(self, jobs: Sequence[Job], options: _Options) -> Iterator[Piece]:
        self._worker.settle(self.engine)
        engine = self.refresh()  # a later call may build a new one
        is_ending = sys.is_finalizing  # of the interpreter, when nothing can be called any more
        requests = start(engine, jobs)
        try:
            pieces = Pieces(self, engine, requests, options.stop_strings)
            while not pieces.follow.is_done:
                pieces.follow.advance()
                yield from pieces.take()
        finally:
            if not is_ending():
                forget(engine, requests)

    async def agenerate(self, prompts: Any, **options: Any) -> list[Completion]:
        """Return one Completion per prompt, as `generate`, without keeping the event loop from other work."""
        found: dict[int, Completion] = {}
        async with aclosing(self._astream("LLM.agenerate", prompts, options)) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    found[piece.index] = piece.completion
        return [found[i] for i in range(len(found))]

    async def achat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Completion:
        """Return the answer to one conversation, as `chat`."""
        return (await self.agenerate(self.chat_token_ids(messages), **options))[0]

    def astream(self, prompts: Any, **options: Any) -> AsyncGenerator[Piece, None]:
        """Yield pieces as `stream` does; cancelling or closing it ends its requests."""
        return self._astream("LLM.astream", prompts, options)

    async def _astream(self, what: str, prompts: Any, options: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        checked = self._stream_options(what, options)
        jobs = self._jobs(prompts, checked)
        engine, requests = self.engine, list[Request]()

        def begin() -> None:  # in the thread, which goes on when this is cancelled
            nonlocal engine
            engine = self.refresh()
            requests.extend(start(engine, jobs))

        async with self._worker.using(lambda: engine, lambda: forget(engine, requests)) as call:
            await call(begin)
            pieces = Pieces(self, engine, requests, checked.stop_strings)
            while not pieces.follow.is_done:
                await call(pieces.follow.advance)
                for piece in await call(pieces.take):  # there: steps of other callers change requests meanwhile
                    yield piece

    def job(self, what: str, prompt: Any, priority: int, draft: bool, options: dict[str, Any]) -> tuple[Job, Stops]:
        """Return one prompt as an engine takes it, and the stop strings its text is cut at.

        Args:
            what: who asks, for messages.
            prompt: a text or token ids.
            priority: see `Engine.add_request`.
            draft: likewise.
            options: as for `stream`.

        Raises:
            InputError: the prompt is none.
            ConfigError: an option is unknown or out of range.
        """
        checked = self._stream_options(what, options)
        jobs = self._jobs(prompt, checked)
        if len(jobs) != 1:
            raise InputError(f"{what} takes one prompt, got {len(jobs)}; call it once for each")
        return replace(jobs[0], priority=priority, draft=draft), checked.stop_strings

    def _stream_options(self, what: str, options: dict[str, Any]) -> _Options:
        _refuse_unknown(what, options, _GENERATE_OPTIONS - {"streamer"})
        return self._options(**{**_DEFAULTS, **options})

    def _options(
        self,
        *,
        max_new_tokens: int,
        seed: int | None,
        stop: str | Sequence[str] | None,
        ignore_eos: bool,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        logprobs: int | None,
        **sampling_options: Any,
    ) -> _Options:
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"tokenizer={self.tokenizer!r}; allowed: a transformers tokenizer")
        sampling = SamplingParams(seed=seed, processors=tuple(as_processors(logits_processor)), **sampling_options)
        check_sampling(sampling)
        warn_ignored(sampling)
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens!r}; allowed: an integer >= 0")
        if not isinstance(ignore_eos, bool):
            raise ConfigError(f"ignore_eos={ignore_eos!r}; allowed: True or False")
        strings = as_stop_strings(stop)
        if strings:
            self._need_tokenizer("a stop string")
        rules = StopRules(
            max_new_tokens=max_new_tokens,
            eos_token_ids=frozenset() if ignore_eos else eos_token_ids(self.model),
            criteria=criteria_for(self.model, stopping_criteria),
        )
        return _Options(sampling, rules, strings, Keep(logprobs=logprobs))

    def _jobs(self, prompts: Any, options: _Options) -> list[Job]:
        jobs = []
        for ids in [self._encode(p) for p in _as_list(prompts)]:
            own = self._config_processors.of(ids, options.stop.max_new_tokens) if ids else []
            sampling = replace(options.sampling, processors=(*own, *options.sampling.processors))
            stop = options.stop
            if options.stop_strings:
                text_rule = StopStrings(self.tokenizer, options.stop_strings, len(ids))
                stop = replace(stop, criteria=(*stop.criteria, text_rule))
            jobs.append(Job(ids, sampling, stop, options.keep))
        return jobs

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
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if is_list and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            huge = next((t for t in prompt if not -(2**63) <= t < 2**63), None)
            if huge is not None:
                raise InputError(f"prompt token id {huge} is outside the target's vocabulary")
            return list(prompt)
        raise InputError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}")

    def _completion(self, request: Request, stop_strings: Sequence[str], text: str | None = None) -> Completion:
        new = request.new_tokens
        if text is None:
            text = text_of(self.tokenizer, new, stop_strings, request.finish_reason == "stop")
        return Completion(
            prompt_token_ids=request.tokens[: request.num_prompt_tokens],
            token_ids=new,
            text=text,
            finish_reason=request.finish_reason or "abort",
            stats=request.stats,
            from_draft=list(request.from_draft),
            logprobs=list(request.records) if request.keep else None,
            error=request.error,
        )


class Pieces:
    """The pieces of some requests' answers."""

    def __init__(self, llm: LLM, engine: Engine, requests: Sequence[Request], stop_strings: Sequence[str]) -> None:
        self.follow = Follower(engine, requests)
        self._llm, self._requests, self._stop_strings = llm, requests, stop_strings
        self._texts = [TextStream(llm.tokenizer, stop_strings) for _ in requests]

    def take(self) -> list[Piece]:
        """Return one piece for each request with news, at once: another caller may step the engine between two."""
        pieces = []
        for i, first in self.follow.take():
            request, text = self._requests[i], self._texts[i]
            new = request.tokens[request.num_prompt_tokens + first :]
            piece, done = text.push(new), None
            if request.finish_reason is not None:
                piece += text.finish(request.finish_reason == "stop")
                done = self._llm._completion(request, self._stop_strings, text.text)
            records = request.records[first:] if request.keep else None
            pieces.append(Piece(i, piece, new, request.from_draft[first:], done, request.stats, records))
        return pieces


_GENERATE_OPTIONS = set(signature(LLM.generate).parameters) - {"self", "prompts", "unknown"}
_DEFAULTS = {name: signature(LLM.generate).parameters[name].default for name in _GENERATE_OPTIONS - {"streamer"}}


def _refuse_unknown(what: str, options: dict[str, Any], allowed: Collection[str] = _GENERATE_OPTIONS) -> None:
    """Raise ConfigError for the first option that is not `allowed`, and say where a field of transformers' belongs."""
    try:
        refuse_unknown(what, options, allowed)
    except ConfigError as error:
        if not any(is_generation_field(name) for name in options if name not in allowed):
            raise
        raise ConfigError(
            f"{error}; fields of transformers' GenerationConfig go to specdec.generate or into the model's own config, "
            "processors into logits_processor="
        ) from None


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
