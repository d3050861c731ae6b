"""Moments on a device's clock, by which prefill passes are timed without waiting for them."""

import time
from collections.abc import Iterator
from itertools import cycle

import torch


class Moment:
    """The present, as the device sees it, which on CUDA runs behind the host.

    event: what the device's queue is marked with; None where the device has no queue.
    """

    def __init__(self, event: torch.Event | None = None) -> None:
        self._at = time.perf_counter()
        self._event = event
        if event is not None:
            event.record()

    def seconds_until(self, later: "Moment") -> float:
        """Seconds from here to `later`, after waiting until the device has come to it."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


class Moments:
    """Moments of one device, of which the last AT_ONCE are valid.

    Their events are used again, since the driver makes a new one when it is first recorded. A
    `torch.Event` finds the present stream by itself. In Python that takes the host longer than to
    record the event.
    """

    AT_ONCE = 4  # two for each of two steps in flight

    def __init__(self, device: torch.device) -> None:
        is_queue, number = device.type == "cuda", self.AT_ONCE
        made = [torch.Event(device, enable_timing=True) for _ in range(number) if is_queue]
        self._events: Iterator[torch.Event | None] = cycle(made or [None])

    def now(self) -> Moment:
        """The present. It is valid until AT_ONCE later ones have been asked for."""
        return Moment(next(self._events))
