"""An EAGLE-3 head before its weights are read: checks against its target, and memory.

Legend: H width of the head, D features of an attention head, V ids of the target.
"""

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
from specdec_cli.models.description import Description
from specdec_cli.models.draft import Passes, Reading
from specdec_cli.models.heads.eagle3.config import HeadConfig, overridden, read_head_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head, products_of
from specdec_cli.models.heads.eagle3.weights import (
    EMBEDDING,
    HEAD,
    SUMMED_BIAS,
    Borrowed,
    borrowed_by,
    check_target,
    dummy_weights,
    parts_of,
    read_weights,
    serves,
    shapes_of,
)
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.held import plain_weight
from specdec_cli.models.hidden import check_hidden_layers
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.resolve import model_place
from specdec_cli.models.spec import ModelSpec
from specdec_cli.recipe.choices.eagle3 import Eagle3Keys


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """A head that belongs to its target and holds no weights yet.

    config: of the whole head, however many ranks share it. max_len: positions that it may use,
    whatever its config's context length. num_target_layers: of the target's own. feature_layers:
    the target's hidden states that the head reads.
    borrows: the weights that it takes from the target. gathers_head: whether the target's head is
    among them and split over other ranks, so that it keeps a copy.
    """

    spec: ModelSpec
    place: Path
    config: HeadConfig
    dtype: torch.dtype
    device: torch.device
    max_len: int
    num_target_layers: int
    feature_layers: tuple[int, ...]
    borrows: frozenset[str]
    gathers_head: bool
    parallel: TensorParallel

    has_experts: ClassVar[bool] = False
    max_k: ClassVar[int | None] = None
    shared: ClassVar[tuple[str, ...]] = ()
    shared_bytes: ClassVar[int] = 0
    target_tensors: ClassVar[re.Pattern[str] | None] = None
    captured_width: ClassVar[int] = sys.maxsize
    can_compile: ClassVar[bool] = False

    @property
    def layers(self) -> list[LayerShape]:
        return self.config.on(self.parallel).cache_layers

    @property
    def vocab_size(self) -> int:
        """The number of ids that it can propose."""
        return self.config.draft_vocab_size

    @property
    def weight_bytes(self) -> int:
        return self.loaded_bytes()

    def loaded_bytes(self, *, is_compiled: bool = False) -> int:
        """Bytes of the weights on its device, without those that it borrows, and of the rotary
        tables."""
        config, is_cpu = self.config, self.device.type == "cpu"
        not_held = self.borrows - {HEAD} if self.gathers_head else self.borrows
        sizes = {name: math.prod(shape) for name, shape in shapes_of(config).items()}
        parts = parts_of(config, self.parallel)
        sizes |= {name: math.prod(part.local_shape) for name, part in parts.items()}
        if not self.parallel.is_first:
            sizes = {name: size for name, size in sizes.items() if not SUMMED_BIAS.search(name)}
        numbers = 2 * self.max_len * config.head_dim
        for names in products_of(config):
            count = sum(sizes.pop(name) if name != EMBEDDING else sizes[name] for name in names)
            if is_cpu:  # which holds a product in one form or two, and none in the embedding's
                packed, plain = ops.forms_of(count, self.dtype)
                # The target's head has its plain form already.
                is_lent = names[0] == HEAD and HEAD in not_held
                numbers += count * (packed + (plain and not is_lent))
            elif names[0] != EMBEDDING and names[0] not in not_held:
                numbers += count
        numbers += sum(size for name, size in sizes.items() if name not in not_held)
        ids = config.draft_vocab_size if config.draft_vocab_size < config.vocab_size else 0
        return numbers * self.dtype.itemsize + 8 * ids

    @property
    def notes(self) -> dict[str, str]:
        """Facts for the record of a run, by a word for each."""
        layers = ", ".join(map(str, self.feature_layers))
        found = {"features": f"hidden states {layers} of the target"}
        if self.borrows:
            found["borrows"] = ", ".join(sorted(self.borrows))
        if self.gathers_head:
            found["borrows"] += " (a copy, since ranks of the target hold parts)"
        if self.config.others:
            found["conventions"] = "; ".join(other.told for other in self.config.others)
        return found

    def within(self, reach: int) -> "HeadDescription":
        return replace(self, max_len=reach)

    def passes(self, k: int) -> Passes:
        """The first proposal takes no pass of its own; `commit` takes one."""
        return Passes(k)

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
        """Bytes of one block of its cache, and of the vector [H] that is carried with it."""
        carried = self.config.hidden_size * self.dtype.itemsize
        return block_bytes(self.layers, block_size, self.dtype) + carried

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        """See `models.draft.Draft`; its logits are computed outside its passes."""
        config, width = self.config.on(self.parallel), self.config.hidden_size
        mixed = config.num_heads * config.head_dim
        qkv = mixed + 2 * config.num_kv_heads * config.head_dim
        common = 2 * config.head_dim + 3 * width  # the embedding, it normed, the hidden state
        attention = 3 * width + (2 * qkv + 5 * mixed if gathers else qkv + 2 * mixed)
        mlp = 2 * width + 3 * config.intermediate_size
        features = config.num_aux * config.target_hidden_size
        fusing = features if config.norm_before_fc or config.fc_norm else 0
        layer = attention + mlp if gathers else max(attention, mlp)
        return tokens * (common + max(layer, fusing)) * self.dtype.itemsize

    def load(
        self,
        target: PagedModel,
        groups: Groups,
        block_size: int,
        on_compile: Callable[[str], None] | None = None,
    ) -> PagedHead | None:
        """The head with its weights, over a cache of zero blocks; None on a rank without it.

        All of the target's ranks have to call this, since their parts may be gathered.
        """
        device, config = self.device, self.config
        lent = _lent_by(target.module) if self.borrows else None
        if lent is not None and self.gathers_head:
            assert groups.target is not None
            whole = groups.target.all_gather(lent.head.t(), config.vocab_size)
            rows = slice(*self.parallel.share(config.vocab_size))
            lent = replace(lent, head=whole.t()[rows].contiguous())
        if (ranks := groups.draft) is None:
            return None
        if self.spec.load_format == "dummy":
            weights = dummy_weights(config, self.dtype, device, lent, ranks)
        else:
            weights = read_weights(
                config, self.place, self.dtype, device, lent, self.spec.allow_pickle, ranks
            )
        cache = KVCache(self.layers, 0, block_size, self.dtype, device)
        return PagedHead(Eagle3Head(config, weights, self.max_len, ranks), cache)


