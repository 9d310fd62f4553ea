"""Kinds of heads that are known by name and not supported, so that they are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from specdec.heads.checkpoint import Checkpoint

Test = Callable[[Checkpoint], bool]


def name_of_unsupported(checkpoint: Checkpoint) -> str | None:
    """Return what a checkpoint holds if it is known and not supported."""
    return next((name for name, test in _KINDS if test(checkpoint)), None)


def _any(*tests: Test) -> Test:
    return lambda checkpoint: any(test(checkpoint) for test in tests)


def _field(*names: str) -> Test:
    return lambda checkpoint: any(name in checkpoint.config for name in names)


def _type(pattern: str) -> Test:
    """Match the words by which a config says what it is of."""
    words = re.compile(pattern, re.IGNORECASE)

    def test(checkpoint: Checkpoint) -> bool:
        said: Iterable[str] = [
            text
            for name in ("architectures", "model_type", "speculators_model_type")
            for text in checkpoint.config.texts(name)
        ]
        return any(words.search(text) for text in said)

    return test


def _tensor(pattern: str) -> Test:
    words = re.compile(pattern)
    return lambda checkpoint: any(words.search(name) for name in checkpoint.names)


def _is_whole_model(checkpoint: Checkpoint) -> bool:
    names = checkpoint.names
    return not any(re.search(r"(^|\.)fc\.|medusa_head|eagle", name) for name in names) and any(
        re.match(r"(model|transformer|gpt_neox)\.(\w+\.)?(layers|h)\.0\.", name) for name in names
    )


def _speculators_eagle(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.text("speculators_model_type", "") == "eagle"


_KINDS: tuple[tuple[str, Test], ...] = (
    ("a DFlash or DSpark block drafter", _any(_type("dflash|dspark|domino"), _field("dflash_config"))),
    ("a P-EAGLE head", _any(_type("p_?eagle"), _tensor(r"(^|\.)mask_hidden$"))),
    (
        "a multi-token prediction (MTP) module",
        _any(_type(r"mtp|nextn"), _tensor(r"(^|\.)(eh_proj|mtp|mtp_layers)\.")),
    ),
    ("Hydra heads", _any(_field("hydra_num_heads"), _tensor(r"(^|\.)hydra_(mlp|lm_head)\."))),
    ("an MLP speculator", _any(_type("mlp_?speculator"), _tensor(r"^(speculator\.)?(emb|proj|head|ln)\.0\.weight$"))),
    ("a ReDrafter", _tensor(r"(^|\.)rnn_[uw]\.")),
    ("a HASS head with norms before fc", _tensor(r"(^|\.)(embedding_layernorm|hidden_states_layernorm)\.")),
    (
        "an EAGLE head over latent attention (DeepSeek, Kimi)",
        _any(_type("eagle3?deepseek|deepseek.*eagle"), _tensor(r"self_attn\.kv_a_proj")),
    ),
    ("an EAGLE-1 head in the layout of speculators", _speculators_eagle),
    ("an EAGLE head with further layers of SGLang's kind", _tensor(r"(^|\.)(additional_layers|midlayers)\.\d")),
    ("a PEFT adapter", _tensor(r"\.lora_[AB]\.")),
    (
        "a whole language model (it can draft: drafter='draft_model', drafter_options={'model': ...})",
        _is_whole_model,
    ),
)
