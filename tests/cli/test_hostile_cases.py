"""A few cases of `scripts/proofs/hostile.py`, and ends that it must not let through."""

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

import specdec_cli.app
from tests.hostile import runner
from tests.hostile.cases import KINDS, case_of, kind_of
from tests.hostile.materials import Materials, made_in_fork
from tests.hostile.runner import Case, preload, run_cases

FORK = get_context("fork")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    preload(["transformers.models.llama.configuration_llama"])
    return made_in_fork(
        tmp_path_factory.mktemp("hostile") / "made", families=("gemma2",), runs=("sweep",)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_cases_end_as_promised(kind: str, materials: Materials, tmp_path: Path) -> None:
    numbers = [n for n in range(100) if kind_of(n) == kind][:1]
    [end] = run_cases(numbers, lambda n, folder: case_of(7, n, folder, materials), tmp_path)
    assert end.problems == [], (end.told, end.arguments, end.err)
    assert end.kind == kind and end.arguments


def replaced(main: Callable[[list[str]], int]) -> Callable[[], None]:
    return lambda: setattr(specdec_cli.app, "main", main)


def said(text: str, code: int, out: str = "") -> Callable[[], None]:
    def main(arguments: list[str]) -> int:
        print(out)
        print(text, file=sys.stderr)
        return code

    return replaced(main)


ENDS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "good": (said("error: no", 2, '{"error": {}}'), []),
    "crash": (replaced(lambda _: (faulthandler.disable(), os.abort())), ["crash: SIGABRT"]),
    "hang": (replaced(lambda _: time.sleep(60) or 0), ["hang"]),
    "traceback": (replaced(lambda _: 1 // 0), ["exit code 99", "traceback", "--json: empty"]),
    "unforeseen": (
        said("error: x\nhint: this error is unexpected", 1, '{"error": {}}'),
        ["traceback"],
    ),
    "panic": (said("thread 'x' panicked at\nerror: no", 5, '{"error": {}}'), ["traceback"]),
    "no line": (said("", 5, '{"error": {}}'), ["no error line"]),
    "empty": (said("error: no", 2), ["--json: empty"]),
    "no error": (said("error: no", 2, "{}"), ["--json: no error in the document"]),
    "two documents": (said("", 0, "{}\n{}"), ["--json: not one document (Extra data"]),
    "not a number": (said("", 0, '{"a": NaN}'), ["--json: not one document (NaN)"]),
    "endless": (said("x" * 2000, 0, "{}"), ["endless line"]),
    "code": (said("", 4, "{}"), ["exit code 4"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_that_break_a_promise_are_found(name: str, tmp_path: Path) -> None:
    set_up, problems = ENDS[name]
    case = Case(0, name, "planted", ["generate", "--json"], setup=set_up)
    [end] = run_cases([0], lambda *_: case, tmp_path, seconds=1.0 if name == "hang" else 30.0)
    assert len(end.problems) == len(problems), end.problems
    assert all(found.startswith(one) for found, one in zip(end.problems, problems, strict=True))


@pytest.mark.parametrize(
    ("kind", "lines", "problems"),
    [
        ("folder", ["/r.yaml:72: target: duplicate key", "/r.yaml:73: data: duplicate key"], []),
        ("folder", ["/r.yaml:1: target.model: is required", "/r.yaml:1: em: unknown key"], []),
        ("folder", ["/r.yaml:72: target: duplicate key", "cannot read /r.yaml"], ["several"]),
        ("folder", ["/s.jsonl:1: draft: is a", "/s.jsonl:1: index: is b"], ["several"]),
        ("config", ["/r.yaml:72: target: duplicate key"] * 2, ["several"]),
        ("weights", ["x.safetensors is cut", "x.safetensors: no header"], ["several"]),
        ("recipe", ["target: unknown", "draft: unknown"], []),
    ],
)
def test_each_error_line_is_a_problem_of_its_own(
    kind: str, lines: list[str], problems: list[str], tmp_path: Path
) -> None:
    told = said("\n".join(f"error: {line}" for line in lines), 2, '{"error": {}}')
    case = Case(0, kind, "planted", ["generate", "--json"], setup=told)
    [end] = run_cases([0], lambda *_: case, tmp_path)
    assert [one.split()[0] for one in end.problems] == problems and end.lines[0].startswith("error")


@pytest.mark.parametrize(("waited", "problems"), [(60.0, []), (0.1, ["hang"])])
def test_a_case_that_other_work_starves_is_no_hang(
    waited: float, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "starved", lambda _: waited)
    case = Case(0, "slow", "planted", ["x"], setup=replaced(lambda _: time.sleep(1.5) or 0))
    [end] = run_cases([0], lambda *_: case, tmp_path, seconds=0.5)
    assert end.problems == problems


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps none")
def test_only_a_process_that_is_ready_and_does_not_run_is_starved() -> None:
    """Two loops on one processor starve each other; one that sleeps waits for nothing."""

    def looping() -> None:
        os.setpgid(0, 0)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        while True:
            pass

    begun = FORK.Event()
    loops = [FORK.Process(target=looping) for _ in range(2)]
    sleeps = FORK.Process(target=lambda: (os.setpgid(0, 0), begun.set(), time.sleep(60)))
    try:
        for process in (*loops, sleeps):
            process.start()
        assert begun.wait(60)
        start = runner.starved(sleeps.pid)  # a busy machine starves its start
        time.sleep(1.5)
        assert runner.starved(loops[0].pid) + runner.starved(loops[1].pid) > 0.5
        assert runner.starved(sleeps.pid) - start < 0.5
    finally:
        for process in (*loops, sleeps):
            process.kill()
            process.join()


def test_a_case_is_the_same_again(materials: Materials, tmp_path: Path) -> None:
    for number in range(10):
        told = []
        for name in ("a", "b"):
            (folder := tmp_path / name / str(number)).mkdir(parents=True)
            case = case_of(3, number, folder, materials)
            told.append((case.told, [one.replace(str(folder), "") for one in case.arguments]))
        assert told[0] == told[1]
