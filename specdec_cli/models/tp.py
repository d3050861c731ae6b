"""Tensor parallelism: each rank holds a part of a model's matrices.

transformers' plan for a family lists the linear layers that are split by output features (colwise)
or input features (rowwise). transformers itself splits them over all processes, while this module
splits them over a group of ranks. Attention is split by whole heads; key and value heads are
replicated if there are fewer of them than ranks. Experts are split by their inner features.
Embeddings and routers are whole on every rank.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.models.gate import probe
from specdec_cli.models.refusals import Indivisible, Unsupported
from specdec_cli.models.weights import Part

_COLUMNS = "colwise"
_ROWS = "rowwise"
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
_SPLIT = {_COLUMNS, _ROWS} | _GATHERED | _SPLIT_INPUT
_EXPERTS = "moe_tp_experts"
# Every rank holds these whole. (Splitting the embedding would cost an all-reduce per pass.)
_WHOLE = {"replicated", "replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj"}
# The style of a module, such as attention, whose parameters differ between ranks. It is ignored,
# because separate entries of the plan say how each of the module's layers is split.
_MARKS = {"local_params"}
_KEYS_AND_VALUES = {"k_proj", "v_proj"}
# The bias of the experts' outputs must be added only once, so only one rank adds it.
_ADDED_ONCE = "down_proj_bias"
_GROUP = 32  # columns that share a scale in mxfp4
_UNIT = 64  # features of an expert; kernels read parts of so many of its columns
_SINKS = ".sinks"  # attention sinks: one number per head
_NORMS_OF_HEADS = (".q_norm.weight", ".k_norm.weight")  # cohere's: one row per head
# Latent attention is split by whole heads. The projections to latent vectors, which all heads
# share, are whole on every rank.
_LATENT = {
    "model.layers.*.self_attn.q_proj": _COLUMNS,
    "model.layers.*.self_attn.q_b_proj": _COLUMNS,
    "model.layers.*.self_attn.kv_b_proj": _COLUMNS,
    "model.layers.*.self_attn.o_proj": _ROWS,
}
# Plans for layers that transformers' own plans leave out, by family.
_OWN_PLANS = {
    "deepseek_v3": _LATENT,
    "youtu": _LATENT,
    "gpt_oss": {
        "model.layers.*.self_attn.q_proj": _COLUMNS,
        "model.layers.*.self_attn.k_proj": _COLUMNS,
        "model.layers.*.self_attn.v_proj": _COLUMNS,
        "model.layers.*.self_attn.o_proj": _ROWS,
        "model.layers.*.mlp.experts": _EXPERTS,
    },
}
# Only these families are split. For each, tests compare the logits on 4 ranks with those of the
# whole model, since a plan alone is not enough: it does not show whether a family uses statistics
# over all of a layer's features, as gemma3n does for sparse activations. Splitting such a family
# would silently change its text.
FAMILIES = frozenset(
    """
    apertus arcee cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 gemma gemma2
    gemma3_text gemma4_text glm glm4 glm4_moe gpt_neox gpt_oss granite helium llama mellum
    mimo_v2_flash ministral ministral3 mistral mixtral olmo olmo2 olmo3 phi phi3 qwen2 qwen3
    qwen3_moe seed_oss smollm3 starcoder2 vaultgemma youtu
    """.split()
)


@dataclass(frozen=True, slots=True)
class Shards:
    """The parts of a module's tensors that a rank holds.

    parts: each part, by parameter name. Parameters without an entry are whole.
    tied: maps each parameter that is a view of a part of another parameter to that parameter's
        name. The only such view is a vocabulary head that is tied to the embedding.
    zero: parameters that are zero on this rank. Another rank holds their values and adds them.
    """

    parts: dict[str, Part]
    tied: dict[str, str]
    zero: frozenset[str] = frozenset()


WHOLE = Shards({}, {})


def shard(
    module: Any, layers: list[LayerShape], parallel: TensorParallel, name: str
) -> tuple[Shards, list[LayerShape]]:
    """Reduce `module`, on meta, to the parts of its tensors that this rank holds. Return these
    parts, and the cache shapes of the module's layers on this rank.

    layers: the cache shapes of the whole model's layers. name: the model's name, for messages.
    Raises `Unsupported` if the family has no plan or is not in `FAMILIES`, and if its heads or
    features cannot be divided among the ranks.
    """
    kind, size = module.config.model_type, parallel.size
    whole_plan = (module._tp_plan or {}) | _OWN_PLANS.get(kind, {})
    plan = {k: v for k, v in whole_plan.items() if v not in _WHOLE | _MARKS}
    styles = {n: plan[p] for n in _names(module) if (p := _pattern(n)) in plan}
    experts = [path for path, style in styles.items() if style == _EXPERTS]
    # Plans list the experts' tensors too, but with styles that do not show their layout.
    inside = tuple(f"{path}." for path in experts)
    own = (*experts, *(n for n in styles if n.endswith(_SINKS)))
    styles = {n: s for n, s in styles.items() if n not in own and not n.startswith(inside)}
    unknown = sorted({style for style in styles.values() if style not in _SPLIT})
    reason, hint = None, "tensor_parallel_size: 1 works"
    if unknown:
        reason = f"{kind} is split over ranks in a way that is not supported ({', '.join(unknown)})"
    elif not any("layers." in linear for linear in styles):
        reason = f"transformers has no tensor parallel plan for the layers of {kind}"
    elif kind not in FAMILIES:
        reason = f"no test shows that {kind} gives the same results when it is split over ranks"
        hint += (
            "; of the common families llama, qwen2, qwen3, mistral, gemma, phi3 and olmo2 can be "
            "split, and of those with experts qwen3_moe, mixtral, gpt_oss, glm4_moe and deepseek_v3"
        )
    if reason is not None:
        raise Unsupported(name, reason, hint)
    tied = _tied_head(module)
    parts = _split_products(module, styles, module.config, layers, parallel, name)
    zero: set[str] = set()
    for path in experts:
        held = module.get_submodule(path)
        found = parts_of_experts(held, parallel, name)
        parts |= _narrow(path, held, found)
        held.register_forward_hook(lambda _, args, out: _reduced(out, parallel))
        if held.has_bias and not parallel.is_first:
            zero.add(f"{path}.{_ADDED_ONCE}")
    for path, held in list(module.named_parameters()):
        if path.endswith(_SINKS) or (held.dim() == 2 and path.endswith(_NORMS_OF_HEADS)):
            owner, _, leaf = path.rpartition(".")
            part = Part(0, *_heads(len(held), parallel), tuple(held.shape))
            parts |= _narrow(owner, module.get_submodule(owner), {leaf: part})
    try:
        local = probe(module, name)
    except Unsupported as problem:
        raise Unsupported(name, f"its layers do not run in {size} parts", hint) from problem
    tied = tied if tied.keys() <= parts.keys() else {}
    return Shards(parts, tied, frozenset(zero)), local


def shard_layers(
    body: nn.Module, config: Any, layers: list[LayerShape], parallel: TensorParallel, name: str
) -> dict[str, Part]:
    """Reduce the decoder layers of a draft head, on meta, to this rank's part. Arguments are as for
    `shard`. Returns the parts by parameter name."""
    plan = config.base_model_tp_plan
    styles = {n: s for n in _names(body) if (s := plan.get(_pattern(n))) in _SPLIT}
    return _split_products(body, styles, config, layers, parallel, name)


def _split_products(
    module: nn.Module,
    styles: dict[str, str],
    config: Any,
    layers: list[LayerShape],
    parallel: TensorParallel,
    name: str,
) -> dict[str, Part]:
    """Reduce a module's linear layers to this rank's share, and return the parts by parameter name.
    styles: the plan's style for each layer that is split, by the layer's name."""
    parts: dict[str, Part] = {}
    for path, style in styles.items():
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} is planned as {style}"
        share = _share(config, layers, path, linear, style, parallel, name)
        parts |= _split(path, linear, style, share, parallel)
    return parts


def parts_of_experts(experts: Any, parallel: TensorParallel, name: str) -> dict[str, Part]:
    """Return this rank's parts of a module of stacked experts, by their names in the module. Raises
    `Indivisible` if the experts' inner features cannot be divided among the ranks.

    Each rank holds a part of every expert, and the layer ends with one sum over ranks. If ranks
    held whole experts instead, each pass would wait for the rank with the most chosen experts. For
    example, if a token chose 8 of 128 experts, each of 4 ranks would hold 2 of these 8 on average,
    but the busiest rank 3.5. The price of splitting is narrower matrices: on 8 ranks, each rank
    holds 96 of an expert's 768 features. Routers are whole on every rank, so all ranks choose the
    same experts without communication.
    """
    # [experts, outputs, inputs], or with `is_transposed` [experts, inputs, outputs].
    read = 1 if experts.is_transposed else 2
    width = int(experts.down_proj.shape[read])
    if width % parallel.size:
        raise Indivisible(name, f"{width} features inside an expert", parallel.size)
    start, stop = _share_of_expert(width, parallel)

    def of_both(tensor: Any, dim: int) -> Part:
        """Return this rank's part of a tensor that combines gate and up projections along `dim`:
        gate first and then up if `is_concatenated`, otherwise alternating."""
        shape = tuple(tensor.shape)
        if experts.is_concatenated:
            return Part(dim, start, stop, shape, blocks=2)
        return Part(dim, 2 * start, 2 * stop, shape)

    parts = {
        "gate_up_proj": of_both(experts.gate_up_proj, 3 - read),
        "down_proj": Part(read, start, stop, tuple(experts.down_proj.shape)),
    }
    if experts.has_bias:
        parts["gate_up_proj_bias"] = of_both(experts.gate_up_proj_bias, 1)
    return parts


def _share_of_expert(width: int, parallel: TensorParallel) -> tuple[int, int]:
    """Return this rank's range of the features inside an expert. Shares are equal unless they would
    end inside a group of 32 quantised columns. Then they end at multiples of 64.

    gpt-oss has 2880 features, and an equal share of 4 ranks is 720. So the first rank has 768, and
    the others have 704. Shares stay equal if one would become more than a tenth larger.
    """
    size, units = parallel.size, width // _UNIT
    if (width // size) % _GROUP == 0 or width % _UNIT:
        return parallel.share(width)
    if -(-units // size) * _UNIT * size > 1.1 * width:
        return parallel.share(width)
    start, stop = (-(-units * rank // size) * _UNIT for rank in (parallel.rank, parallel.rank + 1))
    return start, stop


def _pattern(name: str) -> str:
    """Return a submodule's name as plans write it, with `*` for the layer's number."""
    return ".".join("*" if step.isdigit() else step for step in name.split("."))


def _names(module: Any) -> list[str]:
    """Return the names of all submodules and parameters. Plans name linear layers by submodule, but
    stacked experts by parameter."""
    return [n for n, _ in (*module.named_modules(), *module.named_parameters()) if n]


def _tied_head(module: Any) -> dict[str, str]:
    """Return a dict that maps the name of the vocabulary head's weight to the name of the
    embedding's weight, or an empty dict if the two are not tied."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return {}
    names = {id(m): n for n, m in module.named_modules()}
    return {f"{names[id(head)]}.weight": f"{names[id(embedding)]}.weight"}


