"""Read and check the weights of a head, borrow them from the target, or draw them at random.

`HeadConfig.shapes` names the weights. The checkpoint of a head with a reduced vocabulary has two
more tensors. d2t, int64 [Vd], maps the head's ids to the target's: id i of the head is id i +
d2t[i] of the target. t2d, bool [V], is true for the target's ids that the head can propose.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.errors import SetupError
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, HeadWeights
from specdec_cli.models.quantised import dequantised
from specdec_cli.models.weights import Part, Read, WrongShape, open_checkpoint
from specdec_cli.text import counted, one_line

_DUMMY_STD = 0.02


# The target's weights that a head may use if it has none of its own, by the head's names for them.
Lent = Mapping[str, torch.Tensor]


def serves(source: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if a weight of the target can serve as a head's weight of this shape and
    dtype."""
    return tuple(source.shape) == shape and source.dtype == dtype


def borrowed_by(
    config: HeadConfig,
    folder: Path,
    dtype: torch.dtype,
    lent: Lent,
    allow_pickle: bool = False,
) -> frozenset[str]:
    """Return the names of the weights that the checkpoint lacks and the head takes from `lent`. The
    lent weights may be on meta. Raises `SetupError` for tensors that are missing or unknown, and
    for lent weights that do not fit.
    """
    with _opened(config, folder, dtype, allow_pickle) as found:
        pass
    wanted = config.shapes()
    _check_names(config, found, wanted, lent)
    for name in (lacking := wanted.keys() - found.keys()):
        _check_serves(config, name, lent[name], wanted[name], dtype)
    return frozenset(lacking)


def read_weights(
    config: HeadConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    lent: Lent = MappingProxyType({}),
    allow_pickle: bool = False,
    parallel: TensorParallel = ALONE,
) -> HeadWeights:
    """Read this rank's part of the weights of a head. lent: the target's weights, used where the
    checkpoint has none. Raises a `SetupError` that names the tensor if one is missing or unknown,
    or has a wrong shape or dtype, and for ids that the target does not have.
    """
    with _opened(config, folder, dtype, allow_pickle) as found:
        wanted, (_, parts) = config.shapes(), config.split(parallel)
        _check_names(config, found, wanted, lent)
        tensors = {}
        for name, shape in config.shapes(parallel).items():
            if name in found:
                whole = wanted[name]
                part = parts.get(name, Part(0, 0, whole[0], whole))
                own = _read(config, name, found[name], part).to(device, dtype)
                tensors[name] = own.contiguous()  # a pickled tensor's part may be a strided view
            else:
                _check_serves(config, name, lent[name], shape, dtype)
                tensors[name] = lent[name].detach()
        ids = _target_ids(config, found)
    return HeadWeights(tensors, None if ids is None else ids.to(device))


