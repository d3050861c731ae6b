"""Matmuls of fused layers with weights that are split over ranks. Every rank gets whole results."""

from dataclasses import dataclass
from typing import Self

import torch
from specdec_kernels import ops
from specdec_kernels.comm.peers import Peers
from specdec_kernels.linear.reference import Normed
from torch import Tensor

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.peers import Shared, shared_memory

_OF_MLP = 1  # the index of the buffer in shared memory for outputs of MLPs


@dataclass(frozen=True, slots=True)
class SplitProducts:
    """The matmuls of one model, whose weights are split over ranks.

    vocab_size: the number of ids in the whole vocabulary.
    shared: memory through which the ranks exchange results; None if there is no such memory.
    nothing: zeros [1, N], where N is the width of the residual stream. With several ranks, the
        experts' kernel adds its output to these zeros instead of the residual stream, because the
        stream must be added only once.
    """

    parallel: TensorParallel
    vocab_size: int
    shared: Shared | None
    nothing: Tensor

    @classmethod
    def over(
        cls, parallel: TensorParallel, width: int, vocab_size: int, dtype: torch.dtype
    ) -> Self:
        """Make the split matmuls of a model for a group of ranks. Every rank of it must call this.
        width: the width of the residual stream.
        """
        shared = shared_memory(parallel, width, vocab_size, dtype)
        nothing = torch.zeros(1, width, dtype=dtype, device=parallel.device)
        return cls(parallel, vocab_size, shared, nothing)

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
        """Compute `ops.linear_add_norm` for a matmul that is split by input features: multiply, sum
        the results of all ranks, add the sum to the residual stream, and apply the next norm.

        place: 0 for the output of attention, 1 for the output of the MLP.
        bias: given on at most one rank, since the sum over ranks must include it only once.
        post_norm: the weight of a norm that is applied to the sum before it is added to the
            residual stream; None without such a norm.
        """
        if self.parallel.size == 1 and post_norm is None:
            return ops.linear_add_norm(x, weight, residual, norm_weight, eps, bias)
        if (peers := self._peers_for(residual)) is not None:
            assert not isinstance(weight, ops.PackedWeight), "ranks that share memory are on CUDA"
            product = peers, place, x, weight, bias
            if post_norm is None:
                return ops.linear_reduce_add_norm(*product, residual, norm_weight, eps)
            whole = ops.linear_reduce(*product)
        else:
            whole = self.parallel.all_reduce(ops.linear(x, weight, bias))
        return ops.add_norm(whole, residual, norm_weight, eps, post_norm)

    def mixture_add_norm(
        self,
        x: Normed,
        experts: ops.Experts,
        shared: tuple[Tensor, ops.Weight] | None,
        norm_weight: Tensor,
        eps: float,
    ) -> Normed:
        """Compute `ops.mixture_add_norm` for experts that are split by inner features. The output
        of shared experts is also added.

        shared: the input and the weight of the shared experts' down projection; None if the layer
        has no shared experts.
        """
        if self.parallel.size == 1:
            if shared is not None:  # keep only the sum: its norm is not used
                x = x._replace(
                    hidden=ops.linear_add_norm(*shared, x.hidden, norm_weight, eps).hidden
                )
            return ops.mixture_add_norm(x, experts, norm_weight, eps)
        # If each rank added the residual stream, the sum over ranks would contain it several times.
        # So add it only after summing.
        start = None if shared is None else ops.linear(*shared)
        if (peers := self._peers_for(x.hidden)) is not None:
            mixture = peers, _OF_MLP, x, experts, start
            return ops.mixture_reduce_add_norm(*mixture, norm_weight, eps)
        alone = x._replace(hidden=self.nothing.expand_as(x.hidden) if start is None else start)
        part = ops.mixture_add_norm(alone, experts, norm_weight, eps).hidden
        return ops.add_norm(self.parallel.all_reduce(part), x.hidden, norm_weight, eps)

    def _peers_for(self, residual: Tensor) -> Peers | None:
        """Return the shared memory through which ranks sum their parts of rows like `residual`.
        Return None if there is no shared memory or it is too small."""
        sums = None if self.shared is None else self.shared.sums
        return None if sums is None or sums.take(0, *residual.shape) is None else sums

    def logits(self, x: Normed, head: ops.Weight, bias: Tensor | None = None) -> Tensor:
        """Compute logits for this rank's part of the vocabulary, gather those of all ranks, and
        return the whole logits [M, V] on every rank."""
        peers = None if self.shared is None else self.shared.logits
        num_rows = len(x.hidden)
        if peers is not None and num_rows:
            assert not isinstance(head, ops.PackedWeight), "ranks that share memory are on CUDA"
            room = peers.take(0, num_rows, head.shape[0])
            if room is not None:
                ops.norm_linear(x, head, bias, into=room)
                return ops.gather_columns(peers, num_rows)
        return self.parallel.all_gather(ops.norm_linear(x, head, bias), self.vocab_size)
