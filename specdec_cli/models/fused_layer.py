"""Fused decoder layers: their merged weights, and the differences between model families."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from specdec_kernels import ops
from specdec_kernels.experts.reference import CLAMPED
from torch import Tensor

from specdec_cli.models.gate import rope_settings
from specdec_cli.models.held import StoredParameter, weight_of

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """The ways in which a family's layers differ from Llama's. Biases, norms of heads, windows and
    softcaps are not listed here, because they are read from the module itself.

    activation: the key in the config that names the activation.
    is_gemma: whether norms multiply by 1 + weight, in fp32, and embeddings are multiplied by the
        square root of their width.
    has_post_norms: whether the outputs of attention and MLP are normalised before they are added to
        the residual stream.
    turns_by_type: whether each type of layer has its own rotary embedding.
    halves_turns: whether rotary tables list each angle once, although both halves of a head use it.
    caps_logits: whether a config may set a softcap of the logits.
    rounds_routes: whether the routing weights of experts are rounded to the model's dtype.
    clamps_experts: whether experts are like gpt-oss's, with a clamped activation, biases, and
        weights that are stored transposed.
    norms_all_heads: whether query and key are each normalised over all heads together.
    turns_partly: whether a config may rotate only a part of each head.
    has_sigmoid_routes: whether experts are chosen by sigmoid scores plus a bias, from only the best
        groups of experts, and the sum of their outputs is multiplied by a constant.
    """

    activation: str = "hidden_act"
    is_gemma: bool = False
    has_post_norms: bool = False
    turns_by_type: bool = False
    halves_turns: bool = False
    caps_logits: bool = False
    rounds_routes: bool = True
    clamps_experts: bool = False
    norms_all_heads: bool = False
    turns_partly: bool = False
    has_sigmoid_routes: bool = False


_GEMMA_2 = Family("hidden_activation", is_gemma=True, has_post_norms=True, caps_logits=True)
_FAMILIES = {
    "LlamaDecoderLayer": Family(),
    "MistralDecoderLayer": Family(),
    "Qwen2DecoderLayer": Family(),
    "Qwen3DecoderLayer": Family(),
    "Qwen3MoeDecoderLayer": Family(),
    "MixtralDecoderLayer": Family(rounds_routes=False),
    "OlmoeDecoderLayer": Family(norms_all_heads=True),
    "Glm4MoeDecoderLayer": Family(turns_partly=True, has_sigmoid_routes=True),
    "Dots1DecoderLayer": Family(has_sigmoid_routes=True),
    "GptOssDecoderLayer": Family(halves_turns=True, clamps_experts=True),
    "GemmaDecoderLayer": Family(is_gemma=True),
    "Gemma2DecoderLayer": _GEMMA_2,
    "Gemma3DecoderLayer": replace(_GEMMA_2, turns_by_type=True),
}


def family_of(module: Any) -> Family | None:
    """Return the family of a model, or None if the model has no fused form. The module may be on
    meta."""
    layers = getattr(getattr(module, "model", None), "layers", None) or ()
    names = {type(layer).__name__ for layer in layers}
    family = _FAMILIES.get(names.pop()) if len(names) == 1 else None
    if family is None or getattr(module.config, family.activation, None) not in _ACTIVATIONS:
        return None
    ropes = rope_settings(module.config)
    is_partial = any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes)
    if is_partial and not family.turns_partly:
        return None
    if getattr(module.config, "clip_qkv", None) is not None:
        return None
    mlps = [mlp for mlp in map(dense_mlp, layers) if mlp is not None]
    has_biases = any(p.bias is not None for mlp in mlps for p in (mlp.gate_proj, mlp.down_proj))
    return None if has_biases else family


def fusable_family(module: Any) -> Family:
    """Return the family of a model that is known to have a fused form."""
    family = family_of(module)
    assert family is not None
    return family


def has_experts(layer: Any) -> bool:
    """Return True if a transformers layer has a mixture of experts instead of an MLP."""
    return hasattr(layer.mlp, "experts")


def dense_mlp(layer: Any) -> Any:
    """Return the MLP that all tokens pass through: the layer's own MLP or its shared experts; None
    if there is neither. Shared experts run as an MLP, because the kernel for routed experts would
    spend longer on an expert that all tokens use than on any other."""
    return getattr(layer.mlp, "shared_experts", None) if has_experts(layer) else layer.mlp


def expert_sizes(layer: Any, config: Any, family: Family) -> tuple[int, int, int]:
    """Return the number of experts, how many a token chooses, and the width inside one."""
    count, *size = layer.mlp.experts.down_proj.shape
    features = size[0] if family.clamps_experts else size[1]
    return int(count), int(config.num_experts_per_tok), int(features)


def _experts(layer: Any, config: Any, family: Family, read: Tensor | None) -> ops.Experts:
    """Return a layer's experts, which share the module's weights.

    read: int32 [1]; each pass stores in it the number of experts whose weights it reads. None to
        not count them.
    """
    if family.clamps_experts:
        found = _clamped_experts(layer.mlp.router, layer.mlp.experts, config, read)
    else:
        found = _gated_experts(layer, config, family, read)
    parameters = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
    found = ops.in_tiles(found, parameters[0].dtype)
    for parameter, weight in zip(parameters, (found.gate_up, found.down), strict=True):
        if isinstance(parameter, StoredParameter) and isinstance(weight, ops.Stored):
            parameter.value = weight
    return found


def _gated_experts(layer: Any, config: Any, family: Family, read: Tensor | None) -> ops.Experts:
    """Return the experts of a layer of any other family; they share the module's weights."""
    router, choice_bias = layer.mlp.gate, None
    routing = ops.Routing(
        num_chosen=int(config.num_experts_per_tok),
        renormalise=bool(getattr(router, "norm_topk_prob", True)),  # a config may have a stray one
        rounds=family.rounds_routes,
    )
    if family.has_sigmoid_routes:
        choice_bias = router.e_score_correction_bias
        routing = routing._replace(
            sigmoid=True,
            num_groups=int(config.n_group),
            kept_groups=int(config.topk_group),
            scaling=float(config.routed_scaling_factor),
        )
    return ops.Experts(
        router=router.weight.data,
        gate_up=weight_of(layer.mlp.experts.gate_up_proj),
        down=weight_of(layer.mlp.experts.down_proj),
        routing=routing,
        activation=_ACTIVATIONS[getattr(config, family.activation)],
        choice_bias=choice_bias,
        read=read,
    )