def _share(
    config: Any,
    layers: list[LayerShape],
    path: str,
    linear: nn.Linear,
    style: str,
    parallel: TensorParallel,
    name: str,
) -> tuple[int, int]:
    """Return this rank's range of a linear layer's features: whole heads in attention, otherwise an
    even share. Raises `Indivisible` if they cannot be divided among the ranks."""
    if style in _GATHERED:
        return parallel.share(linear.out_features)
    size, reads = parallel.size, style != _COLUMNS
    width = linear.in_features if reads else linear.out_features
    if style not in _SPLIT_INPUT and re.search("attn|attention", path):
        if config.num_attention_heads % size:
            raise Indivisible(name, f"{config.num_attention_heads} attention heads", size)
        if path.rpartition(".")[2] in _KEYS_AND_VALUES:
            heads = layers[int(re.findall(r"layers\.(\d+)", path)[0])].num_kv_heads
            if heads % size and size % heads:
                raise Indivisible(name, f"{heads} key and value heads", size)
            start, stop = _heads(heads, parallel)
            return start * (width // heads), stop * (width // heads)
    if width % size:
        what = "read" if reads else "written"
        raise Indivisible(name, f"{width} features {what} by {path}", size)
    return parallel.share(width)


def _heads(count: int, parallel: TensorParallel) -> tuple[int, int]:
    """Return this rank's range of heads. If there are more ranks than key and value heads, several
    ranks hold the same one."""
    if count < parallel.size:
        start = parallel.rank * count // parallel.size
        return start, start + 1
    return parallel.share(count)


def _split(
    path: str, linear: nn.Linear, style: str, share: tuple[int, int], parallel: TensorParallel
) -> dict[str, Part]:
    """Reduce one linear layer to the features in `share`, and add its collective, if it needs one.
    Returns the parts by parameter name."""
    (start, stop), width = share, linear.out_features
    if style == _COLUMNS or style in _GATHERED:
        parts = {"weight": Part(0, start, stop, tuple(linear.weight.shape))}
        linear.out_features = stop - start
        if linear.bias is not None:
            parts["bias"] = Part(0, start, stop, tuple(linear.bias.shape))
        if style in _GATHERED:
            linear.register_forward_hook(lambda _, args, out: _gathered(out, parallel, width))
    else:
        parts = {"weight": Part(1, start, stop, tuple(linear.weight.shape))}
        linear.in_features = stop - start
        if not parallel.is_first:
            linear.register_parameter("bias", None)  # only one rank adds it
        if style in _SPLIT_INPUT:
            linear.register_forward_pre_hook(lambda _, args: (args[0][..., start:stop],))
        linear.register_forward_hook(lambda _, args, out: _reduced(out, parallel))
    return _narrow(path, linear, parts)


def _narrow(path: str, owner: Any, parts: dict[str, Part]) -> dict[str, Part]:
    """Replace parameters of `owner` by uninitialised ones with the shapes of this rank's parts.
    Returns the parts by the parameters' full names.

    path: the full name of `owner`. parts: this rank's parts, by the names within `owner`.
    """
    for leaf, part in parts.items():
        whole = getattr(owner, leaf).new_empty(part.local_shape)
        setattr(owner, leaf, nn.Parameter(whole, requires_grad=False))
    return {f"{path}.{leaf}": part for leaf, part in parts.items()}


def _reduced(out: Tensor, parallel: TensorParallel) -> Tensor:
    return out if out.is_meta else parallel.all_reduce(out)


def _gathered(out: Tensor, parallel: TensorParallel, width: int) -> Tensor:
    if out.is_meta:
        return out.new_empty(*out.shape[:-1], width)
    return parallel.all_gather(out, width)
