"""Kills sweeps with SIGKILL at random moments: no acknowledged sample is lost, no line is torn.

A sweep is killed, resumed and killed again until it is done; then another begins in a new folder,
until KILLS kills have hit. After each kill samples.jsonl must hold every sample whose write was
acknowledged, in whole lines. No sample may be measured twice, and each finished folder must hold
the samples of an undisturbed sweep.

    python scripts/proofs/kills.py --kills 200
"""

import argparse
import json
import random
import signal
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from specdec_cli.app import main as specdec
from tests.cli.sweep_helpers import lost_or_torn, samples, stopped_sweep, without_times

SWEEP: list[str | Path] = [
    *("sweep-k", "demo", "--device", "cpu", "--k", "0-4", "--limit", "6", "-q"),
    *("--max-new-tokens", "8", "--temperature", "0.8"),
    *("--set", "run.repeats=2", "--set", "run.warmup=0"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    kills = lost = torn = twice = different = folders = acknowledged = early = 0
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        # The command runs in forks of this process, so that every fork has its imports.
        torch.set_num_threads(1)
        with redirect_stdout(StringIO()):
            code = specdec([*map(str, SWEEP), "-o", str(whole)])
        assert code == 0, f"the undisturbed sweep ended with {code}"
        expected = without_times(samples(whole))
        while kills < args.kills:
            folder = Path(scratch) / f"run-{folders}"
            folders += 1
            told: list[list[object]] = []
            while True:
                # Most kills hit while samples are written, and some during loading or writing
                # points.
                after = rng.choice((0, 1, 1, 2, 3, 5))
                delay = rng.uniform(0.0, 0.8 if after == 0 else 0.15)
                code, safe = stopped_sweep(
                    [*SWEEP, "-o", folder, "--resume"], delay, signal.SIGKILL, after
                )
                told += safe
                now_lost, now_torn = lost_or_torn(folder, told)
                lost, torn = lost + now_lost, torn + now_torn
                if code == 0:
                    break
                if code != -signal.SIGKILL:
                    print(f"a sweep ended with {code}")
                    return 1
                kills += 1
                early += not safe
                if kills % 25 == 0:
                    print(f"{kills} kills: {lost} lost, {torn} torn", flush=True)
            acknowledged += len(told)
            twice += len(told) - len({json.dumps(key) for key in told})
            different += without_times(samples(folder)) != expected
    print(
        f"{kills} kills ({early} before a sample came) in {folders} sweeps, {acknowledged} samples "
        f"acknowledged: {lost} lost, {torn} torn, {twice} measured twice, {different} sweeps differ"
    )
    return int(bool(lost or torn or twice or different))


if __name__ == "__main__":
    sys.exit(main())
