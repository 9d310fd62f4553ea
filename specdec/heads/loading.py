"""Loading a head from any layout: read, checked against its target tensor by tensor, ready to draft."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specdec.errors import CheckpointError, IncompatibleDrafterError, SpecdecError
from specdec.heads.checkpoint import Checkpoint, names_head, open_checkpoint
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.layouts import recognise
from specdec.heads.layouts.reading import Reading
from specdec.heads.loaded import LoadedHead, share_with_target
from specdec.heads.medusa import MedusaHeads
from specdec.heads.same_target import is_targets_embedding, is_targets_output
from specdec.heads.target import HeadTarget

__all__ = ["kind_of", "load_head", "names_head"]

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


def kind_of(source: str | os.PathLike[str]) -> str:
    """Return the registered name of the drafter that a head is for: "eagle3", "eagle" or "medusa".

    Args:
        source: a folder, a hub id (which is downloaded), or the name of a shipped head.

    Raises:
        CheckpointError: there is no such head, or its layout is not known or not supported.
    """
    checkpoint = open_checkpoint(source)
    return recognise(checkpoint).kind(checkpoint)


def load_head(source: str | os.PathLike[str], target: HeadTarget) -> LoadedHead:
    """Return a head for a target, in the target's dtype, on its device, in eval mode and without gradients.

    Args:
        source: a folder, a hub id (which is downloaded), or the name of a shipped head.
        target: whose head it has to be.

    Raises:
        CheckpointError: the head cannot be read; every tensor that is missing, unexpected or of the wrong shape is
            named.
        IncompatibleDrafterError: it is another target's.
    """
    checkpoint = open_checkpoint(source)
    layout = recognise(checkpoint)
    try:
        reading = layout.read(checkpoint, target)
        module = _module(checkpoint, reading, target)
    except (CheckpointError, IncompatibleDrafterError) as error:
        raise _located(error, f"{checkpoint.source} ({layout.name})") from error
    reading.vocabulary.target_ids = reading.vocabulary.target_ids.to(target.device)
    share_with_target(module, reading.vocabulary, target)
    return LoadedHead(module, reading.vocabulary, checkpoint.source, layout.name, reading.settings)


def _located(error: SpecdecError, where: str) -> SpecdecError:
    return type(error)(f"{where}: {error}")


def _module(checkpoint: Checkpoint, reading: Reading, target: HeadTarget) -> EagleHead | MedusaHeads:
    """Return the module with the checkpoint's weights, without what it shares with the target."""
    with torch.device("meta"):  # no memory, no random numbers
        is_eagle = isinstance(reading.config, EagleConfig)
        module = EagleHead(reading.config) if isinstance(reading.config, EagleConfig) else MedusaHeads(reading.config)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    expected |= {name: (reading.output_rows, *shape[1:]) for name, shape in expected.items() if name[:8] == "lm_heads"}
    if is_eagle and _EMBEDDING in reading.found:
        expected[_EMBEDDING] = (target.vocab_size, reading.config.hidden_size)
    if is_eagle and _OUTPUT in reading.found:
        expected[_OUTPUT] = (reading.output_rows, reading.config.hidden_size)
    _check_tensors(expected, checkpoint.weights.shapes, reading)
    if isinstance(module, EagleHead):
        _add_own_parts(module, checkpoint, reading, target)
    weights = {name: _weight(name, checkpoint, reading, target) for name in module.state_dict()}
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)


def _check_tensors(
    expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], reading: Reading
) -> None:
    """Raise CheckpointError, naming every tensor, unless the file has those of the module in its shapes."""
    found = reading.found
    problems = list(reading.problems)
    problems += [
        f"{reading.file_name(name)} is missing; expected {shape}"
        for name, shape in expected.items()
        if name not in found
    ]
    problems += [
        f"{found[name]} has shape {shapes[found[name]]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and shapes[found[name]] != shape
    ]
    problems += [
        f"{in_file} {shapes[in_file]} is unexpected" for name, in_file in sorted(found.items()) if name not in expected
    ]
    if problems:
        raise CheckpointError(
            f"tensors that are not what the config says ({len(problems)}):\n  " + "\n  ".join(problems) + "\nThe file "
            "is incomplete, its config.json is another head's, or the head is of a kind that only resembles this layout"
        )


def _add_own_parts(module: EagleHead, checkpoint: Checkpoint, reading: Reading, target: HeadTarget) -> None:
    """Give the module an embedding and output rows of its own where the file has them and they are not the target's."""
    config, found = module.config, reading.found
    same_width = config.hidden_size == target.hidden_size
    rows = {_EMBEDDING: target.vocab_size, _OUTPUT: config.draft_vocab_size}
    for name in (name for name in rows if name not in found and not same_width):
        raise CheckpointError(
            f"{name} is missing; expected {(rows[name], config.hidden_size)}: the head is not as wide as {target.name} "
            f"({target.hidden_size}), so it cannot share the target's"
        )
    copied = _EMBEDDING in found and same_width and is_targets_embedding(checkpoint.weights, found[_EMBEDDING], target)
    shares_rows = _OUTPUT not in found or (reading.borrows_output and _is_targets_output(checkpoint, reading, target))
    with torch.device("meta"):
        if _EMBEDDING in found and (reading.own_embedding or not copied):
            module.embed_tokens = nn.Embedding(rows[_EMBEDDING], config.hidden_size)
            module.shares_embedding = False
        if not shares_rows:
            module.lm_head = nn.Linear(config.hidden_size, rows[_OUTPUT], bias=False)
            module.shares_lm_head = False


def _is_targets_output(checkpoint: Checkpoint, reading: Reading, target: HeadTarget) -> bool:
    ids = reading.vocabulary.target_ids
    if reading.output_rows == target.vocab_size:
        ids = torch.arange(target.vocab_size)
    elif reading.row_ids is not None:  # in the file's order
        ids = ids[reading.row_ids.argsort()]
    return is_targets_output(checkpoint.weights, reading.found[_OUTPUT], ids, target)


def _weight(name: str, checkpoint: Checkpoint, reading: Reading, target: HeadTarget) -> Tensor:
    in_file = reading.found[name]
    tensor = checkpoint.weights.read(in_file)
    if not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"{in_file} is stored as {str(tensor.dtype).removeprefix('torch.')}; quantised heads are not supported, "
            "float16, bfloat16 and float32 are"
        )
    if name.startswith("lm_head") and reading.row_ids is not None:
        tensor = tensor[reading.row_ids]
    # copy: what is mapped from a file must not change with it
    weight = tensor.to(device=target.device, dtype=target.dtype, copy=True)
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"{in_file} has values that are NaN, infinite or too large for {str(target.dtype).removeprefix('torch.')}; "
            "the file is damaged, or the training has diverged"
        )
    return weight
