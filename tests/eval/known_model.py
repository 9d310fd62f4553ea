"""A model whose every answer, loops included, is known by hand, and configs that measure it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from transformers import LlamaForCausalLM

from specdec import LLM
from tests.tiny_chat_model import save_tiny_chat_model

EOS = 0
ROWS = [
    {"question_id": 7, "category": "loop", "prompt": "xxA"},
    {"question_id": 8, "category": "free", "prompt": "yB"},
    {"question_id": 9, "category": "long", "prompt": "z" * 30},
    {"question_id": 10, "category": "free", "prompt": "C"},
]


def save_known_model(folder: Path) -> Path:
    """Write a model whose next token depends on the last one only, and a file of prompts.

    After A it goes round nine tokens, after B through forty, and after C through five tokens to EOS.
    """
    save_tiny_chat_model(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    ids = LLM(str(folder)).tokenizer("ABC").input_ids
    used = {EOS, *ids}
    spare = [t for t in range(2, size) if t not in used]
    rings = [[ids[0], *spare[:8]], [ids[1], *spare[8:47]], [ids[2], *spare[47:52], EOS]]
    after = list(range(size))
    for ring in rings:
        for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
            after[here] = there
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.lm_head.weight[torch.tensor(after)] = 8 * rows
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return folder


def overrides_for(folder: Path) -> list[str]:
    """Return the overrides that measure the model in a folder on its prompts."""
    target = ["target=path", f"target.name={folder}", "target.dtype=float64", "max_new_tokens=30", "step_times=false"]
    prompts = ["prompts=jsonl", f"prompts.path={folder}/prompts.jsonl", "prompts.chat=false"]
    return [*target, *prompts, "prompts.max_prompt_tokens=20", "prompts.max_words=null", "prompts.limit=null"]


def config_for(main: str, folder: Path, *overrides: str) -> Any:
    """Return a main's config over the model in a folder; its drafter is `scripted` unless another is named."""
    drafter = ["drafter=scripted", "drafter.options.accept_counts=[2,0,1]"]
    if any(o.startswith("drafter=") for o in overrides):
        drafter = []
    with initialize_config_module("specdec.configs", version_base="1.3"):
        return compose(main, [*overrides_for(folder), *drafter, *overrides])
