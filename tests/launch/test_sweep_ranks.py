"""`specdec sweep-k` over ranks: samples as of one rank, interruptions and failures."""

import json
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.experiment.folders.record_lines import read_records
from specdec_cli.experiment.forecasts import ReplayText
from tests.cli.sweep_helpers import Sample, samples, specdec, without_times
from tests.launch.forks import over_forks
from tests.launch.helpers import ROOT, living, marked, start, torchrun_alone, wait_until_gone

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("no_pixels")]

OPTIONS = [
    *("sweep-k", "demo", "--device", "cpu", "--k", "0,2", "--limit", "4", "-q"),
    *("--max-new-tokens", "8", "--temperature", "0.8"),
    *("--set", "run.repeats=1", "--set", "run.warmup=0"),
]
SPLIT = ["-m", "specdec_cli", *OPTIONS, "--target-tp", "2"]


def has_samples(folder: Path, count: int) -> bool:
    path = folder / "samples.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= count


def begun(folder: Path, count: int, parent: "subprocess.Popen[str]") -> None:
    """Wait until a sweep has the given number of samples: beside busy workers that took 120 s."""
    deadline = time.monotonic() + 200
    while not has_samples(folder, count):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def keyed(found: list[Sample]) -> list[tuple[Any, ...]]:
    return [(s["k"], s["index"], s["token_ids"]) for s in without_times(found)]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], id="our-launcher"),
        # Each of torchrun's ranks imports for itself: ten seconds. test_launch.py has torchrun too.
        pytest.param(torchrun_alone(2), id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_measure_what_one_measures(
    launcher: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The parent is interrupted; another launch measures the rest."""
    folder = tmp_path / "run"
    options = ["-o", str(folder), "--resume"]
    of_two = [*OPTIONS, "--target-tp", "2", *options]
    ended = over_forks(*of_two, until=lambda: has_samples(folder, 2))
    kept = (folder / "samples.jsonl").read_text()
    assert ended.code == 130 and kept.count("\n") < 8
    assert f"{folder} keeps {kept.count(chr(10))} sample" in ended.err
    go_on = ["sweep-k", "--resume", "-o", str(folder), "--quiet"]
    assert f"resume with: specdec {shlex.join(go_on)}\n" in ended.err
    assert ended.err.count("error: ") == 1

    if launcher:
        out, _, code = finished([*launcher, *SPLIT, *options, "--json"], marked())
    else:
        result = over_forks(*go_on, "--json")
        out, code = result.out, result.code
    assert code == 0
    document = json.loads(out)
    assert (folder / "samples.jsonl").read_text().startswith(kept)
    assert document == json.loads((folder / "summary.json").read_text())
    assert [p["status"] for p in document["points"]] == ["ok", "ok"]
    assert all(part["broadcast_ms"] > 0 for part in document["time_curve"])

    alone = tmp_path / "alone"
    assert specdec(capsys, *OPTIONS, "-o", alone).code == 0
    assert keyed(samples(folder)) == keyed(samples(alone)) and len(samples(folder)) == 8
    ours, theirs = (
        {text.index: text for text in read_records(path / "replay.jsonl", ReplayText)}
        for path in (folder, alone)
    )
    assert ours.keys() == theirs.keys() == {0, 1, 2, 3}
    for index, text in ours.items():
        assert text.accept == pytest.approx(theirs[index].accept, abs=1e-4)
        assert text.overlap == pytest.approx(theirs[index].overlap, abs=1e-4)


def test_arrivals_over_two_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Arrivals go to the leading rank's scheduler, and the other follows its rounds: the texts are
    those of a closed batch on one rank."""
    both = [*OPTIONS, "--limit", "3", "--temperature", "0", "--batch-size", "2"]
    both += ["--set", "target.dtype=float32"]
    folder, closed = tmp_path / "run", tmp_path / "closed"
    rate = ["--target-tp", "2", "--request-rate", "20", "--slo", "e2el:60s"]
    result = over_forks(*both, *rate, "-o", str(folder), "--json")
    assert result.code == 0, result.err
    points = json.loads(result.out)["points"]
    assert [(p["request_rate"], p["k"]) for p in points] == [(20, 0), (20, 2)]
    for point in points:
        assert point["status"] == "ok" and point["load"]["num_requests"] == 3
        assert point["metrics"]["broadcast_ms"] > 0, "two ranks"
        assert point["metrics"]["e2el_ms"]["mean"] > point["metrics"]["ttft_ms"]["mean"] > 0
    assert specdec(capsys, *both, "--k", "0", "-o", closed).code == 0
    texts = {s["index"]: s["token_ids"] for s in samples(closed)}
    assert len(texts) == 3 and all(s["token_ids"] == texts[s["index"]] for s in samples(folder))


@pytest.mark.slow  # test_sweep_k.py kills a sweep of one rank, test_launch.py kills ranks
def test_a_killed_sweep_over_ranks_goes_on(tmp_path: Path) -> None:
    folder, environ = tmp_path / "run", marked()
    options = ["-o", str(folder), "--resume"]
    parent = start([*SPLIT, *options], environ)
    begun(folder, 2, parent)
    parent.kill()
    parent.communicate()
    assert wait_until_gone(environ, 10) == []
    kept = (folder / "samples.jsonl").read_text()
    _, err, code = finished([*SPLIT, *options], environ)
    assert code == 0, err
    assert (folder / "samples.jsonl").read_text().startswith(kept[: kept.rindex("\n") + 1])
    assert len(samples(folder)) == 8


@pytest.mark.parametrize(
    "fault, code, message",
    [
        pytest.param(  # test_launch.py has one, too
            *("raise:verify:1", 1, "rank 1: ArithmeticError: the planted error"),
            marks=pytest.mark.slow,
        ),
        # The peers are inside a collective by then, so the run cannot continue; test_launch.py has
        # one too, and the test below what happens to the point.
        pytest.param(
            *("oom:verify:1", 5, "rank 1: out of memory: tried to allocate 3 GiB"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_rank_ends_the_sweep(tmp_path: Path, fault: str, code: int, message: str) -> None:
    folder, environ = tmp_path / "run", planted(fault)
    out, err, ended = finished([*SPLIT, "-o", str(folder), "--json"], environ)
    assert (ended, json.loads(out)["error"]["message"]) == (code, message), err
    assert err.count("error: ") == 1 and living(environ) == []


def test_a_point_that_fails_on_every_rank_is_a_point() -> None:
    result = over_forks(*OPTIONS, "--target-tp", "2", "--json", PLANTED_FAULT="oom:draft:all")
    found = {p["k"]: (p["status"], p.get("reason")) for p in result.document["points"]}
    assert result.code == 3, result.err
    assert found == {0: ("ok", None), 2: ("oom", "tried to allocate 3 GiB")}


def planted(fault: str) -> dict[str, str]:
    paths = f"{ROOT / 'tests' / 'launch' / 'site'}:{ROOT}:{ROOT / 'kernels'}"
    return marked(PYTHONPATH=paths, PLANTED_FAULT=fault)


def finished(program: list[str], environ: dict[str, str]) -> tuple[str, str, int]:
    process = start(program, environ)
    out, err = process.communicate(timeout=180)
    return out, err, process.returncode
