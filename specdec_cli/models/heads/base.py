"""The interface of a draft head, a small network that reads the target's hidden states.

The input of a head for one token is called a row. Row t reads the target's hidden state of token t
(its features) and the embedding of token t + shift. Its keys are stored at position t. Legend: T
packed rows, H width of the head, F width of the features, V size of the target's vocabulary, Vd
number of ids that the head can propose.
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

# The names that all heads use for their embedding [V, H] and their output matrix [Vd, H].
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights on one device.

    tensors: the weights, by the names that `HeadConfig.shapes` uses.
    ids: int64 [Vd], the target's id for each id of the head; None if the ids are the same.
    """

    tensors: Mapping[str, Tensor]
    ids: Tensor | None


class Other(NamedTuple):
    """A way to interpret a head's config that differs from ours and that some other tools use.

    told: a description of the difference, for messages.
    changes: the fields of `HeadConfig` that differ under this interpretation, with the values that
    they have under it.
    """

    told: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The settings of a head of any kind. They determine its checkpoint, its memory and its cache.

    noun: the name of this kind of head in messages.
    shift: 1 if row t embeds token t + 1, 0 if it embeds token t.
    carries: whether the output for the last accepted token is kept for the first proposal of the
        next round.
    name: the checkpoint's name, for messages.
    body: transformers' config of the head's layers.
    windows: the sliding window of each layer; 0 for a layer without one.
    target_hidden_size: the width of the target's hidden states.
    vocab_size: V, the number of the target's ids.
    draft_vocab_size: Vd, the number of ids that the head can propose.
    num_target_layers: the number of the target's layers; None if the checkpoint does not say.
    others: the interpretations of other tools, if they differ from ours.
    quantisation: the settings of quantised matrices; None if all matrices are unquantised.
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
        """Return the indices of the target's hidden states that the head reads, numbered as in
        transformers. Raises `SetupError` for layers that the target does not have.
        """
        raise NotImplementedError

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights outside the layers, by name. If HEAD is not among them,
        the embedding is also used as the output matrix."""
        raise NotImplementedError

    def renamed(self, name: str) -> str | None:
        """Translate a tensor name in the checkpoint to the name that `shapes` uses. Returns None if
        the head does not need the tensor."""
        return name

    def width_read(self, layer: int) -> int:
        """Return the input width of a layer's QKV projection."""
        return self.hidden_size

    @property
    def numbers_fused(self) -> int:
        """The number of intermediate values per row that `Head.fuse` needs. It counts towards the
        peak memory of a pass."""
        return 0

    @property
    def sizes_held(self) -> dict[str, int]:
        """The number of values that a weight has in memory, by its name. This lists only weights
        with a different number of values in the checkpoint."""
        return {}

    @property
    def output_size(self) -> int:
        """The width of the hidden states that a pass returns."""
        return self.hidden_size

    def carried_bytes(self, itemsize: int) -> int:
        """Return the number of bytes that each block of the cache needs for outputs that are kept
        until the next round. By default, this is one hidden state if `carries` is true, and nothing
        otherwise. itemsize: the number of bytes per value."""
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
    def facts(self) -> dict[str, str]:
        """More facts about the head for the record of a run. The keys are titles, the values are
        descriptions."""
        return {}

    def passes(self, k: int) -> Passes:
        """Return the head's passes in a round with k proposals, including the pass over accepted
        tokens."""
        return Passes(k)

    def cache_layers(self, parallel: TensorParallel = ALONE) -> list[LayerShape]:
        """Return the cache shape of each layer. It counts only the KV heads that this rank
        holds."""
        heads = max(1, self.body.num_key_value_heads // parallel.size)
        return [LayerShape(heads, self.body.head_dim, self.body.head_dim)] * len(self.windows)

    def split(self, parallel: TensorParallel) -> tuple[nn.ModuleDict, dict[str, Part]]:
        """Return this rank's layers on meta, and a `Part` for each weight that is split over ranks,
        by name. All other weights are whole on every rank. Raises `Indivisible` for sizes that
        cannot be divided among the ranks.
        """
        body = layers_of(self.body, [self.width_read(i) for i in range(len(self.windows))])
        if parallel.size == 1:
            return body, {}
        parts = shard_layers(body, self.body, self.cache_layers(), parallel, self.name)
        if (shape := self.own_shapes().get(HEAD)) is not None:
            parts[HEAD] = Part(0, *parallel.share(shape[0]), shape)
        return body, parts

    def shapes(self, parallel: TensorParallel = ALONE) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's parts of all weights that the head needs, including
        borrowed ones, by name."""
        found, (body, parts) = self.own_shapes(), self.split(parallel)
        found |= {name: parts[name].local_shape for name in found.keys() & parts.keys()}
        return found | {name: tuple(p.shape) for name, p in body.named_parameters()}

    def products(self) -> list[list[str]]:
        """Return the names of the matrices that are merged into each projection."""
        own, (body, _) = self.own_shapes(), self.split(ALONE)
        found = [[n] for n, shape in own.items() if len(shape) == 2 and n != EMBEDDING]
        names = {id(parameter): name for name, parameter in body.named_parameters()}
        for layer in cast(nn.ModuleList, body["layers"]):
            found += [[names[id(matrix)] for matrix in group] for group in matrices(layer)]
        return found if HEAD in own else [*found, [EMBEDDING]]

    def row_numbers(self, parallel: TensorParallel, *, gathers: bool) -> int:
        """Return the number of values per row that are alive at the peak of a pass. gathers: see
        `models.draft.Draft.pass_bytes`."""
        (cached, *_), size = self.cache_layers(parallel), parallel.size
        width, head_dim = self.hidden_size, self.body.head_dim
        mixed = self.body.num_attention_heads // size * head_dim
        qkv = mixed + 2 * cached.num_kv_heads * head_dim
        common = 2 * head_dim + 3 * width  # cos, sin; embedding, normed embedding, hidden state
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
