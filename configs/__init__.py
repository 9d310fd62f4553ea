"""Hydra configuration files; YAML holds differences from the dataclass defaults only."""

if __name__ != "specdec.configs":
    raise ImportError("import specdec.configs, not configs")
