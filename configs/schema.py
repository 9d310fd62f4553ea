"""What the config groups may hold: schemas that Hydra checks names and types against, made of the dataclasses.

Every YAML file of a group begins with its schema: `defaults: [/schema/engine@_here_, _self_]`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING as NEEDED
from omegaconf import OmegaConf

from specdec.engine_config import EngineConfig
from specdec.eval.comparison import ComparisonConfig
from specdec.eval.conversations import PromptsConfig
from specdec.eval.load import LoadConfig
from specdec.eval.lossless_config import LosslessConfig
from specdec.eval.quality_config import QualityConfig
from specdec.models.build import RunnerConfig

FOLDER = "schema"  # of Hydra's groups: the schemas are members of it
# Names inside of these are not Hydra's to know: the drafter or verifier, or whoever reads the prompts, checks them.


@dataclass
class TargetSchema:
    """The model, and the type its weights are loaded as."""

    name: str = NEEDED  # a built-in name, a hub id, a directory or a .gguf file
    dtype: str | None = None  # None: as they are stored


@dataclass
class MethodSchema:
    """A drafter or a verifier, and the keyword arguments it is built with."""

    name: str = NEEDED
    options: dict[str, Any] = field(default_factory=dict)  # by name, as its own code has them


def schema_of(name: str, *configs: type) -> Any:
    """Return one dataclass that OmegaConf can write to, with the fields, types and defaults of frozen ones.

    Args:
        name: of the new class.
        configs: dataclasses whose fields all have defaults, and no two the same name.
    """
    made: list[tuple[str, Any, Any]] = []
    for config in configs:
        kinds = get_type_hints(config)
        for f in fields(config):
            default = field(default_factory=f.default_factory) if f.default_factory is not MISSING else f.default
            made.append((f.name, kinds[f.name], default))
    # Without the module it cannot be pickled; SOURCES check the ranges, before anything runs.
    return make_dataclass(name, made, namespace={"__module__": __name__, "SOURCES": configs})


EngineSchema = schema_of("EngineSchema", EngineConfig, RunnerConfig)
LoadSchema = schema_of("LoadSchema", LoadConfig)
PromptsSchema = schema_of("PromptsSchema", PromptsConfig)
SCHEMAS: dict[str, Any] = {
    "target": TargetSchema,
    "drafter": MethodSchema,
    "verifier": MethodSchema,
    "engine": EngineSchema,
    "load": LoadSchema,
    "prompts": PromptsSchema,
}
ComparisonSchema = schema_of("ComparisonSchema", ComparisonConfig)
LosslessSchema = schema_of("LosslessSchema", LosslessConfig)
QualitySchema = schema_of("QualitySchema", QualityConfig)
# Of what stands at the top of a measurement's own file; groups and what other files add come beside it.
MAINS: dict[str, Any] = {"comparison": ComparisonSchema, "lossless": LosslessSchema, "quality": QualitySchema}


def register() -> None:
    """Put the schemas where Hydra looks for them.

    Hydra closes whatever does not say otherwise. Names within a dict, such as a drafter's options, are the user's to
    choose and are checked by who reads them.
    """
    store = ConfigStore.instance()
    for name, schema in {**SCHEMAS, **MAINS}.items():
        node = OmegaConf.structured(schema)
        for key in node:
            if not OmegaConf.is_missing(node, key) and OmegaConf.get_type(node, key) is dict:
                OmegaConf.set_struct(node[key], False)
        if name in MAINS:
            OmegaConf.set_struct(node, False)  # while files are put together; Hydra closes the whole
        store.store(group=FOLDER, name=name, node=node)


register()
