"""Quantised keys and values: bounds, bits that do not change, and decoding over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LLM
from specdec.errors import ConfigError
from specdec.interfaces import Segment
from specdec.kv.cache import KVCache
from specdec.kv.codecs import LARGEST, QuantisedKV, channel_factors
from specdec.models.build import RunnerConfig, runner_for
from specdec.models.kv_smoothing import kv_codec
from tests.decoding import add, assert_fresh_kv, drain, engine_of, private_runner, prompts
from tests.models.architectures import build, model_of, named

NONE = torch.tensor([], dtype=torch.int64)
each = pytest.mark.parametrize("name", sorted(LARGEST))


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_outliers(n: int, heads: int, width: int) -> Tensor:
    """Return keys with two channels that are always large, as rotary models have them."""
    keys = rows(n, heads, width)
    keys[..., 1] = 40 + keys[..., 1]
    keys[..., width - 2] = -25 + keys[..., width - 2]
    return keys


class TestRoundTrip:
    @each
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("key", "value"), [(8, 8), (7, 5), (1, 6)])
    def test_within_half_a_step(self, name: str, key: int, value: int, dtype: torch.dtype) -> None:
        codec = QuantisedKV(name)
        k, v = rows(20, 3, key, dtype=torch.float64).to(dtype), 1e-6 * rows(20, 3, value, seed=1).to(dtype)
        got = codec.decode(0, codec.encode(0, k, v), dtype)
        # Half a step; the scale is rounded to 8 bits, which may cut the largest number; bfloat16 rounds what is read.
        bound = 0.5 / LARGEST[name] + 2**-8 + (2**-7 if dtype == torch.bfloat16 else 0)
        for x, y in zip((k, v), got, strict=True):
            assert y.shape == x.shape
            assert y.dtype == dtype
            error = (x.double() - y.double()).abs() / x.double().abs().amax(dim=-1, keepdim=True)
            assert float(error.max()) <= bound

    @each
    def test_zeros_and_large_numbers(self, name: str) -> None:
        codec = QuantisedKV(name)
        x = torch.tensor([0.0, 1e30, -1e30, 1e-20]).view(4, 1, 1).expand(-1, 2, 3)
        keys, _ = codec.decode(0, codec.encode(0, x, x), torch.float32)
        assert torch.isfinite(keys).all()
        assert torch.equal(keys[0], torch.zeros(2, 3))
        torch.testing.assert_close(keys[1:], x[1:], rtol=0.01, atol=0)

    @each
    def test_smoothing_saves_the_small_channels(self, name: str) -> None:
        keys = with_outliers(200, 2, 16)
        rough, smooth = QuantisedKV(name), QuantisedKV(name)
        smooth.calibrate(0, keys[:100])
        errors = []
        for codec in (rough, smooth):
            got, _ = codec.decode(0, codec.encode(0, keys, keys), torch.float32)
            errors.append(float((got - keys)[..., 2:14].square().mean().sqrt()))
        assert errors[1] < errors[0] / 4

    @each
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_with_large_and_small_factors(self, name: str, dtype: torch.dtype) -> None:
        """Codes times factors leave float16's range, scales fall below it: neither may be seen in what is read."""
        factors = torch.tensor([[600.0, 3.0, 0.02, 60000.0, 1e-5, 700.0]])
        codec = QuantisedKV(name, {0: factors})
        k = (factors * rows(50, 1, 6).clamp(-1, 1)).to(dtype)
        v = 2e-6 * rows(50, 1, 6, seed=1).to(dtype)
        keys, values = codec.decode(0, codec.encode(0, k, v), dtype)
        assert keys.dtype == values.dtype == dtype
        step = 1.01 / LARGEST[name]  # of the largest smoothed number of a row; half of it, and the dtype's rounding
        bound = (0.5 * step + 2**-8 + 2**-9) * (k.double() / factors).abs().amax(-1, keepdim=True) * factors + 6e-8
        assert ((keys.double() - k.double()).abs() <= bound).all()
        bound = (0.5 * step + 2**-8) * v.double().abs().amax(-1, keepdim=True) + 6e-8
        assert ((values.double() - v.double()).abs() <= bound).all()

    @each
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_what_is_read_is_rounded_once(self, name: str, dtype: torch.dtype) -> None:
        factors = 0.3 + 8 * torch.rand(1, 64, generator=torch.Generator().manual_seed(0))
        codec = QuantisedKV(name, {0: factors})
        k = (factors * rows(100, 1, 64)).to(dtype)
        stored = codec.encode(0, k, k)
        keys, values = codec.decode(0, stored, dtype)
        exact = codec.decode(0, stored, torch.float64)  # the same codes in the widest arithmetic
        assert torch.equal(keys.double(), exact[0].to(dtype).double())
        assert torch.equal(values.double(), exact[1].to(dtype).double())

    @each
    def test_the_largest_float16(self, name: str) -> None:
        codec = QuantisedKV(name)
        x = torch.tensor([65504.0, -65504.0, 1.0], dtype=torch.float16).view(1, 1, 3)
        keys, _ = codec.decode(0, codec.encode(0, x, x), torch.float16)
        torch.testing.assert_close(keys[..., :2], x[..., :2], rtol=0.01, atol=0)

    @each
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_is_nan_and_stays_in_its_row(self, name: str, bad: float, dtype: torch.dtype) -> None:
        codec = QuantisedKV(name)
        x = rows(3, 2, 4).to(dtype)
        want = codec.decode(0, codec.encode(0, x, x), dtype)
        x[1, 0, 2] = bad
        assert codec.encode(0, x, x)[1][1, 0].isnan(), "whatever the machine makes of it as an integer"
        for got, clean in zip(codec.decode(0, codec.encode(0, x, x), dtype), want, strict=True):
            assert got[1, 0].isnan().all()
            got[1, 0] = clean[1, 0]
            assert torch.equal(got, clean)

    def test_calibrating_on_what_is_not_finite_or_silent(self) -> None:
        keys = torch.tensor([[[3.0, float("nan")], [0.0, 0.0]], [[float("inf"), -2.0], [0.0, 0.0]]])
        assert channel_factors(keys)[0].tolist() == [3.0, 2.0]
        codec = QuantisedKV("int8", {0: channel_factors(keys)})
        loud = torch.full((1, 2, 2), 1e5)
        got, _ = codec.decode(0, codec.encode(0, loud, loud), torch.float32)
        torch.testing.assert_close(got, loud, rtol=0.01, atol=0)

    def test_layers_have_their_own_factors(self) -> None:
        codec = QuantisedKV("int8", {0: torch.full((1, 2), 2.0)})
        codec.calibrate(1, torch.tensor([[[3.0, 0.0]], [[-5.0, 0.0]]]))
        assert codec.smoothing[0].tolist() == [[2.0, 2.0]]
        assert codec.smoothing[1][0, 0] == 5
        assert 0 < codec.smoothing[1][0, 1] < 1e-3, "a silent channel may speak later"

    def test_unknown_names(self) -> None:
        with pytest.raises(ConfigError, match=r"kv_dtype='int2'; allowed: 'int8', 'int4' or None"):
            KVCache(codec="int2")


