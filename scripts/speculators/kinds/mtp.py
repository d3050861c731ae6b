"""A module for multi-token prediction (DeepSeek-V3, arXiv 2412.19437) with training-time test.

Row t joins the embedding of token t + 1 and the target's hidden state of token t after its final
norm, each normed. A layer of the target's sizes and a norm follow, and the target's head predicts
token t + 2. A further step reads the output of the step before, after that norm. There is one
module, which runs again and again. Legend: T = B * N tokens, H width.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators.attention import Layout
from scripts.speculators.features import write
from scripts.speculators.kinds.base import Kind, Link, Options, chained
from scripts.speculators.layer import Layer, Norm, Shape, config_of
from scripts.speculators.target import Reading, Target

OPTIONS = ("links", "blank")


class Module(nn.Module):
    """The module's weights, under the names of speculators."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.token_layernorm = Norm(width, shape.eps)
        self.hidden_layernorm = Norm(width, shape.eps)
        self.final_layernorm = Norm(width, shape.eps)
        self.layer = Layer(shape, width)

    @torch.no_grad()
    def start_from(self, layer: Any, norm: Any) -> None:
        """Begin as the target's last layer over its last hidden states, nearly blind to the
        embedding, where that layer is of the llama kind and size."""
        if not self.layer.start_from(layer, 0):
            return
        width = self.layer.shape.hidden
        self.input_proj.weight.mul_(0.2)
        self.input_proj.weight[:, width:] += torch.eye(width)
        self.layer.input_layernorm.weight.copy_(layer.input_layernorm.weight.float())
        self.final_layernorm.weight.copy_(norm.weight.float())

    def outputs(
        self, features: Tensor, following: Tensor, position: Tensor, layout: Layout, steps: int
    ) -> list[Tensor]:
        """Outputs [T, H] of `steps` chained steps, before the final norm; see `Layer.chain`.

        features: [T, H]. following: [T, H], the embedding of the token after each row.
        """
        embeds = self.token_layernorm(following)

        def begin(before: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = features if before is None else self.final_layernorm(before)
            joined = torch.cat((embeds, self.hidden_layernorm(hidden)), -1)
            stream = self.input_proj(joined)
            return stream, self.layer.input_layernorm(stream)

        return self.layer.chain(steps, begin, position, layout)


class Mtp(Kind):
    """A module in training."""

    name = "mtp"
    fade = 0.8

    def __init__(self, target: Target, options: Options) -> None:
        self.shape = Shape.turning(target.config, vocab=target.vocab_size)
        self.feature_layers = (target.num_layers,)
        self.num_links = options.links
        self.target = target
        self.module: Module = Module(self.shape)
        decoder = target.module.get_decoder()
        if not options.blank:
            self.module.start_from(decoder.layers[-1], decoder.norm)

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        (features,) = reading.features
        following = F.embedding(reading.rows.ids.flatten().roll(-1), self.target.embedding)
        position = reading.rows.position.flatten()
        given = features.flatten(0, 1), following, position, reading.layout, self.num_links
        outs = [self.module.final_layernorm(out) for out in self.module.outputs(*given)]
        return chained(outs, reading.rows, 1)

    @torch.no_grad()
    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        tensors = {
            f"mtp_layers.0.{name.removeprefix('layer.')}": t
            for name, t in self.module.state_dict().items()
        }
        config = config_of(
            "mtp",
            self.shape,
            Path(target.name).name,
            list(target.config.architectures or []),
            target.config.max_position_embeddings,
        )
        write(folder, tensors, config | {"dtype": "bfloat16"})


def make(target: Target, options: Options) -> Mtp:
    return Mtp(target, options)
