"""flash-attn behind `KVCache.attend`: prefill and chains in half precision on CUDA. Everything else stays on SDPA.

One call of `flash_attn_varlen_func` reads the pages of all requests where they lie, under the causal mask that is
aligned to the last row of each: row i of m rows over n keys sees keys 0 .. n - m + i. It takes no tree.

Source: Dao 2023, FlashAttention-2, arXiv 2307.08691; the package flash-attn 2.8, `flash_attn/flash_attn_interface.py`
(arguments, alignment, window) and `csrc/flash_attn/flash_api.cpp` (limits).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.kv.plan import MaskPattern, PlannedSegment, StepPlan
from specdec.kv.storage import is_out_of_memory

PAGE_TOKENS = 256  # the kernel's pages are a multiple of it
_LARGEST_WIDTH = 256
_WIDTH_STEP = 8  # other widths are padded by a copy of the whole cache
_ARGUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal", "window_size", "softcap", "block_table"}


@dataclass(frozen=True, slots=True)
class _Packed:
    """What the kernel is told of a plan: B segments, T rows."""

    first_rows: Tensor  # [B + 1] int32, cumulative
    first_keys: Tensor  # [B + 1] int32, cumulative
    block_table: Tensor  # [B, most blocks] int32; what lies behind a request's last block is not read
    most_rows: int
    most_keys: int


class FlashBackend:
    """The function of the installed flash-attn, and which calls may go to it.

    Attributes:
        num_calls: of the kernel, one per layer and forward.
    """

    device_type: ClassVar[str] = "cuda"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)

    def __init__(self, function: Callable[..., Any], version: str = "", page_tokens: int = PAGE_TOKENS) -> None:
        """`function`: flash_attn_varlen_func, or what does the same; `page_tokens`: slots per block of the cache."""
        assert page_tokens % PAGE_TOKENS == 0, f"pages of {page_tokens} slots"
        self._function, self.version, self.page_tokens = function, version, page_tokens
        self.num_calls = 0

    def supports(
        self,
        plan: StepPlan,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        pattern: MaskPattern | None = None,
        sinks: Tensor | None = None,
    ) -> bool:
        """Tell whether the kernel computes this call: chains only, equal widths, no sinks, a window at most.

        Args:
            plan: of the forward.
            q: [T, H, D].
            keys: [slots, h, D], a layer's whole storage.
            values: [slots, h, E].
            pattern: of the layer.
            sinks: of the layer.
        """
        width = q.shape[-1]
        fits = (
            q.device.type == self.device_type
            and keys.device == values.device == q.device
            and q.dtype in self.dtypes
            and keys.dtype == values.dtype == q.dtype
            and values.shape[-1] == width <= _LARGEST_WIDTH
            and width % _WIDTH_STEP == 0
        )
        chains = all(s.visible is None for s in plan.segments)
        return fits and chains and sinks is None and (pattern is None or pattern.window is not None)

    def attend(
        self,
        plan: StepPlan,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float | None = None,
        pattern: MaskPattern | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return [T, H, E] for a call that is supported, the rows' own keys and values written already.

        Args:
            plan: of the forward.
            q: [T, H, D].
            keys: [slots, h, D], as for `supports`.
            values: [slots, h, E].
            scaling: factor on the scores; None = 1 / sqrt(D).
            pattern: of the layer.
            softcap: see `attend_segment`.
        """
        packed = _packed(plan, q.device, self.page_tokens)
        window = None if pattern is None else pattern.window
        self.num_calls += 1
        out: Tensor = self._function(
            q,
            _pages(keys, self.page_tokens),
            _pages(values, self.page_tokens),
            cu_seqlens_q=packed.first_rows,
            cu_seqlens_k=packed.first_keys,
            max_seqlen_q=packed.most_rows,
            max_seqlen_k=packed.most_keys,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),  # the token itself is one of the window
            softcap=softcap or 0.0,
            block_table=packed.block_table,
        )
        return out


def _pages(stored: Tensor, page_tokens: int) -> Tensor:
    """[slots, h, W] -> [pages, page_tokens, h, W], a view."""
    pages = stored.shape[0] // page_tokens
    return stored[: pages * page_tokens].view(pages, page_tokens, *stored.shape[1:])


