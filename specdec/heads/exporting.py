"""EAGLE-3 heads in the layouts that serving engines read: speculators' and SGLang's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError, ConfigError
from specdec.heads.checkpoint import open_checkpoint
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.loaded import LoadedHead
from specdec.heads.serving_configs import sglang_config, speculators_config
from specdec.heads.target import HeadTarget
from specdec.heads.writing import CARD, CONFIG, WEIGHTS, cast, write_checkpoint

NUM_DRAFT_TOKENS = 3  # of the chain that an engine is launched with
_EXPORTED = "Exported by specdec from "  # on the card, by which an earlier export is known


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """How one kind of engine wants a head."""

    name: str
    title: str
    tensors: Callable[[EagleHead, DraftVocabulary, HeadTarget], dict[str, Tensor]]
    config: Callable[[EagleConfig, HeadTarget, str, torch.dtype, int], dict[str, Any]]
    objections: Callable[[EagleHead, HeadTarget], Iterator[str]]  # what the layout cannot express


def export_head(
    head: LoadedHead,
    target: HeadTarget,
    folder: Path | str,
    *,
    to: str,
    target_name: str | None = None,
    dtype: torch.dtype = torch.float16,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> Path:
    """Write a head as another engine reads it; return the folder.

    Args:
        head: an EAGLE-3 head of any source.
        target: its target, from which shared rows and embeddings are taken.
        folder: missing, empty, or an earlier export, which is replaced.
        to: a name of `LAYOUTS`.
        target_name: what the engine is to load as target; `target.name` where None.
        dtype: of the stored weights.
        num_draft_tokens: advised length of the drafted chain.

    Raises:
        ConfigError: `to` names no layout.
        CheckpointError: the layout cannot hold this head; the folder holds something else, such as the
            head itself, or cannot be written.
    """
    layout = layout_named(to)
    module = _exportable(head, layout, target)
    folder = Path(folder)
    _refuse_foreign(folder, head.source)
    name = target_name or target.name
    tensors = cast(layout.tensors(module, head.vocabulary, target), dtype)
    config = layout.config(module.config, target, name, dtype, num_draft_tokens)
    return write_checkpoint(folder, tensors, config, _card(head, layout, name, num_draft_tokens))


def layout_named(name: str) -> ServingLayout:
    """Return a layout of `LAYOUTS`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"unknown layout {name!r} to export to; allowed: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def refuse_draft_model(source: str) -> None:
    """Refuse, before its target is loaded, what no layout is for.

    Raises:
        CheckpointError: it is a distilled draft model, or cannot be found.
    """
    if open_checkpoint(source).config.text("kind", "") == "draft_model":
        raise CheckpointError(
            f"{source} is a distilled draft model, which borrows its target's embedding and output rows: no other "
            "engine reads that, so it cannot be exported. EAGLE-3 heads can: specdec train eagle3"
        )


def launch_commands(to: str, folder: Path | str, target_name: str, num_draft_tokens: int) -> dict[str, str]:
    """Return engine -> the shell command that serves the target with an exported head."""
    model, draft = shlex.quote(target_name), shlex.quote(str(folder))
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_draft_tokens}
    vllm = f"vllm serve {model} --speculative-config {shlex.quote(json.dumps(speculation))}"
    sglang = (
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {draft} --speculative-num-steps {num_draft_tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {num_draft_tokens + 1}"
    )
    return {"vLLM": vllm} if to == "speculators" else {"SGLang": sglang, "vLLM": vllm}


def _exportable(head: LoadedHead, layout: ServingLayout, target: HeadTarget) -> EagleHead:
    """Return the head's module.

    Raises:
        CheckpointError: the layout cannot hold it.
    """
    module, instead = head.module, ""
    if not isinstance(module, EagleHead):
        problems = ["it has Medusa heads, and the layout is for EAGLE-3"]
    elif module.config.generation != 3:
        problems = ["it is an EAGLE-1 or EAGLE-2 head, and the layout is for EAGLE-3"]
    else:
        problems = list(layout.objections(module, target))
        if not problems:
            return module
        fitting = [other.name for other in LAYOUTS.values() if not any(other.objections(module, target))]
        instead = f". The layout {fitting[0]!r} can hold it" if fitting else ""
    raise CheckpointError(f"{head.source} cannot be exported to {layout.title}: {'; '.join(problems)}{instead}")


def _speculators_tensors(module: EagleHead, vocabulary: DraftVocabulary, target: HeadTarget) -> dict[str, Tensor]:
    tensors = _own_tensors(module) | {"embed_tokens.weight": _rows(module.embed_tokens, target)}
    if not vocabulary.is_whole:  # its classes hold no map then
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    return tensors


def _sglang_tensors(module: EagleHead, vocabulary: DraftVocabulary, target: HeadTarget) -> dict[str, Tensor]:
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in _own_tensors(module).items()}
    if module.config.hidden_size != target.hidden_size:  # else the engine shares the target's
        tensors["embed_tokens.weight"] = _rows(module.embed_tokens, target)
    return tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def _own_tensors(module: EagleHead) -> dict[str, Tensor]:
    """Return everything but the embedding; output rows that are the target's are written out."""
    own = {n: t for n, t in module.state_dict().items() if not n.startswith(("embed_tokens.", "lm_head."))}
    return own | {"lm_head.weight": module.lm_head.weight}


