"""Times the demo pair on a CPU against transformers: plain and speculative decoding, alternating.

fp32, batch 1, greedy, end-of-sequence ignored. Prints median seconds (least to most) over repeats.

    python scripts/bench/cpu.py --prompts 4 --tokens 128 --repeats 5
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from specdec_cli import demo
from specdec_cli.core.types import Request
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.prompts import read_prompts
from specdec_cli.recipe import load_recipe

TARGET, DRAFT = "demo:target", "demo:draft"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--k", type=int, default=4)
    return parser.parse_args()


def theirs(tokens: int, k: int) -> tuple[Callable[[list[int]], list[int]], ...]:
    """transformers' `generate`, and the same with the draft as its assistant."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(demo.demo_path(name), dtype=torch.float32).eval()
        for name in (TARGET, DRAFT)
    )
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
    args = arguments()
    recipe = load_recipe(
        None,
        {
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

    generate, assisted = theirs(args.tokens, args.k)
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
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times):.2f} ({min(times):.2f} – {max(times):.2f}) |")
    medians = [statistics.median(times) for times in seconds.values()]
    print(f"k = 0: {medians[1] / medians[0]:.2f} x, speculative: {medians[3] / medians[2]:.2f} x")


main()
