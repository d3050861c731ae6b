"""Weights that stay as a checkpoint stores them: the matrices that do, and their readers.

`specdec_kernels.linear.stored` has the arithmetic. Only fused layers read such weights; those of
other families are dequantised while loading.
"""

from collections.abc import Callable
from typing import Any

import torch
from specdec_kernels.linear.stored import KINDS, Storage, Stored
from torch import Tensor, nn

from specdec_cli.errors import SetupError
from specdec_cli.models.fused_layer import family_of, matrices
from specdec_cli.models.held import StoredParameter
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.tp import Shards
from specdec_cli.models.weights import Fields, Part, WrongShape


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
    """A reader of one weight.

    It raises `SetupError`, which names the tensor, for a field that is missing, or has another
    shape or dtype.
    """
    storage, told = parameter.stored_as, f"{name} of {model}"
    held = {"codes": fields.codes, "scales": fields.scales}
    held |= {"zeros": fields.zeros} if storage.has_zeros else {}
    if lacking := [word for word, readers in held.items() if name not in readers]:
        raise SetupError(f"{told} lacks its {lacking[0]}", _DAMAGED)
    kinds = {"codes": KINDS[storage.kind].codes, "scales": torch.float32, "zeros": torch.uint8}

    def read(part: Part | None = None) -> Stored:
        whole = tuple(parameter.shape) if part is None else part.shape
        found: dict[str, Tensor] = {}
        for word, readers in held.items():
            is_code = word == "codes"
            shape_of = storage.codes_shape if is_code else storage.scales_shape
            own = None if part is None else _part_of_field(part, storage, is_code)
            try:
                tensor = readers[name](own)
            except WrongShape as problem:
                raise _misfit(told, word, list(problem.found), list(shape_of(whole))) from None
            wanted = list(shape_of(parameter.shape))
            if list(tensor.shape) != wanted:
                raise _misfit(told, word, list(tensor.shape), wanted)
            if tensor.dtype != kinds[word]:
                raise _misfit(told, word, tensor.dtype, kinds[word])
            found[word] = tensor
        return Stored(found["codes"], found["scales"], found.get("zeros"), storage)

    return read


def _part_of_field(part: Part, storage: Storage, is_code: bool) -> Part | None:
    """The part of the codes, or of scales and zeros, of a part of a weight; None for all of it."""
    dim = part.dim - len(part.shape)
    unit = storage.numbers_of_code(dim) if is_code else storage.group[dim]
    shape = storage.codes_shape(part.shape) if is_code else storage.scales_shape(part.shape)
    if not unit:
        return None
    return Part(part.dim, part.start // unit, -(-part.stop // unit), shape, part.blocks)


_DAMAGED = "config.json and the weights do not belong together, or a file is missing"


def _misfit(told: str, field: str, found: object, wanted: object) -> SetupError:
    found, wanted = (str(value).removeprefix("torch.") for value in (found, wanted))
    return SetupError(
        f"{told} has {field} that are {found} in the weights, and {wanted} by its config", _DAMAGED
    )
