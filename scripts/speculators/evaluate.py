"""Tokens a round and acceptance by position of speculators, in the engine, greedily.

    python -m scripts.speculators.evaluate --target MODEL --prompts FILE OUT/speculator ngram

For each speculator and each k: tokens a round with its 95 % interval over prompts, over all prompts
and by category, and the share of rounds that accepted each position; for all but the first
speculator also the ratio to the first, paired over prompts. train.py leaves its log beside a
speculator's folder; a curve through it estimates the gain of a longer training. Results are written
to the file of `--json` as they come. Runs in that file are not repeated.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer

from scripts.speculators import commands
from scripts.speculators.fit import outlook, read_log
from scripts.speculators.target import named
from specdec_cli.backends import native
from specdec_cli.core.types import Sequence
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.experiment.generation import Job, requests, tokenised
from specdec_cli.experiment.statistics.stats import SumRatio, interval
from specdec_cli.prompts import as_conversations, load_prompts
from specdec_cli.recipe import load_recipe
from specdec_cli.recipe.choices.registry import METHODS, weights_from
from specdec_cli.recipe.sections import DataSection


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# Options that have to be the same for all runs in a file.
SAME = ("target", "new_tokens", "prompts", "every", "set")
FEW = 8  # too few prompts for an interval


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("speculators", nargs="+", help="folders, or methods without a draft")
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="never trained on")
    parser.add_argument("--every", type=int, default=1, help="take every so many-th prompt")
    parser.add_argument("--k", type=numbers, default=[5, 3, 6, 4, 2, 1])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--minutes", type=float, help="begin no run after that")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def settings_of(args: argparse.Namespace, speculator: str, k: int) -> dict[str, Any]:
    """The recipe's keys for a speculator."""
    sets: dict[str, Any] = {
        "target.model": args.target,
        "sampling.max_new_tokens": args.new_tokens,
        "run.batch_size": args.batch,
        "speculation.num_speculative_tokens": k,
    }
    if speculator in METHODS and weights_from(speculator) != "draft":
        sets["speculation.method"] = speculator
    else:
        sets["draft.model"] = speculator
        if (Path(speculator) / "config.json").exists() and is_bare_model(Path(speculator)):
            sets["draft.share"] = ["embeddings", "lm_head"]
    return sets | {k: yaml.safe_load(v) for k, v in (item.split("=", 1) for item in args.set)}


def is_bare_model(folder: Path) -> bool:
    """True if a folder holds a whole model, except for the embedding and the head."""
    classes = json.loads((folder / "config.json").read_text()).get("architectures") or []
    if not any(name.endswith("ForCausalLM") for name in classes):
        return False
    with safe_open(folder / "model.safetensors", "pt") as stored:
        return not any("embed" in name for name in stored.keys())


def rounds_of(seqs: list[Sequence]) -> SumRatio:
    """Tokens a round, of all rounds."""
    rounds = [len(s.accepted_per_round) + s.rounds_without_proposal for s in seqs]
    tokens = [r + sum(s.accepted_per_round) for r, s in zip(rounds, seqs, strict=True)]
    pairs = [(float(t), float(r)) for t, r in zip(tokens, rounds, strict=True)]
    return SumRatio(np.array(pairs).reshape(-1, 2), (1, -1))


def with_interval(measure: SumRatio) -> tuple[float, list[float] | None]:
    """A measure and its 95 % interval over prompts, rounded; None for few prompts."""
    ends = interval(measure) if len(measure.columns) >= FEW else None
    return round(measure.value, 4), [round(e, 4) for e in ends] if ends else None


def tokens_a_round(seqs: list[Sequence]) -> dict[str, Any]:
    """Tokens a round and the interval."""
    measure = rounds_of([s for s in seqs if s.accepted_per_round or s.rounds_without_proposal])
    value, ends = with_interval(measure)
    rounds = int(measure.columns[:, 1].sum())
    return {"tokens_a_round": value, "interval": ends, "prompts": len(seqs), "rounds": rounds}


def positions(seqs: list[Sequence], k: int) -> list[float]:
    """For n = 1..k, the share of rounds that accepted n tokens among those that proposed n."""
    pairs = [
        pair for s in seqs for pair in zip(s.proposed_per_round, s.accepted_per_round, strict=True)
    ]
    found = []
    for i in range(k):
        long = [accepted for proposed, accepted in pairs if proposed > i]
        found.append(round(sum(a > i for a in long) / max(1, len(long)), 4))
    return found


