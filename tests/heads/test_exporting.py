"""Heads for serving engines: what the files hold, that they come back bit by bit, and what a layout cannot hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec.errors import CheckpointError, ConfigError
from specdec.heads.exporting import LAYOUTS, export_head, launch_commands
from specdec.heads.loaded import LoadedHead
from specdec.heads.loading import load_head
from specdec.heads.saving import save_head
from tests.heads.small_heads import VOCAB_SIZE, WIDTH, small_eagle, small_medusa, small_target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYER = (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.no_grad()
def logits(head: LoadedHead) -> Tensor:
    """Return the logits of two steps over random features and ids."""
    module: Any = head.module
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(5, module.config.num_features, generator=generator).to(module.fc.weight.dtype)
    ids = torch.randint(VOCAB_SIZE, (2, 5), generator=generator)
    hidden, found = module.fuse(features), []
    for step in range(2):
        hidden = module(hidden, module.embed_tokens(ids[step]), torch.arange(5) + step, causal)
        found.append(head.vocabulary.scatter(module.logits(hidden)))
    return torch.stack(found)


@pytest.mark.parametrize("to", LAYOUTS)
def test_what_the_files_hold(to: str, tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    folder = export_head(head, target, tmp_path / "a" / "head", to=to, dtype=torch.float32, num_draft_tokens=4)
    tensors = load_file(folder / "model.safetensors")
    first = {"speculators": "layers.0.", "sglang": "midlayer."}[to]
    expected = {f"{first}{name}.weight" for name in LAYER} | {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert set(tensors) == expected | ({"embed_tokens.weight"} if to == "speculators" else set())
    drafted = head.vocabulary.target_ids
    assert torch.equal(tensors["lm_head.weight"], target.output_weight[drafted])  # type: ignore[index]
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["d2t"] + torch.arange(24), drafted)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], drafted)
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 24
    assert config["torch_dtype"] == "float32"
    assert config["tie_word_embeddings"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]  # places in hidden_states
    layer = config["transformer_layer_config"] if to == "speculators" else config
    assert (layer["model_type"], layer["head_dim"], layer["vocab_size"]) == ("llama", 16, VOCAB_SIZE)
    assert (layer["num_hidden_layers"], layer["rope_theta"], layer["rope_scaling"]) == (1, 10000.0, None)
    if to == "speculators":
        assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight)
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": "a/target", "architectures": ["LlamaForCausalLM"],
        }  # fmt: skip
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # blocks
    assert "a/target" in (folder / "README.md").read_text()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafted": VOCAB_SIZE, "own_rows": True, "norm_output": True},
        {
            "fc_norm": True,
            "feature_layers": (0, 5),
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)  # fmt: skip
def test_round_trip_is_bit_identical(to: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    """Through the other layout and back, and from our own file."""
    target = small_target()
    head = small_eagle(target, **options)
    saved = save_head(tmp_path / "own", head.module, head.vocabulary, target, dtype=dtype)
    first = export_head(load_head(saved, target), target, tmp_path / "1", to=to, dtype=dtype)
    again = export_head(load_head(first, target), target, tmp_path / "2", to=to, dtype=dtype)
    other = next(name for name in LAYOUTS if name != to)
    between = export_head(load_head(again, target), target, tmp_path / "3", to=other, dtype=dtype)
    last = export_head(load_head(between, target), target, tmp_path / "4", to=to, dtype=dtype)
    for folder in (again, last):
        for name in ("model.safetensors", "config.json"):
            assert (folder / name).read_bytes() == (first / name).read_bytes(), name
    own = save_head(tmp_path / "5", *_parts(load_head(last, target)), target, dtype=dtype)
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(load_file(own / "model.safetensors")[name], tensor), name


def _parts(head: LoadedHead) -> tuple[Any, Any]:
    return head.module, head.vocabulary


@pytest.mark.parametrize("options", [{}, {"drafted": VOCAB_SIZE}, {"num_layers": 2, "qk_norm": True}], ids=str)
def test_golden_forward(options: dict[str, Any], tmp_path: Path) -> None:
    """Both layouts give the logits of the module that was exported."""
    target = small_target(torch.float64)
    head = small_eagle(target, **options)
    expected = logits(head)
    for to in LAYOUTS:
        if to == "sglang" and "num_layers" in options:
            continue
        folder = export_head(head, target, tmp_path / to, to=to, dtype=torch.float64)
        assert torch.equal(logits(load_head(folder, target)), expected), to


def test_the_embedding_is_written_as_the_target_scales_it(tmp_path: Path) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 3.0

    target = dataclasses.replace(small_target(), embedding=Scaled(VOCAB_SIZE, WIDTH).requires_grad_(False))
    head = small_eagle(target)
    folder = export_head(head, target, tmp_path / "head", to="speculators", dtype=torch.float32)
    rows = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(rows, target.embedding.weight * 3.0)


REFUSED = [
    ("sglang", {"num_layers": 2}, r"num_layers=2.*layout 'speculators' can hold it"),
    ("sglang", {"qk_norm": True}, "qk_norm"),
    ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
    ("sglang", {"norm_before_fc": True}, "norm_before_fc"),
    ("sglang", {"attention_bias": True, "mlp_bias": True}, r"attention_bias.*mlp_bias"),
    ("sglang", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("sglang", {"feature_layers": (3,)}, "puts features through fc"),
    ("speculators", {"attention_bias": True}, "output_bias=False"),
    ("speculators", {"qk_norm": True, "mlp_bias": True}, r"qk_norm.*mlp_bias"),
    ("speculators", {"fc_bias": True}, "fc_bias"),
    ("sglang", {"fc_bias": True}, "fc_bias"),
    ("speculators", {"generation": 1, "feature_layers": (), "drafted": VOCAB_SIZE}, "EAGLE-1 or EAGLE-2"),
]


@pytest.mark.parametrize(("to", "options", "reason"), REFUSED, ids=str)
def test_what_a_layout_cannot_hold_is_refused_by_name(
    to: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    target = small_target()
    with pytest.raises(CheckpointError, match=f"a/head cannot be exported to .*{reason}"):
        export_head(small_eagle(target, **options), target, tmp_path / "head", to=to)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", LAYOUTS)
def test_medusa_is_refused(to: str, tmp_path: Path) -> None:
    target = small_target()
    with pytest.raises(CheckpointError, match="Medusa"):
        export_head(small_medusa(target), target, tmp_path / "head", to=to)


def test_an_embedding_of_its_own(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    head.module.shares_embedding = False
    head.module.embed_tokens = nn.Embedding.from_pretrained(target.embedding.weight.clone())
    export_head(head, target, tmp_path / "same", to="sglang")
    head.module.embed_tokens.weight.data[5, 5] += 1
    with pytest.raises(CheckpointError, match="embedding of its own"):
        export_head(head, target, tmp_path / "other", to="sglang")
    folder = export_head(head, target, tmp_path / "other", to="speculators", dtype=torch.float32)
    assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], head.module.embed_tokens.weight)


def test_a_narrower_head_brings_its_embedding_to_sglang(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target, hidden_size=16, own_rows=True)
    head.module.shares_embedding = False
    head.module.embed_tokens = nn.Embedding(VOCAB_SIZE, 16)
    folder = export_head(head, target, tmp_path / "head", to="sglang", dtype=torch.float32)
    assert json.loads((folder / "config.json").read_text())["target_hidden_size"] == WIDTH
    assert torch.equal(logits(load_head(folder, target)), logits(head))
    with pytest.raises(CheckpointError, match="hidden size 16 is not the target's 32"):
        export_head(head, target, tmp_path / "no", to="speculators")


def test_folders_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    folder = export_head(head, target, tmp_path / "head", to="sglang")
    export_head(head, target, folder, to="speculators")  # an earlier export is replaced
    assert "speculators_config" in json.loads((folder / "config.json").read_text())
    (folder / "pytorch_model.bin").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds other files \(pytorch_model.bin\)"):
        export_head(head, target, folder, to="sglang")
    with pytest.raises(ConfigError, match="unknown layout 'vllm'"):
        export_head(head, target, tmp_path / "x", to="vllm")


def test_launch_commands() -> None:
    vllm = launch_commands("speculators", "/a/b", "x/y", 3)["vLLM"]
    assert json.loads(vllm.split("'")[1]) == {"method": "eagle3", "model": "/a/b", "num_speculative_tokens": 3}
    both = launch_commands("sglang", "/a b/c", "x/y", 3)
    assert list(both) == ["SGLang", "vLLM"]
    assert "--speculative-draft-model-path '/a b/c' --speculative-num-steps 3" in both["SGLang"]
    assert "--speculative-num-draft-tokens 4" in both["SGLang"]


def test_what_is_no_export_is_never_overwritten(tmp_path: Path) -> None:
    target = small_target()
    head = small_eagle(target)
    own = save_head(tmp_path / "own", head.module, head.vocabulary, target)
    first = export_head(head, target, tmp_path / "first", to="speculators")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for source, folder, message in (
        (own, own, "is the head that is to be exported"),
        (first, first, "is the head that is to be exported"),
        (own, model, "holds config.json that specdec did not export"),
        (first, own, "that specdec did not export"),
    ):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(CheckpointError, match=message):
            export_head(load_head(source, target), target, folder, to="sglang")
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
