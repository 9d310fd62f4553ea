"""What a training run is: defaults of its method, a recipe, options and key=value, checked name by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.cli import completion
from specdec.errors import ConfigError
from specdec.registry import refuse_unknown

if TYPE_CHECKING:
    from specdec.train.run import RunConfig

SETTINGS_PAGE = "docs/train_a_drafter.md"
_FOLDER = "train"  # of configs/
_FREE = ("options", "settings")  # whose names depend on the method


def compose(method: str, given: dict[str, Any], recipe: str | None, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of a run. What comes later wins: the method's defaults, the recipe, `given`, `overrides`.

    Args:
        method: "eagle3", "medusa" or "draft_model".
        given: dotted name -> value, of the command's own options.
        recipe: a name from configs/train, or a .yaml file.
        overrides: dotted.name=value each; values are YAML.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type or is missing, or something is given twice.
    """
    from specdec.train.advice import ADVISED
    from specdec.train.jobs import METHODS, OPTIONS
    from specdec.train.run import RunConfig

    if method not in METHODS:
        close = get_close_matches(method, METHODS, n=1, cutoff=0.4)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"specdec train has no method {method!r};{hint} available: {', '.join(METHODS)}")
    schema = OmegaConf.structured(RunConfig)
    _make_writable(schema)
    schema.data.prompts = MISSING  # nobody trains on prompts that were not named
    known = {*_names(RunConfig), *(f"options.{n}" for n in OPTIONS[method]), *(f"settings.{n}" for n in ADVISED)}
    layers = [_load(_shipped(method), method)]
    if recipe is not None:
        layers.append(_load(_find(recipe), method))
    layers += [OmegaConf.create({}), _pairs(overrides, given)]
    for name, value in given.items():
        OmegaConf.update(layers[-2], name, value, force_add=True)
    config = schema
    for layer in layers:
        _refuse_unknown_settings(method, _given_names(layer, known), known)
        if OmegaConf.select(layer, "loop.precision") is False:
            layer.loop.precision = "no"  # which YAML takes for false
        try:
            config = OmegaConf.merge(config, layer)
        except OmegaConfBaseException as error:
            raise _wrong_value(error, layer) from error
    return _built(config, method, given.get("out"), recipe)


def _refuse_unknown_settings(method: str, given: Iterable[str], known: set[str]) -> None:
    """Raise ConfigError for the first name that is none, with those that are like it and where all are described."""
    for name in given:
        if name in known:
            continue
        group = name.partition(".")[0]
        close = get_close_matches(name, sorted(known), n=3, cutoff=0.75)
        of_group = sorted(other for other in known if other.startswith(f"{group}."))
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"available: {', '.join(of_group)};"
        raise ConfigError(
            f"specdec train {method} has no setting {name!r}; {hint if close or of_group else ''} all settings are "
            f"listed in {SETTINGS_PAGE}"
        )


def recipes() -> list[str]:
    """Return the names of the recipes that come with specdec, without the defaults of the methods."""
    return completion.recipes("")


def _built(config: DictConfig, method: str, out: Any, recipe: str | None) -> RunConfig:
    from specdec.train.run import RunConfig

    config.method = method
    if OmegaConf.is_missing(config, "out"):
        config.out = str(Path("outputs") / _FOLDER / _folder_name(method, config, recipe))
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        options = {"data.prompts": "--prompts", "target": "--target"}
        needed = " and ".join(options.get(name, f"{name}=") for name in missing)
        raise ConfigError(f"specdec train {method} needs {needed}; or --recipe, one of {', '.join(recipes())}")
    try:
        built = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the settings cannot be used: {_first_line(error)}") from error
    assert isinstance(built, RunConfig), "the schema is a RunConfig's"
    first, second = built.loop.betas  # OmegaConf makes lists of tuples
    capture = replace(built.capture, temperatures=tuple(built.capture.temperatures))
    return replace(built, capture=capture, loop=replace(built.loop, betas=(first, second)))


def _folder_name(method: str, config: DictConfig, recipe: str | None) -> str:
    if recipe is not None and not _is_file(recipe):
        return recipe
    target = "" if OmegaConf.is_missing(config, "target") else str(config.target)
    return f"{method}-{target.rstrip('/').rpartition('/')[2] or 'target'}"


def _is_file(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml"))


def _find(recipe: str) -> Any:
    if not _is_file(recipe):
        if recipe not in recipes():
            refuse_unknown("specdec train --recipe", [recipe], recipes())
        return _shipped(recipe)
    path = Path(recipe).expanduser()
    if not path.is_file():
        raise ConfigError(f"--recipe {recipe}: there is no such file; shipped recipes: {', '.join(recipes())}")
    return path


def _shipped(name: str) -> Any:
    return resources.files("specdec") / "configs" / _FOLDER / f"{name}.yaml"


def _load(path: Any, method: str) -> DictConfig:
    try:
        found: Any = OmegaConf.create(path.read_text(encoding="utf-8"))
    except Exception as error:  # YAML's and OmegaConf's own kinds
        raise ConfigError(f"{path} cannot be read as YAML: {_first_line(error)}") from error
    if not isinstance(found, DictConfig):
        raise ConfigError(f"{path} holds no settings; allowed: name: value, nested")
    if found.get("method", method) != method:
        raise ConfigError(f"{path} is a recipe for {found.method!r}; run specdec train {found.method}")
    return found


def _pairs(overrides: Sequence[str], given: dict[str, Any]) -> DictConfig:
    for pair in overrides:
        name, equals, _ = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{pair!r} is not key=value, such as loop.num_tokens=200000")
        if name in (*given, "method"):
            raise ConfigError(f"{pair!r} is given a second time; give it once")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except Exception as error:
        raise ConfigError(f"{' '.join(overrides)}: a value is no YAML ({_first_line(error)})") from error


def _names(kind: Any, before: str = "") -> Iterator[str]:
    """Yield the dotted names of a dataclass's settings."""
    for f in fields(kind):
        inner: Any = f.default_factory
        if f.name in _FREE:
            continue
        if is_dataclass(inner):
            yield from _names(inner, f"{before}{f.name}.")
        else:
            yield f"{before}{f.name}"


def _given_names(layer: DictConfig, known: set[str], before: str = "") -> Iterator[str]:
    """Yield the dotted names that a layer gives, as deep as known ones go."""
    for name in layer:
        dotted = f"{before}{name}"
        is_group = any(other.startswith(f"{dotted}.") for other in known)
        value = None if OmegaConf.is_missing(layer, name) else layer[name]
        if is_group and isinstance(value, DictConfig):
            yield from _given_names(value, known, f"{dotted}.")
        else:
            yield dotted


def _make_writable(node: Any) -> None:
    """Frozen dataclasses make read-only nodes; the objects that are built of them at the end are frozen again."""
    OmegaConf.set_readonly(node, False)
    for name in node:
        if not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            _make_writable(node[name])


def _wrong_value(error: OmegaConfBaseException, layer: DictConfig) -> ConfigError:
    name = str(error.full_key or "")
    value = OmegaConf.select(layer, name, default=None) if name else None
    return ConfigError(f"{name}={value!r}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