def _packed(plan: StepPlan, device: torch.device, page_tokens: int) -> _Packed:
    """Return what `_pack` makes of a plan, once for all its layers on a device."""
    key = ("flash", device)
    if key not in plan.derived:
        plan.derived[key] = _pack(plan, device, page_tokens)
    found: _Packed = plan.derived[key]
    return found


def _pack(plan: StepPlan, device: torch.device, page_tokens: int) -> _Packed:
    rows = [s.num_rows for s in plan.segments]
    lengths = [s.kv_len for s in plan.segments]
    tables = [list(s.block_table[: -(-s.kv_len // page_tokens)]) for s in plan.segments]
    most = max(map(len, tables))

    def told(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(device)

    return _Packed(
        told([0, *accumulate(rows)]),
        told([0, *accumulate(lengths)]),
        told([[*table, *[0] * (most - len(table))] for table in tables]),
        max(rows),
        max(lengths),
    )


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Which attention runs, and why: `str` gives both in one line."""

    backend: FlashBackend | None
    why: str
    failed: bool = False  # flash-attn is installed for this device and does not run on it

    def __str__(self) -> str:
        name = "SDPA" if self.backend is None else f"flash-attn {self.backend.version}".rstrip()
        return f"{name} ({self.why})"


def choose_attention(
    device: torch.device, dtype: torch.dtype, wanted: str = "auto", block_tokens: int | None = None
) -> AttentionChoice:
    """Return what attends for a model on `device` that computes in `dtype`; flash-attn has been tried there.

    Args:
        device: of the model.
        dtype: of its keys and values as they are stored.
        wanted: "sdpa" leaves flash-attn out.
        block_tokens: slots per block, where they are given; None = PAGE_TOKENS if flash-attn runs.
    """
    if wanted == "sdpa":
        return AttentionChoice(None, "as asked for")
    page_tokens = block_tokens or PAGE_TOKENS
    obstacle = _obstacle(device, dtype, page_tokens)
    if obstacle is not None:
        return AttentionChoice(None, obstacle)
    loaded = _load(page_tokens)
    if isinstance(loaded, str):
        return AttentionChoice(None, loaded)
    failure = _failure(loaded, device, dtype)
    if failure is not None:
        return AttentionChoice(None, f"flash-attn {loaded.version} fails on this device: {failure}", failed=True)
    return AttentionChoice(loaded, "prefill and chains; trees, sinks and chunks on SDPA")


def _obstacle(device: torch.device, dtype: torch.dtype, page_tokens: int) -> str | None:
    """Return why flash-attn cannot serve this device, dtype and size of blocks, or None."""
    if device.type != FlashBackend.device_type:
        return f"flash-attn needs a CUDA device, this is {device.type}"
    if dtype not in FlashBackend.dtypes:
        return f"flash-attn needs float16 or bfloat16, this is {str(dtype).removeprefix('torch.')}"
    if page_tokens % PAGE_TOKENS:
        return f"flash-attn needs blocks of a multiple of {PAGE_TOKENS} tokens, these have {page_tokens}"
    if torch.version.hip is not None:
        return "flash-attn for ROCm has other limits and was never tried"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash-attn needs compute capability 8.0 (Ampere), this GPU has {major}.{minor}"
    return None


def _load(page_tokens: int) -> FlashBackend | str:
    """Return a backend over the installed flash-attn, or why there is none."""
    try:
        package = importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "flash-attn is not installed"
        return f"flash-attn cannot be imported: {error}"
    except Exception as error:  # a build for another torch fails with whatever its loader says
        return f"flash-attn cannot be imported: {' '.join(str(error).split())[:200]}"
    version = str(getattr(package, "__version__", "?"))
    function = getattr(package, "flash_attn_varlen_func", None)
    if function is None or not _ARGUMENTS.issubset(inspect.signature(function).parameters):
        return f"flash-attn {version} has no paged flash_attn_varlen_func; install 2.8"
    return FlashBackend(function, version, page_tokens)


def _failure(backend: FlashBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run one row over one page; return what the kernel said if it fails, as a build for another GPU does."""
    try:
        row = torch.ones(1, 1, 64, device=device, dtype=dtype)
        page = row.repeat(backend.page_tokens, 1, 1)
        pages = [slice(0, 1)]
        segment = PlannedSegment(0, 0, 1, pages, pages, [0], 1, None, None, torch.zeros(1, dtype=torch.int64))
        backend.attend(StepPlan([segment], segment.positions), row, page, page)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return " ".join(str(error).split())[:200]
    return None
