"""Files of models that cannot be read: Git LFS pointers, files without permission, damaged ones."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import json_object
from specdec_cli.models.weights import _open_pickle, _open_safetensors

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


def _problem(file: Path) -> SetupError:
    with ExitStack() as stack, pytest.raises(SetupError) as caught:
        _open_pickle(file) if file.suffix == ".bin" else _open_safetensors(file, stack)
    return caught.value


@pytest.mark.parametrize("name", ["model.safetensors", "a-00001-of-2.safetensors", "model.bin"])
@pytest.mark.parametrize("size", [1, 269060552])
def test_pointer_is_named(name: str, size: int, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(_POINTER.format("0a" * 32, size))
    problem = _problem(file)
    assert "Git LFS pointer" in str(problem) and name in str(problem)
    assert "git lfs pull" in (problem.hint or "")
    with pytest.raises(SetupError, match=r"config\.json of m: it is a Git LFS pointer"):
        json_object(file, "config.json of m")


@pytest.mark.parametrize("content", [b"", b"version 2", b"\x00" * 200, b"git-lfs"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_other_broken_files_are_damaged(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    problem = _problem(file)
    assert "LFS" not in str(problem) and "damaged" in (problem.hint or "")


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "config.json"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says that such a file is missing."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = tmp_path / name
    file.write_text("{}")
    for place in ("pathlib.Path.open", "pathlib.Path.read_text", "torch.load"):
        monkeypatch.setattr(place, refuse)
    if name == "config.json":
        with pytest.raises(SetupError) as caught:
            json_object(file, "config.json of m")
        problem = caught.value
    else:
        problem = _problem(file)
    assert str(problem).endswith(": Permission denied") and "damaged" not in (problem.hint or "")


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_link_to_nothing_is_not_called_damaged(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(tmp_path / "gone")
    problem = _problem(tmp_path / name)
    assert "No such file" in str(problem) and "damaged" not in (problem.hint or "")
