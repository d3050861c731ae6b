"""The table of layers in CONTRIBUTING.md: every import in the tree is checked with `ast`."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "specdec_cli"

# A module imports from its own row or below. `x` covers the whole package `x`. A new module needs a
# row; if none fits, change this table and the one in CONTRIBUTING.md, and say why.
ROWS = {
    7: "app signals __main__ commands",
    6: "terminal report",
    5: "experiment",
    4: "engine plugin plugged backends",
    3: "methods acceptance lengths",
    2: "models",
    1: "core recipe prompts launch",
    0: "specdec_cli specdec_kernels errors text stages demo",
}
ROW_OF = {name: row for row, names in ROWS.items() for name in names.split()}
# For these, the name covers only the package's __init__; modules below have separate entries.
PLACED_ONE_BY_ONE = {PACKAGE}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path, ROOT): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def row(module: str) -> int:
    name = short(module)
    while name not in ROW_OF or (name in PLACED_ONE_BY_ONE and name != short(module)):
        name, dot, _ = name.rpartition(".")
        assert dot, f"{module} has no row yet: add it to ROWS in {__file__} and to CONTRIBUTING.md"
    return ROW_OF[name]


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any place in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            base = node.module or ""
            submodules = {f"{base}.{alias.name}" for alias in node.names} & FILES.keys()
            # Both count if some name is not a module: `from pkg import module, function`.
            found |= submodules
            if len(submodules) < len(node.names):
                found.add(base)
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.partition(".")[0] == PACKAGE}


def test_imports_never_point_upwards() -> None:
    upwards = [
        f"{module} may not import {imported}"
        for module, path in FILES.items()
        for imported in sorted(ours(path))
        if row(imported) > row(module)
    ]
    assert not upwards, "\n".join(upwards)


def test_imports_never_run_in_a_circle() -> None:
    graph = {module: ours(path) & FILES.keys() - {module} for module, path in FILES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_type_checking_blocks() -> None:
    blocks = [p for p in (*FILES.values(), *KERNELS) if "TYPE_CHECKING" in p.read_text("utf-8")]
    assert not blocks, "needing one is a cycle's sign"


def test_kernels_know_nothing_of_us() -> None:
    assert not {path: ours(path) for path in KERNELS if ours(path)}


def test_errors_import_nothing_of_ours() -> None:
    assert not ours(FILES["specdec_cli.errors"])


def test_engine_init_stays_empty() -> None:
    assert not FILES["specdec_cli.engine"].read_text(encoding="utf-8").strip()


def test_an_unplaced_module_is_told_where_to_go() -> None:
    with pytest.raises(AssertionError, match="add it to ROWS"):
        row("specdec_cli.brand_new")
