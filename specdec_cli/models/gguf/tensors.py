"""Convert the tensors of a GGUF file to those of a transformers module: their names, their values
or quantised codes, and their layouts. Up to four threads dequantise a few rows at a time, directly
to the requested dtype.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from specdec_kernels.linear.stored import Storage, Stored

from specdec_cli.errors import SetupError
from specdec_cli.launch.rank import num_cores
from specdec_cli.models.gguf.blocks import fields_of, kept_as
from specdec_cli.models.gguf.header import Header, TensorPlace, block_bytes, name_of
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.weights import Part, Read, WrongShape
from specdec_cli.text import one_line, shown

# Maps the names of architectures in GGUF files to transformers' names for the same families.
FROM_GGUF = {name: name for name in "llama mistral qwen2 qwen3 gemma2 gemma3 phi3".split()}
FROM_GGUF |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
_NAMED_LIKE = {"mistral": "llama"}  # the gguf package has no tensor names for mistral
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_PLAIN |= {"BF16": torch.bfloat16}
_NUMBERS_AT_ONCE = 1 << 18  # values that a thread dequantises at once
_KEPT_AT_ONCE = 1 << 24  # values converted at once, for matrices that stay quantised
_MOST_THREADS = min(4, num_cores())  # threads run in parallel, as numpy releases the GIL
_ALL = slice(None)
_GATE_UP = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj")
_ROUTER_BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.e_score_correction_bias")
_USED_ELSEWHERE = ("rope_freqs.weight",)  # `gguf_config` reads this tensor


Change = Callable[[torch.Tensor], torch.Tensor]


def architecture_of(name: str, header: Header) -> str:
    """Return the architecture of a model. Raises `Unsupported` if it is unknown."""
    found = header.values.get("general.architecture")
    if not isinstance(found, str) or found not in FROM_GGUF:
        raise Unsupported(
            name,
            f"it is a GGUF file of architecture {shown(found)}",
            f"of GGUF files, these architectures work: {', '.join(FROM_GGUF)}",
        )
    return found


def check_kinds(name: str, header: Header) -> None:
    """Raise `Unsupported` if a tensor has a type that cannot be dequantised, or if the file has
    scales of activations."""
    if scales := [tensor for tensor in header.tensors if tensor.endswith(".input_scale")]:
        raise Unsupported(name, f"its activations have scales ({one_line(scales[0])})")
    for kind in sorted({t.kind for t in header.tensors.values()}):
        if name_of(kind) not in _PLAIN and not is_undone(kind):
            raise Unsupported(name, f"the gguf package does not dequantise {name_of(kind)}")


def kinds_of(header: Header) -> list[str]:
    """Return the names of the tensors' types, in descending order of their total bytes."""
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        sizes[name_of(tensor.kind)] += tensor.nbytes
    return [kind for kind, _ in sizes.most_common()]


def readers(module: Any, header: Header, dtype: torch.dtype) -> tuple[dict[str, Read], list[str]]:
    """Return a reader for each tensor of `module` that the file has, by its name in the module, and
    the names of the file's tensors that are not used. The readers convert to `dtype`."""
    found, used = {}, set()
    for name, sources, change in _sources(module, header):
        found[name] = _reader([_place(header, source) for source in sources], dtype, change)
        used |= {*sources, *map(_scale_of, sources)}
    unused = [n for n in header.tensors if n not in used and n not in _USED_ELSEWHERE]
    return found, unused


ReadAs = Callable[[Storage], Stored]


def kept_readers(module: Any, header: Header) -> dict[str, tuple[Storage, ReadAs]]:
    """Find the matrices of `module` that can stay quantised, which those with scales of their own
    cannot. Returns (storage, reader) for each, by name. `storage` is the one that fits the matrix's
    type in the file. The reader takes the storage to convert to. It may differ from `storage`,
    because matrices that are merged into one matmul need the same storage, even if their types in
    the file differ."""
    found: dict[str, tuple[Storage, ReadAs]] = {}
    for name, sources, change in _sources(module, header):
        stored = [_place(header, source) for source in sources]
        if any(place.scale is not None for place in stored):
            continue
        kinds = {name_of(place.kind) for place in stored}
        if len(kinds) == 1 and (storage := kept_as(kinds.pop(), module.dtype)) is not None:
            found[name] = storage, partial(_as_stored, name, stored, change)
    return found


