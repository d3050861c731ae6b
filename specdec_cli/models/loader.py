"""Fill a transformers module on meta with weights, from a checkpoint or at random."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from specdec_kernels.linear.stored import FP8, Stored
from transformers import initialization

from specdec_cli.errors import SetupError
from specdec_cli.models.conversion import converted
from specdec_cli.models.formats import scheme_of
from specdec_cli.models.gate import quantisation
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tensors import kept_readers
from specdec_cli.models.gguf.tensors import readers as gguf_readers
from specdec_cli.models.held import LARGE, StoredParameter, return_unused
from specdec_cli.models.quantised import (
    changes_nothing,
    dequantised,
    fields_of,
    no_scales,
    read_stored,
)
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import (
    quantised,
    storages_of,
    stored_parameters,
    stored_reader,
)
from specdec_cli.models.tp import WHOLE, Shards
from specdec_cli.models.weights import Fields, Part, WrongShape, open_checkpoint, same
from specdec_cli.text import counted, one_line, reason_of

_log = logging.getLogger("specdec")
_DUMMY_TILE = 1 << 20  # values drawn for a dummy weight on CPU; larger tensors repeat them


class Names(Protocol):
    """Translates the names of a module's tensors: `own` turns a name in the file into the module's
    name, and `stored` does the reverse. `own` returns None for a tensor of another module."""

    def own(self, stored: str, /) -> str | None: ...
    def stored(self, own: str, /) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """A model on meta, with all that is needed to load its weights.

    draft_tensors: matches the names of tensors in the model's files that only its draft reads; None
    if there are none.
    names: translates tensor names and leaves out those of other models in the same files; None if
    the names need no translation.
    """

    spec: ModelSpec
    place: Path
    module: Any
    dtype: torch.dtype
    shards: Shards = WHOLE
    draft_tensors: re.Pattern[str] | None = None
    names: Names | None = None

    def own(self, stored: str) -> str | None:
        """Return the module's name for a tensor in the file; None for another module's tensor."""
        return stored if self.names is None else self.names.own(stored)


def load(
    description: Unfilled,
    device: torch.device,
    borrowed: dict[str, torch.nn.Parameter] | None = None,
) -> Any:
    """Load the weights on `device`, into a copy of the described module, and return the copy.

    A copy is needed because fused layers and heads later change the module that they are made from.
    The description itself stays on meta, so it can be loaded again.

    borrowed: parameters of another model, by name, that replace the module's own. A tied parameter
    is replaced only under the given names. Raises a `SetupError` that names the file or tensor if
    the checkpoint does not fit the config.
    """
    description = replace(description, module=deepcopy(description.module))
    module, spec, borrowed = description.module, description.spec, borrowed or {}
    if spec.load_format == "dummy":
        _fill(description, device, _dummy_source(module, device), borrowed)
    else:
        with _opened(description) as (tensors, unused):
            source = _checkpoint_source(description, tensors, unused, borrowed.keys(), device)
            _fill(description, device, source, borrowed)
    _restore_buffers(module, device)
    return module


Field = TypeVar("Field")


def _of_module(description: Unfilled, fields: dict[str, Field]) -> dict[str, Field]:
    """Leave out the tensors of other modules, but keep the file's names: a quantisation's config
    uses these."""
    return {name: field for name, field in fields.items() if description.own(name) is not None}


def _by_own_names(description: Unfilled, fields: dict[str, Field]) -> dict[str, Field]:
    """Rename tensors that belong to the model as in the module, and leave out all others. If
    `description.names` is None, return all unchanged."""
    found = {description.own(name): field for name, field in fields.items()}
    return {name: field for name, field in found.items() if name is not None}


ReadWeight = Callable[[Part | None], torch.Tensor | Stored]


@contextmanager
def _opened(description: Unfilled) -> Iterator[tuple[dict[str, ReadWeight], list[str]]]:
    """Open a model's files. Yields readers of the module's tensors, by the module's names, and the
    names of the tensors in the files that are not used."""
    module, spec, place = description.module, description.spec, description.place
    if is_gguf(place):
        header, held = read_model(place), stored_parameters(module)
        plain, unused = gguf_readers(module, header, description.dtype)
        as_stored = kept_readers(module, header) if spec.weights != FP8 else {}
        kept: dict[str, ReadWeight] = {
            name: stored_reader(partial(read, held[name].stored_as), held[name])
            for name, (_, read) in as_stored.items()
            if name in held
        }
        yield {**plain, **kept}, unused
        return
    with open_checkpoint(place, spec.allow_pickle) as found:
        tensors = _of_module(description, found)
        stored, fields = stored_parameters(module), Fields(tensors, {}, {}, {})
        if quantisation(module.config) is not None:
            settings = module.config.quantization_config
            if stored:
                fields = fields_of(tensors, scheme_of(settings, spec.name), spec.name)
            else:
                numbers = dequantised(tensors, settings, description.dtype, spec.name)
                fields = Fields(numbers, {}, {}, {})
        fields = Fields(*(_by_own_names(description, each) for each in fields))
        try:
            of_fields = fields.codes, fields.scales, fields.zeros
            (readers, unused), *others = [
                converted(module, f) if f else ({}, []) for f in of_fields
            ]
        except Exception as problem:
            raise SetupError(
                f"the weights of {spec.name} cannot be read as config.json describes them "
                f"({reason_of(problem)})",
                "config.json and the weights do not belong together",
            ) from problem
        if quantisation(module.config) is not None:
            unused = [name for name in unused if not changes_nothing(name, fields.codes[name])]
        storages = storages_of(module, fields, spec.name) if fields.storages else {}
        (scales, _), (zeros, _) = others
        own = Fields(readers, scales, zeros, storages)
        kept = {
            name: stored_reader(partial(read_stored, name, own, spec.name), held)
            for name, held in stored.items()
            if name in storages
        }
        if rest := storages.keys() - stored.keys():
            # Dequantise before gate and up are joined, because gate may end inside a group of rows.
            numbers = dequantised(tensors, settings, description.dtype, spec.name)
            plain, _ = converted(module, _by_own_names(description, numbers))
            kept |= {name: plain[name] for name in rest}
        yield {**readers, **kept}, unused


Source = Callable[[str, torch.Tensor, Part | None], torch.Tensor | Stored | None]


def _fill(
    description: Unfilled,
    device: torch.device,
    source: Source,
    borrowed: dict[str, torch.nn.Parameter],
) -> None:
    """Fill this rank's part of every parameter and stored buffer from `source`.

    A tied parameter is read once. A head that is tied to the embedding and split over ranks becomes
    a view of the embedding. transformers' own initialisation fills tensors that the source lacks.
    """
    module, shards = description.module, description.shards
    # The family keeps tensors of these names, such as routers' biases, in float32.
    plan = module._get_dtype_plan(description.dtype).items()
    globs = [glob.replace("*", ".*") for glob, kept in plan if kept == torch.float32]
    exact = re.compile("|".join(globs)) if globs else None
    done: dict[int, torch.Tensor] = {}
    by_name: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, owner, leaf, meta in _stored(module):
            if name in borrowed:
                owner._parameters[leaf] = borrowed[name]
                continue
            part, origin = shards.parts.get(name), shards.tied.get(name, name)
            if part is not None and origin != name and origin in by_name:
                owner._parameters[leaf] = torch.nn.Parameter(part.of(by_name[origin].data), False)
                owner._parameters[leaf]._is_hf_initialized = True
                continue
            if id(meta) not in done:
                is_zero = name in shards.zero
                value = torch.zeros(()) if is_zero else source(origin, meta, part)
                kind = torch.float32 if exact is not None and exact.search(name) else meta.dtype
                filled: torch.Tensor
                if isinstance(value, Stored):
                    assert isinstance(meta, StoredParameter)
                    copy = value.copied(device)
                    how = {"is_transposed": meta.is_transposed}
                    filled = StoredParameter.like(meta, value.storage, copy, **how)
                else:
                    filled = _placed(value, meta.shape, kind, device)
                    if leaf in owner._parameters:
                        filled = torch.nn.Parameter(filled, requires_grad=False)
                if value is not None:
                    filled._is_hf_initialized = True  # type: ignore[attr-defined]
                done[id(meta)] = filled
                came = value.codes if isinstance(value, Stored) else value
                if came is not None and came.data_ptr() != filled.data_ptr():
                    # Return the memory of the source buffer now. Otherwise, later weights would be
                    # allocated in gaps of such freed buffers and keep them reserved. With a 70B
                    # model on two GPUs, this would waste 17 GiB. When weights are quantised to fp8
                    # on a CPU, loading would take three times their size.
                    left_on = came.device
                    del value, came
                    if filled.numel() >= LARGE:
                        return_unused(left_on)
            held = owner._parameters if leaf in owner._parameters else owner._buffers
            held[leaf] = by_name[name] = done[id(meta)]


def _placed(
    value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a weight on `device` whose memory nothing else uses: the value itself or a copy. If
    there is no value, return zeros, because transformers' initialisation leaves some tensors unset,
    such as those of apertus's activations."""
    if value is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    is_whole = value.untyped_storage().nbytes() == value.nbytes and value.is_contiguous()
    # Always copy a value on the host, because it may be a memory-mapped file.
    if value.is_cuda and is_whole and (value.device, value.dtype) == (device, dtype):
        assert value.shape == shape
        return value
    return torch.empty(shape, dtype=dtype, device=device).copy_(value)


