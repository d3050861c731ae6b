"""Write a trained head in its shipped form, with its held-out figures: `specdec_cli/demo/eagle3`.

Copies the weights and the config of train_head.py's output, writes a model card, and puts the
training's record and the figures under `head` in the manifest.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from evaluate import load_heldout, load_model
from evaluate_head import (
    CONTEXT,
    LINKS,
    NEW_TOKENS,
    chain_figures,
    even_prompts,
    own_texts,
    rounds,
)
from head import load

LIMIT = 3_000_000  # most bytes of the file of weights

CARD = """---
license: apache-2.0
language: code
pipeline_tag: text-generation
---
# specdec demo eagle3

An EAGLE-3 head (Li et al., arXiv 2503.01840) for the target beside it, `../target`, whose embedding
serves it as embedding and as head.

It exists so that `specdec` can be tried, tested and measured without a download.

- Form: that of speculators. One Llama layer, width {hidden}, {heads} heads ({kv_heads} key/value),
  MLP {inner}; {parameters:,} parameters in bf16. It reads the inputs of the target's layers
  {layers}.
- Training text: that of the target (`../NOTICE`), and what the target writes after signatures and
  docstrings of it, in turn, at temperatures 0, 0.7 and 1.
- Training: {step} steps, {tokens:.1f} M tokens, {links} chained steps, {seconds:.0f} s on one
  {device}, seed {seed}.
- Held-out text ({heldout} tokens), by chained position, fp32:

| | {head} |
|---|{rule}|
| greedy agreement, % | {greedy} |
| alpha = E sum min(p, q), % | {alpha} |

- The target's own text, greedy, {new_tokens} tokens after every second bundled prompt:
  {tokens_a_round:.2f} tokens a round at k = 4, accepted at positions 1 to 4: {accepted} %.

The checkpoint kept is the best one on the other half of the bundled prompts, of the same held-out
modules. Made by `scripts/demo_pair` of the project.
"""


def percent(values: list[float]) -> str:
    return " | ".join(f"{100 * value:.1f}" for value in values)


def card(record: dict[str, Any], parameters: int) -> str:
    links, own = record["links_heldout"], record["own_text"]["4"]
    return CARD.format(
        **record["shape"] | {"layers": ", ".join(map(str, record["shape"]["layers"]))},
        parameters=parameters,
        step=record["step"],
        tokens=record["tokens"] / 1e6,
        links=record["links"],
        seconds=record["seconds"],
        device=record["device_name"],
        seed=record["seed"],
        heldout=record["heldout_tokens"],
        head=" | ".join(str(i + 1) for i in range(LINKS)),
        rule="|".join(["---"] * LINKS),
        greedy=percent([row["greedy"] for row in links]),
        alpha=percent([row["alpha"] for row in links]),
        new_tokens=record["new_tokens"],
        tokens_a_round=own["tokens_a_round"],
        accepted=", ".join(f"{100 * x:.0f}" for x in own["accepted"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path, help="train_head.py's --out folder")
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--demo", type=Path, default=Path("specdec_cli/demo"))
    parser.add_argument("--limit", type=int, help="use only LIMIT windows of held-out text")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    source, folder = args.training / "head", args.demo / "eagle3"
    if (source / "model.safetensors").stat().st_size >= LIMIT:
        raise ValueError(f"the weights are over {LIMIT} bytes")
    folder.mkdir(exist_ok=True)
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(source / name, folder / name)

    target = load_model(args.demo / "target", args.device)
    head = load(folder, target.model.embed_tokens.weight)
    windows = load_heldout(args.data / "heldout.bin", CONTEXT).to(args.device)
    windows = windows[:: max(1, len(windows) // (args.limit or len(windows)))]
    texts = own_texts(target, even_prompts(args.demo), NEW_TOKENS)
    record = json.loads((args.training / "training.json").read_text())
    record |= {
        "heldout_tokens": windows.numel(),
        "links_heldout": chain_figures(head, target, windows, LINKS),
        "new_tokens": NEW_TOKENS,
        "own_text": {str(k): rounds(head, target, texts, k) for k in (4, LINKS)},
    }
    size = sum(p.numel() for p in head.parameters())
    (folder / "README.md").write_text(card(record, size))
    path = args.demo / "manifest.json"
    manifest = json.loads(path.read_text()) | {"head": record}
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    print((folder / "README.md").read_text())


if __name__ == "__main__":
    main()
