"""The heartbeat of a rank. It shows whether the rank's main thread makes progress and, if not, what
it is waiting for.

A second thread looks at the main thread's stack at regular intervals. The rank counts as having
moved if the stack has changed or a step was counted since the last look. While models load, it also
counts as having moved if bytes were read, so that a long load does not look like a hang.

Ranks started by torchrun or srun watch each other through torch's store. A hung rank cannot report
itself, so rank 0 watches all others, and they watch rank 0.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from specdec_cli.launch.reports import write_atomically

PERIOD_S = 0.25
LEAST_START_S = 60.0  # a rank may take this long to start, even with a shorter timeout
_FROZEN_S = 5.0
_STOP_GRACE_S = 1.0
_EXCHANGE_S = 1.0

BUSY, PEERS, OUTSIDE = "busy", "peers", "outside"


@dataclass(frozen=True, slots=True)
class Beat:
    """The state of a rank's main thread at one moment.

    at: when the beat was made. All times are seconds on this machine's monotonic clock.
    moved_at: when the rank last moved.
    steps: the number of steps counted so far.
    state: "busy"; "peers" (in a collective, or waiting for the device); or "outside" (waiting for a
        reader of its output).
    ready: whether the rank's models are loaded.
    where: the innermost line of specdec's code on the stack.
    """

    rank: int
    pid: int
    at: float
    moved_at: float
    steps: int
    state: str
    ready: bool
    where: str


def find_stuck(beats: Iterable[Beat], num_ranks: int, now: float, timeout_s: float) -> Beat | None:
    """Return the last beat of the rank that has held up the others for `timeout_s` seconds; None if
    no rank has. Usually it is a busy rank that does not move while others wait. If all ranks wait
    for each other, it is the rank with the fewest steps.

    beats: the last beat of each rank.
    num_ranks: the number of ranks in the run; some may not have sent a beat yet.
    """
    beats = list(beats)
    idle = {beat.rank for beat in beats if now - beat.moved_at > timeout_s}
    busy = [beat for beat in beats if beat.state == BUSY or is_frozen(beat, now)]
    suspects = [beat for beat in busy if beat.rank in idle]
    are_all_inside = len(beats) == num_ranks and all(beat.state != OUTSIDE for beat in beats)
    if not suspects and are_all_inside:
        waiting = [beat for beat in beats if beat not in busy and beat.rank in idle]
        if len(waiting) == len(beats):
            suspects = waiting
        elif waiting and all(beat.ready for beat in beats):
            suspects = busy  # these ranks move, but others have waited for them too long
    return min(suspects, key=lambda beat: (beat.steps, beat.moved_at), default=None)


def is_frozen(beat: Beat, now: float) -> bool:
    """Return True if the whole process has stopped, including its heartbeat thread."""
    return now - beat.at > _FROZEN_S


def write_beat(folder: Path, beat: Beat) -> None:
    write_atomically(folder / f"beat-{beat.rank}", json.dumps(asdict(beat)))


def read_beats(folder: Path) -> list[Beat]:
    """Read the last beat of every rank that has started."""
    return [Beat(**json.loads(path.read_bytes())) for path in folder.glob("beat-*[0-9]")]


class Heartbeat:
    """The heartbeat thread of one rank. Create it in the main thread.

    on_beat: called with every beat.
    on_stop: called with the signal's number if SIGTERM or SIGHUP asked the process to end and the
        main thread did not react, for example because it is in a collective. It must not return.
    """

    def __init__(
        self, rank: int, on_beat: Callable[[Beat], None], on_stop: Callable[[int], None]
    ) -> None:
        self.steps = 0
        self.state: str | None = None  # overrides the state derived from the stack
        self.ready = False
        self._rank = rank
        self._on_beat = on_beat
        self._on_stop = on_stop
        self._main = threading.get_ident()
        # Python runs signal handlers only in the main thread, which may be stuck. But it writes the
        # signal's number to this pipe at once, where the heartbeat thread can read it.
        self._asked, asking = os.pipe()
        os.set_blocking(asking, False)
        os.set_blocking(self._asked, False)
        signal.set_wakeup_fd(asking, warn_on_full_buffer=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the beats, and stop watching for signals."""
        self._over.set()
        self._thread.join()
        signal.set_wakeup_fd(-1)

    def _run(self) -> None:
        moved_at, last, asked, stop_at = time.monotonic(), None, 0, 0.0
        while not self._over.is_set():
            now = time.monotonic()
            frames = _stack(sys._current_frames().get(self._main))
            stack = [(id(frame.f_code), frame.f_lasti) for frame in frames]
            # While models load, count bytes read as progress, since a slow disk is not a hang.
            # Nothing large is read afterwards.
            seen = (self.steps, stack, 0 if self.ready else bytes_read())
            if seen != last:
                moved_at, last = now, seen
            beat = Beat(
                rank=self._rank,
                pid=os.getpid(),
                at=now,
                moved_at=moved_at,
                steps=self.steps,
                state=self.state or _state(frames),
                ready=self.ready,
                where=_where(frames),
            )
            del frames  # frames would keep the locals of finished calls alive
            self._on_beat(beat)
            if not asked and (asked := self._asked_to_stop()):
                stop_at = now + _STOP_GRACE_S
            if asked and now > stop_at:
                self._on_stop(asked)
            self._over.wait(PERIOD_S)

    def _asked_to_stop(self) -> int:
        """Return the signal that asked this process to end; 0 if none did."""
        try:
            came = os.read(self._asked, 64)
        except BlockingIOError:
            return 0
        return next((n for n in came if n in (signal.SIGTERM, signal.SIGHUP)), 0)


