"""Ranks that torchrun or srun started watch each other through the store that all share.

A rank that stands still cannot say so: rank 0 watches all others, and they watch rank 0.
"""

import json
import time
from dataclasses import asdict, replace
from typing import Any

from specdec_cli.launch.heartbeat import BUSY, Beat, find_stuck, is_frozen

_PERIOD_S = 1.0


class PeerWatch:
    """Exchanges heartbeats with the other ranks; used by the heartbeat's thread alone.

    store: torch's store, with a connection of its own, since a call may wait for a frozen server.
    rank: this rank. size: number of ranks, which have met.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._size = size
        self._timeout_s = timeout_s
        self._next = 0.0
        now = time.monotonic()
        # The last beat of each rank that this one watches, and when it came.
        self._seen = {
            peer: (Beat(peer, 0, now, now, 0, BUSY, False, "its start"), now)
            for peer in (range(1, size) if rank == 0 else (0,))
        }

    def exchange(self, own: Beat) -> Beat | None:
        """Send this rank's beat and return the beat of a rank that holds up the others, if any.

        Hosts have clocks of their own, so another rank's times are counted from the arrival of its
        last beat. Raises torch's `RuntimeError` if the store does not answer.
        """
        if own.at < self._next:
            return None
        self._next = own.at + _PERIOD_S
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
        # It does not see who keeps rank 0 waiting.
        gone = (b for b in others if is_frozen(b, now) and now - b.at > self._timeout_s)
        return next(gone, None)


def _here(beat: Beat, came: float) -> Beat:
    """The beat with its times on this host's clock."""
    return replace(beat, at=came, moved_at=came - (beat.at - beat.moved_at))
