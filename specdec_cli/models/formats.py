"""Read from a quantised checkpoint's config which matrices are quantised, in which formats, and how
their tensors are named. Unknown settings are refused, and the error names the key."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from specdec_kernels.linear.stored import FP8, INT4, INT8, MXFP4, Storage

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import SEPARATE
from specdec_cli.text import one_line

Settings = dict[str, Any]  # a config's `quantization_config`
PLAIN, PACKED, NIBBLES, GPTQ, AWQ, BLOCKS = "plain", "packed", "nibbles", "gptq", "awq", "blocks"
_LINEAR = "Linear"
_APART = "quantization."  # the key in hf_quant_config.json under which the settings are
_KINDS_OF_BITS = {4: INT4, 8: INT8}


class Matrices(NamedTuple):
    """The matrices that a checkpoint stores in one format.

    form: how their tensors are named and their codes ordered; see `quantised`.
    one_scale: whether there is a single scale per matrix.
    ordered: whether columns are permuted (`desc_act` or `actorder` in the config). The storage of
        such matrices has one scale per column, and they cannot stay quantised.
    zeros_less_one: whether the file stores each zero point minus one.
    targets: the modules that have such matrices: exact names, patterns that start with `re:`, or
        `Linear` for all.
    """

    storage: Storage
    form: str = PLAIN
    one_scale: bool = False
    ordered: bool = False
    zeros_less_one: bool = False
    targets: tuple[str, ...] = (_LINEAR,)


class Scheme(NamedTuple):
    """A description of which matrices of a checkpoint are quantised, and how.

    groups: the quantised matrices, one group per format.
    left: names or patterns of the modules that are not quantised.
    left_key: the key in the config that lists these modules.
    unused: settings in the config that would change the generated text but are ignored here, as
        phrases for a warning.
    """

    groups: tuple[Matrices, ...]
    left: tuple[str, ...] = ()
    left_key: str = ""
    unused: tuple[str, ...] = ()

    def of(self, path: str) -> Matrices | None:
        """Return the group to which the matrices of a module belong, or None. Names take precedence
        over patterns, and patterns over `Linear`."""
        for fits in (str.__eq__, _matches, lambda target, _: target == _LINEAR):
            for group in self.groups:
                if any(fits(target, path) for target in group.targets):
                    return group
        return None

    def leaves(self, path: str) -> bool:
        """Return True if the config excludes a module from quantisation."""
        return any(
            f".{entry}." in f".{path}." or fnmatchcase(path, entry) or _matches(entry, path)
            for entry in self.left
        )


def _matches(target: str, path: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), path) is not None
    except re.error:
        return False


def scheme_of(settings: Settings, model: str) -> Scheme:
    """Return the scheme that a checkpoint's `quantization_config` describes. Raises a
    `SetupError` if a setting is not supported; the error names its key."""
    return FORMATS[settings["quant_method"]](settings, model)


def _names(settings: Settings, key: str, model: str, at: str = "") -> tuple[str, ...]:
    found = [] if settings.get(key) is None else settings[key]
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _refused(at + key, found, model, "a list of modules")
    return tuple(found)


def _known(
    settings: Settings, key: str, wanted: tuple[object, ...], model: str, at: str = ""
) -> Any:
    found = settings.get(key)
    if not any(found == one and type(found) is type(one) for one in wanted):
        named = ["missing" if one is None else str(one) for one in wanted]
        raise _refused(at + key, found, model, " or ".join(named))
    return found


def _named(settings: Settings, old: str, new: str) -> str:
    """Return the key that a config uses, the old one if it has both."""
    return old if settings.get(old) is not None or new not in settings else new


def _group_size(settings: Settings, model: str, at: str = "") -> int:
    """Return the number of columns per group; 0 if a group is a whole row."""
    found = settings.get("group_size")
    if type(found) is not int or not (0 < found < 1 << 31 or found == -1):
        raise _refused(f"{at}group_size", found, model, "a number of columns, or -1 for a row")
    return max(found, 0)


def _fp8(settings: Settings, model: str) -> Scheme:
    """Read the settings of transformers' own fp8 format."""
    block = settings.get("weight_block_size", (128, 128))
    storage = Storage(FP8) if block is None else Storage(FP8, _block(block, model))
    left = _names(settings, "modules_to_not_convert", model)
    group = Matrices(storage, one_scale=block is None)
    return Scheme((group,), left, "modules_to_not_convert", ("activations in fp8",))


def _block(block: Any, model: str, key: str = "weight_block_size") -> tuple[int, int]:
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
        raise _refused(key, block, model, "two numbers, or null for one scale per matrix")
    return sizes[0], sizes[1]


def _gptq(settings: Settings, model: str) -> Scheme:
    """Read the settings of GPTQ's format (https://github.com/AutoGPTQ/AutoGPTQ), or of GPTQModel's
    version 2 of it."""
    kind = _KINDS_OF_BITS[_known(settings, "bits", (4, 8), model)]
    size, symmetric = _group_size(settings, model), _known(settings, "sym", (True, False), model)
    key = _named(settings, "checkpoint_format", "format")
    version = _known(settings, key, (None, "gptq", "gptq_v2"), model)
    if settings.get("dynamic"):
        raise _refused("dynamic", settings["dynamic"], model, "empty")
    is_ordered = bool(_known(settings, "desc_act", (None, True, False), model)) and size > 0
    storage = Storage(kind, (1, 1 if is_ordered else size), not symmetric, torch.float16)
    group = Matrices(storage, GPTQ, ordered=is_ordered, zeros_less_one=version != "gptq_v2")
    return Scheme((group,), _names(settings, "modules_to_not_convert", model))


