"""The share of simulated sweeps whose paired intervals between arms contain the truth.

    python scripts/proofs/paired.py RUN [--prompts 20,40,80] [--sims 1000] [--seed 0]

RUN is the folder of a sweep with several drafts at one batch size. Its prompts are the population:
a simulated sweep draws prompts from it, chooses each arm's fastest k as a sweep does, and compares
the arms at these. The truth is the ratio over all prompts of RUN at the same k. Exits with 1 if a
share is outside 93 to 97 %.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from specdec_cli.experiment.folders.conclusions import Arm
from specdec_cli.experiment.folders.record_lines import read_records
from specdec_cli.experiment.folders.records import Key, Point, Sample
from specdec_cli.experiment.folders.samples import without_errors
from specdec_cli.experiment.statistics.stats import measured_speed
from specdec_cli.experiment.sweep.gains import compare_arms, measured_gains

Found = Mapping[Key, dict[int, Sample]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", default="20,40,80")
    parser.add_argument("--sims", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    whole = population(asked.run)
    rng = random.Random(asked.seed)
    shares = []
    print(
        f"| prompts | intervals | contain the truth | of {asked.sims} sweeps |\n|---|---|---|---|"
    )
    for count in map(int, asked.prompts.split(",")):
        inside = total = 0
        for sim in range(asked.sims):
            for is_in in simulated(whole, count, rng, sim):
                inside, total = inside + is_in, total + 1
        shares.append(inside / total)
        print(f"| {count} | {total} | {100 * shares[-1]:.1f} % |", flush=True)
    return 0 if all(0.93 <= share <= 0.97 for share in shares) else 1


def population(run: Path) -> Found:
    """The samples of a run by point, without categories, for the prompts that every point has."""
    found: dict[Key, dict[int, Sample]] = defaultdict(dict)
    for sample in read_records(run / "samples.jsonl", Sample):
        found[Key.of(sample)][sample.index] = sample.model_copy(update={"category": None})
    common = set.intersection(*(set(without_errors(of)) for of in found.values()))
    return {key: {i: of[i] for i in sorted(common)} for key, of in found.items()}


def simulated(whole: Found, count: int, rng: random.Random, seed: int) -> list[bool]:
    """True for each interval of a simulated sweep that contains the truth."""
    indices = sorted(next(iter(whole.values())))
    drawn = [rng.choice(indices) for _ in range(count)]
    samples = {key: dict(enumerate(of[i] for i in drawn)) for key, of in whole.items()}
    plain = measured_speed(next(of for key, of in samples.items() if key.k == 0).values())
    points = [
        Point(
            k=key.k,
            batch_size=key.batch_size,
            draft=key.draft,
            status="ok",
            speedup=measured_speed(of.values()).over(plain).value,
        )
        for key, of in samples.items()
    ]
    gains = measured_gains(points, samples)
    found = []
    for one in compare_arms(gains, samples, seed):
        ours, theirs = (
            measured_speed(whole[_key(arm, one.batch_size)].values())
            for arm in (one.arm, one.against)
        )
        low, high = one.speed_ratio_ci or (0.0, 0.0)
        found.append(low <= ours.over(theirs).value <= high)
    return found


def _key(arm: Arm, batch_size: int) -> Key:
    return Key(arm.draft, batch_size, arm.k)


if __name__ == "__main__":
    sys.exit(main())