def is_plain(header: Header) -> bool:
    """Return True if no tensor of a file is quantised."""
    return all(name_of(place.kind) in _PLAIN for place in header.tensors.values())


def _sources(module: Any, header: Header) -> Iterator[tuple[str, list[str], Change | None]]:
    """Yield (name, sources, change) for each tensor of `module` that a file has: its name, the
    names of the file's tensors that it is made from, and the function that converts their layout
    (None if it is the same)."""
    architecture = str(header.values["general.architecture"])
    name_in_file = _names(architecture, module.config.num_hidden_layers)
    for name in module.state_dict():
        if match := _GATE_UP.fullmatch(name):
            sources = [f"blk.{match[1]}.ffn_{half}_exps.weight" for half in ("gate", "up")]
        elif match := _ROUTER_BIAS.fullmatch(name):
            sources = [f"blk.{match[1]}.exp_probs_b.bias"]
        else:
            sources = [name_in_file(name)]
        if all(source in header.tensors for source in sources):
            yield name, sources, _layout(architecture, sources[0], module)


def _place(header: Header, source: str) -> TensorPlace:
    return replace(header.tensors[source], scale=header.tensors.get(_scale_of(source)))


def _scale_of(source: str) -> str:
    """Return the name of a weight's scale, which files in NVFP4 have."""
    return f"{source.removesuffix('weight')}scale"


