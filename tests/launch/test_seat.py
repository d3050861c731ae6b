"""The rank of a process is read from the variables of torchrun and Slurm."""

from zlib import crc32

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.launch import rank
from specdec_cli.launch.reports import End
from specdec_cli.launch.seat import find_seat, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}
# Variables that srun sets for task 5 of `srun -N 3 --ntasks 7`.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_a_process_that_nobody_started_has_no_seat() -> None:
    assert find_seat({"PATH": "/bin", "LOCAL_RANK": "0"}) is None


def test_torchrun() -> None:
    seat = find_seat(TORCHRUN)
    assert seat is not None
    assert (seat.rank, seat.size, seat.local_rank, seat.local_size) == (3, 4, 1, 2)
    assert (seat.address, seat.port, seat.started_by) == ("gpu07", 29500, "torchrun")
    assert seat.folder is None


def test_ranks_that_are_not_told_of_hosts_are_on_one() -> None:
    """Some launchers set only RANK and WORLD_SIZE; ranks must still not share the first GPU."""
    seat = find_seat({n: v for n, v in TORCHRUN.items() if not n.startswith("LOCAL_")})
    assert seat is not None and (seat.local_rank, seat.local_size) == (3, 4)


def test_srun_meets_at_the_first_node_of_the_job() -> None:
    seat = find_seat(SLURM)
    assert seat is not None
    assert (seat.rank, seat.size, seat.local_rank, seat.local_size) == (5, 7, 1, 3)
    assert (seat.address, seat.started_by) == ("gpu07", "srun")
    assert (seat.port, seat.step) == (10000 + crc32(b"4242.1") % 20000, "4242.1")


def test_srun_steps_of_a_job_do_not_share_a_port() -> None:
    one, two = find_seat(SLURM), find_seat({**SLURM, "SLURM_STEP_ID": "2"})
    assert one is not None and two is not None and one.port != two.port


def test_srun_steps_of_neighbouring_jobs_do_not_share_a_port() -> None:
    """Two jobs on one node, whose ids and steps have the same sum."""
    one, two = find_seat(SLURM), find_seat({**SLURM, "SLURM_JOB_ID": "4243", "SLURM_STEP_ID": "0"})
    assert one is not None and two is not None and one.port != two.port


def test_the_launch_node_is_used_without_a_node_list() -> None:
    seat = find_seat({n: v for n, v in SLURM.items() if n != "SLURM_JOB_NODELIST"})
    assert seat is not None and seat.address == "10.0.0.1"


def test_what_the_user_says_of_the_meeting_point_counts() -> None:
    seat = find_seat({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "7000"})
    assert seat is not None and (seat.address, seat.port) == ("other", 7000)


def test_a_batch_script_outside_srun_is_no_rank() -> None:
    script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_seat(script) is None


def test_a_shell_of_salloc_is_no_rank() -> None:
    """Slurm counts its own steps down from 2^32; an interactive shell has the sixth."""
    shell = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert find_seat({**SLURM, **shell}) is None


def test_a_single_srun_task_starts_its_own_ranks() -> None:
    assert find_seat({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"RANK": "one"},
        {"RANK": ""},
        {"WORLD_SIZE": "0"},
        {"MASTER_PORT": "http"},
        {"LOCAL_RANK": "1e3"},
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"RANK|WORLD_SIZE|MASTER_PORT|rank 4"):
        find_seat(TORCHRUN | changes)


def test_ranks_need_a_place_to_meet() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        find_seat({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu08", "gpu07"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3,5],cpu1", "gpu3"),
        ("a-b[01-02]-ib", "a-b01-ib"),
        ("a1,b[2-3]", "a1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ranks_of_a_host_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank, "num_cores", lambda: 8)
    seat = find_seat(TORCHRUN)
    assert seat is not None and rank._own_threads(seat) == 4


def test_a_rank_that_a_signal_ended_was_stopped() -> None:
    for code in (130, 143):
        assert rank.how_it_ended(SystemExit(code), code, failed=True) is End.STOPPED
    assert rank.how_it_ended(ValueError(), 1, failed=True) is End.FAILED
