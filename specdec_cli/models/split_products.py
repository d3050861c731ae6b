"""Matmuls of fused layers whose weights are split over ranks; every rank gets the whole result."""

from dataclasses import dataclass
from typing import Self

import torch
from specdec_kernels import ops
from specdec_kernels.linear.reference import Normed
from torch import Tensor

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.peers import Shared, shared_memory

_OF_MLP = 1  # the index in shared memory of the sums at the end of a layer


@dataclass(frozen=True, slots=True)
class SplitProducts:
    """The matmuls of one model, whose weights are split over ranks. vocab_size: the number of ids
    in the whole vocabulary. shared: memory that the ranks share; None if they share none. nothing:
    zeros [1, N], N the width of the residual stream."""

    parallel: TensorParallel
    vocab_size: int
    shared: Shared | None
    nothing: Tensor

    @classmethod
    def over(
        cls, parallel: TensorParallel, width: int, vocab_size: int, dtype: torch.dtype
    ) -> Self:
        """Make the split matmuls of a model for the ranks of a group. All of them must call this.
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
        """Run `ops.linear_add_norm` for a matmul that is split by input features.

        place: 0 for the output of attention, 1 for the output of the MLP. bias: given on at most
        one rank. post_norm: the weight of a norm that is applied before the result is added; None
        without one.
        """
        if self.parallel.size == 1 and post_norm is None:
            return ops.linear_add_norm(x, weight, residual, norm_weight, eps, bias)
        if (room := self._room(place, residual)) is not None:
            ops.linear(x, weight, bias, into=room)
            return self._add_shared(place, residual, norm_weight, eps, post_norm)
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
        """Run `ops.mixture_add_norm` for experts that are split by inner features, and add the
        output of the shared experts. shared: the input and the weight of their down projection;
        None without any."""
        if self.parallel.size == 1:
            if shared is not None:  # the norm here is not used
                x = x._replace(
                    hidden=ops.linear_add_norm(*shared, x.hidden, norm_weight, eps).hidden
                )
            return ops.mixture_add_norm(x, experts, norm_weight, eps)
        # Add the stream only once, to the sum over ranks.
        start = self.nothing.expand_as(x.hidden) if shared is None else ops.linear(*shared)
        alone = x._replace(hidden=start)
        part = ops.mixture_add_norm(alone, experts, norm_weight, eps).hidden
        if (room := self._room(_OF_MLP, x.hidden)) is not None:
            room.copy_(part)
            return self._add_shared(_OF_MLP, x.hidden, norm_weight, eps)
        return ops.add_norm(self.parallel.all_reduce(part), x.hidden, norm_weight, eps)

    def _room(self, place: int, residual: Tensor) -> Tensor | None:
        """Return shared memory for this rank's part of a sum, or None if there is none or it is too
        small."""
        return None if self.shared is None else self.shared.sums.take(place, *residual.shape)

    def _add_shared(
        self,
        place: int,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        post_norm: Tensor | None = None,
    ) -> Normed:
        """Add the sum of all ranks' parts in shared memory to the residual stream, and norm the
        result."""
        assert self.shared is not None
        if post_norm is None:
            return ops.reduce_add_norm(self.shared.sums, place, residual, norm_weight, eps)
        whole = ops.reduce_parts(self.shared.sums, place, len(residual))
        return ops.add_norm(whole, residual, norm_weight, eps, post_norm)

    def logits(self, x: Normed, head: ops.Weight, bias: Tensor | None = None) -> Tensor:
        """Return logits [M, V] on every rank. Each rank computes them for a part of the
        vocabulary."""
        peers = None if self.shared is None else self.shared.logits
        num_rows = len(x.hidden)
        if peers is not None and num_rows:
            assert not isinstance(head, ops.PackedWeight), "ranks that share memory are on CUDA"
            room = peers.take(0, num_rows, head.shape[0])
            if room is not None:
                ops.norm_linear(x, head, bias, into=room)
                return ops.gather_columns(peers, num_rows)
        return self.parallel.all_gather(ops.norm_linear(x, head, bias), self.vocab_size)
