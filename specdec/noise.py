"""Keyed randomness: every draw is a pure function of (seed, position, stream, index), never of what was drawn before.

A counter-based generator has no state to roll back, to share between batch neighbours or to restore after a failed
step, and a token's draw does not depend on how many draft tokens were accepted before it.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (the splitmix64 finaliser);
Gumbel coupling of draft and target: Daliri, Musco and Suresh 2024, arXiv 2408.07978.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specdec.interfaces import NoiseKey, Stream


def _signed(value: int) -> int:
    """Return `value` modulo 2**64 as the int64 with the same bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


# Source: Steele, Lea and Flood 2014; the multipliers are variant 13 of Stafford's mix functions.
_GOLDEN = _signed(0x9E37_79B9_7F4A_7C15)
_MULTIPLIER_1 = _signed(0xBF58_476D_1CE4_E5B9)
_MULTIPLIER_2 = _signed(0x94D0_49BB_1331_11EB)

_STREAM_SHIFT = 40  # a key's index stays below 2**40, so (stream, index) is one distinct counter
_UNIT = 2.0**-53
_MIN_EXPONENTIAL = 2.0**-60  # stands in for -log(1) = 0, which would turn a division into inf
_SMALLEST_TOP = 1e-30  # divided by an exponential, anything above stays far from 0 in float64
_SPARSE_MIN_VOCAB = 2048  # below this, looking for zeros costs more than hashing them
_SPARSE_FRACTION = 8


class KeyedNoise:
    """The `Noise` of one step: B requests, each with its own seed and root position.

    Equal keys give equal draws on every device and in every batch. `accept` and `choose` of one key share their
    bits, so a caller gives them different streams.

    Args:
        seeds: [B] int64.
        positions: [B] int64, the position of each request's tree root.
        coupled: [B] bool; where True the DRAFT stream is the TOKEN stream, so that a drafter whose distribution is
            close to the target's draws the token the target will draw. Elsewhere its draws depend on the root too.
    """

    def __init__(self, seeds: Tensor, positions: Tensor, coupled: Tensor) -> None:
        if not seeds.shape == positions.shape == coupled.shape or seeds.dim() != 1:
            raise ValueError(
                "seeds, positions and coupled must be vectors of one length, got shapes "
                f"{tuple(seeds.shape)}, {tuple(positions.shape)} and {tuple(coupled.shape)}"
            )
        self._seeds = seeds.to(torch.int64)
        self._positions = positions.to(torch.int64)
        self._coupled = coupled.to(torch.bool)

    @cached_property
    def _hashed_seeds(self) -> Tensor:
        return _mix(self._seeds + _GOLDEN)  # greedy steps never ask

    def uniform(self, key: NoiseKey) -> Tensor:
        """Return [L] float64 uniforms in [0, 1) with 53 random bits, the ones `accept` compares with."""
        return _shift(_mix(self._counters(key) + _GOLDEN), 11).to(torch.float64) * _UNIT

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        """Return [L] bool: u * den < num. A zero `num` is never accepted, `num >= den > 0` always is."""
        return self.uniform(key).to(num.device) * den.to(torch.float64) < num.to(torch.float64)

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        """Return [L] int64 drawn in proportion to `weights` [L, V] >= 0, by an exponential race.

        Token v finishes at E_v / weights[v] with E_v exponential and keyed by v; the first one wins. Two calls with
        one key and similar weights therefore mostly choose the same token.

        Raises:
            ValueError: a row holds NaN or infinity, or nothing above zero.
        """
        counters = self._counters(key)
        weights = _checked(weights)
        if weights.device.type == "cpu" and weights.shape[1] >= _SPARSE_MIN_VOCAB:
            num_positive = torch.count_nonzero(weights)
            if int(num_positive) * _SPARSE_FRACTION <= weights.numel():
                return _race_sparse(weights, counters)
        return _race(weights, counters)

    def scores(self, weights: Tensor, key: NoiseKey) -> Tensor:
        """Return [L, V] float64, what `choose` takes the largest of: how far each token is from winning the race."""
        return _race_scores(_checked(weights), self._counters(key))

    def _counters(self, key: NoiseKey) -> Tensor:
        """Return [L] int64, the start of each row's own splitmix sequence."""
        rows = key.rows.to(self._positions.device)
        offset = key.offset.to(rows.device) if isinstance(key.offset, Tensor) else key.offset
        index = key.index.to(rows.device) if isinstance(key.index, Tensor) else key.index
        position = self._positions[rows] + offset
        at_position = _mix(self._hashed_seeds[rows] + position * _GOLDEN)
        stream: int | Tensor = int(key.stream)
        if key.stream is Stream.DRAFT:
            # Drafted anew in every step. A rule that looks behind the first refused token has used the draws of later
            # positions, and the next step must not meet them again. Backwards, away from the counters of the streams.
            in_step = _mix(at_position - (self._positions[rows] + 1) * _GOLDEN)
            at_position = torch.where(self._coupled[rows], at_position, in_step)
            stream = torch.where(self._coupled[rows], int(Stream.TOKEN), int(Stream.DRAFT))
        counter = stream * (1 << _STREAM_SHIFT) + index + 1
        return _mix(at_position + (_signed(counter * _GOLDEN) if isinstance(counter, int) else counter * _GOLDEN))


