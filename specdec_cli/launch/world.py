"""The interface between a command and the ranks of its run. The command may start the ranks, join
ranks that are already running, or run as a single process."""

import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from specdec_cli.errors import TooFewGPUsError, UsageError
from specdec_cli.launch.agreement import Agreement
from specdec_cli.launch.heartbeat import LEAST_START_S, OUTSIDE, PeerWatch
from specdec_cli.launch.quiet import meeting_quietly
from specdec_cli.launch.rank import PeersMissing, Rank
from specdec_cli.launch.seat import Seat, find_seat
from specdec_cli.text import counted, first_line

T = TypeVar("T")

# A hung rank is detected this many seconds before the collectives of other ranks time out. So the
# user sees the error that names the hung rank, not the error of a collective on another rank.
_PAST_TIMEOUT_S = 5.0
_LONG_S = 24 * 3600.0
# The maximum number of ranks that specdec starts on one machine. No machine has more GPUs, and too
# many processes would overload it.
_MOST_RANKS = 64


@dataclass(slots=True)
class Place:
    """The way in which this process was started.

    program: the module and the arguments that start the same command again.
    seat: the process's rank among others; None unless torchrun, srun or another `specdec` started
        it.
    rank: this process's own `Rank`; None for a single process that `run_ranks` did not start.
    has_answered: whether this process started ranks that have already written the command's result.
    """

    program: tuple[str, ...]
    seat: Seat | None = None
    rank: Rank | None = None
    has_answered: bool = False

    @property
    def is_first(self) -> bool:
        """True for a single process and for rank 0, which do the work that is needed only once."""
        return self.seat is None or self.seat.rank == 0

    def must_start(self, num_ranks: int) -> bool:
        """Return True if this process must start ranks instead of running the command itself.

        Raises `UsageError` for more ranks than specdec starts on one machine.
        """
        if self.seat is not None or num_ranks == 1:
            return False
        if num_ranks > _MOST_RANKS:
            raise UsageError(
                f"target.tensor_parallel_size is {num_ranks}; specdec starts at most "
                f"{_MOST_RANKS} ranks on one machine",
                "pass a smaller --target-tp, or start the ranks with torchrun or srun",
            )
        return True

    def start(self, num_ranks: int, *, timeout_s: float, inputs: object) -> int:
        """Run this command line as `num_ranks` ranks, and return its exit code. If ranks fail,
        raise the error of the rank that caused the failure."""
        from specdec_cli.launch.ranks import run_ranks

        code = run_ranks(self.program, num_ranks, timeout_s=timeout_s, inputs=inputs).check()
        self.has_answered = True
        return code


def find_place(program: Sequence[str], environ: Mapping[str, str], *, verbose: bool) -> Place:
    """Find out how this process was started, and create its `Rank` if it is one of several ranks or
    was started by `specdec`."""
    seat = find_seat(environ)
    is_rank = seat is not None and (seat.size > 1 or seat.folder is not None)
    rank = Rank(seat, verbose=verbose) if seat is not None and is_rank else None
    return Place(tuple(program), seat, rank)


