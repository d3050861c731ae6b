"""EAGLE-3 heads make the same proposals as independent code, on the demo target in fp32.

    python scripts/proofs/eagle3.py CHECKOUT [CHECKOUT ...]

CHECKOUT: a clone of github.com/SafeAILab/EAGLE or github.com/vllm-project/speculators.

1. Random heads, and the trained one: logits of every row of prefill, of every step of a draft, and
   after partial rejections, and every proposal. Random heads run with synthetic acceptance, so that
   rounds of all kinds occur.
2. The trained head: a greedy loop over transformers' forward pass and the reference's head, which
   shares nothing with the engine. Proposals, accepted counts and text of every round.

Prints a table for each; exits 1 if anything differs. Takes 15 minutes of one core.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from scripts.proofs.eagle3_references import ReferenceHead, reference_head
from scripts.proofs.greedy import oracle, read_prompts
from specdec_cli.core.types import Request, Sequence
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.eagle3.config import read_head_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.recipe import load_recipe
from tests.eagle3 import Head, save_head

TOLERANCE = 1e-4  # relative to the largest logit
NUM_LAYERS = 8  # layers of the demo target
LOGIT_PROMPTS, LOGIT_K = 6, 4


def _random(width: int, **more: Any) -> Head:
    """A random head for the demo target. It reads the inputs of layers 2, 4 and 5, as EAGLE
    chooses."""
    sizes: dict[str, Any] = {
        "hidden": width,
        "target_hidden": 256,
        "vocab": 4096,
        "inner": 2 * width,
    }
    shape: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": width // 4,
        "outputs": (1, 3, 4),
    }
    head = Head(**({"draft_vocab": 1000} | sizes | shape | more))
    for name, tensor in head.tensors.items():
        if "q_proj" in name or "k_proj" in name:
            head.tensors[name] = tensor / 4  # sharp attention magnifies rounding
    return head


HEADS = {
    "random, 64 wide, 1000 ids": _random(64),
    "random, 256 wide, 1000 ids": _random(256),
    "random, 2 layers, rope base 500": _random(256, layers=2, base=500.0),
    "random, normed residual, fc_norm": _random(256, norm_before_residual=True, fc_norm=True),
    "random, norm_before_fc, fed normed": _random(256, norm_before_fc=True, feeds_norm=True),
    "random, qwen3, biases, all ids": _random(
        256, kind="qwen3", attention_bias=True, draft_vocab=4096
    ),
}


@dataclass(frozen=True)
class Round:
    """proposed: the tokens. accepted: the number of accepted ones. gap: the least gap between the
    best two logits."""

    proposed: list[int]
    accepted: int
    gap: float = field(default=0.0, compare=False)


@dataclass
class Records:
    """Results of the engine's head, one sequence after the other.

    prefill: logits [T, Vd] of each prefill pass. logits: [1, Vd] of each step. proposed: the
    proposals of each round.
    """

    prefill: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Records]:
    """Record the head's passes of one sequence at a time."""
    found = Records()
    logits, forward, propose = Eagle3Head.logits, PagedHead.forward, StepHead.propose

    def record_logits(self: Eagle3Head, x: Any) -> Tensor:
        found.logits.append(logits(self, x))
        return found.logits[-1]

    def record_forward(self: PagedHead, *given: Any) -> Tensor:
        hidden = forward(self, *given)
        found.prefill.append(logits(self.head, self.head.normed(hidden)))
        return hidden

    def record_propose(self: StepHead, *given: Any) -> Any:
        drawn = propose(self, *given)
        if count := int(drawn.lens[0]):
            found.proposed.append(drawn.token_ids[0, :count].tolist())
        return drawn

    with (
        patch.object(Eagle3Head, "logits", record_logits),
        patch.object(PagedHead, "forward", record_forward),
        patch.object(StepHead, "propose", record_propose),
    ):
        yield found


