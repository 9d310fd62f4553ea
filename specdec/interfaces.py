"""The borders between the rooms: what drafters, verifiers, the KV cache and the engine tell each other.

Letters in shapes: B requests of the step, L a subset of them, M nodes of the largest tree (root included),
D depth, V the TARGET's vocabulary, R rows, T packed tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn from the target's logits.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. `processors` are
    transformers LogitsProcessors that run before temperature and see the exact token path of each node.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    processors: tuple[Any, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens of a step, one tree per request. A chain is `parents` = -1, 0, 1, ..."""

    token_ids: Tensor  # [B, M] int64; node 0 = the request's last pending token
    parents: Tensor  # [B, M] int64; -1 at the root; parent < child; siblings in drawn order
    num_nodes: Tensor  # [B] int64, root included; 1 = nothing drafted
    draft_probs: Tensor | None = None  # [R, V] float32
    draft_row: Tensor | None = (
        None  # [B, M] int64: row of draft_probs this node's CHILDREN were drawn from; -1 = point masses
    )
    with_replacement: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows in one packed forward; they are appended to its open reservation."""

    request_id: int
    token_ids: Tensor  # [m] int64
    parents: Tensor | None  # [m] int64 rows of the reservation, -1 = child of the committed tokens; None = chain
    logit_rows: Tensor  # [r] int64 offsets into the segment whose logits are wanted


@dataclass(frozen=True, slots=True)
class Forward:
    """What one packed forward returns."""

    logits: Tensor  # [R, V]; the wanted rows of every segment, in segment order
    features: Tensor | None  # [T, F]


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """What a drafter wants of the target's forwards.

    Hidden states: outputs of blocks `layers` (0 = first block), then the final-norm output. `top_k`: the likeliest
    next tokens after every row whose logits were computed. It is true if hidden states are wanted.
    """

    layers: tuple[int, ...] = ()
    final_norm: bool = False
    top_k: int = 0

    def __bool__(self) -> bool:
        return bool(self.layers) or self.final_norm


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is asked for one request."""

    request_id: int
    root_token_id: int
    root_position: int
    max_draft_tokens: int
    sampling: SamplingParams
    # A chain that is drawn token by token ends after a token whose draft probability is lower; that token stays.
    min_confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What every drafter hears after EVERY target forward.

    `start` is the position of `token_ids[0]`. A drafter that already knows tokens from `start` on replaces
    them, so hearing the same thing twice changes nothing.
    """

    request_id: int
    start: int
    token_ids: Tensor  # [n] int64; newly known tokens, prompt and next token included
    features: Tensor | None = None  # [m, F] right-aligned: row j belongs to the position that predicted its token
    path: Tensor | None = None  # [a] int64 accepted node ids of the last tree, root excluded
    # With FeatureSpec.top_k, when target logits were computed: the tokens of those rows (root and ALL draft nodes) and
    # the likeliest next tokens after each, best first.
    scored_token_ids: Tensor | None = None  # [m] int64
    top_token_ids: Tensor | None = None  # [m, top_k] int64


class Stream(IntEnum):
    """Independent streams of randomness at one position."""

    TOKEN = 0  # the target's own choice
    DRAFT = 1  # a drafter's choice; equal to TOKEN for requests whose noise is coupled
    ACCEPT = 2  # accept or reject a draft token
    RESIDUAL = 3  # the choice after a rejection
    PATH = 4  # accept or refuse a path that may end behind the emitted tokens; offset 0, as no two steps share a root


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Names one draw per row: requests `rows` of the step, `offset` positions after the root, a stream, an index."""

    rows: Tensor  # [L] int64 indices into the step's requests
    offset: int | Tensor  # 1 = the token right after the root; int or [L] int64
    stream: Stream
    index: int | Tensor = 0  # sibling ordinal or node id where one position needs several draws


@runtime_checkable
class Noise(Protocol):
    """All randomness of a step: stateless, keyed by (seed, position, stream, index)."""

    def accept(self, num: Tensor, den: Tensor, key: NoiseKey) -> Tensor:
        """Return [L] bool: u * den < num with u uniform in [0, 1). num, den: [L] float64, den >= 0."""
        ...

    def choose(self, weights: Tensor, key: NoiseKey) -> Tensor:
        """Return [L] int64 drawn in proportion to weights [L, V] >= 0 (not normalised); never a zero weight."""
        ...


class TargetRows(Protocol):
    """The target's distributions at the nodes of a step's trees."""

    def probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return [L, V] float32: the distribution after node nodes[i] of request rows[i]; processors run here."""
        ...

    def top(self, rows: Tensor, nodes: Tensor) -> Tensor | None:
        """Return [L] int64, the argmax tokens, when every one of these requests is greedy; else None."""
        ...


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verifier kept."""

    path: Tensor  # [B, D] int64 node ids, root excluded, -1 padded
    num_accepted: Tensor  # [B] int64
    next_token_ids: Tensor  # [B] int64


class Verifier(Protocol):
    """An acceptance rule. Holds no model and no cache.

    A lossy one may have lossless_if_greedy = True: at temperature 0 it is exact matching.
    """

    name: str
    lossless: bool
    needs_all_rows: bool
    couples_draft: bool  # drafters of its requests draw with the target's own noise

    def verify(self, tree: TokenTree, target: TargetRows, noise: Noise) -> VerifyResult: ...


class Drafter(Protocol):
    """Proposes draft tokens. `propose` never changes the target's context length or committed KV."""

    name: str
    features: FeatureSpec
    max_position: int | None  # first position this drafter cannot draft from; None = no limit
    shares_target_kv: bool
    samples: bool  # True if its trees carry draft_probs for sampled requests
    # A drafter with shares_target_kv also has target_cache, the KVCache it appends to: the engine refuses another's.

    def propose(self, requests: Sequence[DraftRequest], noise: Noise) -> TokenTree: ...
    def observe(self, seen: Sequence[Observation]) -> None: ...
    def release(self, request_id: int) -> None: ...
    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may be built from. Every drafter class has `build(context, **options) -> Drafter`."""

    runner: Any  # the target's ModelRunner
    vocab_size: int
    tokenizer: Any | None = None
    load_model: Callable[..., tuple[Any, Any]] | None = None  # (name or path, dtype=) -> (model, tokenizer or None)


def empty_tree(requests: Sequence[DraftRequest], device: torch.device | str = "cpu") -> TokenTree:
    """Return the tree of a step in which nothing is drafted: every request has its root only."""
    roots = torch.tensor([[r.root_token_id] for r in requests], dtype=torch.int64, device=device).reshape(-1, 1)
    return TokenTree(roots, torch.full_like(roots, -1), torch.ones_like(roots[:, 0]))
