"""Keyed noise: the right laws, independent keys, and nothing that depends on the batch."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from specdec.interfaces import Noise, NoiseKey, Stream
from specdec.noise import KeyedNoise, draw_seed, fold_seed
from tests.verifiers.enumeration import chi_square_p

N = 100_000
ROWS = torch.arange(N)
WEIGHTS = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])


def noise_of(seeds: Tensor, positions: Tensor | int = 0, coupled: bool = False) -> KeyedNoise:
    positions = torch.full_like(seeds, positions) if isinstance(positions, int) else positions
    return KeyedNoise(seeds, positions, torch.full_like(seeds, coupled, dtype=torch.bool))


def keys(rows: Tensor = ROWS, offset: int = 1, stream: Stream = Stream.TOKEN, index: int = 0) -> NoiseKey:
    return NoiseKey(rows, offset, stream, index)


def test_it_is_a_noise() -> None:
    assert isinstance(noise_of(torch.tensor([1])), Noise)


# Neighbouring seeds, positions, offsets and indices are what users and the engine really pass.
VARIED = {
    "seeds": lambda stream: noise_of(ROWS).uniform(keys(stream=stream)),
    "positions": lambda stream: noise_of(torch.zeros_like(ROWS), ROWS).uniform(keys(stream=stream)),
    "offsets": lambda stream: noise_of(torch.zeros_like(ROWS)).uniform(NoiseKey(ROWS, ROWS, stream)),
    "indices": lambda stream: noise_of(torch.zeros_like(ROWS)).uniform(NoiseKey(ROWS, 1, stream, ROWS)),
}


@pytest.mark.parametrize("name", VARIED)
def test_uniforms_are_uniform(name: str) -> None:
    for stream in Stream:
        uniforms = VARIED[name](stream)
        assert uniforms.dtype == torch.float64
        assert 0 <= float(uniforms.min()) < 1e-3
        assert 1 - 1e-3 < float(uniforms.max()) < 1
        counts = torch.bincount((uniforms * 64).long(), minlength=64)
        assert chi_square_p(counts, torch.full((64,), N / 64)) > 1e-5
        low_bits = torch.bincount((uniforms * 2**53).long() % 64, minlength=64)
        assert chi_square_p(low_bits, torch.full((64,), N / 64)) > 1e-5


def test_uniforms_of_different_keys_are_independent() -> None:
    noise = noise_of(ROWS, 7)
    streams = [noise.uniform(keys(stream=stream)) for stream in Stream]
    others = [noise.uniform(keys(offset=2)), noise.uniform(keys(index=1)), noise_of(ROWS, 8).uniform(keys(offset=2))]
    neighbours = [noise_of(ROWS + 1, 7).uniform(keys()), noise_of(-ROWS - 1, 7).uniform(keys())]
    for a, b in itertools.combinations(streams + others + neighbours, 2):
        cells = (a * 10).long() * 10 + (b * 10).long()
        assert chi_square_p(torch.bincount(cells, minlength=100), torch.full((100,), N / 100)) > 1e-5


def test_consecutive_draws_of_one_request_are_independent() -> None:
    """A three-dimensional serial test along positions."""
    uniforms = noise_of(torch.zeros_like(ROWS), ROWS).uniform(keys())
    triples = uniforms[: N // 3 * 3].reshape(-1, 3).mul(6).long()
    cells = (triples * torch.tensor([36, 6, 1])).sum(dim=1)
    assert chi_square_p(torch.bincount(cells, minlength=216), torch.full((216,), N // 3 / 216)) > 1e-5


def test_an_offset_is_a_position() -> None:
    """A token's noise depends on where it is, not on where the root of its tree was."""
    for offset in range(1, 5):
        assert torch.equal(
            noise_of(ROWS, 10).uniform(keys(offset=5)), noise_of(ROWS, 15 - offset).uniform(keys(offset=offset))
        )


