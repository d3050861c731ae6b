"""`specdec generate`: writes text with a draft and a target, and reports speed and acceptance.

Parses the command line and prepares the run; `generate_run` runs it and shows the results.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

import specdec_cli
from specdec_cli.commands import options
from specdec_cli.commands.options import Asked, Prompts, option, shared
from specdec_cli.commands.resuming import (
    folder_of_servers,
    resumed,
    saying_what_is_kept,
    with_draft,
)
from specdec_cli.commands.starting import importing, joined
from specdec_cli.commands.status import waiting
from specdec_cli.commands.unused import warn_of_unused
from specdec_cli.errors import UsageError
from specdec_cli.stages import begin_stage

_NEXT = "Write a .jsonl file of the conversations with these answers and each user's next turn."
NextTurns = Annotated[Path | None, option("--next-turns", "FILE", _NEXT, parser=Path)]


@shared()
def generate(
    asked: Asked,
    source: Prompts,
    resume: options.Resume = False,
    next_turns: NextTurns = None,
    check_lossless: options.CheckLossless = False,
    server: options.Server = None,
    strict: options.Strict = False,
) -> None:
    """Write text with a draft and a target model, and report what was accepted.

    Prompts come from --prompt, --prompt-file, --dataset, standard input if it is piped, or the
    recipe's data. `-k 0` decodes without a draft. Without a recipe the bundled demo pair runs.
    """
    from specdec_cli.commands.reading import find_prompts, recipe_options

    kept: dict[str, Any] = {}
    if resume:
        from specdec_cli.experiment.folders.generate_folder import GenerateSettings

        asked, kept = resumed(asked, GenerateSettings)
    resolved = with_draft(asked, kept).resolve(recipe_options(source))
    named, earlier = None, folder_of_servers(asked, kept)
    asks = server is not None or earlier is not None
    has_draft, unread = asked.given["draft"] is not None, ("run.repeats", "run.warmup")
    warn_of_unused(asked, [resolved], has_draft=has_draft, unread=unread, asks=asks)
    if asks:
        from specdec_cli.commands import servers

        k, urls = asked.given["num_speculative_tokens"], None if server is None else [server]
        named = servers.named(urls, None, None, None if k is None else [k], earlier)
    if named is not None and check_lossless:
        told = "--check-lossless needs the target's logits, which a server does not return"
        raise UsageError(told, "leave it out, or use sweep-k --server, which compares texts")
    begin_stage("reading the prompts")
    flags = {"skip_bad": source.skip_bad, "check_lossless": check_lossless, "strict": strict}
    with (
        saying_what_is_kept(asked, "generate", "prompt", next_turns=next_turns, **flags),
        joined(
            asked.place,
            [resolved],
            lambda: find_prompts(source, resolved, asked, reads_pipe=True),
            computes=named is None,
        ) as (world, found),
        ExitStack() as open_until_end,
    ):
        if next_turns is not None:
            _check_turns(found.prompts, next_turns, asked.output)
        is_single = bool(source.prompt) and len(found.prompts) == 1
        with waiting("getting ready", quiet=asked.hides_progress) as stages:
            backend: specdec_cli.backends.base.Backend
            if named is not None:
                from specdec_cli.backends.server.backend import ServerBackend

                backend = there = open_until_end.enter_context(ServerBackend())
                servers.look_at_all(there, resolved, named)
            with importing(world.device if named is None else "cpu"):
                if named is None:
                    from specdec_cli.backends import native

                    backend = native
                from specdec_cli.commands.generate_run import Own, get_ready, write
            own = Own(resume, next_turns, check_lossless, is_single, strict)
            ready = get_ready(backend, world, resolved, found, asked, own, stages)
            if named is not None and ready.folder is not None:
                servers.keep(ready.folder, named)
        world.ready()
        code = write(world, ready, asked, own)
    raise typer.Exit(code)


def _check_turns(
    prompts: "list[specdec_cli.prompts.Prompt]", file: Path, output: Path | None
) -> None:
    """Raise `UsageError` if --next-turns would have nothing to write, or nowhere to write it, and
    `SetupError` if its folder cannot be written.

    output: the run folder, which the run creates with the folders around it; None without one.
    """
    from tempfile import TemporaryFile

    from specdec_cli.experiment.disk import or_setup_error

    if not any(prompt.later for prompt in prompts):
        raise UsageError(
            "--next-turns: no conversation has a further turn",
            "use data with several turns per conversation",
        )
    if any(prompt.later and prompt.messages is None for prompt in prompts):
        raise UsageError("--next-turns needs conversations", "pass --chat")
    if os.path.exists(file):
        raise UsageError(f"--next-turns: {file} already exists", "name a new file")
    folder, run = Path(os.path.abspath(file)).parent, Path(os.path.abspath(output or os.curdir))
    if folder.is_dir():
        with or_setup_error(f"cannot write {file}"), TemporaryFile(dir=folder):
            pass
    elif folder not in (run, *run.parents):
        raise UsageError(f"--next-turns: there is no folder {file.parent}", "create it first")
