"""Checks of the engine on a GPU, with the demo models and every method.

    python scripts/proofs/gpu.py [--graphs auto|off] [--checks fp32,bf16,sampled]

1. fp32: greedy token ids equal transformers' `generate` on the same device.
2. bf16: every first divergence from the target alone is a near-tie: in fp32 the two best logits
   there are closer than the noise of bf16 between passes of different width.
3. fp32 sampling: the same tokens for every batch size, and when repeated.

Rounds are CUDA graphs. `--graphs off` launches them pass by pass. Prints a table for each check and
exits 1 if one fails.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_cli.core.types import Request, Sequence
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.recipe import load_recipe
from tests.support import greedy_reference

DEVICE = "cuda"
PROMPTS, NEW_TOKENS = 40, 64
PROPOSERS: dict[str, dict[str, object]] = {
    "demo:draft": {},
    "demo:target": {"draft.model": "demo:target"},
    "demo:eagle3": {"draft.model": "demo:eagle3", "speculation.method": "eagle3"},
    "demo:mtp": {"draft.model": "demo:mtp", "speculation.method": "mtp_module"},
    "demo:dspark": {"draft.model": "demo:dspark", "speculation.method": "dspark"},
    "demo:dflash": {"draft.model": "demo:dflash", "speculation.method": "dflash"},
    "demo:peagle": {"draft.model": "demo:peagle", "speculation.method": "peagle"},
    "n-grams": {"draft.model": None, "speculation.method": "ngram"},
}


def prompts() -> list[list[int]]:
    lines = demo_path("demo:prompts").read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(demo_path("demo:target"))
    # Every fifth prompt is used, so that all categories take part.
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[::5][:PROMPTS]]


def run(
    asked: list[list[int]], k: int, batch: int, dtype: str, graphs: str, **more: object
) -> list[Sequence]:
    """The engine's finished sequences."""
    overrides: dict[str, object] = {
        "target.model": "demo:target",
        "draft.model": "demo:draft",
        "target.dtype": dtype,
        "draft.dtype": dtype,
        "run.device": DEVICE,
        "run.batch_size": batch,
        "run.cuda_graphs": graphs,
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS,
        "sampling.ignore_eos": True,
        **more,
    }
    if overrides["draft.model"] is None:  # a draft's other keys would need a model
        overrides = {key: v for key, v in overrides.items() if not key.startswith("draft.")}
    planned = plan(load_recipe(None, overrides))
    engine = build(planned, max(map(len, asked)))
    requests = [Request(i, tuple(p)) for i, p in enumerate(asked)]
    return engine.run(requests, planned.k, planned.params).seqs


