"""Convert the tensors of a checkpoint to those of a module, as transformers' conversion tables
describe."""

import re
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from specdec_cli.models.weights import Part, Read, WrongShape

# Buffers that earlier versions of transformers saved in checkpoints. Later versions compute them.
_NEVER_USED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$")


def converted(module: Any, tensors: dict[str, Read]) -> tuple[dict[str, Read], list[str]]:
    """Return a reader for each tensor of `module`, keyed by its name there, and a list of the
    file's tensors that nothing uses.

    tensors: a reader for each tensor of the file, keyed by its name there.

    The list leaves out tensors that are known to be unused in this family of models. A reader
    raises `ValueError` if it joins tensors whose shapes do not fit together.
    """
    table = get_model_conversion_mapping(module)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    wanted = module.state_dict()
    readers: dict[str, Read] = {}
    groups: dict[str, _Group] = {}
    unused: list[str] = []
    # Sort names by the numbers in them, because tensors are joined in the order in which they are
    # added.
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, module.base_model_prefix, wanted
        )
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            unused.append(key)
            continue
        if pattern is None:
            readers[name] = tensors[key]
            continue
        if name not in groups:
            groups[name] = _Group(module, name, deepcopy(by_pattern[pattern]))
            readers |= {n: partial(groups[name].read, n) for n in groups[name].names}
        groups[name].converter.add_tensor(name, key, pattern, tensors[key])
    known = [*(module._keys_to_ignore_on_load_unexpected or ()), *_NEVER_USED]
    return readers, [key for key in unused if not any(re.search(p, key) for p in known)]


class _Group:
    """Tensors of a file that are converted together, to one or several tensors of the module.

    names: the names that the resulting tensors have in the module.
    name: the first of these names.
    """

    def __init__(self, module: Any, name: str, converter: Any) -> None:
        self.module, self.name, self.converter = module, name, converter
        targets = converter.target_patterns
        self.names = [name.replace(targets[0], target, 1) for target in targets]
        self._made: dict[str, torch.Tensor] = {}

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Return the module's tensor `name`, or only `part` of it.

        If the group only stacks the matrices of experts, `part` is read and converted without the
        rest. Otherwise the first call converts the whole group, and each tensor can be read only
        once.
        """
        if part is not None and (of_each := _part_of_each(self.converter, part)) is not None:
            # If the tensors do not fit together, convert them whole below, so that the error shows
            # their shapes.
            with suppress(WrongShape, RuntimeError):
                if (found := self._stacked(of_each)).shape == part.local_shape:
                    return found
        if not self._made:
            try:
                made = self.converter.convert(
                    self.name, model=self.module, config=self.module.config
                )
            except RuntimeError as problem:
                raise ValueError(str(problem)) from problem
            self._made = {n: t[0] if isinstance(t, list) else t for n, t in made.items()}
        whole = self._made.pop(name)
        return whole if part is None else part.of(whole)

    def _stacked(self, of_each: Part) -> torch.Tensor:
        """Read only the part `of_each` of every tensor in the group, and convert these parts to the
        module's tensor."""
        converter = copy(self.converter)
        converter.collected_tensors = {
            pattern: [partial(read, of_each) for read in reads]
            for pattern, reads in self.converter.collected_tensors.items()
        }
        made = converter.convert(self.name, model=self.module, config=self.module.config)
        (found,) = made.values()
        tensor: torch.Tensor = found
        return tensor


def _part_of_each(converter: Any, part: Part) -> Part | None:
    """Return the part of each expert's matrix that must be read to make `part` of the stacked
    matrices. Returns None if this is not possible, for example because the converter does more than
    stack the matrices and join gate and up."""
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    if steps[:1] != [(MergeModulelist, 0)] or part.dim == 0:
        return None
    of_each = replace(part, dim=part.dim - 1, shape=part.shape[1:])
    if steps[1:] == [(Concatenate, 1)]:
        joined = len(converter.source_patterns)
        if part.dim != 1 or part.blocks != joined:
            return None
        return replace(of_each, blocks=1, shape=(part.shape[1] // joined, *part.shape[2:]))
    return None if steps[1:] else of_each