def test_accept_compares_strictly() -> None:
    noise = noise_of(ROWS)
    ones = torch.ones(N, dtype=torch.float64)
    assert not bool(noise.accept(ones * 0, ones, keys()).any())
    assert not bool(noise.accept(ones * 0, ones * 0, keys()).any())
    for den in (1.0, 1 / 3, 0.7, 1e-300):
        assert bool(noise.accept(ones * den, ones * den, keys()).all())
    accepted = noise.accept(ones * 0.3, ones, keys(stream=Stream.ACCEPT))
    assert torch.equal(accepted, noise.uniform(keys(stream=Stream.ACCEPT)) < 0.3)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_choose_draws_in_proportion(scale: float) -> None:
    for dtype in (torch.float32, torch.float64):
        chosen = noise_of(ROWS).choose((WEIGHTS.to(dtype) * scale).expand(N, -1), keys())
        assert chosen.dtype == torch.int64
        assert chi_square_p(torch.bincount(chosen, minlength=5), WEIGHTS.double() * N) > 1e-5


def test_choices_of_different_keys_are_independent() -> None:
    noise = noise_of(ROWS, 3)
    weights = WEIGHTS.expand(N, -1)
    variants = [
        keys(),
        keys(stream=Stream.DRAFT),
        keys(stream=Stream.RESIDUAL),
        keys(offset=2),
        keys(index=1),
        keys(stream=Stream.DRAFT, index=1),
    ]
    chosen = [noise.choose(weights, key) for key in variants]
    expected = (WEIGHTS[:, None] * WEIGHTS[None, :]).double().flatten() * N
    for a, b in itertools.combinations(chosen, 2):
        assert chi_square_p(torch.bincount(a * 5 + b, minlength=25), expected) > 1e-5


def test_a_choice_says_nothing_about_the_acceptance_of_the_same_place() -> None:
    noise = noise_of(ROWS)
    chosen = noise.choose(WEIGHTS.expand(N, -1), keys(stream=Stream.DRAFT))
    accepted = noise.accept(torch.full((N,), 0.5).double(), torch.ones(N).double(), keys(stream=Stream.ACCEPT))
    counts = torch.bincount(chosen * 2 + accepted, minlength=10)
    assert chi_square_p(counts, WEIGHTS.double().repeat_interleave(2) * N / 2) > 1e-5


def test_fault_03_zero_weights_are_never_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (3, 5000):
        rows = torch.arange(200)
        weights = torch.rand(200, vocab_size, generator=generator, dtype=torch.float64)
        weights = weights * (torch.rand(200, vocab_size, generator=generator) < 0.3) * 10.0 ** -(rows[:, None] * 1.5)
        weights[:, 1] = 5e-324  # the smallest float above zero
        chosen = noise_of(rows).choose(weights, keys(rows))
        assert bool((weights.gather(1, chosen[:, None]) > 0).all())


def test_one_hot_weights() -> None:
    for vocab_size in (1, 2, 7, 6000):
        rows = torch.arange(50)
        hot = torch.randint(vocab_size, (50,), generator=torch.Generator().manual_seed(1))
        weights = torch.zeros(50, vocab_size).scatter_(1, hot[:, None], 1e-30)
        assert torch.equal(noise_of(rows).choose(weights, keys(rows)), hot)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -1.0])
def test_a_row_without_a_choice_is_refused(bad: float) -> None:
    weights = torch.ones(3, 4)
    weights[1] = 0.0
    weights[1, 2] = bad
    with pytest.raises(ValueError, match="row 1 has no token to choose"):
        noise_of(torch.arange(3)).choose(weights, keys(torch.arange(3)))


def test_no_rows_are_no_choices() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    for vocab_size in (4, 5000):
        assert noise_of(torch.arange(3)).choose(torch.empty(0, vocab_size), keys(nobody)).shape == (0,)


