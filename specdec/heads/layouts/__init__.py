"""The file layouts that heads come in, one file per family, and which of them a checkpoint has."""

from __future__ import annotations

from specdec.errors import CheckpointError
from specdec.heads.checkpoint import Checkpoint
from specdec.heads.layouts.eagle1 import EAGLE1_LAYOUTS
from specdec.heads.layouts.eagle3 import EAGLE3_LAYOUTS
from specdec.heads.layouts.eagle3_speculators import SPECULATORS
from specdec.heads.layouts.medusa_official import MEDUSA_LAYOUTS
from specdec.heads.layouts.medusa_vllm import MEDUSA_VLLM
from specdec.heads.layouts.own import OWN
from specdec.heads.layouts.reading import Layout
from specdec.heads.layouts.unsupported import name_of_unsupported

# The first that recognises a checkpoint reads it.
LAYOUTS: tuple[Layout, ...] = (OWN, SPECULATORS, MEDUSA_VLLM, *MEDUSA_LAYOUTS, *EAGLE3_LAYOUTS, *EAGLE1_LAYOUTS)


def recognise(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint, from its config and the names of its tensors.

    Raises:
        CheckpointError: it is of a kind that is not supported, which is named, or of none that is known.
    """
    loadable = "what loads: " + "; ".join(f"{layout.title} ({layout.name})" for layout in LAYOUTS)
    unsupported = None if OWN.recognises(checkpoint) else name_of_unsupported(checkpoint)
    if unsupported is not None:
        raise CheckpointError(f"{checkpoint.source} holds {unsupported}, which is not supported; {loadable}")
    for layout in LAYOUTS:
        if layout.recognises(checkpoint):
            return layout
    names = sorted(checkpoint.names)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise CheckpointError(
        f"{checkpoint.source} has no layout of a head that is known: {shown or 'no tensors'}; {loadable}"
    )
