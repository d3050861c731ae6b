"""Which ranks share a model, as a value that is handed to whoever needs it.

Nothing here is ambient: a target and a draft of another degree live side by side, each with a group
of its own. Knows no models. The collectives hold no host wait and have fixed shapes, so CUDA graphs
can hold them; every rank of a group has to call them in the same order.
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

T = TypeVar("T")
# torch 2.13 has renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's place among the `size` ranks that share a model.

    rank: 0..size-1 within the group. group: None with one rank, where every method gives back what
    it was given. device: where tensors of this rank lie.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device = _CPU

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def share(self, width: int) -> tuple[int, int]:
        """This rank's part start..stop of `width` entries; the last ranks' may be smaller."""
        most = -(-width // self.size)
        return min(width, self.rank * most), min(width, (self.rank + 1) * most)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; returns x."""
        if self.group is not None and x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, width: int) -> Tensor:
        """Put the ranks' shares of the last dimension together: [..., share] to [..., width].

        What `share(width)` says must be what x holds.
        """
        if self.group is None:
            return x
        most = -(-width // self.size)
        if x.shape[-1] < most:
            x = torch.nn.functional.pad(x, (0, most - x.shape[-1]))
        rows = x.numel() // most
        # One dimension below the other: all that gloo takes.
        out = x.new_empty(self.size * rows, most)
        if rows:
            _all_gather(out, x.reshape(rows, most).contiguous(), group=self.group)
        whole = out.view(self.size, rows, most).transpose(0, 1)
        return whole.reshape(*x.shape[:-1], self.size * most)[..., :width].contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's contiguous x, in place, on every rank; returns x."""
        if self.group is not None and x.numel():
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of ranks. Waits for the device."""
        if self.group is None:
            return [value]
        held: list[T] = [value] * self.size
        dist.all_gather_object(held, value, group=self.group)
        return held


ALONE = TensorParallel()


class Groups(NamedTuple):
    """This rank's places; None for a model that it holds no part of."""

    target: TensorParallel | None
    draft: TensorParallel | None


ONE_RANK = Groups(ALONE, ALONE)


def make_groups(
    target_tp: int,
    draft_tp: int,
    device: torch.device,
    ranks: Sequence[int] | None = None,
) -> Groups:
    """Groups of a target and of a draft on the first `draft_tp` of its ranks.

    They are separate communicators, since a rank may be in the middle of one model's pass while
    others are in the other's. Every process of the world has to call this, with the same arguments
    but for the device. ranks: the processes that take part; the first `target_tp` of the world when
    not given. Raises ValueError when the draft's degree does not divide the target's.
    """
    if target_tp % draft_tp:
        raise ValueError(f"draft TP {draft_tp} does not divide target TP {target_tp}")
    members = list(range(target_tp)) if ranks is None else list(ranks)
    assert len(members) == target_tp
    return Groups(_place(members, device), _place(members[:draft_tp], device))


def _place(members: list[int], device: torch.device) -> TensorParallel | None:
    own = dist.get_rank() if dist.is_initialized() else 0
    # A communicator is made by the whole world, also by those who are not in it.
    group = dist.new_group(members) if len(members) > 1 else None
    if own not in members:
        return None
    return TensorParallel(members.index(own), len(members), group, device)


def world_size() -> int:
    """Processes that were started together; 1 where nobody joined them."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def found_alike() -> Iterator[None]:
    """What a model's files or a host lack, all ranks of that host find: none is to be named."""
    try:
        yield
    except SetupError as problem:
        problem.is_common = local_world_size() == world_size()
        raise


def local_rank() -> int:
    """This process among those of its host, as torchrun counts them."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes of this run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
