"""Hydra configuration files; YAML holds differences from the dataclass defaults only.

Hydra imports this package to find them, which also registers their schemas.
"""

if __name__ != "specdec.configs":
    raise ImportError("import specdec.configs, not configs")

from specdec.configs import schema as schema
