"""The records of run folders: written as they were read, merged, reported, and refused where
another version wrote them.

In `tests/runs` are a sweep and a comparison: the demo pair at k = 0 and 1, with 4 new tokens.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.app import main
from specdec_cli.core.figures import Record
from specdec_cli.errors import LOGGED, SetupError, UsageError
from specdec_cli.experiment.folders.conclusions import VERSION
from specdec_cli.experiment.folders.record_lines import read_records, to_json
from specdec_cli.experiment.folders.records import CurvePart, PairFacts, Point, Sample
from specdec_cli.experiment.forecasts import ReplayText
from specdec_cli.experiment.sweep.merge import merge_folders
from specdec_cli.report.cells import Column
from specdec_cli.report.content import Content
from specdec_cli.report.folder import read_folder
from specdec_cli.text import digest

SPAN = Column("95 % interval")
RUNS = Path(__file__).parent.parent / "runs"
FILES = [
    ("sweep/samples.jsonl", Sample),
    ("sweep/points.jsonl", Point),
    ("sweep/curve.jsonl", CurvePart),
    ("sweep/replay.jsonl", ReplayText),
    ("compare/samples.jsonl", Sample),
    ("compare/points.jsonl", Point),
    ("compare/pairs.jsonl", PairFacts),
]


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_records_are_written_as_they_were_read(name: str, kind: type[Record]) -> None:
    """Names, values and the order of fields are the same, byte for byte."""
    written = "".join(f"{to_json(record)}\n" for record in read_records(RUNS / name, kind))
    assert written == (RUNS / name).read_text() and written.count("\n") > 0


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_fields_of_later_versions_are_kept(name: str, kind: type[Record], tmp_path: Path) -> None:
    line = json.loads((RUNS / name).read_text().splitlines()[0]) | {"a_new_field": [1, None]}
    (tmp_path / "later.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_records(tmp_path / "later.jsonl", kind)
    assert json.loads(to_json(record)) == line


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_each_missing_field_is_named(name: str, kind: type[Record], tmp_path: Path) -> None:
    whole = json.loads((RUNS / name).read_text().splitlines()[0])
    missing = []
    for field in whole:
        line = json.dumps({key: value for key, value in whole.items() if key != field})
        (tmp_path / "cut.jsonl").write_text(line + "\n")
        try:
            read_records(tmp_path / "cut.jsonl", kind)
        except SetupError as problem:
            missing.append(field)
            told = f"cut.jsonl:1: not a record of this run: it has no {field}"
            one_of = "it needs exactly one of accept, chains, ahead and draws"
            assert told in problem.message or one_of in problem.message
    assert {"k", "batch_size", "index", "limit"} & whole.keys() <= set(missing)


def test_a_folder_s_points_are_those_of_its_samples(tmp_path: Path) -> None:
    """Merged alone, a sweep's folder gives the records that it had, and what a report reads. Of a
    prompt that failed and ran again the last record counts."""
    shutil.copytree(RUNS / "sweep", tmp_path / "old")
    lines = (RUNS / "sweep" / "samples.jsonl").read_text()
    failed = json.loads(lines.partition("\n")[0])
    failed |= {"finish_reason": "error", "error": "HTTP 500", "token_ids": []}
    (tmp_path / "old" / "samples.jsonl").write_text(json.dumps(failed) + "\n" + lines)
    document, _ = merge_folders([tmp_path / "old"], tmp_path / "new")
    old, new = json.loads((RUNS / "sweep" / "summary.json").read_text()), tmp_path / "new"
    found = json.loads(to_json(document))
    # Two fields came later: the rate, and the interval of a category's length at k = 0.
    old["points"] = [{**point, "request_rate": None} for point in old["points"]]
    for row in old["points"][0]["per_category"].values():
        row["mean_acceptance_length_ci"] = [1.0, 1.0]
    # Minutes were those of rounds alone, and are now those of prefill too.
    spent = sum(sum(json.loads(line)["seconds"]) for line in lines.splitlines()) / 60
    for best in (old["best"], old["best_by_batch_size"]["1"]):
        best["needed"]["minutes"] = pytest.approx(best["needed"]["prompts"] / 2 * spent)
    for name in ("schema", "version", "points", "best", "best_by_batch_size", "tokens"):
        assert found[name] == old[name], name
    samples = (new / "samples.jsonl").read_text().splitlines()
    assert sorted(samples) == sorted((RUNS / "sweep" / "samples.jsonl").read_text().splitlines())


def test_costs_of_rounds_are_compared_within_a_shard(tmp_path: Path) -> None:
    """One shard lacks the cost of a round at k = 1, and the other's machine is half as fast. Its
    rounds at k = 1 are not compared with the first shard's at k = 0."""
    shards = [tmp_path / name for name in "ab"]
    for place, (shard, slower) in enumerate(zip(shards, (1.0, 2.0), strict=True)):
        shutil.copytree(RUNS / "sweep", shard)
        stored = json.loads((shard / "settings.json").read_text())
        stored["settings"]["shard"] = [place, 2]
        stored["hash"] = digest(stored["settings"])
        (shard / "settings.json").write_text(json.dumps(stored))
        for name in ("samples", "replay", "curve"):
            lines = (RUNS / "sweep" / f"{name}.jsonl").read_text().splitlines()
            records = [one for one in map(json.loads, lines) if one.get("index", place) == place]
            if name == "curve":
                records = [one for one in records if place or not one["k"]]
                for one in records:
                    one["decode_seconds"] *= slower
            (shard / f"{name}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    document, _ = merge_folders(shards, tmp_path / "whole")
    old = json.loads((RUNS / "sweep" / "summary.json").read_text())["points"]
    predicted = [
        [p["predicted_speedup"] for p in of]
        for of in (json.loads(to_json(document))["points"], old)
    ]
    assert predicted[0] == pytest.approx(predicted[1])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ks": [0, 2]}, "--k is 0,2 and 0,1"),
        ({"batch_sizes": [2, 3]}, "--batch-size is 2,3 and "),
        ({"prompts": {"sha256": "x"}}, "the prompts differ"),
        ({"predict_only": True}, "--predict-only is true and false"),
    ],
)
def test_sweeps_that_differ_are_not_merged(
    changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "other" / "settings.json"
    shutil.copytree(RUNS / "sweep", file.parent)
    stored = json.loads(file.read_text())
    for key, value in changed.items():
        own = stored["settings"]
        own[key] = own[key] | value if isinstance(value, dict) else value
    stored["hash"] = digest(stored["settings"])
    file.write_text(json.dumps(stored))
    with pytest.raises(UsageError) as refused:
        merge_folders([RUNS / "sweep", file.parent], tmp_path / "whole")
    assert f"belong to different sweeps: {told}" in refused.value.message


def test_merged_folders_tell_what_their_runs_logged(tmp_path: Path) -> None:
    """Rows that were left out, say: each once, and without what a merge computes anew."""
    LOGGED.clear()  # warnings of commands that ran before in this process
    old, summary = tmp_path / "old", json.loads((RUNS / "sweep" / "summary.json").read_text())
    shutil.copytree(RUNS / "sweep", old)
    skipped = {"code": "log", "message": "skipped 1 bad line: p.jsonl:3", "evidence": {}}
    gone = {"code": "points_lack_prompts", "message": "1 point lacks prompts", "evidence": {}}
    codes, said = ("log", "points_lack_prompts"), []
    for number, warnings in enumerate(([skipped, gone, 5, skipped], None)):
        (old / "summary.json").write_text(json.dumps(summary | {"warnings": warnings}))
        document, _ = merge_folders([old], tmp_path / f"new{number}")
        said.append([one.message for one in document["warnings"] if one.code in codes])
    assert said == [[skipped["message"]], []]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("sweep", "sweep-k", "Inconclusive at batch size 1"),
        ("compare", "compare-tp", "No speculation at batch size 1: plain decoding is fastest"),
    ],
)
def test_runs_are_reported_without_a_note(name: str, kind: str, said: str) -> None:
    run = read_folder(RUNS / name)
    assert (run.kind, run.notes, run.is_partial) == (kind, (), False)
    content = Content(run)
    assert content.headline.startswith(said)
    table = content.tables["results"]
    assert table is not None and table.rows[-1][table.columns.index(SPAN)] == "too few prompts"


