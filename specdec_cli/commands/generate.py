"""`specdec generate`: what does this pair write, how fast, how much of the draft was accepted?

Parses and prepares; `generate_run` runs and shows.
"""

from typing import Annotated

import typer

from specdec_cli.commands.options import Asked, Prompts, option, shared
from specdec_cli.commands.starting import importing, joined
from specdec_cli.commands.status import waiting
from specdec_cli.errors import UsageError

Resume = Annotated[bool, option("--resume", None, "Continue the run in the folder of -o.")]


@shared()
def generate(
    asked: Asked,
    source: Prompts,
    resume: Resume = False,
) -> None:
    """Write text with a draft and a target model, and report what was accepted.

    Prompts come from --prompt, --prompt-file, --dataset, standard input if it is piped, or the
    recipe's data. `-k 0` decodes without a draft. Without a recipe the bundled demo pair runs.
    """
    from specdec_cli.commands.reading import find_prompts, recipe_options

    if resume and asked.output is None:
        raise UsageError("--resume needs the run's folder", "name it with -o DIR")
    resolved = asked.resolve(recipe_options(source))
    asked.warn_of_unused(resolved, has_draft=asked.given["draft"] is not None)
    with joined(
        asked.place, [resolved], lambda: find_prompts(source, resolved, asked, reads_pipe=True)
    ) as (world, found):
        is_single = bool(source.prompt) and len(found.prompts) == 1
        with waiting("getting ready", quiet=asked.quiet) as stages:
            with importing():
                from specdec_cli.commands.generate_run import get_ready, write
            ready = get_ready(
                world, resolved, found, asked, stages, is_single=is_single, resume=resume
            )
        world.ready()
        code = write(world, ready, asked, is_single=is_single)
    raise typer.Exit(code)
