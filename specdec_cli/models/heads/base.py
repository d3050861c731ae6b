"""The interface of a head: a small network that reads the target's hidden states.

Row t of a head reads the target's hidden state of token t and embeds token t + shift. Its keys are
at position t. Legend: T packed rows, H width of the head, F width of the features, V ids of the
target, Vd ids that the head can propose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

from torch import Tensor, nn

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.draft import Passes
from specdec_cli.models.formats import Settings
from specdec_cli.models.fused_layer import matrices
from specdec_cli.models.heads.layers import layers_of
from specdec_cli.models.tp import shard_layers
from specdec_cli.models.weights import Part

# The names of every head's embedding [V, H] and matrix of logits [Vd, H].
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights on one device, by the names of `HeadConfig.shapes`; ids: int64 [Vd], the
    target's id of each of the head's; None if they are the same."""

    tensors: Mapping[str, Tensor]
    ids: Tensor | None


class Other(NamedTuple):
    """A different interpretation of a config by some tools, in words, and the fields that it
    changes."""

    told: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The settings of a head of any kind, which determine its checkpoint, memory and cache. name:
    the checkpoint's, for messages. body: transformers' config of its layers. windows: the sliding
    window of each layer, 0 for none. target_hidden_size: the target's width. vocab_size: V.
    draft_vocab_size: Vd. num_target_layers: None if the checkpoint does not say. others:
    interpretations of other tools that differ. quantisation: settings of quantised matrices; None
    for plain ones. noun: the word for the kind, for messages. shift: 1 if a row embeds the token
    that follows, 0 if it embeds its own. carries: whether the output of the last true row is kept,
    for the first proposal.
    """

    noun: ClassVar[str]
    shift: ClassVar[int] = 1
    carries: ClassVar[bool] = True

    name: str
    body: Any
    windows: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int | None = None
    others: tuple[Other, ...] = ()
    quantisation: Settings | None = None

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The hidden states of the target that it reads, as transformers counts them. Raises
        `SetupError` for layers that the target does not have.
        """
        raise NotImplementedError

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights outside its layers. Without HEAD, the embedding serves as the
        head."""
        raise NotImplementedError

    def renamed(self, name: str) -> str | None:
        """The name in `shapes` of a checkpoint's tensor; None for a tensor that is not needed."""
        return name

    def width_read(self, layer: int) -> int:
        """The input width of a layer's QKV projection."""
        return self.hidden_size

    @property
    def numbers_fused(self) -> int:
        """The number of intermediate values per row in `Head.fuse`."""
        return 0

    @property
    def sizes_held(self) -> dict[str, int]:
        """The sizes of weights held in a different form, by name."""
        return {}

    @property
    def output_size(self) -> int:
        """The width of the rows of hidden states that a pass returns."""
        return self.hidden_size

    def carried_bytes(self, itemsize: int) -> int:
        """Bytes kept with the keys of each block."""
        return self.hidden_size * itemsize * self.carries

    @property
    def has_confidence(self) -> bool:
        return False

    @property
    def max_k(self) -> int | None:
        return None

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states."""
        return int(self.body.hidden_size)

    @property
    def lends(self) -> frozenset[str]:
        """The weights that may be borrowed from the target if the checkpoint lacks them."""
        has_all_ids = self.draft_vocab_size == self.vocab_size
        return frozenset({EMBEDDING, HEAD} if has_all_ids else {EMBEDDING})

    @property
    def facts(self) -> dict[str, str]:
        """Further facts for the record of a run, each with a name."""
        return {}

    def passes(self, k: int) -> Passes:
        """The passes in a round of k proposals, including the pass over true rows."""
        return Passes(k)

    def cache_layers(self, parallel: TensorParallel = ALONE) -> list[LayerShape]:
        """This rank's part of each entry of its cache."""
        heads = max(1, self.body.num_key_value_heads // parallel.size)
        return [LayerShape(heads, self.body.head_dim, self.body.head_dim)] * len(self.windows)

    def split(self, parallel: TensorParallel) -> tuple[nn.ModuleDict, dict[str, Part]]:
        """This rank's layers on meta, and its parts of the weights that are split over ranks. All
        other weights are whole on every rank. Raises `Indivisible` for sizes that do not divide.
        """
        body = layers_of(self.body, [self.width_read(i) for i in range(len(self.windows))])
        if parallel.size == 1:
            return body, {}
        parts = shard_layers(body, self.body, self.cache_layers(), parallel, self.name)
        if (shape := self.own_shapes().get(HEAD)) is not None:
            parts[HEAD] = Part(0, *parallel.share(shape[0]), shape)
        return body, parts

    def shapes(self, parallel: TensorParallel = ALONE) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's parts of all needed weights, including borrowed ones."""
        found, (body, parts) = self.own_shapes(), self.split(parallel)
        found |= {name: parts[name].local_shape for name in found.keys() & parts.keys()}
        return found | {name: tuple(p.shape) for name, p in body.named_parameters()}

    def products(self) -> list[list[str]]:
        """The names of the matrices in each merged projection."""
        own, (body, _) = self.own_shapes(), self.split(ALONE)
        found = [[n] for n, shape in own.items() if len(shape) == 2 and n != EMBEDDING]
        names = {id(parameter): name for name, parameter in body.named_parameters()}
        for layer in cast(nn.ModuleList, body["layers"]):
            found += [[names[id(matrix)] for matrix in group] for group in matrices(layer)]
        return found if HEAD in own else [*found, [EMBEDDING]]

    def row_numbers(self, parallel: TensorParallel, *, gathers: bool) -> int:
        """The number of values of each row at the peak of a pass. gathers: see
        `models.draft.Draft`."""
        (cached, *_), size = self.cache_layers(parallel), parallel.size
        width, head_dim = self.hidden_size, self.body.head_dim
        mixed = self.body.num_attention_heads // size * head_dim
        qkv = mixed + 2 * cached.num_kv_heads * head_dim
        common = 2 * head_dim + 3 * width  # the embedding, the normed embedding, the hidden state
        attention = 3 * width + (2 * qkv + 5 * mixed if gathers else qkv + 2 * mixed)
        mlp = 2 * width + 3 * (self.body.intermediate_size // size)
        layer = attention + mlp if gathers else max(attention, mlp)
        return int(common + max(layer, self.numbers_fused))


class HeadSizes(Protocol):
    """The sizes of a head that determine its passes; see `HeadConfig`."""

    @property
    def shift(self) -> int: ...
    @property
    def carries(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def output_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
