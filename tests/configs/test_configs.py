"""Every YAML file composes wherever its group is, and what comes out of it can be built."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from specdec import LLM, ConfigError
from specdec.build import split_options
from specdec.cli import recipes
from specdec.cli.eval_command import measurements
from specdec.configs import schema
from specdec.engine_config import EngineConfig
from specdec.eval import sweep  # noqa: F401 - registers its sweeper
from specdec.eval.conversations import PromptsConfig
from specdec.eval.hydra_main import prepare
from specdec.eval.llm_options import check_method_options, engine_options, llm_options
from specdec.models.build import RunnerConfig
from specdec.models.builtin import BUILTIN_MODELS
from specdec.registry import DRAFTERS, VERIFIERS
from specdec.train.jobs import METHODS
from tests.tiny_chat_model import save_tiny_chat_model

CONFIGS = Path(schema.__file__).parent
MAINS = [name for name, _ in measurements() if (CONFIGS / f"{name}.yaml").is_file()]
TRAINED = ("eagle", "eagle3", "medusa")  # heads, which a random model has not


def members(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


GROUPS = [group for group in schema.SCHEMAS if group != "load"]


def groups_of(main: str) -> list[str]:
    choices = compose(main, return_hydra_config=True).hydra.runtime.choices
    return [group for group in choices if not group.startswith("hydra/")]


@pytest.fixture(autouse=True)
def _hydra(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("parametrize") and "path" in request.fixturenames:
        yield  # what is tested initialises Hydra itself
        return
    with initialize_config_module("specdec.configs", version_base="1.3"):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("configs") / "tiny"))


def member(group: str, name: str, *overrides: str) -> DictConfig:
    """Return the config of a measurement that has all groups, with one member chosen."""
    return compose("prefix", [f"{group}={name}", *overrides])


@pytest.mark.parametrize("main", MAINS)
def test_every_member_goes_with_every_measurement(main: str) -> None:
    groups = groups_of(main)
    for chosen in zip_longest(*(members(group) for group in groups)):
        words = [f"{group}={name}" for group, name in zip(groups, chosen, strict=True) if name is not None]
        config = compose(main, words)
        for group, name in zip(groups, chosen, strict=True):
            if name is not None and group in ("drafter", "verifier"):
                assert config[group].name == name
            if group in schema.SCHEMAS:
                assert OmegaConf.get_type(config[group]) is schema.SCHEMAS[group]


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_seen(group: str) -> None:
    """Otherwise the test above looks at nothing."""
    assert members(group)
    assert group in groups_of("prefix")


@pytest.mark.parametrize("name", members("engine"))
def test_engine(name: str) -> None:
    config = member("engine", name)
    split_options(OmegaConf.to_container(config.engine))
    if name == "default":
        assert engine_options(config) == {}
        assert split_options(OmegaConf.to_container(config.engine)) == (EngineConfig(), RunnerConfig())


def test_engine_has_every_knob() -> None:
    names = {f.name for kind in (EngineConfig, RunnerConfig) for f in fields(kind)}
    assert set(member("engine", "default").engine) == names


@pytest.mark.parametrize("name", members("target"))
def test_target(name: str) -> None:
    target = member("target", name).target
    assert OmegaConf.is_missing(target, "name") or target.name in BUILTIN_MODELS


def test_every_registered_method_has_a_file_and_no_file_is_without_one() -> None:
    assert members("drafter") == sorted(DRAFTERS.table)
    assert members("verifier") == sorted([*VERIFIERS.also, *VERIFIERS.table])


@pytest.mark.parametrize("name", members("drafter"))
def test_drafter(name: str, tiny: str) -> None:
    own = [f"drafter.options.model={tiny}"] if name in ("draft_model", *TRAINED) else []
    config = member("drafter", name, f"target.name={tiny}", *own)
    check_method_options(config)
    if name not in TRAINED:
        llm = LLM(config.target.name, **llm_options(config))
        assert len(llm.generate([3, 4, 5], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


@pytest.mark.parametrize("name", members("verifier"))
def test_verifier(name: str, tiny: str) -> None:
    config = member("verifier", name, f"target.name={tiny}", "drafter=ngram")
    llm = LLM(config.target.name, **llm_options(config))
    assert len(llm.generate([3, 4, 5], max_new_tokens=3, ignore_eos=True, temperature=1.0)[0].token_ids) == 3


@pytest.mark.parametrize("name", members("prompts"))
def test_prompts(name: str) -> None:
    prompts = OmegaConf.to_container(member("prompts", name).prompts)
    if prompts["path"] is None and prompts["texts"] is None:
        with pytest.raises(ConfigError, match=r"prompts\.path"):
            PromptsConfig(**prompts)
    else:
        PromptsConfig(**prompts)


@pytest.mark.parametrize("name", members("train"))
def test_train(name: str) -> None:
    method = OmegaConf.load(CONFIGS / "train" / f"{name}.yaml").method
    recipe = None if name == method else name
    config = recipes.compose(method, {"target": "T", "data.prompts": "P", "out": "O"}, recipe, [])
    assert (config.method, config.target) == (method, "T")
    assert method in METHODS


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiment(path: Path) -> None:
    """Every value that an experiment sweeps over composes, and nothing that it needs is missing."""
    words = [f"experiment={path.stem}"]
    assert prepare("sweep", words) == words


def test_defaults_stand_in_the_dataclasses_alone() -> None:
    for group, configs in {"engine": (EngineConfig, RunnerConfig), "prompts": (PromptsConfig,)}.items():
        usual: dict[str, Any] = {f.name: f.default for config in configs for f in fields(config)}
        made = OmegaConf.to_container(OmegaConf.structured(schema.SCHEMAS[group]))
        assert made.keys() == usual.keys()
        assert all(made[name] == value for name, value in usual.items() if value is None or isinstance(value, int))


def test_a_config_can_be_sent_to_another_process() -> None:
    config = member("engine", "default", "engine.max_batch_size=3")
    assert engine_options(pickle.loads(pickle.dumps(config))) == {"max_batch_size": 3}


PAGE = CONFIGS.resolve().parent / "docs" / "configs.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="not a checkout")
def test_the_page_has_every_measurement_with_its_groups() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| .*[.?] \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: {*re.findall(r"`(\w+)`", groups)} for name, groups in rows if name in MAINS}
    assert told == {main: {*groups_of(main)} - {"prompts", "target"} for main in MAINS if "prompts" in groups_of(main)}
