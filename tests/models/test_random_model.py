"""Random models: the same for the same seed, and nobody else's random numbers change."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError
from specdec.models.random_model import random_model


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (random_model("tiny", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [m.lm_head.weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert not one.training and not any(p.requires_grad for p in one.parameters())


def test_dtype_and_sizes() -> None:
    assert random_model("tiny", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="size='7b'; allowed: 'tiny', '1b', '8b'"):
        random_model("7b")
