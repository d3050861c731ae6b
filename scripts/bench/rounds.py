"""Times rounds of a recipe's pair on this GPU, by proposal length and batch size.

Prompts are random ids, and only the recipe's models are read: with dummy weights and synthetic
acceptance every engine does the same work per round. Prints one Markdown row per setting:
milliseconds a round (median over repeats, least to most), stage times, tokens per second, and the
ratios to k = 0 and to the floor. The floor reads every weight once per pass, at the bandwidth of a
matrix-vector read that the run measures first; the engine counts the experts that the target's
rounds read. Experts of a draft, and of layers that are not fused, count as if each token chose
uniformly.

    python scripts/bench/rounds.py recipes/bench-8b-1b-dummy.yaml --k 0,1,3,5,8 --batch-size 1,8,32
    torchrun --nproc-per-node 4 scripts/bench/rounds.py recipes/bench-70b-1b-dummy.yaml

With several ranks, times and floor are those of rank 0, and a profile is written for each rank.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace

import torch
import yaml
from floors import Rates, round_ms
from graph_times import graph_times
from rates import measured_rates
from recipe_arguments import numbers, recipe_arguments

from specdec_cli.core.figures import Metrics
from specdec_cli.core.types import Request
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.launch.world import World, find_place, join
from specdec_cli.recipe import Recipe, load_recipe


def arguments() -> argparse.Namespace:
    parser = recipe_arguments(__doc__.splitlines()[0], repeats=3)
    parser.add_argument("--k", type=numbers, default=[0, 5])
    parser.add_argument("--batch-size", type=numbers, default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1000, help="least number of rounds for a row")
    return parser.parse_args()


def over_floor(ms: float, floor: float) -> str:
    """The ratio to the floor. Below 1 the floor is too high: it estimates experts, and tokens chose
    fewer."""
    return f"{ms / floor:.2f}" if ms >= floor else "fewer experts read"


def requests(count: int, tokens: int, vocab: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocab - 10, (count, tokens), generator=generator).tolist()
    return [Request(i, tuple(row)) for i, row in enumerate(ids)]


def measure(engine: Engine, planned: Plan, k: int, args: argparse.Namespace) -> list[Metrics]:
    params = planned.params
    vocab = engine.target.vocab_size
    per_round = 3.69 if k else 1.0
    prompts = -(-int(args.rounds * per_round * engine.batch_size) // params.max_new_tokens)
    prompts = -(-prompts // engine.batch_size) * engine.batch_size
    warm = replace(params, max_new_tokens=4 * (k + 1))
    engine.run(requests(engine.batch_size, args.prompt_tokens, vocab), k, warm)
    each = -(-prompts // args.repeats // engine.batch_size) * engine.batch_size
    work = requests(each, args.prompt_tokens, vocab)
    return [engine.run(work, k, params).metrics for _ in range(args.repeats)]


def tokens_a_round(metrics: Metrics) -> float:
    """Mean tokens per round, counting rounds in which n-grams found nothing to propose."""
    rounds = metrics.num_drafts + metrics.num_rounds_without_proposal
    return 1 + metrics.num_accepted_tokens / rounds


def profile(engine: Engine, planned: Plan, k: int, args: argparse.Namespace) -> str:
    """A table of some rounds: time by kernel, and the device's idle time."""
    vocab = engine.target.vocab_size
    work = requests(engine.batch_size, args.prompt_tokens, vocab)
    params = replace(planned.params, max_new_tokens=24 * (k + 1))
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as found:
        metrics = engine.run(work, k, params).metrics
    rows = [e for e in found.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: -e.self_device_time_total)
    n = metrics.num_rounds
    lines = [f"{n} rounds of {metrics.round_ms:.2f} ms, prefill included below"]
    lines += [
        f"{e.self_device_time_total / n:9.1f} us {e.count / n:7.1f} x  {e.key[:90]}"
        for e in rows[:40]
    ]
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    sets = dict(pair.split("=", 1) for pair in args.set)
    sets |= {
        "speculation.num_speculative_tokens": str(max(1, *args.k)),
        "run.batch_size": str(max(args.batch_size)),
    }
    recipe = load_recipe(args.recipe, {n: yaml.safe_load(v) for n, v in sets.items()})
    place = find_place(sys.argv, os.environ, verbose=True)
    degree, timeout = recipe.target.tensor_parallel_size, recipe.run.timeout_s
    with join(place, degree, device=recipe.run.device, timeout_s=timeout) as world:
        time_rounds(recipe, world, args)


def time_rounds(recipe: Recipe, world: World, args: argparse.Namespace) -> None:
    planned = plan(recipe)
    rates = Rates(*measured_rates(graph_times))
    print(rates)
    started = time.perf_counter()
    built = build(
        *(planned, args.prompt_tokens),
        on_stage=lambda stage: print(f"{time.perf_counter() - started:.1f} s: {stage}", flush=True),
    )
    print(f"built in {time.perf_counter() - started:.1f} s; {planned.execution}")
    if any(model.has_experts for model in planned.models):
        is_counted = built.target.mixtures is not None
        how = "that the target's rounds read" if is_counted else "of uniform choices"
        print(f"floors count the experts {how}")
    columns = "| batch | k | rounds | tokens a round | draft ms | verify ms | sample ms "
    columns += "| commit ms | round ms | tokens/s | x k = 0 | experts | x floor |"
    print(columns)
    print("|" + "---|" * columns.count(" |"))
    rows = []
    for batch_size in args.batch_size:
        engine = built.with_batch_size(batch_size)
        plain = None
        for k in args.k:
            started = time.perf_counter()
            engine.run(
                requests(1, args.prompt_tokens, 100), k, replace(planned.params, max_new_tokens=1)
            )
            capture = time.perf_counter() - started
            found = measure(engine, planned, k, args)
            speed = statistics.median(m.decode_tokens_per_second for m in found)
            plain = speed if k == 0 else plain
            ms = [m.round_ms for m in found]
            middle = sorted(found, key=lambda m: m.round_ms)[(len(found) - 1) // 2]
            length = statistics.mean(tokens_a_round(m) for m in found)
            read = middle.distinct_experts
            floor = round_ms(planned, k, batch_size, rates, read)
            print(
                f"| {batch_size} | {k} | {sum(m.num_rounds for m in found)} | {length:.2f} "
                f"| {middle.draft_ms:.2f} | {middle.verify_ms:.2f} | {middle.sample_ms:.3f} "
                f"| {middle.commit_ms:.3f} "
                f"| {middle.round_ms:.2f} ({min(ms):.2f} – {max(ms):.2f}) | {speed:.0f} "
                f"| {f'{speed / plain:.2f}' if plain else '–'} "
                f"| {'' if read is None else f'{read:.1f}'} "
                f"| {over_floor(middle.round_ms, floor)} |"
                f" (captured in {capture:.1f} s)",
                flush=True,
            )
            rows.append({"batch_size": batch_size, "k": k, "metrics": [m.as_dict() for m in found]})
            if args.profile:
                args.profile.mkdir(parents=True, exist_ok=True)
                table = profile(engine, planned, k, args)
                name = f"b{batch_size}-k{k}" + f"-rank{world.rank}" * (world.size > 1)
                (args.profile / f"{name}.txt").write_text(table)
        engine.forget_rounds()
    free, total = torch.cuda.mem_get_info()
    print(f"memory in use {(total - free) / 2**30:.1f} GiB")
    if args.json and world.is_first:
        args.json.write_text(json.dumps(rows, indent=1))


main()
