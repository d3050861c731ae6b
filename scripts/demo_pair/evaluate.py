"""Held-out figures of a saved demo pair: loss, bits per byte, acceptance rate, agreement.

The acceptance rate is analytic: alpha = E sum_x min(p(x), q(x)) at temperature 1 over held-out
text. Speculative decoding is not used, so this is an independent check of it.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

DRAFTS = ("draft", "draft-distilled")
CONTEXT = 1024


def load_heldout(path: Path, context: int) -> Tensor:
    """Windows of `context` inputs and their following tokens, [N, context + 1]."""
    ids = torch.from_numpy(np.fromfile(path, "<u2").astype(np.int64))
    return ids[: (len(ids) - 1) // context * context + 1].unfold(0, context + 1, context)


def load_model(folder: Path, device: str) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def logits_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Next-token logits without a cache, [B, T] -> [B, T, V].

    The layers are called one by one without a mask, so that attention takes its causal fast path
    under torch.compile too.
    """
    x = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = model.model.rotary_emb(x, positions)
    for layer in model.model.layers:
        x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, windows: Tensor, batch: int) -> float:
    """Mean cross-entropy over the held-out windows, in nats per token."""
    total = 0.0
    for w in windows.split(batch):
        logits = logits_of(model, w[:, :-1]).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), w[:, 1:].flatten(), reduction="sum"))
    return total / windows[:, 1:].numel()


@torch.no_grad()
def pair_figures(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Tensor, batch: int
) -> dict[str, float]:
    overlaps, agree = [], 0
    for w in windows.split(batch):
        p = logits_of(target, w[:, :-1]).float().softmax(-1)
        q = logits_of(draft, w[:, :-1]).float().softmax(-1)
        overlaps.append(torch.minimum(p, q).sum(-1).flatten())
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
    overlap = torch.cat(overlaps)
    low, high = overlap.quantile(torch.tensor([0.1, 0.9], device=overlap.device)).tolist()
    return {
        "alpha": float(overlap.mean()),
        "alpha_p10": low,
        "alpha_p90": high,
        "greedy_agreement": agree / overlap.numel(),
    }


def figures(
    folder: Path, windows: Tensor, bytes_per_token: float, device: str, batch: int
) -> dict[str, dict[str, Any]]:
    """One row per saved model; the drafts' rows also hold the pair's figures."""
    target = load_model(folder / "target", device)
    windows = windows.to(device)
    rows: dict[str, dict[str, Any]] = {}
    for name in ("target", *DRAFTS):
        if not (folder / name / "model.safetensors").exists():
            continue
        model = target if name == "target" else load_model(folder / name, device)
        loss = heldout_loss(model, windows, batch)
        rows[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "heldout_loss": loss,
            "bits_per_byte": loss / math.log(2) / bytes_per_token,
        }
        if name != "target":
            rows[name] |= pair_figures(target, model, windows, batch)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    heads = ("loss", "bits/byte", "alpha", "p10", "p90", "greedy")
    keys = (
        *("heldout_loss", "bits_per_byte", "alpha", "alpha_p10", "alpha_p90"),
        "greedy_agreement",
    )
    lines = [f"{'model':16}{'params':>10}" + "".join(f"{h:>11}" for h in heads)]
    for name, row in rows.items():
        cells = "".join(f"{row[k]:>11.4f}" if k in row else f"{'-':>11}" for k in keys)
        lines.append(f"{name:16}{row['parameters']:>10}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds target/, draft/ and draft-distilled/")
    parser.add_argument("--data", type=Path, default=Path(".corpus/pack"))
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--limit", type=int, help="use only the first LIMIT windows")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    meta = json.loads((args.data / "meta.json").read_text())
    windows = load_heldout(args.data / "heldout.bin", args.context)[: args.limit]
    rows = figures(args.folder, windows, meta["heldout_bytes_per_token"], args.device, args.batch)
    print(table(rows))


if __name__ == "__main__":
    main()
