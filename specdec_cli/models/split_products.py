"""Products of fused layers whose weights are split over ranks; every rank gets the whole result.

With one rank they are the plain kernels. Sums and logits of few rows go through memory that the
GPUs read from each other, where there is such memory.
"""

from dataclasses import dataclass
from typing import Self

import torch
from specdec_kernels import ops
from specdec_kernels.linear.reference import Normed
from torch import Tensor

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.peers import Shared, shared_memory


@dataclass(frozen=True, slots=True)
class SplitProducts:
    """vocab_size: V, of the whole head. shared: None if the ranks share no memory."""

    parallel: TensorParallel
    vocab_size: int
    shared: Shared | None

    @classmethod
    def over(
        cls, parallel: TensorParallel, width: int, vocab_size: int, dtype: torch.dtype
    ) -> Self:
        """Every rank of the group has to call this. width: of the residual stream."""
        return cls(parallel, vocab_size, shared_memory(parallel, width, vocab_size, dtype))

    def add_norm(
        self,
        place: int,
        x: Tensor,
        weight: ops.Weight,
        bias: Tensor | None,
        post_norm: Tensor | None,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> Normed:
        """`ops.linear_add_norm` of a product that is split by the features that it reads.

        place: 0 for the output of attention, 1 for that of the MLP. bias: on one rank only.
        post_norm: the weight of a norm that the product passes before it is added.
        """
        if self.parallel.size == 1 and post_norm is None:
            return ops.linear_add_norm(x, weight, residual, norm_weight, eps, bias)
        if self.shared is not None and len(residual) <= self.shared.sum_rows:
            peers = self.shared.sums
            room = peers.take(place, *residual.shape)
            assert room is not None
            ops.linear(x, weight, bias, into=room)
            if post_norm is None:
                return ops.reduce_add_norm(peers, place, residual, norm_weight, eps)
            whole = ops.reduce_parts(peers, place, len(residual))
        else:
            whole = self.parallel.all_reduce(ops.linear(x, weight, bias))
        return ops.add_norm(whole, residual, norm_weight, eps, post_norm)

    def logits(self, x: Normed, head: ops.Weight, bias: Tensor | None = None) -> Tensor:
        """Logits [M, V] on every rank; each rank computes a part of the vocabulary."""
        peers = None if self.shared is None else self.shared.logits
        num_rows = len(x.hidden)
        if peers is not None and num_rows:
            assert isinstance(head, Tensor), "ranks that share memory are on CUDA"
            room = peers.take(0, num_rows, len(head))
            if room is not None:
                ops.norm_linear(x, head, bias, into=room)
                return ops.gather_columns(peers, num_rows)
        return self.parallel.all_gather(ops.norm_linear(x, head, bias), self.vocab_size)
