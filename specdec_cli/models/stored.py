"""Chooses the weights of fused layers that stay quantised as in the checkpoint, and reads them.

Weights that are quantised while they are loaded are handled here, too.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from specdec_kernels.linear.stored import FP8, KINDS, Storage, Stored
from torch import Tensor, nn

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.conversion import converted
from specdec_cli.models.formats import Scheme, scheme_of
from specdec_cli.models.fused_layer import family_of, matrices
from specdec_cli.models.gate import quantisation
from specdec_cli.models.gguf import tensors as gguf
from specdec_cli.models.gguf.blocks import KEPT, shared_by
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import Header, is_gguf
from specdec_cli.models.held import StoredParameter
from specdec_cli.models.quantised import fields_of
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tp import Shards
from specdec_cli.models.weights import Fields, Part, WrongShape, open_checkpoint, unread

_log = logging.getLogger("specdec")
ReadStored = Callable[[Part | None], Stored]


def choose_form(
    module: Any, spec: ModelSpec, place: Path, shards: Shards, device: torch.device
) -> None:
    """Choose the matrices of a module on meta that stay quantised as in the checkpoint, or that are
    quantised while they are loaded, and mark them as `StoredParameter`.

    If `spec.weights` is `stored` or `fp8`, raises `UsageError` if the model as a whole cannot be
    held in that form, and `SetupError` if one of its matrices cannot. If it is `auto`, all weights
    are dequantised in these cases, and a warning is logged. Raises `SetupError` for an unknown
    quantisation.
    """
    header = read_model(place) if is_gguf(place) else None
    scheme, is_plain = None, header is None or gguf.is_plain(header)
    if header is None and quantisation(module.config) is not None:
        scheme, is_plain = scheme_of(module.config.quantization_config, spec.name), False
        if scheme.unused:
            _log.warning(
                "%s was quantised for %s, but here activations keep the run's dtype: tools that "
                "quantise them may generate different text",
                *(spec.name, " and ".join(scheme.unused)),
            )
    wanted, is_asked = spec.weights, spec.weights in ("stored", FP8)
    if wanted == "auto":
        wanted = "stored" if device.type == "cuda" and not is_plain else "dequantise"
    if wanted == "dequantise":
        return
    reason = None
    if wanted == FP8 and not is_plain:
        reason = "its weights are quantised already"
    elif wanted == "stored" and is_plain:
        reason = "its weights are not quantised"
    elif family_of(module) is None:
        reason = f"layers of {module.config.model_type} read plain weights"
    if reason is None:
        if header is not None and wanted != FP8:
            storages = _gguf_storages(module, header)
        else:
            storages = dict(_asked_storages(module, spec, place, scheme))
        problems = _hold_as_stored(module, storages, shards, spec.name)
        if not problems and (header is None or stored_parameters(module)):
            return
        reason = f"none of its matrices is {' or '.join(KEPT)}; other forms are dequantised"
        if problems:
            first = next(iter(problems.values()))
            if is_asked:
                raise first
            reason = f"{len(problems)} matrices do not fit; the first: {first.message}"
    if is_asked:
        raise UsageError(f"{spec.role}.weights: {wanted} does not suit {spec.name}: {reason}")
    _log.warning("weights of %s are dequantised: %s", spec.name, reason)


def _gguf_storages(module: Any, header: Header) -> dict[str, Storage]:
    """Return the storage of each matrix that can stay quantised as in the file, by name.

    The matrices of a merged matmul must have the same storage, but their types in the file may
    differ: files of Q4_K have value projections in Q6_K. Such matrices get a storage that can hold
    the values of all of them.
    """
    found = {name: own for name, (own, _) in gguf.kept_readers(module, header).items()}
    for names in _products(module):
        own = {found[name] for name in names if name in found}
        if len(own) > 1 and found.keys() >= set(names):
            found |= dict.fromkeys(names, shared_by(own))
    return found


def _products(module: Any) -> list[list[str]]:
    """Return the names of the matrices in each merged matmul."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [group for layer in module.model.layers for group in matrices(layer)]
    return [[name_of[id(parameter)] for parameter in group] for group in groups]


