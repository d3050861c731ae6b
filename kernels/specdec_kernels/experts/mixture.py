"""The second half of a decoder layer with experts: the public function."""

from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.experts.reference import Experts, logits_of, mixture_reference, routes_of
from specdec_kernels.linear.cpu import normed
from specdec_kernels.linear.reference import Normed


@kernel("specdec_kernels.experts.mixture_triton:mixture_add_norm_triton")
def mixture_add_norm(x: Normed, experts: Experts, norm_weight: Tensor, eps: float) -> Normed:
    """x plus the weighted sum of the chosen experts' outputs, prepared for the norm that follows.

    Args:
        x: [T, K], all rows as `linear_add_norm` or `add_norm` returned them.
        experts: The layer's weights, contiguous. Its `read` is written.
        norm_weight: [K], and `eps`: of the next layer's norm, or of the last one.

    Returns:
        The new residual stream, in `hidden`, and the input of the next product.
    """
    assert x.squares is None
    routes = routes_of(logits_of(x.scaled, experts), experts.routing, experts.choice_bias)
    if experts.read is not None:
        experts.read.fill_(len(routes.experts.unique()))
    mixed = mixture_reference(x.scaled, routes, experts)
    return normed(x.hidden + mixed, norm_weight, eps)