def test_the_sparse_race_is_the_dense_race() -> None:
    """Hashing only what can win gives the same winner as hashing the vocabulary."""
    rows = torch.arange(64)
    noise = noise_of(rows)
    generator = torch.Generator().manual_seed(2)
    sparse = torch.zeros(64, 6000)
    for row in range(64):
        where = torch.randperm(6000, generator=generator)[: row + 1]
        sparse[row, where] = torch.rand(row + 1, generator=generator)
    dense = sparse + 1e-30 * (sparse == 0)
    assert torch.equal(noise.choose(sparse, keys(rows)), noise.choose(dense, keys(rows)))
    one = noise.choose(sparse[5:6], keys(rows[5:6]))
    assert torch.equal(one, noise.choose(sparse, keys(rows))[5:6])


def test_fault_04_a_seed_gives_the_same_alone_and_in_a_batch() -> None:
    generator = random.Random(0)
    for vocab_size in (7, 3000):
        seeds = torch.tensor([generator.randrange(-(2**63), 2**63) for _ in range(20)])
        positions = torch.tensor([generator.randrange(5000) for _ in range(20)])
        weights = torch.rand(20, vocab_size, generator=torch.Generator().manual_seed(3))
        rows = torch.arange(20)
        together = noise_of(seeds, positions).choose(weights, keys(rows, offset=3, index=2))
        for row in range(20):
            alone = noise_of(seeds[row : row + 1], positions[row : row + 1])
            key = NoiseKey(torch.tensor([0]), torch.tensor([3]), Stream.TOKEN, torch.tensor([2]))
            assert torch.equal(alone.choose(weights[row : row + 1], key), together[row : row + 1])


def test_fault_04_every_one_of_equal_tokens_appears() -> None:
    chosen = noise_of(torch.zeros_like(ROWS), ROWS).choose(torch.ones(N, 50), keys())
    assert chi_square_p(torch.bincount(chosen, minlength=50), torch.full((50,), N / 50)) > 1e-5


def test_known_values_never_change() -> None:
    """Seeds in papers and bug reports must go on meaning the same thing."""
    noise = KeyedNoise(torch.tensor([0, 1, -5]), torch.tensor([0, 10, 3]), torch.tensor([False] * 3))
    rows = torch.arange(3)
    assert noise.uniform(keys(rows)).tolist() == pytest.approx(KNOWN_UNIFORMS, rel=1e-15)
    chosen = noise.choose(torch.ones(3, 1000), keys(rows, stream=Stream.RESIDUAL, index=4))
    assert chosen.tolist() == KNOWN_CHOICES


def splitmix(counter: int) -> int:
    """The finaliser once more, on Python integers."""
    mask = 2**64 - 1
    counter = ((counter ^ (counter >> 30)) * 0xBF58476D1CE4E5B9) & mask
    counter = ((counter ^ (counter >> 27)) * 0x94D049BB133111EB) & mask
    return counter ^ (counter >> 31)


def test_the_hash_is_splitmix64_on_unsigned_integers() -> None:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    generator = random.Random(1)
    for _ in range(200):
        seed, position = generator.randrange(-(2**63), 2**63), generator.randrange(2**31)
        stream, index = generator.choice(list(Stream)), generator.randrange(100)
        hashed = splitmix((seed + golden) & mask)
        hashed = splitmix((hashed + (position + 2) * golden) & mask)
        if stream is Stream.DRAFT:  # of this root only
            hashed = splitmix((hashed - (position + 1) * golden) & mask)
        hashed = splitmix((hashed + (stream * 2**40 + index + 1) * golden) & mask)
        uniform = (splitmix((hashed + golden) & mask) >> 11) * 2.0**-53
        noise = noise_of(torch.tensor([seed]), position)
        row = torch.tensor([0])
        assert float(noise.uniform(NoiseKey(row, 2, stream, index))) == uniform
        assert float(noise.uniform(NoiseKey(row, torch.tensor([2]), stream, torch.tensor([index])))) == uniform


