"""The EAGLE-3 head of the demo target: its arithmetic over whole texts, and its chains.

Row t reads the target's hidden states of token t and the embedding of token t + 1; its output
predicts token t + 2 (Li et al., arXiv 2503.01840). Dense, without a cache. Knows nothing of
`specdec_cli`. Legend: B texts, N rows, H width, V ids.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """A head's settings. layers: of the target, whose inputs it reads."""

    layers: tuple[int, ...] = (2, 5, 7)
    inner: int = 1024
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    eps: float = 1e-5
    base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@torch.no_grad()
def read_target(
    target: LlamaForCausalLM, ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Features [B, T, n * H] and next-token logits [B, T, V] of the target for `ids` [B, T].

    Without a mask, as in evaluate.py, so that attention takes its causal fast path.
    """
    x = target.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = target.model.rotary_emb(x, positions)
    found = []
    for index, layer in enumerate(target.model.layers):
        if index in layers:
            found.append(x)
        x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return torch.cat(found, -1), target.lm_head(target.model.norm(x))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class Projections(nn.Module):
    """Bias-free products by name; `sizes` are (outputs, inputs)."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (outputs, inputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))


class Layer(nn.Module):
    """The one layer; its parameters have the names of published heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, keys = shape.hidden, shape.kv_heads * shape.head_dim
        self.input_layernorm = Norm(width, shape.eps)
        self.hidden_norm = Norm(width, shape.eps)
        self.post_attention_layernorm = Norm(width, shape.eps)
        self.self_attn = Projections(
            q_proj=(width, 2 * width),
            k_proj=(keys, 2 * width),
            v_proj=(keys, 2 * width),
            o_proj=(width, width),
        )
        self.mlp = Projections(
            gate_proj=(shape.inner, width),
            up_proj=(shape.inner, width),
            down_proj=(width, shape.inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.down_proj(F.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))


class Head(nn.Module):
    """The head over whole texts. The target's embedding serves it as embedding and as head."""

    def __init__(self, shape: Shape, embedding: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)

    @torch.no_grad()
    def start_from(self, target: LlamaForCausalLM) -> None:
        """Begin as the target's last layer over its last features, blind to the embedding."""
        width, source, own = self.shape.hidden, target.model.layers[-1], self.layers[0]
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -width:] += torch.eye(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(own.self_attn, name).weight
            weight[:, width:] = getattr(source.self_attn, name).weight
        own.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
        inner = source.mlp.gate_proj.weight.shape[0]
        for name in ("gate_proj", "up_proj"):
            getattr(own.mlp, name).weight[:inner] = getattr(source.mlp, name).weight
        own.mlp.down_proj.weight[:, :inner] = source.mlp.down_proj.weight
        own.hidden_norm.weight.copy_(source.input_layernorm.weight)
        own.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        self.norm.weight.copy_(target.model.norm.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.embedding)

    def chain(self, features: Tensor, following: Tensor, steps: int) -> list[Tensor]:
        """Outputs [B, N, H] of `steps` chained steps; row t of step j means nothing for t < j.

        features: [B, N, n * H]. following: [B, N], the token after each row. Row t of step j ends
        a chain: rows up to t - j are true ones, and the j rows after them read outputs of the
        rows before, so `following` teaches the chain its tokens. It predicts token t + 2, as row
        t of every step does.
        """
        shape, layer = self.shape, self.layers[0]
        size = following.shape[1]
        embeds = layer.input_layernorm(F.embedding(following, self.embedding))
        turns = self.turns(size, features.device)
        ago = torch.arange(size, device=features.device)
        ago = ago[:, None] - ago
        hidden = self.fc(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for step in range(steps):
            if step:
                hidden = delayed(outs[-1], 1)
            x = torch.cat((embeds, layer.hidden_norm(hidden)), -1)
            q, k, v = (
                getattr(layer.self_attn, f"{n}_proj")(x)
                .unflatten(-1, (-1, shape.head_dim))
                .transpose(1, 2)
                for n in "qkv"
            )
            q, k = turned(q, turns), turned(k, turns)
            groups = shape.heads // shape.kv_heads
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            mixed = attended(q * shape.head_dim**-0.5, keys, values, ago < step)
            hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer(layer.post_attention_layernorm(hidden))
            outs.append(hidden)
        return outs

    def turns(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = self.shape.head_dim // 2
        rate = self.shape.base ** -(torch.arange(half, device=device) / half)
        angle = torch.arange(size, device=device)[:, None] * rate
        return angle.cos(), angle.sin()


def delayed(x: Tensor, rows: int, dim: int = 1) -> Tensor:
    """`x` moved down by `rows` along `dim`, with zeros above."""
    if not rows:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - rows)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, rows)), kept), dim)


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embeddings of x [B, heads, N, D]."""
    cos, sin = (t.to(x.dtype) for t in turns)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor], hidden: Tensor) -> Tensor:
    """Attention of one step's rows over true rows and over the rows of their own chain.

    q, keys and values: [B, heads, N, D], one entry a step. hidden: [N, N], true rows not seen.
    """
    step = len(keys) - 1
    scores = [(q @ keys[0].transpose(2, 3)).masked_fill(hidden, float("-inf"))]
    # A chain's row of step i lies step - i rows above.
    own = [delayed(keys[i], step - i, 2) for i in range(1, step + 1)]
    scores += [(q * k).sum(-1, keepdim=True) for k in own]
    weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
    size = q.shape[2]
    mixed = weights[..., :size] @ values[0]
    for i in range(1, step + 1):
        at = size + i - 1
        mixed = mixed + weights[..., at : at + 1] * delayed(values[i], step - i, 2)
    return mixed


def config_of(shape: Shape) -> dict[str, Any]:
    """The config in the form of speculators; ids count inputs of layers."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "demo:target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.eps,
            "vocab_size": shape.vocab,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.base},
        },
        "draft_vocab_size": shape.vocab,
        "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def shape_of(config: dict[str, Any]) -> Shape:
    """The settings in a config that `config_of` wrote."""
    body = config["transformer_layer_config"]
    return Shape(
        layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        inner=body["intermediate_size"],
        hidden=body["hidden_size"],
        heads=body["num_attention_heads"],
        kv_heads=body["num_key_value_heads"],
        vocab=body["vocab_size"],
        eps=body["rms_norm_eps"],
        base=body["rope_parameters"]["rope_theta"],
    )


def save(head: Head, folder: Path) -> None:
    """Write bf16 weights and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().bfloat16().contiguous() for n, t in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(head.shape), indent=2) + "\n")


def load(folder: Path, embedding: Tensor) -> Head:
    """A saved head in fp32, on the embedding's device."""
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    head = Head(shape, embedding)
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return head.to(embedding.device).eval()
