"""The tensors of an EAGLE-3 head: their names and shapes, read, checked or drawn at random.

Names here are those of speculators and Model-Optimizer. SafeAILab and SpecForge call the first
layer `midlayer`. Legend: H width of the head, Ht of the target, n layers of features, V vocabulary
of the target, Vd of the draft.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.errors import SetupError
from specdec_cli.models.heads.eagle3.config import HeadConfig
from specdec_cli.models.refusals import Indivisible
from specdec_cli.models.weights import Part, Read, WrongShape, open_checkpoint
from specdec_cli.text import one_line

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_MIDDLE = re.compile("^midlayer[.]")
# What training leaves behind, and tables that follow from the config.
_HARMLESS = re.compile(r"(^|[.])rotary_emb[.]|^verifier_(norm|lm_head)[.]|^t2d$")
# Of products that ranks add up: only the first rank's pass adds them.
SUMMED_BIAS = re.compile(r"[.](o_proj|down_proj)[.]bias$")
_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights on one device.

    tensors: by name, see `shapes_of`. ids: int64 [Vd], the target's id of each id that the head
    proposes; None where they are the same.
    """

    tensors: dict[str, torch.Tensor]
    ids: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The target's weights that serve a head without its own: [V, Ht] each."""

    embedding: torch.Tensor
    head: torch.Tensor


