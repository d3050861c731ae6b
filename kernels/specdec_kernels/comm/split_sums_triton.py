"""Matmuls whose input features are split over ranks, and the sums of the ranks' results.

A sum writes its results while programs of the matmul before it may still run. So the memory for the
results is allocated before the matmul is launched. Otherwise torch could give the sum the memory of
tensors that only the matmul uses, such as the partial sums of its splits, since torch reuses them
as soon as the matmul has been launched.
"""

from torch import Tensor

from specdec_kernels.comm.peers import Peers
from specdec_kernels.comm.peers_triton import (
    Outputs,
    reduce_add_norm_triton,
    reduce_parts_triton,
)
from specdec_kernels.experts.mixture_triton import mixture_to_peers
from specdec_kernels.experts.reference import Experts
from specdec_kernels.linear.products_triton import linear_to_peers
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored import Stored
from specdec_kernels.linear.tiles import leaves_norm


def linear_reduce_add_norm_triton(
    peers: Peers,
    place: int,
    x: Tensor,
    weight: Tensor | Stored,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Normed:
    """See `ops.linear_reduce_add_norm`."""
    outputs = Outputs.allocated(peers.parts, len(residual), leaves_norm(residual))
    is_sent = linear_to_peers(peers, place, x, weight, bias)
    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps, outputs, is_sent)


def linear_reduce_triton(
    peers: Peers, place: int, x: Tensor, weight: Tensor | Stored, bias: Tensor | None
) -> Tensor:
    """See `ops.linear_reduce`."""
    outputs = Outputs.allocated(peers.parts, len(x), has_norm=False)
    is_sent = linear_to_peers(peers, place, x, weight, bias)
    reduce_parts_triton(peers, place, outputs, is_sent=is_sent)
    return outputs.hidden


def mixture_reduce_add_norm_triton(
    peers: Peers,
    place: int,
    x: Normed,
    experts: Experts,
    start: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> Normed:
    """See `ops.mixture_reduce_add_norm`."""
    residual = x.hidden
    outputs = Outputs.allocated(peers.parts, len(residual), leaves_norm(residual))
    is_sent = mixture_to_peers(peers, place, x, experts, start)
    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps, outputs, is_sent)
