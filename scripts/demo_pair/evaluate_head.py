"""Held-out figures of an EAGLE-3 head by chained position, beside those of the demo's drafts.

There are two kinds. On held-out text: agreement and overlap with the target at each link of a chain
whose tokens are the text's. On the target's own text after bundled prompts: the rounds of greedy
decoding. Both are computed over whole texts, without a cache or an engine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from evaluate import DRAFTS, load_heldout, load_model, logits_of, pair_figures
from head import Head, load, read_target
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LlamaForCausalLM

LINKS = 6
NEW_TOKENS = 48
CONTEXT = 512


@torch.no_grad()
def chain_figures(
    head: Head, target: LlamaForCausalLM, windows: Tensor, links: int
) -> list[dict[str, float]]:
    """The greedy agreement and alpha = E sum min(p, q), at temperature 1, of each link."""
    agree, overlap = torch.zeros(2, links, dtype=torch.float64)
    rows = torch.zeros(links)
    for ids in windows.split(4):
        features, wanted = read_target(target, ids, head.shape.layers)
        p = wanted[:, 1:].float().softmax(-1)
        for i, out in enumerate(head.chain(features[:, :-1], ids[:, 1:], links)):
            q, known = head.logits(out[:, i:]).float().softmax(-1), p[:, i:]
            agree[i] += float((q.argmax(-1) == known.argmax(-1)).sum())
            overlap[i] += float(torch.minimum(q, known).sum())
            rows[i] += known[..., 0].numel()
    return [
        {"greedy": float(agree[i] / rows[i]), "alpha": float(overlap[i] / rows[i])}
        for i in range(links)
    ]


@torch.no_grad()
def own_texts(
    target: LlamaForCausalLM, prompts: list[list[int]], count: int
) -> list[tuple[Tensor, int]]:
    """Greedy text [T] of the target, up to its end of text, and the length of its prompt."""
    widest = max(map(len, prompts))
    padded = torch.tensor([[0] * (widest - len(p)) + p for p in prompts], device=target.device)
    seen = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
    out = target.generate(
        padded, attention_mask=seen.to(target.device), max_new_tokens=count, do_sample=False
    )
    found = []
    for prompt, row in zip(prompts, out[:, widest:].tolist(), strict=True):
        end = row.index(0) + 1 if 0 in row else count
        found.append((torch.tensor(prompt + row[:end]), len(prompt)))
    return found


@torch.no_grad()
def stands(
    model: Head | LlamaForCausalLM, target: LlamaForCausalLM, texts: list[Tensor]
) -> list[Tensor]:
    """For each text, bool [links, T], True where link i's greedy proposal is the text's token. A
    draft model's proposals do not depend on their link, since all earlier tokens are the text's.
    """
    found = []
    for start in range(0, len(texts), 50):
        some = texts[start : start + 50]
        ids = pad_sequence(some, batch_first=True).to(target.device)
        right = torch.zeros(LINKS, *ids.shape, dtype=torch.bool)
        if isinstance(model, Head):
            features, _ = read_target(target, ids, model.shape.layers)
            for i, out in enumerate(model.chain(features[:, :-2], ids[:, 1:-1], LINKS)):
                right[i, :, 2:] = (model.logits(out).argmax(-1) == ids[:, 2:]).cpu()
        else:
            right[:, :, 1:] = (logits_of(model, ids[:, :-1]).argmax(-1) == ids[:, 1:]).cpu()
        found += [right[:, i, : len(text)] for i, text in enumerate(some)]
    return found


def walk(right: Tensor, start: int, k: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round that has proposals."""
    found, n, total = [], start, right.shape[1]
    while n < total:
        count = min(k, total - n - 1)
        accepted = next((i for i in range(count) if not right[i, n + i]), count)
        if count:
            found.append((count, accepted))
        n += accepted + 1
    return found


def rounds(
    model: Head | LlamaForCausalLM,
    target: LlamaForCausalLM,
    texts: list[tuple[Tensor, int]],
    k: int,
) -> dict[str, Any]:
    """The rounds of greedy decoding of `own_texts`: tokens a round, and the shares of rounds that
    accepted the proposals up to each position."""
    right = stands(model, target, [ids for ids, _ in texts])
    walks = [walk(r, start, k) for r, (_, start) in zip(right, texts, strict=True)]
    pairs = [pair for found in walks for pair in found]
    return {
        "tokens_a_round": 1 + sum(a for _, a in pairs) / len(pairs),
        "accepted": [sum(a > i for _, a in pairs) / len(pairs) for i in range(k)],
        "rounds": len(pairs),
    }


def even_prompts(demo: Path) -> list[list[int]]:
    """Every second bundled prompt. The others choose the checkpoint in training."""
    tokenizer = AutoTokenizer.from_pretrained(demo / "target")
    lines = (demo / "prompts.jsonl").read_text().splitlines()[::2]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds config.json and model.safetensors")
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--demo", type=Path, default=Path("specdec_cli/demo"))
    parser.add_argument("--limit", type=int, help="use only LIMIT windows, spread evenly")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    target = load_model(args.demo / "target", args.device)
    head = load(args.folder, target.model.embed_tokens.weight)
    windows = load_heldout(args.data / "heldout.bin", CONTEXT).to(args.device)
    windows = windows[:: max(1, len(windows) // (args.limit or len(windows)))]
    print("held-out text: greedy agreement and alpha, a head's by link")
    for i, row in enumerate(chain_figures(head, target, windows, LINKS)):
        print(f"{args.folder.name:16} {i + 1}  {row['greedy']:.4f}  {row['alpha']:.4f}")
    drafts = {name: load_model(args.demo / name, args.device) for name in DRAFTS}
    for name, draft in drafts.items():
        found = pair_figures(target, draft, windows, 4)
        print(f"{name:18} {found['greedy_agreement']:.4f}  {found['alpha']:.4f}")
    texts = own_texts(target, even_prompts(args.demo), NEW_TOKENS)
    models: dict[str, Head | LlamaForCausalLM] = {args.folder.name: head, **drafts}
    print("the target's own text, greedy: tokens a round, accepted by position")
    for name, model in models.items():
        for k in (4, LINKS):
            row = rounds(model, target, texts, k)
            shares = " ".join(f"{x:.3f}" for x in row["accepted"])
            print(f"{name:16} k={k} {row['tokens_a_round']:.3f}  {shares}")


if __name__ == "__main__":
    main()
