"""Loading a transformers model for the engine: config, gate, weights, buffers.

The module is built on the meta device, so that refusing a model costs nothing. It is then filled
tensor by tensor from safetensors or GGUF, or with random numbers for `load_format: dummy`.
"""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from specdec_kernels.linear.stored import Stored
from transformers import AutoModelForCausalLM, initialization

from specdec_cli.core.kv_cache import LayerShape, block_bytes
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.attention import ATTENTION_NAME
from specdec_cli.models.config import dtype_of, eos_ids_of, line_of, max_len_of, read_config
from specdec_cli.models.conversion import converted
from specdec_cli.models.fused_layer import family_of
from specdec_cli.models.gate import check_config, check_layers, probe, quantisation
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tensors import kinds_of
from specdec_cli.models.gguf.tensors import readers as gguf_readers
from specdec_cli.models.held import StoredParameter, held_bytes
from specdec_cli.models.quantised import dequantised, fields_of, scaled, scheme_of
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.resolve import model_place
from specdec_cli.models.stored import (
    hold_as_stored,
    part_of,
    stored_parameters,
    stored_reader,
)
from specdec_cli.models.tp import WHOLE, Shards, shard
from specdec_cli.models.weights import (
    Fields,
    Part,
    WrongShape,
    layers_held,
    open_checkpoint,
    same,
    tensor_names,
)
from specdec_cli.text import one_line

_log = logging.getLogger("specdec")
_DUMMY_TILE = 1 << 20  # numbers drawn for a dummy weight on CPU; larger tensors repeat them


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model to load and how to; `role` ("target", "draft") names it in messages."""

    role: str
    name: str
    revision: str | None
    dtype: str  # auto | float32 | bfloat16 | float16
    load_format: str  # auto | dummy
    trust_remote_code: bool = False
    allow_pickle: bool = False
    file: str | None = None  # of several GGUF files
    weights: str = "auto"  # auto | stored | dequantise


@dataclass(frozen=True, slots=True)
class Description:
    """A model that passed the gate and holds no weights yet (its tensors are on meta).

    With several ranks, module and layers are those of this rank: its part of the matrices and its
    heads. hidden_layers: those whose hidden states the run needs, see `PagedModel`.
    """

    spec: ModelSpec
    place: Path  # a folder, or a GGUF file
    module: Any
    layers: list[LayerShape]
    dtype: torch.dtype
    max_len: int
    eos_ids: frozenset[int]
    parallel: TensorParallel = ALONE
    shards: Shards = field(default=WHOLE)
    hidden_layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)

    @property
    def has_experts(self) -> bool:
        return "grouped_mm" in self.module.get_experts_implementation().values()

    @property
    def notes(self) -> dict[str, str]:
        """Facts for the record of a run, by a word for each."""
        stored = quantisation(self.module.config)
        if is_gguf(self.place):
            stored = f"GGUF ({kinds_of(read_model(self.place))})"
        if stored is None:
            return {}
        is_kept = bool(stored_parameters(self.module))
        return {"weights": f"{stored}, as stored" if is_kept else f"dequantised from {stored}"}

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its cache on this rank."""
        return block_bytes(self.layers, block_size, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on this rank's device; tied ones count once."""
        own = (p for n, p in self.module.named_parameters() if n not in self.shards.tied)
        return sum(map(held_bytes, own))


def describe(
    spec: ModelSpec, device: torch.device, parallel: TensorParallel = ALONE
) -> Description:
    """Read the config, build the module on meta, pass it through the gate and take this rank's
    part of it.

    Raises `SetupError` for a model that cannot be found or read, or is not supported.
    """
    place = model_place(
        spec.name,
        spec.revision,
        spec.file,
        weights=spec.load_format != "dummy",
        allow_pickle=spec.allow_pickle,
    )
    config = read_config(spec.name, place, trust_remote_code=spec.trust_remote_code)
    try:
        check_config(config, spec.name)
        if spec.load_format != "dummy" and (held := layers_held(place)) is not None:
            check_layers(config, spec.name, held)
        dtype = dtype_of(spec.dtype, config, device)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
            )
        # gpt2 searches every input for a padding id if it has one, which waits for the device. This
        # assignment bypasses the config's own check, since some families require a number.
        vars(module.config)["pad_token_id"] = None
        module.eval()
        layers, shards = probe(module, spec.name), WHOLE
        if parallel.size > 1:
            shards, layers = shard(module, layers, parallel, spec.name)
    except SetupError:
        raise
    except Exception as problem:
        # Families with attention classes of their own look them up by name.
        is_own = isinstance(problem, KeyError) and ATTENTION_NAME in problem.args
        reason = f"transformers cannot build it ({line_of(problem)})"
        if is_own:
            reason = f"{config.model_type} has attention code of its own"
        raise Unsupported(spec.name, reason) from problem
    _choose_form(module, spec, place, shards)
    return Description(
        spec=spec,
        place=place,
        module=module,
        layers=layers,
        dtype=dtype,
        max_len=max_len_of(config),
        eos_ids=eos_ids_of(config, place),
        parallel=parallel,
        shards=shards,
    )


