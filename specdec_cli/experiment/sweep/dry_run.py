"""The dry run of a sweep on our own engine: its points, and about how long they take."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import rate_in_words
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan


def describe_plan(plan: SweepPlan, warnings: Sequence[Notice]) -> dict[str, Any]:
    """The document of `--dry-run`; its `text` is for people."""
    s, run = plan.settings, plan.recipe.run
    longest = max(job.longest_prompt for job in plan.jobs)
    repeats = run.repeats if s.offered is None else 1
    most = plan.num_prompts * plan.recipe.sampling.max_new_tokens
    written = plan.num_samples * plan.recipe.sampling.max_new_tokens
    points = [
        {
            **key.as_dict(),
            "batch_size": b or None,
            "measured": key.k in s.measured_ks,
        }
        for b, rate in s.levels
        for key in s.keys(b, s.ks, rate)
    ]
    times = "once" if repeats == 1 else f"{repeats} times"
    size = f"batch sizes: {', '.join(map(str, s.batch_sizes))}"
    if s.offered is not None:
        rates = ", ".join(map(rate_in_words, s.offered.rates))
        most_at_once = s.batch_sizes[0] or "any number"
        size = f"arrivals: {s.offered.arrivals}, {rates}; at most under way: {most_at_once}"
    text = [
        f"drafts: {', '.join(str(d) for d in s.drafts)}"
        + (", in turn on the same prompts, with one k = 0 for all" if s.shares_baseline else ""),
        f"k: {', '.join(map(str, s.ks))}"
        + (f" (measured: {', '.join(map(str, s.measured_ks))})" if s.predict_only else ""),
        size,
        f"prompts: {plan.num_prompts}"
        + (f" (shard {s.shard[0]}/{s.shard[1]} of {s.prompts['count']})" if s.shard else "")
        + f", the longest of {longest} tokens",
        f"points: {len(points)}, samples: {plan.num_samples}, each measured {times}",
        f"tokens to write: at most {written * repeats:,}",
    ]
    jobs = dict(zip(s.drafts, plan.jobs, strict=True))
    by_key = {key: jobs.get(key.draft, plan.jobs[0]) for key in s.measured_keys}
    seconds: dict[str, Any] = {}
    if plan.jobs[0].backend.is_native and s.offered is None:
        from specdec_cli.experiment.duration import estimated

        line, seconds = estimated(by_key, has_curve=max(s.ks) > 0)
        text.append(line)
    return {
        "schema": "specdec.sweep-k.plan/1",
        "recipe": plan.recipe.model_dump(mode="json"),
        "sweep": s.in_document(),
        "points": points,
        "num_prompts": plan.num_prompts,
        "num_samples": plan.num_samples,
        "longest_prompt": longest,
        "repeats": run.repeats,
        "most_output_tokens_per_point": most,
        **seconds,
        "warnings": list(warnings),
        "text": "\n".join(text),
    }
