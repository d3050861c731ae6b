"""Put trained speculators among the bundled models: weights, config, model card, record, notice.

    python -m scripts.speculators.store DRAFT/speculator FP8/smollm2-draft
    python -m scripts.speculators.ship smollm2-draft=DRAFT --eval EVAL.json --stored STORED.json
      --texts TEXTS.json --target-name HuggingFaceTB/SmolLM2-135M-Instruct --licence Apache-2.0

DRAFT is the output of train.py. EVAL.json is the result of evaluate.py for it, with a speculator's
folder as the key of its runs, and with `form` if that is not the plain one. STORED.json is the
result for DRAFT/speculator and FP8/smollm2-draft, in this order. TEXTS.json has the sums over the
records of texts.py. Writes `specdec_cli/demo/NAME`, in fp8 as store.py has it, and the entries of
`manifest-speculators.json` there. A speculator's tokenizer is its target's, and is not copied.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from scripts.speculators import commands
from scripts.speculators.store import WEIGHTS, plain_tensors, write

DEMO = Path(__file__).parents[2] / "specdec_cli" / "demo"
RECORD = DEMO / "manifest-speculators.json"
LIMIT = 16_000_000  # most bytes of a file of weights
# The keys of a config from which a draft's is built. A converted target's config has many more.
KEPT = (
    "architectures model_type dtype vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim hidden_act max_position_embeddings "
    "rms_norm_eps rope_parameters attention_bias mlp_bias tie_word_embeddings bos_token_id "
    "eos_token_id pad_token_id"
).split()
TRAINED = (
    "kind seed minutes seconds step tokens tokens_per_s epochs texts text_tokens lr links depth "
    "inner block rank start parameters accuracy torch transformers device_name"
).split()

WROTE = "them, to prompts that it drew itself and to requests about its own passages"

CARD = """---
license: {licence}
pipeline_tag: text-generation
---
# specdec {name}

{form}
It holds {parameters:,} parameters, and no embedding, no head and no tokenizer: it borrows the
target's. Its large matrices are in fp8 (e4m3, a scale for each row), the rest is in bf16.

- Training text: {text_tokens:.1f} M tokens with the prompts; the target wrote
  {wrote};
  none shares 13 tokens with {benchmark}.
- Training: {steps} steps over {tokens:.1f} M tokens, {seconds:.0f} s on one {device}, seed {seed}.
{start}- Agreement with the target's first choice on held-out texts{links}: {accuracy} %.
- In fp8 it has {ratio:.3f} ({ends}) times the tokens a round that it had in
  bf16, k = {stored_k}, paired over {stored_prompts} prompts, greedy, fp32 on a CPU.
- Measured on {benchmark}, never trained on: {prompts} prompts, greedy, bf16, at most
  {new_tokens} tokens, {measured_form}:

| k | {ks} |
|---|{rule}|
| tokens a round | {rounds} |
| 95 % interval | {intervals} |

Made by `scripts/speculators` of the project, from the target's own layers as a start. The target is
{licence}; `../NOTICE` says so.
"""
START = """\
  It began with weights of {seconds:.0f} s over {tokens:.1f} M tokens, on {text_tokens:.1f} M
  tokens of other texts.
