"""The flash-attn backend: against SDPA on an emulation of its function, what it refuses, and how it is chosen."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.interfaces import Segment
from specdec.kv import flash
from specdec.kv.cache import KVCache
from specdec.kv.flash import PAGE_TOKENS, FlashBackend, choose_attention
from specdec.kv.plan import MaskPattern, StepPlan, sliding_window
from tests.kv.flash_emulation import Emulated, fake_package

NONE = torch.tensor([], dtype=torch.int64)
HEADS, KV_HEADS, WIDTH = 4, 2, 8
REAL_FAILURE = flash._failure
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chunks(size: int) -> MaskPattern:
    return MaskPattern(("chunk", size), lambda query, key: query // size == key // size, size)


class Rows:
    """Queries, keys and values in the order in which they are asked for."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(0), dtype

    def __call__(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((n, HEADS, WIDTH), (n, KV_HEADS, WIDTH), (n, KV_HEADS, WIDTH))
        q, k, v = (torch.randn(*s, generator=self.generator, dtype=torch.float64).to(self.dtype) for s in shapes)
        return q, k, v


def segment(request_id: int, n: int, parents: list[int] | None = None) -> Segment:
    tree = None if parents is None else torch.tensor(parents)
    return Segment(request_id, torch.zeros(n, dtype=torch.int64), tree, NONE)


def filled(lengths: dict[int, int], new: dict[int, int], rows: Rows, backend: FlashBackend | None = None) -> KVCache:
    """Return a cache with so many committed tokens per request, and room for no more than the `new` rows.

    Requests grow in turn, so that their blocks alternate.
    """
    blocks = sum(-(-(n + new.get(r, 0)) // PAGE_TOKENS) for r, n in lengths.items())
    per_token = 2 * KV_HEADS * WIDTH * 8
    cache = KVCache(
        block_tokens=PAGE_TOKENS,
        backend=backend,
        bytes_per_token=per_token,
        max_bytes=blocks * PAGE_TOKENS * per_token,
    )
    for request_id in lengths:
        cache.open(request_id, 1)
    while any(cache.context_len(r) < n for r, n in lengths.items()):
        for request_id, length in lengths.items():
            n = min(100, length - cache.context_len(request_id))
            if n:
                cache.reserve(request_id, n)
                cache.attend(cache.plan([segment(request_id, n)]), 0, *rows(n))
                cache.commit(request_id, torch.arange(n))
    return cache


def both(
    lengths: dict[int, int], new: dict[int, int], trees: dict[int, list[int]] | None = None, **options: Any
) -> tuple[Tensor, Tensor, int]:
    """Return what SDPA and the backend give for `new` rows after committed ones, and the kernel's calls for them."""
    backend, results, calls = Emulated(), [], 0
    for used in (None, backend):
        rows = Rows()
        cache = filled(lengths, new, rows, used)
        before = backend.num_calls
        for request_id, n in new.items():
            cache.reserve(request_id, n)
        plan = cache.plan([segment(r, n, (trees or {}).get(r)) for r, n in new.items()])
        results.append(cache.attend(plan, 0, *rows(sum(new.values())), **options))
        calls = backend.num_calls - before
    return results[0], results[1], calls


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        pytest.param({0: 0}, {0: 300}, id="a whole prompt"),
        pytest.param({0: 300, 1: 5}, {0: 1, 1: 1}, id="plain decoding"),
        pytest.param({0: 255, 1: 600, 2: 256}, {0: 5, 1: 1, 2: 7}, id="ragged chains across blocks"),
        pytest.param({0: 520, 1: 3, 2: 530}, {0: 40, 2: 300, 1: 6}, id="chunks of prompts beside a chain"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"pattern": sliding_window(4), "scaling": 0.3}, id="window and scale"),
        pytest.param({"pattern": sliding_window(270), "softcap": 1.5}, id="a window over blocks and a cap"),
    ],
)
def test_equals_sdpa(lengths: dict[int, int], new: dict[int, int], options: dict[str, Any]) -> None:
    want, got, calls = both(lengths, new, **options)
    assert calls == 1
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_layers_of_one_forward_with_other_windows() -> None:
    results = []
    for backend in (None, Emulated()):
        cache = KVCache(block_tokens=PAGE_TOKENS, backend=backend)
        cache.open(0, 20)
        cache.reserve(0, 20)
        plan, rows = cache.plan([segment(0, 20)]), Rows()
        patterns = (sliding_window(3), None, sliding_window(5), chunks(4))
        results.append([cache.attend(plan, i, *rows(20), pattern=pattern) for i, pattern in enumerate(patterns)])
    torch.testing.assert_close(results[1], results[0])


