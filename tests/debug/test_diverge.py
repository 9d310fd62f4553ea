"""diverge(): identical where drafting changes nothing, near-tie where rounding decides, diverged where a rule lies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor
from typer import Typer
from typer.testing import CliRunner

from specdec.debug import divergence as module
from specdec.debug.compare import Comparison, compare
from specdec.debug.divergence import Report, diverge, show
from specdec.debug.near_tie import behind, first_difference, near_tie_limit, top_gap
from specdec.debug.read_trace import read_trace
from specdec.debug.watch import Choice, Watched
from specdec.errors import ConfigError, InputError, SpecdecError
from specdec.interfaces import Noise, NoiseKey, SamplingParams, Stream, TargetRows, TokenTree, VerifyResult
from specdec.kv.cache import KVCache
from specdec.noise import KeyedNoise
from specdec.tree import paths_to
from specdec.verifiers.match import MatchVerifier
from tests.decoding import prompts, reference
from tests.models.architectures import build, model_of, named
from tests.tiny_chat_model import save_tiny_chat_model

PROMPTS = prompts(3, 9, 14)
SCRIPT = {"accept_counts": [2]}  # the first decode step drafts two right tokens, then a wrong one


class AcceptAll(MatchVerifier):
    """Wrong on purpose: keeps every draft token of a chain, and reads the next token behind the last one."""

    name = "accept_all"

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        last = tree.num_nodes - 1
        rows = torch.arange(len(last))
        path, num_accepted = paths_to(tree.parents, last)
        top = target.top(rows, last)
        if top is None:
            depth = int(last.amax()) if len(last) else 0
            top = noise.choose(target.probs(rows, last), NoiseKey(rows, depth + 1, Stream.TOKEN))
        return VerifyResult(path, num_accepted, top)


class LastOfTheBest(MatchVerifier):
    """As rounding might have it: of tied logits the last one wins."""

    name = "last_of_the_best"

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult:
        return super().verify(tree, _LastOfTheBest(target), noise)


class _LastOfTheBest:
    def __init__(self, target: Any) -> None:
        self.target = target

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        result: Tensor = self.target.probs(rows, nodes)
        return result

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        found = []
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            logits = self.target.logits(row, [node])[0]
            found.append(int((logits >= logits.max() - 1e-6).nonzero()[-1]))
        return torch.tensor(found)


def of(model: Any, drafter: Any = "scripted", **options: Any) -> Report:
    given = options.pop("drafter_options", SCRIPT if drafter == "scripted" else None)
    texts = options.pop("texts", PROMPTS)
    return diverge(model, texts, drafter=drafter, drafter_options=given, **{"max_new_tokens": 20, **options})


@pytest.fixture
def tied() -> tuple[Any, int]:
    """Return a model that gives two tokens the same logits, and the position at which PROMPTS[0] first meets them."""
    answer = reference(model_of(named("llama")), PROMPTS[0], 20)
    for position in range(2, 20):
        model, token = build(named("llama")), answer[position]
        if token == 63 or token in answer[:position] or token + 1 in answer[:position]:
            continue
        model.lm_head.weight[token + 1] = model.lm_head.weight[token]
        if reference(model, PROMPTS[0], 20)[: position + 1] == answer[: position + 1]:
            return model, position
    raise AssertionError("no token can be given a twin")


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("ngram", {}),
        ("oracle", {"accept_rate": 0.7, "width": 2}),
        ("random", {"branching": [2, 1]}),
        ("adversary", {}),
        ("none", {}),
    ],
)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_right_rules_are_identical(drafter: str, options: dict[str, Any], how: dict[str, Any]) -> None:
    report = of(model_of(named("llama")), drafter, drafter_options=options, **how)
    assert report.verdict == "identical"
    assert [(c.prompt, c.verdict, c.num_tokens, c.position) for c in report.prompts] == [
        (i, "identical", (20, 20), None) for i in range(3)
    ]
    assert [c.num_prompt_tokens for c in report.prompts] == [3, 9, 14]
    assert report.run["drafter"] == drafter


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_a_wrong_verifier_is_found_where_it_lies(how: dict[str, Any]) -> None:
    """Prefill's token, two right draft tokens; the fourth one is the target's least likely."""
    model = model_of(named("llama"))
    report = of(model, verifier=AcceptAll(), **how)
    assert report.verdict == "diverged"
    assert report.lossless
    assert "a bug" in report.advice
    for c, prompt in zip(report.prompts, PROMPTS, strict=True):
        assert (c.verdict, c.position, c.from_draft) == ("diverged", 3, True)
        assert c.why.startswith("the verifier took")
        assert c.undrafted is not None
        assert c.drafted is not None
        assert c.draft_token_ids[2] == c.drafted.token_id
        assert c.draft_parents == [0, 1, 2, 3]
        assert (c.undrafted.is_best, c.drafted.is_best) == (True, False)
        assert_views(model, prompt, c, how)
        assert c.largest_change == pytest.approx(0.0, abs=1e-4)


def assert_views(model: Any, prompt: Sequence[int], c: Comparison, how: dict[str, Any]) -> None:
    """Assert that gaps, logits and probabilities are those of a plain forward at the position."""
    assert c.undrafted is not None
    assert c.drafted is not None
    assert c.position is not None
    done = module.LLM(model).generate(prompt, max_new_tokens=20, **how)[0].token_ids
    assert c.undrafted.token_id == done[c.position]
    ids = torch.tensor([[*prompt, *done[: c.position]]])
    logits = model(input_ids=ids).logits[0, -1].double()
    pair = [c.undrafted.token_id, c.drafted.token_id]
    for side in (c.undrafted, c.drafted):
        assert side.top_token_ids == tuple(logits.topk(2).indices.tolist())
        assert side.gap == pytest.approx(top_gap(logits), rel=1e-4)
        assert side.pair_logits == pytest.approx(logits[pair].tolist(), rel=1e-4)
        if not how:
            assert side.pair_probs is None
            assert side.behind == pytest.approx(float(logits.max() - logits[pair].min()), rel=1e-4)
        else:
            probs = (logits / how["temperature"]).softmax(-1)
            assert side.pair_probs == pytest.approx(probs[pair].tolist(), rel=1e-3)


def test_tied_logits_are_a_near_tie(tied: tuple[Any, int]) -> None:
    model, position = tied
    report = of(model, verifier=LastOfTheBest(), texts=PROMPTS[0])
    assert report.verdict == "near-tie"
    assert report.near_tie == 1e-8
    (c,) = report.prompts
    assert (c.verdict, c.position) == ("near-tie", position)
    assert c.undrafted is not None
    assert c.drafted is not None
    assert c.drafted.token_id == c.undrafted.token_id + 1
    assert (c.undrafted.gap, c.drafted.gap) == (0.0, 0.0)
    assert (c.undrafted.behind, c.drafted.behind) == (0.0, 0.0)
    assert not c.from_draft  # the drafter believed the target's first choice


def test_tied_logits_of_the_untouched_rules_are_identical(tied: tuple[Any, int]) -> None:
    assert of(tied[0], texts=PROMPTS[0]).verdict == "identical"


def test_three_way_tie_does_not_excuse_a_fourth_token() -> None:
    """The two best are tied, and the token that was taken is neither."""
    plain, drafted = pair_of(torch.tensor([2.0, 2.0, 0.0, 1.0]), torch.tensor([2.0, 2.0, 0.0, 1.0]), (0, 2))
    found = compare(0, plain, drafted, 1e-3, None)
    assert found.undrafted is not None
    assert (found.verdict, found.undrafted.gap, found.undrafted.behind) == ("diverged", 0.0, 2.0)


def test_one_side_without_a_tie_is_no_near_tie() -> None:
    """A broken cache: the drafted run saw other logits, whatever the undrafted one's gap."""
    plain, drafted = pair_of(torch.tensor([2.0, 2.0, 0.0]), torch.tensor([0.0, 5.0, 0.0]), (0, 1))
    found = compare(0, plain, drafted, 1e-3, None)
    assert found.verdict == "diverged"
    assert "the forward is wrong" in found.why
    assert found.largest_change == 3.0


