"""The rank that caused a failure is found from reports, or from heartbeats if nothing moves."""

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec_cli import app
from specdec_cli.commands.outcome import Outcome, after_exception
from specdec_cli.engine.run import check_finite
from specdec_cli.errors import NoRoomError, RunError, SetupError
from specdec_cli.launch.agent import Exit
from specdec_cli.launch.heartbeat import BUSY, OUTSIDE, PEERS, Beat, find_stuck
from specdec_cli.launch.rank import Rank
from specdec_cli.launch.ranks import _watch
from specdec_cli.launch.reports import (
    End,
    Report,
    gone,
    is_lost_peers,
    read_reports,
    root_cause,
    write_report,
)
from specdec_cli.launch.world import World
from specdec_cli.models.refusals import Unsupported

NOW, TIMEOUT = 1000.0, 8.0


def report(rank: int, end: End, at: float) -> Report:
    return Report(rank, end, 1, "what happened", at=at)


def beat(rank: int, state: str, idle: float, *, steps: int = 5, silent: float = 0.1) -> Beat:
    """The beat of a rank that stood still for `idle` seconds and last beat `silent` seconds ago."""
    return Beat(rank, 100 + rank, NOW - silent, NOW - idle, steps, state, True, "f (x.py:1)")


def stuck(*beats: Beat) -> int | None:
    found = find_stuck(beats, max(2, len(beats)), NOW, TIMEOUT)
    return None if found is None else found.rank


def test_ranks_that_are_done_have_no_cause() -> None:
    assert root_cause([report(0, End.DONE, 1), report(1, End.DONE, 2)]) is None


@pytest.mark.parametrize(
    "others",
    [
        [report(0, End.LOST_PEERS, 4.9), report(2, End.STOPPED, 4.8), report(3, End.ABORTED, 4.7)],
        [report(0, End.FAILED, 5.1), report(2, End.STUCK, 1.0)],
        [report(0, End.DONE, 1.0)],
    ],
    ids=["consequences-seen-first", "later-errors", "done"],
)
def test_the_first_error_of_a_rank_itself_is_the_cause(others: list[Report]) -> None:
    cause = root_cause([*others, report(1, End.FAILED, 5.0)])
    assert cause is not None and cause.rank == 1


def test_a_report_that_comes_while_the_parent_looks_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 loses its peer because rank 1 failed; rank 1's report comes just before its end."""
    write_report(tmp_path, report(1, End.FAILED, time.time()))

    def exits(folder: Path) -> list[Exit]:
        write_report(folder, report(0, End.LOST_PEERS, time.time()))
        return [Exit(0, 1, time.time()), Exit(1, 1, time.time())]

    monkeypatch.setattr("specdec_cli.launch.ranks._exits", exits)
    monkeypatch.setattr("specdec_cli.launch.ranks._SETTLE_KNOWN_S", -1.0)  # no second look
    beats = [Beat(rank, os.getpid(), 1.0, 1.0, 5, BUSY, True, "f") for rank in (0, 1)]
    monkeypatch.setattr("specdec_cli.launch.ranks.read_beats", lambda _: beats)
    launcher = cast(Any, SimpleNamespace(poll=lambda: None))
    cause = _watch(launcher, 2, tmp_path, timeout_s=600.0)
    assert cause is not None and (cause.rank, cause.message) == (1, "what happened")


def test_only_lost_peers_blame_the_first() -> None:
    cause = root_cause([report(0, End.LOST_PEERS, 5.1), report(1, End.LOST_PEERS, 5.0)])
    assert cause is not None and cause.rank == 1


@pytest.mark.parametrize("end", [End.STOPPED, End.ABORTED])
def test_ranks_that_lost_their_peers_do_not_hide_the_one_that_a_signal_ended(end: End) -> None:
    cause = root_cause([report(0, End.LOST_PEERS, 4.9), report(1, end, 5.0)])
    assert cause is not None and cause.rank == 1


@pytest.mark.parametrize(
    ("code", "end", "words"),
    [
        (143, End.STOPPED, "was stopped"),
        (-9, End.FAILED, "SIGKILL"),
        (-11, End.FAILED, "SIGSEGV"),
        (-6, End.ABORTED, "SIGABRT"),
        (-15, End.FAILED, "SIGTERM"),
        (0, End.FAILED, "without a report"),
        (7, End.FAILED, "exit code 7"),
    ],
)
def test_a_rank_that_said_nothing_is_named_by_its_end(code: int, end: End, words: str) -> None:
    found = gone(1, code, at=3.0)
    assert (found.end, found.at, found.code) == (end, 3.0, 1)
    assert found.message is not None and words in found.message


def test_bad_usage_is_nobodys_in_particular() -> None:
    assert Report(1, End.FAILED, 2, "no such key").explained == "no such key"
    assert Report(1, End.FAILED, 5, "out of memory").explained == "rank 1: out of memory"


def test_prompts_that_could_not_run_are_no_ranks_fault() -> None:
    """All ranks have the same prompts, so no rank is named."""
    assert (
        Report(1, End.FAILED, 3, "2 prompts could not run").explained == "2 prompts could not run"
    )


