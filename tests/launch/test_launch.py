"""Worlds of two ranks: started, joined, failing and ended by signals.

Most of their programs are forks of this process, which has imported torch. The first test starts an
agent as commands do. The test of SIGTERM to a parent starts the command, too, and the test of
torchrun starts that.
"""

import errno
import json
import os
import re
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec_cli.errors import SetupError
from specdec_cli.launch import ranks, world
from specdec_cli.launch.rank import PeersMissing
from specdec_cli.launch.ranks import run_ranks
from specdec_cli.launch.reports import End
from specdec_cli.launch.seat import Seat
from tests.launch.forks import Started
from tests.launch.helpers import (
    living,
    marked,
    pids_of,
    ranks_of,
    start,
    torchrun,
    wait_until_gone,
    worker,
)

pytestmark = pytest.mark.dist

TIMEOUT_S = 5.0  # a rank that starts beside busy workers was silent for 3 s
MOST_S = TIMEOUT_S + 10.0  # the promise, counted from the fault

Fork = Callable[..., Started]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Start programs as forks: `Started` of a program, its environment and its input."""
    started: list[Started] = []

    def forked(program: list[str], environ: Mapping[str, str], said: str = "") -> Started:
        started.append(Started(program, environ, said))
        return started[-1]

    yield forked
    for one in started:
        one.close()


def test_a_parent_gets_rank_0s_output_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    environ = marked(TMPDIR=str(tmp_path))
    outcome = run_ranks(
        worker("--code", "3")[1:], 2, timeout_s=30, inputs="by hand", environ=environ
    )
    assert outcome.end is End.DONE
    assert (outcome.code, outcome.check()) == (3, 3)
    assert json.loads(capfd.readouterr().out) == {"rank": 0, "of": 2, "said": "by hand"}
    assert living(environ) == []
    of_torch = "torchinductor_"  # its cache of compiled kernels
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(of_torch)] == []


def run(fork: Fork, *options: str) -> tuple[int | None, str, str, float]:
    """Run a worker's parent; returns exit code, streams, and seconds from the fault to its end."""
    parent = fork(worker("--timeout", str(TIMEOUT_S), *options), marked())
    out, err = parent.communicate(timeout=120)
    ended = time.time()
    assert not parent.is_outlived(5)
    fault = [line for line in err.splitlines() if line.startswith("fault at ")]
    said = "".join(f"{line}\n" for line in err.splitlines() if line not in fault)
    seconds = ended - float(fault[0].split()[-1]) if fault else 0.0
    return parent.process.returncode, out, said, seconds


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill:verify:1", "rank 1: was killed by SIGKILL"),
        ("hang:draft:0", "rank 0: hung in "),
        ("gone:load:1", "rank 1: ended without a report"),
    ],
)
def test_a_failed_rank_ends_the_run_and_is_named(fault: str, words: str, fork: Fork) -> None:
    code, out, err, seconds = run(fork, "--fault", fault)
    assert (code, out) == (1, "")
    assert [line for line in err.splitlines() if not line.startswith("hint: ")] == [
        line for line in err.splitlines() if line.startswith(f"error: {words}")
    ]
    assert err.count("error:") == 1
    assert 0 < seconds < MOST_S


def test_memory_that_runs_out_on_one_rank_is_one_document(fork: Fork) -> None:
    code, out, err, _ = run(fork, "--fault", "oom:verify:1", "--json")
    assert code == 5
    error = json.loads(out)["error"]
    assert error["code"] == 5
    assert error["message"].startswith("rank 1: out of memory: tried to allocate 3 GiB")
    assert err.count("error:") == 1


