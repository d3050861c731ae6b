"""Weights that stay as a checkpoint stores them: the matrices that do, and their readers.

`specdec_kernels.linear.stored` has the arithmetic. Only fused layers read such weights; those of
other families are dequantised while loading.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdec_kernels.linear.stored import KINDS, Storage, Stored
from torch import Tensor, nn

from specdec_cli.errors import SetupError
from specdec_cli.models.fused_layer import family_of, matrices
from specdec_cli.models.held import StoredParameter
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.tp import Shards
from specdec_cli.models.weights import Fields, Part, Read


def hold_as_stored(
    module: Any, storage_of: Callable[[str], Storage | None], shards: Shards, model: str
) -> None:
    """Mark the matrices of a module on meta that are held as stored, if its layers can read them.

    storage_of: the storage of a matrix, by the module's name for it, or None for a plain one.
    shards: this rank's parts. model: its name in messages. A tied head stays plain, as the
    embedding does.

    Raises `Unsupported`, which names the tensor, for groups that a part would cut, and for products
    of which only a part is stored.
    """
    if family_of(module) is None:
        return
    embedding = module.get_input_embeddings().weight
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        is_matrix = isinstance(owner, nn.Linear) and leaf == "weight"
        is_stacked = parameter.dim() == 3 and not owner.is_transposed
        is_tied = parameter is embedding or name in shards.tied
        if is_tied or not (is_matrix or is_stacked):
            continue
        if (storage := storage_of(name)) is not None:
            _check_edges(storage, parameter, shards.parts.get(name), f"{name} of {model}")
            setattr(owner, leaf, StoredParameter.like(parameter, storage))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in (group for layer in module.model.layers for group in matrices(layer)):
        if len({getattr(parameter, "stored_as", None) for parameter in group}) > 1:
            told = " and ".join(names[id(parameter)] for parameter in group)
            raise Unsupported(model, f"{told} are one product, and stored in different ways")


def _check_edges(storage: Storage, parameter: Tensor, part: Part | None, told: str) -> None:
    """Raise `SetupError` for a code or a group that the matrix or this rank's part would cut."""
    width = parameter.shape[-1]
    if width % (per_code := KINDS[storage.kind].per_code):
        raise SetupError(f"{told} has {width} columns, and {per_code} of them share a code")
    if part is None:
        return
    dim, size = part.dim - len(part.shape), part.shape[part.dim] // part.blocks
    if not all(storage.can_cut(dim, place, size) for place in (part.start, part.stop)):
        shared = "columns" if dim == -1 else "rows"
        raise SetupError(
            f"{told} cannot be split over ranks at {shared} {part.start} and {part.stop} of "
            f"{size}: {storage.group[dim]} {shared} share a scale",
            "take fewer ranks",
        )


def stored_parameters(module: Any) -> dict[str, StoredParameter]:
    """The parameters of a module that are held as stored, by name."""
    found = module.named_parameters()
    return {name: p for name, p in found if isinstance(p, StoredParameter)}


def part_of(whole: Stored, part: Part) -> Stored:
    """This rank's part of a stored weight."""
    size = part.shape[part.dim] // part.blocks
    cut = whole.columns if part.dim == len(part.shape) - 1 else whole.rows
    found = [
        cut(first + part.start, first + part.stop) for first in range(0, size * part.blocks, size)
    ]
    return found[0] if part.blocks == 1 else Stored.joined(found)


def stored_reader(
    name: str, parameter: StoredParameter, fields: Fields, model: str
) -> Callable[[Part | None], Stored]:
    """A reader of one weight, or of this rank's part.

    It raises `SetupError`, which names the tensor, for a field that is missing, or has another
    shape or dtype.
    """
    storage, told = parameter.stored_as, f"{name} of {model}"

    def field(word: str, readers: dict[str, Read], shape: Sequence[int], kind: object) -> Tensor:
        if name not in readers:
            raise SetupError(f"{told} lacks its {word}", _DAMAGED)
        tensor, wanted = readers[name](), (list(shape), kind)
        if (found := (list(tensor.shape), tensor.dtype)) != wanted:
            theirs, ours = (f"{str(k).removeprefix('torch.')} of {s}" for s, k in (found, wanted))
            raise SetupError(f"{told} has {word} that are {theirs}, not {ours}", _DAMAGED)
        return tensor

    def read(part: Part | None = None) -> Stored:
        shape = parameter.shape if part is None else part.shape
        shared, zeros = storage.scales_shape(shape), None
        codes = field("codes", fields.codes, storage.codes_shape(shape), KINDS[storage.kind].codes)
        scales = field("scales", fields.scales, shared, torch.float32)
        if storage.has_zeros:
            zeros = field("zeros", fields.zeros, shared, torch.uint8)
        whole = Stored(codes, scales, zeros, storage)
        return whole if part is None else part_of(whole, part)

    return read


_DAMAGED = "config.json and the weights do not belong together, or a file is missing"