def run_engine(
    head: str, prompts: list[list[int]], k: int, new_tokens: int, **more: object
) -> list[Sequence]:
    """The engine's finished sequences, greedy, past EOS."""
    overrides: dict[str, object] = {
        "target.model": "demo:target",
        "draft.model": head,
        "run.device": "cpu",
        "run.batch_size": 1,
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": new_tokens,
        "sampling.temperature": 0.0,
        "sampling.ignore_eos": True,
        **more,
    }
    planned = plan(load_recipe(None, overrides))
    engine = build(planned, max(map(len, prompts)))
    requests = [Request(i, tuple(prompt)) for i, prompt in enumerate(prompts)]
    return engine.run(requests, planned.k, planned.params).seqs


def rounds_of(seqs: list[Sequence], records: Records) -> list[list[Round]]:
    """The rounds of each sequence that proposed something."""
    drawn = iter(records.proposed)
    return [[Round(next(drawn), a) for a in seq.accepted_per_round] for seq in seqs]


class Target:
    """transformers' own model, and the hidden states that a head reads of it."""

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self.model = model
        self.layers = layers
        self.embedding = model.get_input_embeddings().weight.detach()

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Features [T, F] and logits [T, V]."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i][0] for i in self.layers], dim=1), out.logits[0]


@torch.inference_mode()
def reference_rounds(
    head: ReferenceHead, target: Target, prompt: list[int], k: int, new_tokens: int
) -> tuple[list[Round], list[int]]:
    """The rounds, and the text after `prompt`, of greedy speculative decoding. A round leaves room
    in the text for the token after the proposals.
    """
    head.start()
    tokens, end = list(prompt), len(prompt) + new_tokens
    features, rounds = target(tokens[:-1])[0], []
    while (n := len(tokens)) < end:
        count = min(k, end - n - 1)
        proposed, drafted = head.chain(features, tokens, count) if count else ([], None)
        features, scores = target(tokens + proposed)
        best = scores[n - 1 :].argmax(1).tolist()
        stand = next((i for i in range(count) if proposed[i] != best[i]), count)
        if drafted is not None:
            gap = min(
                float((two := x.topk(2, dim=1)[0])[:, 0].sub(two[:, 1]).min())
                for x in (drafted, scores[n - 1 :])
            )
            rounds.append(Round(proposed, stand, gap))
        tokens += best[: stand + 1]
        features = features[: len(tokens) - 1]
    return rounds, tokens[len(prompt) :]


@torch.inference_mode()
def compare_logits(
    head: ReferenceHead, target: Target, seqs: list[Sequence], ours: Records
) -> dict[str, Any]:
    """Largest differences of logits, relative to the largest logit, and proposals that differ."""
    steps, prefill = iter(ours.logits), torch.cat(ours.prefill)
    scale, at = float(prefill.abs().max()), 0
    worst = {"prefill": 0.0, "first": 0.0, "later": 0.0, "after rejection": 0.0}
    differ = drafts = partial = 0
    for seq, rounds in zip(seqs, rounds_of(seqs, ours), strict=True):
        head.start()
        features, n = target(seq.tokens)[0], seq.num_prompt_tokens
        rows = head.rows(features[: n - 1], seq.tokens[:n])
        gap = (rows - prefill[at : at + n - 1]).abs().max()
        worst["prefill"], at = max(worst["prefill"], float(gap)), at + n - 1
        was_cut = False
        for made in rounds:
            count = len(made.proposed)
            proposed, logits = head.chain(features[: n - 1], seq.tokens[:n], count)
            differ += proposed != made.proposed
            for step, row in enumerate(logits):
                kind = "after rejection" if was_cut else "later" if step else "first"
                worst[kind] = max(worst[kind], float((row - next(steps)[0]).abs().max()))
            n, drafts = n + made.accepted + 1, drafts + 1
            was_cut = 0 < made.accepted < count
            partial += was_cut
    assert next(steps, None) is None and at == len(prefill), "everything has to be compared"
    return {**worst, "scale": scale, "drafts": drafts, "partial": partial, "differ": differ}


