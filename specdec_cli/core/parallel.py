"""Groups of ranks that share a model. Code that needs a group gets it as an argument.

Collectives on tensors have fixed shapes and do not make the host wait, so CUDA graphs can capture
them. All ranks of a group must call the same collectives in the same order.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from specdec_cli.errors import SetupError
from specdec_cli.launch.quiet import meeting_quietly

T = TypeVar("T")
# torch 2.13 has renamed this function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_CPU = torch.device("cpu")
# On CPUs, the number of messages dominates the time of an all-reduce of at most this many values.
_FEW = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of the `size` ranks that share a model, and its connection to the others.

    rank: 0..size-1 within the group.
    group: the process group of the ranks. None if there is only one rank; collectives then return
    their argument.
    device: the device of this rank's tensors.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device = _CPU

    @property
    def is_first(self) -> bool:
        """True on rank 0, which decides for all ranks."""
        return self.rank == 0

    def share(self, width: int) -> tuple[int, int]:
        """Return the range (start, stop) of `width` entries that this rank holds. The last ranks
        may hold fewer entries than the others."""
        most = -(-width // self.size)
        return min(width, self.rank * most), min(width, (self.rank + 1) * most)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place. Returns x."""
        if self.group is None or not x.numel():
            return x
        if not x.is_cpu or self.size == 2 or x.numel() > _FEW:
            dist.all_reduce(x, group=self.group)
            return x
        # Gather all values and add them here: with four ranks, gloo's own all-reduce takes twice as
        # long, because it sends more messages.
        parts = x.new_empty(self.size * x.numel())
        _all_gather(parts, x.reshape(-1), group=self.group)
        return torch.sum(parts.view(self.size, *x.shape), 0, out=x)

    def all_gather(self, x: Tensor, width: int) -> Tensor:
        """Concatenate the ranks' slices of a tensor along the last dimension. Returns the whole
        tensor, [..., width], on every rank. x: this rank's slice, the range `share(width)`."""
        if self.group is None:
            return x
        most = -(-width // self.size)
        if x.shape[-1] < most:
            x = torch.nn.functional.pad(x, (0, most - x.shape[-1]))
        rows = x.numel() // most
        # Stack the parts along the first dimension, the only layout that gloo supports.
        out = x.new_empty(self.size * rows, most)
        if rows:
            _all_gather(out, x.reshape(rows, most).contiguous(), group=self.group)
        whole = out.view(self.size, rows, most).transpose(0, 1)
        return whole.reshape(*x.shape[:-1], self.size * most)[..., :width].contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's x to every rank, in place. x must be contiguous. Returns x."""
        if self.group is not None and x.numel():
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Waits for the device."""
        if self.group is None:
            return [value]
        held: list[T] = [value] * self.size
        dist.all_gather_object(held, value, group=self.group)
        return held


ALONE = TensorParallel()


class HostMessages:
    """Sends integers from rank 0 to all ranks of a group, without using the device.

    Unlike messages over NCCL, these do not wait for the device. Every rank of the group must call
    `told` for each number. If the group does not use gloo, the first call creates a gloo group, and
    every process of the world must take part in that.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._group: dist.ProcessGroup | None = None

    def told(self, number: int) -> int:
        """Send rank 0's `number` to all ranks, and return it on each of them."""
        if self._parallel.group is None:
            return number
        if self._group is None:
            self._group = self._parallel.group
            if dist.get_backend(self._group) != "gloo":
                assert self._parallel.size == dist.get_world_size(), "every process must join"
                with meeting_quietly():
                    self._group = dist.new_group(backend="gloo")
        row = torch.tensor([number])
        dist.broadcast(row, group=self._group, group_src=0)
        return int(row.item())


class Groups(NamedTuple):
    """The groups of the target and of the draft, as this rank sees them; None for a model of which
    this rank holds no part."""

    target: TensorParallel | None
    draft: TensorParallel | None


ONE_RANK = Groups(ALONE, ALONE)


def make_groups(
    target_tp: int,
    draft_tp: int,
    device: torch.device,
    ranks: Sequence[int] | None = None,
) -> Groups:
    """Create the process groups of a target and of its draft. The draft is on the first `draft_tp`
    of the target's ranks.

    Every process of the world must call this with the same arguments, except the device. ranks: the
    target's ranks; by default the first `target_tp`. Raises ValueError if `draft_tp` does not
    divide `target_tp`.
    """
    if target_tp % draft_tp:
        raise ValueError(f"draft TP {draft_tp} does not divide target TP {target_tp}")
    members = list(range(target_tp)) if ranks is None else list(ranks)
    assert len(members) == target_tp
    return Groups(_place(members, device), _place(members[:draft_tp], device))


def _place(members: list[int], device: torch.device) -> TensorParallel | None:
    own = dist.get_rank() if dist.is_initialized() else 0
    # Every process of the world must take part in creating a communicator, even if it is not a
    # member.
    with meeting_quietly():
        group = dist.new_group(members) if len(members) > 1 else None
    if own not in members:
        return None
    return TensorParallel(members.index(own), len(members), group, device)


def world_size() -> int:
    """Return the number of processes in torch.distributed's world; 1 if it is not initialised."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def found_alike() -> Iterator[None]:
    """Mark a `SetupError` of the block as common to all ranks, if all of them are on one host. Each
    rank then finds the same problem, so the message names no rank."""
    try:
        yield
    except SetupError as problem:
        problem.is_common = local_world_size() == world_size()
        raise


def local_rank() -> int:
    """Return the index of this process on its host, as torchrun sets it; 0 if unset."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return the number of this run's processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
