"""Times the first token of a recipe's models, by number of prompts and their tokens.

Prompts are random ids, all of them queued at once. Prints one Markdown row per shape, medians over
repeats: milliseconds from the request to the first token of every prompt (least to most), the part
of it in prefill passes, the floor of these and the ratio to it. With k = 0 only the target is fed,
and prefill decides each first token. Otherwise the draft or the head is fed as well, and the first
round decides: its scoring pass feeds each prompt's last token. With --uncaptured each row is
followed by one without CUDA graphs.

The floor counts only matrix products: for each model, the longer time of reading all weights once
and of multiplying each token by each matrix, at rates that the run measures first. A CPU has no
floor. There transformers' own prefill of the target is timed too: one pass over the same ids,
logits of the last token, random weights of the same shapes.

    python scripts/bench/prefill.py bench-8b-1b-dummy --shapes 1x128,1x512,8x512
"""

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from floors import Rates, prefill_ms
from graph_times import graph_times
from rates import measured_rates
from recipe_arguments import numbers, recipe_arguments
from transformers import AutoModelForCausalLM

from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.recipe import load_recipe

Shape = tuple[int, int]
SHAPES = "1x128,1x512,1x2048,1x7900,8x128,8x512,8x2048"


def shapes(text: str) -> list[Shape]:
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(prompts), int(tokens)) for prompts, tokens in pairs]


def arguments() -> argparse.Namespace:
    parser = recipe_arguments(__doc__.splitlines()[0], repeats=7)
    parser.add_argument("--shapes", type=shapes, default=shapes(SHAPES), help="PROMPTSxTOKENS,...")
    parser.add_argument("--k", type=numbers, default=[0], help="proposals of the first round")
    parser.add_argument("--uncaptured", action="store_true")
    return parser.parse_args()


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one repeat."""

    first_token: float
    prefill: float


def requests(shape: Shape, vocab: int, repeat: int) -> list[Request]:
    generator = torch.Generator().manual_seed(repeat)
    ids = torch.randint(10, vocab - 10, shape, generator=generator).tolist()
    return [Request(i, tuple(row)) for i, row in enumerate(ids)]


def first_tokens(engine: Engine, work: list[Request], k: int, params: SamplingParams) -> Timing:
    """Run prompts that fit into one batch until each has a token."""
    started = time.perf_counter()
    run = engine.start(work, k, params)
    while any(seq.first_token_at is None for seq in run.seqs):
        engine.step(run)
    first = max(seq.first_token_at or 0.0 for seq in run.seqs) - started
    run.rounds.discard()
    run.scheduler.release_all()
    return Timing(first * 1e3, 1e3 * sum(seq.prefill_seconds for seq in run.seqs))


def profile(once: Callable[[], Timing]) -> str:
    """A table of one run to the first token, with time by kernel."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        timing = once()
    on_device = torch.cuda.is_available()

    def spent(event: Any) -> float:
        return float(event.self_device_time_total if on_device else event.self_cpu_time_total)

    rows = sorted((e for e in found.key_averages() if spent(e) > 0), key=lambda e: -spent(e))
    total = sum(map(spent, rows)) / 1e3
    lines = [
        f"first token {timing.first_token:.2f} ms, prefill {timing.prefill:.2f} ms, while "
        f"profiled; kernels {total:.2f} ms, a first round's too"
    ]
    lines += [f"{spent(e):10.1f} us {e.count:6d} x  {e.key[:100]}" for e in rows[:45]]
    return "\n".join(lines) + "\n"


def host_profile(once: Callable[[], Timing]) -> str:
    """A table of 20 runs to the first token, with the host's time by function."""
    profiler = cProfile.Profile()
    for _ in range(20):
        profiler.runcall(once)
    table = io.StringIO()
    pstats.Stats(profiler, stream=table).sort_stats("tottime").print_stats(40)
    return table.getvalue()


def reference(planned: Plan) -> Callable[[list[Request]], float]:
    """transformers' prefill of the target's shapes: milliseconds of one pass over the prompts."""
    target = planned.target
    module = AutoModelForCausalLM.from_config(target.module.config, dtype=target.dtype).eval()
    module.set_attn_implementation("sdpa")

    def once(work: list[Request]) -> float:
        ids = torch.tensor([request.token_ids for request in work])
        started = time.perf_counter()
        with torch.inference_mode():
            module(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
        return (time.perf_counter() - started) * 1e3

    return once


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})"