def _awq(settings: Settings, model: str) -> Scheme:
    """Read the settings of AWQ's format, https://github.com/casper-hansen/AutoAWQ."""
    _known(settings, "bits", (4,), model)
    key = _named(settings, "version", "format")
    version = settings.get(key, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused(key, version, model, "gemm")
    has_zeros = _known(settings, "zero_point", (True, False), model)
    storage = Storage(INT4, (1, _group_size(settings, model)), has_zeros, torch.float16)
    left = _names(settings, "modules_to_not_convert", model)
    return Scheme((Matrices(storage, AWQ),), left, "modules_to_not_convert")


def _compressed_tensors(settings: Settings, model: str) -> Scheme:
    """Read the settings of compressed-tensors, the format of llm-compressor and vLLM."""
    groups = settings.get("config_groups")
    parts = list(groups.values()) if isinstance(groups, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise _refused("config_groups", groups, model, "groups of weights")
    transforms = settings.get("transform_config")
    if transforms not in (None, {}, {"config_groups": {}}):
        raise _refused("transform_config", transforms, model, "empty")
    found, unused = [], []
    for part in parts:
        if part.get("weights") is not None:
            form = part.get("format") or settings.get("format")
            found.append(_compressed(part, form, model))
        if part.get("input_activations") or part.get("output_activations"):
            unused.append("activations in 8 bits")
    if not found:
        raise _refused("config_groups", groups, model, "groups of weights")
    left = _names(settings, "ignore", model)
    return Scheme(tuple(found), left, "ignore", tuple(dict.fromkeys(unused)))


# Maps each `format` to the number types, numbers of bits and ways to share scales that it allows.
_COMPRESSED: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    "float-quantized": (("float",), (8,), ("tensor", "channel", "block")),
    "int-quantized": (("int",), (8,), ("tensor", "channel", "group")),
    "naive-quantized": (("float", "int"), (8,), ("tensor", "channel", "group", "block")),
    "pack-quantized": (("int",), (4, 8), ("tensor", "channel", "group")),
    "mxfp4-pack-quantized": (("float",), (4,), ("group",)),
}


def _compressed(part: Settings, form: object, model: str) -> Matrices:
    """Read the settings of one group of matrices in compressed-tensors."""
    weights, at = part["weights"], "config_groups.weights."
    if not isinstance(weights, dict):
        raise _refused("config_groups.weights", weights, model, "a mapping")
    if not isinstance(form, str) or form not in _COMPRESSED:
        raise _refused("format", form, model, " or ".join(_COMPRESSED))
    types, bits, strategies = _COMPRESSED[form]
    kind = _known(weights, "type", types, model, at)
    count = _known(weights, "num_bits", bits, model, at)
    strategy = _known(weights, "strategy", strategies, model, at)
    both = (True, False) if kind == "int" else (True,)
    is_symmetric = _known(weights, "symmetric", both, model, at)
    if weights.get("dynamic"):
        raise _refused(f"{at}dynamic", weights["dynamic"], model, "false")
    order = weights.get("actorder")
    if order not in (None, False, "static", "weight", "group", "dynamic", True):
        raise _refused(f"{at}actorder", order, model, "null, static, weight or group")
    targets = _names(part, "targets", model)
    one_scale, group = strategy == "tensor", (1, 0)
    if strategy == "block":
        group = _block(weights.get("block_structure"), model, "block_structure")
    elif strategy == "group":
        group = (1, _group_size(weights, model, at))
    if form == "mxfp4-pack-quantized":
        if group != (1, 32):
            raise _refused(f"{at}group_size", group[1], model, "32")
        return Matrices(Storage(MXFP4, group, scales=torch.uint8), NIBBLES, targets=targets)
    if kind == "float":
        return Matrices(Storage(FP8, group), one_scale=one_scale, targets=targets)
    scales = torch.float32 if one_scale else torch.bfloat16
    is_ordered = order in ("group", "dynamic", True) and group[1] > 0
    group = (1, 1) if is_ordered else group
    storage = Storage(_KINDS_OF_BITS[count], group, not is_symmetric, scales)
    packing = PACKED if form == "pack-quantized" else PLAIN
    return Matrices(storage, packing, one_scale, is_ordered, targets=targets)


def _modelopt(settings: Settings, model: str) -> Scheme:
    """Read the settings of NVIDIA's Model-Optimizer. They may be in hf_quant_config.json."""
    inner = settings.get("quantization")
    at, settings = (_APART, inner) if isinstance(inner, dict) else ("", settings)
    _known(settings, "quant_algo", ("FP8",), model, at)
    key = "exclude_modules" if "exclude_modules" in settings else "ignore"
    group = Matrices(Storage(FP8), one_scale=True)
    return Scheme((group,), _names(settings, key, model, at), key, ("activations in fp8",))


def _mxfp4(settings: Settings, model: str) -> Scheme:
    """Return the format of gpt-oss's experts, whose tensor names end in `_blocks` and `_scales`."""
    storage = Storage(MXFP4, (1, 32), scales=torch.uint8)
    return Scheme((Matrices(storage, BLOCKS, targets=(r"re:.*\.experts\.",)),))


def _refused(key: str, found: object, model: str, wanted: str) -> SetupError:
    where = f"config.json of {model}: quantization_config."
    if key.startswith(_APART):
        where = f"{SEPARATE} of {model}: "
    return SetupError(
        f"{where}{key} is {one_line(repr(found))}",
        f"it must be {wanted}; or use the original, unquantised checkpoint",
    )


# The function that reads each format's settings, by the config's `quant_method`.
FORMATS: dict[str, Callable[[Settings, str], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
