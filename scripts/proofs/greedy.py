"""fp32 greedy output on CPU equals transformers' `generate`, token for token, on the demo pair.

    python scripts/proofs/greedy.py --jobs 2

Runs every bundled prompt through every combination of proposal length, draft and batch size, and
compares token ids with the target decoded alone by transformers. Then compares the proposed and
accepted counts of every round with transformers' assisted generation. Prints a table; exits 1 on
any mismatch. The whole takes hours of one core; `--prompts`, `--k`, `--drafts` and `--batch`
select a part.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

DRAFTS: dict[str, dict[str, object]] = {
    "demo": {"draft.model": "demo:draft"},
    "distilled": {"draft.model": "demo:draft-distilled"},
    "unrelated": {"draft.model": "demo:draft", "draft.load_format": "dummy"},
    "same": {"draft.model": "demo:target"},
}


@dataclass(frozen=True)
class Case:
    k: int
    draft: str
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
    """What the target writes by itself; stops at EOS like the engine."""
    from tests.support import greedy_reference

    model, tokenizer = oracle()
    eos = model.generation_config.eos_token_id
    return [greedy_reference(model, tokenizer(t)["input_ids"], new_tokens, eos) for t in texts]


def run_engine(case: Case) -> list[Any]:
    """The engine's finished sequences for a case."""
    import torch

    from specdec_cli.engine.build import build, plan
    from specdec_cli.engine.loop import Request
    from specdec_cli.recipe import load_recipe

    torch.set_num_threads(1)
    overrides: dict[str, object] = {
        "target.model": "demo:target",
        "run.device": "cpu",
        "run.batch_size": case.batch_size,
        "speculation.num_speculative_tokens": case.k,
        "sampling.max_new_tokens": case.new_tokens,
        "sampling.temperature": 0.0,
        **DRAFTS[case.draft],
    }
    planned = plan(load_recipe(None, overrides))
    ids = [tuple(planned.tokenizer.encode(text)) for text in read_prompts(case.prompts)]
    engine = build(planned, max(map(len, ids)))
    requests = [Request(i, prompt) for i, prompt in enumerate(ids)]
    return engine.run(requests, planned.k, planned.params).seqs


def check(case: Case, want: list[list[int]]) -> dict[str, Any]:
    """Run a case; how many prompts differ, and what was accepted."""
    started = time.perf_counter()
    seqs = run_engine(case)
    differ = [s.index for s, ids in zip(seqs, want, strict=True) if s.output_ids != ids]
    rounds = sum(len(s.accepted_per_round) for s in seqs)
    accepted = sum(map(sum, (s.accepted_per_round for s in seqs)))
    return {
        "k": case.k,
        "draft": case.draft,
        "batch": case.batch_size,
        "tokens": sum(len(s.output_ids) for s in seqs),
        "differ": differ,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "seconds": round(time.perf_counter() - started, 1),
    }


def check_assisted(k: int, count: int, new_tokens: int) -> dict[str, Any]:
    """Rounds of the engine against those of transformers, EOS ignored in both."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdec_cli.demo import demo_path
    from specdec_cli.engine.build import build, plan
    from specdec_cli.engine.loop import Request
    from specdec_cli.recipe import load_recipe
    from tests.support import assisted_rounds

    texts = read_prompts(count)
    overrides = {
        "target.model": "demo:target",
        "run.device": "cpu",
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": new_tokens,
        "sampling.ignore_eos": True,
        **DRAFTS["demo"],
    }
    planned = plan(load_recipe(None, overrides))
    ids = [tuple(planned.tokenizer.encode(text)) for text in texts]
    engine = build(planned, max(map(len, ids)))
    seqs = engine.run([Request(i, p) for i, p in enumerate(ids)], k, planned.params).seqs
    ours = [list(zip(s.proposed_per_round, s.accepted_per_round, strict=True)) for s in seqs]
    model, _ = oracle()
    folder = demo_path(str(DRAFTS["demo"]["draft.model"]))
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = [assisted_rounds(model, assistant, list(p), k, new_tokens)[1] for p in ids]
    return {
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
    parser.add_argument("--drafts", nargs="+", default=["demo", "unrelated", "same"])
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
        # The longest first, so that no core waits for one of them at the end.
        cases = sorted(
            (
                Case(k, draft, b, args.prompts, args.new_tokens)
                for k in args.k
                for draft in args.drafts
                for b in args.batch
            ),
            key=lambda c: (c.draft != "same", c.batch_size, c.draft != "unrelated", -c.k),
        )
        assisted = [
            pool.submit(check_assisted, k, args.assisted_prompts, args.new_tokens)
            for k in args.k
            if k and args.assisted_prompts
        ]
        results = list(pool.map(check, cases, [want] * len(cases)))
    bad = 0
    print("  k  draft      batch  tokens  length  seconds  prompts that differ")
    for r in sorted(results, key=lambda r: (r["draft"], r["batch"], r["k"])):
        bad += len(r["differ"])
        print(
            f"{r['k']:3}  {r['draft']:<9}  {r['batch']:5}  {r['tokens']:6}  "
            f"{r['mean_acceptance_length']:6.3f}  {r['seconds']:7}  {r['differ'] or 'none'}"
        )
    print(f"{len(results)} cases x {args.prompts} prompts: {bad} mismatches")
    for future in assisted:
        r = future.result()
        bad += len(r["differ"])
        print(
            f"assisted k={r['k']}: {r['rounds']} rounds, {r['accepted']} accepted, "
            f"prompts that differ: {r['differ'] or 'none'}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