def _stored(module: Any) -> list[tuple[str, Any, str, torch.Tensor]]:
    """Return the tensors in a module's state dict, as (name, owning module, name in that module,
    tensor). A tied tensor appears under each of its names."""
    found = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        prefix, _, leaf = name.rpartition(".")
        found.append((name, module.get_submodule(prefix), leaf, tensor))
    return found


def _checkpoint_source(
    description: Unfilled,
    readers: dict[str, ReadWeight],
    unused: list[str],
    borrowed: Set[str],
    device: torch.device,
) -> Source:
    """Return a function that reads tensors from a checkpoint, for `_fill`. Raises `SetupError` if a
    tensor of the module is missing there."""
    module, spec, tied = description.module, description.spec, description.shards.tied
    told = description.names.stored if description.names is not None else str
    method, lent = quantisation(module.config), description.draft_tensors
    unused = [name for name in unused if lent is None or not lent.search(name)]
    if unused:
        _log.warning(
            "%s in the weights of %s will not be used, first %s: not in the model that config.json "
            "describes",
            *(counted(len(unused), "tensor"), spec.name, one_line(unused[0])),
        )
    # A file may hold a tied tensor under any of its names.
    identity = {name: id(tensor) for name, _, _, tensor in _stored(module)}
    names: dict[int, list[str]] = {}
    for name in identity:
        names.setdefault(identity[tied.get(name, name)], []).append(name)
    missing = []
    found: dict[str, ReadWeight] = {}
    for aliases in names.values():
        held = [name for name in aliases if name in readers]
        if held:
            found |= dict.fromkeys(aliases, _same(held, readers, spec))
        elif not borrowed >= set(aliases):
            missing.append(aliases[0])
    if missing:
        raise SetupError(
            f"the weights of {spec.name} lack {counted(len(missing), 'tensor')}, first "
            f"{told(missing[0])}",
            "its config and the weights do not belong together, or a file is missing",
        )

    def source(name: str, meta: torch.Tensor, part: Part | None) -> torch.Tensor | Stored:
        shape = list(meta.shape if part is None else part.shape)
        # A weight that is quantised while it is loaded is read whole, because its scales cover the
        # columns of all ranks.
        is_whole = isinstance(meta, StoredParameter) and spec.weights == FP8
        try:
            value = found[name](None if is_whole else part)
        except WrongShape as problem:
            raise _wrong_shape(told(name), spec, list(problem.found), shape) from None
        except ValueError as problem:
            raise SetupError(
                f"{told(name)} of {spec.name} cannot be put together from its parts in the weights "
                f"({reason_of(problem)})",
                "its config and the weights do not belong together, or a file is missing",
            ) from None
        # Without this check, quantised codes whose scales are unknown would be copied as weights.
        is_plain = isinstance(value, Stored) or (
            value.element_size() > 1 and value.is_floating_point()
        )
        if meta.is_floating_point() and not is_plain:
            lacks = "config.json does not say how" if method is None else no_scales(name, unused)
            raise SetupError(
                f"{told(name)} of {spec.name} is quantised, but {lacks}",
                "take the checkpoint that it was made from",
            )
        if is_whole and isinstance(value, torch.Tensor) and list(value.shape) == shape:
            assert isinstance(meta, StoredParameter)
            value = quantised(meta, value.to(device), part)
        wanted = meta.shape_written if isinstance(meta, StoredParameter) else meta.shape
        if tuple(value.shape) != tuple(wanted):
            raise _wrong_shape(told(name), spec, list(value.shape), shape)
        return value

    return source


