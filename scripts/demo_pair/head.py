"""The EAGLE-3 head of the demo target: its arithmetic over whole texts, and its chains.

Row t reads the target's hidden states of token t and the embedding of token t + 1; its output
predicts token t + 2 (Li et al., arXiv 2503.01840). Legend: B texts, N rows, H
width, V ids.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from scripts.speculators.attention import Layout
from scripts.speculators.kinds.eagle3 import Head as Weights
from scripts.speculators.kinds.eagle3 import config_of
from scripts.speculators.layer import Shape


def head_shape(layers: tuple[int, ...], inner: int) -> Shape:
    """The settings of a head for the demo target."""
    sizes = {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": 4096}
    return Shape(inner=inner, layers=layers, **sizes)


@torch.no_grad()
def read_target(
    target: LlamaForCausalLM, ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Features [B, T, n * H] and next-token logits [B, T, V] of the target for `ids` [B, T].

    No mask is used, as in evaluate.py, so that attention takes its causal fast path.
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


class Head(Weights):
    """The head over whole texts. It uses the target's embedding as embedding and as head."""

    def __init__(self, shape: Shape, embedding: Tensor) -> None:
        super().__init__(shape)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.embedding)

    def chain(self, features: Tensor, following: Tensor, steps: int) -> list[Tensor]:
        """Outputs [B, N, H] of `steps` chained steps; row t of step j has no meaning for t < j.

        features: [B, N, n * H]. following: [B, N], the token after each row. Row t of step j ends a
        chain: rows up to t - j are true ones, and the j rows after them read outputs of the rows
        before. So the chain's tokens come from `following`. Row t of every step predicts token t +
        2.
        """
        layout = Layout.of(torch.zeros_like(following))
        position = torch.arange(following.shape[1], device=following.device)
        position = position.repeat(len(following))
        embeds = F.embedding(following.flatten(), self.embedding)
        outs = self.outputs(features.flatten(0, 1), embeds, position, layout, steps)
        return [out.view(*following.shape, -1) for out in outs]


def shape_of(config: dict[str, Any]) -> Shape:
    """The settings in a config that `config_of` wrote."""
    body = config["transformer_layer_config"]
    return Shape(
        layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        inner=body["intermediate_size"],
        hidden=body["hidden_size"],
        heads=body["num_attention_heads"],
        kv_heads=body["num_key_value_heads"],
        head_dim=body["head_dim"],
        vocab=body["vocab_size"],
        eps=body["rms_norm_eps"],
        base=body["rope_parameters"]["rope_theta"],
    )


def save(head: Head, folder: Path) -> None:
    """Write bf16 weights and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().bfloat16().contiguous() for n, t in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(head.shape, "demo:target", ["LlamaForCausalLM"], 2048, head.shape.vocab)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path, embedding: Tensor) -> Head:
    """A saved head in fp32, on the embedding's device."""
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    head = Head(shape, embedding)
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return head.to(embedding.device).eval()