def test_a_rank_that_the_system_does_not_start_is_one_line(
    fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on processes is reached after those of the parent, the agent and rank 0."""
    real, calls = os.fork, count(1)

    def limited() -> int:
        if next(calls) > 3:
            raise BlockingIOError(errno.EAGAIN, "too many processes")
        return real()

    monkeypatch.setattr(os, "fork", limited)
    code, out, err, _ = run(fork)
    assert (code, out) == (5, "")
    assert err == (
        "error: cannot start rank 1 of 2: too many processes\n"
        "hint: end other processes, or raise the limit on their number (ulimit -u)\n"
    )


def test_sigterm_to_the_parent_leaves_no_process(tmp_path: Path) -> None:
    environ = marked()
    options = ("--rounds", "100000", "--seconds", "0.05", "--pids", str(tmp_path))
    parent = start(worker(*options), environ)
    pids_of(tmp_path, 2)
    parent.terminate()
    assert wait_until_gone(environ, 5) == []
    _, err = parent.communicate(timeout=5)
    assert (parent.returncode, err) == (143, "error: terminated\n")


def test_sigkill_to_the_parent_leaves_no_process(tmp_path: Path, fork: Fork) -> None:
    options = ("--rounds", "100000", "--seconds", "0.05", "--pids", str(tmp_path))
    parent = fork(worker(*options), marked())
    pids_of(tmp_path, 2)
    parent.process.kill()
    assert not parent.is_outlived(5)
    _, err = parent.communicate(timeout=5)
    assert (parent.process.returncode, err) == (-9, "")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        # a test below ends one by SIGTERM as soon as it exists
        pytest.param([signal.SIGTERM], "was ended by SIGTERM", marks=pytest.mark.slow),
        pytest.param([signal.SIGHUP], "was ended by SIGHUP", marks=pytest.mark.slow),
        ([signal.SIGSTOP, signal.SIGKILL], "was killed by SIGKILL"),
        # test_causes.py has the choice between it and lost peers
        pytest.param([signal.SIGABRT], "was killed by SIGABRT", marks=pytest.mark.slow),
    ],
    ids=["term", "hup", "stop-kill", "abort"],
)
def test_a_rank_that_somebody_ends_is_named_with_the_signal(
    numbers: list[signal.Signals], words: str, tmp_path: Path, fork: Fork
) -> None:
    parent = fork(
        worker("--rounds", "100000", "--seconds", "0.05", "--pids", str(tmp_path)), marked()
    )
    pid = pids_of(tmp_path, 2)[1]
    for number in numbers:
        os.kill(pid, number)
        time.sleep(0.5 * (number == signal.SIGSTOP))
    _, err = parent.communicate(timeout=30)
    assert parent.process.returncode == 1
    assert [line for line in err.splitlines() if not line.startswith("hint: ")] == [
        f"error: rank 1: {words}"
    ]
    assert not parent.is_outlived(5)


def test_a_rank_that_is_ended_as_soon_as_it_exists_is_named(fork: Fork) -> None:
    """It may have no handler of ours yet."""
    parent = fork(worker("--timeout", "30"), marked())
    os.kill(ranks_of(parent.process.pid, 2)[1], signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.process.returncode == 1
    assert re.fullmatch("error: rank 1: was (killed|ended) by SIGTERM\n", err)
    assert not parent.is_outlived(5)


def test_a_rank_that_is_stopped_as_soon_as_it_exists_outlives_nobody(fork: Fork) -> None:
    parent = fork(worker("--timeout", "30"), marked())
    os.kill(ranks_of(parent.process.pid, 2)[1], signal.SIGSTOP)
    parent.process.kill()
    parent.communicate(timeout=10)
    assert not parent.is_outlived(5)


def test_slurm_names_a_rank_that_freezes_while_it_loads(fork: Fork) -> None:
    """Without a parent that watches, rank 0 has to find it."""
    port = str(free_port())
    tasks = [
        fork(
            worker("--timeout", "2", "--fault", "stop:load:1"),
            marked(**slurm(port), SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]
    _, err = tasks[0].communicate(timeout=60)
    tasks[1].process.kill()
    tasks[1].communicate(timeout=10)
    assert tasks[0].process.returncode == 1
    assert err.startswith("error: rank 1: hung in ") and err.count("error:") == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def slurm(job: str) -> dict[str, str]:
    """Variables that srun sets for every one of two tasks."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }


def test_two_torchruns_are_joined_and_rank_0_tells_the_cause() -> None:
    environ = marked()
    port = free_port()
    program = worker("--timeout", "30", "--fault", "raise:verify:1")
    hosts = [start(torchrun(port, *program), environ) for _ in range(2)]
    written = [host.communicate(timeout=120) for host in hosts]
    errors = [line for _, err in written for line in err.splitlines() if line.startswith("error:")]
    assert errors == ["error: rank 1: ArithmeticError: the planted error"]
    assert all(host.returncode == 1 for host in hosts)
    assert "".join(out for out, _ in written) == ""


def test_slurm_tasks_are_joined_and_share_what_rank_0_reads(fork: Fork) -> None:
    port = str(free_port())
    tasks = [
        fork(
            worker("--timeout", "30"),
            marked(**slurm(port), SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            f"line {rank}",
        )
        for rank in range(2)
    ]
    written = [task.communicate(timeout=120) for task in tasks]
    assert [task.process.returncode for task in tasks] == [0, 0]
    assert json.loads(written[0][0]) == {"rank": 0, "of": 2, "said": "from rank 0: line 0"}
    assert written[1] == ("", "")


def test_another_number_of_ranks_is_refused_once() -> None:
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    tasks = [start(worker("--ranks", "4"), marked(RANK=str(rank), **joined)) for rank in range(2)]
    written = [task.communicate(timeout=60) for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2]
    assert [err.count("torchrun started 2") for _, err in written] == [1, 0]


def test_an_address_that_is_none_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would retry until its timeout."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("torch was asked to connect")

    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("torch.distributed.init_process_group", never)
    seat = Seat(0, 2, 0, 2, "torchrun", "gpu..07", 29500)
    with pytest.raises(
        PeersMissing, match=r"could not connect to the other ranks at gpu\.\.07:29500"
    ):
        world._meet(SimpleNamespace(seat=seat), "cpu", 5.0)  # type: ignore[arg-type]


def test_the_folder_of_a_run_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def look(*_: object) -> None:
        (folder,) = tmp_path.iterdir()
        seen.append(stat.S_IMODE(os.stat(folder).st_mode))
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_cli.launch.ranks._watch", look)
    environ = marked()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(worker()[1:], 2, timeout_s=30, environ=environ)
    assert seen == [0o700]
    assert living(environ) == [] and list(tmp_path.iterdir()) == []


def test_folders_of_killed_commands_are_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder stays if its command runs, or may not have locked it yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, new = (tmp_path / f"{ranks._PREFIX}{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "inputs").write_text("prompts")
    os.utime(old, (0, 0))

    def start(program: object, num_ranks: int, own: Path, environ: object) -> None:
        assert set(tmp_path.iterdir()) == {new, own}
        os.utime(own, (0, 0))
        ranks._delete_old_folders()
        assert own.is_dir()
        raise SetupError("not started")

    monkeypatch.setattr(ranks, "_start", start)
    with pytest.raises(SetupError, match="not started"):
        run_ranks(["x"], 2, timeout_s=1.0)
    assert set(tmp_path.iterdir()) == {new}
