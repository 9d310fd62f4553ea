"""`specdec generate` on a tiny model in a local directory."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.engine import Engine
from specdec.verifiers.match import MatchVerifier
from tests.cli.running import NUM_TOKENS, PROMPT, Result, as_json, generate, refused, run
from tests.tiny_chat_model import save_tiny_chat_model

TABLE_ROWS = (
    *("num_prompt_tokens", "prefill_tokens_per_s", "ttft_s", "num_emitted_tokens", "decode_tokens_per_s", "tpot_s"),
    *("acceptance_rate", "acceptance_length", "draft_s", "verify_s", "other_s", "weight_bytes", "extra_weight_bytes"),
    *("kv_cache_bytes", "kv_bytes_per_token", "peak_rss_bytes"),
)


class LossyVerifier(MatchVerifier):
    """Stands for a rule that changes the distribution."""

    name = "lossy"
    lossless = False


class TestGenerate:
    def test_text_then_table(self, model: str) -> None:
        result = generate(model, "--drafter", "ngram")
        assert result.exit_code == 0, result.output
        expected = LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=NUM_TOKENS)
        assert result.stdout.startswith(expected.text + "\n")
        for name in TABLE_ROWS:
            assert re.search(rf"\b{name}\b", result.stdout), name
        assert "drafter ngram, verifier match" in result.stdout
        assert "LOSSLESS" not in result.stdout
        assert "\x1b" not in result.stderr + result.stdout.removeprefix(expected.text)
        assert max(len(line) for line in result.stdout.removeprefix(expected.text).splitlines()) <= 80

    @pytest.mark.parametrize("drafter", ["none", "ngram", "self_int8", "oracle"])
    def test_json(self, model: str, drafter: str) -> None:
        found = as_json(generate(model, "--drafter", drafter, "--max-draft-tokens", "3", "--json"))
        assert found["token_ids"] == as_json(generate(model, "--json"))["token_ids"]
        assert (found["drafter"], found["max_draft_tokens"]) == (drafter, 3)
        assert (found["verifier"], found["lossless"], found["finish_reason"]) == ("match", True, "length")
        assert len(found["token_ids"]) == len(found["from_draft"]) == NUM_TOKENS
        stats, memory = found["stats"], found["memory"]
        assert {*TABLE_ROWS} <= {*stats, *memory}
        assert stats["num_prompt_tokens"] == len(found["prompt_token_ids"])
        assert stats["num_emitted_tokens"] == NUM_TOKENS - 1
        assert stats["num_accepted_tokens"] == sum(found["from_draft"])
        assert stats["decode_s"] == pytest.approx(stats["draft_s"] + stats["verify_s"] + stats["other_s"])
        assert memory["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, width, float32
        assert memory["peak_rss_bytes"] > memory["weight_bytes"] > 0
        drafted = stats["num_draft_tokens"]
        assert stats["acceptance_rate"] == (stats["num_accepted_tokens"] / drafted if drafted else None)

    def test_sampling_options_arrive(self, model: str) -> None:
        sampled = ("--temperature", "1", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01", "--seed", "3", "--json")
        found = as_json(
            generate(model, *sampled, "--dtype", "fp64", "--drafter", "self_int8", "--verifier", "rejection")
        )
        expected = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3}
        assert found["sampling"] == expected
        assert (found["verifier"], found["dtype"]) == ("rejection", "float64")
        again = as_json(generate(model, *sampled, "--drafter", "ngram"))
        plain = as_json(generate(model, *sampled))
        assert again["verifier"] == "match"
        assert again["token_ids"] == plain["token_ids"]
        assert plain["token_ids"] != as_json(generate(model, "--json"))["token_ids"]

    def test_setting_without_effect_is_named(self, model: str) -> None:
        from specdec.sampling import warn_without_effect

        warn_without_effect.cache_clear()  # it is said once per process
        assert "top_p: no effect at temperature 0" in generate(model, "--top-p", "0.5").stderr

    def test_raw_leaves_the_template_out(self, model: str) -> None:
        llm = LLM(model)
        raw, chat = as_json(generate(model, "--raw", "--json")), as_json(generate(model, "--json"))
        assert raw["prompt_token_ids"] == llm.tokenizer(PROMPT).input_ids
        assert chat["prompt_token_ids"] == llm.chat_token_ids([{"role": "user", "content": PROMPT}])

    def test_nothing_to_generate(self, model: str) -> None:
        result = generate(model, "--max-new-tokens", "0")
        assert result.exit_code == 0
        assert re.search(r"ttft_s\s+│\s+-", result.stdout)

    def test_lossy_verifier_is_labelled(self, model: str) -> None:
        own = f"{__name__}:LossyVerifier"
        assert "lossy (NOT LOSSLESS)" in generate(model, "--verifier", own).stdout
        assert as_json(generate(model, "--verifier", own, "--json"))["lossless"] is False

    def test_drafter_options(self, model: str) -> None:
        half = ("--drafter", "oracle", "--drafter-option", "accept_rate=0", "--json")
        assert as_json(generate(model, *half))["stats"]["acceptance_rate"] == 0
        assert "--drafter-option" in generate(model, "--drafter-option", "accept_rate").stderr
        assert "accept_rate" in refused(generate(model, "--drafter", "oracle", "--drafter-option", "acept_rate=1"))

    def test_draft_length(self, model: str) -> None:
        options = ("--drafter", "self_int8", "--draft-length", "confidence", "--json")
        sure = as_json(generate(model, *options, "--confidence-threshold", "0"))
        unsure = as_json(generate(model, *options, "--confidence-threshold", "1"))
        assert sure["draft_length"] == "confidence"
        assert sure["stats"]["num_draft_tokens"] > unsure["stats"]["num_draft_tokens"] > 0
        assert sure["token_ids"] == unsure["token_ids"]

    def test_stop(self, model: str) -> None:
        whole = as_json(generate(model, "--json"))["text"]
        end = next(i for i in range(3, len(whole)) if whole[i] not in whole[:i])
        found = as_json(generate(model, "--stop", "no such text", "--stop", whole[end], "--json"))
        assert (found["text"], found["finish_reason"]) == (whole[:end], "stop")
        assert found["stop"] == ["no such text", whole[end]]
        assert generate(model, "--stop", whole[end]).stdout.startswith(whole[:end] + "\n\n")

    def test_logprobs(self, model: str) -> None:
        found = as_json(generate(model, "--logprobs", "2", "--json"))
        records = LLM(model).generate([found["prompt_token_ids"]], max_new_tokens=NUM_TOKENS, logprobs=2)[0].logprobs
        assert records is not None
        assert [row["token_id"] for row in found["logprobs"]] == found["token_ids"]
        for row, record in zip(found["logprobs"], records, strict=True):
            assert row["raw_logprob"] == pytest.approx(record.raw_logprob, abs=1e-5)
            assert [pair["token_id"] for pair in row["top"]] == [token for token, _ in record.top]
        assert "goes with --json" in generate(model, "--logprobs", "2").stderr


class TestPrompt:
    @pytest.mark.parametrize("arguments", [("--prompt", "-"), ()])
    def test_from_standard_input(self, model: str, arguments: tuple[str, ...]) -> None:
        given = as_json(generate(model, "--json"))
        options = ("--model", model, "--max-new-tokens", str(NUM_TOKENS), "--json")
        read = as_json(run("generate", *options, *arguments, stdin=PROMPT + "\n"))
        assert read["prompt"] == PROMPT
        assert read["token_ids"] == given["token_ids"]

    def test_empty(self, model: str) -> None:
        assert "the prompt from --prompt is empty" in refused(generate(model, prompt=""))
        assert "the prompt from standard input is empty" in refused(generate(model, prompt="-", stdin="\n"))

    def test_no_text(self, model: str) -> None:
        assert "not valid UTF-8" in refused(generate(model, prompt="-", stdin=b"\xff"))
        assert "not valid UTF-8" in refused(generate(model, prompt=os.fsdecode(b"\xff")))

    def test_too_long(self, model: str) -> None:
        assert "context limit is 4096" in refused(generate(model, prompt="x" * 5000))

    def test_without_chat_template(self, tmp_path: Path) -> None:
        plain = str(save_tiny_chat_model(tmp_path / "plain", chat_template=None))
        assert "add --raw" in refused(generate(plain))
        assert generate(plain, "--raw").exit_code == 0

    def test_without_tokenizer(self, tmp_path: Path, model: str) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).write_bytes((Path(model) / name).read_bytes())
        assert "without a tokenizer" in refused(generate(str(bare)))


class TestPromptsFile:
    LINES = ("plain text", '{"prompt": "{braces} and text"}', "", '{"messages": [{"role": "user", "content": "hi"}]}')

    def file(self, folder: Path, *lines: str) -> str:
        path = folder / "prompts.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    def generate(self, model: str, file: str, *args: str) -> Result:
        return run("generate", "--model", model, "--prompts-file", file, "--max-new-tokens", "6", *args)

    def test_json_lines_in_order(self, model: str, tmp_path: Path) -> None:
        result = self.generate(model, self.file(tmp_path, *self.LINES), "--json", "--drafter", "ngram")
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        llm = LLM(model)
        assert [row["prompt"] for row in rows] == ["plain text", "{braces} and text", "hi"]
        for row in rows:
            expected = llm.chat([{"role": "user", "content": row["prompt"]}], max_new_tokens=6)
            assert row["token_ids"] == expected.token_ids

    def test_texts_and_one_table(self, model: str, tmp_path: Path) -> None:
        result = self.generate(model, self.file(tmp_path, *self.LINES))
        llm = LLM(model)
        at = 0
        for i, prompt in enumerate(("plain text", "{braces} and text", "hi"), start=1):
            text = llm.chat([{"role": "user", "content": prompt}], max_new_tokens=6).text
            at = result.stdout.index(f"[{i} of 3] {prompt}\n{text}\n", at)
        assert result.stdout.count("num_emitted_tokens") == 1
        assert "of 3 prompts" in result.stdout

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"prompt": "a", "max_new_tokens": 3}', "has no option 'max_new_tokens'"),
            ('{"prompt": ""}', "a non-empty text"),
            ('{"prompt": 3}', "a non-empty text"),
            ("{}", "a non-empty text"),
            ('{"prompt": ', "begins like a JSON object"),
            ("", "holds no prompts"),
        ],
    )
    def test_refused(self, model: str, tmp_path: Path, line: str, message: str) -> None:
        file = self.file(tmp_path, line)
        answer = refused(self.generate(model, file))
        assert message in answer
        assert file in answer

    def test_not_with_prompt(self, model: str, tmp_path: Path) -> None:
        assert "give --prompt or" in self.generate(model, self.file(tmp_path, "a"), "--prompt", "b").stderr
        assert "cannot be read" in refused(self.generate(model, str(tmp_path / "none")))


class TestRefused:
    def test_unknown_drafter(self, model: str) -> None:
        line = refused(generate(model, "--drafter", "ngrm"))
        assert "unknown drafter 'ngrm'; did you mean 'ngram'?" in line

    def test_unknown_verifier_and_model(self, model: str) -> None:
        assert "did you mean 'rejection'?" in refused(generate(model, "--verifier", "rejction"))
        assert "did you mean 'auto'?" in refused(generate(model, "--verifier", "atuo"))
        assert "available: auto, match" in refused(generate(model, "--verifier", "xyz"))
        assert "did you mean 'smollm2'?" in refused(generate("smolm2"))

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--top-p", "2", "top_p must be"),
            ("--temperature", "nan", "temperature must be"),
            ("--dtype", "f", "dtype"),
            ("--draft-length", "statik", "did you mean 'static'?"),
            ("--confidence-threshold", "2", "confidence_threshold=2"),
            ("--stop", "", "allowed: a non-empty text"),
            ("--model", "gpt\x1b[31m2x/a/b", "gpt[31m2x"),
        ],
    )
    def test_out_of_range(self, model: str, option: str, value: str, message: str) -> None:
        line = refused(generate(model, option, value))
        assert message in line
        assert "\x1b" not in line

    @pytest.mark.parametrize(
        ("option", "value"), [("--top-k", "many"), ("--max-new-tokens", "-1"), ("--max-draft-tokens", "-1")]
    )
    def test_wrong_type_is_typers(self, model: str, option: str, value: str) -> None:
        result = generate(model, option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.stderr

    def test_error_while_generating_keeps_the_text(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = broken_after(monkeypatch, 4, RuntimeError("broken"), model).stdout
        assert text.rstrip("\n") == LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=4).text


def broken_after(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, error: BaseException, model: str, *args: str
) -> Result:
    """Generate, and have the engine raise after some steps; the prompt is one of them, and each gives a token."""
    step, left = Engine.step, [num_steps]

    def counted(engine: Engine) -> Any:
        if not left[0]:
            raise error
        left[0] -= 1
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", counted)
        return generate(model, *args)


def signalled_in(monkeypatch: pytest.MonkeyPatch, num_steps: int, model: str, *args: str) -> Result:
    """Generate, and press Ctrl-C in the middle of a step."""
    step, left = Engine._forward, [num_steps]

    def pressed(engine: Engine, *rest: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_forward", pressed)
        return generate(model, *args)


class TestInterrupt:
    def text_of(self, model: str, num_tokens: int) -> str:
        return LLM(model).chat([{"role": "user", "content": PROMPT}], max_new_tokens=num_tokens).text

    def test_ends_between_steps(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before = signal.getsignal(signal.SIGINT)
        result = signalled_in(monkeypatch, 5, model)
        assert result.exit_code == 130
        assert result.stderr.endswith("interrupted\n")
        assert result.stdout.startswith(self.text_of(model, 5) + "\n\n")
        assert re.search(r"num_emitted_tokens\s+│\s+4 │ 4 steps, ended by interrupt", result.stdout)
        assert signal.getsignal(signal.SIGINT) is before

    def test_json(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        result = signalled_in(monkeypatch, 3, model, "--json", "--drafter", "oracle", "--logprobs", "0")
        assert result.exit_code == 130
        found = json.loads(result.stdout)
        assert found["finish_reason"] == "interrupt"
        whole = as_json(generate(model, "--json"))
        count = len(found["token_ids"])
        assert found["token_ids"] == whole["token_ids"][:count]
        assert count == found["stats"]["num_emitted_tokens"] + 1 == len(found["from_draft"]) == len(found["logprobs"])
        assert found["text"] == self.text_of(model, count)

    def test_before_the_first_token_at_once(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        result = signalled_in(monkeypatch, 1, model)
        assert (result.exit_code, result.stdout) == (130, "")
        found = json.loads(signalled_in(monkeypatch, 1, model, "--json").stdout)
        assert (found["finish_reason"], found["token_ids"], found["text"]) == ("interrupt", [], "")

    def test_in_a_step_that_is_lost(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        result = broken_after(monkeypatch, 5, KeyboardInterrupt(), model)
        assert result.exit_code == 130
        assert "Traceback" not in result.output
        assert result.stdout.startswith(self.text_of(model, 5) + "\n\n")
        assert "ended by interrupt" in result.stdout

    def test_while_loading(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(LLM, "__init__", interrupt)
        result = generate(model)
        assert (result.exit_code, result.stdout) == (130, "")
