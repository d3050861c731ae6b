"""Selects samples: those without errors, or those of one category. Also checks samples that were
read from a file."""

from collections.abc import Iterable, Mapping

from specdec_cli.experiment.folders.records import Sample

# The samples of one point, by prompt index or request number (see `Sample.place`).
Samples = Mapping[int, Sample]


def without_errors(samples: Samples) -> dict[int, Sample]:
    """Return the samples of prompts that could run."""
    return {i: s for i, s in samples.items() if s.could_run}


def why_none(samples: Samples) -> str:
    """Explain why a point has no result although its measurement did not fail: no prompt could run,
    or none was run."""
    why = next((s.error for s in samples.values() if s.error), None)
    return f"no prompt could run: {why}" if why else "no prompt was run"


def could_run_no_prompt(reason: str | None) -> bool:
    """Return True if `reason` says that the measurement of a point was finished, but that the
    engine refused every prompt."""
    return (reason or "").startswith("no prompt could run")


def prompts_by_category(samples: Samples, prompts: Iterable[int]) -> dict[str, list[int]]:
    """Group the indices in `prompts` by category, in ascending order. Return an empty dict if there
    are fewer than two categories."""
    found: dict[str, list[int]] = {}
    for index in sorted(prompts):
        if (name := samples[index].category) is not None:
            found.setdefault(name, []).append(index)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def not_measured(sample: Sample, num_prompts: int, repeats: int) -> str | None:
    """Explain why a sample cannot be from a run with this number of prompts and repeats. Return
    None if it can."""
    if sample.index >= num_prompts:
        return f"its index is {sample.index}, of {num_prompts} prompts"
    repeats = repeats if sample.request is None else 1
    for name in ("seconds", "decode_seconds", "round_share", "distinct_experts"):
        found = getattr(sample, name)
        if found is not None and len(found) != repeats:
            return f"{name} does not have {repeats} values, one per repeat"
    return None
