"""Times drawing from logits on this GPU: from the logits, and from stored probabilities.

Every function is replayed as a CUDA graph over several sets of logits in turn, three times the size
of the L2 cache if rows are many. "MB" counts the logits once, and "of read" compares with the
bandwidth of a matrix-vector read in the same run. Logits are normal, with a model's spread (peaked)
or a small one (flat: top-p keeps most tokens). The last table times the rejection of a round.

    python scripts/bench/sampling.py --rows 1,6,192
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from graph_times import graph_times
from rates import read_rate
from specdec_kernels import ops
from specdec_kernels.sampling.reference import (
    rejection_sample_reference,
    sample_categorical_reference,
    to_probs,
)

L2_BYTES = 60e6
FILTERS = {"T": (0, 1.0), "top-k 50": (50, 1.0), "top-p 0.9": (0, 0.9), "both": (50, 0.9)}
TEMPERATURE = 0.8


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=[1, 6, 8, 48, 192])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--k", type=int, default=5, help="proposals per round in the second table")
    parser.add_argument("--without-torch", action="store_true", help="only the fused functions")
    return parser.parse_args()


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Median over replays of `run` on `copies` inputs in turn, per input."""
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    return statistics.median(graph_times(run, copies, 10))


def some_logits(rows: int, vocab: int, spread: float, copies: int) -> list[torch.Tensor]:
    return [
        spread * torch.randn(rows, vocab, device="cuda").to(torch.bfloat16) for _ in range(copies)
    ]


def drawing(args: argparse.Namespace, rows: int, name: str, spread: float, bandwidth: float) -> str:
    """Time drawing from rows of logits. bandwidth: TB/s of a matrix-vector read."""
    size = 2 * rows * args.vocab
    copies = max(4, min(40, round(3 * L2_BYTES / size)))
    logits = some_logits(rows, args.vocab, spread, copies)
    noise = torch.rand(rows, device="cuda")
    settings = (TEMPERATURE, *FILTERS[name])

    def found(i: int) -> ops.LogitRows:
        return ops.logit_rows(logits[i], *settings)

    def drawn(i: int) -> torch.Tensor:
        return ops.sample_logits(logits[i], found(i), *settings, noise)

    def stored(i: int) -> torch.Tensor:
        return sample_categorical_reference(to_probs(logits[i], *settings), noise)

    stats, both = microseconds(found, copies), microseconds(drawn, copies)
    old = "" if args.without_torch else f"{microseconds(stored, min(copies, 4)):.0f}"
    share = size / both / 1e6 / bandwidth
    kind = "peaked" if spread > 1 else "flat"
    return (
        f"| {rows} | {name}, {kind} | {stats:.1f} | {both:.1f} | {size / 1e6:.1f} "
        f"| {share:.0%} | {old} |"
    )


def rejecting(args: argparse.Namespace, batch: int, name: str, spread: float) -> str:
    """Time a round's verification: softmax stats of the target's rows, and the rejection."""
    k, vocab = args.k, args.vocab
    copies = max(4, min(40, round(3 * L2_BYTES / (2 * batch * (2 * k + 1) * vocab))))
    settings = (TEMPERATURE, *FILTERS[name])
    target = [
        x.view(batch, k + 1, vocab) for x in some_logits(batch * (k + 1), vocab, spread, copies)
    ]
    draft = [x[:, :k] + 0.5 * torch.randn_like(x[:, :k]) for x in target]
    rows = [ops.logit_rows(x.flatten(0, 1), *settings) for x in draft]
    u = torch.rand(3, batch, k + 1, device="cuda")
    tokens = [
        ops.sample_logits(x.flatten(0, 1), r, *settings, u[0, :, :k].flatten()).view(batch, k)
        for x, r in zip(draft, rows, strict=True)
    ]
    lens = torch.full((batch,), k, device="cuda")
    noise = (u[1, :, :k], u[2])
    made = [ops.logit_rows(x.flatten(0, 1), *settings) for x in target]

    def reject(i: int, stats: ops.LogitRows) -> object:
        own = rows[i].rows.view(batch, k, 4)
        where = tokens[i], lens, draft[i], own, target[i], stats
        return ops.reject_logits(ops.Verification(*where, *settings, *noise))

    def whole(i: int) -> object:
        return reject(i, ops.logit_rows(target[i].flatten(0, 1), *settings))

    def stored(i: int) -> object:
        p, q = (to_probs(x[i], *settings) for x in (target, draft))
        return rejection_sample_reference(tokens[i], lens.to(torch.int32), q, p, *noise)

    alone = microseconds(lambda i: reject(i, made[i]), copies)
    both = microseconds(whole, copies)
    old = "" if args.without_torch else f"{microseconds(stored, min(copies, 2)):.0f}"
    return f"| {batch} x {k} | {name} | {alone:.1f} | {both:.1f} | {old} |"


def main() -> None:
    args = arguments()
    bandwidth = read_rate(graph_times)
    print(f"a matrix-vector read at {bandwidth:.2f} TB/s")
    with torch.inference_mode():
        print("| rows | kept | rows us | + draw us | MB | of read | to_probs + draw us |")
        print("|---|---|---|---|---|---|---|")
        for name in FILTERS:
            for rows in args.rows:
                for spread in (3.0,) if name == "T" else (3.0, 0.5):
                    print(drawing(args, rows, name, spread, bandwidth), flush=True)
        print("\n| batch x k | kept | reject us | rows + reject us | to_probs + reject us |")
        print("|---|---|---|---|---|")
        for name in ("T", "both"):
            for batch in (1, 8, 32):
                print(rejecting(args, batch, name, 3.0), flush=True)


if __name__ == "__main__":
    main()
