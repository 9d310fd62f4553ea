"""Which tensors of a checkpoint are the decoder's, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdec.planner.architecture import Architecture
from specdec.planner.stored import Tensor
from specdec.planner.weights import part_of

_OTHER_PARTS = re.compile(
    r"(^|\.)(\w*vision\w*|visual|\w*audio\w*|\w*speech\w*|image_\w+|\w*projector\w*|\w*connector|aligner|patch_merger)\."
)
_MORE_TOKENS = re.compile(r"(^|\.)(mtp\w*|nextn\w*)\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")


def of_decoder(tensors: Iterable[Tensor], model: Architecture) -> list[Tensor]:
    """Return the tensors of the decoder.

    Left out: towers for images and sound with their projections, layers that predict tokens further on (a checkpoint
    counts them after the decoder's own), and an output matrix that the config says is the embedding.
    """
    found = [tensor for tensor in tensors if not _elsewhere(tensor.name, model.num_layers)]
    nested = any("language_model" in tensor.name.split(".") for tensor in found)
    if nested:  # what stands beside the language model is not it, but for an output matrix of its own
        found = [t for t in found if "language_model" in t.name.split(".") or part_of(t.name) == "head"]
    if model.tied and any(part_of(tensor.name) == "embedding" for tensor in found):
        found = [tensor for tensor in found if part_of(tensor.name) != "head"]
    return found


def _elsewhere(name: str, num_layers: int) -> bool:
    layer = _LAYER.search(name)
    beyond = layer is not None and int(layer.group(1)) >= num_layers
    return beyond or bool(_OTHER_PARTS.search(name) or _MORE_TOKENS.search(name))
