"""The interface of a head: a small net beside the target that reads its hidden states.

Row t of a head has the target's hidden state of token t and embeds token t + shift. Its keys lie at
position t. Legend: T packed rows, H width of the head, F of the features, V ids of the target, Vd
ids that the head can propose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache, LayerShape
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.weights import Part

# The names that every head's embedding [V, H] and matrix of logits [Vd, H] get.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights on one device.

    tensors: by name, see `HeadConfig.shapes`. ids: int64 [Vd], the target's id of each id that the
    head proposes; None where they are the same.
    """

    tensors: Mapping[str, Tensor]
    ids: Tensor | None


class HeadConfig(Protocol):
    """The settings that a head's checkpoint, memory and cache follow from, whatever its kind.

    name: of the checkpoint. noun: of its kind; both for messages. vocab_size: V. draft_vocab_size:
    Vd. num_target_layers: None where the checkpoint does not say. head_dim: features that a rotary
    embedding turns. shift: 1 where a row embeds the token that follows, 0 where it embeds its own.
    carries: whether the first proposal is drawn from the output of the last true row, which is then
    kept. lends: EMBEDDING, HEAD, where the target's may serve for a missing one. remarks:
    conventions that tools read differently, and how they were read here.
    """

    @property
    def name(self) -> str: ...
    @property
    def noun(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def num_target_layers(self) -> int | None: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def shift(self) -> int: ...
    @property
    def carries(self) -> bool: ...
    @property
    def lends(self) -> frozenset[str]: ...
    @property
    def remarks(self) -> tuple[str, ...]: ...

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The hidden states of the target that it reads, in transformers' counting.

        Raises `SetupError` for layers that the target does not have.
        """
        ...

    def cache_layers(self, parallel: TensorParallel = ALONE) -> list[LayerShape]:
        """This rank's part of each entry of its cache."""
        ...

    def renamed(self, name: str) -> str | None:
        """The name in `shapes` of a checkpoint's tensor; None for one that is not needed."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight of the whole head, those included that may be borrowed."""
        ...

    def products(self) -> list[list[str]]:
        """The names of the matrices that each of its products is made of."""
        ...

    def parts(self, parallel: TensorParallel) -> dict[str, Part]:
        """This rank's parts of the weights that ranks share; the others are whole on every rank.

        Raises `Indivisible` for sizes that do not divide.
        """
        ...

    def row_numbers(self, parallel: TensorParallel, *, gathers: bool) -> int:
        """Numbers that each row of a pass has at the pass's peak, beside its inputs.

        gathers: whether keys and values of several tokens are gathered, as in prefill on CUDA,
        whose allocator then does not use attention's memory for the MLP.
        """
        ...


class Head(Protocol):
    """A head with its weights. ids: see `HeadWeights`. storages: see `storages_of`."""

    @property
    def config(self) -> HeadConfig: ...
    @property
    def ids(self) -> Tensor | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def storages(self) -> dict[int, int]: ...

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [T, H] from the target's features [T, F], once for each true row."""
        ...

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """One pass over T rows, whose keys and values are written to `cache`.

        token_ids: int64 [T], of the tokens that the rows embed, in place of the batch's. hidden:
        [T, H], from `fuse`, or from `fed_back` of the row before.
        """
        ...

    def normed(self, hidden: Tensor) -> ops.Normed:
        """The result of `__call__`, made again from its hidden states [T, H]."""
        ...

    def logits(self, x: ops.Normed) -> Tensor:
        """Logits [T, Vd] of the head's own ids."""
        ...

    def fed_back(self, x: ops.Normed) -> Tensor:
        """Hidden states [T, H] that the next step reads in place of fused features."""
        ...