def _same(names: list[str], readers: dict[str, ReadWeight], spec: ModelSpec) -> ReadWeight:
    """Return the reader of one tensor that the weights hold under several names. Raises
    `SetupError` if the stored tensors differ."""
    if len(names) == 1:
        return readers[names[0]]
    first = readers[names[0]](None)  # kept, since not every tensor can be read twice
    assert isinstance(first, torch.Tensor), "tied weights are plain"
    for name in names[1:]:
        again = readers[name](None)
        assert isinstance(again, torch.Tensor)
        # torch cannot compare float8 codes with unquantised values, so such a pair counts as
        # different.
        is_code = [tensor.element_size() == 1 for tensor in (first, again)]
        if is_code[0] != is_code[1] or not torch.equal(first, again):
            raise SetupError(
                f"{names[0]} and {name} of {spec.name} differ, but config.json says that they are "
                "the same",
                "transformers uses both, vLLM only the first; to use both, set "
                "tie_word_embeddings to false in config.json",
            )
    return partial(same, first)


def _wrong_shape(name: str, spec: ModelSpec, stored: list[int], wanted: list[int]) -> SetupError:
    return SetupError(
        f"{name} of {spec.name} has shape {stored} in the weights, but its config requires "
        f"{wanted}",
        "its config and the weights do not belong together",
    )


