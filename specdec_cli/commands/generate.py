"""`specdec generate`: what does this pair write, how fast, how much of the draft was accepted?

Parses and prepares; `generate_run` runs and shows.
"""

from typing import Annotated, Any

import typer

from specdec_cli.commands import options
from specdec_cli.commands.options import Asked, option, shared
from specdec_cli.commands.starting import importing, joined
from specdec_cli.commands.status import waiting

Prompts = Annotated[
    list[str] | None, option("--prompt", "TEXT", "Text of a prompt; may be repeated.")
]
_PROMPT_FILE = "File of prompts: .txt (one a line), .jsonl, .json, .csv, .tsv or .parquet."
PromptFile = Annotated[str | None, option("--prompt-file", "FILE", _PROMPT_FILE)]


@shared()
def generate(
    asked: Asked,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    chat: options.Chat = None,
    system: options.System = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    check_lossless: options.CheckLossless = False,
) -> None:
    """Write text with a draft and a target model, and report what was accepted.

    Prompts come from --prompt, --prompt-file, standard input if it is piped, or the recipe's
    data. `-k 0` decodes without a draft. Without a recipe the bundled demo pair runs.
    """
    from specdec_cli.commands.reading import Source, chat_of, from_anywhere
    from specdec_cli.prompts import as_conversations

    source = Source(prompt or [], prompt_file, limit, skip_bad)
    resolved = asked.resolve({"prompt_file": source.recipe_path})
    use_chat, opening = chat_of(chat, system, resolved.data)

    def read() -> Any:
        found, data = from_anywhere(source, resolved.data, options.parse_sets(asked.sets or ()))
        if data is not None:
            data = data.model_copy(update={"chat": use_chat, "system": opening})
        return as_conversations(found, use_chat, opening), data

    asked.warn_of_unused(resolved, has_draft=asked.given["draft"] is not None)
    with joined(asked.place, [resolved], read) as (world, (prompts, data)):
        named = resolved.model_copy(update={"data": data})
        is_single = bool(prompt) and len(prompts) == 1
        with waiting("getting ready", quiet=asked.quiet) as stages:
            with importing():
                from specdec_cli.commands.generate_run import get_ready, write
            ready = get_ready(
                world, named, prompts, asked, stages, is_single=is_single, checks=check_lossless
            )
        world.ready()
        code = write(world, ready, asked, is_single=is_single, checks=check_lossless)
    raise typer.Exit(code)