def _asked_storages(
    module: Any, spec: ModelSpec, place: Path, scheme: Scheme | None
) -> Mapping[str, Storage]:
    """Return the storage that each matrix of a module should have, by name: the same as in the
    checkpoint, or fp8 if the checkpoint is not quantised.

    A tied head may be among the matrices; the caller has to leave it out. scheme: the checkpoint's
    quantisation; None if it has none.
    """
    if scheme is not None and spec.load_format != "dummy":
        fields = Fields({}, {}, {}, {})
        # Ignore errors for missing and damaged files here: loading will report them.
        with suppress(SetupError), open_checkpoint(place, spec.allow_pickle) as tensors:
            fields = fields_of(tensors, scheme, spec.name)
        return storages_of(module, fields, spec.name)
    head, found = module.get_output_embeddings(), dict[str, Storage]()
    for name, owner, _, _ in _matrices(module):
        path = name.removesuffix(".weight")
        if owner is head or (scheme is not None and scheme.leaves(path)):
            continue
        group = None if scheme is None else scheme.of(path)
        if scheme is None:
            found[name] = Storage(FP8)
        elif group is not None:
            found[name] = group.storage
    return found


def storages_of(module: Any, fields: Fields, model: str) -> dict[str, Storage]:
    """Return the storages of a module's quantised matrices, by their names in the module.

    fields: the checkpoint's tensors, by their names in the checkpoint. model: its name, for
    messages. Raises `Unsupported` if the module combines several of the checkpoint's matrices into
    one, as it does with experts, and they have different storages.
    """
    found: dict[str, Storage | None] = {}
    plain: dict[str, Any] = {n: unread for n in fields.codes if n not in fields.storages}
    groups: list[tuple[Storage | None, dict[str, Any]]] = [(None, plain)]
    for storage in dict.fromkeys(fields.storages.values()):
        alike = [name for name, own in fields.storages.items() if own == storage]
        groups.append((storage, dict.fromkeys(alike, unread)))
    for own, names in groups:
        for name in converted(module, names)[0]:
            if found.setdefault(name, own) != own:
                raise Unsupported(model, f"parts of {name} are stored in different ways")
    return {name: storage for name, storage in found.items() if storage is not None}


