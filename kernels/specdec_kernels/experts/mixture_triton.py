"""The second half of a decoder layer with experts on CUDA, by the number of tokens.

Three kernels for few, four for more, and the library's products for many.
"""

from torch import Tensor

from specdec_kernels.experts.down_triton import down_add_norm_triton
from specdec_kernels.experts.gate_up_triton import gate_up_triton
from specdec_kernels.experts.group_triton import group_triton
from specdec_kernels.experts.grouped_triton import grouped_mixture_add_norm
from specdec_kernels.experts.plan import are_few
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.route_triton import route_triton
from specdec_kernels.experts.sorted_triton import sorted_mixture_add_norm
from specdec_kernels.experts.tiles import choose_expert_tiles, choose_group_tiles
from specdec_kernels.gpu import gpu_of
from specdec_kernels.linear.plain_triton import plain_triton
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored import Stored


def mixture_add_norm_triton(x: Normed, experts: Experts, norm_weight: Tensor, eps: float) -> Normed:
    """See `ops.mixture_add_norm`."""
    if isinstance(experts.gate_up, Stored) or isinstance(experts.down, Stored):
        plain = [plain_triton(weight, x.hidden.dtype) for weight in (experts.gate_up, experts.down)]
        experts = experts._replace(gate_up=plain[0], down=plain[1])
    num_rows, itemsize = len(x.hidden), x.hidden.element_size()
    sizes = num_rows, experts.routing.num_chosen, experts.num_experts
    if are_few(*sizes):
        gate_up, down = choose_expert_tiles(num_rows, itemsize)
        plan = route_triton(x, experts)
        inner = gate_up_triton(x.scaled, plan, experts, gate_up)
        return down_add_norm_triton(inner, plan, experts, down, x.hidden, norm_weight, eps)
    tiles = choose_group_tiles(*sizes, itemsize, gpu_of(x.hidden.device).shared_memory)
    if tiles is None:
        return sorted_mixture_add_norm(x, experts, norm_weight, eps)
    groups = group_triton(x, experts)
    return grouped_mixture_add_norm(x, groups, experts, tiles, norm_weight, eps)