@pytest.mark.parametrize(
    ("name", "dtype", "most"), [("int8", "bfloat16", 0.53), ("int8", "float32", 0.27), ("int4", "float32", 0.15)]
)
def test_bytes(name: str, dtype: str, most: float) -> None:
    """Scales included, at a head width of 64."""
    sizes = []
    for codec in (None, name):
        cache = KVCache(codec=codec)
        cache.open(0, 16)
        cache.reserve(0, 16)
        k = rows(16, 3, 64).to(getattr(torch, dtype))
        cache.append(cache.plan([Segment(0, torch.zeros(16, dtype=torch.int64), None, NONE)]), 0, k, k)
        assert cache.num_bytes == 16 * cache.bytes_per_token
        sizes.append(cache.num_bytes)
    assert sizes[1] <= most * sizes[0]


class TestBits:
    """What is stored moves unchanged and depends on nothing but the row."""

    def fill(self, cache: KVCache, request_id: int, kv: Tensor, parents: list[int] | None = None) -> None:
        cache.reserve(request_id, len(kv))
        tree = None if parents is None else torch.tensor(parents)
        plan = cache.plan([Segment(request_id, torch.zeros(len(kv), dtype=torch.int64), tree, NONE)])
        cache.append(plan, 0, kv, kv.flip(-1))

    @each
    def test_compaction_and_chunks(self, name: str) -> None:
        kv = rows(12, 2, 6)
        kept = [0, 2, 5, 6, 10]
        codec = QuantisedKV(name)
        codec.calibrate(0, rows(9, 2, 6, seed=3))
        cache = KVCache(codec=codec, block_tokens=4)
        cache.open(0, 3)
        self.fill(cache, 0, kv[:3])
        cache.commit(0, torch.arange(3))
        cache.open(1, 2)
        self.fill(cache, 1, kv[:2])
        self.fill(cache, 0, kv, [max(-1, i - 2) for i in range(12)])
        cache.commit(0, torch.tensor(kept))
        want = codec.encode(0, torch.cat([kv[:3], kv[kept]]), torch.cat([kv[:3], kv[kept]]).flip(-1))
        for got, expected in zip(cache.stored(0, 0), want, strict=True):
            assert torch.equal(got, expected)
        cache.check_integrity()

    @each
    def test_sharing_and_copying(self, name: str) -> None:
        kv, tokens = rows(8, 2, 6), list(range(8))
        cache = KVCache(codec=name, block_tokens=4, prefix_caching=True)
        cache.open(0, 8)
        self.fill(cache, 0, kv)
        cache.commit(0, torch.arange(8))
        cache.publish(0, tokens)
        before = cache.stored(0, 0)
        assert cache.open(1, 8, tokens) == 7
        self.fill(cache, 1, 5 * kv[7:])
        cache.commit(1, torch.arange(1))
        for own, shared, old in zip(cache.stored(0, 0), cache.stored(1, 0), before, strict=True):
            assert torch.equal(own, old)
            assert torch.equal(shared[:7], old[:7])
        assert not torch.equal(cache.stored(1, 0)[1][7], before[1][7])


