"""Reads the rank of this process from its environment variables. Does not import torch."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.errors import UsageError

FOLDER = "SPECDEC_RANKS_FOLDER"  # set by `launch.ranks` for the ranks that it starts
THREADS = "SPECDEC_RANK_THREADS"

_FIRST_PORT, _NUM_PORTS = 10000, 20000  # below the ephemeral ports
_SLURM_STEP = (
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_LAUNCH_NODE_IPADDR",
)


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of one process among the `size` ranks of a run.

    local_rank, local_size: this process's rank on its host, and the number of ranks there.
    started_by: "specdec", "torchrun" or "srun".
    address, port: the address at which the ranks connect to each other.
    folder: a private folder, through which ranks that `specdec` started connect and report; None
        for other ranks.
    step: the job and step of Slurm, such as 4242.1; empty for other ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    started_by: str
    address: str
    port: int
    folder: Path | None = None
    step: str = ""

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise UsageError(f"rank {self.rank} is out of range: there are {self.size} ranks")


def find_seat(environ: Mapping[str, str]) -> Seat | None:
    """Read the rank that `specdec`, torchrun or srun gave this process. Returns None if none of
    them started it.

    Raises `UsageError` if environment variables contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    # A batch script has a SLURM_PROCID too, but is not a rank. Only `srun` starts a task for each
    # rank, and it also sets the variables in `_SLURM_STEP`, which describe the job step.
    if "SLURM_PROCID" in environ and any(name in environ for name in _SLURM_STEP):
        seat = _slurm(environ)
        return seat if seat.size > 1 else None  # one task with several GPUs starts its own ranks
    return None


def _torchrun(environ: Mapping[str, str]) -> Seat:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE", 1)
    folder = environ.get(FOLDER)
    has_address = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    if size > 1 and folder is None and not has_address:
        raise UsageError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
            "start the ranks with torchrun, or unset RANK and WORLD_SIZE",
        )
    return Seat(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "LOCAL_RANK", default=rank),
        local_size=_integer(environ, "LOCAL_WORLD_SIZE", 1, default=size),
        started_by="torchrun" if folder is None else "specdec",
        address=environ.get("MASTER_ADDR", "localhost"),
        port=_integer(environ, "MASTER_PORT", default=0),
        folder=None if folder is None else Path(folder),
    )


def _slurm(environ: Mapping[str, str]) -> Seat:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _integer(environ, tasks, 1, default=1)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    # Rank 0 is on the first node of the list; `srun` itself may run on another machine.
    address = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    job = _integer(environ, "SLURM_JOB_ID", default=0)
    step = _integer(environ, "SLURM_STEP_ID", default=0)
    # A hash, because a sum would give job 100, step 1 the port of job 101, step 0.
    name = f"{job}.{step}"
    port = _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS
    return Seat(
        rank=_integer(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID", default=0),
        local_size=_slurm_local_size(environ, size),
        started_by="srun",
        address=environ.get("MASTER_ADDR", address),
        port=_integer(environ, "MASTER_PORT", default=port),
        step=name,
    )


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    """Return the number of tasks on this node, from a list such as `4(x2),3`."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(repeats or 1)
    node = _integer(environ, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else size


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as gpu07 for `gpu[07-09,12],cpu1`."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes.strip())
    assert found is not None, "every part may be empty"
    return "".join(part or "" for part in found.groups())


def _integer(
    environ: Mapping[str, str], name: str, least: int = 0, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,10}", text.strip()) or int(text) < least:
        raise UsageError(
            f"{name}={text or ''} is not an integer of at least {least}",
            "start the ranks with torchrun or srun, which set it",
        )
    return int(text)
