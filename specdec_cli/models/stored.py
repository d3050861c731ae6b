"""Weights that stay as a checkpoint stores them: the matrices that do, and their readers.

`specdec_kernels.linear.stored` has the arithmetic. Only fused layers read such weights; those of
other families are dequantised while loading.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from specdec_kernels.linear.stored import KINDS, Storage, Stored
from torch import Tensor, nn

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.conversion import converted
from specdec_cli.models.fused_layer import family_of, matrices
from specdec_cli.models.gate import quantisation
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.held import StoredParameter
from specdec_cli.models.quantised import read_stored, scaled, scheme_of
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tp import Shards
from specdec_cli.models.weights import Fields, Part, WrongShape, tensor_names

ReadStored = Callable[[Part | None], Stored]


def _unread(part: Part | None = None) -> torch.Tensor:
    raise AssertionError("only its name is used")


def choose_form(module: Any, spec: ModelSpec, place: Path, shards: Shards) -> None:
    """Mark the matrices that are to be held as stored. Raises `SetupError` for a quantisation that
    is not understood, and `UsageError` where weights cannot stay as they are."""
    scheme = None
    if not is_gguf(place) and quantisation(module.config) is not None:
        scheme = scheme_of(module.config.quantization_config, spec.name)
    if spec.weights != "stored":
        return
    if scheme is None or family_of(module) is None:
        reason = "its weights are not float8"
        if scheme is not None:
            reason = f"layers of {module.config.model_type} read plain weights"
        raise UsageError(f"{spec.role}.weights: stored does not suit {spec.name}: {reason}")
    names = None
    if spec.load_format != "dummy":
        held = scaled(tensor_names(place)).values()
        names = converted(module, dict.fromkeys(held, _unread))[0].keys()
    _hold_as_stored(module, scheme.storage, names, shards, spec.name)


def _hold_as_stored(
    module: Any, storage: Storage, names: Collection[str] | None, shards: Shards, model: str
) -> None:
    """Mark the matrices of a module on meta, which has a fused form, that are held as stored.

    names: the module's names of matrices that the checkpoint has scales of; without a checkpoint
    None, for all but the head. shards: this rank's parts. model: its name in messages. A tied head
    stays plain, as the embedding does.

    Raises `Unsupported`, which names the tensor, for groups that a part would cut, and for products
    of which only a part is stored.
    """
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        is_matrix = isinstance(owner, nn.Linear) and leaf == "weight"
        is_stacked = parameter.dim() == 3 and not getattr(owner, "is_transposed", True)
        is_tied = parameter is embedding or name in shards.tied
        if is_tied or not (is_matrix or is_stacked):
            continue
        if name in names if names is not None else owner is not head:
            _check_edges(storage, parameter, shards.parts.get(name), f"{name} of {model}")
            setattr(owner, leaf, StoredParameter.like(parameter, storage))
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in (group for layer in module.model.layers for group in matrices(layer)):
        if len({getattr(parameter, "stored_as", None) for parameter in group}) > 1:
            told = " and ".join(name_of[id(parameter)] for parameter in group)
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


def stored_reader(name: str, fields: Fields, storage: Storage, model: str) -> ReadStored:
    """A reader of one weight, or of this rank's part; it raises as `read_stored` does."""

    def read(part: Part | None = None) -> Stored:
        whole = read_stored(name, fields, storage, model)
        if part is not None and whole.shape != part.shape:
            raise WrongShape(whole.shape)
        return whole if part is None else part_of(whole, part)

    return read