def describe_head(
    spec: ModelSpec,
    device: torch.device,
    parallel: TensorParallel,
    target: Description,
    max_len: int,
    keys: Eagle3Keys,
) -> HeadDescription:
    """Read a head's config and the names of its weights, and check them against its target.

    parallel: its ranks. max_len: positions that passes may use. keys: of the recipe.

    Raises `SetupError`, which names the key or the tensor, where they do not fit, and `UsageError`
    where the recipe's keys do not.
    """
    is_dummy = spec.load_format == "dummy"
    place = model_place(
        spec.name, spec.revision, spec.file, weights=not is_dummy, allow_pickle=spec.allow_pickle
    )
    config = read_head_config(spec.name, place)
    parts_of(config, parallel)
    settings = target.module.config
    num_layers = int(settings.num_hidden_layers)
    config = overridden(config, keys, num_layers)
    check_target(config, int(settings.hidden_size), target.vocab_size, num_layers)
    layers = config.feature_layers(num_layers)
    check_hidden_layers(target.module, layers)
    # The config's dtype is that of training; tools run a head in its target's.
    dtype = target.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)
    lent = _lent_by(target.module)
    whole = lent.head.new_empty(target.vocab_size, lent.head.shape[1])
    # Where as many ranks share both models, each of them holds the part that it needs.
    is_apart = lent.head.shape != whole.shape and parallel.size != target.parallel.size
    lent = replace(lent, head=whole)
    if is_dummy:
        is_lent = serves(lent.embedding, shapes_of(config)[EMBEDDING], dtype)
        borrows = frozenset({EMBEDDING} if is_lent else ())
    else:
        borrows = borrowed_by(config, place, dtype, lent, spec.allow_pickle)
    return HeadDescription(
        spec=spec,
        place=place,
        config=config,
        dtype=dtype,
        device=device,
        max_len=max_len,
        num_target_layers=num_layers,
        feature_layers=layers,
        borrows=borrows,
        gathers_head=is_apart and HEAD in borrows,
        parallel=parallel,
    )


def _lent_by(module: Any) -> Borrowed:
    """Embedding and head of a transformers model, or the part of its head that a rank holds."""
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    return Borrowed(inputs.weight.data, plain_weight(outputs.weight))
