"""`specdec methods`: lists the methods, rules, policies and bundled models that options may name.

Imports nothing heavy.
"""

import json
from typing import Any

import typer

from specdec_cli import demo
from specdec_cli.commands.options import Json, Plugins, Quiet, Verbose, load_plugins
from specdec_cli.text import inert

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def methods(
    plugin: Plugins = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List methods, acceptance rules, length policies, and bundled drafts and targets."""
    from specdec_cli.recipe.choices.registry import METHODS, POLICIES, RULES

    load_plugins(plugin)
    found: dict[str, list[dict[str, str]]] = {
        "methods": [
            {"name": name, "what": choice.what, "weights_from": choice.weights_from}
            for name, choice in METHODS.items()
        ],
        "rules": [{"name": name, "what": choice.what} for name, choice in RULES.items()],
        "policies": [{"name": name, "what": choice.what} for name, choice in POLICIES.items()],
        "drafts": [one for name in demo.models() if (one := _draft(name)) is not None],
        "targets": [
            {
                "name": f"{demo.PREFIX}target",
                "what": "7 M parameters, writes Python",
                "path": str(demo.FOLDER / "target"),
            }
        ],
    }
    if as_json:
        typer.echo(json.dumps({"schema": "specdec.methods/1", **found, "warnings": []}))
        return
    titles = {
        "methods": "methods (--method; those that propose without a draft model also as --draft)",
        "rules": "acceptance rules (--set speculation.acceptance=NAME)",
        "policies": "length policies (--set speculation.length.policy=NAME)",
        "drafts": "bundled drafts (--draft)",
        "targets": "bundled targets (--target); `specdec recipe ls` lists whole recipes",
    }
    for number, (key, title) in enumerate(titles.items()):
        width = max(len(row["name"]) for row in found[key])
        typer.echo(f"{'' if number == 0 else chr(10)}{title}:")
        for row in found[key]:
            typer.echo(inert(f"  {row['name']:<{width}}  {row['what']}"))


def _draft(name: str) -> dict[str, str] | None:
    """Make the row of a bundled draft: its name, method and target. Return None for a target."""
    from specdec_cli.recipe.choices.registry import fitting_forms

    if name == "target":
        return None
    config: dict[str, Any] = json.loads((demo.FOLDER / name / "config.json").read_text())
    fits = fitting_forms(config)
    method = fits[0].method if fits else "draft_model"
    target = _SMOLLM2 if name.startswith("smollm2") else f"{demo.PREFIX}target"
    named = f"{demo.PREFIX}{name}"
    return {
        "name": named,
        "what": f"{method}, for {target}",
        "method": str(method),
        "target": target,
        "path": str(demo.FOLDER / name),
    }