def test_blocks_of_such_requests_are_scattered() -> None:
    new = {0: 40, 1: 300, 2: 6}
    cache = filled({0: 520, 1: 3, 2: 530}, new, Rows())
    for request_id, n in new.items():
        cache.reserve(request_id, n)
    tables = [s.block_table for s in cache.plan([segment(r, n) for r, n in new.items()]).segments]
    assert any(table[-1] - table[0] != len(table) - 1 for table in tables), tables


def test_shared_blocks() -> None:
    backend = Emulated()
    tokens = list(range(600))
    rows = Rows()
    cache = KVCache(block_tokens=PAGE_TOKENS, prefix_caching=True, backend=backend)
    cache.open(0, 600)
    cache.reserve(0, 600)
    q, k, v = rows(600)
    whole = cache.attend(cache.plan([segment(0, 600)]), 0, q, k, v)
    cache.commit(0, torch.arange(600))
    cache.publish(0, tokens)
    known = cache.open(1, 600, tokens)
    assert known == 512
    cache.reserve(0, 1)
    cache.reserve(1, 600 - known)
    plan = cache.plan([segment(1, 600 - known), segment(0, 1)])
    one = rows(1)
    got = cache.attend(plan, 0, *(torch.cat([a[known:], b]) for a, b in zip((q, k, v), one, strict=True)))
    torch.testing.assert_close(got[:-1], whole[known:])
    assert backend.num_calls == 2


@pytest.mark.parametrize("options", [{"pattern": chunks(8)}, {"sinks": torch.zeros(HEADS, dtype=torch.float64)}])
def test_other_calls_stay_on_sdpa(options: dict[str, Any]) -> None:
    want, got, calls = both({0: 20}, {0: 5}, **options)
    assert calls == 0
    torch.testing.assert_close(got, want)


def test_trees_stay_on_sdpa() -> None:
    want, got, calls = both({0: 20, 1: 30}, {0: 4, 1: 1}, {0: [-1, 0, 0, 1]})
    assert calls == 0
    torch.testing.assert_close(got, want)


def test_quantised_caches_stay_on_sdpa() -> None:
    backend = Emulated()
    cache = KVCache(block_tokens=PAGE_TOKENS, codec="int8", backend=backend)
    cache.open(0, 5)
    cache.reserve(0, 5)
    cache.attend(cache.plan([segment(0, 5)]), 0, *Rows()(5))
    assert backend.num_calls == 0


class TestSupports:
    def plan(self) -> StepPlan:
        cache = KVCache(block_tokens=PAGE_TOKENS)
        cache.open(0, 3)
        cache.reserve(0, 3)
        return cache.plan([segment(0, 3)])

    def asked(self, dtype: torch.dtype, key: int, value: int, *, stored: torch.dtype | None = None) -> bool:
        keys, values = (torch.zeros(PAGE_TOKENS, KV_HEADS, w, dtype=stored or dtype) for w in (key, value))
        return Emulated().supports(self.plan(), torch.zeros(3, HEADS, key, dtype=dtype), keys, values)

    @pytest.mark.parametrize(
        ("dtype", "key", "value", "answer"),
        [
            (torch.bfloat16, 64, 64, True),
            (torch.float16, 256, 256, True),
            (torch.float16, 264, 264, False),
            (torch.float16, 80, 80, True),
            (torch.float16, 12, 12, False),  # would be padded by a copy of the cache
            (torch.float16, 64, 32, False),  # multi-head latent attention
            (torch.float32, 64, 64, False),
            (torch.float8_e4m3fn, 64, 64, False),
        ],
    )
    def test_widths_and_dtypes(self, dtype: torch.dtype, key: int, value: int, answer: bool) -> None:
        assert self.asked(dtype, key, value) is answer

    def test_another_dtype_is_stored(self) -> None:
        assert not self.asked(torch.float16, 64, 64, stored=torch.bfloat16)

    def test_another_device(self) -> None:
        q = torch.zeros(3, HEADS, 64, dtype=torch.float16)
        keys = torch.zeros(PAGE_TOKENS, KV_HEADS, 64, dtype=torch.float16)
        assert not FlashBackend(lambda: None).supports(self.plan(), q, keys, keys)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 4096])