def bytes_read() -> int:
    """Return the number of bytes that all other threads of this process have read, including pages
    of mapped files that came from a disk; 0 if the system does not report it."""
    own, total = str(threading.get_native_id()), 0
    for task in Path("/proc/self/task").glob("[0-9]*"):
        if task.name != own:
            # The thread may have ended, or permission may be missing.
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split(": ") for line in (task / "io").read_text().splitlines())
                total += int(counts["rchar"]) + int(counts["read_bytes"])
    return total


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a stack, the innermost first."""
    return [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]


def _state(frames: list[FrameType]) -> str:
    names = [frame.f_code.co_filename for frame in frames]
    waits = any("torch/distributed/" in name or "torch/cuda/" in name for name in names)
    return PEERS if waits else BUSY


def _where(frames: list[FrameType]) -> str:
    ours = (f for f in frames if "specdec_cli" in f.f_code.co_filename)
    frame = next(ours, frames[0] if frames else None)
    if frame is None:
        return "its end"
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


class PeerWatch:
    """Exchanges heartbeats with the other ranks. Only the heartbeat thread uses it.

    store: a connection to torch's store that nothing else uses, since a call may block while the
        process that serves the store is frozen.
    rank: this rank.
    size: the number of ranks, all of which are connected.
    timeout_s: how long a rank may hold up the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._size = size
        self._timeout_s = timeout_s
        self._next = 0.0
        now = time.monotonic()
        # The last beat of each watched rank, and the time at which it arrived.
        self._seen = {
            peer: (Beat(peer, 0, now, now, 0, BUSY, False, "its start"), now)
            for peer in (range(1, size) if rank == 0 else (0,))
        }

    def exchange(self, own: Beat) -> Beat | None:
        """Send this rank's beat and return the beat of a rank that holds up the others, if any.

        Hosts have different clocks, so the beat of another rank is dated by the time at which it
        arrived here. Raises `RuntimeError` if the store does not answer.
        """
        if own.at < self._next:
            return None
        self._next = own.at + _EXCHANGE_S
        self._store.set(f"beat/{own.rank}", json.dumps(asdict(own)))
        for rank, (last, _) in list(self._seen.items()):
            if self._store.check([key := f"beat/{rank}"]):
                beat = Beat(**json.loads(self._store.get(key)))
                if beat != last:
                    self._seen[rank] = beat, time.monotonic()
        now = time.monotonic()
        others = [_here(beat, came) for beat, came in self._seen.values()]
        if own.rank == 0:
            return find_stuck([own, *others], self._size, now, self._timeout_s)
        # Only rank 0 sees all ranks, so the other ranks only check that rank 0 is alive.
        gone = (b for b in others if is_frozen(b, now) and now - b.at > self._timeout_s)
        return next(gone, None)


def _here(beat: Beat, came: float) -> Beat:
    """Convert a beat's times to this host's clock. came: the time at which it arrived."""
    return replace(beat, at=came, moved_at=came - (beat.at - beat.moved_at))
