"""Runs a planned sweep of `specdec sweep-k` and shows its results. Imports torch, so other modules
import it inside functions."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import typer

import specdec_cli
from specdec_cli.commands.options import Asked
from specdec_cli.commands.status import conclude, strictly, waiting, warn
from specdec_cli.errors import LOGGED, ExitCode, SpecdecError
from specdec_cli.experiment.folders.record_lines import to_json
from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.experiment.folders.settings_file import keep_warnings, read_warnings, unsaid
from specdec_cli.experiment.preparing import few_prompts
from specdec_cli.experiment.sweep.runner import Sweep
from specdec_cli.experiment.sweep.running import StartedSweep, Starter
from specdec_cli.experiment.sweep.sweep_folder import finish, open_folder, samples_of
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan, describe_plan, warnings_of
from specdec_cli.experiment.sweep.sweep_records import SweepRecords
from specdec_cli.launch.world import World
from specdec_cli.terminal.sweep import print_results
from specdec_cli.terminal.watching import watcher


@dataclass(frozen=True, slots=True)
class Own:
    """The flags of `sweep-k` that the run needs, of the same names."""

    resume: bool
    dry_run: bool
    strict: bool
    pairs: bool


def run(
    world: World,
    plan: SweepPlan,
    asked: Asked,
    own: Own,
    named: "specdec_cli.commands.servers.Named | None",
    starter: Starter | None,
) -> ExitCode:
    """Measure all points, and return the exit code. Rank 0 stores and shows the results.

    named: the servers to measure; None if the user started none. starter: starts servers; None if
    the sweep starts none.
    """
    output, quiet = asked.output, asked.quiet
    with waiting("getting ready", quiet=asked.hides_progress):
        warnings = [*warnings_of(plan), *few_prompts(plan.num_prompts)]
        records, folder, plain = SweepRecords(), None, list[Sample]()
        if named is not None and named.baseline is not None:
            plain = samples_of(Path(named.baseline), plan)
        if not own.dry_run and output is not None:
            if world.is_first:
                folder = open_folder(output, plan, records, resume=own.resume)
                warnings += unsaid(read_warnings(output), warnings)
                if named is not None:
                    from specdec_cli.commands import servers

                    servers.keep(folder, named)
            # Every rank must skip the samples that the folder already has.
            found = world.once(lambda: replace(records, folder=None))
            records = records if world.is_first else found
        if not own.dry_run:
            known = records.samples
            records.add(*(s for s in plain if s.index not in known[Key.of(s)]))
    with world.outside():
        warn(warnings)
        if own.dry_run:
            planned = describe_plan(plan, warnings)
            typer.echo(to_json(planned) if asked.as_json else planned["text"])
            return ExitCode.OK

    done = sum(map(len, records.samples.values()))
    view = watcher(plan.num_samples - done, quiet=quiet or not world.is_first)
    parts = plan, records, view, world
    sweep: Sweep | StartedSweep
    sweep = Sweep(*parts) if starter is None else StartedSweep(*parts, starter)
    try:
        measured = sweep.run()
    except BaseException:
        if folder is not None:
            with suppress(SpecdecError, OSError):  # the first error matters more
                # The command that resumes the run must know what disturbed its first part.
                keep_warnings(folder, plan.settings, sweep.of_machine)
        raise
    finally:
        view.close()
        if folder is not None:
            folder.close()

    def end() -> ExitCode:
        found = unsaid(sweep.notices, warnings)
        if folder is not None:
            keep_warnings(folder, plan.settings, found)
        said = [*warnings, *found, *unsaid(LOGGED, warnings)]
        document, code = finish(sweep, measured, said)
        with world.outside():
            shown = partial(print_results, with_pairs=own.pairs)
            path = None if folder is None else folder.path
            conclude(document, shown, warnings, path, as_json=asked.as_json)
        return strictly(code, document["warnings"], strict=own.strict)

    return world.once(end)