def _dummy_source(module: Any, device: torch.device) -> Source:
    """Return a function that draws random matrices, for `_fill`. They are seeded by parameter name,
    and each rank takes its part of them.

    Norms and biases, including stacked ones, are left to transformers' initialisation, which makes
    them neutral. Attention sinks are drawn here, because that initialisation would draw different
    ones on each rank.
    """
    std = float(getattr(module.config, "initializer_range", 0.02))

    def source(name: str, meta: torch.Tensor, part: Part | None) -> torch.Tensor | Stored | None:
        is_vector = meta.dim() < 2 and not name.endswith(".sinks")
        if is_vector or "norm" in name or "bias" in name:
            return None
        shape = meta.shape if part is None else part.shape
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator(device).manual_seed(seed)
        count = math.prod(shape)
        if device.type == "cpu":
            # Drawing billions of values takes minutes on a CPU; repeating a tile does not.
            tile = torch.empty(min(count, _DUMMY_TILE)).normal_(0.0, std, generator=generator)
            repeats = -(-count // tile.numel())
            value = tile.repeat(repeats)[:count].view(shape)
        else:
            value = torch.empty(shape, dtype=meta.dtype, device=device)
            value.normal_(0.0, std, generator=generator)
        if isinstance(meta, StoredParameter):
            return quantised(meta, value, part)
        return value if part is None else part.of(value)

    return source


def _restore_buffers(module: Any, device: torch.device) -> None:
    """Give initial values to buffers, and to parameters that were not filled, such as vectors of a
    dummy model. Random values have a fixed seed."""
    for owner in module.modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
    touched = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(touched):
        # On a CPU, avoid torch.manual_seed. It would also schedule the seeding of CUDA for later,
        # and record a stack trace for that.
        (torch.manual_seed if touched else torch.default_generator.manual_seed)(0)
        with initialization.guard_torch_init_functions():
            module.initialize_weights()
