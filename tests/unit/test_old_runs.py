"""Folders of `sweep-k` and `compare-tp` from version 0.1.0 are read, and written in the same form.

They are in `tests/old_runs`: the demo pair at k = 0 and 1, with 4 new tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.core.figures import Record
from specdec_cli.errors import SetupError
from specdec_cli.experiment.folders.records import (
    CurvePart,
    PairFacts,
    Point,
    Sample,
    read_records,
)
from specdec_cli.experiment.folders.results import to_json
from specdec_cli.experiment.folders.run_settings import settings_values
from specdec_cli.experiment.predict import ReplayText
from specdec_cli.experiment.sweep.merge import merge_folders
from specdec_cli.recipe import load_recipe
from specdec_cli.report.cells import Column
from specdec_cli.report.content import Content
from specdec_cli.report.folder import read_folder

SPAN = Column("95 % interval")
OLD = Path(__file__).parent.parent / "old_runs"
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
    written = "".join(f"{to_json(record)}\n" for record in read_records(OLD / name, kind))
    assert written == (OLD / name).read_text() and written.count("\n") > 0


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_fields_of_later_versions_are_kept(name: str, kind: type[Record], tmp_path: Path) -> None:
    line = json.loads((OLD / name).read_text().splitlines()[0]) | {"a_new_field": [1, None]}
    (tmp_path / "later.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_records(tmp_path / "later.jsonl", kind)
    assert json.loads(to_json(record)) == line


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_each_missing_field_is_named(name: str, kind: type[Record], tmp_path: Path) -> None:
    whole = json.loads((OLD / name).read_text().splitlines()[0])
    missing = []
    for field in whole:
        line = json.dumps({key: value for key, value in whole.items() if key != field})
        (tmp_path / "cut.jsonl").write_text(line + "\n")
        try:
            read_records(tmp_path / "cut.jsonl", kind)
        except SetupError as problem:
            missing.append(field)
            told = f"cut.jsonl:1: not a record of this run: it has no {field}"
            one_of = "it has not one of accept, chains, ahead and draws"
            assert told in problem.message or one_of in problem.message
    assert {"k", "batch_size", "index", "limit"} & whole.keys() <= set(missing)


def test_an_old_sweep_is_merged_into_the_points_it_had(tmp_path: Path) -> None:
    document, _ = merge_folders([OLD / "sweep"], tmp_path / "new")
    old = json.loads((OLD / "sweep" / "summary.json").read_text())
    new = json.loads(to_json(document))
    assert new["tokens"] == old["tokens"] and len(new["points"]) == len(old["points"])
    for before, after in zip(old["points"], new["points"], strict=True):
        assert same_but_for_intervals(before, after), before["k"]
    # Two prompts, whose intervals earlier versions had, are too few for one.
    for best in (new["best"], *new["best_by_batch_size"].values()):
        assert best["significant"] is False and best["speedup"] == old["best"]["fastest"]["speedup"]
        assert best["reason"].endswith("which says little: too few prompts for an interval")
    samples = (tmp_path / "new" / "samples.jsonl").read_text().splitlines()
    assert sorted(samples) == sorted((OLD / "sweep" / "samples.jsonl").read_text().splitlines())


def same_but_for_intervals(old: Any, new: Any) -> bool:
    """Whether all that was recorded has its value."""
    if isinstance(old, dict):
        kept = {key: value for key, value in old.items() if not key.endswith("_ci")}
        return all(same_but_for_intervals(value, new[key]) for key, value in kept.items())
    return bool(old == new)


@pytest.mark.parametrize(("name", "kind"), [("sweep", "sweep-k"), ("compare", "compare-tp")])
def test_old_runs_are_reported_without_a_note(name: str, kind: str) -> None:
    run = read_folder(OLD / name)
    assert (run.kind, run.notes, run.is_partial) == (kind, (), False)
    old = json.loads((OLD / name / "summary.json").read_text())
    assert len(run.points) == len(old["points"])
    content = Content(run)
    firsts = ("Best at batch size 1", "Recommended at", "No speculation at")
    assert content.headline.startswith(firsts)
    # An interval of one or two prompts, which earlier versions had, is none.
    table = content.tables["results"]
    assert table is not None and table.rows[-1][table.columns.index(SPAN)] == "too few prompts"


def test_settings_of_the_first_keys_are_as_they_were() -> None:
    """Their digest decides whether such a folder can be resumed."""
    old = json.loads((OLD / "sweep/settings.json").read_text())["settings"]["recipe"]
    assert settings_values(load_recipe("demo"))["speculation"] == old["speculation"]


def test_numbers_that_are_none_are_null() -> None:
    assert json.loads(to_json({"x": [math.nan, math.inf, 1.5]})) == {"x": [None, None, 1.5]}
