"""Quantised checkpoints: what their config says of them, and readers. Does not know modules.

float8: a matrix of codes, and scales for it, for each of its rows or for each of its blocks; the
last blocks of a row or column may be smaller. mxfp4 (https://arxiv.org/abs/2310.10537): blocks of
32 four-bit codes along the input dimension, each with a power of two.

transformers derives the size of a block from the shape of the scales, which is wrong where the last
block is smaller, and does not notice scales that lack rows.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from specdec_kernels.linear.stored import FP8, KINDS, Storage, Stored

from specdec_cli.errors import SetupError
from specdec_cli.models.weights import Fields, Part, Read, WrongShape, same
from specdec_cli.text import one_line

# Endings of a scale's name, and of its matrix's: transformers' fp8, and the other formats'.
_SCALES = {".weight_scale_inv": ".weight", ".scale": ".weight", ".qscale_weight": ".weight"}
_SCALES |= {".weight_scale": ".weight"}
_SCALES |= {"_scale_inv": ""}  # of experts that the file stacks
_BLOCK = 32  # codes of mxfp4, two in a byte
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Settings = dict[str, Any]  # a config's `quantization_config`


class Scheme(NamedTuple):
    """The storage of the matrices of a checkpoint that have scales.

    one_scale: the file has one for a matrix, which becomes that of each row.
    """

    storage: Storage
    one_scale: bool = False


def scheme_of(settings: Settings, model: str) -> Scheme | None:
    """The scheme of a checkpoint, of a method in `FORMATS`; None for mxfp4, which is dequantised.

    model: its name in messages. Raises `SetupError`, which names the key, for what is not
    understood.
    """
    return FORMATS[settings["quant_method"]](settings, model)


def scaled(names: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint's scales, and of their matrices."""
    held, found = set(names), dict[str, str]()
    for name in held:
        ending = next((e for e in _SCALES if name.endswith(e)), None)
        if ending is not None:
            found[name] = name.removesuffix(ending) + _SCALES[ending]
    return {scales: matrix for scales, matrix in found.items() if matrix in held}


def fields_of(tensors: dict[str, Read], scheme: Scheme) -> Fields:
    """Readers of codes and scales, by the matrices' names, and of plain tensors."""
    of_scales = scaled(tensors)
    codes = {name: read for name, read in tensors.items() if name not in of_scales}
    scales: dict[str, Read] = {
        matrix: partial(_scales, tensors[name], tensors[matrix], scheme)
        for name, matrix in of_scales.items()
    }
    return Fields(codes, scales, {})


def _scales(scales: Read, codes: Read, scheme: Scheme, part: Part | None = None) -> torch.Tensor:
    found = scales()
    # Bytes are the exponents of powers of two.
    found = (found.float() - 127).exp2() if found.dtype == torch.uint8 else found.float()
    if scheme.one_scale or found.dim() == 1:
        *stacked, rows, _ = codes().shape or (1, 1)
        count = 1 if scheme.one_scale else rows
        if found.numel() == torch.Size(stacked).numel() * count:
            found = found.reshape(*stacked, count, 1).expand(*stacked, rows, 1)
    return same(found, part)


def read_stored(name: str, fields: Fields, storage: Storage, model: str) -> Stored:
    """A matrix as it is stored.

    Raises `SetupError`, which names it, for scales that are missing or do not fit.
    """
    codes, told = fields.codes[name](), f"{name} of {model}"
    if name not in fields.scales:
        raise SetupError(f"{told} is quantised, and {no_scales(name, fields.codes)}", _DAMAGED)
    kind = KINDS[storage.kind].codes
    if codes.dim() < 2 or codes.dtype != kind:
        theirs = f"scales as a matrix of {str(kind).removeprefix('torch.')} has"
        raise SetupError(f"{told} is {_said(codes)}, and has {theirs}", _DAMAGED)
    scales = fields.scales[name]()
    found = Stored(codes, scales, fields.zeros[name]() if storage.has_zeros else None, storage)
    if list(scales.shape) != (shape := list(storage.scales_shape(found.shape))):
        high, wide = storage.group
        groups = f"blocks of {high} x {wide}" if wide else "a scale for each row"
        raise SetupError(
            f"{told} has shape {list(found.shape)} and scales of shape {list(scales.shape)}; with "
            f"{groups} they are {shape}",
            _ONE_SCALE if wide and scales.numel() == 1 else _DAMAGED,
        )
    return found


def no_scales(name: str, names: Iterable[str]) -> str:
    """The reason that a matrix has no scales: the file has none, or under another name."""
    stem = name.rpartition(".")[0]
    others = sorted(n for n in names if "scale" in n and stem.endswith(n.rpartition(".")[0]))
    if others:
        return f"its scales have a name that is not read: {one_line(others[0])}"
    return "its scales are missing"


def dequantised(
    tensors: dict[str, Read], settings: Settings, dtype: torch.dtype, model: str
) -> dict[str, Read]:
    """Readers of plain tensors in `dtype` for the tensors of a quantised checkpoint.

    Raises as `scheme_of` does. So does a reader, with the tensor's name, when its scales do not fit
    it.
    """
    scheme = scheme_of(settings, model)
    if scheme is None:
        return _dequantised_mxfp4(tensors, dtype, model)
    fields, storage = fields_of(tensors, scheme), scheme.storage

    def reader(name: str) -> Read:
        return lambda part=None: same(read_stored(name, fields, storage, model).plain(dtype), part)

    return fields.codes | {name: reader(name) for name in fields.scales}