def _clamped_experts(router: Any, experts: Any, config: Any, read: Tensor | None) -> ops.Experts:
    """Return a gpt-oss layer's experts. The module's weights become views of the returned ones."""
    return ops.Experts(
        router=router.weight.data,
        gate_up=_transposed(experts.gate_up_proj),
        down=_transposed(experts.down_proj),
        routing=ops.Routing(int(config.num_experts_per_tok), softmax_first=False),
        activation=CLAMPED,
        router_bias=router.bias.data,
        gate_up_bias=experts.gate_up_proj_bias.data,
        down_bias=experts.down_proj_bias.data,
        interleaved=True,
        slope=float(experts.alpha),
        limit=float(experts.limit),
        read=read,
    )


def _transposed(parameter: torch.nn.Parameter) -> Tensor | ops.Stored:
    """Return the weights [E, N, K] of a parameter [E, K, N], which becomes a view of them."""
    if isinstance(parameter, StoredParameter):
        return weight_of(parameter)
    whole = parameter.data.transpose(1, 2).contiguous()
    parameter.data = whole.transpose(1, 2)
    return whole


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer: its merged weights, and the arguments with which it calls attention.

    turn: the index of this layer's rotary embedding among the rotary embeddings of the model.
    post_attention_norm, post_mlp_norm: the weights of norms that are applied to the outputs of
        attention and MLP before the residual sums; None if the family has no such norms.
    following_norm: the weight of the next layer's first norm, or of the final norm.
    query_norm, key_norm: the weights of norms that are applied to each head; None without them.
    all_heads_norms: the weights of query and key norms over all heads together; None without them.
    gate_up, down: the weights of the MLP that all tokens pass through; None if there are only
        routed experts.
    """

    index: int
    call: ops.AttentionCall
    turn: int
    activation: str
    eps: float
    attention_norm: Tensor
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    post_mlp_norm: Tensor | None
    following_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: ops.Weight
    qkv_bias: Tensor | None
    output: ops.Weight
    output_bias: Tensor | None
    gate_up: ops.Weight | None
    down: ops.Weight | None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    experts: ops.Experts | None = None
    all_heads_norms: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_layer(
        cls,
        layer: Any,
        config: Any,
        family: Family,
        index: int,
        turn: int,
        call: ops.AttentionCall,
        following_norm: Any,
        read: Tensor | None = None,
    ) -> Self:
        """Return the fused form of a transformers layer, whose matrices become views of the merged
        ones. index: the layer's index in the cache. following_norm: the norm module after the
        layer. read: see `_experts`.
        """
        attention = layer.self_attn
        before_mlp = layer.post_attention_layernorm
        post_attention = post_mlp = None
        if family.has_post_norms:
            before_mlp = layer.pre_feedforward_layernorm
            post_attention = _norm(layer.post_attention_layernorm, family)
            post_mlp = _norm(layer.post_feedforward_layernorm, family)
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (n if n is None else _norm(n, family) for n in head_norms)
        all_heads_norms = None
        if family.norms_all_heads:
            assert query_norm is not None and key_norm is not None
            all_heads_norms, query_norm, key_norm = (query_norm, key_norm), None, None
        experts = _experts(layer, config, family, read) if has_experts(layer) else None
        qkv, output, *mlp = map(merged, matrices(layer))
        gate_up, down = mlp or (None, None)
        return cls(
            index=index,
            call=call,
            turn=turn,
            activation=_ACTIVATIONS[getattr(config, family.activation)],
            eps=float(config.rms_norm_eps),
            attention_norm=_norm(layer.input_layernorm, family),
            post_attention_norm=post_attention,
            mlp_norm=_norm(before_mlp, family),
            post_mlp_norm=post_mlp,
            following_norm=_norm(following_norm, family),
            query_norm=query_norm,
            key_norm=key_norm,
            all_heads_norms=all_heads_norms,
            qkv=qkv,
            qkv_bias=_bias(attention.q_proj, attention.k_proj, attention.v_proj),
            output=output,
            output_bias=attention.o_proj.bias,
            gate_up=gate_up,
            down=down,
            gate_up_bias=None if experts else _bias(layer.mlp.gate_proj, layer.mlp.up_proj),
            down_bias=None if experts else layer.mlp.down_proj.bias,
            experts=experts,
        )

    def normed(self, qkv: Tensor) -> Tensor:
        """Apply the norms over all heads to qkv [T, (H + 2 Hkv) * D], if the layer has them."""
        if self.all_heads_norms is None:
            return qkv
        query_norm, key_norm = self.all_heads_norms
        rest = qkv.shape[1] - len(query_norm) - len(key_norm)
        query, key, value = qkv.split((len(query_norm), len(key_norm), rest), dim=1)
        query, key = (
            ops.rms_norm(x, norm, self.eps) for x, norm in ((query, query_norm), (key, key_norm))
        )
        return torch.cat((query, key, value), dim=1)


def numbers_multiplied(layer: Any, config: Any, family: Family) -> int:
    """Return the number of a layer's weights that take part in the matrix products for one token:
    all dense weights, and those of the chosen experts. The layer may be on meta."""
    found = sum(p.numel() for group in matrices(layer) for p in group)
    if has_experts(layer):
        count, chosen, _ = expert_sizes(layer, config, family)
        stacked = [p for p in layer.mlp.experts.parameters() if p.dim() == 3]
        found += sum(p.numel() for p in stacked) * chosen // count
    return found


def _bias(*products: Any) -> Tensor | None:
    """Return the bias of merged projections, or None if they have none."""
    found = [product.bias for product in products]
    return None if found[0] is None else torch.cat(found)


def _norm(norm: Any, family: Family) -> Tensor:
    """Return the factors that a norm applies after normalising: 1 + weight in fp32 for Gemma,
    otherwise the weight."""
    weight: Tensor = norm.weight.data
    return 1.0 + weight.float() if family.is_gemma else weight


def matrices(layer: Any) -> list[list[torch.nn.Parameter]]:
    """Return a layer's weights in the groups that are merged: [q, k, v], [output], [gate, up] and
    [down]. A layer that has only routed experts lacks the last two."""
    attention, mlp = layer.self_attn, dense_mlp(layer)
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
    if mlp is not None:
        groups += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return [[projection.weight for projection in group] for group in groups]


def merged(parameters: list[torch.nn.Parameter], keep: bool = False) -> ops.Weight:
    """Concatenate the rows of all parameters [N_i, K] into one weight, and make the parameters
    views of it. If the weight is packed and there is no unpacked copy, views are impossible: the
    parameters then keep only their shapes, or with `keep` also their values."""
    if isinstance(parameters[0], StoredParameter):
        return _joined([p for p in parameters if isinstance(p, StoredParameter)])
    whole = parameters[0].data
    if len(parameters) > 1:
        whole = torch.cat([parameter.data for parameter in parameters])
    weight = ops.pack_weight(whole)
    plain = weight if isinstance(weight, Tensor) else weight.plain
    if plain is None and not keep:
        plain = whole.new_full((), float("nan")).expand(whole.shape)
    if plain is not None:
        parts = plain.split([len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return weight


def _joined(parameters: list[StoredParameter]) -> ops.Stored:
    """Join the quantised weights of several parameters into one. The parameters become views of
    it."""
    parts = [parameter.value for parameter in parameters if parameter.value is not None]
    whole, start = parts[0] if len(parts) == 1 else ops.Stored.joined(parts), 0
    for parameter in parameters:
        parameter.value = whole.rows(start, start + len(parameter))
        start += len(parameter)
    return whole