def test_what_every_rank_finds_names_none_as_the_cause() -> None:
    """No rank is named for an error that all ranks raise, independent of which reports first."""
    told: list[Report] = []
    rank = SimpleNamespace(seat=SimpleNamespace(rank=1), end=told.append)
    with pytest.raises(RunError) as caught:
        check_finite([5, -2])
    for error, said in [
        (caught.value, "the draft produced logits that are not finite (NaN or infinity)"),
        (NoRoomError("no room on rank 0"), "no room on rank 0"),
        (Unsupported("m", "3 ranks"), "model m is not supported: 3 ranks"),
        (SetupError("out of memory"), "rank 1: out of memory"),
    ]:
        outcome = Outcome()
        after_exception(error, outcome)
        app._end_rank(cast(Rank, rank), outcome)
        assert told[-1].explained == said


def test_reports_survive_the_way_through_a_folder(tmp_path: Path) -> None:
    written = Report(1, End.STUCK, 1, "zwölf\n", "hint", "trace", 12.5)
    write_report(tmp_path, written)
    (tmp_path / "report-1.tmp").write_text("half")
    assert read_reports(tmp_path) == {1: written}
    assert stat.S_ISREG((tmp_path / "report-1").stat().st_mode)


def test_errors_of_collectives_are_lost_peers() -> None:
    assert is_lost_peers(torch.distributed.DistBackendError("NCCL error"))
    assert is_lost_peers(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"))
    with pytest.raises(ValueError) as caught:  # one that c10d itself raises
        torch.distributed.all_reduce(torch.zeros(1))
    assert is_lost_peers(caught.value)


def test_other_errors_are_a_ranks_own() -> None:
    assert not is_lost_peers(RuntimeError("shape mismatch"))
    assert not is_lost_peers(torch.OutOfMemoryError("NCCL wanted 3 GiB"))


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        ([beat(0, PEERS, 9), beat(1, BUSY, 9)], 1),
        ([beat(0, PEERS, 9.2), beat(1, PEERS, 9, silent=9)], 1),
        ([beat(0, PEERS, 9), beat(1, PEERS, 8.5, steps=4)], 1),
        ([beat(0, PEERS, 9), beat(1, BUSY, 0.1)], 1),
        ([beat(0, BUSY, 9, steps=6), beat(1, BUSY, 9, steps=5)], 1),
        ([beat(0, BUSY, 8.5), beat(1, BUSY, 9)], 1),
    ],
    ids=["hung", "stopped-process", "all-wait", "busy-loop", "ran-one-round-ahead", "first-still"],
)
def test_the_rank_that_holds_the_others_up(beats: list[Beat], rank: int) -> None:
    assert stuck(*beats) == rank


LOADING = replace(beat(0, PEERS, 600), ready=False)


@pytest.mark.parametrize(
    "beats",
    [
        [beat(0, PEERS, 7.9), beat(1, BUSY, 7.9)],
        [LOADING, replace(beat(1, BUSY, 0.2), ready=False)],
        [beat(0, OUTSIDE, 600), beat(1, PEERS, 600)],
        [beat(0, PEERS, 600)],
        [],
    ],
    ids=["within-the-timeout", "long-load", "pager", "the-other-starts", "nobody-yet"],
)
def test_ranks_that_are_well(beats: list[Beat]) -> None:
    assert stuck(*beats) is None


def test_a_parent_that_was_stopped_blames_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-Z it looks at beats that are as old as the stop, until new ones have come."""
    looks = iter([0.0, 0.1, 900.0, 900.5, 901.0, 901.5, 902.0])
    now = [0.0]

    def tick() -> float:
        now[0] = next(looks)
        return now[0]

    def beats(_: Path) -> list[Beat]:
        at = now[0] if now[0] != 900.0 else 0.1
        return [Beat(rank, 1, at, at, 5, BUSY, True, "f") for rank in (0, 1)]

    def reports(_: Path) -> dict[int, Report]:
        return {r: report(r, End.DONE, 1) for r in (0, 1)} if now[0] > 901 else {}

    clock = SimpleNamespace(monotonic=tick, sleep=lambda _: None)
    for name, made in (("time", clock), ("read_beats", beats), ("read_reports", reports)):
        monkeypatch.setattr(f"specdec_cli.launch.ranks.{name}", made)
    launcher = cast(Any, SimpleNamespace(poll=lambda: 0 if now[0] > 901 else None, returncode=0))
    assert _watch(launcher, 2, tmp_path, timeout_s=60.0) is None


def test_ranks_that_load_again_may_take_as_long_as_they_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("specdec_cli.launch.world._set_timeouts", waits.append)
    heartbeat = SimpleNamespace(ready=False)
    rank: Any = SimpleNamespace(
        seat=SimpleNamespace(rank=0, size=2), limit_s=9.0, heartbeat=heartbeat
    )
    world = World(rank, "cpu", 9.0)
    world.ready()
    assert heartbeat.ready and waits[-1] < 60
    world.loading()
    assert not heartbeat.ready and waits[-1] > 3600
