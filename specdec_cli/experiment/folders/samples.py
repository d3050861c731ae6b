"""The samples of a point: which of them ran, their speeds, and those of k = 0 beside them."""

from collections.abc import Iterable, Mapping

from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.repeats import decode_seconds, decoded_tokens
from specdec_cli.experiment.statistics.stats import SumRatio

Samples = Mapping[int, Sample]  # of one point, by prompt index


def without_errors(samples: Samples) -> dict[int, Sample]:
    """The samples of prompts that could run."""
    return {i: s for i, s in samples.items() if s.could_run}


def why_none(samples: Samples) -> str:
    """The reason of a point that did not fail, but none of whose prompts ran."""
    why = next((s.error for s in samples.values() if s.error), None)
    return f"no prompt could run: {why}" if why else "no prompt was run"


def baseline_of(samples: Mapping[Key, Samples], key: Key) -> Samples:
    """The samples at k = 0 of an arm's own, else those that all arms share; none without."""
    return samples.get(Key(key.draft, key.batch_size, 0)) or samples.get(
        Key(None, key.batch_size, 0), {}
    )


def prompts_by_category(samples: Samples, prompts: Iterable[int]) -> dict[str, list[int]]:
    """The indices among `prompts` of each category, all rising; empty for fewer than two."""
    found: dict[str, list[int]] = {}
    for index in sorted(prompts):
        if (name := samples[index].category) is not None:
            found.setdefault(name, []).append(index)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def measured_speed(samples: Iterable[Sample]) -> SumRatio:
    """Output tokens that rounds decided, per second of round time."""
    chosen = list(samples)
    return stats.speed(list(map(decoded_tokens, chosen)), list(map(decode_seconds, chosen)))


def speedup(samples: Samples, baseline: Samples) -> SumRatio | None:
    """Decoding speed relative to the same prompts at k = 0; None without common prompts."""
    common = sorted(samples.keys() & baseline.keys())
    if not common:
        return None
    return measured_speed([samples[i] for i in common]).over(
        measured_speed([baseline[i] for i in common])
    )