@pytest.mark.parametrize("name", ["sweep", "compare"])
@pytest.mark.parametrize("damage", ["points", "best_by_batch_size", "tokens", "recipe"])
def test_each_damaged_part_of_a_summary_is_left_out(name: str, damage: str, tmp_path: Path) -> None:
    """The rest is shown: a bad entry of a list leaves the others, other parts go whole."""
    folder = tmp_path / name
    shutil.copytree(RUNS / name, folder)
    summary = json.loads((folder / "summary.json").read_text())
    whole = read_folder(folder)
    if damage == "points":
        summary["points"][1]["status"] = "fine"
        told = "summary.json, point 2 is not a record (its status is fine): left out"
    else:
        summary[damage] = {"1": {"k": "many"}} if damage.startswith("best") else [3]
        told = f"summary.json, {damage} is damaged: left out"
    (folder / "summary.json").write_text(json.dumps(summary))
    run = read_folder(folder)
    assert run.notes == (told,) and not run.is_partial
    assert len(run.points) == len(whole.points) - (damage == "points")
    (best,) = Content(run).bests
    assert best.recorded is None or damage != "best_by_batch_size"


@pytest.mark.parametrize("command", ["report", "merge", "sweep-k", "compare-tp", "generate"])
@pytest.mark.parametrize("version", [None, VERSION + 1, "x" * 99])
def test_a_folder_of_another_version_is_refused(
    command: str, version: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal is one line that names the versions, and the folder does not change."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / ("compare" if command == "compare-tp" else "sweep"), folder)
    found = json.loads((folder / "settings.json").read_text()) | {"version": version}
    if version is None:
        del found["version"]
    (folder / "settings.json").write_text(json.dumps(found))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    options = {
        "report": [str(folder)],
        "merge": [str(folder), "-o", str(tmp_path / "new")],
        "generate": ["demo", "--limit", "1", "--resume", "-o", str(folder)],
        "compare-tp": ["demo", "--limit", "1", "--resume", "-o", str(folder)],
    }
    code = main([command, *options.get(command, ["demo", "--resume", "-o", str(folder)]), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert code == error["code"] == 2 and "\n" not in error["message"] and error["hint"]
    has = "no version" if version is None else f"version {str(version)[:20]},"
    assert f"its settings.json has {has}" in error["message"]
    assert f"reads version {VERSION}" in error["message"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_summary_alone_names_its_version(tmp_path: Path) -> None:
    """The other files of the folder are gone."""
    shutil.copytree(RUNS / "sweep", tmp_path / "run")
    (tmp_path / "run" / "settings.json").unlink()
    assert read_folder(tmp_path / "run").notes == ()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    del summary["version"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match=r"its summary\.json has no version"):
        read_folder(tmp_path / "run")


@pytest.mark.parametrize("text", ["{", "[]", "", None])
def test_damage_is_no_other_version(text: str | None, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "sweep", tmp_path / "run")
    for name in ("settings.json", "summary.json"):
        (tmp_path / "run" / name).unlink()
        if text is not None:
            (tmp_path / "run" / name).write_text(text)
    with pytest.raises(UsageError, match="are missing or damaged") as e:
        read_folder(tmp_path / "run")
    assert str(e.value.hint).startswith("restore one of them")


def test_numbers_that_are_none_are_null() -> None:
    assert json.loads(to_json({"x": [math.nan, math.inf, 1.5]})) == {"x": [None, None, 1.5]}
