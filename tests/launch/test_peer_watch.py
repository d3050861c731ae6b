"""Ranks without a parent find a rank that stands still through the store that they share."""

import threading
from pathlib import Path

import pytest

from specdec_cli.launch.heartbeat import BUSY, PEERS, Beat, PeerWatch, _here, bytes_read

TIMEOUT_S = 8.0


class Store:
    """The calls of torch's store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def beat(rank: int, at: float, idle: float = 0.0, state: str = BUSY, ready: bool = False) -> Beat:
    return Beat(rank, 100 + rank, at, at - idle, 5, state, ready, "f (x.py:1)")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("specdec_cli.launch.heartbeat.time.monotonic", lambda: now[0])
    return now


def seen(clock: list[float], seconds: int, watcher: int, frozen: int, offset: float) -> int | None:
    """The rank that `watcher` blames within a time, where `frozen` sent one beat and no more.

    offset: what the other host's clock is ahead.
    """
    store = Store()
    watches = {rank: PeerWatch(store, rank, 2, TIMEOUT_S) for rank in (watcher, frozen)}
    watches[frozen].exchange(beat(frozen, clock[0] + offset))
    for _ in range(seconds):
        clock[0] += 1.0
        found = watches[watcher].exchange(beat(watcher, clock[0], clock[0] - 1000.0, PEERS))
        if found is not None:
            return found.rank
    return None


def test_a_rank_that_never_sent_a_beat_is_found(clock: list[float]) -> None:
    watch = PeerWatch(Store(), 0, 2, TIMEOUT_S)
    clock[0] += TIMEOUT_S + 1
    found = watch.exchange(beat(0, clock[0], TIMEOUT_S + 1, PEERS))
    assert found is not None and (found.rank, found.where) == (1, "its start")


@pytest.mark.parametrize(("watcher", "frozen"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("offset", [-500.0, 0.0, 500.0])
def test_a_rank_that_sends_no_more_is_found_after_the_timeout(
    clock: list[float], watcher: int, frozen: int, offset: float
) -> None:
    assert seen(clock, 7, watcher, frozen, offset) is None
    clock[0] = 1000.0
    assert seen(clock, 12, watcher, frozen, offset) == frozen


def test_a_rank_that_waits_for_its_peers_hangs_nobody(clock: list[float]) -> None:
    store = Store()
    watches = [PeerWatch(store, rank, 2, TIMEOUT_S) for rank in range(2)]
    for second in range(60):
        clock[0] += 1.0
        assert watches[1].exchange(beat(1, clock[0])) is None  # loads, and moves
        assert watches[0].exchange(beat(0, clock[0], second, PEERS)) is None


def test_only_rank_0_judges_who_keeps_the_others_waiting(clock: list[float]) -> None:
    """Rank 1 sees that rank 0 waits, but not for which rank."""
    store = Store()
    watches = [PeerWatch(store, rank, 3, TIMEOUT_S) for rank in range(3)]
    blamed: list[tuple[int, int]] = []
    for second in range(12):
        clock[0] += 1.0
        for rank in (2, 1, 0):
            state = BUSY if rank == 2 else PEERS
            found = watches[rank].exchange(beat(rank, clock[0], second, state, ready=True))
            blamed += [(rank, found.rank)] if found is not None else []
    assert blamed and set(blamed) == {(0, 2)}


def test_bytes_that_another_thread_reads_count_and_own_do_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    go, done, over = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        go.wait()
        path.read_bytes()
        done.set()
        over.wait()

    thread = threading.Thread(target=read)
    thread.start()
    before = bytes_read()
    path.read_bytes()
    assert bytes_read() - before < 50_000
    go.set()
    done.wait()
    assert bytes_read() - before >= 100_000
    over.set()
    thread.join()


def test_a_beat_is_translated_to_this_ranks_clock() -> None:
    found = _here(beat(1, at=10.0, idle=6.0), 100.0)
    assert (found.at, found.moved_at) == (100.0, 94.0)
