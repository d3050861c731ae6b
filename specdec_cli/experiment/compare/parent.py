"""The parent process of a comparison: it starts the ranks of one pair after another.

If the ranks of one pair fail, the parent records the failure and goes on with the next pair.
"""

from collections.abc import Sequence
from typing import Any

from specdec_cli.errors import ExitCode, Notice
from specdec_cli.experiment.compare.comparison_plan import ComparisonPlan
from specdec_cli.experiment.compare.comparison_records import ComparisonRecords
from specdec_cli.experiment.compare.verdict import verdict_of
from specdec_cli.experiment.compare.worker import PairTask
from specdec_cli.experiment.duration import own_plan
from specdec_cli.experiment.folders.conclusions import VERSION, Tokens
from specdec_cli.experiment.folders.run_folder import LostRecords, RunFolder
from specdec_cli.experiment.measure import Watcher
from specdec_cli.experiment.memory import memory_cost
from specdec_cli.experiment.points import Failure, error_of
from specdec_cli.experiment.served import remarks_of
from specdec_cli.experiment.statistics.noise import impossible_speeds, noise_in
from specdec_cli.experiment.statistics.promise import tokens_notice
from specdec_cli.experiment.sweep.document import exit_code, prompts_that_failed
from specdec_cli.launch.ranks import run_ranks
from specdec_cli.launch.reports import End, Report


def run_pairs(
    plan: ComparisonPlan,
    records: ComparisonRecords,
    folder: RunFolder,
    program: Sequence[str],
    watcher: Watcher,
) -> None:
    """Measure every pair that is not recorded yet.

    program: the module that each rank runs, and its arguments. This function appends the number of
        ranks, the device and the timeout.
    """
    records.kept.folder = folder
    records.update_points()
    # List these first, because `_take_over` reloads even the samples that `reopen` dropped.
    for pair, sizes in [(pair, records.open_sizes(pair)) for pair in plan.to_run]:
        if not sizes:
            continue
        watcher.begin(pair)
        run = plan.recipe.run
        task = PairTask(
            pair=pair,
            settings=plan.settings,
            recipe=plan.recipe,
            prompts=plan.job.prompts,
            permissions=plan.permissions,
            batch_sizes=tuple(sizes),
            folder=folder.path,
            warnings=facts.warnings if (facts := records.kept.facts.get(pair)) else (),
        )
        options = [str(pair.target_tp), run.device, str(run.timeout_s)]
        try:
            ended = run_ranks(
                [*program, *options], pair.target_tp, timeout_s=run.timeout_s, inputs=task
            )
        except (KeyboardInterrupt, SystemExit):
            _take_over(folder, records)
            records.update_points()
            raise
        _take_over(folder, records)
        for batch_size in records.open_sizes(pair):
            failure = _failure(ended)
            records.failures[pair, batch_size] = failure
            watcher.failed(pair, batch_size, failure)
        records.update_points()


def _take_over(folder: RunFolder, records: ComparisonRecords) -> None:
    """Reload the records after the ranks of a pair have ended. Ranks that were killed may have left
    incomplete last lines, which are removed first.

    Raises `LostRecords` if records that were there before are missing.
    """
    earlier = records.counts
    folder.mend()
    records.load(folder)
    for (pair, name), count in earlier.items():
        if (lost := count - records.counts.get((pair, name), 0)) > 0:
            raise LostRecords(f"{folder.path / name} lost {lost} of {count} records of {pair}")


def _failure(report: Report) -> Failure:
    code = ExitCode.RUN_FAILED if report.end is End.DONE else report.code
    if report.explained is None:
        return Failure("failed", "the ranks ended without a report", code)
    is_memory = (report.message or "").startswith(("out of memory", "no room for a KV cache"))
    return Failure("oom" if is_memory else "failed", report.explained.partition("\n")[0], code)


def conclusion(
    plan: ComparisonPlan,
    records: ComparisonRecords,
    warnings: Sequence[Notice],
    where: dict[str, Any],
) -> tuple[dict[str, Any], ExitCode]:
    """Build the document of `compare-tp --json` and summary.json, and choose the exit code.

    where: the description of the environment to put into the document.
    """
    kept = records.kept
    seen = [Notice.read(one) for facts in kept.facts.values() for one in facts.warnings]
    noise = [*seen, *noise_in(kept.samples), *impossible_speeds(records.points)]
    verdict = verdict_of(records, [*warnings, *noise])
    said = [
        *warnings,
        *prompts_that_failed(kept.samples.values()),
        *noise,
        *tokens_notice(verdict["tokens"]),
        *remarks_of(kept.samples.values()),
    ]
    document = {
        "schema": "specdec.compare-tp/1",
        "version": VERSION,
        "recipe": plan.recipe.model_dump(mode="json"),
        "environment": where,
        "comparison": plan.settings.in_document(),
        "points": records.points,
        **verdict,
        "memory": [
            memory_cost(own_plan(plan.job), plan.job.longest_prompt, where, pair)
            for pair in plan.settings.pairs
            if pair in kept.facts
        ],
        "pairs": [kept.facts[pair] for pair in plan.settings.pairs if pair in kept.facts],
        "warnings": said,
    }
    code = code_of(records, verdict["tokens"])
    return document | error_of(records.points, code), code


def code_of(records: ComparisonRecords, tokens: Tokens) -> ExitCode:
    """Choose the exit code of a comparison. A skipped pair makes it `ExitCode.PARTIAL`, unless no
    machine could run that pair, or it was fully measured before.

    tokens: the `tokens` field of the document.
    """
    return exit_code(
        records.points,
        records.kept.samples.values(),
        tokens,
        records.failures.values(),
        is_partial=records.is_open(p for p, skip in records.skips.items() if not skip.expected),
    )
