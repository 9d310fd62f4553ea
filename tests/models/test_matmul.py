"""Matrix products by the number of rows: the right product whichever kernel runs, and the choice between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec
from specdec.models import build as build_module
from specdec.models import matmul
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.hosted import HostedProgram
from specdec.models.lean import LeanProgram
from specdec.models.matmul import (
    ROW_BUCKETS,
    FusedLinear,
    KernelFactory,
    KernelTable,
    KernelTables,
    can_prepack,
    measure_table,
    prepack,
    prepacked_linear,
)
from tests.decoding import one, prompts, reference
from tests.models.architectures import build, named

ALWAYS = [True] * (ROW_BUCKETS[-1] + 1)
# float32: sums in another order. bfloat16: both round the same float32 sum, at most one step of 2^-8 apart.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def linears(*widths: int, inner: int = 24, bias: bool = False, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inner, width, bias=bias, dtype=dtype).requires_grad_(False) for width in widths]


def need_prepacking(dtype: torch.dtype = torch.float32) -> None:
    if not can_prepack(torch.zeros(8, 8, dtype=dtype)):
        pytest.skip(f"oneDNN takes no {dtype} weights on this machine")


def table(wanted: Callable[[int], bool]) -> KernelTable:
    """Return a table in which prepacking is twice as fast for the wanted buckets, and half as fast elsewhere."""
    return KernelTable(tuple(1.0 for _ in ROW_BUCKETS), tuple(0.5 if wanted(rows) else 2.0 for rows in ROW_BUCKETS))


class FixedTables(KernelTables):
    """The same table for every shape; notes what was asked for."""

    def __init__(self, fixed: KernelTable) -> None:
        self.fixed = fixed
        self.asked: list[tuple[tuple[int, int], torch.dtype]] = []

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
        self.asked.append((shape, dtype))
        return self.fixed


@pytest.fixture
def packed_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the rows of every product the prepacked kernel ran."""
    seen: list[int] = []

    def counting(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return prepacked_linear(x, packed, bias)

    monkeypatch.setattr(matmul, "prepacked_linear", counting)
    return seen


class TestTheProduct:
    """The prepacked product is F.linear's."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("widths", [(40,), (16, 8, 8)], ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (5,), (17,), (130,), (1, 1), (2, 3), (0, 4)], ids=str)
    def test_equals_linear(
        self, shape: tuple[int, ...], widths: tuple[int, ...], bias: bool, dtype: torch.dtype, packed_rows: list[int]
    ) -> None:
        need_prepacking(dtype)
        layers = linears(*widths, bias=bias, dtype=dtype)
        fused = FusedLinear(layers, ALWAYS)
        x = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        want = torch.cat([layer(x) for layer in layers], dim=-1)
        got = fused(x)
        assert (got.shape, got.dtype) == ((*shape, sum(widths)), dtype)
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert packed_rows == [want.numel() // sum(widths)]
        # Without a copy: F.linear itself, to the last bit.
        assert torch.equal(FusedLinear(layers, None)(x), want)

    @pytest.mark.parametrize(("width", "out"), [(576, 960), (1536, 576), (2048, 64)])
    def test_rows_alike_have_the_same_bits_in_any_company(self, width: int, out: int) -> None:
        need_prepacking()
        generator = torch.Generator().manual_seed(width)
        linear = nn.Linear(width, out, bias=False)
        layer = FusedLinear([linear], [False, True, False, True])  # another kernel by rows, were it asked by rows
        x = torch.randn(64, width, generator=generator)
        with torch.inference_mode():
            whole = layer.alike(x)
            torch.testing.assert_close(whole, linear(x), rtol=1e-4, atol=1e-4)
            for rows in (1, 2, 3, 5, 8, 33):
                assert torch.equal(layer.alike(x[:rows]), whole[:rows]), rows

    def test_inputs_that_are_not_contiguous(self) -> None:
        need_prepacking()
        layers = linears(40)
        wide = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
        for x in (wide[:24].T, wide.T[:, 12:36], wide.T[::2, :24], torch.randn(1, 24).expand(3, 24)):
            torch.testing.assert_close(FusedLinear(layers, ALWAYS)(x), layers[0](x), rtol=1e-5, atol=1e-5)

    def test_the_weights_stay_the_callers(self) -> None:
        """No copy without prepacking, none registered with it, and none changed."""
        layers = linears(16, 8, bias=True)
        before = [layer.weight.clone() for layer in layers]
        plain = FusedLinear(layers, None)
        assert plain.extra_bytes == 0
        layers[0].weight.mul_(2)
        assert torch.equal(plain(torch.ones(24))[:16], layers[0](torch.ones(24)))
        layers[0].weight.div_(2)
        if can_prepack(layers[0].weight):
            fused = FusedLinear(layers, ALWAYS)
            assert fused.extra_bytes == 24 * 24 * 4
            assert list(fused.parameters()) == list(fused.buffers()) == []
            fused(torch.ones(3, 24))
        assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))

    def test_a_single_layers_copy(self) -> None:
        need_prepacking()
        weight = linears(40)[0].weight
        packed = prepack(weight.T.contiguous().T)  # any strides
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(prepacked_linear(x, packed, None), F.linear(x, weight), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
    def test_dtypes_it_does_not_take(self, dtype: torch.dtype) -> None:
        assert not can_prepack(torch.zeros(8, 8, dtype=dtype))
        layers = linears(40, dtype=dtype)
        factory = KernelFactory(FixedTables(table(lambda rows: True)), 1 << 30)
        x = torch.ones(3, 24, dtype=dtype)
        assert torch.equal(factory(layers)(x), layers[0](x))
        assert factory.extra_bytes == 0


class TestByRows:
    """From measured times to a choice for each number of rows."""

    def test_a_bucket_stands_for_the_rows_up_to_it(self) -> None:
        choice = table(lambda rows: rows in (2, 8, 10, 64)).by_rows()
        assert len(choice) == ROW_BUCKETS[-1] + 1
        assert [rows for rows, packed in enumerate(choice) if packed] == [2, 7, 8, 9, 10, *range(33, 65)]

    def test_no_rows_count_as_one(self) -> None:
        assert table(lambda rows: rows == 1).by_rows()[:3] == [True, True, False]
        assert table(lambda rows: rows != 1).by_rows()[:3] == [False, False, True]

    def test_three_percent_is_noise(self) -> None:
        same = tuple(1.0 for _ in ROW_BUCKETS)
        assert not any(KernelTable(same, same).by_rows())
        assert not any(KernelTable(same, tuple(0.971 for _ in same)).by_rows())
        assert all(KernelTable(same, tuple(0.969 for _ in same)).by_rows())

    @pytest.mark.parametrize(("rows", "wanted"), [(1, True), (16, True), (24, True), (32, False), (128, False)])
    def test_a_copy_is_wanted_for_verification_not_for_prefill(self, rows: int, wanted: bool) -> None:
        # 24 stands for 17 to 24 rows, none of them a usual verification.
        assert table(lambda r: r == rows).wants_prepacking == (wanted and rows <= 16)

    @pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 9, 127, 128, 129, 500])
    @pytest.mark.parametrize("last", [True, False])
    def test_the_kernel_that_runs(self, rows: int, last: bool, packed_rows: list[int]) -> None:
        """On both sides of bucket edges; past the last bucket its choice goes on."""
        need_prepacking()
        layers = linears(40)
        fused = FusedLinear(layers, table(lambda r: r in (2, 8) or (last and r == 128)).by_rows())
        x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fused(x), layers[0](x), rtol=1e-5, atol=1e-5)
        assert packed_rows == ([rows] if rows in (2, 7, 8) or (last and rows > 64) else [])

    def test_rows_are_counted_over_all_leading_dimensions(self, packed_rows: list[int]) -> None:
        need_prepacking()
        fused = FusedLinear(linears(40), table(lambda r: r == 6).by_rows())
        for shape in ((2, 3, 24), (6, 24), (1, 6, 24), (3, 24), (2, 4, 24), (24,)):
            fused(torch.ones(shape))
        assert packed_rows == [6, 6, 6]


class TestTheFactory:
    """The bound on the extra memory, and what is not fused."""

    def test_the_limit(self) -> None:
        need_prepacking()
        each = 24 * 40 * 4
        tables = FixedTables(table(lambda rows: True))
        factory = KernelFactory(tables, 2 * each + 100)
        made = [factory(linears(40)) for _ in range(3)]
        assert [layer.extra_bytes for layer in made] == [each, each, 0]
        assert factory.extra_bytes == 2 * each
        assert len(tables.asked) == 2  # nothing is timed that would not fit
        small = factory(linears(1))
        assert small.extra_bytes == 24 * 4
        assert factory.extra_bytes == 2 * each + 96
        x = torch.ones(3, 24)
        assert all(torch.allclose(layer(x), made[0](x), atol=1e-5) for layer in made)

    @pytest.mark.parametrize(("limit", "extra"), [(0, 0), (24 * 40 * 4 - 1, 0), (24 * 40 * 4, 24 * 40 * 4)])
    def test_the_limit_is_exact(self, limit: int, extra: int) -> None:
        need_prepacking()
        factory = KernelFactory(FixedTables(table(lambda rows: True)), limit)
        assert factory(linears(24, 16)).extra_bytes == factory.extra_bytes == extra

    def test_the_shape_asked_for_is_the_fused_one(self) -> None:
        need_prepacking()
        tables = FixedTables(table(lambda rows: False))
        layer = KernelFactory(tables, 1 << 30)(linears(16, 8, 8))
        assert tables.asked == [((32, 24), torch.float32)]
        assert layer.extra_bytes == 0  # the default kernel is the faster one

    @pytest.mark.parametrize("missing", [0, 1])
    def test_mixed_biases_are_not_fused(self, missing: int, packed_rows: list[int]) -> None:
        layers = linears(16, 8, bias=True)
        layers[missing].bias = None
        factory = KernelFactory(FixedTables(table(lambda rows: True)), 1 << 30)
        fused = factory(layers)
        assert fused.extra_bytes == factory.extra_bytes == 0
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
        assert torch.equal(fused(x), torch.cat([layer(x) for layer in layers], dim=-1))
        assert packed_rows == []


class TestMeasuring:
    """Tables of this machine, in the user's cache directory."""

    @pytest.fixture(autouse=True)
    def _idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Products this small take nothing but noise."""
        monkeypatch.setattr(matmul, "_DISTURBED", float("inf"))

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(matmul, "ROTATE_BYTES", 2**16)
        return tmp_path / "cache"

    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Collect the shapes that are timed; the times are made up."""
        shapes: list[tuple[int, int]] = []

        def fake(shape: tuple[int, int], dtype: torch.dtype) -> KernelTable:
            shapes.append(shape)
            return table(lambda rows: rows == shape[0])

        monkeypatch.setattr(matmul, "measure_table", fake)
        return shapes

    def file(self, folder: Path) -> Path:
        (found,) = folder.glob("matmul-*.json")
        return found

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_times_are_times(self, dtype: torch.dtype) -> None:
        need_prepacking(dtype)
        with torch.inference_mode():
            result = measure_table((32, 24), dtype)
        assert len(result.default_s) == len(result.prepacked_s) == len(ROW_BUCKETS)
        assert all(0 < t < 1 for t in (*result.default_s, *result.prepacked_s))

    def test_measured_once_per_shape_dtype_and_machine(self, measured: list[tuple[int, int]], folder: Path) -> None:
        first = KernelTables()
        a, b = first.get((2, 8), torch.float32), first.get((4, 8), torch.float32)
        c = first.get((2, 8), torch.bfloat16)
        assert first.get((2, 8), torch.float32) is a
        assert measured == [(2, 8), (4, 8), (2, 8)]
        second = KernelTables()
        assert [second.get((2, 8), torch.float32), second.get((4, 8), torch.float32)] == [a, b]
        assert second.get((2, 8), torch.bfloat16) == c
        assert len(measured) == 3
        stored = json.loads(self.file(folder).read_text())
        assert stored["machine"][1] == torch.__version__
        assert len(stored["tables"]) == 3

    def test_another_number_of_threads_is_another_machine(
        self, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        KernelTables().get((2, 8), torch.float32)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
        KernelTables().get((2, 8), torch.float32)
        assert len(measured) == 2
        assert len(list(folder.glob("matmul-*.json"))) == 2

    @pytest.mark.parametrize(
        "content",
        [
            "",
            '{"machine": ["x"], "tab',
            "[]",
            "null",
            "{}",
            '{"tables": {"(2, 8) torch.float32": 3}}',
            '{"tables": {"(2, 8) torch.float32": [[1.0]]}}',
            b"\xff\xfe\x00",
            '{"tables": []}',
            '{"tables": {"(2, 8) torch.float32": [[1.0], [1.0]]}}',
        ],
        ids=repr,
    )
    def test_a_damaged_file_is_measured_again(
        self, content: str | bytes, measured: list[tuple[int, int]], folder: Path
    ) -> None:
        want = KernelTables().get((2, 8), torch.float32)
        path = self.file(folder)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert KernelTables().get((2, 8), torch.float32) == want
        assert len(measured) == 2
        # And written anew.
        assert KernelTables().get((2, 8), torch.float32) == want
        assert len(measured) == 2

    def test_processes_that_time_at_once_keep_each_others_tables(
        self, measured: list[tuple[int, int]], folder: Path
    ) -> None:
        first, second = KernelTables(), KernelTables()  # both have read the file before either writes it
        first.get((2, 8), torch.float32)
        second.get((2, 8), torch.bfloat16)
        first.get((4, 8), torch.float32)
        second.get((6, 8), torch.float32)
        second.get((4, 8), torch.float32)
        assert measured == [(2, 8), (2, 8), (4, 8), (6, 8)], "what the other has timed meanwhile is not timed again"
        assert len(json.loads(self.file(folder).read_text())["tables"]) == 4

    def test_a_full_disk_costs_no_second_timing(
        self, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        def full(*args: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(matmul, "atomic_write_json", full)
        KernelTables().get((2, 8), torch.float32)
        assert measured == [(2, 8)]
        assert "could not be kept: No space" in caplog.text

    def test_a_folder_that_cannot_be_written(
        self, measured: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
        tables = KernelTables()
        want = tables.get((2, 8), torch.float32)
        assert tables.get((2, 8), torch.float32) is want  # kept for this run
        assert measured == [(2, 8)]
        assert any("could not be kept" in r.message for r in caplog.records if r.levelname == "WARNING")
        assert KernelTables().get((2, 8), torch.float32) == want
        assert len(measured) == 2


PROMPTS = prompts(3, 7, 12)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("wanted", [(5,), (1,), (2, 3, 8, 128)], ids=str)
def test_greedy_ids_with_a_kernel_for_some_row_counts(
    wanted: Sequence[int], lean: bool, packed_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_prepacking()
    monkeypatch.setattr(build_module, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(KernelTables, "get", lambda *args: table(lambda rows: rows in wanted))
    model = build(named("llama"), torch.float32)
    runner = runner_for(model, RunnerConfig(lean=lean))
    assert type(runner.program) is (LeanProgram if lean else HostedProgram)
    # Every Linear of the model has its copy; the embedding has none.
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert runner.extra_weight_bytes == sum(m.weight.numel() * 4 for m in layers)
    packed_rows.clear()
    for prompt in PROMPTS:
        got = specdec.generate(
            model, one(prompt), max_new_tokens=24, do_sample=False, drafter="oracle", max_draft_tokens=4, lean=lean
        )
        assert got[0, len(prompt) :].tolist() == reference(model, prompt, 24)
    choice = table(lambda rows: rows in wanted).by_rows()
    assert packed_rows
    assert all(choice[rows] for rows in packed_rows)
    assert runner_for(model, RunnerConfig(lean=lean)) is runner


def test_greedy_ids_where_only_some_layers_fit(packed_rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    need_prepacking()
    monkeypatch.setattr(build_module, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(KernelTables, "get", lambda *args: table(lambda rows: True))
    model = build(named("llama"), torch.float32)
    options = {"prepack_limit_bytes": 20000}
    assert 0 < runner_for(model, RunnerConfig(**options)).extra_weight_bytes <= 20000
    got = specdec.generate(model, one(PROMPTS[1]), max_new_tokens=24, do_sample=False, drafter="oracle", **options)
    assert got[0, 7:].tolist() == reference(model, PROMPTS[1], 24)
    assert packed_rows


class TestABusyMachine:
    """Timings that other work disturbed are used once and never kept."""

    SOUND = KernelTable(tuple(1.0 + 0.1 * i for i in range(len(ROW_BUCKETS))), (1.0,) * len(ROW_BUCKETS))
    DISTURBED = KernelTable(SOUND.default_s, (40.0, *SOUND.prepacked_s[1:]))

    def test_it_is_seen(self) -> None:
        assert not self.SOUND.is_disturbed
        assert self.DISTURBED.is_disturbed
        assert KernelTable((9.0, *self.SOUND.default_s[1:]), self.SOUND.prepacked_s).is_disturbed
        assert not KernelTable(self.SOUND.default_s, tuple(reversed(self.SOUND.default_s))).is_disturbed

    @pytest.mark.parametrize("answers", ["disturbed", "disturbed, then sound", "sound"])
    def test_what_is_kept(
        self, answers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
        tables = {
            "disturbed": [self.DISTURBED] * 2,
            "disturbed, then sound": [self.DISTURBED, self.SOUND],
            "sound": [self.SOUND],
        }[answers]
        monkeypatch.setattr(matmul, "measure_table", lambda shape, dtype: tables.pop(0))
        table = KernelTables().get((8, 8), torch.float32)
        assert tables == []
        assert table.is_disturbed == ("disturbed the timing" in caplog.text) == (answers == "disturbed")
        monkeypatch.setattr(matmul, "measure_table", lambda shape, dtype: self.SOUND)
        assert KernelTables()._read() == ({} if answers == "disturbed" else {"(8, 8) torch.float32": self.SOUND})
