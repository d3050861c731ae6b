"""An EAGLE-3 head (Li et al., arXiv 2503.01840) with training-time test.

Row t reads the target's hidden states of token t and the embedding of token t + 1; its output
predicts token t + 2. Row t of link j ends a chain of j rows that read the outputs of the rows
before them, after true rows up to t - j. The head uses the target's embedding and matrix of logits.
So it can propose every token, and its file holds one layer only. Legend: T = B * N tokens, H width,
D features of an attention head.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.speculators import layer as layers
from scripts.speculators.attention import Layout
from scripts.speculators.features import folded, scales_of, side_by_side, usual, write
from scripts.speculators.kinds.base import Kind, Link, Options, chained
from scripts.speculators.layer import Layer, Norm, Shape
from scripts.speculators.target import Reading, Target

OPTIONS = ("links", "layers", "inner", "vocabulary", "blank")


class Head(nn.Module):
    """The head's weights: fc, one layer, and the norm before the target's head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        layer = Layer(shape, 2 * shape.hidden)
        layer.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([layer])
        self.norm = Norm(shape.hidden, shape.eps)

    @torch.no_grad()
    def start_from(self, layer: Any, norm: Any) -> None:
        """Begin with the weights of the target's last layer over its last features, without effect
        of the embedding, if that layer is of the llama kind and size."""
        width, own = self.shape.hidden, self.layers[0]
        if not own.start_from(layer, width):
            return
        self.fc.weight.mul_(0.2)
        self.fc.weight[:, -width:] += torch.eye(width)
        own.hidden_norm.weight.copy_(layer.input_layernorm.weight.float())
        self.norm.weight.copy_(norm.weight.float())

    def outputs(
        self, features: Tensor, following: Tensor, position: Tensor, layout: Layout, steps: int
    ) -> list[Tensor]:
        """Outputs [T, H] of `steps` chained steps, before the norm; see `Layer.chain`.

        features: [T, n * H]. following: [T, H], the embedding of the token after each row.
        """
        layer = self.layers[0]
        embeds, first = layer.input_layernorm(following), self.fc(features)

        def begin(before: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = first if before is None else before
            return hidden, torch.cat((embeds, layer.hidden_norm(hidden)), -1)

        return layer.chain(steps, begin, position, layout)


class Eagle3(Kind):
    """A head in training. It reads features at one scale, which saving folds into `fc`."""

    name = "eagle3"
    fade = 0.8
    kept = ("scales",)

    def __init__(self, target: Target, options: Options) -> None:
        config = target.config
        read = tuple(options.layers) or usual(target.num_layers)
        inner = options.inner or config.intermediate_size
        self.shape = Shape.of(config, inner=inner, vocab=target.vocab_size, layers=read)
        self.feature_layers = read
        self.num_links = options.links
        self.vocabulary = options.vocabulary
        self.target = target
        self.module: Head = Head(self.shape)
        decoder = target.module.get_decoder()
        if not options.blank:
            decoder_cpu = [decoder.layers[-1], decoder.norm]
            self.module.start_from(*decoder_cpu)
        self.scales = [1.0] * len(read)

    def prepare(self, reading: Reading) -> None:
        self.scales = scales_of(reading)

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        features = side_by_side(reading, self.scales).flatten(0, 1)
        following = F.embedding(reading.rows.ids.flatten().roll(-1), self.target.embedding)
        position = reading.rows.position.flatten()
        outs = self.module.outputs(features, following, position, reading.layout, self.num_links)
        return chained([self.module.norm(out) for out in outs], reading.rows, 1)

    @torch.no_grad()
    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        tensors = dict(self.module.state_dict())
        tensors["fc.weight"] = folded(tensors["fc.weight"], self.scales)
        count = self.shape.vocab
        if self.vocabulary is not None and self.vocabulary < count:
            count = self.vocabulary
            ids = ranked.cpu()[:count].sort().values
            tensors["lm_head.weight"] = target.head[ids.to(target.device)]
            tensors["d2t"] = ids - torch.arange(count)
        config = config_of(
            self.shape,
            Path(target.name).name,
            list(target.config.architectures or []),
            target.config.max_position_embeddings,
            count,
        )
        write(folder, tensors, config)


def config_of(
    shape: Shape, target: str, architectures: list[str], context: int, vocabulary: int
) -> dict[str, Any]:
    """`layer.config_of` of a head; ids count inputs of layers. vocabulary: ids that it proposes."""
    return layers.config_of("eagle3", shape, target, architectures, context) | {
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
