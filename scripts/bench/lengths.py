"""Compares length policies: fixed k, confidence and adaptive, on two kinds of acceptance.

`demo`: the demo pair on the demo prompts, one after the other, with its own acceptance. `changing`:
the same work, but proposals are accepted with one chance in the first half of a text and with
another in the second. Rounds of each K are counted and charged with given times (--round-ms), so
that the table is the same on every machine; adaptive decides by the same times. Prints a Markdown
row a policy: tokens a round, proposals a round, and tokens per second against the best fixed k.

With --wall the times are those of this machine's rounds: median of the repeats, which alternate.

    python scripts/bench/lengths.py --prompts 40 --tokens 128
"""

import argparse
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from specdec_kernels import ops

from specdec_cli import demo
from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.parallel import ALONE
from specdec_cli.core.sampling import greedy_pick
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import plan
from specdec_cli.lengths.adaptive import Adaptive
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.lengths.confidence import Confidence
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.prompts import read_prompts
from specdec_cli.recipe import load_recipe

# Llama-3.1-8B and Llama-3.2-1B, batch 1, one H200, captured rounds (docs/performance.md).
ROUND_MS = {0: 3.81, 1: 4.60, 3: 6.12, 5: 7.66, 8: 10.25}


class GivenCosts(RoundCosts):
    """Times of rounds that are given beforehand. counts: rounds of each K since `clear`."""

    def __init__(self, round_ms: dict[int, float]) -> None:
        super().__init__(ALONE)
        self.round_ms = round_ms
        self.counts: Counter[int] = Counter()

    def add(self, slots: int, k: int, seconds: float) -> None:
        self.counts[k] += 1

    def unmeasured(self, slots: int, lengths: tuple[int, ...]) -> int | None:
        return None

    def of(self, slots: int, lengths: tuple[int, ...]) -> dict[int, float]:
        return self.round_ms

    @property
    def seconds(self) -> float:
        return sum(self.round_ms[k] * count for k, count in self.counts.items()) / 1e3


@dataclass(eq=False)
class Changing:
    """Accepts with `rates[0]` in the first half of each text of `tokens`, then with `rates[1]`.

    It is for one sequence at a time, whose text ends at that length.
    """

    rates: tuple[float, float]
    tokens: int
    is_lossless = False
    looks_ahead = False
    draws_when_greedy = True
    remark = "acceptance is given"
    written: int = field(default=0, init=False)

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        assert noise is not None
        k = candidates.token_ids.shape[1]
        place = (self.written + torch.arange(k)) % self.tokens
        rates = torch.where(place < self.tokens // 2, *map(torch.tensor, self.rates)).float()
        own = greedy_pick(target.logits)
        tokens, accepted = ops.accept(
            candidates.token_ids, own, candidates.lens, noise.accept, rates
        )
        self.written += int(accepted[0]) + 1
        return Verdict(tokens, accepted)

    def forecast(self, *_: object) -> None:
        return None

    def check(self) -> None:
        pass


@dataclass
class Arm:
    name: str
    k: int
    policy: LengthPolicy
    speeds: list[float] = field(default_factory=list)
    per_round: tuple[float, float] = (0.0, 0.0)  # tokens, proposals


def arms(lengths: list[int]) -> list[Arm]:
    longest = lengths[-1]
    fixed = [Arm(f"fixed, k = {k}", k, FixedLength()) for k in lengths if k]
    unsure = [
        Arm(f"confidence {threshold}, k = {longest}", longest, Confidence(threshold))
        for threshold in (0.2, 0.4, 0.6)
    ]
    return [*fixed, *unsure, Arm("adaptive", longest, Adaptive(tuple(lengths)))]


def measure(
    engine: Engine,
    arm: Arm,
    rule: AcceptanceRule,
    prompts: list[list[int]],
    params: SamplingParams,
    given: dict[int, float] | None,
) -> None:
    """Run all prompts once and add the arm's speed, in tokens per second of decoding."""
    costs = RoundCosts(ALONE) if given is None else GivenCosts(given)
    engine.rule, engine.policy, engine.costs = rule, arm.policy, costs
    requests = [Request(i, tuple(ids)) for i, ids in enumerate(prompts)]
    result = engine.run(requests, arm.k, params)
    tokens = sum(seq.num_new_tokens for seq in result.seqs)
    metrics = result.metrics
    seconds = costs.seconds if isinstance(costs, GivenCosts) else metrics.decode_seconds
    arm.speeds.append(tokens / seconds)
    rounds = metrics.num_rounds
    arm.per_round = (tokens / rounds, metrics.num_draft_tokens / rounds)


def table(title: str, found: list[Arm]) -> None:
    fixed = [arm for arm in found if isinstance(arm.policy, FixedLength)]
    best = max(fixed, key=lambda arm: statistics.median(arm.speeds))
    print(f"\n{title}\n\n| policy | tokens a round | proposed a round | tokens/s | x best fixed |")
    print("|---|---|---|---|---|")
    for arm in found:
        ratios = sorted(mine / theirs for mine, theirs in zip(arm.speeds, best.speeds, strict=True))
        spread = f" ({ratios[0]:.2f} – {ratios[-1]:.2f})" if len(ratios) > 1 else ""
        cells = [arm.name, *(f"{n:.2f}" for n in arm.per_round)]
        cells += [
            f"{statistics.median(arm.speeds):.0f}",
            f"{statistics.median(ratios):.2f}{spread}",
        ]
        print("| " + " | ".join(cells) + " |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs=2, default=(0.9, 0.3))
    parser.add_argument("--round-ms", help="such as 0=3.81,1=4.60; needs k = 0")
    parser.add_argument("--wall", action="store_true", help="time this machine's rounds")
    parser.add_argument("--repeats", type=int, default=5, help="with --wall")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    round_ms = ROUND_MS
    if args.round_ms:
        pairs = (part.split("=") for part in args.round_ms.split(","))
        round_ms = {int(k): float(ms) for k, ms in pairs}
    lengths = sorted(round_ms)
    settings = {
        "run.device": "cpu",
        "speculation.num_speculative_tokens": lengths[-1],
        "sampling.max_new_tokens": args.tokens,
        "sampling.ignore_eos": True,
    }
    planned = plan(load_recipe(None, settings))
    texts = read_prompts([], str(demo.demo_path("demo:prompts")), None)[:: 200 // args.prompts]
    prompts = [planned.tokenizer.encode(text.text or "") for text in texts[: args.prompts]]
    engine = build(planned, max(map(len, prompts)))
    own_rule = engine.rule
    params = replace(planned.params, ignore_eos=True)
    for title in ("demo", "changing"):
        found = arms(lengths)
        for _ in range(args.repeats if args.wall else 1):
            for arm in found:
                rule: AcceptanceRule = own_rule
                if title == "changing":
                    rule = Changing(tuple(args.rates), args.tokens)  # type: ignore[assignment]
                measure(engine, arm, rule, prompts, params, None if args.wall else round_ms)
        table(title, found)


if __name__ == "__main__":
    main()