def dummy_weights(
    config: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    lent: Lent = MappingProxyType({}),
    parallel: TensorParallel = ALONE,
) -> HeadWeights:
    """Create random weights and return this rank's part of them. Each matrix is seeded by its name,
    norms are one, biases are zero, and the ids that the head can propose are evenly spaced. If the
    target's embedding fits, it is used, since most heads share it with their target."""
    tensors = dict[str, torch.Tensor]()
    shapes, (_, parts) = config.shapes(), config.split(parallel)
    for name in config.shapes(parallel):
        shape = shapes[name]
        if name == EMBEDDING in lent and serves(lent[name], shape, dtype):
            tensors[name] = lent[name].detach()
        elif len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            tensors[name] = torch.full(shape, fill, dtype=dtype, device=device)
        else:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
            generator = torch.Generator(device).manual_seed(seed)
            empty = torch.empty(shape, dtype=dtype, device=device)
            tensors[name] = empty.normal_(0.0, _DUMMY_STD, generator=generator)
        if name in parts:
            tensors[name] = parts[name].of(tensors[name]).clone()
    if config.draft_vocab_size == config.vocab_size:
        return HeadWeights(tensors, None)
    places = torch.arange(config.draft_vocab_size, device=device)
    return HeadWeights(tensors, places * config.vocab_size // config.draft_vocab_size)


@contextmanager
def _opened(
    config: HeadConfig, folder: Path, dtype: torch.dtype, allow_pickle: bool
) -> Iterator[dict[str, Read]]:
    """Open a checkpoint and yield readers of its tensors, by the names of `shapes`. Quantised
    tensors are dequantised to `dtype`."""
    with open_checkpoint(folder, allow_pickle) as stored:
        if config.quantisation is not None:
            stored = dequantised(stored, config.quantisation, dtype, config.name)
        found: dict[str, Read] = {}
        for name, read in stored.items():
            if (own := config.renamed(name)) is None:
                continue
            if own in found:
                raise _bad(config, f"{one_line(own)} occurs twice, the second time as {name}")
            found[own] = read
        yield found


def _check_names(
    config: HeadConfig,
    found: dict[str, Read],
    wanted: dict[str, tuple[int, ...]],
    lent: Lent,
) -> None:
    """Raise `SetupError` for tensors that are unknown, or that are missing and cannot be
    borrowed."""
    reduced = config.draft_vocab_size < config.vocab_size
    lends = {EMBEDDING} if reduced else {EMBEDDING, HEAD}
    missing = sorted(wanted.keys() - found.keys() - (lends & lent.keys()))
    if reduced and "d2t" not in found:
        missing.append("d2t")
    if missing:
        raise _bad(config, f"{counted(len(missing), 'missing tensor')}, first {missing[0]}")
    if unknown := found.keys() - wanted.keys() - {"d2t", "t2d"}:
        first = one_line(min(unknown))
        raise _bad(config, f"{counted(len(unknown), 'unknown tensor')}, first {first}")


def _check_serves(
    config: HeadConfig,
    name: str,
    source: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Raise `SetupError` unless the target's weight can serve as the head's."""
    if serves(source, shape, dtype):
        return
    theirs, ours = (str(kind).removeprefix("torch.") for kind in (source.dtype, dtype))
    raise _bad(
        config,
        f"{name} is missing, and the target's, {list(source.shape)} {theirs}, cannot serve as "
        f"{list(shape)} {ours}",
    )


def _read(config: HeadConfig, name: str, read: Read, part: Part) -> torch.Tensor:
    try:
        tensor = read(part)
    except WrongShape as problem:
        told = (
            f"{name} has shape {list(problem.found)}, but config.json requires {list(part.shape)}"
        )
        raise _bad(config, told) from None
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        lacks = "config.json does not say how" if config.quantisation is None else "has no scales"
        raise _bad(config, f"{name} is {tensor.dtype}, which is quantised, and {lacks}")
    return tensor


def _target_ids(config: HeadConfig, found: dict[str, Read]) -> torch.Tensor | None:
    """Return the target's id for each id of the head, int64 [Vd], from d2t; None if they are the
    same. Raises `SetupError` for impossible ids, and for a t2d that contradicts d2t."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    ids = torch.arange(size)
    if "d2t" in found:
        offsets = found["d2t"]()
        if tuple(offsets.shape) != (size,) or offsets.dtype not in (torch.int64, torch.int32):
            told = f"{list(offsets.shape)} {str(offsets.dtype).removeprefix('torch.')}"
            raise _bad(config, f"d2t is {told}, but must be [{size}] int64")
        ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        told = f"d2t maps to ids from {int(ids.min())} to {int(ids.max())}, but the target has"
        raise _bad(config, f"{told} ids from 0 to {vocab - 1}")
    if len(ids.unique()) < size:
        raise _bad(config, "d2t maps several draft ids to one target id")
    if "t2d" in found and size < vocab:
        known = found["t2d"]().bool()
        if tuple(known.shape) != (vocab,) or not torch.equal(known.nonzero()[:, 0], ids.sort()[0]):
            raise _bad(config, "t2d and d2t name different ids")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _bad(config: HeadConfig, problem: str) -> SetupError:
    return SetupError(
        f"the weights of the {config.noun} {config.name}: {problem}",
        "config.json and the weights do not belong together, or a file is missing",
    )
