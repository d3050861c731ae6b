"""`specdec recipe`: lists, shows and checks recipes without loading models.

It does not look at models or devices, so it cannot tell whether a recipe can run here.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specdec_cli.commands.help_page import Command, Commands
from specdec_cli.commands.options import (
    Json,
    Plugins,
    Quiet,
    Set,
    Verbose,
    complete_recipe,
    load_plugins,
    resolve,
)
from specdec_cli.errors import UsageError
from specdec_cli.text import inert

app = typer.Typer(cls=Commands, help="List, show and check recipes.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def group(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise UsageError("no subcommand given", "ls, show, validate or schema")


@app.command("ls", cls=Command)
def list_recipes(as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the bundled recipes."""
    from specdec_cli.recipe import bundled_recipes

    recipes = bundled_recipes()
    if as_json:
        found = [asdict(r) | {"path": str(r.path)} for r in recipes]
        _print_json({"schema": "specdec.recipes/1", "recipes": found, "warnings": []})
        return
    width = max((len(r.name) for r in recipes), default=0)
    for r in recipes:
        typer.echo(f"{r.name:<{width}}  {r.description}")


@app.command("show", cls=Command)
def show_recipe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Bundled recipe, or recipe file.", autocompletion=complete_recipe
        ),
    ],
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Fill in every default and drop comments.")
    ] = False,
    sets: Set = None,
    plugin: Plugins = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print a recipe as written, or with all defaults."""
    from specdec_cli.recipe import dump_recipe
    from specdec_cli.recipe.resolve import find_source

    load_plugins(plugin)
    recipe = resolve(name, sets, {})
    path = find_source(name)
    if as_json:
        shown = recipe.model_dump(mode="json")
        of_file = {"path": str(path), "recipe": shown}
        _print_json({"schema": "specdec.recipe/1", **of_file, "warnings": []})
    elif resolved or sets:
        typer.echo(dump_recipe(recipe), nl=False)
    else:
        typer.echo(inert(path.read_text(encoding="utf-8-sig")), nl=False)


@app.command("validate", cls=Command)
def validate_recipes(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Files or bundled names.", autocompletion=complete_recipe
        ),
    ],
    plugin: Plugins = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check recipes, and report every problem in each."""
    load_plugins(plugin)
    problems: list[str] = []
    hint: str | None = None
    for path in paths:
        try:
            resolve(path, None, {})
        except UsageError as error:
            problems.append(error.message)
            hint = hint or error.hint
    if problems:
        raise UsageError("\n".join(problems), hint)
    if as_json:
        valid = [str(Path(path)) for path in paths]
        _print_json({"schema": "specdec.recipe-validate/1", "valid": valid, "warnings": []})
        return
    for path in paths:
        typer.echo(f"{inert(path)}: ok")


@app.command("schema", cls=Command)
def print_schema(as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List every key with its default and meaning; with --json, print a JSON Schema."""
    from specdec_cli.recipe import Recipe
    from specdec_cli.recipe.schema import key_fields

    if as_json:
        _print_json(Recipe.model_json_schema())
        return
    keys = key_fields()
    width = max(len(key) for key in keys)
    for key, info in keys.items():
        default = info.get_default(call_default_factory=False)
        shown = "required" if info.is_required() else json.dumps(default)
        typer.echo(f"{key:<{width}}  {shown:<13}  {info.description}")


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))
