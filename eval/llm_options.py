"""From a measurement's config groups to the keyword arguments of `LLM` and `Engine`."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def llm_options(config: Any) -> dict[str, Any]:
    """Return what the groups engine, drafter and, where there is one, verifier say, and the target's dtype."""
    found: dict[str, Any] = OmegaConf.to_container(config.engine, resolve=True) or {}
    found["dtype"] = config.target.dtype
    for group in ("drafter", "verifier"):
        if group in config:
            found[group] = config[group].name
            found[f"{group}_options"] = OmegaConf.to_container(config[group].options, resolve=True)
    return found