def measured(job: Job, seqs: list[Sequence], k: int) -> dict[str, Any]:
    """The figures of one run, over all prompts and by category."""
    category = {prompt.index: prompt.category for prompt in job.prompts}
    by_category: dict[str, list[Sequence]] = {}
    ran = [s for s in seqs if s.error is None]
    for seq in ran:
        by_category.setdefault(category[seq.index] or "", []).append(seq)
    found = {"k": k, **tokens_a_round(ran), "accepted": positions(ran, k)}
    found["tokens"] = sum(s.num_new_tokens for s in ran)
    found["refused"] = len(seqs) - len(ran)
    if len(by_category) > 1:
        found["categories"] = {
            name: {**tokens_a_round(some), "accepted": positions(some, k)}
            for name, some in sorted(by_category.items())
        }
    return found


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path is None:
        return
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """The results in the file of `--json`; without one, results without a run. Raises `ValueError`
    for a file whose runs are not comparable with those of this command."""
    asked = {name: getattr(args, name) for name in SAME}
    if args.json is None or not args.json.exists():
        return {**asked, "runs": {}}
    kept: dict[str, Any] = json.loads(args.json.read_text())
    for name, value in asked.items():
        if kept.get(name, value) != value:  # older files lack some
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{args.json} has runs with {option} {kept[name]}, and not with {value}: go on "
                "with the same, or name another --json"
            )
    return asked | kept


def row(found: dict[str, Any]) -> str:
    known = f"{found['prompts']} prompt{'s' * (found['prompts'] > 1)}"
    if found["interval"] is not None:
        low, high = found["interval"]
        known = f"{low:.2f}-{high:.2f}"
    shares = " ".join(f"{100 * x:.0f}" for x in found["accepted"])
    if "beside_first" in found:
        ratio, ends = found["beside_first"]
        known += f"; {ratio:.4f} of the first's"
        known += " ({:.4f}-{:.4f})".format(*ends) if ends else ""
    return f"{found['tokens_a_round']:.3f} ({known})  accepted at 1.. {shares} %"


def main() -> None:
    args = parse()
    began = time.perf_counter()
    prompts = load_prompts(DataSection(path=args.prompts)).prompts[:: args.every]
    results = begun(args)
    firsts: dict[int, SumRatio] = {}  # the first speculator's, by k
    for speculator in args.speculators:
        runs = results["runs"].setdefault(speculator, [])
        if speculator == args.speculators[0]:
            firsts |= {run["k"]: SumRatio(np.array(run["counts"], float), (1, -1)) for run in runs}
        missing = [k for k in args.k if k not in {run["k"] for run in runs}]
        if not missing:
            continue
        planned = plan(load_recipe(None, settings_of(args, speculator, max(args.k))))
        folder, file = named(planned.target.place)
        has_template = AutoTokenizer.from_pretrained(folder, **file).chat_template
        job = tokenised(
            native,
            native.prepared(planned),
            as_conversations(prompts, "on" if has_template else "auto"),
        )
        engine = build(planned, job.longest_prompt)
        for k in missing:
            if args.minutes is not None and time.perf_counter() - began > 60 * args.minutes:
                print("the time is over", flush=True)
                break
            started = time.perf_counter()
            result = engine.run(requests(job), k, planned.params)
            found = measured(job, result.seqs, k)
            found["seconds"] = round(time.perf_counter() - started, 2)
            own = rounds_of(result.seqs)
            found["counts"] = own.columns.astype(int).tolist()  # tokens and rounds of each prompt
            if speculator == args.speculators[0]:
                firsts[k] = own
            elif k in firsts:
                found["beside_first"] = with_interval(own.over(firsts[k]))
            runs.append(found)
            write(args.json, results)
            print(f"{Path(speculator).name} k={k}: {row(found)}", flush=True)
            for name, one in found.get("categories", {}).items():
                print(f"    {name:20} {row(one)}", flush=True)
        engine.forget_rounds()
        del engine
        log = Path(speculator).parent / "log.jsonl"
        if log.exists():
            lines = outlook(read_log(log))
            results.setdefault("outlook", {})[speculator] = lines
            print("\n".join(lines), flush=True)
            write(args.json, results)


if __name__ == "__main__":
    commands.run(main)
