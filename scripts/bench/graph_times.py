"""Times calls inside a CUDA graph, the form in which a round runs them."""

from collections.abc import Callable, Sequence

import torch


def graph_times(step: Callable[[int], object], launches: int, replays: int) -> list[float]:
    """Microseconds per call in each of `replays` replays of a graph of `launches` calls, after a
    warm-up. step: called with the number of the call. Its kernels must be compiled and its memory
    allocated.
    """
    return alternated_times([step], launches, replays)[0]


def alternated_times(
    steps: Sequence[Callable[[int], object]], launches: int, replays: int
) -> list[list[float]]:
    """The `graph_times` of each of `steps`. The graphs alternate, so that small differences
    show."""
    graphs = [captured(step, launches) for step in steps]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1000 / launches)
    return times


def captured(step: Callable[[int], object], launches: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            step(number)
    return graph
