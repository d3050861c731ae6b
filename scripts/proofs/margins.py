"""Gaps of logits where a sweep's greedy texts part from plain decoding's, by transformers.

    python scripts/proofs/margins.py RUN_FOLDER --target MODEL

MODEL is named as in recipes: a folder, a hub id or `demo:target`.

For each prompt and point whose text differs from that of k = 0, transformers feeds the text up to
the first token that differs, in fp32 and in bf16. The gap is that of the fp32 logits between the
best token and the lower of the two that were written; the rounding is the largest difference of
those two tokens' logits between bf16 and fp32. Prints a row for each point, and exits with 1 if a
gap is larger than twice the largest rounding.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec_cli.experiment.lossless_check import TextPair
from specdec_cli.models.resolve import model_place

Point = tuple[str, int, int]  # draft, batch size, k


@dataclass(frozen=True)
class Parting:
    """A place where a text leaves that of plain decoding.

    tokens: the prompt and the text up to there. two: the next token of each text.
    """

    tokens: list[int]
    two: tuple[int, int]


def partings(samples: list[dict[str, Any]]) -> dict[Point, list[Parting]]:
    """The partings of each point. A text that is the beginning of the other one has none."""
    plain = {(s["batch_size"], s["index"]): s["token_ids"] for s in samples if s["k"] == 0}
    found: dict[Point, list[Parting]] = {}
    for s in samples:
        if s["k"] == 0:
            continue
        those = found.setdefault((s["draft"], s["batch_size"], s["k"]), [])
        text = TextPair(s["prompt_token_ids"], s["token_ids"], plain[s["batch_size"], s["index"]])
        at = text.parted_at
        if at is not None and at < min(len(text.tokens), len(text.plain)):
            tokens = [*text.prompt, *text.plain[:at]]
            those.append(Parting(tokens, (text.tokens[at], text.plain[at])))
    return found


class Judge:
    """transformers' logits of the target, in both dtypes; each text is fed once."""

    def __init__(self, target: Path) -> None:
        self._models = [
            AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.inference_mode()
    def gap_and_rounding(self, parting: Parting) -> tuple[float, float]:
        """The gap and the rounding in units of logits, as the script's docstring defines them."""
        key = tuple(parting.tokens)
        if key not in self._known:
            ids = torch.tensor([parting.tokens])
            exact, rounded = (
                model(ids, logits_to_keep=1).logits[0, -1].float() for model in self._models
            )
            self._known[key] = exact, rounded
        exact, rounded = self._known[key]
        two = list(parting.two)
        return float(exact.max() - exact[two].min()), float((exact - rounded)[two].abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", required=True)
    asked = parser.parse_args()
    lines = (asked.run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    judge, every = Judge(model_place(asked.target, None)), list[tuple[float, float]]()
    print("| draft | batch | k | texts that part | median gap | largest gap | largest rounding |")
    print("|---|---|---|---|---|---|---|")
    for (draft, batch, k), those in partings([json.loads(line) for line in lines]).items():
        found = [judge.gap_and_rounding(parting) for parting in those]
        every += found
        gaps, roundings = zip(*found, strict=True) if found else ((0.0,), (0.0,))
        print(
            f"| {draft} | {batch} | {k} | {len(found)} | {statistics.median(gaps):.3f} | "
            f"{max(gaps):.3f} | {max(roundings):.3f} |",
            flush=True,
        )
    bound = 2 * max((rounding for _, rounding in every), default=0.0)
    over = sum(gap > bound for gap, _ in every)
    print(f"{len(every)} texts part, {over} at a gap above {bound:.3f}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
