"""Describe a draft head before its weights are read: check that it fits its target, and compute how
much memory it needs."""

import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from specdec_kernels import ops

from specdec_cli.core.kv_cache import KVCache, LayerShape, block_bytes
from specdec_cli.core.parallel import Groups, TensorParallel
from specdec_cli.errors import SetupError
from specdec_cli.models.description import DraftPlace
from specdec_cli.models.draft import OnCompile, Passes, Reading
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, HeadWeights
from specdec_cli.models.heads.checkpoint import (
    borrowed_by,
    dummy_weights,
    read_weights,
    serves,
)
from specdec_cli.models.heads.net import Head
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.held import plain_weight
from specdec_cli.models.hidden import check_hidden_layers
from specdec_cli.models.kv_scales import cache_dtype, cache_note
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.refusals import ANOTHER_DRAFT
from specdec_cli.models.resolve import place_of
from specdec_cli.models.spec import ModelSpec

# Makes a head from its config, its weights, the number of positions that it may use, and the ranks
# that share it. All of these ranks must call it together.
Make = Callable[[Any, HeadWeights, int, TensorParallel], Head]
Bind = Callable[[Head, KVCache], PagedHead]


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """A head that fits its target and has no weights yet.

    config: the config of the whole head, even if ranks split it.
    make, bind: see `describe_head`.
    max_len: the number of positions that the head may use, which may exceed the context length in
        its config.
    num_target_layers: the number of layers of the target.
    feature_layers: the indices of the target's hidden states that the head reads.
    borrows: the names of the weights that it takes from the target.
    gathers_head: whether it borrows the target's output matrix but needs rows that other ranks of
        the target hold. The matrix is then gathered, and the head keeps a copy of the rows that it
        needs.
    """

    spec: ModelSpec
    place: Path
    config: HeadConfig
    make: Make
    dtype: torch.dtype
    device: torch.device
    max_len: int
    num_target_layers: int
    feature_layers: tuple[int, ...]
    borrows: frozenset[str]
    gathers_head: bool
    parallel: TensorParallel
    bind: Bind = PagedHead

    has_experts: ClassVar[bool] = False
    shared: ClassVar[tuple[str, ...]] = ()
    shared_bytes: ClassVar[int] = 0
    needs_equal_degrees: ClassVar[bool] = False
    target_tensors: ClassVar[re.Pattern[str] | None] = None
    captured_width: ClassVar[int] = sys.maxsize
    can_compile: ClassVar[bool] = False
    keeps_stored: ClassVar[bool] = False

    @property
    def layers(self) -> list[LayerShape]:
        return self.config.cache_layers(self.parallel)

    @property
    def has_confidence(self) -> bool:
        return self.config.has_confidence

    @property
    def max_k(self) -> int | None:
        return self.config.max_k

    @property
    def vocab_size(self) -> int:
        """The number of ids that the head can propose."""
        return self.config.draft_vocab_size

    @property
    def weight_bytes(self) -> int:
        return self.loaded_bytes()

    def loaded_bytes(self, *, is_compiled: bool = False) -> int:
        """Return the bytes that the head takes on its device: its rotary tables, and its weights
        except borrowed ones."""
        config, is_cpu = self.config, self.device.type == "cpu"
        not_held = self.borrows - {HEAD} if self.gathers_head else self.borrows
        sizes = {name: math.prod(s) for name, s in config.shapes(self.parallel).items()}
        sizes |= config.sizes_held
        numbers, packed_names = 2 * self.max_len * int(config.body.head_dim), set[str]()
        for names in config.products() if is_cpu else ():
            # On a CPU, each merged projection is kept packed, unpacked or in both forms. Of the
            # matrices that are merged, only the embedding is also kept separately.
            packed, plain = ops.forms_of(count := sum(sizes[name] for name in names), self.dtype)
            # If the head borrows the target's output matrix, the unpacked form already counts
            # towards the target's memory.
            is_lent = names[0] == HEAD and HEAD in not_held
            numbers += count * (packed + (plain and not is_lent))
            packed_names |= {*names} - {EMBEDDING}
        numbers += sum(size for n, size in sizes.items() if n not in not_held | packed_names)
        ids = config.draft_vocab_size if config.draft_vocab_size < config.vocab_size else 0
        return numbers * self.dtype.itemsize + 8 * ids

    @property
    def notes(self) -> dict[str, str]:
        layers = ", ".join(map(str, self.feature_layers))
        found = {"features": f"hidden states {layers} of the target"}
        if self.borrows:
            found["borrows"] = ", ".join(sorted(self.borrows))
        if self.gathers_head:
            found["borrows"] += " (a copy, since ranks of the target hold parts)"
        found |= self.config.facts | cache_note(self.spec)
        if self.config.quantisation is not None:
            found["weights"] = f"dequantised from {self.config.quantisation['quant_method']}"
        if self.config.others:
            found["conventions"] = "; ".join(other.told for other in self.config.others)
        return found

    def within(self, reach: int) -> "HeadDescription":
        return replace(self, max_len=reach)

    def passes(self, k: int) -> Passes:
        return self.config.passes(k)

    def readings(self) -> list[Reading]:
        found = []
        for told, changes in self.config.others:
            config, draft = replace(self.config, others=(), **changes), None
            with suppress(SetupError):
                layers = config.feature_layers(self.num_target_layers)
                draft = replace(self, config=config, feature_layers=layers)
            found.append(Reading(told, draft))
        return found

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of the head's cache, including the outputs that are stored
        with it; see `HeadConfig.carried_bytes`."""
        carried = self.config.carried_bytes(self.dtype.itemsize)
        held = block_bytes(self.layers, block_size, cache_dtype(self.spec, self.dtype))
        return held + carried

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        """See `models.draft.Draft`. A head's logits are computed outside its passes, so
        `logit_rows` is ignored."""
        row = self.config.row_numbers(self.parallel, gathers=gathers)
        return tokens * row * self.dtype.itemsize

    def load(
        self, target: PagedModel, groups: Groups, block_size: int, on_compile: OnCompile = None
    ) -> PagedHead | None:
        """Load the weights and return the head, or None on a rank that holds no part of it. All of
        the target's ranks must call this, because its output matrix may have to be gathered."""
        device, config = self.device, self.config
        lent = _lent_by(target.module) if self.borrows else {}
        if self.gathers_head:
            assert groups.target is not None
            whole = groups.target.all_gather(lent[HEAD].t(), config.vocab_size)
            rows = slice(*self.parallel.share(config.vocab_size))
            lent[HEAD] = whole.t()[rows].contiguous()
        if (ranks := groups.draft) is None:
            return None
        if self.spec.load_format == "dummy":
            weights = dummy_weights(config, self.dtype, device, lent, ranks)
        else:
            weights = read_weights(
                config, self.place, self.dtype, device, lent, self.spec.allow_pickle, ranks
            )
        kind = cache_dtype(self.spec, self.dtype)
        cache = KVCache(self.layers, 0, block_size, kind, device)
        return self.bind(self.make(config, weights, self.max_len, ranks), cache)