class World:
    """The ranks of one run. All ranks call every method in the same order, except `beat` and
    `outside`.

    rank: the rank of this process. size: the number of ranks. device: "cuda:i" or "cpu" with
    several ranks; otherwise the recipe's value.
    """

    def __init__(self, rank: Rank | None, device: str, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self.device = device
        self.rank = rank.seat.rank if rank is not None else 0
        self.size = rank.seat.size if rank is not None else 1

    @property
    def is_first(self) -> bool:
        """True on rank 0, which reads inputs, writes files and shows output."""
        return self.rank == 0

    def once(self, read: Callable[[], T]) -> T:
        """Call `read` only on rank 0, and return its result on every rank. The result must be
        picklable."""
        if self.size == 1:
            return read()
        import torch.distributed as dist

        found = [read() if self.is_first else None]
        dist.broadcast_object_list(found, src=0)
        value: T = found[0]  # type: ignore[assignment]
        return value

    def inputs(self, read: Callable[[], T]) -> T:
        """Return the inputs that the parent process passed to its ranks, or `once(read)` if it
        passed none."""
        folder = self._rank.seat.folder if self._rank is not None else None
        if folder is not None and (path := folder / "inputs").exists():
            value: T = pickle.loads(path.read_bytes())
            return value
        return self.once(read)

    def ready(self) -> None:
        """Declare that the models are loaded. From now on, ranks wait for each other no longer than
        the timeout."""
        self._declare(True, self._patience_s)

    def loading(self) -> None:
        """Declare that models are being loaded, until `ready` is called. Until then, a rank may
        take any time, as long as its heartbeat shows progress."""
        self._declare(False, _LONG_S)

    def _declare(self, is_ready: bool, seconds: float) -> None:
        if self._rank is not None:
            self._rank.heartbeat.ready = is_ready
            _set_timeouts(seconds)

    def agreement(self) -> Agreement:
        """Create an `Agreement`, with which ranks learn whether a step failed on any of them."""
        return Agreement(self.size, self._patience_s)

    @property
    def _patience_s(self) -> float:
        """The maximum time, in seconds, that a collective may wait once the models are loaded."""
        # A parent process that watches the ranks ends the run if one hangs, so collectives need no
        # timeout. A timeout would even be wrong: the other ranks may wait long for rank 0 while it
        # waits for a reader of its output.
        is_watched = self._rank is None or self._rank.limit_s is None
        return _LONG_S if is_watched else self._timeout_s + _PAST_TIMEOUT_S

    def beat(self) -> None:
        """Count a step as done in this rank's heartbeat, as a sign of progress. This takes almost
        no time."""
        if self._rank is not None:
            self._rank.heartbeat.steps += 1

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Tell the other ranks that this one is waiting for something outside the run, such as a
        pager that reads its output."""
        if self._rank is None:
            yield
            return
        self._rank.heartbeat.state = OUTSIDE
        try:
            yield
        finally:
            self._rank.heartbeat.state = None


@contextlib.contextmanager
def join(place: Place, num_ranks: int, *, device: str, timeout_s: float) -> Iterator[World]:
    """Join `num_ranks` ranks and, if there are several, initialise torch.distributed.

    At the end of the block every rank waits for the others; after an exception no rank waits.
    Raises `UsageError` if a different number of ranks was started, and `SetupError` if there are
    too few GPUs or the ranks cannot connect.

    device: the recipe's `run.device`. NCCL connects GPUs, one per rank; gloo connects CPUs.
    """
    rank, seat = place.rank, place.seat
    if seat is not None and seat.size != num_ranks:
        raise UsageError(
            f"the recipe needs {counted(num_ranks, 'rank')} "
            f"(target.tensor_parallel_size), but {seat.started_by} started {seat.size}",
            f"let {seat.started_by} start {num_ranks}, or change --target-tp",
        )
    if rank is None:
        assert num_ranks == 1, "`must_start` comes first"
        yield World(None, device, timeout_s)
        return

    import torch
    import torch.distributed as dist

    if rank.threads is not None:
        torch.set_num_threads(rank.threads)
    device = _device(rank.seat, device)
    if rank.seat.size == 1:
        yield World(rank, device, timeout_s)
        return
    _meet(rank, device, timeout_s)
    yield World(rank, device, timeout_s)
    if device == "cpu":
        dist.barrier()
    else:
        dist.barrier(device_ids=[torch.device(device).index])
    dist.destroy_process_group()


def _device(seat: Seat, wanted: str) -> str:
    """Choose the device of this rank: its own GPU, or the CPU."""
    import torch

    if ":" in wanted:
        raise UsageError(
            f"run.device: {wanted} is a single device, but {seat.size} ranks need one each",
            "use cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs",
        )
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    count = torch.cuda.device_count()
    # Slurm may make only one GPU visible to each task; the index of this GPU is then 0.
    index = 0 if count == 1 and seat.started_by == "srun" else seat.local_rank
    if index >= count:
        raise TooFewGPUsError(
            f"{seat.local_size} ranks need as many GPUs, but this machine has {count}",
            "use fewer ranks (--target-tp), or --device cpu",
        )
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _meet(rank: Rank, device: str, timeout_s: float) -> None:
    """Connect to the other ranks."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    seat = rank.seat
    local_rank = seat.local_rank if device == "cpu" else int(device.removeprefix("cuda:"))
    os.environ |= {  # torch reads these variables, which torchrun sets but srun does not
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.size),
        "LOCAL_RANK": str(local_rank),  # with GPUs, the index of this rank's GPU
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "MASTER_ADDR": seat.address,
        "MASTER_PORT": str(seat.port),
    }
    # Ranks on one host connect through a file in their folder, because a port could already be in
    # use.
    meeting = "env://" if seat.folder is None else f"file://{seat.folder}/meeting"
    patience = timedelta(seconds=max(timeout_s, LEAST_START_S) + _PAST_TIMEOUT_S)
    try:
        if seat.folder is None:
            socket.getaddrinfo(seat.address, seat.port)  # torch would retry a bad name in silence
        with meeting_quietly():
            dist.init_process_group(
                "gloo" if device == "cpu" else "nccl",
                init_method=meeting,
                timeout=patience,
                rank=seat.rank,
                world_size=seat.size,
            )
        if seat.folder is None:

            def connect(seconds: float) -> PrefixStore:
                client = TCPStore(
                    seat.address,
                    seat.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=seconds),
                )
                return PrefixStore(f"specdec{seat.step}", client)

            rank.store = connect(patience.total_seconds())
            rank.watch = PeerWatch(connect(timeout_s), seat.rank, seat.size, timeout_s)
            rank.limit_s = timeout_s
    except (RuntimeError, ValueError, OSError) as problem:
        where = f"{seat.address}:{seat.port}" if seat.folder is None else str(seat.folder)
        raise PeersMissing(
            f"could not connect to the other ranks at {where}: {first_line(problem)}",
            "check that every rank was started, and that all of them can reach this address",
        ) from problem
    # Use a long timeout while models load, which may take much longer on some ranks than on others.
    # Heartbeats detect a rank that hangs in this time.
    _set_timeouts(_LONG_S)


def _set_timeouts(seconds: float) -> None:
    """Set the timeout of collectives in every group."""
    import torch.distributed.distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        if not c10d._rank_not_in_group(group):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)