def _rows(embedding: Callable[[Tensor], Tensor], target: HeadTarget) -> Tensor:
    """Return [V, H] what an embedding gives for every token: a scale that it applies to its rows is in them."""
    with torch.no_grad():
        return embedding(torch.arange(target.vocab_size, device=target.device))


def _speculators_objections(module: EagleHead, target: HeadTarget) -> Iterator[str]:
    config = module.config
    if config.fc_bias:
        yield "fc has a bias (fc_bias), and the layout has none"
    if config.hidden_size != target.hidden_size:
        yield f"its hidden size {config.hidden_size} is not the target's {target.hidden_size}"
    if config.attention_bias != config.output_bias:
        yield (
            f"attention_bias={config.attention_bias} and output_bias={config.output_bias}: the layout has one flag "
            "for the biases of q, k, v and o"
        )
    if config.qk_norm and config.mlp_bias:
        yield "it has q/k norms (qk_norm) and biases in its MLP (mlp_bias), and no kind of layer there has both"


_NOT_IN_SGLANG = {
    "fc_bias": "a bias in fc",
    "attention_bias": "biases in q, k and v",
    "output_bias": "a bias in o",
    "mlp_bias": "biases in its MLP",
    "qk_norm": "q/k norms",
    "norm_before_fc": "one norm before fc",
    "norm_before_residual": "its residual begin behind hidden_norm",
}


def _sglang_objections(module: EagleHead, target: HeadTarget) -> Iterator[str]:
    config = module.config
    for flag, what in _NOT_IN_SGLANG.items():
        if getattr(config, flag):
            yield f"it has {what} ({flag}), and SGLang's class has not"
    if config.num_layers != 1:
        yield f"it has num_layers={config.num_layers}, and the layout has one layer"
    if config.hidden_act != "silu":
        yield f"hidden_act={config.hidden_act!r}, and SGLang's class has silu only"
    if config.num_features == config.hidden_size:
        yield f"SGLang puts features through fc if they are wider than {config.hidden_size}, and these are as wide"
    if config.hidden_size == target.hidden_size and not _has_targets_embedding(module, target):
        yield "it has an embedding of its own, and SGLang gives it the target's"


def _has_targets_embedding(module: EagleHead, target: HeadTarget) -> bool:
    return module.shares_embedding or torch.equal(_rows(module.embed_tokens, target), _rows(target.embedding, target))


def _refuse_foreign(folder: Path, source: str) -> None:
    """Raise CheckpointError if a folder holds anything but an earlier export, or is what is to be exported."""
    if not folder.is_dir():
        return
    if folder.resolve() == Path(source).expanduser().resolve():
        raise CheckpointError(f"{folder} is the head that is to be exported; give a new folder")
    held = {path.name for path in folder.iterdir()}
    foreign = sorted(held - {WEIGHTS, CONFIG, CARD})
    if foreign:
        raise CheckpointError(
            f"{folder} holds other files ({', '.join(foreign[:3])}), which an engine would read as part of the head; "
            "give a new folder"
        )
    if held and not _is_export(folder):
        raise CheckpointError(
            f"{folder} holds {', '.join(sorted(held))} that specdec did not export; give a new folder"
        )


def _is_export(folder: Path) -> bool:
    try:
        return _EXPORTED in (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _card(head: LoadedHead, layout: ServingLayout, target_name: str, num_draft_tokens: int) -> str:
    commands = launch_commands(layout.name, "FOLDER", target_name, num_draft_tokens)
    return (
        f"# EAGLE-3 head for {target_name}\n\n"
        f"{_EXPORTED}`{head.source}` to {layout.title}. To serve it, FOLDER being this folder:\n"
        + "".join(f"\n{engine}:\n\n```sh\n{command}\n```\n" for engine, command in commands.items())
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        ServingLayout(
            "speculators", "speculators eagle3", _speculators_tensors, speculators_config, _speculators_objections
        ),
        ServingLayout("sglang", "SGLang EAGLE-3", _sglang_tensors, sglang_config, _sglang_objections),
    )
}
