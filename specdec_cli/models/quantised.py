"""Find the quantised matrices of a checkpoint, and read or dequantise them. How the numbers of a
matrix are stored is in `quantised_matrix`."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

import torch
from specdec_kernels.linear.stored import (
    FP8,
    INT4,
    INT8,
    KINDS,
    Stored,
)

from specdec_cli.errors import SetupError
from specdec_cli.models.formats import (
    AWQ,
    BLOCKS,
    GPTQ,
    NIBBLES,
    PACKED,
    PLAIN,
    Matrices,
    Scheme,
    Settings,
    scheme_of,
)
from specdec_cli.models.quantised_matrix import DAMAGED, QuantisedMatrix, damaged, said
from specdec_cli.models.weights import Fields, Part, Read, same
from specdec_cli.text import one_line

# Maps the ending of a scale's name to the ending of the name of the matrix that it belongs to.
_OF_MATRIX = (".weight_scale_inv", ".scale", ".qscale_weight", ".weight_scale")
_SCALES = dict.fromkeys(_OF_MATRIX, ".weight") | {"_scale_inv": ""}  # "" for stacked experts
# A quantised matrix is stored as several tensors. Maps what each contains, such as the codes or the
# scales, to the ending of its name.
_COMPRESSED = {"codes": ".weight_packed", "scales": ".weight_scale", "zeros": ".weight_zero_point"}
_COMPRESSED |= {"shape": ".weight_shape", "order": ".weight_g_idx"}
_PARTS = {
    PACKED: _COMPRESSED,
    NIBBLES: _COMPRESSED,
    GPTQ: {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "order": ".g_idx"},
    AWQ: {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"},
    BLOCKS: {"codes": "_blocks", "scales": "_scales"},
}
# Scales that are not used here: those of activations, which stay in the run's dtype, and those of
# caches, which `kv_scales` reads.
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
_OF_CACHES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale")

# The names of one matrix's tensors in the file. The keys say what each tensor contains, such as
# "codes" or "scales".
Names = dict[str, str]


def scaled(names: Iterable[str]) -> dict[str, str]:
    """Map the name of each scale in a checkpoint to the name of its matrix."""
    held, found = set(names), dict[str, str]()
    for name in held:
        ending = next((e for e in _SCALES if name.endswith(e)), None)
        if ending is not None:
            found[name] = name.removesuffix(ending) + _SCALES[ending]
    return {scales: matrix for scales, matrix in found.items() if matrix in held}


def _matrices(
    names: Collection[str], scheme: Scheme, model: str
) -> tuple[dict[str, tuple[Matrices, Names]], list[str]]:
    """Find the quantised matrices of a file.

    Returns a dict whose keys are the matrices' names after dequantisation. Each value is the group
    of the config to which the matrix belongs, and the names of the matrix's tensors in the file.
    Also returns the names of all other tensors. Raises `SetupError` if the file and the config
    contradict each other.
    """
    found: dict[str, tuple[Matrices, Names]] = {}
    held = {matrix: (PLAIN, scales) for scales, matrix in scaled(names).items()}
    endings = {parts["codes"]: form for form, parts in _PARTS.items()}
    for name in names:
        for ending in endings:
            if name.endswith(ending):
                stem = name.removesuffix(ending)
                held[stem if ending == "_blocks" else f"{stem}.weight"] = (ending, name)
    for matrix, (how, name) in held.items():
        path = matrix.removesuffix(".weight")
        group = scheme.of(path)
        form = None if group is None else group.form
        if group is None or how != (PLAIN if form == PLAIN else _PARTS[group.form]["codes"]):
            raise damaged(
                f"{name} of {model} belongs to a quantised matrix that quantization_config does "
                "not describe"
            )
        if scheme.leaves(path):
            raise damaged(
                f"{name} of {model} is quantised, but quantization_config.{scheme.left_key} says "
                "that it is not"
            )
        if group.form == PLAIN:
            own = {"codes": matrix, "scales": name, "zeros": f"{matrix}_zero_point"}
        else:
            stem = name.removesuffix(how)
            own = {word: stem + ending for word, ending in _PARTS[group.form].items()}
        found[matrix] = group, {word: part for word, part in own.items() if part in names}
    used = {part for _, own in found.values() for part in own.values()}
    rest = [name for name in names if name not in used]
    _check_rest(names, rest, found, model)
    return found, rest


def _check_rest(
    names: Collection[str], rest: list[str], found: dict[str, tuple[Matrices, Names]], model: str
) -> None:
    """Raise `SetupError` if a quantised matrix has an unknown tensor, or if activations have scales
    that would have to divide them."""
    paths = {matrix.rpartition(".")[0] for matrix in found if matrix.endswith(".weight")}
    rest = [n for n in rest if not n.endswith(".bias")]
    known = _OF_ACTIVATIONS + _OF_CACHES
    if any(group.form == AWQ for group, _ in found.values()):
        # AWQ moves scales from a matrix into the activation before it, if no norm or matrix can
        # take them up. The activation has no other tensor.
        held = Counter(n.rpartition(".")[0] for n in names)
        alone = [n for n in rest if n.endswith(".scales") and held[n.rpartition(".")[0]] == 1]
        if alone:
            raise SetupError(
                f"{one_line(min(alone))} of {model} scales activations, which is not supported",
                "take the checkpoint that it was made from",
            )
    unknown = [n for n in rest if not n.endswith(known) and n.rpartition(".")[0] in paths]
    if unknown:
        raise SetupError(
            f"{one_line(min(unknown))} of {model} belongs to a quantised matrix, but its format is "
            "not supported",
            "take the checkpoint that it was made from",
        )


def fields_of(tensors: dict[str, Read], scheme: Scheme, model: str) -> Fields:
    """Return readers for all tensors of a checkpoint, by the names that the tensors have after
    dequantisation.

    A quantised matrix has readers for its codes, scales and zero points, which convert them to the
    layout of their number type. Unquantised tensors are read as they are. The readers raise a
    `SetupError` that names the tensor if it does not fit.
    """
    found, rest = _matrices(tensors.keys(), scheme, model)
    fields = Fields({name: tensors[name] for name in rest}, {}, {}, {})
    kinds: dict[Matrices, torch.dtype] = {}
    for matrix, (group, names) in found.items():
        own = {word: tensors[name] for word, name in names.items()}
        storage = group.storage
        if storage.kind in (INT4, INT8) and "scales" in own:
            if group not in kinds:
                kinds[group] = own["scales"]().dtype
            is_kept = kinds[group] in (torch.float16, torch.bfloat16) and not group.one_scale
            storage = replace(storage, scales=kinds[group] if is_kept else torch.float32)
        held = QuantisedMatrix(own, group._replace(storage=storage), f"{matrix} of {model}")
        fields.storages[matrix] = storage
        fields.codes[matrix] = held.codes
        if "scales" in own:
            fields.scales[matrix] = held.scales
        if storage.has_zeros:
            fields.zeros[matrix] = held.zeros
    return fields


def read_stored(name: str, fields: Fields, model: str) -> Stored:
    """Read a matrix in quantised form. Raises a `SetupError` that names it if its scales do not
    fit."""
    codes, told, storage = fields.codes[name](), f"{name} of {model}", fields.storages[name]
    if name not in fields.scales:
        raise damaged(f"{told} is quantised, but {no_scales(name, fields.codes)}")
    kind = KINDS[storage.kind].codes
    if codes.dim() < 2 or codes.dtype != kind:
        wanted = str(kind).removeprefix("torch.")
        raise damaged(f"{told} is {said(codes)}, but its scales are for a matrix of {wanted}")
    if codes.dtype == torch.float8_e4m3fn and _has_nan(codes):
        raise damaged(f"{told} has codes that are not numbers (NaN)")
    scales = fields.scales[name]()
    found = Stored(codes, scales, fields.zeros[name]() if storage.has_zeros else None, storage)
    high, wide = storage.group
    shape = list(storage.scales_shape(found.shape))
    for noun, field in (("scales", scales), ("zeros", found.zeros)):
        if field is not None and list(field.shape) != shape:
            groups = f"blocks of {high} x {wide}" if wide else "a scale for each row"
            raise SetupError(
                f"{told} has shape {list(found.shape)} and {noun} of shape {list(field.shape)}; "
                f"with {groups} they should have shape {shape}",
                _ONE_SCALE if storage.kind == FP8 and wide and scales.numel() == 1 else DAMAGED,
            )
    if storage.kind != FP8 and wide and found.shape[-1] % wide:
        raise damaged(
            f"{told} has shape {list(found.shape)}, but its columns cannot be divided into groups "
            f"of {wide}"
        )
    return found


def _has_nan(codes: torch.Tensor) -> bool:
    """Return True if e4m3 codes contain a NaN (0x7f or 0xff), which bf16 matmuls would treat as a
    number.

    Two maxima find it: 0xff is the largest code as uint8, and 0x7f is the largest as int8. A mask
    would take ten times as long.
    """
    bits = codes.view(torch.uint8)
    return bool(codes.numel()) and (
        int(bits.max()) == 0xFF or int(bits.view(torch.int8).max()) == 0x7F
    )


def no_scales(name: str, names: Iterable[str]) -> str:
    """Return the reason why a matrix has no scales, for messages: the file lacks them, or stores
    them under a name that is not read."""
    stem = name.rpartition(".")[0]
    others = sorted(n for n in names if "scale" in n and stem.endswith(n.rpartition(".")[0]))
    if others:
        return f"its scales have a name that is not read: {one_line(others[0])}"
    return "its scales are missing"


def changes_nothing(name: str, read: Read) -> bool:
    """Return True if a tensor that no module reads does not change the text: a scale of activations
    or caches, or a bias of zeros, which GPTQ stores for matrices without a bias."""
    if name.endswith(_OF_ACTIVATIONS + _OF_CACHES):
        return True
    return name.endswith(".bias") and not bool(read().float().any())


def plain_names(names: Collection[str], settings: Settings, model: str) -> list[str]:
    """Return the names of a quantised checkpoint's tensors after dequantisation. Raises the same
    errors as `fields_of`."""
    found, rest = _matrices(names, scheme_of(settings, model), model)
    return [*rest, *found]


def dequantised(
    tensors: dict[str, Read], settings: Settings, dtype: torch.dtype, model: str
) -> dict[str, Read]:
    """Return readers that dequantise a checkpoint's tensors to `dtype`. This function and the
    readers raise the same errors as `scheme_of` and `fields_of`."""
    scheme = scheme_of(settings, model)
    # gpt-oss's module has experts [experts, in, out], but its files have [experts, out, in], so
    # they must be transposed.
    is_turned = any(group.form == BLOCKS for group in scheme.groups)
    fields = fields_of(tensors, scheme, model)

    def read(name: str, part: Part | None = None) -> torch.Tensor:
        numbers = _plain(read_stored(name, fields, model), dtype)
        return same(numbers.transpose(1, 2) if is_turned else numbers, part)

    return fields.codes | {name: partial(read, name) for name in fields.storages}


def _plain(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise a weight. Experts are dequantised one at a time, because all of them in float32
    can take 20 GB."""
    if stored.codes.dim() < 3:
        return stored.plain(dtype)
    numbers = torch.empty(stored.shape, dtype=dtype)
    for expert, own in enumerate(numbers):
        own.copy_(stored[expert].plain(dtype))
    return numbers


_ONE_SCALE = (
    "one scale for a matrix, as AutoFP8 writes, is quantization_config.weight_block_size: null in "
    "config.json"
)
