"""One existing program, three doors: generate(), custom_generate and LLM give transformers' ids."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec.errors import ConfigError, UnsupportedModelError
from tests.decoding import one, padded, prompts
from tests.models.architectures import REFUSED, build, model_of, named
from tests.tiny_chat_model import tiny_tokenizer

PROMPTS = prompts(3, 7, 12)
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "oracle": {"accept_rate": 0.7},
    "adversary": {},
    "random": {"branching": [2, 2]},
}
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


class Biased(LogitsProcessor):
    """Depends on the whole row: its length, its first token and its last."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        where = (input_ids.sum(dim=1) + input_ids.shape[1]) % scores.shape[1]
        scores[torch.arange(len(scores)), where] += 4.0
        return scores


class EndsAt(StoppingCriteria):
    """Ends a row whose last token can be divided by 7, as a criterion of an existing program would."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 7 == 0


class Kept(BaseStreamer):
    """Notes every put."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def llama(eos: int | None = 9) -> Any:
    model = build(named("llama"))
    model.generation_config.eos_token_id = eos
    return model


def custom(model: Any, ids: Tensor, mask: Tensor, drafter: str, **options: Any) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        custom_generate=specdec.custom_generate,
        drafter=drafter,
        drafter_options=DRAFTERS[drafter],
        **options,
    )


def ours(model: Any, ids: Tensor, mask: Tensor, drafter: str, **options: Any) -> Any:
    return specdec.generate(model, ids, mask, drafter=drafter, drafter_options=DRAFTERS[drafter], **options)


class TestAnExistingProgram:
    """Padded batch, processors by config and by hand, criteria, EOS: the call stays, the door changes."""

    OPTIONS: dict[str, Any] = {  # noqa: RUF012
        "max_new_tokens": 20,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 2,
        "bad_words_ids": [[5], [6, 7]],
    }

    @each_drafter
    @pytest.mark.parametrize("door", [ours, custom], ids=["generate", "custom_generate"])
    def test_the_batch(self, drafter: str, door: Any) -> None:
        model = llama()
        ids, mask = padded(PROMPTS, extra=2)
        options = {
            **self.OPTIONS,
            "logits_processor": LogitsProcessorList([Biased()]),
            "stopping_criteria": StoppingCriteriaList([EndsAt()]),
        }
        want = model.generate(ids, attention_mask=mask, **options)
        lengths = (want[:, ids.shape[1] :] != 0).sum(dim=1)
        assert len(set(lengths.tolist())) > 1, "rows end at different steps, or this shows little"
        assert torch.equal(door(model, ids, mask, drafter, **options), want)

    @each_drafter
    def test_through_llm(self, drafter: str) -> None:
        """Without padding, each prompt is transformers' batch of one."""
        model = llama()
        llm = specdec.LLM(model, drafter=drafter, drafter_options=DRAFTERS[drafter])
        want = [
            model.generate(
                one(p), max_new_tokens=20, do_sample=False, logits_processor=[Biased()], stopping_criteria=[EndsAt()]
            )[0, len(p) :].tolist()
            for p in PROMPTS
        ]
        got = llm.generate(PROMPTS, max_new_tokens=20, logits_processor=[Biased()], stopping_criteria=[EndsAt()])
        assert [c.token_ids for c in got] == want

    @each_drafter
    @pytest.mark.parametrize("door", [ours, custom], ids=["generate", "custom_generate"])
    def test_a_length_criterion_counts_padding(self, drafter: str, door: Any) -> None:
        model = llama(None)
        ids, mask = padded(PROMPTS, extra=2)
        options = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [MaxLengthCriteria(ids.shape[1] + 5)]}
        options["stopping_criteria"] = StoppingCriteriaList(options["stopping_criteria"])
        assert torch.equal(
            door(model, ids, mask, drafter, **options), model.generate(ids, attention_mask=mask, **options)
        )
        options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(3)])
        assert door(model, ids, mask, drafter, **options).shape[1] == ids.shape[1] + 1

    @each_drafter
    def test_prefix_functions_see_their_row(self, drafter: str) -> None:
        model = llama(None)
        ids, mask = padded(PROMPTS)
        asked: list[int] = []

        def allowed(row: int, tokens: Tensor) -> list[int]:
            asked.append(row)
            return [10 + row, 20 + row, 30 + (int(tokens[-1]) + row) % 8]

        options = {"max_new_tokens": 9, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
        want = model.generate(ids, attention_mask=mask, **options)
        num_asked = len(asked)
        for door in (ours, custom):
            asked.clear()
            assert torch.equal(door(model, ids, mask, drafter, **options), want)
            assert len(asked) == num_asked

    @pytest.mark.parametrize(
        ("option", "value"),
        [("encoder_repetition_penalty", 3.0), ("encoder_no_repeat_ngram_size", 1), ("repetition_penalty", 1.9)],
    )
    def test_processors_that_hold_the_whole_batch(self, option: str, value: float) -> None:
        model = llama(None)
        ids, mask = padded(PROMPTS)
        options = {"max_new_tokens": 12, "do_sample": False, option: value}
        want = model.generate(ids, attention_mask=mask, **options)
        assert not torch.equal(want, model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False))
        for door in (ours, custom):
            assert torch.equal(door(model, ids, mask, "ngram", **options), want)

    @pytest.mark.parametrize(
        "options", [{"begin_suppress_tokens": [19, 60]}, {"forced_eos_token_id": 33}, {"min_new_tokens": 15}], ids=str
    )
    def test_processors_that_count_positions_and_right_padding(self, options: dict[str, Any]) -> None:
        """Right-padded rows are generated from as if they were not padded, by every processor, too."""
        model = llama()
        ids, mask = padded(PROMPTS, left=False, extra=3)
        rows = specdec.generate(model, ids, mask, max_new_tokens=18, do_sample=False, **options)[:, ids.shape[1] :]
        for row, prompt in zip(rows.tolist(), PROMPTS, strict=True):
            want = model.generate(one(prompt), max_new_tokens=18, do_sample=False, **options)[0, len(prompt) :].tolist()
            assert row[: len(want)] == want

    @pytest.mark.parametrize("name", ["eos_token_id", "repetition_penalty", "max_new_tokens"])
    def test_none_overrides_a_config(self, name: str) -> None:
        model = llama(None)
        free = model.generate(one(PROMPTS[1]), max_new_tokens=9, do_sample=False)[0, 7:].tolist()
        values = {"eos_token_id": free[3], "repetition_penalty": 1.9, "max_new_tokens": 3}
        config = GenerationConfig(do_sample=False, pad_token_id=0, max_length=16, **{name: values[name]})
        for options in ({}, {name: None}):
            want = model.generate(one(PROMPTS[1]), generation_config=config, **options)
            assert torch.equal(specdec.generate(model, one(PROMPTS[1]), generation_config=config, **options), want)

    def test_the_callers_objects_stay(self) -> None:
        model = llama()
        ids, mask = padded(PROMPTS)
        config = GenerationConfig(max_new_tokens=6, do_sample=False, no_repeat_ngram_size=2, eos_token_id=9)
        processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
        criteria = StoppingCriteriaList([EndsAt()])
        before = copy.deepcopy((config.to_dict(), model.generation_config.to_dict(), len(processors), len(criteria)))
        for door in (ours, custom):
            door(
                model,
                ids,
                mask,
                "ngram",
                generation_config=config,
                logits_processor=processors,
                stopping_criteria=criteria,
            )
            after = (config.to_dict(), model.generation_config.to_dict(), len(processors), len(criteria))
            assert after == before


