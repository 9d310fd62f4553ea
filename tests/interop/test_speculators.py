"""Our exports in the classes of the package `speculators`: same logits on the same features. See `make interop`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.heads.eagle import EagleHead
from specdec.heads.exporting import export_head
from specdec.heads.loaded import LoadedHead
from specdec.heads.serving_configs import SPECULATORS_VERSION
from specdec.heads.target import HeadTarget
from tests.heads.small_heads import NUM_LAYERS, VOCAB_SIZE, WIDTH, small_eagle

speculators = pytest.importorskip("speculators", reason="needs the package speculators: run `make interop`")
NUM_TOKENS, NUM_STEPS = 7, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HeadTarget:
    """A model in a folder: the package reads its embedding, norm and lm_head from there."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return HeadTarget(
        name=str(folder), hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS,
        embedding=model.get_input_embeddings().requires_grad_(False), output_weight=model.lm_head.weight.detach(),
        dtype=torch.float32, device=torch.device("cpu"), config=model.config,
    )  # fmt: skip


class StepsAtOnce:
    """Attention of the training-time test: step 0 is causal, a later step adds its own keys on the diagonal."""

    def __init__(self) -> None:
        self.step = 0
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.setdefault(layer, []).append(k)
        self._values.setdefault(layer, []).append(v)
        n = q.shape[0]
        causal, own = torch.ones(n, n).tril().bool(), torch.eye(n).bool()
        mask = torch.cat([causal] + [own] * self.step, dim=1)
        groups = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat(kept[layer]).repeat_interleave(groups, 1).transpose(0, 1) for kept in (self._keys, self._values)
        )
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)


def our_logits(head: LoadedHead, features: Tensor, ids: Tensor) -> list[Tensor]:
    module = head.module
    assert isinstance(module, EagleHead)
    attend, hidden, found = StepsAtOnce(), module.fuse(features), []
    for step in range(NUM_STEPS):
        attend.step = step
        shifted = F.pad(ids[step:], (0, step))
        hidden = module(hidden, module.embed_tokens(shifted), torch.arange(NUM_TOKENS) + 1 + step, attend)
        found.append(module.logits(hidden))
    return found


def their_logits(model: Any, features: Tensor, ids: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    model(features[None], ids[None], torch.zeros(1, NUM_TOKENS, dtype=torch.int64), ttt_steps=NUM_STEPS)
    hook.remove()
    return found


def load_theirs(folder: Path) -> Any:
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    from_target = {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert set(model.state_dict()) - from_target == set(load_file(folder / "model.safetensors"))
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True},
        {"drafted": VOCAB_SIZE, "own_rows": True},
        {"qk_norm": True, "fc_norm": True},
        {"num_layers": 2, "norm_output": True, "norm_before_fc": True, "feature_layers": (0, 1, 2, 5)},
        {"attention_bias": True, "output_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}, "norm_eps": 1e-2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_logits_are_equal(options: dict[str, Any], target: HeadTarget, tmp_path: Path) -> None:
    head = small_eagle(target, **options)
    folder = export_head(head, target, tmp_path / "head", to="speculators", dtype=torch.float32)
    theirs = load_theirs(folder)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(NUM_TOKENS, head.module.config.num_features, generator=generator)  # type: ignore[union-attr]
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    with torch.no_grad():
        ours, others = our_logits(head, features, ids), their_logits(theirs, features, ids)
    assert len(others) == NUM_STEPS
    for step, (mine, other) in enumerate(zip(ours, others, strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"{step}: {text}")
        assert torch.equal(mine.argmax(-1), other.argmax(-1))
    if not head.vocabulary.is_whole:
        drafted = torch.arange(head.vocabulary.size) + theirs.d2t
        assert torch.equal(drafted, head.vocabulary.target_ids)
        assert torch.equal(theirs.t2d, head.vocabulary.t2d)


def test_a_wrong_residual_would_be_seen(target: HeadTarget, tmp_path: Path) -> None:
    head = small_eagle(target)
    folder = export_head(head, target, tmp_path / "head", to="speculators", dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    features, ids = torch.randn(NUM_TOKENS, 3 * WIDTH), torch.randint(VOCAB_SIZE, (NUM_TOKENS,))
    with torch.no_grad():
        ours, others = our_logits(head, features, ids), their_logits(load_theirs(folder), features, ids)
    assert not torch.allclose(ours[0], others[0], rtol=1e-2, atol=1e-2)


def test_their_config_keeps_what_ours_says(target: HeadTarget, tmp_path: Path) -> None:
    head = small_eagle(target, norm_before_residual=True)
    folder = export_head(head, target, tmp_path / "head", to="speculators", target_name="an/other", num_draft_tokens=5)
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    method = config.speculators_config.proposal_methods[0]
    assert (config.speculators_config.algorithm, method.proposal_type) == ("eagle3", "greedy")
    assert method.speculative_tokens == 5
    assert config.speculators_config.verifier.name_or_path == "an/other"
    assert config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
    assert config.speculators_version == SPECULATORS_VERSION
    assert config.norm_before_residual is True
