"""Write the demo pair in its shipped form: models, tokenizer, model cards, manifest and NOTICE.

With the output folder of a training it writes `target/`, `draft/` and `draft-distilled/`. Without
one it writes only the manifest and the NOTICE of the corpus.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from corpus import STDLIB

MODELS = ("target", "draft", "draft-distilled")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
GENERATION = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LIMIT = 16 * 2**20  # most bytes of a file of weights

ROLE = {
    "target": "The target of the pair: the model whose distribution speculative decoding keeps.",
    "draft": "A draft for the target beside it, trained on the same text from the true tokens.",
    "draft-distilled": "A draft of the same shape as `../draft`, distilled from the target: "
    "KL(target || draft) on the training text, mixed with some cross-entropy.",
}

CARD = """---
license: apache-2.0
language: code
pipeline_tag: text-generation
---
# specdec demo {name}

{role}

It exists so that `specdec` can be tried, tested and measured without a download. It writes
plausible-looking Python after a signature and a docstring; the code is often wrong. Do not use
it for anything else.

- Shape: Llama, {layers} layers, width {width}, {heads} heads ({kv} key/value), MLP {mlp}, tied
  embeddings; {parameters:,} parameters in bf16.
- Tokenizer: byte-level BPE of 4096; `<|endoftext|>` (id 0) ends a text, and none is added.
- Context: trained at {context} tokens; positions up to 2048.
- Training text: {unique:.1f} M tokens of Python and its manual, under PSF, BSD, MIT and ISC
  licences (`../NOTICE`, `../manifest.json`).
- Training: {best_step} of {steps} steps (the best by held-out loss) of {batch:,} tokens =
  {seen:.0f} M tokens, {seconds:.0f} s on one {device}, seed {seed}.
- Held-out loss: {loss:.3f} nats a token, {bpb:.3f} bits a byte.
{pair}
The held-out text is {modules} standard library modules, left out of the training text before
deduplication, with their tests; no 50-token run of theirs remains in it. The checkpoint kept is the
best one on that same text, so its loss is slightly optimistic. Made by `scripts/demo_pair` of the
project; figures by its `evaluate.py`, in fp32 from these weights.
"""

PAIR = """- Acceptance with `../target`: alpha = E sum min(p, q) = {alpha:.3f} at temperature 1
  (10th to 90th percentile of positions: {alpha_p10:.2f} to {alpha_p90:.2f}).
- Greedy agreement with it: {greedy_agreement:.1%} of positions.
"""

NOTICE = """Demo models, tokenizer and prompts of specdec

The models and the tokenizer in this folder were made for this project and are covered by its
licence. They were trained on the text listed below. prompts.jsonl quotes signatures and docstrings
of the CPython {version} standard library, which is

    Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved

and used under the licence reproduced at the end. No file of the other packages is redistributed
here; they are named with their licences as a matter of record. Versions and digests of the
archives are in manifest.json.

Training text
-------------
{sources}

The Python licence
------------------
{licence}
"""


def card(name: str, training: dict[str, Any], config: dict[str, Any], modules: int) -> str:
    plan, row = training["models"][name], training["figures"][name]
    return CARD.format(
        name=name,
        role=ROLE[name],
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        parameters=row["parameters"],
        context=training["context"],
        unique=training["train_tokens"] / 1e6,
        steps=plan["steps"],
        best_step=plan["best_step"],
        batch=plan["batch"],
        seen=plan["tokens_seen"] / 1e6,
        seconds=plan["seconds"],
        device=training["device"],
        seed=plan["seed"],
        loss=row["heldout_loss"],
        bpb=row["bits_per_byte"],
        pair=PAIR.format(**row) if "alpha" in row else "",
        modules=modules,
    )


def notice(archives: list[dict[str, str]]) -> str:
    rows = [f"{a['name']} {a['version']} - {a['licence']} - (c) {a['holder']}" for a in archives]
    licence = (STDLIB / "LICENSE.txt").read_text()
    start = licence.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    end = licence.index("BEOPEN.COM LICENSE AGREEMENT")
    return NOTICE.format(
        version=archives[0]["version"],
        sources="\n".join(rows),
        licence=licence[start:end].strip(),
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path, nargs="?", help="train.py's --out folder")
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--out", type=Path, default=Path("specdec_cli/demo"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    meta = json.loads((args.data / "meta.json").read_text())
    (args.out / "NOTICE").write_text(notice(meta["archives"]))
    manifest = {"corpus": meta}
    if args.training:
        training = json.loads((args.training / "training.json").read_text())
        for name in MODELS:
            source, folder = args.training / name, args.out / name
            weights = source / "model.safetensors"
            if weights.stat().st_size >= LIMIT:
                raise ValueError(f"{weights} is over {LIMIT} bytes")
            folder.mkdir(exist_ok=True)
            for path in (weights, source / "config.json"):
                shutil.copyfile(path, folder / path.name)
            for file in TOKENIZER:
                shutil.copyfile(args.data / "tokenizer" / file, folder / file)
            config = json.loads((source / "config.json").read_text())
            write_json(folder / "generation_config.json", GENERATION)
            text = card(name, training, config, len(meta["heldout_modules"]))
            (folder / "README.md").write_text(text)
        training.pop("samples", None)
        manifest["training"] = training
    write_json(args.out / "manifest.json", manifest)


if __name__ == "__main__":
    main()
