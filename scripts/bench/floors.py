"""Time below which a pass cannot go: every weight that it needs is read once, and multiplied by
every token.

Of experts only those are read that the tokens of the pass choose. Engines count them where layers
are fused. Elsewhere they are estimated as if each token chose uniformly; where routing is not
uniform, fewer are read than that.
"""

from typing import Any

COPY_TB_PER_S = 4.3  # read + written, device to device, H200
BF16_TFLOP_PER_S = 790  # of dense products, H200


def distinct_experts(num_experts: int, num_chosen: int, tokens: int) -> float:
    """Expected number of experts that at least one of `tokens` chooses, each uniformly."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** tokens)


def bytes_read(module: Any, tokens: int, read: float | None = None) -> float:
    """Bytes that a pass over `tokens` reads: no untied input embedding, and chosen experts alone.

    module: a transformers model, which needs no weights. Experts are the stacked parameters of
    submodules named "experts"; others count whole. read: experts that were read in a layer, as
    counted; None for those of uniform choices.
    """
    table = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    total -= 0 if table is head else table.numel() * table.element_size()
    for name, parameter in module.named_parameters():
        if ".experts." not in name:
            continue
        count, size = len(parameter), parameter.numel() * parameter.element_size()
        chosen = distinct_experts(count, chosen_of(module), tokens) if read is None else read
        total -= size * (1 - chosen / count)
    return float(total)


def products(module: Any) -> float:
    """Multiplications that a token passes in a forward pass, without embedding and head."""
    ends = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or id(parameter) in ends:
            continue
        is_expert = ".experts." in name
        if is_expert and parameter.dim() < 3:  # a bias of each expert
            continue
        total += parameter.numel() * (chosen_of(module) / len(parameter) if is_expert else 1)
    return total


def chosen_of(module: Any) -> int:
    """Experts that a token chooses; 0 for a model without experts."""
    config = module.config
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    found = (getattr(config, name, None) for name in names)
    value = next((v for v in found if v), 0)
    return int(max(value) if isinstance(value, list) else value)


def has_experts(module: Any) -> bool:
    return any(".experts." in name for name, _ in module.named_parameters())
