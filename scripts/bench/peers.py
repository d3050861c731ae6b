"""Times all-reduces and all-gathers between the GPUs of a group: our kernels against NCCL.

    PYTHONPATH=.:kernels torchrun --nproc-per-node 4 scripts/bench/peers.py

Needs at least two CUDA devices. Every time is the slowest rank's, for one call inside a CUDA graph.
A sum includes the residual and the norm's part; for NCCL that is a separate kernel. "read" is a sum
whose ranks read each other's parts instead of writing them to each other. "bytes" is the time of
reading all other ranks' parts at --bandwidth. Results are compared with NCCL's.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from specdec_kernels import ops
from specdec_kernels.comm.peers import PUSHED_NUMBERS, Peers
from torch import Tensor

from specdec_cli.core.parallel import TensorParallel, make_groups
from specdec_cli.core.peers import shared_memory

LAUNCHES, REPEATS, EPS = 40, 7, 1e-5


def timed(step: Callable[[int], object]) -> float:
    """Microseconds per call of LAUNCHES calls, each with its number, captured as one graph."""
    for number in (0, 1):
        step(number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(LAUNCHES):
            step(number)
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    slowest = torch.tensor(median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference on any rank."""
    found = (actual.double() - expected.double()).abs().max()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def our_sum(peers: Peers, residual: Tensor, norm: Tensor, number: int) -> Tensor:
    return ops.reduce_add_norm(peers, number % 2, residual, norm, EPS).hidden


def nccl_sum(
    parallel: TensorParallel, part: Tensor, residual: Tensor, norm: Tensor, _: int
) -> Tensor:
    return ops.add_norm(parallel.all_reduce(part), residual, norm, EPS).hidden


def our_logits(peers: Peers, rows: int, _: int) -> Tensor:
    return ops.gather_columns(peers, rows)


def nccl_logits(parallel: TensorParallel, part: Tensor, width: int, _: int) -> Tensor:
    return parallel.all_gather(part, width)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 6, 8, 32, 48, 64, 192, 256])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--bandwidth", type=float, default=0.4, help="TB/s between GPUs")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    size, rank = dist.get_world_size(), dist.get_rank()
    parallel = make_groups(size, size, device).target
    assert parallel is not None
    torch.manual_seed(rank)
    lines = []

    def report(what: str, width: int, rows: int, ours: float, nccl: float, error: float) -> None:
        num_bytes = (size - 1) * rows * width * 2
        floor = num_bytes / arguments.bandwidth / 1e6
        lines.append(
            f"{what:6} {width:6} {rows:4}  ours {ours:6.1f}  NCCL {nccl:6.1f}  "
            f"bytes {floor:6.1f} us  differs by {error:.1e}"
        )

    for width in arguments.widths:
        shared = shared_memory(parallel, width, arguments.vocabulary, torch.bfloat16)
        assert shared is not None, "these GPUs cannot read each other"
        norm = torch.ones(width, dtype=torch.bfloat16, device=device)
        for rows in arguments.rows:
            part = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
            residual = torch.zeros_like(part)
            sums = shared.sums
            for place in (0, 1):
                room = sums.take(place, rows, width)
                assert room is not None
                room.copy_(part)
            buffer = part.clone()
            ours = partial(our_sum, sums, residual, norm)
            nccl = partial(nccl_sum, parallel, buffer, residual, norm)
            torch.cuda.synchronize()
            dist.barrier()
            error = difference(ours(0), nccl(0))
            ours(1)
            buffer.zero_()
            if sums.pushed is not None and rows * width <= PUSHED_NUMBERS:
                read = partial(our_sum, replace(sums, pushed=None), residual, norm)
                report("read", width, rows, timed(read), 0.0, 0.0)
            report("sum", width, rows, timed(ours), timed(nccl), error)
    logits = shared.logits
    assert logits is not None
    share = arguments.vocabulary // size
    for rows in arguments.rows:
        part = torch.randn(rows, share, dtype=torch.bfloat16, device=device)
        room = logits.take(0, rows, share)
        assert room is not None
        room.copy_(part)
        torch.cuda.synchronize()
        dist.barrier()
        ours = partial(our_logits, logits, rows)
        nccl = partial(nccl_logits, parallel, part, arguments.vocabulary)
        error = difference(ours(0), nccl(0))
        report("logits", share, rows, timed(ours), timed(nccl), error)
        dist.barrier()
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