def target(dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(demo_path("demo:target"), dtype=dtype)
    return model.to(DEVICE).eval()


def alone(asked: list[list[int]], dtype: torch.dtype) -> list[list[int]]:
    """Tokens of transformers' `generate` on the target alone."""
    model = target(dtype)
    return [greedy_reference(model, prompt, NEW_TOKENS) for prompt in asked]


def equal_in_fp32(asked: list[list[int]], graphs: str) -> int:
    want, bad = alone(asked, torch.float32), 0
    for name, proposer in PROPOSERS.items():
        for k in (0, 1, 3, 6):
            for batch in (1, 8):
                started = time.perf_counter()
                seqs = run(asked, k, batch, "float32", graphs, **proposer)
                differ = [s.index for s, w in zip(seqs, want, strict=True) if s.output_ids != w]
                bad += len(differ)
                rounds = [a for s in seqs for a in s.accepted_per_round]
                length = 1 + sum(rounds) / len(rounds) if rounds else 1.0
                seconds = time.perf_counter() - started
                print(
                    f"fp32 {name:<11} k={k} b={batch}: {length:.3f} tokens a round, "
                    f"{seconds:.1f} s, differ: {differ or 'none'}",
                    flush=True,
                )
    return bad


@torch.inference_mode()
def width_noise(asked: list[list[int]], width: int) -> float:
    """The largest change of a bf16 logit between a one-token pass and a pass over `width`
    tokens."""
    model, worst = target(torch.bfloat16), 0.0
    for prompt in asked[:16]:
        ids = torch.tensor([prompt], device=DEVICE)
        for cut in range(len(prompt) - width, 0, -width)[:2]:
            wide_cache = model(ids[:, :cut], use_cache=True).past_key_values
            wide = model(ids[:, cut : cut + width], past_key_values=wide_cache).logits[0]
            cache = model(ids[:, :cut], use_cache=True).past_key_values
            for i in range(width):
                step = model(ids[:, cut + i : cut + i + 1], past_key_values=cache)
                cache = step.past_key_values
                worst = max(worst, float((step.logits[0, 0] - wide[i]).abs().max()))
    return worst


@torch.inference_mode()
def gap_at_parting(
    exact: Any, prompt: list[int], text: list[int], other: list[int]
) -> float | None:
    """The gap at the first place where two texts differ: `exact`'s logit of its best token less
    that of the less likely of the texts' two tokens. None for equal texts."""
    at = next((i for i in range(NEW_TOKENS) if text[i] != other[i]), None)
    if at is None:
        return None
    logits = exact(torch.tensor([prompt + other[:at]], device=DEVICE)).logits[0, -1]
    return float(logits.max() - torch.minimum(logits[text[at]], logits[other[at]]))


def near_ties_in_bf16(asked: list[list[int]], graphs: str) -> int:
    want, exact, bad = alone(asked, torch.bfloat16), target(torch.float32), 0
    noises = {width: width_noise(asked, width) for width in (2, 4, 6, 8)}
    for name, proposer in PROPOSERS.items():
        for k in (0, 1, 3, 5):
            for batch in (1, 8):
                noise = noises[max(2, k + 1, batch)]
                seqs = run(asked, k, batch, "bfloat16", graphs, **proposer)
                found = (
                    gap_at_parting(exact, asked[seq.index], seq.output_ids, other)
                    for seq, other in zip(seqs, want, strict=True)
                )
                gaps = [gap for gap in found if gap is not None]
                unexplained = sum(gap > noise for gap in gaps)
                bad += unexplained
                print(
                    f"bf16 {name:<11} k={k} b={batch}: {len(gaps)} of {len(asked)} diverge, "
                    f"largest gap {max(gaps, default=0):.4f}, width noise {noise:.4f}, unexplained "
                    f"{unexplained}",
                    flush=True,
                )
    return bad


def sampling_repeats(asked: list[list[int]], graphs: str) -> int:
    bad = 0
    for name, proposer in PROPOSERS.items():
        hot = {"sampling.temperature": 0.8, "sampling.top_p": 0.95, **proposer}
        first, again, wide = (
            [s.output_ids for s in run(asked, 4, batch, "float32", graphs, **hot)]
            for batch in (1, 1, 8)
        )
        repeats = sum(a != b for a, b in zip(first, again, strict=True))
        batches = sum(a != b for a, b in zip(first, wide, strict=True))
        bad += repeats + batches
        print(
            f"sampled fp32 {name}: {repeats} differ when repeated, {batches} between batch 1 and 8",
            flush=True,
        )
    return bad


CHECKS = {"fp32": equal_in_fp32, "bf16": near_ties_in_bf16, "sampled": sampling_repeats}


def named(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        raise argparse.ArgumentTypeError(f"no check {unknown[0]!r}; {', '.join(CHECKS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--checks", type=named, default=list(CHECKS), help="NAME,...")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: these checks need a GPU, and torch finds none")
    asked = prompts()
    print(torch.cuda.get_device_name(), torch.__version__, f"{len(asked)} prompts x {NEW_TOKENS}")
    bad = sum(CHECKS[name](asked, given.graphs) for name in given.checks)
    print("all hold" if not bad else f"{bad} do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
