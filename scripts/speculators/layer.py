"""A decoder layer of the llama kind in training, whose rows are chained (training-time test).

Legend: T = B * N tokens, H width, D features of an attention head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators.attention import Layout, chained, parts_for


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer. eps: that of its norms. base: that of its rotary embedding. layers:
    those of the target whose inputs a head reads."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-5
    base: float = 10000.0
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any, **changes: Any) -> "Shape":
        """The sizes of a target's layers, from transformers' config of it."""
        heads = config.num_attention_heads
        sizes = {
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "vocab": config.vocab_size,
        }
        return cls(**sizes | changes)

    @classmethod
    def turning(cls, config: Any, **changes: Any) -> "Shape":
        """As `of`, with the target's eps of norms and rotary embedding too. Raises `ValueError` for
        a kind of rotary embedding that is not built here.
        """
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"layers for rope_type {rope['rope_type']} are not built here")
        return cls.of(config, eps=config.rms_norm_eps, base=rope["rope_theta"], **changes)


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
    """One layer. Its parameters have the names of published ones. reads: the width of the rows that
    queries, keys and values are made of. has_norms: whether each head's queries and keys are
    normed."""

    def __init__(self, shape: Shape, reads: int, has_norms: bool = False) -> None:
        super().__init__()
        self.shape = shape
        width, queries = shape.hidden, shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.input_layernorm = Norm(width, shape.eps)
        self.post_attention_layernorm = Norm(width, shape.eps)
        self.self_attn = Projections(
            q_proj=(queries, reads),
            k_proj=(keys, reads),
            v_proj=(keys, reads),
            o_proj=(width, queries),
        )
        if has_norms:
            self.self_attn.q_norm = Norm(shape.head_dim, shape.eps)
            self.self_attn.k_norm = Norm(shape.head_dim, shape.eps)
        self.mlp = Projections(
            gate_proj=(shape.inner, width),
            up_proj=(shape.inner, width),
            down_proj=(width, shape.inner),
        )

    @torch.no_grad()
    def start_from(self, layer: Any, first: int) -> bool:
        """Begin with the weights of a target's layer. first: the place of its row in ours. A
        narrower MLP takes the features with the largest weights. Returns False, without a change,
        for layers that are not of the llama kind or size.
        """
        shape = self.shape
        try:
            source = {n: p for n, p in layer.named_parameters()}
            taken = {
                f"self_attn.{n}_proj": source[f"self_attn.{n}_proj.weight"].float() for n in "qkvo"
            } | {
                f"mlp.{n}_proj": source[f"mlp.{n}_proj.weight"].float()
                for n in ("gate", "up", "down")
            }
            after = source["post_attention_layernorm.weight"].float()
        except KeyError:
            return False
        queries = shape.heads * shape.head_dim
        if taken["self_attn.q_proj"].shape != (queries, shape.hidden):
            return False
        weighed = taken["mlp.up_proj"].norm(dim=1) * taken["mlp.down_proj"].norm(dim=0)
        kept = weighed.topk(min(len(weighed), shape.inner)).indices.sort().values
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            taken[name] = taken[name][kept]
        taken["mlp.down_proj"] = taken["mlp.down_proj"][:, kept]
        inner = len(kept)
        for name, weight in taken.items():
            part, leaf = name.split(".")
            into = getattr(getattr(self, part), leaf).weight
            if leaf in ("q_proj", "k_proj", "v_proj"):
                into[:, first : first + shape.hidden] = weight
            elif leaf == "down_proj":
                into[:, :inner] = weight
            else:
                into[: weight.shape[0]] = weight
        self.post_attention_layernorm.weight.copy_(after)
        return True

    def chain(
        self,
        steps: int,
        begin: Callable[[Tensor | None], tuple[Tensor, Tensor]],
        position: Tensor,
        layout: Layout,
    ) -> list[Tensor]:
        """Outputs [T, H] of `steps` chained steps.

        begin: makes the stream [T, H] and the input of attention [T, reads] from the outputs of the
        step before, each moved to the next row; it is called with None first. position: [T], that
        in the text. Row t of step j has a meaning from row j of its text on.
        """
        turns, scale = self.turns(position), self.shape.head_dim**-0.5
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for _ in range(steps):
            hidden, x = begin(outs[-1].roll(1, 0) if outs else None)
            q, k, v = (self.made(n, x) for n in "qkv")
            keys.append(turned(k, turns))
            values.append(v)
            parts = parts_for(position.device)
            mixed = chained(turned(q, turns), keys, values, layout, scale, parts)
            outs.append(self.passed(hidden, mixed))
        return outs

    def made(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values [..., heads, D] of x [..., reads]; name: q, k or v."""
        found: Tensor = getattr(self.self_attn, f"{name}_proj")(x)
        found = found.unflatten(-1, (-1, self.shape.head_dim))
        norm = getattr(self.self_attn, f"{name}_norm", None)
        return found if norm is None else norm(found)

    def passed(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [..., H] from its stream and the output of attention [..., heads,
        D]."""
        hidden = hidden + self.self_attn.o_proj(mixed.flatten(-2))
        x = self.post_attention_layernorm(hidden)
        mlp = self.mlp
        return hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

    def turns(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, D / 2] of rows at `position` [...]."""
        half = self.shape.head_dim // 2
        rate = self.shape.base ** -(torch.arange(half, device=position.device) / half)
        angle = position[..., None, None] * rate
        return angle.cos(), angle.sin()


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embeddings of x [..., heads, D]."""
    cos, sin = (t.to(x.dtype) for t in turns)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def config_of(
    kind: str, shape: Shape, target: str, architectures: list[str], context: int, count: int = 1
) -> dict[str, Any]:
    """The config of a speculator of `kind` with `count` such layers, in the form of speculators.

    target and architectures: the target's name and its classes' names. context: tokens it may read.
    """
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {
                "name_or_path": target,
                "architectures": architectures,
            },
        },
        "transformer_layer_config": settings_of(shape, context, count),
    }


def settings_of(shape: Shape, context: int, count: int = 1, kind: str = "llama") -> dict[str, Any]:
    """The settings of `count` layers, as transformers names them."""
    return {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": count,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "vocab_size": shape.vocab,
        "max_position_embeddings": context,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.base},
    }