def _unread(part: Part | None = None) -> torch.Tensor:
    raise AssertionError("only its name is used")


def _choose_form(module: Any, spec: ModelSpec, place: Path, shards: Shards) -> None:
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
    hold_as_stored(module, scheme.storage, names, shards, spec.name)


def load(
    description: Description,
    device: torch.device,
    borrowed: dict[str, torch.nn.Parameter] | None = None,
) -> Any:
    """Fill the described module with its weights on `device` and return it.

    borrowed: parameters of another model, by name, that replace its own; they are not read, and
    need not be in the checkpoint. A tied parameter is replaced only under the names given.
    Raises `SetupError`, which names the file or tensor, when the checkpoint does not fit the
    config.
    """
    module, spec, borrowed = description.module, description.spec, borrowed or {}
    if spec.load_format == "dummy":
        _fill(description, device, _dummy_source(module, device), borrowed)
    else:
        with _opened(description) as (tensors, unused):
            source = _checkpoint_source(description, tensors, unused, borrowed.keys())
            _fill(description, device, source, borrowed)
    _restore_buffers(module, device)
    return module


ReadWeight = Callable[[Part | None], torch.Tensor | Stored]


@contextmanager
def _opened(description: Description) -> Iterator[tuple[dict[str, ReadWeight], list[str]]]:
    """Readers of the module's tensors by its names, and the stored names without a use.

    Raises `SetupError` for damaged files and quantised tensors that cannot be undone.
    """
    module, spec, place = description.module, description.spec, description.place
    if is_gguf(place):
        readers, unused = gguf_readers(module, read_model(place), description.dtype)
        yield dict(readers), unused
        return
    with open_checkpoint(place, spec.allow_pickle) as tensors:
        stored, fields = stored_parameters(module), Fields(tensors, {}, {})
        if quantisation(module.config) is not None:
            settings = module.config.quantization_config
            scheme = scheme_of(settings, spec.name)
            if scheme is not None and stored:
                fields = fields_of(tensors, scheme)
            else:
                plain = dequantised(tensors, settings, description.dtype, spec.name)
                fields = Fields(plain, {}, {})
        try:
            (readers, unused), *others = [converted(module, f) if f else ({}, []) for f in fields]
        except Exception as problem:
            raise SetupError(
                f"the weights of {spec.name} cannot be read as config.json describes them "
                f"({line_of(problem)})",
                "config.json and the weights do not belong together",
            ) from problem
        own = Fields(readers, *(found for found, _ in others))
        kept = {
            name: stored_reader(name, own, parameter.stored_as, spec.name)
            for name, parameter in stored.items()
            if name in readers
        }
        yield {**readers, **kept}, unused


Source = Callable[[str, torch.Tensor, Part | None], torch.Tensor | Stored | None]


def _fill(
    description: Description,
    device: torch.device,
    source: Source,
    borrowed: dict[str, torch.nn.Parameter],
) -> None:
    """Fill every parameter and stored buffer from `source`, with this rank's part of each.

    A tied parameter is one object under several names and is read once; a head that is a part of
    the embedding becomes a view of it. A tensor that the source does not have is left to
    transformers' own initialisation (`_restore_buffers`).
    """
    module, shards = description.module, description.shards
    exact = _exact_names(module, description.dtype)
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
                    filled = StoredParameter.like(meta, value.storage, value.copied(device))
                else:
                    filled = _placed(value, meta.shape, kind, device)
                    if leaf in owner._parameters:
                        filled = torch.nn.Parameter(filled, requires_grad=False)
                if value is not None:
                    filled._is_hf_initialized = True  # type: ignore[attr-defined]
                done[id(meta)] = filled
                came = value.codes if isinstance(value, Stored) else value
                if came is not None and came.is_cuda and came.data_ptr() != filled.data_ptr():
                    # Otherwise later weights lie in fragments of the source's buffers and keep
                    # those reserved: 17 GiB with a 70B model on two GPUs.
                    del value, came
                    torch.cuda.empty_cache()
            held = owner._parameters if leaf in owner._parameters else owner._buffers
            held[leaf] = by_name[name] = done[id(meta)]