def describe_head(
    place: DraftPlace,
    read: Callable[[str, Path, int], HeadConfig],
    make: Make,
    bind: Bind = PagedHead,
) -> HeadDescription:
    """Read a head's config and the names of its weights, and check them against its target.

    read: a function that returns the head's config, given its name, its folder and the number of
    the target's layers. make: a function that makes the head from its weights. bind: a function
    that binds the head to a cache. Raises a `SetupError` that names the key or tensor that does not
    fit, and the errors of `read`.
    """
    spec, target, parallel = place.spec, place.target, place.parallel
    folder = place_of(spec)
    settings = target.module.config
    num_layers = int(settings.num_hidden_layers)
    config = read(spec.name, folder, num_layers)
    config.split(parallel)
    layers = check_target(config, int(settings.hidden_size), target.vocab_size, num_layers)
    check_hidden_layers(target.module, layers)
    # The dtype in the config is the one used in training. As in other tools, `auto` ignores it and
    # runs the head in its target's dtype.
    dtype = target.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)
    lent = _lent_by(target.module)
    whole = lent[HEAD].new_empty(target.vocab_size, lent[HEAD].shape[1])
    # The target's output matrix must be gathered if the head's ranks need rows that other ranks of
    # the target hold. If both are split over the same number of ranks, each rank already holds the
    # rows that it needs.
    is_apart = lent[HEAD].shape != whole.shape and parallel.size != target.parallel.size
    lent[HEAD] = whole
    if spec.load_format == "dummy":
        is_lent = serves(lent[EMBEDDING], config.shapes()[EMBEDDING], dtype)
        borrows = frozenset({EMBEDDING} if is_lent else ())
    else:
        borrows = borrowed_by(config, folder, dtype, lent, spec.allow_pickle)
    return HeadDescription(
        spec=spec,
        place=folder,
        config=config,
        make=make,
        dtype=dtype,
        device=place.device,
        max_len=place.max_model_len,
        num_target_layers=num_layers,
        feature_layers=layers,
        borrows=borrows,
        gathers_head=is_apart and HEAD in borrows,
        parallel=parallel,
        bind=bind,
    )


def check_target(
    config: HeadConfig, hidden_size: int, vocab_size: int, num_layers: int
) -> tuple[int, ...]:
    """Check that a head belongs to a target of these sizes, and return the indices of the target's
    hidden states that the head reads. Raises a `SetupError` that names the key that differs."""
    for key, ours, theirs in (
        ("target_hidden_size", config.target_hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("num_target_layers", config.num_target_layers or num_layers, num_layers),
    ):
        if ours != theirs:
            raise SetupError(
                f"the {config.noun} {config.name} is for another target: its {key} is {ours}, but "
                f"the target has {theirs}",
                ANOTHER_DRAFT,
            )
    return config.feature_layers(num_layers)


def _lent_by(module: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a transformers model that a head may borrow, by the head's names: the
    embedding and this rank's part of the output matrix."""
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    return {EMBEDDING: inputs.weight.data, HEAD: plain_weight(outputs.weight)}
