"""The interface between the engine and a draft. The engine asks a draft only for sizes and
properties; it never checks which kind of draft it is."""

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

# A function that is called before each compilation; None if passes are not to be compiled.
OnCompile = Callable[[str], None] | None


class Loaded(Protocol):
    """A loaded model over a paged cache. storages: the size in bytes of each memory block that
    holds its weights and tables, keyed by the block's address."""

    cache: KVCache

    @property
    def storages(self) -> dict[int, int]: ...

    def use(self, cache: KVCache) -> None:
        """Store keys and values in `cache` from now on."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes that a draft runs.

    count: the number of passes in one round.
    rows: the number of tokens per sequence in each of them.
    in_prompt: the number of passes over a prompt.
    parts: the number of equal parts of the draft, of which each pass runs one.
    ahead: as returned by `Proposer.ahead`.
    """

    count: int
    rows: int = 1
    in_prompt: int = 1
    parts: int = 1
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Another interpretation of a checkpoint whose format other tools read differently.

    told: a text that tells the user which interpretation we use and which tools use another one.
    draft: the draft under the other interpretation; None if it does not fit the target.
    """

    told: str
    draft: "Draft | None"


class Draft(Protocol):
    """A draft on one rank, before its weights are read.

    layers: the cache shape of each layer.
    max_len: the number of positions that it may use.
    vocab_size: the number of ids that it can propose.
    feature_layers: the target's hidden states that it reads. A draft that reads none has its own
        vocabulary and tokenizer.
    weight_bytes: the bytes of its weights, excluding those that it borrows from the target.
    notes: facts about the draft for the record of a run, by name.
    has_confidence: whether it estimates, before it draws a token, the probability that the token is
        accepted.
    max_k: the maximum number of proposals per round; None for no limit.
    shared, shared_bytes: the target's weights that it uses (`draft.share`), and the bytes that this
        saves.
    needs_equal_degrees: whether it must be split over as many ranks as the target, because it uses
        the target's output matrix as the ranks hold it.
    target_tensors: a pattern for the names of tensors that it reads from the target's files; None
        if it reads none, or those that `Method.tensors_in_target` knows.
    captured_width: the number of tokens in its largest prefill pass that is captured as a CUDA
        graph; 0 without a fused form.
    can_compile: whether its padded passes can be compiled.
    keeps_stored: whether any weight stays in the quantised form of the checkpoint.
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
    def needs_equal_degrees(self) -> bool: ...
    @property
    def target_tensors(self) -> re.Pattern[str] | None: ...
    @property
    def captured_width(self) -> int: ...
    @property
    def can_compile(self) -> bool: ...
    @property
    def keeps_stored(self) -> bool: ...

    def within(self, reach: int) -> "Draft":
        """Return a copy of this description for texts of at most `reach` tokens; its rotary tables
        have that length."""

    def loaded_bytes(self, *, is_compiled: bool) -> int:
        """Return the bytes that the loaded draft takes: its tables and weights, including second
        copies of weights kept both packed and unpacked."""

    def passes(self, k: int) -> Passes:
        """Return the draft's passes in a run with k proposals per round."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of the draft's cache."""

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        """Return the bytes of the tensors that are alive at the peak of a pass, without its inputs.

        tokens: the number of tokens in the pass.
        logit_rows: the number of tokens that need logits, for models that compute these inside the
            pass.
        gathers: whether to add up the memory of attention and that of the MLP. This is right for
            prefill on CUDA, where the allocator does not reuse the memory of one for the other.
            Otherwise only the larger counts.
        is_compiled: whether the pass is compiled.
        """

    def readings(self) -> list[Reading]:
        """Return the other interpretations of the checkpoint; empty unless other tools read its
        format differently."""

    def load(
        self, target: PagedModel, groups: Groups, block_size: int, on_compile: OnCompile = None
    ) -> Loaded | None:
        """Read the weights and bind the draft to a cache of zero blocks. Returns None on a rank
        that holds no part of the draft.

        All of the target's ranks must call this. Raises `SetupError` for damaged weights.
        """
