"""How long calls take as a CUDA graph, which is how a round runs them."""

from collections.abc import Callable

import torch


def graph_times(step: Callable[[int], object], launches: int, replays: int) -> list[float]:
    """Microseconds a call in each of `replays`, after one more, of a graph of `launches` calls.

    Each call is given its number. Everything it needs must have been compiled and allocated.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            step(number)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return times