@each
class TestDecoding:
    """Over a quantised cache every drafter gives what plain decoding gives over the same one."""

    def runner(self, name: str, architecture: str = "llama") -> Any:
        return private_runner(model_of(named(architecture)), kv_dtype=name)

    @pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v3", "gptj"])
    def test_every_pattern_of_rollbacks(self, name: str, architecture: str) -> None:
        rows_ = prompts(3, 12, 7)
        runner = self.runner(name, architecture)
        plain = engine_of(model_of(named(architecture)), runner=runner)
        expected = [add(plain, row, 14) for row in rows_]
        drain(plain)
        for drafter, options in (
            ("scripted", {"accept_counts": [0, 2, 4, 1]}),
            ("adversary", {}),
            ("self_int8", {}),
        ):
            if drafter == "self_int8" and architecture != "llama":
                continue
            engine = engine_of(model_of(named(architecture)), drafter, options, runner=self.runner(name, architecture))
            requests = [add(engine, row, 14) for row in rows_]
            while engine.has_unfinished:
                engine.step()
                engine.target.cache.check_integrity()
                for r in requests:
                    if r.finish_reason is None and engine.target.cache.is_open(r.request_id):
                        assert_fresh_kv(engine.target, r.request_id, r.tokens)
            assert [r.new_tokens for r in requests] == [r.new_tokens for r in expected]

    def test_half_precision_beyond_float16s_range(self, name: str) -> None:
        """A bias that makes channels of keys large, as trained models have them; 127 times 700 is no float16."""
        model = build(named("qwen2"), torch.float32)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias[3] = 700.0
        model = model.to(torch.float16)
        answer = LLM(model, kv_dtype=name).generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)[0]
        assert len(answer.token_ids) == 4

    def test_the_factors_are_the_models(self, name: str) -> None:
        """Calibrated once, the same for every cache, for both widths and whoever asks."""
        model = model_of(named("llama"))
        runner = runner_for(model, RunnerConfig(kv_dtype=name))
        codec = runner.cache.codec
        assert isinstance(codec, QuantisedKV)
        assert codec.name == name
        assert runner.with_own_cache().cache.codec is codec
        assert runner.program is runner_for(model).program, "the KV's dtype needs no second program"
        other = kv_codec("int8", runner_for(model))
        assert sorted(other.smoothing) == [0, 1]
        assert all(torch.equal(other.smoothing[i], codec.smoothing[i]) for i in (0, 1))
