"""`specdec merge`: joins the shards of a sweep, without measuring or loading a model."""

from pathlib import Path
from typing import Annotated

import typer

from specdec_cli.commands import options
from specdec_cli.commands.starting import NUMPY_MIB, check_room
from specdec_cli.commands.status import conclude, set_up_logging, waiting
from specdec_cli.errors import UsageError
from specdec_cli.launch.world import Place

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...", parser=options.folder, help="Run folders of the shards of one sweep."
    ),
]


def merge(
    ctx: typer.Context,
    folders: Folders,
    plugin: options.Plugins = None,
    output: options.Output = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Join the shards of a sweep into one folder, as if a single sweep had written it.

    Points, intervals and the recommendation are recomputed from all samples.
    """
    place: Place = ctx.obj
    if not place.is_first:
        return
    if output is None:
        raise UsageError("merge needs an output folder", "name a new one with -o DIR")
    set_up_logging(verbose=verbose)
    check_room("numpy", NUMPY_MIB)
    options.load_plugins(plugin)  # first, since the shards' recipe may name plugins' methods
    with waiting("merging", quiet=quiet):
        from specdec_cli.experiment.sweep.merge import merge_folders
        from specdec_cli.terminal.sweep import print_results

        document, code = merge_folders(folders, output)
    conclude(document, print_results, (), output, as_json=as_json)
    raise typer.Exit(code)
