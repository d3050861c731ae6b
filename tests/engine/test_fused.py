"""Fused decoder layers against transformers' own, and models that are not fused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_kernels import ops
from specdec_kernels.linear.cpu import pays_to_pack
from specdec_kernels.linear.reference import Normed

from specdec_cli.core.batch import Rectangle
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Sequence
from specdec_cli.errors import SetupError
from specdec_cli.models.fused import bytes_held_twice, fuse
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from tests.engine.test_families import BLOCK, STATES, TOLERANCE, Driver, drive, plain_reference
from tests.support import description, paged_model, save_tiny

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1100,
    "vocab_size": 2100,
    "initializer_range": 0.08,  # spreads logits like the narrow models'
}
# The rotary tables of the lower and the upper half of its layers differ widely.
GEMMA3_TURNS = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama-tied", {}),
    "llama3-rope": ("llama3-rope", {}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma": ("gemma", {}),
    "gemma-wide": ("gemma", WIDE),
    "gemma2": ("gemma2", {}),  # with windows, and softcaps of scores and logits
    "gemma2-one-kv-head": ("gemma2", {"num_key_value_heads": 1, "attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3-capped": ("gemma3", {"final_logit_softcapping": 3.0, **GEMMA3_TURNS}),
    "gemma3-wide": ("gemma3", WIDE),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain-weights": ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 9}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "mixtral": ("mixtral", {"norm_topk_prob": False}),  # a stray key, without effect
    "mixtral-window": ("mixtral-window", {}),
    "gpt_oss": ("gpt_oss", {}),  # with sinks, windows, biases and a clamped activation
    "gpt_oss-clamped": ("gpt_oss", {"swiglu_limit": 0.3, "num_local_experts": 9}),
    # With shared experts and a bias for the choice; half of each head turns.
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            **{"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
            **{"norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_shared_experts": 2},
            **{"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.25},
        },
    ),
    "dots1": ("dots1", {}),
    "olmoe": ("olmoe", {}),  # with norms over all heads
    "olmoe-renormalised": ("olmoe", {"norm_topk_prob": True, "num_experts": 9}),
    # Wide enough for every form that a weight has on a CPU.
    "llama-wide": ("llama", WIDE),
    "llama-wide-tied": ("llama-tied", WIDE),
}


@pytest.mark.parametrize("case", FUSED)
def test_passes_match_transformers(case: str, device: torch.device, tmp_path: Path) -> None:
    family, changes = FUSED[case]
    folder = save_tiny(tmp_path, family, **changes)
    model = paged_model(folder, 120, BLOCK, device, fused=True, hidden_layers=STATES)
    assert model.fused is not None
    errors = drive(Driver(model, plain_reference(folder, device), [19, 6, 33]))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("only", [(0, 2), (1,), (2, 0)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_a_pass_of_some_layers_is_that_of_a_model_without_the_others(
    family: str, only: tuple[int, ...], tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"layer_types": kinds} if family == "gemma3" else {}
    folder = save_tiny(tmp_path, family, num_hidden_layers=3, **more)
    model = paged_model(folder, 9, BLOCK, fused=True)
    ids, state = torch.tensor([[5, 9, 7, 3, 11]]), BatchState(1, 2, model.device)
    state.load([Sequence(0, ids[0].tolist(), 1, 9, block_table=[3, 4])], 0)
    what = Rectangle(ids, None, -5, 1, 99, last_only=False)
    whole = model.forward_slots(what, state).logits
    found = model.forward_slots(what, state, only=only).logits
    alone = plain_reference(folder, model.device)
    alone.model.layers = torch.nn.ModuleList([alone.model.layers[i] for i in only])
    alone.config.num_hidden_layers = len(only)
    alone.config.layer_types = [kinds[i] for i in only]
    with torch.no_grad():
        wanted = alone(ids, use_cache=False).logits
    assert float((found - wanted).abs().max()) < TOLERANCE
    assert float((found - whole).abs().max()) > 100 * TOLERANCE
    assert torch.equal(model.forward_slots(what, state).logits, whole), "all layers, as before"


def test_a_model_without_a_fused_form_runs_all_layers(tmp_path: Path) -> None:
    model = paged_model(save_tiny(tmp_path, "gpt2"), 9, BLOCK, fused=True)
    state = BatchState(1, 2, model.device)
    state.load([Sequence(0, [5, 9], 1, 9, block_table=[3])], 0)
    with pytest.raises(SetupError, match="its passes run all of its layers"):
        model.forward_slots(Rectangle(state.tail, None, -2, 1, 99, True), state, only=(0,))


def test_a_module_whose_heads_were_reordered_computes_the_same(tmp_path: Path) -> None:
    family, changes = FUSED["glm4_moe-groups"]
    folder = save_tiny(tmp_path, family, **changes)
    model = paged_model(folder, 120, BLOCK, fused=True)
    oracle = plain_reference(folder)
    was, now = (m.model.layers[0].self_attn.q_proj.weight for m in (oracle, model.module))
    assert not torch.equal(was, now)
    model.fused = None
    assert Driver(model, oracle, [19, 6, 33]).feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE


def test_hidden_states_where_products_finish_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows on CUDA there is no normed stream to return, only sums of squares. Here torch
    computes them."""
    add_norm, norm_linear, norm_gate_up = ops.linear_add_norm, ops.norm_linear, ops.norm_gate_up

    def unfinished(*args: Any) -> Normed:
        hidden, eps = add_norm(*args).hidden, args[4]
        return Normed(hidden, hidden * args[3], hidden.square().sum(1, keepdim=True), eps)

    def finished(x: Normed) -> Normed:
        if x.squares is None:
            return x
        factor = torch.rsqrt(x.squares / x.hidden.shape[1] + x.eps)
        return Normed(x.hidden, x.scaled * factor, None, x.eps)

    folder = save_tiny(tmp_path, "llama")
    model = paged_model(folder, 120, BLOCK, fused=True, hidden_layers=STATES)
    monkeypatch.setattr(ops, "linear_add_norm", unfinished)
    monkeypatch.setattr(ops, "norm_linear", lambda x, *args: norm_linear(finished(x), *args))
    monkeypatch.setattr(ops, "norm_gate_up", lambda x, *args: norm_gate_up(finished(x), *args))
    errors = drive(Driver(model, plain_reference(folder), [19, 6, 33]))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    "family, changes",
    [
        ("olmo2", {}),
        ("olmoe", {"clip_qkv": 3.0}),
        ("gpt2", {}),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma3", {"hidden_activation": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_what_would_differ_is_left_alone(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    module = load(description(save_tiny(tmp_path, family, **changes)), torch.device("cpu"))
    assert fuse(module, 64) is None


def test_fusing_keeps_every_weight_once(tmp_path: Path) -> None:
    """The module's weights become views with unchanged values, and a tied head stays tied."""
    found = description(save_tiny(tmp_path, "llama-tied"))
    module = load(found, torch.device("cpu"))
    before = {name: p.clone() for name, p in module.named_parameters()}
    form = fuse(module, 64)
    assert form is not None and form.embedding is form.head
    assert module.lm_head.weight is module.model.embed_tokens.weight
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    held = [form.head]
    for layer in form.stack.layers:
        held += [layer.qkv, layer.output, layer.gate_up, layer.down]
    storages = {t.untyped_storage().data_ptr() for t in held}
    matrices = [p for p in module.parameters() if p.dim() == 2]
    assert {p.untyped_storage().data_ptr() for p in matrices} == storages
    assert sum(p.numel() for p in matrices) == sum(t.numel() for t in held)


@pytest.mark.skipif(
    not pays_to_pack(torch.float32), reason="weights in fp32 are packed on AMD processors alone"
)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_what_a_cpu_packs_the_module_gives_up(family: str, tmp_path: Path) -> None:
    """The head is kept, because drafts borrow it and a tied embedding is looked up in it."""
    module = load(description(save_tiny(tmp_path, family, **WIDE)), torch.device("cpu"))
    before = {name: p.clone() for name, p in module.named_parameters()}
    form = fuse(module, 64)
    assert form is not None
    given_up = {name for name, p in module.named_parameters() if p.isnan().all()}
    layers = range(len(module.model.layers))
    both = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in layers for part in ("gate", "up")]
    assert given_up == set(both)
    for name, parameter in module.named_parameters():
        assert parameter.shape == before[name].shape
        assert name in given_up or torch.equal(parameter, before[name]), name
    # Only weights that are kept in both forms are held twice.
    numbers = sum(p.numel() for p in module.parameters())
    tables = form.cos.numel() + form.sin.numel()
    held = PagedModel(module, KVCache([], 0, 16, torch.float32, form.cos.device), fused=form)
    stand_ins = len(layers)
    assert sum(held.storages.values()) == 4 * (numbers + tables + stand_ins) + bytes_held_twice(
        module
    ) + 4 * sum(b.numel() for b in module.buffers())