def test_coupled_rows_draft_with_the_targets_noise() -> None:
    rows = torch.arange(1000)
    coupled = rows % 2 == 0
    noise = KeyedNoise(rows, rows, coupled)
    weights = WEIGHTS.expand(1000, -1)
    token, draft = (noise.choose(weights, keys(rows, stream=stream)) for stream in (Stream.TOKEN, Stream.DRAFT))
    assert torch.equal(token[coupled], draft[coupled])
    assert not torch.equal(token[~coupled], draft[~coupled])
    apart = noise_of(rows, rows)
    assert torch.equal(draft[~coupled], apart.choose(weights, keys(rows, stream=Stream.DRAFT))[~coupled])
    for stream in (Stream.TOKEN, Stream.ACCEPT, Stream.RESIDUAL):
        assert torch.equal(noise.uniform(keys(rows, stream=stream)), apart.uniform(keys(rows, stream=stream)))
    subset = torch.tensor([3, 0, 8])
    assert torch.equal(noise.choose(weights[:3], keys(subset, stream=Stream.DRAFT)), draft[subset])


def test_uncoupled_drafts_are_drawn_anew_in_every_step() -> None:
    """One position drafted from two roots: independent, where the target's own noise is the same."""
    first, second = noise_of(ROWS, 10), noise_of(ROWS, 11)
    here, there = (
        noise.uniform(keys(offset=offset, stream=Stream.DRAFT)) for noise, offset in ((first, 3), (second, 2))
    )
    cells = (here * 10).long() * 10 + (there * 10).long()
    assert chi_square_p(torch.bincount(cells, minlength=100), torch.full((100,), N / 100)) > 1e-5
    assert torch.equal(first.uniform(keys(offset=3)), second.uniform(keys(offset=2)))
    coupled = [
        noise_of(ROWS, root, coupled=True).uniform(keys(offset=13 - root, stream=Stream.DRAFT)) for root in (10, 11)
    ]
    assert torch.equal(*coupled)


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="vectors of one length"):
        KeyedNoise(torch.arange(2), torch.arange(3), torch.zeros(2, dtype=torch.bool))


def test_fold_seed() -> None:
    assert fold_seed(42, 0) == 42
    folded = [fold_seed(seed, index) for seed in (0, 1, 42, -1, 2**63 - 1) for index in range(100)]
    assert len(set(folded)) == 500
    assert all(-(2**63) <= seed < 2**63 for seed in folded)
    assert fold_seed(42, 3) == fold_seed(42, 3)


def test_draw_seed_follows_torchs_global_generator() -> None:
    torch.manual_seed(5)
    first = [draw_seed() for _ in range(3)]
    torch.manual_seed(5)
    assert [draw_seed() for _ in range(3)] == first
    assert len(set(first)) == 3
    assert all(0 <= seed < 2**63 for seed in first)


def test_choosing_leaves_torchs_global_generator_alone() -> None:
    torch.manual_seed(6)
    expected = torch.rand(3)
    torch.manual_seed(6)
    noise_of(torch.arange(4)).choose(torch.ones(4, 9), keys(torch.arange(4)))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.gpu
def test_both_devices_draw_the_same() -> None:
    rows = torch.arange(500)
    weights = torch.rand(500, 3000, generator=torch.Generator().manual_seed(4))
    here = noise_of(rows, rows)
    there = noise_of(rows.cuda(), rows.cuda())
    on_cuda = keys(rows.cuda())
    assert torch.equal(there.uniform(on_cuda).cpu(), here.uniform(keys(rows)))
    assert torch.equal(there.choose(weights.cuda(), on_cuda).cpu(), here.choose(weights, keys(rows)))


KNOWN_UNIFORMS = [0.1296456182997474, 0.2986938694315807, 0.2292761960222528]
KNOWN_CHOICES = [713, 693, 731]
