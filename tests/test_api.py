"""The two doors: what they take, and what they say about what they do not take."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from transformers import GenerationConfig

import specdec
from specdec.errors import ConfigError, IncompatibleDrafterError, InputError, SpecdecError, UnsupportedModelError
from specdec.models.generation import REFUSED
from specdec.sampling import warn_without_effect
from specdec.verifiers.match import MatchVerifier
from tests.decoding import one, padded, prompts, reference
from tests.models.architectures import build, model_of, named

PROMPTS = prompts(3, 7, 12)


def model() -> Any:
    return model_of(named("llama"))


def generate(*args: Any, **options: Any) -> torch.Tensor:
    return specdec.generate(model(), *args, **{"max_new_tokens": 4, **options})


class Tokenizer:
    """As much of a tokenizer as the doors need: one id per character, from 1."""

    chat_template: str | None = None
    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, **options: Any) -> Any:
        return type("Encoding", (), {"input_ids": [ord(c) % 63 + 1 for c in text]})

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self("".join(m["content"] for m in messages)).input_ids}


class TestGenerateInput:
    @pytest.mark.parametrize("ids", [[1, 2, 3], "text", 5], ids=repr)
    def test_ids_of_another_type(self, ids: Any) -> None:
        with pytest.raises(InputError, match=f"input_ids .* got {type(ids).__name__}"):
            generate(ids)

    @pytest.mark.parametrize(
        "ids", [torch.tensor([1, 2]), torch.ones(1, 2, 3, dtype=torch.int64), torch.ones(1, 3), torch.ones(2, 2).bool()]
    )
    def test_ids_of_another_shape_or_dtype(self, ids: torch.Tensor) -> None:
        with pytest.raises(InputError, match=r"input_ids has shape .* allowed: \[batch, length\] integers"):
            generate(ids)

    def test_int32_is_fine_and_kept(self) -> None:
        got = generate(one(PROMPTS[0]).int())
        assert got.dtype == torch.int32
        assert got[0, 3:].tolist() == reference(model(), PROMPTS[0], 4)

    @pytest.mark.parametrize("shape", [(1, 0), (3, 0)])
    def test_no_tokens(self, shape: tuple[int, int]) -> None:
        with pytest.raises(InputError, match="no tokens"):
            generate(torch.zeros(shape, dtype=torch.int64))

    @pytest.mark.parametrize("token", [-1, 64, 1000])
    def test_ids_outside_the_vocabulary(self, token: int) -> None:
        with pytest.raises(InputError, match=f"token id {token} is outside .* 64"):
            generate(torch.tensor([[1, token, 2]]))

    @pytest.mark.parametrize("shape", [(3,), (1, 4), (2, 3), (1, 1, 3)])
    def test_a_mask_of_another_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InputError, match=r"attention_mask has shape .* and input_ids \(1, 3\)"):
            generate(one(PROMPTS[0]), torch.ones(shape))

    def test_a_mask_of_another_type(self) -> None:
        with pytest.raises(InputError, match=r"attention_mask .* got list"):
            generate(one(PROMPTS[0]), [[1, 1, 1]])

    def test_an_additive_mask(self) -> None:
        with pytest.raises(InputError, match="values other than 0"):
            generate(one(PROMPTS[0]), torch.tensor([[-1e9, 0, 0]]))

    def test_a_row_of_padding_only(self) -> None:
        ids, mask = padded(PROMPTS)
        mask[1] = 0
        with pytest.raises(InputError, match=r"row 1 .*padding"):
            generate(ids, mask)

    @pytest.mark.parametrize("value", [-1, 0])
    def test_too_few_new_tokens(self, value: int) -> None:
        with pytest.raises(SpecdecError, match="max_new_tokens"):
            generate(one(PROMPTS[0]), max_new_tokens=value)

    def test_max_length_within_the_prompt(self) -> None:
        with pytest.raises(InputError, match="7 tokens wide and max_length is 7"):
            generate(one(PROMPTS[1]), max_new_tokens=None, max_length=7)

    @pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
    def test_the_default_length_is_transformers(self) -> None:
        want = model().generate(one(PROMPTS[1]), do_sample=False)
        assert torch.equal(specdec.generate(model(), one(PROMPTS[1]), drafter="ngram"), want)


class TestGenerateOptions:
    VALUES: ClassVar[dict[str, Any]] = {
        "num_beams": 4,
        "num_beam_groups": 2,
        "guidance_scale": 1.5,
        "penalty_alpha": 0.6,
        "dola_layers": "low",
        "use_mtp": True,
        "assistant_ensemble_weight": 0.5,
    }

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_what_is_not_done_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"generate\({name}="):
            generate(one(PROMPTS[0]), **{name: self.VALUES.get(name, object())})

    @pytest.mark.parametrize("name", ["num_beams", "output_attentions", "output_hidden_states"])
    def test_in_a_generation_config_too(self, name: str) -> None:
        config = GenerationConfig(**{name: self.VALUES.get(name, True)})
        with pytest.raises(ConfigError, match=rf"generate\({name}="):
            generate(one(PROMPTS[0]), generation_config=config)

    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 1},
            {"use_cache": True},
            {"output_scores": False},
            {"stopping_criteria": None},
            {"guidance_scale": 1.0},
        ],
        ids=str,
    )
    def test_neutral_values_pass(self, options: dict[str, Any]) -> None:
        assert generate(one(PROMPTS[0]), **options)[0, 3:].tolist() == reference(model(), PROMPTS[0], 4)

    def test_unknown_options(self) -> None:
        with pytest.raises(ConfigError, match="'max_draft_token'; did you mean 'max_draft_tokens'"):
            generate(one(PROMPTS[0]), max_draft_token=3)
        with pytest.raises(ConfigError, match="'temprature'; did you mean 'temperature'"):
            generate(one(PROMPTS[0]), temprature=0.5)

    @pytest.mark.parametrize(
        ("drafter", "complaint"),
        [
            ("ngrams", "unknown drafter 'ngrams'; did you mean 'ngram'"),
            ("zzz", "unknown drafter 'zzz'; available: adversary, draft_model"),
            ("no_such.module:Drafter", "cannot be imported"),
            ("specdec.drafters.ngram:Nothing", "cannot be imported"),
            (5, "drafter=5; allowed: a name"),
            ([], "drafter=\\[\\]; allowed: a name"),
        ],
    )
    def test_unknown_drafters(self, drafter: Any, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            generate(one(PROMPTS[0]), drafter=drafter)
        with pytest.raises(ConfigError, match=complaint):
            specdec.LLM(model(), drafter=drafter)

    @pytest.mark.parametrize(
        ("verifier", "complaint"),
        [("matches", "did you mean 'match'"), (3, "verifier=3; allowed: 'auto', a name"), (None, "verifier=None")],
    )
    def test_unknown_verifiers(self, verifier: Any, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            generate(one(PROMPTS[0]), verifier=verifier)
        with pytest.raises(ConfigError, match=complaint):
            specdec.LLM(model(), verifier=verifier)

    @pytest.mark.parametrize(
        ("verifier", "options", "complaint"),
        [
            ("typical", {"alpha": 0.1}, "verifier 'typical' has no option 'alpha'; .* posterior_alpha"),
            ("typical", {"posterior_alpha": -1}, "posterior_alpha=-1; allowed: a number above 0"),
            ("auto", {"posterior_alpha": 0.1}, "go with a verifier given by name; this one is 'auto'"),
            (MatchVerifier(), {"posterior_alpha": 0.1}, "this one is an object"),
        ],
    )
    def test_options_of_a_verifier(self, verifier: Any, options: dict[str, Any], complaint: str) -> None:
        for call in (generate, lambda **all: specdec.LLM(model(), **all)):
            with pytest.raises(ConfigError, match=complaint):
                call(verifier=verifier, verifier_options=options)

    def test_options_reach_the_verifier(self) -> None:
        llm = specdec.LLM(model(), verifier="typical", verifier_options={"posterior_alpha": 0.7})
        assert llm.engine.verifiers.sampled.posterior_alpha == 0.7

    def test_options_of_a_drafter(self) -> None:
        with pytest.raises(ConfigError, match="drafter 'ngram' has no option 'max_ngrm'; did you mean 'max_ngram'"):
            generate(one(PROMPTS[0]), drafter="ngram", drafter_options={"max_ngrm": 2})
        built = specdec.LLM(model(), drafter="ngram").engine.drafter
        with pytest.raises(ConfigError, match="built already"):
            generate(one(PROMPTS[0]), drafter=built, drafter_options={"max_ngram": 2})
        with pytest.raises(ConfigError, match="drafter_options"):
            generate(one(PROMPTS[0]), drafter="ngram", drafter_options=[("max_ngram", 2)])

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"max_draft_tokens": -1}, "max_draft_tokens=-1"),
            ({"kernels": "fast"}, "kernels='fast'"),
            ({"kv_memory_bytes": -1}, "kv_memory_bytes=-1"),
            ({"kv_dtype": ["int8"]}, r"kv_dtype=\['int8'\]"),
            ({"kv_memory_bytes": "1 pound"}, "kv_memory_bytes='1 pound'"),
            ({"kv_memory": "1GiB", "kv_memory_bytes": 1}, "one option"),
            ({"kv_dtype": "int9"}, "kv_dtype='int9'.*'int8', 'int4'"),
            ({"kv_block_tokens": 0}, "kv_block_tokens=0"),
            ({"prepack_limit_bytes": 1.5}, "prepack_limit_bytes=1.5"),
            ({"lean": "no"}, "lean='no'"),
            ({"seed": "one"}, "seed"),
            ({"do_sample": True, "seed": 2**70}, "seed"),
        ],
        ids=str,
    )
    def test_values_out_of_range(self, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            generate(one(PROMPTS[0]), **options)

    @pytest.mark.parametrize(
        "options",
        [{"temperature": 0.0}, {"temperature": -1.0}, {"top_p": -0.5}, {"top_k": -3}, {"min_p": 3.0}],
        ids=str,
    )
    def test_sampling_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            generate(one(PROMPTS[0]), do_sample=True, **options)
        if options != {"temperature": 0.0}:  # greedy there
            with pytest.raises(ConfigError, match=next(iter(options))):
                specdec.LLM(model()).generate(PROMPTS[0], **{"temperature": 1.0, **options})

    def test_return_sequences(self) -> None:
        ids, mask = padded(PROMPTS)
        out = generate(ids, mask, do_sample=True, num_return_sequences=3, seed=1)
        assert out.shape == (9, 16)
        assert torch.equal(out[:, :12], ids.repeat_interleave(3, dim=0))
        with pytest.raises(ConfigError, match="num_return_sequences"):
            generate(ids, mask, do_sample=False, num_return_sequences=2)

    @pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "llama", None, 3], ids=lambda x: type(x).__name__)
    def test_no_model(self, thing: Any) -> None:
        with pytest.raises(UnsupportedModelError, match=f"{type(thing).__name__} is not a transformers model"):
            specdec.generate(thing, one(PROMPTS[0]))

    def test_a_drafter_of_another_target(self) -> None:
        for target, options in ((model_of(named("qwen2")), {}), (model(), {"lean": False})):
            for name in ("oracle", "self_int8"):
                drafter = specdec.LLM(target, drafter=name, **options).engine.drafter
                with pytest.raises(IncompatibleDrafterError, match=f"'{name}' was built for another target"):
                    generate(one(PROMPTS[0]), drafter=drafter)

    def test_a_compiled_model(self) -> None:
        compiled = torch.compile(build(named("llama")), backend="eager")
        with pytest.raises(UnsupportedModelError, match=r"torch.compile wrapper .*pass the model that was compiled"):
            specdec.generate(compiled, one(PROMPTS[0]))

    def test_a_model_without_weights(self) -> None:
        with pytest.raises(UnsupportedModelError, match="weights on the meta device"):
            specdec.generate(build(named("llama")).to("meta"), one(PROMPTS[0]))

    def test_a_model_without_a_head(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"LlamaModel is not .* head"):
            specdec.generate(build(named("llama")).model, one(PROMPTS[0]))


class TestPrompts:
    @pytest.fixture
    def llm(self) -> specdec.LLM:
        return specdec.LLM(model(), tokenizer=Tokenizer(), drafter="ngram")

    def test_every_form_of_a_prompt(self, llm: specdec.LLM) -> None:
        want = [reference(model(), p, 4) for p in PROMPTS]

        def ids(prompt: Any) -> list[list[int]]:
            return [c.token_ids for c in llm.generate(prompt, max_new_tokens=4)]

        assert ids(PROMPTS[0]) == ids(tuple(PROMPTS[0])) == ids(torch.tensor(PROMPTS[0])) == want[:1]
        assert ids([PROMPTS[0]]) == ids(one(PROMPTS[0])) == ids([torch.tensor(PROMPTS[0])]) == want[:1]
        assert ids(PROMPTS) == ids([tuple(p) for p in PROMPTS]) == ids(tuple(PROMPTS)) == want
        text = "".join(chr(63 + t - 1) if t < 64 else "" for t in PROMPTS[0])
        assert llm.tokenizer(text).input_ids == PROMPTS[0]
        assert ids(text) == ids([text]) == want[:1]
        assert ids([text, PROMPTS[1]]) == want[:2]
        assert ids([]) == []

    @pytest.mark.parametrize(
        ("prompt", "complaint"),
        [
            ("", "empty string"), ([""], "empty string"), ([[]], "no tokens"), (["abc", ""], "empty string"),
            (5, "got int"), (None, "got NoneType"), ({"a": 1}, "got dict"), ([None], "got NoneType"),
            ([1.5], "got float"),
            ([[1.5]], "got list"), ([[1, "a"]], "got list"), ([[[1]]], "got list"), (["abc", 5], "got int"),
            (torch.tensor([1.5]), "got float"), ([True, False], "True"), (b"abc", "got bytes"),
        ],
        ids=repr,
    )  # fmt: skip
    def test_bad_prompts(self, llm: specdec.LLM, prompt: Any, complaint: str) -> None:
        with pytest.raises(InputError, match=complaint):
            llm.generate(prompt, max_new_tokens=2)

    def test_one_bad_prompt_stops_all_before_anything_runs(self, llm: specdec.LLM) -> None:
        steps = llm.engine.stats.num_steps
        with pytest.raises(InputError, match="outside the target's vocabulary"):
            llm.generate([PROMPTS[0], [1, 99]], max_new_tokens=2)
        assert llm.engine.stats.num_steps == steps
        assert not llm.engine.has_unfinished

    def test_text_without_a_tokenizer(self) -> None:
        llm = specdec.LLM(model())
        for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(InputError, match=r"needs a tokenizer .*LLM\(..., tokenizer=\)"):
                call()

    @pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
    def test_max_new_tokens(self, llm: specdec.LLM, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"max_new_tokens={value!r}; allowed: an integer >= 0"):
            llm.generate(PROMPTS[0], max_new_tokens=value)

    def test_unknown_options(self, llm: specdec.LLM) -> None:
        with pytest.raises(ConfigError, match=r"has no option 'max_tokens'; did you mean 'max_new_tokens'"):
            llm.generate(PROMPTS[0], max_tokens=3)
        with pytest.raises(ConfigError, match="has no option 'max_draft_token'; did you mean 'max_draft_tokens'"):
            specdec.LLM(model(), max_draft_token=3)
        with pytest.raises(ConfigError, match="'stops'; did you mean 'stop'"):
            llm.generate(PROMPTS[0], stops=["x"])
        with pytest.raises(InputError, match="a stop string needs a tokenizer"):
            specdec.LLM(model()).generate(PROMPTS[0], stop=["x"])

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"drafter": "os:path"}, "has no build"),
            ({"verifier": "os:path"}, "verifier='os:path'; allowed"),
        ],
        ids=repr,
    )
    def test_objects_of_another_kind(self, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            specdec.LLM(model(), **options)

    def test_a_tokenizer_of_another_kind_is_noticed_before_anything_runs(self) -> None:
        llm = specdec.LLM(model(), tokenizer=5)
        with pytest.raises(ConfigError, match="tokenizer=5; allowed: a transformers tokenizer"):
            llm.generate(PROMPTS[0])
        assert llm.engine.stats.num_steps == 0

    def test_a_streamer_of_another_kind(self, llm: specdec.LLM) -> None:
        with pytest.raises(ConfigError, match=r"streamer=5; allowed: a transformers streamer"):
            llm.generate(PROMPTS[0], streamer=5)

    def test_text_that_is_no_unicode(self) -> None:
        with pytest.raises(InputError, match="not valid Unicode"):
            specdec.LLM(model(), tokenizer=Tokenizer()).generate("\ud800")

    def test_an_id_beyond_int64(self, llm: specdec.LLM) -> None:
        with pytest.raises(InputError, match="outside the target's vocabulary"):
            llm.generate([2**70])

    def test_a_processor_that_returns_something_else(self, llm: specdec.LLM) -> None:
        want = llm.generate(PROMPTS[0], max_new_tokens=4)[0].token_ids
        assert llm.generate(PROMPTS[0], max_new_tokens=4, logits_processor=lambda _, x: x[0])[0].token_ids == want
        for change in (lambda _, x: None, lambda _, x: x[:, :5], lambda _, x: torch.cat([x, x], 1)):
            with pytest.raises(ConfigError, match="logits processor function returned"):
                llm.generate(PROMPTS[0], max_new_tokens=4, logits_processor=change)
        assert llm.generate(PROMPTS[0], max_new_tokens=4)[0].token_ids == want

    def test_settings_without_effect_are_said_once(
        self, llm: specdec.LLM, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
    ) -> None:
        request.addfinalizer(warn_without_effect.cache_clear)
        warn_without_effect.cache_clear()
        for _ in range(2):
            llm.generate(PROMPTS[0], max_new_tokens=1, top_p=0.5)
            generate(one(PROMPTS[0]), use_cache=False)
        assert [r.message for r in caplog.records] == [
            "top_p: no effect at temperature 0, which is greedy",
            "use_cache=False: no effect here, the KV cache is specdec's own",
        ]


class TestChat:
    def chatty(self) -> specdec.LLM:
        tokenizer = Tokenizer()
        tokenizer.chat_template = "{{ messages }}"
        return specdec.LLM(model(), tokenizer=tokenizer)

    def test_an_answer(self) -> None:
        completion = self.chatty().chat([{"role": "user", "content": "hello"}], max_new_tokens=3)
        prompt = Tokenizer()("hello").input_ids
        assert completion.prompt_token_ids == prompt
        assert completion.token_ids == reference(model(), prompt, 3)
        assert completion.text == Tokenizer().decode(completion.token_ids)

    @pytest.mark.parametrize(
        "messages",
        [[], "hello", None, [{}], ["hello"], [[{"role": "user", "content": "x"}]], [{"content": "x"}]],
        ids=repr,
    )
    def test_malformed(self, messages: Any) -> None:
        with pytest.raises(InputError, match="chat takes one conversation"):
            self.chatty().chat(messages)

    def test_a_template_that_fails(self) -> None:
        tokenizer = Tokenizer()
        tokenizer.chat_template = "one"
        with pytest.raises(InputError, match="chat template does not take these messages"):
            specdec.LLM(model(), tokenizer=tokenizer).chat([{"role": "user"}])

    def test_no_template(self) -> None:
        with pytest.raises(InputError, match="no chat template"):
            specdec.LLM(model(), tokenizer=Tokenizer()).chat([{"role": "user", "content": "x"}])

    def test_options_are_those_of_generate(self) -> None:
        with pytest.raises(ConfigError, match="has no option 'max_tokens'"):
            self.chatty().chat([{"role": "user", "content": "x"}], max_tokens=3)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


class TestStreamer:
    def test_it_gets_the_prompt_and_every_token_once(self) -> None:
        llm, collector = specdec.LLM(model(), drafter="oracle"), Collector()
        completion = llm.generate(PROMPTS[1], max_new_tokens=11, streamer=collector)[0]
        assert collector.parts[0] == PROMPTS[1]
        assert [t for part in collector.parts[1:] for t in part] == completion.token_ids
        assert collector.ended == 1

    def test_one_prompt_only(self) -> None:
        with pytest.raises(ConfigError, match="a streamer takes one prompt, 3 were given"):
            specdec.LLM(model()).generate(PROMPTS, max_new_tokens=2, streamer=Collector())

    def test_an_abandoned_stream_leaves_nothing(self) -> None:
        class Impatient(Collector):
            def put(self, value: torch.Tensor) -> None:
                super().put(value)
                if len(self.parts) == 3:
                    raise KeyboardInterrupt

        llm = specdec.LLM(model(), drafter="ngram")
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], max_new_tokens=11, streamer=Impatient())
        assert not llm.engine.has_unfinished
        assert llm.generate(PROMPTS[1], max_new_tokens=4)[0].token_ids == reference(model(), PROMPTS[1], 4)