def pair_of(
    left: Tensor, right: Tensor, tokens: tuple[int, int], sampling: SamplingParams = SamplingParams(), seed: int = 0
) -> tuple[Watched, Watched]:
    """Return two runs that part at their first token, with these scores; logits are the scores where finite."""
    runs = []
    for scores, token in zip((left, right), tokens, strict=True):
        choice = Choice(token, 1, [], [], False, scores.nan_to_num(neginf=-3.0), scores)
        runs.append(Watched([1, 2], sampling, seed, [token], None, {0: choice}))
    return runs[0], runs[1]


class TestSampledNearTies:
    PARAMS = SamplingParams(temperature=0.5, seed=7)

    def race(self, scores: Tensor) -> Tensor:
        """Return [V], how the noise of the first new token after two prompt tokens decides, in logits."""
        noise = KeyedNoise(torch.tensor([7]), torch.tensor([1]), torch.tensor([False]))
        key = NoiseKey(torch.tensor([0]), 1, Stream.TOKEN)
        assert int(noise.scores(scores.softmax(-1)[None], key).argmax()) == int(
            noise.choose(scores.softmax(-1)[None], key)
        )
        return 0.5 * noise.scores(scores.softmax(-1)[None], key)[0].log()

    def even(self) -> tuple[Tensor, int, int]:
        """Return scores at which the first two finish the race together but for 1e-6 logits, and those two."""
        scores = torch.tensor([1.0, 0.5, 0.2, -1.0]).double()
        first, second = self.race(scores).topk(2).indices.tolist()
        gap = self.race(scores)[first] - self.race(scores)[second]
        scores[second] += (float(gap) - 1e-6) / 0.5
        return scores, first, second

    def test_a_tie_in_the_race(self) -> None:
        scores, first, second = self.even()
        other = scores.clone()
        other[second] += 4e-6
        plain, drafted = pair_of(scores, other, (first, second), self.PARAMS, 7)
        found = compare(0, plain, drafted, 1e-4, None)
        assert found.verdict == "near-tie"
        assert found.undrafted is not None
        assert found.drafted is not None
        assert found.undrafted.is_best
        assert found.drafted.is_best
        assert found.undrafted.behind == pytest.approx(1e-6, rel=1e-2)
        assert found.drafted.behind == pytest.approx(1e-6, rel=1e-2)
        assert compare(0, plain, drafted, 1e-7, None).verdict == "diverged"

    def test_equal_probabilities_are_no_tie_if_the_noise_is_not(self) -> None:
        scores = torch.zeros(4).double()
        first, *_, last = self.race(scores).argsort(descending=True).tolist()
        assert compare(0, *pair_of(scores, scores, (first, last), self.PARAMS, 7), 1e-4, None).verdict == "diverged"

    def test_the_edge_of_a_filter(self) -> None:
        """The runs' logits agree, but in one of them the winner fell just outside top-p."""
        scores = torch.tensor([1.0, 0.5, 0.2, -1.0]).double()
        first, second = self.race(scores).topk(2).indices.tolist()
        cut = scores.clone()
        cut[first] = -math.inf
        plain, drafted = pair_of(scores, cut, (first, second), self.PARAMS, 7)
        drafted.choices[0] = replace(drafted.choices[0], logits=plain.choices[0].logits + 1e-6)
        found = compare(0, plain, drafted, 1e-4, None)
        assert found.verdict == "near-tie"
        assert "filter" in found.why
        assert found.drafted is not None
        assert found.drafted.behind == math.inf
        drafted.choices[0] = replace(drafted.choices[0], logits=plain.choices[0].logits + 1e-2)
        assert compare(0, plain, drafted, 1e-4, None).verdict == "diverged"


