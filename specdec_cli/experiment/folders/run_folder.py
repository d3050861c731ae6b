"""Locks a run folder against other writers, and writes records and documents into it so that they
survive a crash."""

import fcntl
import logging
import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.core.figures import Record
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.experiment.disk import or_setup_error, replace_file
from specdec_cli.experiment.folders.record_lines import to_json
from specdec_cli.recipe import PROMPTS, Recipe, dump_recipe
from specdec_cli.text import is_unicode, one_line

_log = logging.getLogger("specdec")
_RECORDS = ("samples", "points", "replay", "curve", "pairs", "load")
# Further files that runs and their reports replace. A folder with one of them, but without a
# recipe.yaml, belongs to the user.
_REPLACED = (
    *("settings.json", "summary.json", "environment.json", "servers.json"),
    *("report.html", "plots", "memory.png"),
)


class LostRecords(SetupError):
    """Another program removed or changed files of the folder while a run wrote to it. The exit code
    is 1."""

    code = ExitCode.RUN_FAILED

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} while the run wrote there: its records are lost",
            "let nothing else change the folder of a run, and run again",
        )


@dataclass(slots=True)
class RunFolder:
    """A folder of results. A record survives a crash once `append` has returned.

    Raises `SetupError` when the folder cannot be written, and `UsageError` when it contains the
    results of another run.
    """

    path: Path
    _files: dict[str, int] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file after our last write

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Open the folder of an earlier run: lock it and repair its files."""
        folder = cls(path)
        folder._claim()
        folder.mend()
        return folder

    @classmethod
    def create(
        cls, path: Path, recipe: Recipe, where: dict[str, Any], own_prompts: str | None = None
    ) -> "RunFolder":
        """Create a folder, and write the recipe and the environment into it. own_prompts: the text
        of prompts.jsonl, if the folder must store the prompts itself."""
        folder = cls(path)
        if own_prompts is not None:
            folder.refuse_foreign(PROMPTS)
        found_from_anywhere(recipe)  # raises before any file is written
        with _or_unusable(path):
            path.mkdir(parents=True, exist_ok=True)
            _sync_names(path.parent)
            folder._claim()
            earlier = [file.name for file in folder._record_files() if file.stat().st_size]
        if earlier:
            folder.close()
            raise UsageError(
                f"{path} holds the results of an earlier run ({earlier[0]})",
                "name another folder with -o, or continue that run (--resume)",
            )
        if _is_foreign(path / "recipe.yaml"):
            raise folder._not_ours("recipe.yaml")
        for name in _REPLACED:
            folder.refuse_foreign(name)
        folder.write_recipe(recipe)
        folder.write("environment.json", to_json(where) + "\n")
        if own_prompts is not None:
            folder.write(PROMPTS, own_prompts)
        return folder

    def write_recipe(self, recipe: Recipe) -> None:
        """Write recipe.yaml. It names the folder's own prompts by a relative path, so that the
        folder can be moved."""
        recipe, data = found_from_anywhere(recipe), recipe.data
        if data is not None and data.path == os.path.abspath(self.path / PROMPTS):
            recipe = recipe.changed("data", path=PROMPTS)
        self.write("recipe.yaml", dump_recipe(recipe))

    def refuse_foreign(self, name: str) -> None:
        """Raise `UsageError` if the folder has a file of this name that no run wrote."""
        with _or_unusable(self.path):
            is_there, is_ours = ((self.path / n).exists() for n in (name, "recipe.yaml"))
        if is_there and not is_ours:
            raise self._not_ours(name)

    def _not_ours(self, name: str) -> UsageError:
        self.close()
        return UsageError(
            f"{self.path / name} was not written by a run, and would be overwritten",
            "name another folder with -o, or move that file away",
        )

    def mend(self) -> None:
        """Truncate incomplete last lines that a crash left in the run's records."""
        for file in self._record_files():
            with or_setup_error(f"cannot repair {file}"):
                content = file.read_bytes()
                end = content.rfind(b"\n") + 1
                if end < len(content):
                    os.truncate(file, end)
                    said = "%s: removed %d bytes of a record that a crash left unfinished"
                    _log.warning(said, file, len(content) - end)

    def _record_files(self) -> list[Path]:
        files = (self.path / f"{name}.jsonl" for name in _RECORDS)
        return [file for file in files if file.exists()]

    def _claim(self) -> None:
        """Lock the folder against other runs until this process closes it or ends."""
        try:
            self._files["."] = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._files["."], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(
                f"{self.path}: another process is writing there",
                "wait until it has ended, or name another folder with -o",
            ) from None
        except OSError as problem:  # a file system without locks
            _log.warning("%s is not locked: %s", self.path, problem.strerror)

    def append(self, name: str, *records: Record | dict[str, Any]) -> None:
        """Append records to a .jsonl file in a single write, synced before this returns."""
        lines = "".join(to_json(record) + "\n" for record in records).encode()
        if not lines:
            return
        with or_setup_error(f"cannot write {self.path / name}"):
            self._check_present()
            if name not in self._files:
                # The run continues, so remove the old summary: after a crash it would contradict
                # the records.
                (self.path / "summary.json").unlink(missing_ok=True)
                # With O_NONBLOCK, opening a pipe that nobody reads fails instead of waiting.
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
                self._files[name] = os.open(self.path / name, flags, 0o644)
                _sync_names(self.path)
            written = os.write(self._files[name], lines)
            if written != len(lines):
                raise OSError("the disk took only part of a record")
            os.fsync(self._files[name])
            self._sizes[name] = os.fstat(self._files[name]).st_size

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        with or_setup_error(f"cannot write {self.path / name}"):
            self._check_present()
            replace_file(self.path / name, text.encode())
            _sync_names(self.path)

    def _check_present(self) -> None:
        """Raise `LostRecords` if the folder, or a file that this run wrote, was removed, replaced
        or cut short."""
        for name, descriptor in self._files.items():
            ours, now = os.fstat(descriptor), None
            with suppress(FileNotFoundError, NotADirectoryError):
                now = os.stat(self.path / name)
            if now is None or not os.path.samestat(ours, now):
                raise LostRecords(f"{self.path / name} was removed or replaced")
            if ours.st_size < self._sizes.get(name, 0):
                raise LostRecords(f"{self.path / name} was cut short")

    def forget(self, name: str) -> None:
        """Remove a file that no longer applies."""
        with or_setup_error(f"cannot remove {self.path / name}"):
            (self.path / name).unlink(missing_ok=True)
            if (descriptor := self._files.pop(name, None)) is not None:
                os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _or_unusable(path: Path) -> AbstractContextManager[None]:
    return or_setup_error(f"cannot create the folder {path}", "name another with -o")


def found_from_anywhere(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, so that it can run from any folder.

    Raises `UsageError` for a path that cannot be written into a recipe.
    """
    for section, key in (("target", "model"), ("draft", "model"), ("data", "path")):
        values = getattr(recipe, section)
        if values is not None and os.path.exists(path := getattr(values, key)):
            full = os.path.abspath(path)
            if not is_unicode(full):
                raise UsageError(
                    f"{section}.{key}: {one_line(full)} is not valid Unicode, so no recipe could "
                    "name it",
                    "rename that folder",
                )
            recipe = recipe.changed(section, **{key: full})
    return recipe


def _sync_names(folder: Path) -> None:
    """Call fsync on a directory, so that new and renamed files in it survive a crash. Do nothing
    on file systems that do not support this."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_foreign(path: Path) -> bool:
    """Return True if the recipe in a file was written by hand. Recipes that runs write have every
    section and no comments."""
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError:
        return False
    sections = {line.partition(b":")[0].decode(errors="replace") for line in lines}
    is_commented = any(line.lstrip().startswith(b"#") for line in lines)
    return bool(lines) and (is_commented or not sections >= Recipe.model_fields.keys())