def fold_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th return sequence, an int64; index 0 keeps the seed itself."""
    if index == 0:
        return _signed(seed)
    hashed = _mix(torch.tensor([_signed(seed)], dtype=torch.int64))
    return int(_mix(hashed + _signed(index * _GOLDEN)))


def draw_seed() -> int:
    """Return a fresh seed in [0, 2**63 - 1) from torch's global generator, so that `torch.manual_seed` rules it."""
    return int(torch.randint(2**63 - 1, ()))


def _mix(state: Tensor) -> Tensor:
    """Return splitmix64's finaliser of `state` (int64, any shape); products wrap modulo 2**64."""
    state = (state ^ _shift(state, 30)).mul_(_MULTIPLIER_1)
    state = state.bitwise_xor_(_shift(state, 27)).mul_(_MULTIPLIER_2)
    return state.bitwise_xor_(_shift(state, 31))


def _shift(state: Tensor, bits: int) -> Tensor:
    """Return the logical right shift; torch's own copies the sign bit."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@lru_cache(maxsize=8)
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    """Return [V] int64, the distance of each token's counter from its row's."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _GOLDEN


def _exponentials(counters: Tensor) -> Tensor:
    """Return standard exponentials, float64 above zero, of `counters` (int64, any shape; overwritten)."""
    bits = _shift(_mix(counters), 11).add_(1)  # 1..2**53: the logarithm never sees 0
    return bits.to(torch.float64).mul_(_UNIT).log_().neg_().clamp_min_(_MIN_EXPONENTIAL)


def _checked(weights: Tensor) -> Tensor:
    """Return weights [L, V] that a race can run on: every row has a finite largest weight, far above underflow."""
    top = weights.amax(dim=-1)  # carries NaN
    if bool(((top > _SMALLEST_TOP) & (top < torch.inf)).all()):
        return weights
    good = (top > 0) & (top < torch.inf)
    if bool(good.all()):
        return weights.to(torch.float64) / top[:, None]
    row = int((~good).nonzero()[0])
    raise ValueError(f"row {row} has no token to choose: its largest weight is {float(top[row])}")


def _race(weights: Tensor, counters: Tensor) -> Tensor:
    """Run the race over all V tokens."""
    return _race_scores(weights, counters).argmax(dim=-1)


def _race_scores(weights: Tensor, counters: Tensor) -> Tensor:
    """Return [L, V] float64, each weight over its time."""
    times = _exponentials(counters[:, None] + _steps(weights.shape[1], weights.device))
    # Dividing by the time keeps zero weights at score 0, below every positive weight.
    return torch.div(weights.to(torch.float64), times, out=times)


def _race_sparse(weights: Tensor, counters: Tensor) -> Tensor:
    """Run the same race over the non-zero weights only."""
    rows, tokens = weights.nonzero(as_tuple=True)
    if rows.numel() == weights.shape[0]:  # one each: nothing to race
        return tokens
    times = _exponentials(counters[rows] + _steps(weights.shape[1], weights.device)[tokens])
    scores = weights[rows, tokens].to(torch.float64) / times
    if weights.shape[0] == 1:
        return tokens[scores.argmax(dim=-1, keepdim=True)]
    counts = torch.bincount(rows, minlength=weights.shape[0])
    starts = counts.cumsum(0) - counts
    ranks = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    table = scores.new_zeros(weights.shape[0], int(counts.max()))
    table[rows, ranks] = scores
    return tokens[starts + table.argmax(dim=-1)]