def test_a_processor_decides_and_its_scores_are_compared() -> None:
    """Raw logits tell nothing where a processor changed them."""
    penalty = [RepetitionPenaltyLogitsProcessor(3.0)]
    report = of(model_of(named("llama")), verifier=AcceptAll(), logits_processor=penalty)
    for c in report.prompts:
        assert (c.verdict, c.from_draft) == ("diverged", True)
        assert c.position in (1, 2, 3)  # the drafter does not know of the penalty
        assert c.drafted is not None
        assert c.drafted.behind == math.inf  # nobody asked the processor here: the rule accepted unseen
    assert of(model_of(named("llama")), logits_processor=penalty).verdict == "identical"
    json.loads(report.json())


def test_a_processor_with_a_memory_is_named() -> None:
    plain, drafted = pair_of(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]), (0, 1))
    drafted.choices[0] = replace(drafted.choices[0], logits=plain.choices[0].logits)
    found = compare(0, plain, drafted, 1e-3, None)
    assert found.verdict == "diverged"
    assert "a processor with a memory" in found.why


def test_a_broken_cache_is_told_from_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting two draft tokens damages the last key."""
    commit = KVCache.commit

    def damage(self: KVCache, request_id: int, kept: Tensor) -> None:
        commit(self, request_id, kept)
        sequence = self._sequences[request_id]
        if len(kept) == 3 < sequence.context_len:  # not the prompt of three tokens
            for layer in self.layers:
                self._storage.parts[layer][0][sequence.slot(sequence.context_len - 1)] = 0.0

    monkeypatch.setattr(KVCache, "commit", damage)
    report = of(model_of(named("llama")))
    assert report.verdict == "diverged"
    worst = [c for c in report.prompts if c.verdict == "diverged"]
    assert all("the forward is wrong" in c.why for c in worst)
    assert all(c.position is not None and c.position > 3 for c in worst)


def test_a_run_that_ends_too_early() -> None:
    plain, drafted = pair_of(torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.0]), (0, 0))
    drafted.new_tokens, drafted.choices, drafted.finish_reason = [], {}, "stop"
    found = compare(0, plain, drafted, 1e-3, None)
    assert (found.verdict, found.position, found.num_tokens) == ("diverged", 0, (1, 0))
    assert found.why.startswith("the drafted run ended")
    assert found.drafted is None
    show(Report("diverged", "", {}, True, 1e-3, [found]), Console(quiet=True))


def test_a_lossy_verifier_is_expected_to_differ() -> None:
    class Lossy(AcceptAll):
        lossless = False

    report = of(model_of(named("llama")), verifier=Lossy())
    assert (report.verdict, report.lossless) == ("diverged", False)
    assert report.advice.startswith("expected")


def test_equal_prompts_in_one_batch() -> None:
    report = of(model_of(named("llama")), verifier=AcceptAll(), texts=[PROMPTS[0]] * 3)
    assert [(c.prompt, c.position) for c in report.prompts] == [(0, 3), (1, 3), (2, 3)]


def test_nothing_to_generate() -> None:
    report = of(model_of(named("llama")), max_new_tokens=0)
    assert [(c.verdict, c.num_tokens, c.finish_reasons) for c in report.prompts] == [
        ("identical", (0, 0), ("length", "length"))
    ] * 3


def test_both_runs_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    report = of(model_of(named("llama")), trace=path, verifier=AcceptAll())
    runs = read_trace(path).runs
    assert [(r.header["drafter"], r.header["verifiers"]["greedy"]) for r in runs] == [
        ("none", "match"),
        ("scripted", "accept_all"),
    ]
    c = report.prompts[1]
    step = runs[1].steps[c.step - 1]  # type: ignore[operator]
    entry = next(e for e in step["requests"] if e["request_id"] == runs[1].request_ids[1])
    assert entry["draft_token_ids"] == c.draft_token_ids
    assert entry["draft_token_ids"][2] == c.drafted.token_id  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.5}, ConfigError, "pass seed="),
        ({"temperature": -1.0}, ConfigError, "temperature must be"),
        ({"temperature": 0.5, "seed": 1, "verifier": "rejection"}, ConfigError, "pass verifier='match'"),
        ({"drafter": "ngarm"}, ConfigError, "did you mean 'ngram'"),
        ({"max_new_token": 3}, ConfigError, "max_new_token"),
        ({"texts": [[]]}, InputError, "no tokens"),
        ({"texts": "a text"}, InputError, "tokenizer"),
        ({"trace": "/absent/t.jsonl"}, ConfigError, "cannot be written"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[SpecdecError], message: str) -> None:
    drafter = options.pop("drafter", "scripted")
    with pytest.raises(error, match=message):
        of(model_of(named("llama")), drafter, **options)


def test_a_dtype_without_a_limit_needs_one() -> None:
    assert near_tie_limit(torch.float32) == 2e-4
    assert near_tie_limit(torch.float8_e5m2, 1.0) == 1.0
    with pytest.raises(ConfigError, match="near_tie="):
        near_tie_limit(torch.float8_e5m2)


def test_measures_by_hand() -> None:
    scores = torch.tensor([3.0, 5.0, 4.5])
    assert (top_gap(scores), behind(scores, [1, 0]), behind(scores, [1, 2])) == (0.5, 2.0, 0.5)
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


class TestCommand:
    def run(self, *arguments: str) -> Any:
        app = Typer()
        app.command()(module.main)
        return CliRunner().invoke(app, ["--max-new-tokens", "12", *arguments])

    def test_identical(self, tiny: Path) -> None:
        done = self.run("--model", str(tiny), "--drafter", "ngram", "--prompt", "abcabcab", "--prompt", "xyz")
        assert done.exit_code == 0, done.output
        assert "verdict: identical" in done.output
        assert "12 new tokens" in done.output

    def test_json(self, tiny: Path) -> None:
        done = self.run("--model", str(tiny), "--drafter", "oracle", "--prompt", "abc", "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["verdict"], found["prompts"][0]["num_tokens"]) == ("identical", [12, 12])

    def test_diverged(self, tiny: Path) -> None:
        options = ("--drafter", "scripted", "--drafter-option", "accept_counts=[2]")
        wrong = ("--verifier", "tests.debug.test_diverge:AcceptAll")
        done = self.run("--model", str(tiny), *options, *wrong, "--prompt", "abc")
        assert done.exit_code == 1, done.output
        assert "at new token 3" in done.output
        assert "verdict: diverged; a bug" in " ".join(done.output.split())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--drafter", "ngarm"), "did you mean"),
            (("--drafter", "ngram", "--drafter-option", "max_ngram"), "is not NAME=VALUE"),
            (("--drafter", "ngram", "--temperature", "1"), "pass seed="),
            (("--drafter", "ngram", "--dtype", "flaot32"), "dtype"),
        ],
    )
    def test_bad_input(self, tiny: Path, arguments: tuple[str, ...], message: str) -> None:
        done = self.run("--model", str(tiny), "--prompt", "abc", *arguments)
        assert done.exit_code == 2, done.output
        assert message in done.output
