"""The command that goes on with an interrupted run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from specdec_cli.app import main
from specdec_cli.commands.options import Asked
from specdec_cli.commands.resuming import say_kept, saying_what_is_kept
from specdec_cli.launch.world import Place


def test_what_no_folder_keeps_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    plugins = ["a.py", "b c.py"]
    place, output = Place(("specdec_cli", "sweep-k"), None, None), Path("runs/a")
    asked = Asked(place, {}, "demo", plugin=plugins, output=output, quiet=True)
    say_kept("3 samples", asked, "sweep-k", next_turns=Path("b"), strict=True)
    told = "sweep-k --resume -o runs/a --plugin a.py --plugin 'b c.py'"
    told += " --next-turns b --strict --quiet"
    assert f"runs/a keeps 3 samples\nresume with: specdec {told}\n" == capsys.readouterr().err


@pytest.mark.parametrize(("lines", "told"), [(0, "0 prompts"), (1, "1 prompt"), (2, "2 prompts")])
def test_prompts_are_counted(
    lines: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n" * lines)
    asked = Asked(Place(("specdec_cli", "generate"), None, None), {}, output=tmp_path)
    with pytest.raises(KeyboardInterrupt), saying_what_is_kept(asked, "generate", "prompt"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.startswith(f"{tmp_path} keeps {told}\nresume with: ")


@pytest.mark.parametrize(
    ("command", "noun"),
    [
        ("generate", "run of generate"),
        ("sweep-k", "sweep of sweep-k"),
        ("compare-tp", "comparison of compare-tp"),
    ],
)
def test_a_folder_without_a_run_is_refused(
    command: str, noun: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line only asks to go on. With a mistyped path it would start the demo."""
    for folder in (tmp_path / "none", tmp_path):
        assert main([command, "--resume", "-o", str(folder), "--device", "cpu"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: --resume: {folder} contains no {noun}\n"), told
        assert "a new run needs a recipe" in told
    assert not list(tmp_path.iterdir())


def test_a_folder_without_its_recipe_is_named_as_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the differences from the demo, which nobody typed."""
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "runs" / "compare", folder)
    (folder / "recipe.yaml").unlink(missing_ok=True)
    assert main(["compare-tp", "--resume", "-o", str(folder), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --resume: {folder} has no recipe.yaml")


@pytest.mark.parametrize("words", [["demo"], ["--target", "demo:target", "--prompt", "x"]])
def test_a_new_folder_with_a_model_begins_a_run(words: list[str], tmp_path: Path) -> None:
    """Batch scripts always pass --resume."""
    given = [*words, "--resume", "-o", str(tmp_path / "none"), "--dry-run", "--device", "cpu"]
    assert main(["sweep-k", "--k", "0", *given]) == 0


@pytest.mark.usefixtures("small_demo")
def test_a_resumed_run_has_the_threads_that_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads would be another environment, with a warning, as on another machine."""
    bare = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before, folder = torch.get_num_threads(), tmp_path / "run"
    where = folder / "environment.json"

    def threads_of(*words: str) -> int:
        for name in bare:
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)
        (folder / "samples.jsonl").unlink(missing_ok=True)
        assert main(["generate", *words, "--device", "cpu", "-o", str(folder), "-q"]) == 0
        return torch.get_num_threads()

    try:
        assert threads_of("--prompt", "x", "--max-new-tokens", "2", "--threads", "3") == 3
        torch.set_num_threads(1)
        assert threads_of("--resume") == 3
        assert "two environments" not in capsys.readouterr().err
        where.write_text(json.dumps(json.loads(where.read_text()) | {"cpu_count": 99}))
        torch.set_num_threads(1)
        assert threads_of("--resume") == 1
        assert "two environments" in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)