class TestStopStrings:
    """Fault 11: stop strings inside a block and over two blocks, through every door."""

    @staticmethod
    def cases() -> tuple[Any, Any, list[int], list[int]]:
        model, tokenizer = llama(None), tiny_tokenizer()
        prompt = tokenizer("ab").input_ids
        free = model.generate(one(prompt), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        return model, tokenizer, prompt, free

    @each_drafter
    def test_every_place(self, drafter: str) -> None:
        model, tokenizer, prompt, free = self.cases()
        places = set()
        for start in range(1, 20):
            stop = tokenizer.decode(free[start : start + 2])
            if not stop.strip():
                continue
            want = model.generate(
                one(prompt), max_new_tokens=24, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
            )
            new = want[0, len(prompt) :].tolist()
            places.add(len(new))
            mask = torch.ones_like(one(prompt))
            options = {"max_new_tokens": 24, "do_sample": False}
            got = ours(model, one(prompt), mask, drafter, stop_strings=[stop], tokenizer=tokenizer, **options)
            assert torch.equal(got, want)
            criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
            assert torch.equal(custom(model, one(prompt), mask, drafter, stopping_criteria=criteria, **options), want)
            llm = specdec.LLM(model, tokenizer=tokenizer, drafter=drafter, drafter_options=DRAFTERS[drafter])
            done = llm.generate(prompt, max_new_tokens=24, stop=stop)[0]
            assert (done.token_ids, done.finish_reason) == (new, "stop")
            assert stop not in done.text
            assert tokenizer.decode(new).startswith(done.text)
        assert len(places) > 5

    @each_drafter
    def test_a_smaller_length_behind_a_stop(self, drafter: str) -> None:
        """A stop string inside a block whose end lies past max_new_tokens."""
        model, tokenizer, prompt, free = self.cases()
        for most in range(1, 8):
            stop = tokenizer.decode(free[2:4])
            want = model.generate(
                one(prompt), max_new_tokens=most, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
            )
            got = specdec.generate(
                model,
                one(prompt),
                max_new_tokens=most,
                do_sample=False,
                stop_strings=stop,
                tokenizer=tokenizer,
                drafter=drafter,
                drafter_options=DRAFTERS[drafter],
                max_draft_tokens=6,
            )
            assert torch.equal(got, want)

    def test_without_a_tokenizer(self) -> None:
        with pytest.raises(ConfigError, match="tokenizer"):
            specdec.generate(llama(), one(PROMPTS[0]), stop_strings=["x"], max_new_tokens=3)


class TestStreamers:
    @each_drafter
    def test_puts_are_transformers(self, drafter: str) -> None:
        model = llama()
        ids = one(PROMPTS[1])
        theirs = Kept()
        model.generate(ids, max_new_tokens=12, do_sample=False, streamer=theirs)
        mine = Kept()
        specdec.generate(
            model,
            ids,
            max_new_tokens=12,
            do_sample=False,
            streamer=mine,
            drafter=drafter,
            drafter_options=DRAFTERS[drafter],
        )
        assert (mine.puts, mine.ended) == (theirs.puts, 1)
        inside = Kept()
        custom(model, ids, torch.ones_like(ids), drafter, max_new_tokens=12, do_sample=False, spec_streamer=inside)
        assert (inside.puts, inside.ended) == (theirs.puts, 1)

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        model, tokenizer = llama(None), tiny_tokenizer()
        ids = tokenizer("ab", return_tensors="pt").input_ids
        model.generate(ids, max_new_tokens=12, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
        theirs = capsys.readouterr().out
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        specdec.generate(model, ids, max_new_tokens=12, do_sample=False, streamer=streamer, drafter="ngram")
        assert capsys.readouterr().out == theirs != ""

    def test_one_sequence_only(self) -> None:
        ids, mask = padded(PROMPTS)
        with pytest.raises(ConfigError, match="a streamer takes one prompt, 3"):
            specdec.generate(llama(), ids, mask, streamer=Kept())
        with pytest.raises(ConfigError, match="num_return_sequences is 2"):
            specdec.generate(llama(), one(PROMPTS[0]), streamer=Kept(), num_return_sequences=2, do_sample=True)


class TestTransformersSpelling:
    """assistant_model=, prompt_lookup_num_tokens= and assistant_early_exit= mean their drafters."""

    def run(self, **options: Any) -> tuple[Tensor, list[Any]]:
        return specdec.generate(
            llama(), one(PROMPTS[2]), max_new_tokens=12, do_sample=False, return_stats=True, **options
        )

    def test_the_ids_and_that_it_drafts(self) -> None:
        want, plain = self.run()
        assert plain[0].num_draft_tokens == 0
        for options in (
            {"assistant_model": model_of(named("qwen2"))},
            {"assistant_model": model_of(named("qwen2")), "num_assistant_tokens": 2},
            {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
            {"assistant_early_exit": 1},
            {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3, eos_token_id=9, pad_token_id=0)},
        ):
            got, stats = self.run(**options)
            assert torch.equal(got, want)
            assert stats[0].num_draft_tokens > 0, options
        _, stats = self.run(assistant_model=model_of(named("qwen2")), num_assistant_tokens=2)
        assert len(stats[0].drafted_at) == 2

    def test_two_drafters_are_one_too_many(self) -> None:
        with pytest.raises(ConfigError, match="leave one of them out"):
            self.run(prompt_lookup_num_tokens=3, drafter="ngram")
        with pytest.raises(ConfigError, match="assistant_model and prompt_lookup_num_tokens"):
            self.run(prompt_lookup_num_tokens=3, assistant_model=model_of(named("qwen2")))
        with pytest.raises(ConfigError, match="assistant_tokenizer goes with"):
            self.run(assistant_tokenizer=tiny_tokenizer())


class TestCustomGenerate:
    def test_refusals(self) -> None:
        model = llama()
        ids = one(PROMPTS[0])
        with pytest.raises(ConfigError, match="unknown drafter 'ngrams'; did you mean 'ngram'"):
            model.generate(ids, custom_generate=specdec.custom_generate, drafter="ngrams", max_new_tokens=2)
        with pytest.raises(ValueError, match="drafters"):  # transformers' own, before this is called
            model.generate(ids, custom_generate=specdec.custom_generate, drafters="ngram", max_new_tokens=2)
        bloom = build(next(a for a in REFUSED if a.name == "bloom"))
        with pytest.raises(UnsupportedModelError, match="ALiBi"):
            bloom.generate(ids, custom_generate=specdec.custom_generate, max_new_tokens=2)

    def test_positions_that_do_not_follow_from_the_mask(self) -> None:
        model = llama()
        ids, mask = padded(PROMPTS)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        options = {"max_new_tokens": 4, "do_sample": False}
        want = custom(model, ids, mask, "none", **options)
        assert torch.equal(custom(model, ids, mask, "none", position_ids=positions, **options), want)
        with pytest.raises(ConfigError, match="position_ids are not those"):
            custom(model, ids, mask, "none", position_ids=positions + 50, **options)

    def test_sampling_with_a_seed_is_the_other_doors(self) -> None:
        model = llama()
        ids, mask = padded(PROMPTS)
        options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "seed": 5}
        want = specdec.generate(model, ids, mask, num_return_sequences=2, **options)
        got = custom(model, ids, mask, "oracle", num_return_sequences=2, **options)
        assert torch.equal(got, want)
        llm = specdec.LLM(model, drafter="ngram")
        sampled = {k: v for k, v in options.items() if k != "do_sample"}
        rows = want[:, ids.shape[1] :].tolist()
        for i, done in enumerate(llm.generate(PROMPTS, **sampled)):
            assert rows[2 * i][: len(done.token_ids)] == done.token_ids
