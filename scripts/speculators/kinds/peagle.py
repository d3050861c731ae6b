"""A P-EAGLE head: EAGLE-3's true rows, and rows of masks in place of its further steps.

The last true row decides the first proposal. Each mask after it, which reads `mask_hidden` instead
of features, decides one more. Masks see true rows up to their anchor and the masks before them.
Fewer anchors have deep masks, as in conditional drop (PARD, arXiv 2504.18583). Legend: B rows of
texts, N tokens a row, Q rows of masks for each, F numbers of the features, H width.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators.blocks import Blocks, attend_both, drawn, thinned
from scripts.speculators.features import folded, scales_of, side_by_side, usual, write
from scripts.speculators.kinds.base import Kind, Link, Options, chained
from scripts.speculators.layer import Layer, Norm, Shape, config_of, turned
from scripts.speculators.target import Reading, Target

OPTIONS = ("layers", "inner", "depth", "block", "anchors", "blank")


class Head(nn.Module):
    """The head's weights, under the names of speculators. The first layer reads the embedding."""

    def __init__(self, shape: Shape, depth: int) -> None:
        super().__init__()
        width, features = shape.hidden, len(shape.layers) * shape.hidden
        self.fc = nn.Linear(features, width, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, features))
        self.layers = nn.ModuleList(Layer(shape, width * (1 + (i == 0))) for i in range(depth))
        self.layers[0].hidden_norm = Norm(width, shape.eps)
        self.norm = Norm(width, shape.eps)

    @torch.no_grad()
    def start_from(self, decoder: Any) -> None:
        """Begin with the weights of the target's last layers over its last features, without effect
        of the embedding, if these are of the llama kind and size."""
        width, theirs = self.norm.weight.shape[0], list(decoder.layers)[-len(self.layers) :]
        for i, (own, layer) in enumerate(zip(self.layers, theirs, strict=True)):
            if not own.start_from(layer, width * (i == 0)):
                return
            norm = own.input_layernorm if i else own.hidden_norm
            norm.weight.copy_(layer.input_layernorm.weight.float())
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -width:] += torch.eye(width)
        self.norm.weight.copy_(decoder.norm.weight.float())

    def forward(self, features: Tensor, embedded: Tensor, blocks: Blocks) -> Tensor:
        """Normed rows [B, N + Q, H]. features: [B, N, F]. embedded: [B, N + Q, H], the token after
        each true row, then masks."""
        masks = self.mask_hidden.expand(len(features), blocks.column.shape[1], -1)
        hidden = self.fc(torch.cat((features, masks.to(features.dtype)), 1))
        turns = self.layers[0].turns(blocks.positions)
        for i, layer in enumerate(self.layers):
            x = layer.input_layernorm(hidden if i else embedded)
            if not i:
                x = torch.cat((x, layer.hidden_norm(hidden)), -1)
            q, k = (turned(layer.made(n, x), turns) for n in "qk")
            scale = layer.shape.head_dim**-0.5
            mixed = attend_both(blocks, q, k, layer.made("v", x), scale)
            hidden = layer.passed(hidden, mixed)
        found: Tensor = self.norm(hidden)
        return found


class PEagle(Kind):
    """A head in training."""

    name = "peagle"
    fade = 0.9
    kept = "scales", "mask"

    def __init__(self, target: Target, options: Options) -> None:
        read = tuple(options.layers) or usual(target.num_layers)
        inner = options.inner or target.config.intermediate_size
        sizes = {"inner": inner, "vocab": target.vocab_size, "layers": read}
        self.shape = Shape.turning(target.config, **sizes)
        self.feature_layers = read
        self.num_links, self.anchors, self.mask = options.block, options.anchors, options.mask
        self.target = target
        self.module: Head = Head(self.shape, options.depth)
        if not options.blank:
            self.module.start_from(target.module.get_decoder())
        self.scales = [1.0] * len(read)

    def prepare(self, reading: Reading) -> None:
        self.scales = scales_of(reading)

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        counts = thinned(self.anchors, self.num_links - 1)
        blocks = drawn(reading, counts, 1, generator, is_causal=True, sees_anchor=True)
        rows = reading.rows
        masks = torch.full_like(blocks.column, self.mask)
        ids = torch.cat((rows.ids.roll(-1, 1), masks), 1)
        embedded = F.embedding(ids, self.target.embedding)
        found = self.module(side_by_side(reading, self.scales), embedded, blocks)
        true, deep = found.split((rows.ids.shape[1], masks.shape[1]), 1)
        goal, weight = blocks.goals(1)
        place = blocks.place.repeat(len(rows))
        first = chained([true.flatten(0, 1)], rows, 1)
        return [*first, Link(deep.flatten(0, 1), place, weight, goal)]

    @torch.no_grad()
    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        tensors = dict(self.module.state_dict())
        tensors["fc.weight"] = folded(tensors["fc.weight"], self.scales)
        tensors["mask_hidden"] = folded(tensors["mask_hidden"], [1 / s for s in self.scales])
        config = config_of(
            "peagle",
            self.shape,
            Path(target.name).name,
            list(target.config.architectures or []),
            target.config.max_position_embeddings,
            len(self.module.layers),
        )
        config |= {
            "architectures": ["PEagleDraftModel"],
            "draft_vocab_size": self.shape.vocab,
            "target_hidden_size": self.shape.hidden,
            "eagle_aux_hidden_state_layer_ids": list(self.shape.layers),
            "mask_token_id": self.mask,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        write(folder, tensors, config)


def make(target: Target, options: Options) -> PEagle:
    return PEagle(target, options)
