"""`specdec compare-tp`: should the draft run on 1, 2, ... or all of the target's ranks?

Parses the command line and shows the results; `experiment.compare` does the work.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_cli.commands import options
from specdec_cli.commands.options import Asked, Prompts, option, shared
from specdec_cli.commands.resuming import resumed, say_kept, with_draft
from specdec_cli.commands.starting import importing
from specdec_cli.commands.status import conclude, set_up_logging, strictly, waiting, warn
from specdec_cli.commands.unused import warn_of_unused
from specdec_cli.errors import LOGGED, UsageError
from specdec_cli.launch.world import Place, join
from specdec_cli.text import say

RANKS_COMMAND = "compare-tp-ranks"

TargetTPs = Annotated[
    str | None,
    option("--target-tp", "LIST", "Ranks of the target, such as 1,2,4. Default: the recipe's."),
]
_DRAFT_TPS = "Ranks of the draft, such as 1,2,4. Default: every divisor of the target's."
DraftTPs = Annotated[str | None, option("--draft-tp", "LIST", _DRAFT_TPS)]
_BATCHES = "Use only the prompts of the first N batches at each batch size."
Batches = Annotated[int | None, option("--batches", "N", _BATCHES, min=1)]
DryRun = Annotated[bool, option("--dry-run", None, "Show what would be measured; start no ranks.")]


@shared()
def compare_tp(
    asked: Asked,
    source: Prompts,
    target_tp: TargetTPs = None,
    draft_tp: DraftTPs = None,
    batches: Batches = None,
    resume: options.Resume = False,
    dry_run: DryRun = False,
    repeats: options.Repeats = None,
    strict: options.Strict = False,
    batch_size: options.BatchSizes = None,
) -> None:
    """Find the number of the target's ranks on which the draft is fastest.

    Each pair of degrees runs in its own processes, together with k = 0. A pair that fails does not
    end the others. Without a recipe the bundled demo pair runs.
    """
    import tempfile

    from specdec_cli.commands.reading import find_prompts, recipe_options

    place = asked.place
    if place.seat is not None:
        raise UsageError(
            f"compare-tp starts its own ranks; {place.seat.started_by} started this one",
            "run it as a single process",
        )
    kept: dict[str, Any] = {}
    if resume:
        from specdec_cli.experiment.compare.comparison_records import ComparisonSettings

        asked, kept = resumed(asked, ComparisonSettings)
    resolved = with_draft(asked, kept).resolve(recipe_options(source) | {"repeats": repeats})
    has_draft = asked.given.get("draft") is not None
    unread = ("draft.tensor_parallel_size",)  # --draft-tp names the degrees
    warn_of_unused(asked, [resolved], has_draft=has_draft, unread=unread)
    if kept:
        target_tp = target_tp or ",".join(map(str, kept["target_tps"]))
        draft_tp = draft_tp or ",".join(map(str, kept["draft_tps"]))
        batches = batches or kept["batches"]
    degrees = degrees_of(target_tp, draft_tp, resolved.target.tensor_parallel_size)
    sizes = options.parse_counts(batch_size, "--batch-size")
    sizes = sizes or kept.get("batch_sizes", [resolved.run.batch_size])
    found = find_prompts(source, resolved, asked)
    resolved = resolved.model_copy(update={"data": found.data})
    output, quiet = asked.output, asked.quiet
    with waiting("getting ready", quiet=asked.hides_progress), contextlib.ExitStack() as scratch:
        with importing():
            from specdec_cli.experiment.compare import comparison_plan as plans
            from specdec_cli.experiment.compare.comparison_records import ComparisonRecords
            from specdec_cli.experiment.folders import settings_file
            from specdec_cli.experiment.folders.record_lines import to_json
            from specdec_cli.experiment.folders.run_folder import RunFolder

        unsaid = settings_file.unsaid
        plan = plans.plan_comparison(resolved, found, degrees, sizes, batches, asked.permissions())
        warnings = plans.warnings_of(plan)
        records, where = ComparisonRecords(plan.settings, plan.skips), plan.where
        if dry_run:
            if kept and output is not None:
                settings_file.check_same(output, "comparison", kept, plan.settings.as_dict())
                records.reopen(RunFolder(output), plan.to_run)
            document = plans.describe_plan(plan, records, warnings)
        elif output is not None:
            folder = settings_file.opened(
                *(output, plan.settings, plan.recipe, where),
                partial(records.reopen, to_run=plan.to_run),
                resume=resume,
                notices=warnings,
                own_prompts=plan.own_prompts,
            )
            warnings += unsaid(settings_file.read_warnings(output), warnings)
            if not records.is_open(plan.to_run):  # nothing left to run
                where = settings_file.earlier_environment(output, where)
        else:
            folder = RunFolder(Path(scratch.enter_context(tempfile.TemporaryDirectory())))
        until_end = scratch.pop_all()
    warn(warnings)
    if dry_run:
        typer.echo(to_json(document) if asked.as_json else document["text"])
        return

    from specdec_cli.experiment.compare.parent import conclusion, run_pairs
    from specdec_cli.experiment.folders.record_lines import added_records
    from specdec_cli.experiment.folders.records import Sample
    from specdec_cli.terminal.compare import print_results
    from specdec_cli.terminal.watching import watcher
    from specdec_cli.text import digest

    unseen = added_records(folder.path / "samples.jsonl", Sample)
    view = watcher(plan.num_samples, unseen, quiet=quiet)
    with until_end:
        try:
            run_pairs(plan, records, folder, ranks_program(asked), view)
        except (KeyboardInterrupt, SystemExit):
            if output is not None:
                view.close()
                done = sum(not records.open_sizes(pair) for pair in plan.to_run)
                own = {"skip_bad": source.skip_bad, "strict": strict}
                say_kept(f"{done} of {len(plan.to_run)} pairs", asked, "compare-tp", **own)
            raise
        finally:
            view.close()
            folder.close()
        document, code = conclusion(plan, records, [*warnings, *unsaid(LOGGED, warnings)], where)
        if kept:  # the models may be the same ones under other names
            document["comparison"] = kept | {"settings_hash": digest(kept)}
        if output is not None:
            folder.write("summary.json", to_json(document) + "\n")
    conclude(document, print_results, warnings, output, as_json=asked.as_json)
    raise typer.Exit(strictly(code, document["warnings"], strict=strict))


def compare_tp_ranks(
    ctx: typer.Context,
    num_ranks: int,
    device: str,
    timeout_s: float,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run one rank of one pair. Only `compare-tp` calls this command."""
    place: Place = ctx.obj
    if place.seat is None or place.seat.folder is None:
        raise UsageError(f"only compare-tp starts {RANKS_COMMAND}", "run specdec compare-tp")
    set_up_logging(verbose=verbose)
    # Standard output is only for the parent's results document, so a rank prints to stderr.
    with (
        contextlib.redirect_stdout(sys.stderr),
        join(place, num_ranks, device=device, timeout_s=timeout_s) as world,
    ):
        with importing():
            from specdec_cli.experiment.compare.worker import PairTask, measure
            from specdec_cli.experiment.folders.records import Point
            from specdec_cli.terminal.progress import can_redraw
            from specdec_cli.terminal.watching import point_line

        def tell(point: Point) -> None:
            if not quiet and not can_redraw():
                say(point_line(point))

        def missing() -> PairTask:
            raise AssertionError("run_ranks was given a task")

        measure(world, world.inputs(missing), tell)


def degrees_of(
    target_tp: str | None, draft_tp: str | None, recipe_tp: int
) -> tuple[list[int], list[int]]:
    """Parse the target and draft TP degrees to compare, and return each list in ascending order. If
    `target_tp` is None, the target has only the recipe's degree. If `draft_tp` is None, the draft
    has every degree that divides a target degree."""
    targets = sorted(options.parse_counts(target_tp, "--target-tp") or [recipe_tp])
    drafts = sorted(options.parse_counts(draft_tp, "--draft-tp"))
    divisors = {d for t in targets for d in range(1, t + 1) if t % d == 0}
    return targets, drafts or sorted(divisors)


def ranks_program(asked: Asked) -> list[str]:
    """Return the module and arguments that start a rank in the same way as this process."""
    flags = ["-q"] * asked.quiet + ["-v"] * asked.verbose
    return [asked.place.program[0], RANKS_COMMAND, *flags]
