"""Quantised tensors of a checkpoint as plain ones. Does not know files or modules.

fp8: a matrix of float8 codes, and a scale for it or for each of its blocks; the last blocks of a
row or column may be smaller. mxfp4 (https://arxiv.org/abs/2310.10537): blocks of 32 four-bit codes
along the input dimension, each with a power of two.

transformers derives the size of a block from the shape of the scales, which is wrong where the last
block is smaller, and does not notice scales that lack rows.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from specdec_kernels.linear.stored import Storage

from specdec_cli.errors import SetupError
from specdec_cli.models.weights import Fields, Part, Read, WrongShape

# Endings of a scale's name, and of its matrix's.
_FP8_SCALES = {".weight_scale_inv": ".weight", ".scale": ".weight", ".qscale_weight": ".weight"}
_FP8_SCALES |= {"_scale_inv": ""}  # of experts that the file stacks
_BLOCK = 32  # codes of mxfp4, two in a byte
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


Settings = dict[str, Any]  # a config's `quantization_config`


class Format(NamedTuple):
    """One way to store the weights of a checkpoint.

    dequantised: see the function of that name. storage: tells the storage of a module's matrices by
    their names, or None of plain ones, from settings and the model's name; None where all have to
    be dequantised. fields: the readers of such a checkpoint, in place of `dequantised`.
    """

    dequantised: Callable[[dict[str, Read], Settings, torch.dtype, str], dict[str, Read]]
    storage: Callable[[Settings, str], Callable[[str], Storage | None]] | None = None
    fields: Callable[[dict[str, Read], Settings, str], Fields] | None = None


def dequantised(
    tensors: dict[str, Read], settings: Settings, dtype: torch.dtype, model: str
) -> dict[str, Read]:
    """Readers of plain tensors in `dtype` for the tensors of a quantised checkpoint.

    settings: the config's `quantization_config`, of method fp8 or mxfp4. model: its name in
    messages. Raises `SetupError` for settings that are not understood. So does a reader, with the
    tensor's name, when its scales do not fit it.
    """
    return FORMATS[settings["quant_method"]].dequantised(tensors, settings, dtype, model)


def read_quantised(
    tensors: dict[str, Read], settings: Settings, dtype: torch.dtype, model: str, as_stored: bool
) -> Fields:
    """Readers of a quantised checkpoint: of what it holds, or of plain tensors in `dtype`."""
    read = FORMATS[settings["quant_method"]].fields
    if as_stored and read is not None:
        return read(tensors, settings, model)
    return Fields(dequantised(tensors, settings, dtype, model), {}, {})


def _dequantised_mxfp4(
    tensors: dict[str, Read], _: Settings, dtype: torch.dtype, model: str
) -> dict[str, Read]:
    plain = dict(tensors)
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        scales = plain.pop(f"{name}_scales", None)
        if scales is None:
            raise SetupError(f"{blocks} of {model} lacks {name}_scales", _DAMAGED)
        plain[name] = _mxfp4_reader(f"{name} of {model}", plain.pop(blocks), scales, dtype)
    return plain


def _dequantised_fp8(
    tensors: dict[str, Read], settings: Settings, dtype: torch.dtype, model: str
) -> dict[str, Read]:
    plain = dict(tensors)
    undo = partial(_from_fp8, dtype=dtype, block=_block_size(settings, model))
    for name in tensors:
        ending = next((e for e in _FP8_SCALES if name.endswith(e)), None)
        if ending is not None:
            matrix = name.removesuffix(ending) + _FP8_SCALES[ending]
            if matrix in tensors:
                told = f"{matrix} of {model}"
                plain[matrix] = _reader(told, tensors[matrix], plain.pop(name), undo)
    return plain


_DAMAGED = "the weights are damaged, or do not belong to this config.json; download them again"


def _block_size(settings: dict[str, Any], model: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where a matrix has one scale."""
    block = settings.get("weight_block_size", (128, 128))
    if block is None:
        return None
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise SetupError(
            f"config.json of {model}: quantization_config.weight_block_size is {block!r}",
            "it has to be two numbers, or null for one scale a matrix",
        )
    return sizes[0], sizes[1]


def _reader(
    told: str, codes: Read, scales: Read, undo: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Read:
    def read(part: Part | None = None) -> torch.Tensor:
        try:
            whole = undo(codes(), scales())
        except ValueError as problem:
            raise SetupError(f"{told} {problem}", _DAMAGED) from None
        return whole if part is None else part.of(whole)

    return read


def _from_fp8(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] | None
) -> torch.Tensor:
    """codes [..., rows, columns], scales [..., blocks of rows, blocks of columns]."""
    if codes.dim() < 2 or codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"is {_said(codes)}, and has scales as a matrix of float8 has")
    *stacked, rows, columns = codes.shape
    high, wide = block or (max(rows, 1), max(columns, 1))
    wanted = [*stacked, -(-rows // high), -(-columns // wide)]
    # One scale a matrix comes with any number of dimensions of size 1.
    is_one = block is None and _without_ones(scales.shape) == _without_ones(stacked)
    if list(scales.shape) != wanted and not is_one:
        raise ValueError(
            f"has shape {list(codes.shape)} and scales of shape {list(scales.shape)}; "
            f"{f'with blocks of {high} x {wide}' if block else 'with one scale'} they are {wanted}"
        )
    # Bytes are the exponents of powers of two.
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    factors = factors.reshape(wanted).repeat_interleave(wide, -1)[..., :columns]
    values, full = codes.float(), rows // high
    values[..., : full * high, :].unflatten(-2, (full, high)).mul_(factors[..., :full, None, :])
    values[..., full * high :, :].mul_(factors[..., full:, :])
    return values.to(dtype)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


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
FORMATS = {"fp8": Format(_dequantised_fp8), "mxfp4": Format(_dequantised_mxfp4)}