@dataclass(frozen=True)
class Bench:
    """An engine and its measurements. rates: those of a GPU. theirs: transformers' prefill, on a
    CPU.
    """

    planned: Plan
    built: Engine
    rates: Rates | None
    theirs: Callable[[list[Request]], float] | None
    args: argparse.Namespace

    def row(self, shape: Shape, k: int, is_captured: bool = True) -> dict[str, Any]:
        """Measure and print one row."""
        engine, repeats = self.built.with_batch_size(shape[0]), self.args.repeats
        params = replace(self.planned.params, max_new_tokens=k + 1, ignore_eos=True)
        graphs, most = engine.prompts, 0
        if graphs is not None and not is_captured:
            most, graphs.num_tokens = graphs.num_tokens, 0
        found, others, begun = list[Timing](), list[float](), 0.0
        for repeat in range(2 + repeats):
            work = requests(shape, engine.target.vocab_size, repeat)
            timing = first_tokens(engine, work, k, params)
            begun = begun or timing.first_token
            if repeat >= 2:
                found.append(timing)
                others += [self.theirs(work)] if self.theirs else []
        first = [timing.first_token for timing in found]
        if self.rates is not None:
            floor = prefill_ms(self.planned, shape[0] * shape[1], k, self.rates)
        else:
            floor = statistics.median(others)
        name = f"{shape[0]} x {shape[1]}{'' if is_captured else ', uncaptured'}"
        print(
            f"| {name} | {k} | {spread(first)} "
            f"| {statistics.median(t.prefill for t in found):.2f} "
            f"| {spread(others) if others else f'{floor:.2f}'} "
            f"| {statistics.median(first) / floor:.2f} |"
            f" (the first run {begun:.0f} ms; {memory()})",
            flush=True,
        )
        if self.args.profile and is_captured:
            self.args.profile.mkdir(parents=True, exist_ok=True)
            name = f"{shape[0]}x{shape[1]}-k{k}"
            for kind, made in (("", profile), ("-host", host_profile)):
                table = made(lambda: first_tokens(engine, work, k, params))
                (self.args.profile / f"{name}{kind}.txt").write_text(table)
        if graphs is not None and not is_captured:
            graphs.num_tokens = most
        runs = [vars(timing) for timing in found]
        row = {"prompts": shape[0], "tokens": shape[1], "k": k, "is_captured": is_captured}
        return row | {"runs": runs, "transformers_ms": others}


def memory() -> str:
    """The device's memory in use."""
    if not torch.cuda.is_available():
        return "on a CPU"
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / 2**30:.2f} GiB in use"


def main() -> None:
    args = arguments()
    sets = dict(pair.split("=", 1) for pair in args.set)
    sets |= {"run.batch_size": str(max(prompts for prompts, _ in args.shapes))}
    if max(args.k):
        sets["speculation.num_speculative_tokens"] = str(max(args.k))
    recipe = load_recipe(args.recipe, {n: yaml.safe_load(v) for n, v in sets.items()})
    planned = plan(recipe)
    is_cuda = planned.device.type == "cuda"
    rates = Rates(*measured_rates(graph_times)) if is_cuda else None
    if rates is not None:
        print(rates)
    started = time.perf_counter()
    built = build(planned, max(tokens for _, tokens in args.shapes))
    seconds = time.perf_counter() - started
    print(f"built in {seconds:.1f} s; {planned.execution}; {memory()}", flush=True)
    bench = Bench(planned, built, rates, None if is_cuda else reference(planned), args)
    columns = "| prompts x tokens | k | first token ms | prefill ms "
    columns += "| floor ms | x floor |" if is_cuda else "| transformers ms | x transformers |"
    print(columns)
    print("|" + "---|" * columns.count(" |"))
    rows = []
    for k in args.k:
        for shape in args.shapes:
            rows.append(bench.row(shape, k))
            if args.uncaptured:
                rows.append(bench.row(shape, k, is_captured=False))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


main()