def test_a_window_is_told_from_other_patterns(size: int) -> None:
    assert sliding_window(size).window == size
    assert MaskPattern(0, sliding_window(size).allow).window is None  # nobody said how large
    assert MaskPattern(0, sliding_window(size + 1).allow, size).window is None
    if size > 1:
        assert chunks(size).window is None
        assert MaskPattern(0, sliding_window(size - 1).allow, size).window is None
    assert MaskPattern(0, lambda q, k: (k > q - size) | (k == 0), size).window is None
    few = torch.ones(size, dtype=torch.bool)
    assert MaskPattern(0, lambda q, k: few[q] & few[k], size).window is None  # knows so many positions only


class TestChoice:
    @pytest.fixture(autouse=True)
    def _nothing_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flash, "_failure", lambda *args: None)  # there is no GPU to try a kernel on
        monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it fails as if it were not installed

    @pytest.fixture
    def ampere(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Have torch report a GPU of the last capability in the list."""
        capability = [(8, 0)]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[-1])
        monkeypatch.setattr(torch.version, "hip", None)
        return capability

    def why(self, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, wanted: str = "auto") -> str:
        choice = choose_attention(device, dtype, wanted)
        assert choice.backend is None
        return str(choice)

    def test_installed(self, monkeypatch: pytest.MonkeyPatch, ampere: Any) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_package())
        choice = choose_attention(CUDA, torch.float16)
        assert type(choice.backend) is FlashBackend
        assert choice.backend.page_tokens == PAGE_TOKENS
        assert str(choice) == "flash-attn 2.8.3 (prefill and chains; trees, sinks and chunks on SDPA)"

    def test_absent(self, ampere: Any) -> None:
        assert self.why() == "SDPA (flash-attn is not installed)"

    def test_installed_and_failing(self, monkeypatch: pytest.MonkeyPatch, ampere: Any) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_package())
        monkeypatch.setattr(flash, "_failure", lambda *args: "CUDA error: no kernel image is available")
        assert self.why() == "SDPA (flash-attn 2.8.3 fails on this device: CUDA error: no kernel image is available)"
        assert choose_attention(CUDA, torch.float16).failed

    @pytest.mark.parametrize("page_tokens", [PAGE_TOKENS, 2 * PAGE_TOKENS])
    def test_the_trial(self, monkeypatch: pytest.MonkeyPatch, page_tokens: int) -> None:
        backend = Emulated()
        backend.page_tokens = page_tokens
        assert REAL_FAILURE(backend, CPU, torch.bfloat16) is None
        assert backend.num_calls == 1

        def fails(*args: Any, **options: Any) -> None:
            raise RuntimeError("CUDA error: no kernel image is\navailable")

        monkeypatch.setattr(backend, "_function", fails)
        assert REAL_FAILURE(backend, CPU, torch.bfloat16) == "CUDA error: no kernel image is available"

    def test_no_memory_for_the_trial_says_nothing_about_the_kernel(self) -> None:
        def full(*args: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

        with pytest.raises(torch.OutOfMemoryError):
            REAL_FAILURE(FlashBackend(full), CPU, torch.bfloat16)

    def test_not_wanted(self, monkeypatch: pytest.MonkeyPatch, ampere: Any) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_package())
        assert self.why(wanted="sdpa") == "SDPA (as asked for)"

    def test_this_machine_does_not_fit(self, monkeypatch: pytest.MonkeyPatch, ampere: list[tuple[int, int]]) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_package())
        assert "this is cpu" in self.why(CPU)
        assert "this is float32" in self.why(dtype=torch.float32)
        assert "these have 16" in str(choose_attention(CUDA, torch.float16, block_tokens=16))
        ampere.append((7, 5))
        assert "8.0 (Ampere), this GPU has 7.5" in self.why()
        monkeypatch.setattr(torch.version, "hip", "6.0")
        assert "ROCm" in self.why()

    def test_other_packages_of_that_name(self, monkeypatch: pytest.MonkeyPatch, ampere: Any) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_package(flash_attn_varlen_func=lambda q, k, v: q))
        assert "2.8.3 has no paged flash_attn_varlen_func" in self.why()
        package = fake_package()
        del package.flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        assert "has no paged" in self.why()

    def test_a_build_for_another_torch(self, monkeypatch: pytest.MonkeyPatch, ampere: Any) -> None:
        def broken(name: str) -> Any:
            raise ImportError("flash_attn_2_cuda.so: undefined symbol")

        monkeypatch.setattr(flash.importlib, "import_module", broken)
        assert "cannot be imported: flash_attn_2_cuda.so: undefined symbol" in self.why()
