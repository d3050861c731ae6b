"""The arguments that scripts for timing recipes share."""

import argparse
from pathlib import Path


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def recipe_arguments(description: str, repeats: int) -> argparse.ArgumentParser:
    """A parser with the recipe and the output's folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("recipe", help="recipe file, or name of a bundled recipe")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--profile", type=Path, help="write tables of time by kernel to this folder"
    )
    parser.add_argument("--json", type=Path)
    return parser