def check_logits(
    model: Any, checkout: Path, name: str, folder: str, prompts: list[list[int]]
) -> bool:
    """Print a row of the first table. Returns False if something differs."""
    path = demo_path(folder) if folder.startswith("demo:") else Path(folder)
    target = Target(model, read_head_config(name, path).feature_layers(NUM_LAYERS))
    try:
        head = reference_head(checkout, path, target.embedding)
    except ValueError as problem:
        print(f"{checkout.name:<12}  {name:<36}  {problem}", flush=True)
        return True
    rule = {"speculation.acceptance": "synthetic", "speculation.synthetic_acceptance_length": 2.5}
    more: dict[str, object] = {} if folder.startswith("demo:") else dict(rule)
    with recorded() as ours:
        seqs = run_engine(folder, prompts, LOGIT_K, 48, **more)
    r = compare_logits(head, target, seqs, ours)
    kinds = ("prefill", "first", "later", "after rejection")
    print(
        f"{checkout.name:<12}  {name:<36}  {r['scale']:6.1f}  "
        f"{'  '.join(f'{r[kind]:9.1e}' for kind in kinds)}  "
        f"{r['drafts']:6}  {r['partial']:7}  {r['differ']:6}",
        flush=True,
    )
    return not r["differ"] and max(r[kind] for kind in kinds) < TOLERANCE * r["scale"]


def check_rounds(
    model: Any, checkout: Path, prompts: list[list[int]], k: int, new_tokens: int
) -> bool:
    """Print a row of the second table. Returns False if something differs."""
    path = demo_path("demo:eagle3")
    target = Target(model, read_head_config("head", path).feature_layers(NUM_LAYERS))
    head = reference_head(checkout, path, target.embedding)
    theirs = [reference_rounds(head, target, prompt, k, new_tokens) for prompt in prompts]
    with recorded() as records:
        alone = run_engine("demo:eagle3", prompts, k, new_tokens)
    together = run_engine("demo:eagle3", prompts, k, new_tokens, **{"run.batch_size": 8})
    differ = []
    for i, (rounds, text) in enumerate(theirs):
        ours, counts = rounds_of(alone, records)[i], together[i].accepted_per_round
        if pair := next((p for p in zip(rounds, ours, strict=False) if p[0] != p[1]), None):
            print(f"prompt {i}, k={k}: {pair[0]} of the reference, {pair[1]} of ours")
        same = text == alone[i].output_ids == together[i].output_ids
        if ours != rounds or counts != [r.accepted for r in rounds] or not same:
            differ.append(i)
    every = [r for rounds, _ in theirs for r in rounds]
    print(
        f"{checkout.name:<12}  {k}  {len(every):6}  {sum(len(r.proposed) for r in every):8}  "
        f"{sum(r.accepted for r in every):8}  {min(r.gap for r in every):9.1e}  "
        f"{differ or 'none'}",
        flush=True,
    )
    return not differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=list(range(1, 7)))
    args = parser.parse_args()
    model, tokenizer = oracle()
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(args.prompts)]
    good = True
    print("Logits: largest absolute difference by kind of row, and drafts that differ.")
    print(
        f"{'code':<12}  {'head':<36}  max     prefill    first      later      rejected   drafts"
        "  partial  differ"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"the demo head": "demo:eagle3"}
        for i, (name, head) in enumerate(HEADS.items()):
            folders[name] = str(save_head(Path(scratch) / str(i), head, "speculators"))
        for checkout in args.checkouts:
            for name, folder in folders.items():
                good &= check_logits(model, checkout, name, folder, prompts[:LOGIT_PROMPTS])
    print("Rounds with the demo head, greedy.")
    print(f"{'code':<12}  k  rounds  proposed  accepted  least gap  prompts that differ")
    for checkout in args.checkouts:
        for k in args.k:
            good &= check_rounds(model, checkout, prompts, k, args.new_tokens)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