_ONE_SCALE = (
    "one scale for a matrix, as AutoFP8 writes, is quantization_config.weight_block_size: null in "
    "config.json"
)
_DAMAGED = "the weights are damaged, or do not belong to this config.json; download them again"


def _fp8(settings: Settings, model: str) -> Scheme:
    """transformers' own format."""
    block = settings.get("weight_block_size", (128, 128))
    if block is None:
        return Scheme(Storage(FP8), one_scale=True)
    return Scheme(Storage(FP8, _block(block, "weight_block_size", model)))


def _block(block: Any, key: str, model: str) -> tuple[int, int]:
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise _refused(key, block, model, "two numbers, or null for one scale a matrix")
    return sizes[0], sizes[1]


def _compressed_tensors(settings: Settings, model: str) -> Scheme:
    """The format of llm-compressor and vLLM."""
    if (form := settings.get("format")) != "float-quantized":
        raise _refused("format", form, model, "float-quantized")
    groups = settings.get("config_groups")
    parts = list(groups.values()) if isinstance(groups, dict) else []
    weights = [part.get("weights") if isinstance(part, dict) else None for part in parts]
    first = weights[0] if weights else None
    if not isinstance(first, dict) or any(other != first for other in weights):
        raise _refused("config_groups", groups, model, "groups whose weights are stored alike")
    for key, known in (
        ("num_bits", (8,)),
        ("type", ("float",)),
        ("symmetric", (True,)),
        ("strategy", ("tensor", "channel", "block")),
    ):
        if first.get(key) not in known:
            told = " or ".join(map(str, known))
            raise _refused(f"config_groups.weights.{key}", first.get(key), model, told)
    if first["strategy"] != "block":
        return Scheme(Storage(FP8), one_scale=first["strategy"] == "tensor")
    return Scheme(Storage(FP8, _block(first.get("block_structure"), "block_structure", model)))


def _refused(key: str, found: object, model: str, wanted: str) -> SetupError:
    return SetupError(
        f"config.json of {model}: quantization_config.{key} is {one_line(repr(found))}",
        f"it has to be {wanted}; or take the checkpoint that it was made from",
    )


def _dequantised_mxfp4(tensors: dict[str, Read], dtype: torch.dtype, model: str) -> dict[str, Read]:
    plain = dict(tensors)
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        scales = plain.pop(f"{name}_scales", None)
        if scales is None:
            raise SetupError(f"{blocks} of {model} lacks {name}_scales", _DAMAGED)
        plain[name] = _mxfp4_reader(f"{name} of {model}", plain.pop(blocks), scales, dtype)
    return plain


def _mxfp4_reader(told: str, blocks: Read, scales: Read, dtype: torch.dtype) -> Read:
    """Reads and undoes the blocks that a part touches, since undoing all can take minutes.

    A part need not begin or end at a block's edge, because it is cut after that.
    """

    def read(part: Part | None = None) -> torch.Tensor:
        if part is None:
            return undone(None)
        # A file of another shape is read whole, which shows its shape.
        with suppress(WrongShape):
            return cut(part)
        return part.of(undone(None))

    def cut(part: Part) -> torch.Tensor:
        """part: of [experts, in, out]. The file has [experts, out, blocks of in]."""
        experts, width, out = part.shape
        stored = experts, out, width // _BLOCK
        if part.dim == 2:
            return undone(replace(part, dim=1, shape=stored))
        assert part.dim == part.blocks == 1
        first, last = part.start // _BLOCK, -(-part.stop // _BLOCK)
        found = undone(Part(2, first, last, stored))
        return found.narrow(1, part.start - first * _BLOCK, part.stop - part.start)

    def undone(part: Part | None) -> torch.Tensor:
        codes = part and replace(part, shape=(*part.shape, _BLOCK // 2))
        try:
            return _from_mxfp4(blocks(codes), scales(part), dtype)
        except ValueError as problem:
            raise SetupError(f"{told} {problem}", _DAMAGED) from None

    return read


def _from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks [experts, out, blocks, 16] with two codes a byte, scales [experts, out, blocks];
    returns [experts, in, out]."""
    is_sound = blocks.dtype == scales.dtype == torch.uint8 and blocks.dim() == 4
    if not is_sound or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"has blocks that are {_said(blocks)} and scales that are {_said(scales)}; they are "
            "uint8 of [experts, rows, blocks, 16] and [experts, rows, blocks]"
        )
    experts, out, count, _ = blocks.shape
    values, table = torch.empty(experts, count * 32, out, dtype=dtype), torch.tensor(_FP4)
    for i in range(experts):  # one at a time, since all of them in float32 can take 20 GB
        codes = torch.stack((blocks[i] & 15, blocks[i] >> 4), -1).flatten(-2)
        matrix = table[codes.int()].mul_((scales[i].float() - 127).exp2()[..., None])
        values[i] = matrix.flatten(1).T
    return values


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"


# By the `quant_method` of a config.
FORMATS: dict[str, Callable[[Settings, str], Scheme | None]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda _, __: None,
}
