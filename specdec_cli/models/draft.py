"""The interface between the engine and a draft, which it asks for sizes and never for its kind."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specdec_cli.core.kv_cache import KVCache, LayerShape
from specdec_cli.core.parallel import Groups, TensorParallel
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.spec import ModelSpec


class Loaded(Protocol):
    """A model with its weights, over a paged cache. storages: bytes of each block of memory that
    holds weights and tables, by its address."""

    cache: KVCache

    @property
    def storages(self) -> dict[int, int]: ...

    def use(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on."""


@dataclass(frozen=True, slots=True)
class Passes:
    """A draft's passes of one round: their number, and the rows of each for one sequence."""

    count: int
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Reading:
    """A convention of a checkpoint that tools read differently: how it was read, and who reads it
    otherwise; and the draft read so, None where the target rules that out."""

    told: str
    draft: "Draft | None"


class Draft(Protocol):
    """A draft on one rank, before its weights are read.

    layers: what each caches. max_len: positions that it may use. vocab_size: ids that it can
    propose. feature_layers: hidden states of the target that it reads; a draft that reads none has
    a vocabulary and a tokenizer of its own. weight_bytes: without what it borrows. notes: facts for
    the record of a run, by a word for each. has_confidence: whether it says how sure it is of a
    token before it draws it. max_k: most tokens of a round; None for any number. shared,
    shared_bytes: what `draft.share` lends it, and the bytes that this saves. target_tensors: names
    of tensors in the target's files that it reads itself. captured_width: tokens of the largest
    captured prefill pass; 0 without a fused form. can_compile: whether its padded passes can be
    compiled. keeps_stored: whether any weight is held in other bits than the dtype's.
    """

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def place(self) -> Path: ...
    @property
    def layers(self) -> list[LayerShape]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def feature_layers(self) -> tuple[int, ...]: ...
    @property
    def parallel(self) -> TensorParallel: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def notes(self) -> dict[str, str]: ...
    @property
    def has_experts(self) -> bool: ...
    @property
    def has_confidence(self) -> bool: ...
    @property
    def max_k(self) -> int | None: ...
    @property
    def shared(self) -> tuple[str, ...]: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def target_tensors(self) -> re.Pattern[str] | None: ...
    @property
    def captured_width(self) -> int: ...
    @property
    def can_compile(self) -> bool: ...
    @property
    def keeps_stored(self) -> bool: ...

    def within(self, reach: int) -> "Draft":
        """The draft for texts of at most `reach` tokens, with tables no longer than that."""
        ...

    def loaded_bytes(self, *, is_compiled: bool) -> int:
        """Bytes of what it holds when it is loaded: weights, some in two forms, and tables."""
        ...

    def passes(self, k: int) -> Passes:
        """The passes of a round of k proposals."""
        ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its cache."""
        ...

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        """Bytes of the tensors that are alive at a pass's peak, beside its inputs.

        logit_rows: of a model that has them within its pass. gathers: as in prefill on CUDA, whose
        allocator does not use attention's memory for the MLP.
        """
        ...

    def readings(self) -> list[Reading]:
        """The conventions that tools read differently."""
        ...

    def load(
        self,
        target: PagedModel,
        groups: Groups,
        block_size: int,
        on_compile: Callable[[str], None] | None = None,
    ) -> Loaded | None:
        """Read its weights, over a cache of zero blocks; None on a rank that holds no part of it.

        on_compile: told of each compilation; None if passes are not to be compiled. All of the
        target's ranks have to call this. Raises `SetupError` for damaged weights.
        """
        ...
