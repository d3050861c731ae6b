"""Messages between the ranks of a world over memory that they share, in place of gloo's sockets.

A sum over four ranks costs gloo 3 to 4 ms of processor time and this a quarter. Callers see
the same functions of torch.distributed, which demand of tensors what gloo does. They also demand
that all ranks of a group are in the same call, with tensors of one type and size.
"""

import mmap
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdec_cli.core import parallel

_MOST = 1 << 20  # bytes of a message; gloo carries longer ones
_HEADER = struct.Struct("16s16sq")  # the call, the type and the bytes
_REDUCE, _GATHER = dist.all_reduce, parallel._all_gather
_BROADCAST, _OBJECTS = dist.broadcast, dist.all_gather_object


class Messages:
    """Places for messages of `size` ranks, each to each. Create it before the ranks are forked.

    context: of multiprocessing. timeout_s: how long a rank waits for another one.
    """

    def __init__(self, size: int, context: Any, timeout_s: float) -> None:
        memory = mmap.mmap(-1, size * size * 2 * (_MOST + _HEADER.size))
        # [from, to, turn, byte]: the receiver may still read the message before
        self._places = np.frombuffer(memory, np.uint8).reshape(size, size, 2, -1)
        self._sent = [[context.Semaphore(0) for _ in range(size)] for _ in range(size)]
        self._turns = [0] * size  # exchanges with each rank, of which both have the same number
        self._timeout_s = timeout_s
        self._is_off = False

    def exchange(self, call: str, kind: object, data: Any, group: Any) -> list[Any]:
        """Send bytes to all others of a group; returns those of every rank of it, in order.

        call: the same on all ranks, as `kind` has to be. data: an array of bytes, of one length
        on all ranks unless kind is None. What is returned holds until the exchange after the next.
        Raises RuntimeError if a rank is missing or in another call.
        """
        own, length = dist.get_rank(), len(data)
        members = dist.get_process_group_ranks(group)
        told = call.encode().ljust(16, b"\0"), str(kind).encode().ljust(16, b"\0"), length
        for other in members:
            if other != own:
                place = self._places[own, other, self._turns[other] % 2]
                _HEADER.pack_into(place, 0, *told)
                place[_HEADER.size : _HEADER.size + length] = data
                self._sent[own][other].release()
        found = []
        for other in members:
            if other == own:
                found.append(data)
                continue
            if not self._sent[other][own].acquire(timeout=self._timeout_s):
                raise RuntimeError(f"rank {other} has sent nothing")
            place = self._places[other, own, self._turns[other] % 2]
            theirs = _HEADER.unpack_from(place)
            if theirs[:2] != told[:2] or (kind is not None and theirs != told):
                raise RuntimeError(f"rank {other} has sent {theirs} in this: {told}")
            found.append(place[_HEADER.size : _HEADER.size + theirs[2]])
            self._turns[other] += 1
        return found

    def carries(self, x: Tensor) -> bool:
        """Return True if this carries a tensor, which has to lie as gloo demands, and not gloo."""
        assert x.is_contiguous() and x.is_cpu
        return not self._is_off and x.nbytes <= _MOST

    def all_reduce(self, x: Tensor, group: Any) -> None:
        if not self.carries(x):
            _REDUCE(x, group=group)
            return
        found = self.exchange("reduce", x.dtype, _bytes(x).copy(), group)
        first, *others = (torch.from_numpy(part).view(x.dtype).view(x.shape) for part in found)
        x.copy_(first)
        for other in others:
            x += other

    def all_gather(self, out: Tensor, x: Tensor, group: Any) -> None:
        assert out.is_contiguous() and out.dtype == x.dtype and out.shape[1:] == x.shape[1:]
        if not self.carries(x):
            _GATHER(out, x, group=group)
            return
        found = self.exchange("gather", x.dtype, _bytes(x), group)
        _bytes(out).reshape(len(found), x.nbytes)[:] = found

    def broadcast(self, x: Tensor, group: Any, group_src: int) -> None:
        if not self.carries(x):
            _BROADCAST(x, group=group, group_src=group_src)
            return
        own = _bytes(x)
        own[:] = self.exchange("broadcast", x.dtype, own, group)[group_src]

    def all_gather_object(self, held: list[Any], value: Any, group: Any) -> None:
        if self._is_off:
            _OBJECTS(held, value, group=group)
            return
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        held[:] = [pickle.loads(part) for part in self.exchange("objects", None, own, group)]

    def take_over(self) -> None:
        """Carry what this process, a rank, sends from now on."""
        dist.all_reduce = self.all_reduce
        parallel._all_gather = self.all_gather
        dist.broadcast = self.broadcast
        dist.all_gather_object = self.all_gather_object

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let gloo carry all for a while."""
        self._is_off = True
        yield
        self._is_off = False


def _bytes(x: Tensor) -> Any:
    """The bytes of a contiguous tensor as an array that shares its memory."""
    return x.view(-1).view(torch.uint8).numpy()
