"""The recipes that come with specdec.

Knows their paths and their first lines, not their contents.
"""

from dataclasses import dataclass
from pathlib import Path

import specdec_cli


@dataclass(frozen=True, slots=True)
class BundledRecipe:
    """`description` is the first comment line of the file."""

    name: str
    path: Path
    description: str


def bundled_folder() -> Path:
    """The recipes' folder: inside the package in a wheel, beside the package in a checkout."""
    package = Path(specdec_cli.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def bundled_recipes() -> list[BundledRecipe]:
    """All bundled recipes, sorted by name."""
    return [
        BundledRecipe(path.stem, path, _first_comment(path))
        for path in sorted(bundled_folder().glob("*.yaml"), key=lambda path: path.stem)
    ]


def find_bundled(name: str) -> BundledRecipe | None:
    """The bundled recipe of that name, given with or without `.yaml`."""
    stem = name.removesuffix(".yaml")
    return next((recipe for recipe in bundled_recipes() if recipe.name == stem), None)


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
