"""The folder on disk for a model's name in a recipe.

A name is a folder, one of the bundled demo models (`demo:target`), or a hub id. Reads no weights.
"""

from pathlib import Path

from specdec_cli import demo
from specdec_cli.errors import SetupError
from specdec_cli.text import one_line

# Files that are downloaded from the hub. Weights for other engines lie in subfolders or are called
# consolidated.
_DESCRIPTIONS = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")
_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin",)
_FOR_OTHERS = ("*/*.safetensors", "*/*.bin", "consolidated*", "training_args.bin")


def model_folder(
    name: str, revision: str | None, *, weights: bool = True, allow_pickle: bool = False
) -> Path:
    """The folder of a model's config and, with `weights`, its weights, or pickled ones if allowed.

    A hub id is taken from the local cache, or downloaded where that is possible. Raises
    `SetupError` when there is no such model.
    """
    if (local := local_folder(name)) is not None:
        return local
    wanted = [*_DESCRIPTIONS, *(_WEIGHTS if weights else ())]
    folder = _from_hub(name, revision, wanted)
    if weights and allow_pickle and not any(folder.glob("*.safetensors")):
        folder = _from_hub(name, revision, [*wanted, *_PICKLES])
    return folder


def local_folder(name: str) -> Path | None:
    """The folder of a model that is on this machine, or None for a hub id.

    Raises `SetupError` for a name that can only be a path, and leads to no model.
    """
    if name.startswith(demo.PREFIX):
        folder = demo.demo_path(name)
        if not (folder / "config.json").is_file():
            known = sorted(p.parent.name for p in demo.FOLDER.glob("*/config.json"))
            raise SetupError(
                f"no bundled model {name}",
                f"bundled are {', '.join(demo.PREFIX + n for n in known)}",
            )
        return folder
    try:
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as problem:  # too long, or an unknown user's home
        why = getattr(problem, "strerror", None) or problem
        raise SetupError(f"no such model: {one_line(name)}: {why}", "is the path right?") from None
    if is_folder:
        if not (path / "config.json").is_file():
            raise SetupError(f"no config.json in the model folder {name}", "is the path right?")
        return path
    if is_there:
        raise SetupError(
            f"the model {name} is a file",
            "name the folder that holds config.json and the weights",
        )
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path:
        raise SetupError(f"no such model folder: {name}", "check the path in the recipe")
    return None


def _from_hub(name: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=list(_FOR_OTHERS)
        )
        return Path(found)
    except HFValidationError:
        raise SetupError(
            f"no such model: {name}", "name a folder, a hub id (owner/name) or demo:target"
        ) from None
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
        raise SetupError(
            f"the model {name} is neither a local folder nor in the local cache, and could not be "
            f"downloaded ({type(problem).__name__})",
            f"run `hf download {name}` where the hub can be reached, or pass a local folder",
        ) from problem
