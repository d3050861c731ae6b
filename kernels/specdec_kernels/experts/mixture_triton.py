"""The second half of a decoder layer with experts on CUDA: three kernels, or sorted products."""

from torch import Tensor

from specdec_kernels.experts.down_triton import down_add_norm_triton
from specdec_kernels.experts.gate_up_triton import gate_up_triton
from specdec_kernels.experts.plan import FEW_TOKENS
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.route_triton import route_triton
from specdec_kernels.experts.sorted_triton import sorted_mixture_add_norm
from specdec_kernels.experts.tiles import choose_expert_tiles
from specdec_kernels.linear.reference import Normed


def mixture_add_norm_triton(x: Normed, experts: Experts, norm_weight: Tensor, eps: float) -> Normed:
    """See `ops.mixture_add_norm`."""
    num_rows = len(x.hidden)
    if not 0 < num_rows <= FEW_TOKENS:
        return sorted_mixture_add_norm(x, experts, norm_weight, eps)
    gate_up, down = choose_expert_tiles(num_rows, x.hidden.element_size())
    plan = route_triton(x, experts)
    inner = gate_up_triton(x.scaled, plan, experts, gate_up)
    return down_add_norm_triton(inner, plan, experts, down, x.hidden, norm_weight, eps)
