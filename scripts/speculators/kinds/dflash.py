"""A DFlash drafter (z-lab, arXiv 2602.06036): masks after an anchor, decided in one pass.

Keys and values of the context come from the target's features; rows of the block see the context
before their anchor and each other. Anchors are drawn from the texts, and rows are weighted by
exp(-i / 4) as in the paper for blocks of 8. The row at an anchor decides nothing. The drafter uses
the target's embedding and head. Legend: B rows of texts, N tokens a row, Q rows of blocks for each,
F numbers of the features, H width.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators.blocks import Blocks, attend, drawn
from scripts.speculators.features import folded, scales_of, side_by_side, usual, write
from scripts.speculators.kinds.base import Kind, Link, Options
from scripts.speculators.layer import Layer, Norm, Shape, settings_of, turned
from scripts.speculators.markov import SMALL_HEADS, Heads
from scripts.speculators.store import plain_tensors
from scripts.speculators.target import Reading, Target
from specdec_cli.models.resolve import model_place

OPTIONS = ("layers", "inner", "depth", "block", "anchors", "blank", "start")


class Backbone(nn.Module):
    """The drafter's weights, under published names."""

    def __init__(self, shape: Shape, depth: int) -> None:
        super().__init__()
        width = shape.hidden
        self.fc = nn.Linear(len(shape.layers) * width, width, bias=False)
        self.hidden_norm = Norm(width, shape.eps)
        self.layers = nn.ModuleList(Layer(shape, width, has_norms=True) for _ in range(depth))
        self.norm = Norm(width, shape.eps)

    @torch.no_grad()
    def start_from(self, decoder: Any) -> None:
        """Begin with the weights of the target's last layers, which then read its last features as
        context, if they are of the llama kind and size."""
        width, theirs = self.norm.weight.shape[0], list(decoder.layers)[-len(self.layers) :]
        for own, layer in zip(self.layers, theirs, strict=True):
            if not own.start_from(layer, 0):
                return
            own.input_layernorm.weight.copy_(layer.input_layernorm.weight.float())
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -width:] += torch.eye(width)
        self.hidden_norm.weight.copy_(theirs[-1].input_layernorm.weight.float())
        self.norm.weight.copy_(decoder.norm.weight.float())

    def forward(self, features: Tensor, embedded: Tensor, blocks: Blocks) -> Tensor:
        """Normed rows [B, Q, H]. features: [B, N, F]. embedded: [B, Q, H], tokens and masks."""
        context, stream = self.hidden_norm(self.fc(features)), embedded
        first = self.layers[0]
        true, own = first.turns(blocks.reading.rows.position), first.turns(blocks.position)
        scale = first.shape.head_dim**-0.5
        for layer in self.layers:
            x = layer.input_layernorm(stream)
            keys = turned(layer.made("k", context), true), turned(layer.made("k", x), own)
            values = layer.made("v", context), layer.made("v", x)
            q = turned(layer.made("q", x), own)
            mixed = attend(blocks, q, torch.cat(keys, 1), torch.cat(values, 1), scale)
            stream = layer.passed(stream, mixed)
        found: Tensor = self.norm(stream)
        return found


class DFlash(Kind):
    """A drafter in training. heads: DSpark's; with them the row at an anchor decides the first
    token."""

    name = "dflash"
    fade = math.exp(-1 / 4)
    kept = "scales", "mask"

    def __init__(self, target: Target, options: Options, heads: Heads | None = None) -> None:
        read = tuple(options.layers) or usual(target.num_layers)
        if min(read) < 1:
            raise ValueError("--layers: a drafter of this form reads outputs of layers, 1 at least")
        inner = options.inner or target.config.intermediate_size
        sizes = {"inner": inner, "vocab": target.vocab_size, "layers": read}
        self.shape = Shape.turning(target.config, **sizes)
        self.feature_layers = read
        self.block, self.anchors, self.mask = options.block, options.anchors, options.mask
        self.heads, self.first = heads, 1 if heads is None else 0
        self.num_links = options.block - self.first
        self.target = target
        self.module: Backbone = Backbone(self.shape, options.depth)
        if not options.blank:
            self.module.start_from(target.module.get_decoder())
        if heads is not None:
            heads.add_to(self.module, self.shape)
        self.scales = [1.0] * len(read)
        self.start = options.start

    def prepare(self, reading: Reading) -> None:
        self.scales = scales_of(reading)
        if self.start is not None:
            self.begin(self.start)

    def begin(self, name: str) -> None:
        """Take the weights and the mask of a stored drafter. A drafter without small heads leaves
        those of DSpark. Raises `ValueError` if its form, sizes or layers are others."""
        tensors, config = plain_tensors(model_place(name, None))
        own = config.get("dflash_config", {})
        layers = [i - 1 for i in self.feature_layers]
        if own.get("target_layer_ids") != layers or "fc.weight" not in tensors:
            raise ValueError(f"--start: {name} is no drafter of this form over the layers {layers}")
        scales = [1 / scale for scale in self.scales]
        tensors["fc.weight"] = folded(tensors["fc.weight"].float(), scales)
        if self.heads is None:
            tensors = {name: t for name, t in tensors.items() if not name.startswith(SMALL_HEADS)}
        try:
            self.module.load_state_dict(tensors)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            raise ValueError(f"--start: {name}: {lines[0]}") from error
        self.mask = own["mask_token_id"]

    def rows(self, reading: Reading, blocks: Blocks) -> Tensor:
        """Normed rows [B, Q, H]."""
        ids = reading.rows.ids.gather(1, blocks.column).masked_fill(blocks.place > 0, self.mask)
        features = side_by_side(reading, self.scales)
        found: Tensor = self.module(features, F.embedding(ids, self.target.embedding), blocks)
        return found

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        counts = [self.anchors] * self.block
        blocks = drawn(reading, counts, 0, generator, is_causal=False, sees_anchor=False)
        goal, weight = blocks.goals(-self.first)
        found = self.rows(reading, blocks).flatten(0, 1)
        place = (blocks.place - self.first).repeat(len(reading.rows))
        decides = place >= 0
        link = Link(found[decides], place[decides], weight[decides], goal[decides])
        if self.heads is None:
            return [link]
        return [self.heads.judged(self.module, link, reading.rows.ids.flatten())]

    @torch.no_grad()
    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        tensors = dict(self.module.state_dict())
        tensors["fc.weight"] = folded(tensors["fc.weight"], self.scales)
        config: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dtype": "bfloat16"}
        context = target.config.max_position_embeddings
        config |= settings_of(self.shape, context, len(self.module.layers), "qwen3")
        config |= {"num_target_layers": target.num_layers, "block_size": self.block}
        outputs = [i - 1 for i in self.feature_layers]
        own = {"mask_token_id": self.mask, "target_layer_ids": outputs}
        if self.heads is not None:
            config["architectures"] = ["DSparkDraftModel"]
            own |= self.heads.settings()
        config["dflash_config"] = own
        write(folder, tensors, config)


def make(target: Target, options: Options) -> DFlash:
    return DFlash(target, options)