def _as_stored(
    name: str, stored: list[TensorPlace], change: Change | None, storage: Storage
) -> Stored:
    """Read a matrix and convert it to `storage`. Raises a `SetupError` that names the matrix if a
    scale is not finite in the storage's dtype."""
    parts = []
    for place in stored:
        with _told(place):
            content = np.memmap(place.file, np.uint8, "r", place.start, (place.nbytes,))
        kind, (first, *rest) = name_of(place.kind), place.shape
        rows = content.reshape(first, *rest[:-1], -1, block_bytes(place.kind))
        step = max(1, _KEPT_AT_ONCE // prod(rest))
        try:
            pieces = [
                fields_of(kind, torch.from_numpy(np.array(rows[at : at + step])), storage)
                for at in range(0, first, step)
            ]
        except ValueError as problem:
            raise SetupError(
                f"{name} in {place.file} has {problem}", "run it with weights: dequantise"
            ) from None
        whole = [torch.cat(piece) for piece in zip(*pieces, strict=True)]
        codes, scales, *minima = whole if change is None else map(change, whole)
        parts.append(Stored(codes, scales, minima[0] if minima else None, storage))
    if len({part.shape for part in parts}) > 1:
        raise WrongShape(parts[0].shape)
    return parts[0] if len(parts) == 1 else Stored.joined(parts)


def _names(architecture: str, layers: int) -> Callable[[str], str]:
    """Return a function that translates a module's tensor names to the names in the file. It uses
    the gguf package's table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    wanted = _NAMED_LIKE.get(architecture, architecture)
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == wanted)
    table = get_tensor_name_map(number, layers)

    def name_in_file(name: str) -> str:
        base, dot, leaf = name.rpartition(".")
        if leaf not in ("weight", "bias"):  # names of stacked experts have no such ending
            base, dot, leaf = name, ".", "weight"
        return f"{table.get_name(base)}{dot}{leaf}"

    return name_in_file


def _layout(architecture: str, name: str, module: Any) -> Change | None:
    """Return the function that changes a tensor from the file's layout to the module's, or None if
    they are equal."""
    config = module.config
    if architecture in ("llama", "mistral") and (match := re.search(r"\.attn_([qk])\.", name)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return partial(_halves, heads=heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return lambda value: value.sub(1)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return lambda value: value[None] if value.dim() == 1 else value
    return None


def _halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from interleaved rotary pairs to first and second halves."""
    rows = value.shape[0]
    if rows % (2 * heads):
        raise WrongShape(tuple(value.shape))
    pairs = value.view(heads, rows // heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _reader(stored: list[TensorPlace], dtype: torch.dtype, change: Change | None) -> Read:
    """Return a function that reads one tensor of the module. stored: the tensor in the file, or the
    two tensors with the gate and up projections of experts, which the reader concatenates."""

    def read(part: Part | None = None) -> torch.Tensor:
        # Read vectors in fp32. Files store the weights of gemma's norms plus 1, so 1 must be
        # subtracted before they are rounded. Also, some families keep biases in fp32.
        exact = torch.float32 if len(stored[0].shape) == 1 else dtype
        if len(stored) == 1:
            is_rows = part is not None and part.dim == 0 and part.blocks == 1
            if part is not None and is_rows and change is None and len(stored[0].shape) > 1:
                if part.shape != stored[0].shape:
                    raise WrongShape(stored[0].shape)
                return read_stored(stored[0], exact, slice(part.start, part.stop))
            whole = read_stored(stored[0], exact)
        else:
            if stored[0].shape != stored[1].shape or len(stored[0].shape) != 3:
                raise WrongShape(stored[0].shape)
            experts, rows, columns = stored[0].shape
            whole = torch.empty((experts, 2 * rows, columns), dtype=exact)
            for half, value in enumerate(stored):
                read_stored(value, exact, out=whole[:, half * rows : (half + 1) * rows])
        if change is not None:
            whole = change(whole)
        return whole if part is None else part.of(whole)

    return read


def read_stored(
    stored: TensorPlace,
    dtype: torch.dtype,
    rows: slice = _ALL,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read a tensor of a file, or some rows of a matrix, in `dtype`.

    out: the tensor to fill, which must have the shape of the result; None to allocate one. Raises
    `SetupError` if the file has changed, and `ValueError` if the tensor's scale has another shape
    than one number, or one for each expert.
    """
    scale = None if stored.scale is None else read_stored(stored.scale, torch.float32)
    if scale is not None and scale.shape not in ((1,), stored.shape[:-2]):
        raise ValueError(f"its scale has shape {list(scale.shape)}")
    first, last, _ = rows.indices(stored.shape[0])
    shape = (last - first, *stored.shape[1:])
    out = torch.empty(shape, dtype=dtype) if out is None else out
    width, nbytes = prod(stored.shape[1:]), stored.nbytes // stored.shape[0]
    kind = name_of(stored.kind)
    # Pieces are whole rows, because blocks do not cross rows. A vector is one row.
    if len(stored.shape) == 1:
        assert shape == stored.shape
        first, last, width, nbytes, out = 0, 1, stored.shape[0], stored.nbytes, out[None]
    step = max(1, _NUMBERS_AT_ONCE // width)
    with _told(stored):
        content = np.memmap(stored.file, np.uint8, "r", stored.start, (last * nbytes,))

        def fill(begin: int) -> None:
            end = min(begin + step, last)
            content_rows = content[begin * nbytes : end * nbytes]
            piece = out[begin - first : end - first]
            value = _plain(content_rows, kind, stored.kind).view(piece.shape)
            if scale is not None:
                value = value * (scale if len(scale) == 1 else scale[begin:end, None, None])
            piece.copy_(value)

        begins = range(first, last, step)
        with ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(begins)))) as pool:
            list(pool.map(fill, begins))
    return out if len(stored.shape) > 1 else out[0]


@contextmanager
def _told(stored: TensorPlace) -> Iterator[None]:
    """Turn errors in the block into `SetupError`. They mean that the file has changed since its
    header was read."""
    try:
        yield
    except (OSError, ValueError) as problem:
        raise SetupError(
            f"cannot read the weights in {stored.file}: {one_line(str(problem))}",
            "the file is truncated or damaged; download it again",
        ) from None


def _plain(content: np.ndarray[Any, Any], kind: str, number: int) -> torch.Tensor:
    """Convert bytes of one GGML type to a flat tensor of values, dequantising them if needed. kind,
    number: the name and the number of the type."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    if kind in _PLAIN:
        return torch.from_numpy(np.array(content)).view(_PLAIN[kind])
    with np.errstate(all="ignore"):  # do not warn about scales that are NaN or infinite
        found = dequantize(np.array(content)[None], GGMLQuantizationType(number))
    return torch.from_numpy(found).flatten()


def is_undone(kind: int) -> bool:
    """Return True if the gguf package can dequantise a type. To find out, dequantise a block of
    zeros."""
    with suppress(NotImplementedError):
        _plain(np.zeros(block_bytes(kind), np.uint8), "", kind)
        return True
    return False