def serves(source: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a weight of the target can be a head's of this shape and dtype."""
    return tuple(source.shape) == shape and source.dtype == dtype


def shapes_of(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a head, those included that may be borrowed."""
    width = config.hidden_size
    features = config.num_aux * config.target_hidden_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    found = {
        "fc.weight": (width, features),
        "norm.weight": (width,),
        EMBEDDING: (config.vocab_size, width),
    }
    if not config.ties_head:
        found[HEAD] = (config.draft_vocab_size, width)
    if config.norm_before_fc:
        found["input_norm.weight"] = (features,)
    if config.fc_norm:
        found |= {
            f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(config.num_aux)
        }
    for layer in range(config.num_layers):
        reads = width * (2 if config.reads_embedding(layer) else 1)
        own = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (queries, reads),
            "self_attn.k_proj.weight": (keys, reads),
            "self_attn.v_proj.weight": (keys, reads),
            "self_attn.o_proj.weight": (width, queries),
            "mlp.gate_proj.weight": (config.intermediate_size, width),
            "mlp.up_proj.weight": (config.intermediate_size, width),
            "mlp.down_proj.weight": (width, config.intermediate_size),
        }
        if config.reads_embedding(layer):
            own["hidden_norm.weight"] = (width,)
        if config.has_head_norms:
            own |= {f"self_attn.{side}_norm.weight": (config.head_dim,) for side in "qk"}
        for part, has_bias in (("attn", config.attention_bias), ("mlp", config.mlp_bias)):
            if has_bias:
                products = [n for n in own if n.endswith("proj.weight") and part in n]
                own |= {f"{n.removesuffix('weight')}bias": own[n][:1] for n in products}
        found |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def parts_of(config: HeadConfig, parallel: TensorParallel) -> dict[str, Part]:
    """This rank's parts of the weights that ranks share; the others are whole on every rank.

    Attention is split by heads, the MLP by its inner width, and the matrix of logits by ids. Ranks
    that outnumber the key and value heads hold the same ones. Raises `Indivisible` for sizes that
    do not divide.
    """
    if parallel.size == 1:
        return {}
    size = parallel.size
    if config.num_heads % size:
        raise Indivisible(config.name, f"{config.num_heads} attention heads", size)
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise Indivisible(config.name, f"{config.num_kv_heads} key and value heads", size)
    if config.intermediate_size % size:
        raise Indivisible(config.name, f"MLP of width {config.intermediate_size}", size)
    queries = parallel.share(config.num_heads * config.head_dim)
    first = parallel.rank * config.num_kv_heads // size * config.head_dim
    keys = first, first + max(1, config.num_kv_heads // size) * config.head_dim
    inner = parallel.share(config.intermediate_size)
    columns = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    columns |= {"gate_proj": inner, "up_proj": inner}
    rows = {"o_proj": queries, "down_proj": inner}
    found = {}
    for name, shape in shapes_of(config).items():
        product = name.split(".")[-2]
        if product in columns:
            found[name] = Part(0, *columns[product], shape)
        elif product in rows and name.endswith("weight"):
            found[name] = Part(1, *rows[product], shape)
        elif name == HEAD:
            found[name] = Part(0, *parallel.share(config.draft_vocab_size), shape)
    return found


def check_target(config: HeadConfig, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Check that the head belongs to a target of these sizes.

    Raises `SetupError`, which names the key, where it does not.
    """
    for key, ours, theirs in (
        ("target_hidden_size", config.target_hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("num_target_layers", config.num_target_layers or num_layers, num_layers),
    ):
        if ours != theirs:
            raise SetupError(
                f"the EAGLE-3 head {config.name} is for another target: its {key} is {ours}, and "
                f"the target has {theirs}",
                "heads are trained for one target",
            )
    config.feature_layers(num_layers)


def borrowed_by(
    config: HeadConfig,
    folder: Path,
    dtype: torch.dtype,
    lent: Borrowed,
    allow_pickle: bool = False,
) -> frozenset[str]:
    """The weights that the checkpoint lacks and `lent`, which may be on meta, serves for.

    Raises as `read_weights` does for names, and for weights that cannot serve.
    """
    with open_checkpoint(folder, allow_pickle) as stored:
        found = _named(config, stored)
    wanted = shapes_of(config)
    _check_names(config, found, wanted, lent)
    for name in (lacking := wanted.keys() - found.keys()):
        _check_serves(config, name, _source(lent, name), wanted[name], dtype)
    return frozenset(lacking)


def read_weights(
    config: HeadConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    borrowed: Borrowed | None = None,
    allow_pickle: bool = False,
    parallel: TensorParallel = ALONE,
) -> HeadWeights:
    """Read this rank's part of the weights of a head.

    borrowed: serves where the checkpoint has no embedding, or no head; of the latter it holds this
    rank's part.

    Raises `SetupError`, which names the tensor, for one that is missing, of another shape or
    dtype, or unknown, and for ids that the target does not have.
    """
    with open_checkpoint(folder, allow_pickle) as stored:
        found = _named(config, stored)
        wanted, parts = shapes_of(config), parts_of(config, parallel)
        _check_names(config, found, wanted, borrowed)
        tensors = {}
        for name, shape in wanted.items():
            part = parts.get(name, Part(0, 0, shape[0], shape))
            if name in found:
                tensors[name] = _read(config, name, found[name], part).to(device, dtype)
            else:
                assert borrowed is not None
                source = _source(borrowed, name)
                _check_serves(config, name, source, part.local_shape, dtype)
                tensors[name] = source.detach()
        ids = _target_ids(config, found)
    return HeadWeights(tensors, None if ids is None else ids.to(device))


def dummy_weights(
    config: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    borrowed: Borrowed | None = None,
    parallel: TensorParallel = ALONE,
) -> HeadWeights:
    """This rank's part of random matrices, seeded by name, norms of one and biases of zero.

    borrowed: its embedding serves, as it does for most published heads. The ids of a reduced
    vocabulary are spread evenly over the target's.
    """
    tensors, parts = dict[str, torch.Tensor](), parts_of(config, parallel)
    for name, shape in shapes_of(config).items():
        if name == EMBEDDING and borrowed and serves(borrowed.embedding, shape, dtype):
            tensors[name] = borrowed.embedding.detach()
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


def _named(config: HeadConfig, stored: dict[str, Read]) -> dict[str, Read]:
    """The tensors of a checkpoint by the names of `shapes_of`."""
    found: dict[str, Read] = {}
    for name, read in stored.items():
        own = _MIDDLE.sub("layers.0.", name.removeprefix("model."))
        if own in found:
            raise _bad(config, f"{one_line(own)} is there twice, the second time as {name}")
        found[own] = read
    return found


def _check_names(
    config: HeadConfig,
    found: dict[str, Read],
    wanted: dict[str, tuple[int, ...]],
    borrowed: Borrowed | None,
) -> None:
    """Raise for tensors that are missing and cannot be borrowed, or are unknown."""
    lendable = {EMBEDDING} if borrowed is not None else set()
    if borrowed is not None and config.draft_vocab_size == config.vocab_size:
        lendable.add(HEAD)
    missing = sorted(wanted.keys() - found.keys() - lendable)
    reduced = config.draft_vocab_size < config.vocab_size
    if reduced and "d2t" not in found:
        missing.append("d2t")
    if missing:
        raise _bad(config, f"{len(missing)} tensors are missing, first {missing[0]}")
    unknown = [n for n in found.keys() - wanted.keys() - {"d2t"} if not _HARMLESS.search(n)]
    if config.ties_head:
        unknown = [n for n in unknown if n != HEAD]
    if unknown:
        first = one_line(min(unknown))
        raise _bad(config, f"{len(unknown)} tensors do not belong to it, first {first}")


def _source(lent: Borrowed, name: str) -> torch.Tensor:
    return lent.embedding if name == EMBEDDING else lent.head


def _check_serves(
    config: HeadConfig,
    name: str,
    source: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Raise unless the target's weight can serve as the head's."""
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
        told = f"{name} has shape {list(problem.found)}, and {list(part.shape)} by its config.json"
        raise _bad(config, told) from None
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise _bad(config, f"{name} is {tensor.dtype}: heads are read unquantised")
    return tensor


def _target_ids(config: HeadConfig, found: dict[str, Read]) -> torch.Tensor | None:
    """The target's id of each draft id, int64 [Vd], from d2t; checked against t2d, if there."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    ids = torch.arange(size)
    if "d2t" in found:
        offsets = found["d2t"]()
        if tuple(offsets.shape) != (size,) or offsets.dtype not in (torch.int64, torch.int32):
            told = f"{list(offsets.shape)} {str(offsets.dtype).removeprefix('torch.')}"
            raise _bad(config, f"d2t is {told}, and has to be [{size}] int64")
        ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise _bad(config, f"d2t leads to id {int(ids.max())} or {int(ids.min())} of {vocab}")
    if len(ids.unique()) < size:
        raise _bad(config, "d2t leads to one id of the target from several of the draft")
    if "t2d" in found and size < vocab:
        known = found["t2d"]().bool()
        if tuple(known.shape) != (vocab,) or not torch.equal(known.nonzero()[:, 0], ids.sort()[0]):
            raise _bad(config, "t2d and d2t name different ids")
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _bad(config: HeadConfig, problem: str) -> SetupError:
    return SetupError(
        f"the weights of the EAGLE-3 head {config.name}: {problem}",
        "config.json and the weights do not belong together, or a file is missing",
    )
