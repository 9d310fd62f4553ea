"""Calls of transformers' from_pretrained: one at a time, without progress bars, never with random weights."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import ModelLoadError
from specdec.models.progress import reporting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("specdec")

T = TypeVar("T")

# from_pretrained changes torch's default dtype while it runs, and the progress bars are process-wide settings.
_LOCK = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' loading bars inside the block; downloads keep theirs. The user's settings come back.

    The one bar that is long, over the tensors of a GGUF file, becomes reports of our own.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging as transformers_logging

    def no_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    def gguf_reports(iterable: Iterable[T], **_: Any) -> Iterable[T]:
        return reporting("unpacking the weights of the GGUF file", list(iterable))

    with _LOCK:
        hook = transformers_logging.set_tqdm_hook(no_bar)
        gguf_bar = getattr(gguf_utils, "tqdm", None)  # its one bar ignores transformers' own switch
        gguf_utils.tqdm = gguf_reports
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(hook)
            gguf_utils.tqdm = gguf_bar


def load_causal_lm(source: str, **options: Any) -> PreTrainedModel:
    """Load a causal LM in evaluation mode with gradients off.

    Raises:
        ModelLoadError: weights are missing in the checkpoint.
        Exception: whatever transformers raises.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{source} lacks {len(missing)} weights of {type(model).__name__} ({shown}); they would be random. "
            "Load a complete causal-LM checkpoint"
        )
    model.eval()
    model.requires_grad_(False)
    loaded: PreTrainedModel = model
    return loaded


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Raises:
        Exception: whatever transformers raises.
    """
    from transformers import AutoTokenizer

    with quiet():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer
