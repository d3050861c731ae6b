"""The content of the wheel, and the cost of importing the command."""

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "triton", "numpy")


def wheel_settings() -> dict[str, object]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel: dict[str, object] = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    return wheel


def test_kernels_is_a_source_root_and_no_package() -> None:
    """transformers looks for a package called `kernels` and breaks if it finds ours."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "specdec_kernels" / "__init__.py").exists()


def test_settings_ship_two_packages_and_the_recipes() -> None:
    wheel = wheel_settings()
    assert wheel["packages"] == ["specdec_cli", "kernels/specdec_kernels"]
    assert wheel["force-include"] == {"recipes": "specdec_cli/recipes"}


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest's default leaves out folders by name, among them `dist` and `build`."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.parts}
    assert "dist" in parts
    for pattern in pytestconfig.getini("norecursedirs"):
        assert not fnmatch.filter(parts, pattern), pattern


def test_the_wheel_lists_two_top_level_names() -> None:
    """The list comes from the builder, without compressing any file."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    builder = wheel.WheelBuilder(str(ROOT))
    files = {item.distribution_path for item in builder.recurse_included_files()}
    names = {Path(name).parts[0] for name in files}
    assert names == {"specdec_cli", "specdec_kernels"}
    for needed in (
        "specdec_cli/recipes/demo.yaml",
        "specdec_cli/recipes/shapes/llama-8b/config.json",
        "specdec_cli/app.py",
        "specdec_kernels/linear/cpu.py",
    ):
        assert needed in files


PROBE = """
import sys
from specdec_cli.app import main
code = main(sys.argv[2:])
loaded = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@pytest.mark.parametrize(
    ("arguments", "expected", "light"),
    [
        (["--help"], 0, ("pydantic", "yaml", "ctypes", "specdec_cli.launch.ranks")),
        (["recipe", "--help"], 0, ("yaml",)),
        (["recipe", "ls"], 0, ()),
        (["recipe", "validate", "{bad}"], 2, ()),
    ],
    ids=["help", "group-help", "recipe-ls", "bad-recipe"],
)
def test_nothing_heavy_is_imported(
    arguments: list[str], expected: int, light: tuple[str, ...], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("target: {model: x}\nsamplng: {}\n")
    filled = [argument.format(bad=bad) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join((*HEAVY, *light)), *filled],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == expected, done.stderr
