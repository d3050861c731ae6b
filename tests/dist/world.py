"""A world of processes that stays up and runs one function after another on every rank."""

import contextlib
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.messages import Messages

_TIMEOUT_S = 60  # of a collective that not all ranks join


class World:
    """`size` processes, over gloo or, with a GPU each, over NCCL.

    Over gloo they are forks of this process, which has imported everything. CUDA does not survive a
    fork. backend: "memory" is gloo, of which shared memory carries most messages; `over_gloo` takes
    it alone.
    """

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        context: Any = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
        memory = Messages(size, context, _TIMEOUT_S) if backend == "memory" else None
        self.size = size
        self._ends: list[Connection] = []
        self._processes = []
        with _import_path():
            for rank in range(size):
                ours, theirs = context.Pipe()
                meeting = f"file://{folder / 'meeting'}"
                self._ends.append(ours)
                given = rank, size, backend, memory, meeting, theirs, self._ends
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                self._processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of `case` on every rank; its first argument is the rank."""
        for end in self._ends:
            end.send((case, args, kwargs))
        answers = []
        for rank, end in enumerate(self._ends):
            assert end.poll(3 * _TIMEOUT_S), f"rank {rank} does not answer"
            answers.append(end.recv())
        failed = [f"rank {rank}: {said}" for rank, (ok, said) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [said for _, said in answers]

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def _import_path() -> Any:
    """Pass pytest's additions to the import path on, which a new interpreter does not get."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def over_gloo(rank: int, case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a case on a rank of a world over memory, with gloo alone."""
    assert _memory is not None
    with _memory.off():
        return case(rank, *args, **kwargs)


_memory: Messages | None = None  # of this process, if it is a rank


def _serve(
    rank: int,
    size: int,
    backend: str,
    memory: Messages | None,
    meeting: str,
    end: Connection,
    ends: list[Connection],
) -> None:
    """Run the functions that come through `end`. ends: of the process that started this one."""
    for other in ends:  # otherwise that one's end would not be seen
        other.close()
    gc.freeze()  # what was imported lives to the end
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if memory is not None else backend,
        init_method=meeting,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    if memory is not None:
        global _memory
        _memory = memory
        memory.take_over()
    while (order := end.recv()) is not None:
        case, args, kwargs = order
        try:
            answer = (True, case(rank, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Each group of gloo has a thread that wakes up a hundred times a second.
        for group in list(dist.distributed_c10d._world.pg_map):
            if backend != "nccl" and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        end.send(answer)
    dist.destroy_process_group()