def _matrices(module: Any) -> Iterator[tuple[str, Any, str, nn.Parameter]]:
    """Yield the matrices of a module's linear layers and stacked experts, as (name, owning module,
    name in that module, parameter)."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        is_stacked = parameter.dim() == 3 and hasattr(owner, "is_transposed")
        if is_stacked or (isinstance(owner, nn.Linear) and leaf == "weight"):
            yield name, owner, leaf, parameter


def _hold_as_stored(
    module: Any, storages: Mapping[str, Storage], shards: Shards, model: str
) -> dict[str, SetupError]:
    """Replace the parameters that have an entry in `storages` by `StoredParameter`s.

    A tied head is left as it is, because the embedding reads the same weight.

    module: on meta, of a family that can be fused.
    shards: this rank's parts of the module's tensors.

    Returns an error, by name, for each matrix that has an entry but does not fit. Either the matrix
    or this rank's part of it is not a whole number of codes and groups (values that share a scale),
    or the matrices of one merged matmul have different storages. An ordinary matrix may end within
    a group of rows, but an expert's may not: the next expert's groups would begin at a wrong row.
    """
    embedding = module.get_input_embeddings().weight
    problems: dict[str, SetupError] = {}
    chosen: dict[str, tuple[Any, str, StoredParameter]] = {}
    for name, owner, leaf, parameter in _matrices(module):
        is_tied = parameter is embedding or name in shards.tied
        if is_tied or (storage := storages.get(name)) is None:
            continue
        is_transposed = bool(getattr(owner, "is_transposed", False))
        held = StoredParameter.like(parameter, storage, is_transposed=is_transposed)
        part, joined = shards.parts.get(name), 2 if leaf == "gate_up_proj" else 1
        if (problem := _edges(held, part, f"{name} of {model}", joined)) is None:
            chosen[name] = owner, leaf, held
        else:
            problems[name] = problem
    for names in _products(module):
        if len({chosen[n][2].stored_as if n in chosen else None for n in names}) > 1:
            told = f"{' and '.join(names)} form one matmul, but are stored in different ways"
            for name in names:
                problems.setdefault(name, Unsupported(model, told))
                chosen.pop(name, None)
    for owner, leaf, held in chosen.values():
        setattr(owner, leaf, held)
    return problems


def _edges(held: StoredParameter, part: Part | None, told: str, joined: int) -> SetupError | None:
    """Return an error if the columns of a group do not lie together, if a row of the matrix is not
    a whole number of codes, if an expert's matrix ends inside a group of rows, or if this rank's
    part would begin or end inside a code or a group; else None.

    part: this rank's part; None if it has the whole matrix. told: the matrix's name, for the error.
    joined: how many matrices of the checkpoint each expert's matrix consists of.
    """
    storage, (*stacked, rows, width) = held.stored_as, held.shape_written
    if storage.group == (1, 1):
        return SetupError(
            f"{told} has groups whose columns do not lie together (desc_act or actorder in "
            "quantization_config), but matmuls read groups of neighbouring columns",
            "take weights: dequantise",
        )
    if width % (per_code := KINDS[storage.kind].per_code):
        return SetupError(f"{told} has {width} columns, which is not a multiple of {per_code}")
    if stacked and rows // joined % storage.group[0]:
        return SetupError(
            f"{told} has matrices of {rows // joined} rows, which is not a multiple of "
            f"{storage.group[0]}, the number of rows that share a scale",
            "take weights: dequantise",
        )
    if part is None:
        return None
    part = stored_part(held, part)
    dim, size = part.dim - len(part.shape), part.shape[part.dim] // part.blocks
    if all(storage.can_cut(dim, place, size) for place in (part.start, part.stop)):
        return None
    shared = "columns" if dim == -1 else "rows"
    return SetupError(
        f"{told} cannot be split over ranks at {shared} {part.start} and {part.stop} of "
        f"{size}: {storage.group[dim]} {shared} share a scale",
        "take fewer ranks, or weights: dequantise",
    )


def stored_part(held: StoredParameter, part: Part) -> Part:
    """Convert a rank's part of a parameter to the same part of its stored weight. The two differ
    for experts that transformers keeps as [experts, columns, rows]: they are stored transposed."""
    if not held.is_transposed:
        return part
    experts, columns, rows = part.shape
    return replace(part, dim=(0, 2, 1)[part.dim], shape=(experts, rows, columns))


def quantised(held: StoredParameter, numbers: Tensor, part: Part | None) -> Stored:
    """Quantise a weight and return this rank's part of it. numbers: the values of the whole weight,
    in the shape of the parameter. part: None returns the whole weight."""
    whole = held.stored_as.quantised(numbers.transpose(1, 2) if held.is_transposed else numbers)
    return part_of(whole, held, part)


def stored_parameters(module: Any) -> dict[str, StoredParameter]:
    """Return the parameters of a module that keep the checkpoint's quantised form, by name."""
    found = module.named_parameters()
    return {name: p for name, p in found if isinstance(p, StoredParameter)}


def part_of(whole: Stored, held: StoredParameter, part: Part | None) -> Stored:
    """Return this rank's part of a stored weight; all of it if `part` is None."""
    if part is None:
        return whole
    part = stored_part(held, part)
    if whole.shape != part.shape:
        raise WrongShape(whole.shape)
    size = part.shape[part.dim] // part.blocks
    cut = whole.columns if part.dim == len(part.shape) - 1 else whole.rows
    found = [
        cut(first + part.start, first + part.stop) for first in range(0, size * part.blocks, size)
    ]
    return found[0] if part.blocks == 1 else Stored.joined(found)


def stored_reader(read_whole: Callable[[], Stored], held: StoredParameter) -> ReadStored:
    """Return a function that reads one weight and returns it, or only this rank's part of it.

    It raises the same errors as `read_whole`, and `WrongShape` if the weight does not have the
    shape from which the part is taken.
    """
    return lambda part: part_of(read_whole(), held, part)
