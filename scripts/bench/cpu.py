"""Times a pair on a CPU against transformers: plain and speculative decoding, alternating.

fp32, batch 1, greedy, end-of-sequence ignored. Prints median seconds (least to most) over repeats.
With --hogs that many processes use the processors at the same time. They begin before torch does,
as for a command on a busy machine.

    python scripts/bench/cpu.py --prompts 4 --tokens 128 --repeats 5
    python scripts/bench/cpu.py --recipe smollm2-offline --hogs 2 --prompts 1 --tokens 32
"""

# ruff: noqa: E402
import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from specdec_cli.launch.spinning import choose_spins, told

# The process ends with its parent, however the parent ends.
HOG = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--prompts", type=int, default=4)
PARSER.add_argument("--tokens", type=int, default=128)
PARSER.add_argument("--repeats", type=int, default=5)
PARSER.add_argument("--k", type=int, default=4)
PARSER.add_argument("--recipe", default="demo")
PARSER.add_argument("--hogs", type=int, default=0)
ARGUMENTS = PARSER.parse_args()
for _ in range(ARGUMENTS.hogs):
    subprocess.Popen([sys.executable, "-c", HOG])
choose_spins()

import torch

from specdec_cli import demo
from specdec_cli.core.types import Request
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.models.description import Description
from specdec_cli.models.held import borrowed_weights
from specdec_cli.models.loader import load
from specdec_cli.prompts import read_prompts
from specdec_cli.recipe import load_recipe


def theirs(planned: Plan, tokens: int, k: int) -> tuple[Callable[[list[int]], list[int]], ...]:
    """transformers' `generate`, without and with the draft as its assistant."""
    fresh = plan(planned.recipe)
    described = fresh.draft
    assert isinstance(described, Description)
    target = load(fresh.target, fresh.device)
    shared = borrowed_weights(described.module, target, described.shared)
    draft = load(described, fresh.device, shared)
    for model in (target, draft):
        model.set_attn_implementation("sdpa")
    settings = draft.generation_config
    settings.num_assistant_tokens = k
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    settings.eos_token_id = None

    def generate(prompt: list[int], **more: object) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                **more,
            )
        found: list[int] = out[0, len(prompt) :].tolist()
        return found

    return generate, lambda prompt: generate(prompt, assistant_model=draft)


def main() -> None:
    args = ARGUMENTS
    recipe = load_recipe(
        args.recipe,
        {
            "draft.model": "demo:draft" if args.recipe == "demo" else "demo:smollm2-draft",
            "run.device": "cpu",
            "speculation.num_speculative_tokens": args.k,
            "sampling.max_new_tokens": args.tokens,
            "sampling.ignore_eos": True,
        },
    )
    planned = plan(recipe)
    texts = read_prompts([], str(demo.demo_path("demo:prompts")), None)[: args.prompts]
    prompts = [planned.tokenizer.encode(p.text or "") for p in texts]
    engine = build(planned, max(map(len, prompts)))
    params = replace(planned.params, ignore_eos=True)

    def ours(k: int) -> Callable[[list[int]], list[int]]:
        return lambda prompt: engine.run([Request(0, tuple(prompt))], k, params).seqs[0].output_ids

    generate, assisted = theirs(planned, args.tokens, args.k)
    contenders = {
        "specdec, k = 0": ours(0),
        "transformers generate": generate,
        f"specdec, k = {args.k}": ours(args.k),
        f"transformers assisted, {args.k} candidates": assisted,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):
        outputs = []
        for name, decode in contenders.items():
            started = time.perf_counter()
            outputs.append([decode(p) for p in prompts])
            if repeat:  # the first is the warm-up
                seconds[name].append(time.perf_counter() - started)
        assert all(o == outputs[0] for o in outputs), "outputs differ"
    threads = torch.get_num_threads()
    print(f"{threads} threads, spins: {told(threads)}, {args.hogs} other processes")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times):.2f} ({min(times):.2f} – {max(times):.2f}) |")
    medians = [statistics.median(times) for times in seconds.values()]
    print(f"k = 0: {medians[1] / medians[0]:.2f} x, speculative: {medians[3] / medians[2]:.2f} x")


main()