def _placed(
    value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A weight of its own on `device`: the value itself, if it is one there, or a copy of it.

    Zeros without a value, since initialisation misses some tensors (activations of apertus).
    """
    if value is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    is_whole = value.untyped_storage().nbytes() == value.nbytes and value.is_contiguous()
    # On the host its memory may be that of a file.
    if value.is_cuda and is_whole and (value.device, value.dtype) == (device, dtype):
        assert value.shape == shape
        return value
    return torch.empty(shape, dtype=dtype, device=device).copy_(value)


def _stored(module: Any) -> list[tuple[str, Any, str, torch.Tensor]]:
    """The tensors that a checkpoint holds, as (name, owning module, name there, tensor).

    A tied tensor is listed once for each name.
    """
    found = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        prefix, _, leaf = name.rpartition(".")
        found.append((name, module.get_submodule(prefix), leaf, tensor))
    return found


def _exact_names(module: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names of the tensors that the family keeps in float32 whatever the model's dtype, or None.

    Biases of routers, for example, choose other experts when they are rounded.
    """
    globs = [glob for glob, kept in module._get_dtype_plan(dtype).items() if kept == torch.float32]
    return re.compile("|".join(glob.replace("*", ".*") for glob in globs)) if globs else None


def _checkpoint_source(
    description: Description, readers: dict[str, ReadWeight], unused: list[str], borrowed: Set[str]
) -> Source:
    """Tensors from a checkpoint. Raises `SetupError` where it lacks some of the module's."""
    module, spec, tied = description.module, description.spec, description.shards.tied
    method = quantisation(module.config)
    if unused and method is None:
        _log.warning(
            "%d tensors in the weights of %s are not used, first %s: config.json describes a model "
            "without them",
            *(len(unused), spec.name, one_line(unused[0])),
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
            f"the weights of {spec.name} lack {len(missing)} tensors, first {missing[0]}",
            "its config and the weights do not belong together, or a file is missing",
        )

    def source(name: str, meta: torch.Tensor, part: Part | None) -> torch.Tensor | Stored:
        shape = list(meta.shape if part is None else part.shape)
        try:
            value = found[name](part)
        except WrongShape as problem:
            raise _wrong_shape(name, spec, list(problem.found), shape) from None
        except ValueError as problem:
            raise SetupError(
                f"{name} of {spec.name} cannot be put together from its parts in the weights "
                f"({line_of(problem)})",
                "its config and the weights do not belong together, or a file is missing",
            ) from None
        # Quantised numbers would be copied as if they were the weights themselves.
        is_plain = isinstance(value, Stored) or (
            value.element_size() > 1 and value.is_floating_point()
        )
        if meta.is_floating_point() and not is_plain:
            lacks = "config.json does not say how" if method is None else "its scales are missing"
            raise SetupError(
                f"{name} of {spec.name} is quantised, and {lacks}",
                "take the checkpoint that it was made from",
            )
        if value.shape != meta.shape:
            raise _wrong_shape(name, spec, list(value.shape), shape)
        return value

    return source


def _same(names: list[str], readers: dict[str, ReadWeight], spec: ModelSpec) -> ReadWeight:
    """The reader of one tensor that the weights hold under these names.

    Raises `SetupError` if the weights differ although config.json ties them: with either one alone
    the model would not be the one that was trained.
    """
    if len(names) == 1:
        return readers[names[0]]
    first = readers[names[0]](None)  # kept, since not every tensor can be read twice
    assert isinstance(first, torch.Tensor), "tied weights are plain"
    for name in names[1:]:
        again = readers[name](None)
        if not (isinstance(again, torch.Tensor) and torch.equal(first, again)):
            raise SetupError(
                f"{names[0]} and {name} of {spec.name} differ, and config.json says that they are "
                "one",
                "if they were trained apart, set tie_word_embeddings to false in config.json",
            )
    return partial(same, first)


def _wrong_shape(name: str, spec: ModelSpec, stored: list[int], wanted: list[int]) -> SetupError:
    return SetupError(
        f"{name} of {spec.name} has shape {stored} in the weights and {wanted} by its config",
        "its config and the weights do not belong together",
    )


def _dummy_source(module: Any, device: torch.device) -> Source:
    """Random matrices, seeded by parameter name; each rank takes its part of them.

    Norms and biases are left to transformers' initialisation, which makes them neutral and zero.
    (Norms of heads and biases of experts are stacked, as matrices.) It would draw each rank's sinks
    of attention anew, so they are drawn here.
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
            # Drawing billions of numbers takes minutes on a CPU, repeating a tile does not.
            tile = torch.empty(min(count, _DUMMY_TILE)).normal_(0.0, std, generator=generator)
            repeats = -(-count // tile.numel())
            value = tile.repeat(repeats)[:count].view(shape)
        else:
            value = torch.empty(shape, dtype=meta.dtype, device=device)
            value.normal_(0.0, std, generator=generator)
        if isinstance(meta, StoredParameter):
            stored = meta.stored_as.quantised(value)
            return stored if part is None else part_of(stored, part)
        return value if part is None else part.of(value)

    return source


def _restore_buffers(module: Any, device: torch.device) -> None:
    """Give buffers (rotary tables, embedding scales) and unread vectors their initial values.

    They are computed in code, not stored, and a build on meta leaves them empty. transformers'
    `initialize_weights` skips tensors that are marked as initialised. The seed is fixed because
    some families draw vectors at random (biases of routers).
    """
    for owner in module.modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
    touched = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(touched):
        torch.manual_seed(0)
        with initialization.guard_torch_init_functions():
            module.initialize_weights()
