"""An EAGLE-3 head (Li et al., arXiv 2503.01840) with training-time test.

Row t reads the target's hidden states of token t and the embedding of token t + 1; its output
predicts token t + 2. Row t of link j ends a chain of j rows that read the outputs of the rows
before them, after true rows up to t - j. The target's embedding and head serve the head: over the
whole vocabulary no token is out of reach, and its file holds one layer only. Legend: T = B * N
tokens, H width, D features of an attention head.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators.attention import Layout, chained, parts_for
from scripts.speculators.kinds.base import Options
from scripts.speculators.target import Reading, Target


@dataclass(frozen=True)
class Shape:
    """A head's settings. layers: of the target, whose inputs it reads."""

    layers: tuple[int, ...]
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-5
    base: float = 10000.0


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
        width, queries = shape.hidden, shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.input_layernorm = Norm(width, shape.eps)
        self.hidden_norm = Norm(width, shape.eps)
        self.post_attention_layernorm = Norm(width, shape.eps)
        self.self_attn = Projections(
            q_proj=(queries, 2 * width),
            k_proj=(keys, 2 * width),
            v_proj=(keys, 2 * width),
            o_proj=(width, queries),
        )
        self.mlp = Projections(
            gate_proj=(shape.inner, width),
            up_proj=(shape.inner, width),
            down_proj=(width, shape.inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


class Head(nn.Module):
    """The head's weights: fc, one layer, and the norm before the target's head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)

    @torch.no_grad()
    def start_from(self, layer: Any, norm: Any) -> bool:
        """Begin as the target's last layer over its last features, blind to the embedding.

        Does nothing, and returns False, for layers that are not of the llama kind or size.
        """
        width, own = self.shape.hidden, self.layers[0]
        try:
            source = {n: p for n, p in layer.named_parameters()}
            taken = {
                f"self_attn.{n}_proj": source[f"self_attn.{n}_proj.weight"].float() for n in "qkvo"
            } | {
                f"mlp.{n}_proj": source[f"mlp.{n}_proj.weight"].float()
                for n in ("gate", "up", "down")
            }
            norms = source["input_layernorm.weight"], source["post_attention_layernorm.weight"]
        except KeyError:
            return False
        inner = taken["mlp.gate_proj"].shape[0]
        queries = self.shape.heads * self.shape.head_dim
        if taken["self_attn.q_proj"].shape != (queries, width) or inner > self.shape.inner:
            return False
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -width:] += torch.eye(width)
        for name, weight in taken.items():
            part, leaf = name.split(".")
            into = getattr(getattr(own, part), leaf).weight
            if leaf in ("q_proj", "k_proj", "v_proj"):
                into[:, width:] = weight
            elif leaf == "down_proj":
                into[:, :inner] = weight
            else:
                into[: weight.shape[0]] = weight
        own.hidden_norm.weight.copy_(norms[0].float())
        own.post_attention_layernorm.weight.copy_(norms[1].float())
        self.norm.weight.copy_(norm.weight.float())
        return True

    def outputs(
        self, features: Tensor, following: Tensor, position: Tensor, layout: Layout, steps: int
    ) -> list[Tensor]:
        """Outputs [T, H] of `steps` chained steps, before the norm.

        features: [T, n * H]. following: [T, H], the embedding of the token after each row.
        position: [T], in its text. Row t of step j means something from its text's row j on.
        """
        shape, layer = self.shape, self.layers[0]
        embeds = layer.input_layernorm(following)
        turns = self.turns(position)
        parts = parts_for(features.device)
        hidden = self.fc(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for step in range(steps):
            if step:
                hidden = outs[-1].roll(1, 0)
            x = torch.cat((embeds, layer.hidden_norm(hidden)), -1)
            q, k, v = (
                getattr(layer.self_attn, f"{n}_proj")(x).unflatten(-1, (-1, shape.head_dim))
                for n in "qkv"
            )
            keys.append(turned(k, turns))
            values.append(v)
            scale = shape.head_dim**-0.5
            mixed = chained(turned(q, turns), keys, values, layout, scale, parts)
            hidden = hidden + layer.self_attn.o_proj(mixed.flatten(1))
            hidden = hidden + layer(layer.post_attention_layernorm(hidden))
            outs.append(hidden)
        return outs

    def turns(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D / 2] of rows at `position` [T]."""
        half = self.shape.head_dim // 2
        rate = self.shape.base ** -(torch.arange(half, device=position.device) / half)
        angle = position[:, None, None] * rate
        return angle.cos(), angle.sin()


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embeddings of x [T, heads, D]."""
    cos, sin = (t.to(x.dtype) for t in turns)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Eagle3:
    """A head in training: it reads features at one scale, which is folded into `fc` when saved."""

    name = "eagle3"
    shift = 1
    fade = 0.8

    def __init__(self, target: Target, options: Options) -> None:
        config, last = target.config, target.num_layers - 1
        layers = options.layers or tuple(sorted({min(2, last), target.num_layers // 2, last}))
        heads = config.num_attention_heads
        self.shape = Shape(
            layers=layers,
            hidden=target.embedding.shape[1],
            inner=options.inner or config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=target.vocab_size,
        )
        self.feature_layers = layers
        self.num_links = options.links
        self.vocabulary = options.vocabulary
        self.target = target
        self.module: Head = Head(self.shape)
        decoder = target.module.get_decoder()
        if not options.is_blank:
            decoder_cpu = [decoder.layers[-1], decoder.norm]
            self.module.start_from(*decoder_cpu)
        self.scales = [1.0] * len(layers)

    def prepare(self, reading: Reading) -> None:
        """Take the features' scales from a batch: the median row's, since a text's first row may be
        a hundred times as large as others."""
        sizes = [f.float().square().mean(-1).sqrt().median() for f in reading.features]
        self.scales = [1 / float(size) for size in sizes]

    def links(self, reading: Reading) -> list[Tensor]:
        scaled = [f * s for f, s in zip(reading.features, self.scales, strict=True)]
        features = torch.cat(scaled, -1).flatten(0, 1)
        following = F.embedding(reading.rows.ids.flatten().roll(-1), self.target.embedding)
        position = reading.rows.position.flatten()
        outs = self.module.outputs(features, following, position, reading.layout, self.num_links)
        return [self.module.norm(out) for out in outs]

    def state(self) -> dict[str, Any]:
        return {"scales": self.scales}

    def restore(self, state: dict[str, Any]) -> None:
        self.scales = state["scales"]

    @torch.no_grad()
    def save(self, target: Target, often: Tensor, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: t.detach().float() for n, t in self.module.state_dict().items()}
        width = self.shape.hidden
        tensors["fc.weight"] = tensors["fc.weight"].clone()
        for i, scale in enumerate(self.scales):
            tensors["fc.weight"][:, i * width : (i + 1) * width] *= scale
        stored = {n: t.cpu().bfloat16().contiguous() for n, t in tensors.items()}
        count = self.shape.vocab
        if self.vocabulary is not None and self.vocabulary < count:
            count = self.vocabulary
            ids = often.cpu()[:count]
            stored["lm_head.weight"] = target.head[ids.to(target.device)].cpu().bfloat16()
            stored["d2t"] = ids - torch.arange(count)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = config_of(
            self.shape,
            Path(target.name).name,
            list(target.config.architectures or []),
            target.config.max_position_embeddings,
            count,
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def config_of(
    shape: Shape, target: str, architectures: list[str], context: int, vocabulary: int
) -> dict[str, Any]:
    """The config in the form of speculators; ids count inputs of layers.

    target and architectures: the target's name and its classes' names. context: tokens it may read.
    vocabulary: ids that the head proposes.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {
                "name_or_path": target,
                "architectures": architectures,
            },
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
            "max_position_embeddings": context,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.base},
        },
        "draft_vocab_size": vocabulary,
        "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def make(target: Target, options: Options) -> Eagle3:
    return Eagle3(target, options)