"""
FORMS = {
    "eagle3": "An EAGLE-3 head (Li et al., arXiv 2503.01840) with one layer, in the form of "
    "speculators, for\n{target}.",
    "mtp": "A module for multi-token prediction (arXiv 2412.19437), in the form of "
    "speculators, for\n{target}.",
    "dspark": "A {depth}-layer DSpark drafter (DeepSpec), in SpecForge's form, for\n{target}.",
    "peagle": "A {depth}-layer P-EAGLE head, in the form of speculators, for\n{target}.",
    "pard": "A {depth}-layer PARD draft (arXiv 2504.18583) for\n{target}.",
    "dflash": "A {depth}-layer DFlash drafter (z-lab, arXiv 2602.06036) for\n{target}.",
    "draft": "A standalone draft with {depth} layers for {target}.",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("given", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument(
        "--stored",
        type=Path,
        action="append",
        required=True,
        help="what evaluate.py wrote of a plain one and its form in fp8",
    )
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--benchmark", default="Spec-Bench", help="whose prompts judge it")
    parser.add_argument("--wrote", help="what the target wrote", default=WROTE)
    parser.add_argument("--target-name", required=True)
    parser.add_argument("--licence", required=True)
    return parser.parse_args()


def beside_plain(name: str, evaluations: list[Path]) -> dict[str, Any]:
    """The run of a speculator in fp8, compared with the plain one."""
    for path in evaluations:
        for key, runs in json.loads(path.read_text())["runs"].items():
            for run in runs:
                if Path(key).name == name and "beside_first" in run:
                    ratio, ends = run["beside_first"]
                    told = {"ratio_to_bf16": ratio, "interval": ends}
                    return {"k": run["k"], "prompts": run["prompts"], **told}
    raise SystemExit(f"none of --stored has runs of {name} in fp8 beside the plain one")


def file_record(weights: Path) -> dict[str, Any]:
    size = weights.stat().st_size
    if size >= LIMIT:
        raise SystemExit(f"{weights} has {size} bytes, {LIMIT} are the limit")
    return {"bytes": size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}


def record_of(
    folder: Path,
    runs: list[dict[str, Any]],
    stored: dict[str, Any],
    texts: dict[str, Any],
    benchmark: str,
    records: dict[str, Any],
) -> dict[str, Any]:
    """The record of a speculator: its texts, training, and acceptance by k. `records` have the
    training of the speculator that it began with, if that is a bundled one."""
    read = json.loads((folder / "training.json").read_text())
    training = {key: read[key] for key in TRAINED if read.get(key) is not None}
    if before := records.get(training.get("start", "").removeprefix("demo:")):
        training["before"] = before["training"]
    return {
        "fp8": stored,
        "texts": texts,
        "training": training,
        "benchmark": benchmark,
        "measured": sorted(
            ({k: v for k, v in run.items() if k not in ("seconds", "counts")} for run in runs),
            key=lambda run: int(run["k"]),
        ),
    }


def begun_with(before: dict[str, Any]) -> str:
    seen, texts = before["tokens"] / 1e6, before["text_tokens"] / 1e6
    return START.format(seconds=before["seconds"], tokens=seen, text_tokens=texts)


def card(
    name: str, found: dict[str, Any], args: argparse.Namespace, evaluated: dict[str, Any]
) -> str:
    training, runs = found["training"], found["measured"]
    form = FORMS[training["kind"]].format(target=args.target_name, depth=training["depth"])
    count, stored = len(training["accuracy"]), found["fp8"]
    return CARD.format(
        name=name,
        wrote=args.wrote,
        benchmark=args.benchmark,
        licence=args.licence.lower(),
        form=form,
        parameters=training["parameters"],
        text_tokens=training["text_tokens"] / 1e6,
        steps=training["step"],
        tokens=training["tokens"] / 1e6,
        seconds=training["seconds"],
        device=training["device_name"],
        seed=training["seed"],
        start=begun_with(training["before"]) if "before" in training else "",
        links=f", by position 1 to {count}" if count > 1 else "",
        accuracy=", ".join(f"{100 * a:.1f}" for a in training["accuracy"]),
        ratio=stored["ratio_to_bf16"],
        ends="{:.3f}–{:.3f}".format(*stored["interval"]),
        stored_k=stored["k"],
        stored_prompts=stored["prompts"],
        prompts=runs[0]["prompts"],
        new_tokens=evaluated["new_tokens"],
        measured_form=evaluated.get("form", "before it was stored in fp8"),
        ks=" | ".join(str(run["k"]) for run in runs),
        rule="|".join(["---"] * len(runs)),
        rounds=" | ".join(f"{run['tokens_a_round']:.2f}" for run in runs),
        intervals=" | ".join("{:.2f}–{:.2f}".format(*run["interval"]) for run in runs),
    )


def main() -> None:
    args = parse()
    evaluated, texts = json.loads(args.eval.read_text()), json.loads(args.texts.read_text())
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name, folder in (item.split("=", 1) for item in args.given):
        source, target = Path(folder) / "speculator", DEMO / name
        runs = next(r for key, r in evaluated["runs"].items() if Path(key).parts[-2:] ==
                    (Path(folder).name, "speculator"))  # fmt: skip
        stored = beside_plain(name, args.stored)
        found = record_of(Path(folder), runs, stored, texts, args.benchmark, records)
        config = json.loads((source / "config.json").read_text())
        if found["training"]["kind"] == "draft":
            config = {key: config[key] for key in KEPT if key in config}
        elif "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = args.target_name
        write(target, "fp8", plain_tensors(source)[0], config)
        found = file_record(target / WEIGHTS) | found
        (target / "README.md").write_text(card(name, found, args, evaluated))
        records[name] = {"target": args.target_name, "licence": args.licence} | found
    RECORD.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    commands.run(main)
