"""fp32 greedy output on CPU equals transformers' `generate`, token for token, on the demo pair.

    python scripts/proofs/greedy.py --jobs 2

Runs every bundled prompt through every combination of proposal length, proposer (a draft, prompt
lookup as "ngram", or with `--proposers` a bundled head) and batch size. Compares token ids with
transformers' `generate` on the target alone, then the proposed and accepted counts of every round
with transformers' assisted generation and prompt lookup. Prints a table; exits 1 on any mismatch.
Takes about an hour of one core; `--prompts`, `--k`, `--proposers` and `--batch` select a part.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

PROPOSERS: dict[str, dict[str, object]] = {
    "demo": {"draft.model": "demo:draft"},
    "distilled": {"draft.model": "demo:draft-distilled"},
    "unrelated": {"draft.model": "demo:draft", "draft.load_format": "dummy"},
    "same": {"draft.model": "demo:target"},
    "ngram": {"speculation.method": "ngram", "speculation.ngram_max": 3},
    **{
        name: {"draft.model": f"demo:{name}"}
        for name in ("eagle3", "mtp", "dspark", "dflash", "peagle")
    },
}
LONGEST = 3  # n-gram length of transformers' prompt lookup, as in PROPOSERS


@dataclass(frozen=True)
class Case:
    k: int
    proposer: str
    batch_size: int
    prompts: int
    new_tokens: int


def read_prompts(count: int) -> list[str]:
    from specdec_cli.demo import demo_path

    lines = demo_path("demo:prompts").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def oracle() -> tuple[Any, Any]:
    """transformers' own model and tokenizer of the demo target, fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec_cli.demo import demo_path

    torch.set_num_threads(1)
    folder = demo_path("demo:target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def generate_alone(texts: list[str], new_tokens: int) -> list[list[int]]:
    """The tokens of the target alone. It stops at EOS like the engine."""
    from tests.support import greedy_reference

    model, tokenizer = oracle()
    eos = model.generation_config.eos_token_id
    return [greedy_reference(model, tokenizer(t)["input_ids"], new_tokens, eos) for t in texts]


def run_engine(case: Case) -> list[Any]:
    """The engine's finished sequences for a case."""
    import torch

    from specdec_cli.core.types import Request
    from specdec_cli.engine.build import build
    from specdec_cli.engine.plan import plan
    from specdec_cli.recipe import load_recipe

    torch.set_num_threads(1)
    overrides: dict[str, object] = {
        "target.model": "demo:target",
        "run.device": "cpu",
        "run.batch_size": case.batch_size,
        "speculation.num_speculative_tokens": case.k,
        "sampling.max_new_tokens": case.new_tokens,
        "sampling.temperature": 0.0,
        **PROPOSERS[case.proposer],
    }
    planned = plan(load_recipe(None, overrides))
    ids = [tuple(planned.tokenizer.encode(text)) for text in read_prompts(case.prompts)]
    engine = build(planned, max(map(len, ids)))
    requests = [Request(i, prompt) for i, prompt in enumerate(ids)]
    return engine.run(requests, planned.k, planned.params).seqs


def check(case: Case, want: list[list[int]]) -> dict[str, Any]:
    """Run a case. Returns its row: the prompts that differ, and the mean acceptance length."""
    started = time.perf_counter()
    seqs = run_engine(case)
    differ = [s.index for s, ids in zip(seqs, want, strict=True) if s.output_ids != ids]
    rounds = sum(len(s.accepted_per_round) for s in seqs)
    accepted = sum(map(sum, (s.accepted_per_round for s in seqs)))
    return {
        "k": case.k,
        "proposer": case.proposer,
        "batch": case.batch_size,
        "tokens": sum(len(s.output_ids) for s in seqs),
        "differ": differ,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "seconds": round(time.perf_counter() - started, 1),
    }


def check_rounds(proposer: str, k: int, count: int, new_tokens: int) -> dict[str, Any]:
    """Compare rounds of the engine with those of transformers, EOS ignored in both.

    proposer: "demo" against assisted generation, "ngram" against prompt lookup.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from specdec_cli.core.types import Request
    from specdec_cli.demo import demo_path
    from specdec_cli.engine.build import build
    from specdec_cli.engine.plan import plan
    from specdec_cli.recipe import load_recipe
    from tests.support import assisted_rounds, lookup_rounds

    texts = read_prompts(count)
    overrides = {
        "target.model": "demo:target",
        "run.device": "cpu",
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": new_tokens,
        "sampling.ignore_eos": True,
        **PROPOSERS[proposer],
    }
    planned = plan(load_recipe(None, overrides))
    ids = [tuple(planned.tokenizer.encode(text)) for text in texts]
    engine = build(planned, max(map(len, ids)))
    seqs = engine.run([Request(i, p) for i, p in enumerate(ids)], k, planned.params).seqs
    ours = [list(zip(s.proposed_per_round, s.accepted_per_round, strict=True)) for s in seqs]
    model, _ = oracle()
    if proposer == "ngram":
        theirs = [lookup_rounds(model, list(p), k, LONGEST, new_tokens)[1] for p in ids]
    else:
        folder = demo_path(str(PROPOSERS[proposer]["draft.model"]))
        assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        theirs = [assisted_rounds(model, assistant, list(p), k, new_tokens)[1] for p in ids]
    return {
        "proposer": proposer,
        "k": k,
        "rounds": sum(map(len, theirs)),
        "accepted": sum(a for rounds in theirs for _, a in rounds),
        "differ": [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=list(range(7)))
    parser.add_argument(
        "--proposers",
        nargs="+",
        choices=PROPOSERS,
        default=["demo", "unrelated", "same", "ngram"],
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--assisted-prompts", type=int, default=40)
    args = parser.parse_args()
    texts = read_prompts(args.prompts)
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    with pool:
        started = time.perf_counter()
        step = -(-len(texts) // args.jobs)
        parts = [texts[i : i + step] for i in range(0, len(texts), step)]
        want = [
            ids
            for part in pool.map(generate_alone, parts, [args.new_tokens] * len(parts))
            for ids in part
        ]
        print(
            f"reference: {sum(map(len, want))} tokens of {len(want)} prompts "
            f"in {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        # The longest cases come first, so that no core waits for a long one at the end.
        cases = sorted(
            (
                Case(k, proposer, b, args.prompts, args.new_tokens)
                for k in args.k
                for proposer in args.proposers
                for b in args.batch
            ),
            key=lambda c: (c.proposer != "same", c.batch_size, c.proposer != "unrelated", -c.k),
        )
        rounds = [
            pool.submit(check_rounds, proposer, k, args.assisted_prompts, args.new_tokens)
            for proposer in ("demo", "ngram")
            for k in args.k
            if k and args.assisted_prompts and proposer in args.proposers
        ]
        results = list(pool.map(check, cases, [want] * len(cases)))
    bad = 0
    print("  k  proposer   batch  tokens  length  seconds  prompts that differ")
    for r in sorted(results, key=lambda r: (r["proposer"], r["batch"], r["k"])):
        bad += len(r["differ"])
        print(
            f"{r['k']:3}  {r['proposer']:<9}  {r['batch']:5}  {r['tokens']:6}  "
            f"{r['mean_acceptance_length']:6.3f}  {r['seconds']:7}  {r['differ'] or 'none'}"
        )
    print(f"{len(results)} cases x {args.prompts} prompts: {bad} mismatches")
    for future in rounds:
        r = future.result()
        bad += len(r["differ"])
        print(
            f"rounds of {r['proposer']} k={r['k']}: {r['rounds']}, {r['accepted']} accepted, "
            f"prompts that differ: {r['differ'] or 'none'}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
