"""Conclusions from the records of a comparison: points, the best pair, flips, tokens."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_cli.backends import native
from specdec_cli.core.figures import Metrics
from specdec_cli.core.types import Permissions
from specdec_cli.errors import Notice, SetupError, UsageError
from specdec_cli.experiment.compare.comparison_plan import (
    plan_comparison,
    skips_of,
    warnings_of,
)
from specdec_cli.experiment.compare.comparison_records import (
    ComparisonRecords,
    ComparisonSettings,
    Skip,
    merge_repeats,
)
from specdec_cli.experiment.compare.parent import code_of, run_pairs
from specdec_cli.experiment.compare.verdict import best_of, summary_lines, tokens_of, verdict_of
from specdec_cli.experiment.compare.worker import PairTask, with_degrees
from specdec_cli.experiment.folders.conclusions import Degrees, Diverging, Tokens
from specdec_cli.experiment.folders.record_lines import added_records
from specdec_cli.experiment.folders.records import Pair, PairFacts, Point, Sample
from specdec_cli.experiment.folders.run_folder import LostRecords, RunFolder
from specdec_cli.experiment.folders.settings_file import (
    earlier_environment,
    keep_warnings,
    read_settings_file,
    read_warnings,
    write_settings,
)
from specdec_cli.experiment.generation import prepare
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.preparing import few_prompts
from specdec_cli.experiment.statistics.promise import tokens_line
from specdec_cli.launch.reports import End, Report
from specdec_cli.prompts import Prompt
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import load_recipe
from specdec_cli.terminal.compare import print_results
from specdec_cli.terminal.watching import SweepTable

SETTINGS = ComparisonSettings(
    recipe={
        "run": {"seed": 0, "repeats": 1},
        "sampling": {"temperature": 0.0},
        "speculation": {"acceptance": "rejection"},
    },
    draft="a-draft",
    k=2,
    target_tps=(2,),
    draft_tps=(1, 2),
    batch_sizes=(1, 8),
    batches=None,
    prompts={"count": 10, "sha256": ""},
    device="cpu",
    dtype="float32",
)
WRITTEN = list(range(30))
NO_ROOM = "no room for a KV cache on rank 0 (cuda:0): 1.0 MiB are left"


def sample(pair: Pair, batch_size: int, k: int, index: int, **stages: float) -> Sample:
    """A prompt of 30 tokens in rounds of 3, or of 1; stages: ms of each stage in a round."""
    rounds = 10 if k else 30
    jitter = 1 + 0.001 * (index * pair.draft_tp % 3)
    spent = {name: [ms * rounds * jitter] for name, ms in stages.items()}
    decode = sum(ms for values in spent.values() for ms in values) / 1e3
    return Sample(
        target_tp=pair.target_tp,
        draft_tp=pair.draft_tp,
        draft="a-draft",
        k=k,
        batch_size=batch_size,
        index=index,
        category=None,
        prompt_token_ids=[1],
        token_ids=WRITTEN,
        finish_reason="length",
        accepted_per_round=[2] * rounds if k else [],
        proposed_per_round=[2] * rounds if k else [],
        rounds_without_proposal=0 if k else rounds,
        num_preemptions=0,
        seconds=[decode + 0.01],
        decode_seconds=[decode],
        round_share=[float(rounds)],
        stage_ms=spent,
        ttft_ms=[10.0],
        tpot_ms=[5.0],
        max_output_tokens=30,
        peak_memory_bytes=100,
    )


def changed(sample: Sample, **fields: Any) -> Sample:
    return sample.model_copy(update=fields)


def filled(
    settings: ComparisonSettings = SETTINGS, **draft_ms: tuple[float, float]
) -> ComparisonRecords:
    """Records with given draft times by degree, at batch sizes 1 and 8."""
    records = ComparisonRecords(settings, {})
    for name, by_size in draft_ms.items():
        pair = Pair(2, int(name.removeprefix("tp")))
        for batch_size, spent in zip((1, 8), by_size, strict=True):
            for index in range(10):
                for k, draft in ((0, 0.0), (settings.k, spent)):
                    found = sample(pair, batch_size, k, index, draft=draft, verify=10.0)
                    records.kept.samples[SETTINGS.key(pair, batch_size, k)][index] = found
        records.kept.facts[pair] = facts(pair, [9, 12])
    return records


def facts(pair: Pair, blocks: list[int]) -> PairFacts:
    return PairFacts(**asdict(pair), num_blocks=min(blocks), blocks_per_rank=blocks)


def metrics_of(point: Point) -> Metrics:
    assert point.metrics is not None
    return point.metrics


def verdict(records: ComparisonRecords, folder: Path) -> dict[str, Any]:
    records.update_points()
    return verdict_of(records)


def test_points(tmp_path: Path) -> None:
    records = filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0))
    changed = records.update_points()
    assert len(changed) == len(records.points) == 2 * 3
    point = next(p for p in changed if (p.draft_tp, p.batch_size) == (1, 8))
    # 3 tokens in 18 ms against 1 in 10 ms, and against 3 in 13 ms.
    assert point.speedup == pytest.approx(3 / 18 * 10)
    assert point.speedup_vs_equal_tp == pytest.approx(13 / 18)
    assert metrics_of(point).draft_ms == pytest.approx(8.0, rel=0.01)
    assert point.blocks_per_rank == [9, 12] and "draft" not in point.as_dict()
    plain = next(p for p in changed if p.draft_tp is None)
    assert metrics_of(plain).num_rounds == 300 and plain.speedup == 1.0
    assert records.update_points() == []  # nothing is written twice


def test_where_the_best_degree_flips(tmp_path: Path) -> None:
    found = verdict(filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0)), tmp_path)
    assert (found["best"].draft_tp, found["best_by_batch_size"]["8"].draft_tp) == (1, 2)
    assert found["flips"] == [
        {"target_tp": 2, "batch_size": 8, "from": 1, "to": 2, "is_tied": False}
    ]
    lines = summary_lines(found)
    degrees = "draft TP is 1 at batch size 1; 2 at batch size 8"
    assert f"at target TP 2 the fastest {degrees}" in lines
    row = {
        size: best.model_copy(update={"verdict": "use"})
        for size, best in found["best_by_target_tp"]["2"].items()
    }
    decided = summary_lines({**found, "best_by_target_tp": {"2": row}})
    assert f"at target TP 2 the best {degrees}" in decided
    few, many = lines[:2]
    few_words = "batch size 1: inconclusive: target TP 2 with draft TP 1 is the fastest: "
    assert few.startswith(few_words), "all prompts took the same, which has no interval"
    assert "(draft 3.00 ms less): splitting the draft's weights saves less" in few
    assert "(draft 5.00 ms less): splitting the draft's weights saves more" in many


def test_a_flip_to_what_may_be_chance_is_said_to_be_tied(tmp_path: Path) -> None:
    found = verdict(filled(tp1=(2.0, 3.0), tp2=(5.0, 2.999)), tmp_path)
    assert found["flips"] == [
        {"target_tp": 2, "batch_size": 8, "from": 1, "to": 2, "is_tied": True}
    ]


Round = tuple[float, float, float, int]  # ms of draft, verification and host; tokens it writes


@pytest.mark.parametrize(
    ("best", "rival", "why"),
    [
        pytest.param(
            (2.0, 16.0, 0.0, 3),
            (3.0, 10.0, 0.0, 2),
            "a round takes 18.00 ms, 5.00 ms more than with draft TP 2 (verify 6.00 ms more, "
            "draft 1.00 ms less), and writes 3.00 tokens instead of 2.00",
            id="slower-rounds-that-write-more",
        ),
        pytest.param(
            (2.0, 5.0, 1.0, 2),
            (8.0, 5.2, 4.0, 3),
            "a round takes 8.00 ms, 9.20 ms less than with draft TP 2 (draft 6.00 ms less, "
            "host 3.00 ms less), and writes 2.00 tokens instead of 3.00: "
            "splitting the draft's weights saves less than communication between ranks costs",
            id="faster-rounds-that-write-less",
        ),
        pytest.param(
            (2.0, 5.0, 1.0, 3),
            (2.0, 5.0, 3.0, 3),
            "a round takes 8.00 ms, 2.00 ms less than with draft TP 2 (host 2.00 ms less)",
            id="the-host",
        ),
    ],
)
def test_why_the_best_is_the_best(best: Round, rival: Round, why: str, tmp_path: Path) -> None:
    """The stages that differ most come first, in either direction."""
    records = ComparisonRecords(replace(SETTINGS, batch_sizes=(1,)), {})
    for degree, (draft, verify, host, tokens) in ((1, best), (2, rival)):
        pair, rounds = Pair(2, degree), 30 // tokens
        for index in range(10):
            plain = sample(pair, 1, 0, index, verify=8.0)
            found = changed(
                sample(pair, 1, 2, index),
                accepted_per_round=[tokens - 1] * rounds,
                proposed_per_round=[2] * rounds,
                round_share=[float(rounds)],
                stage_ms={"draft": [draft * rounds], "verify": [verify * rounds]},
                decode_seconds=[(draft + verify + host) * rounds / 1e3],
            )
            for k, taken in ((0, plain), (2, found)):
                records.kept.samples[SETTINGS.key(pair, 1, k)][index] = taken
    found = verdict(records, tmp_path)["best"]
    assert found.draft_tp == 1 and found.reason.endswith(f"; {why}")


def test_equal_pairs_are_tied(tmp_path: Path) -> None:
    records = filled(tp1=(2.0, 2.0), tp2=(2.0, 2.0))
    records.update_points()
    best = best_of(records, [2], 1)
    assert best.tied == [Degrees(target_tp=2, draft_tp=3 - (best.draft_tp or 0))]


def test_more_prompts_cost_their_prefill_too(tmp_path: Path) -> None:
    """The seconds of all pairs count, and those of k = 0 on the same ranks."""
    records = filled(tp1=(9.9, 9.9), tp2=(10.1, 10.1))
    for place, of in enumerate(records.kept.samples.values()):
        for index, one in of.items():
            slower = one.decode_seconds[0] * (1 + index % 3 * place)
            of[index] = changed(one, seconds=[30.0], decode_seconds=[slower])
    needed = verdict(records, tmp_path)["best"].needed
    assert needed.minutes == pytest.approx(needed.prompts / 10 * 2 * 2 * 10 * 0.5)


def test_plain_decoding_that_is_faster_is_said(tmp_path: Path) -> None:
    best = verdict(filled(tp1=(50.0, 50.0), tp2=(60.0, 60.0)), tmp_path)["best"]
    assert best.draft_tp == 1 and best.speedup == pytest.approx(0.5)
    assert "is the fastest pair, and slower than plain decoding at target TP 2 (" in best.reason


def test_what_failed_is_a_row_and_no_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = filled(tp1=(2.0, 8.0))
    for batch_size in (1, 8):
        records.failures[Pair(2, 2), batch_size] = Failure("oom", "rank 1: out of memory")
    found = verdict(records, tmp_path)
    rows = {(p.draft_tp, p.batch_size): p for p in records.points}
    assert rows[2, 1].status == "oom" and rows[2, 1].reason == "rank 1: out of memory"
    assert rows[1, 1].speedup_vs_equal_tp is None and rows[1, 1].status == "ok"
    assert rows[None, 1].status == "ok"
    print_results({"points": records.points, **found})
    said = capsys.readouterr().out
    assert "draft TP 2, batch size 8: oom: rank 1: out of memory" in said
    assert re.search(r"(?m)^ *2 +2 +8 +oom", said), "in the table too"


def spoil(records: ComparisonRecords, pair: Pair, batch_size: int, indices: Sequence[int]) -> None:
    """Mark prompts as unable to run at a pair, both at k = 0 and at k."""
    for k in (0, 2):
        found = records.kept.samples[SETTINGS.key(pair, batch_size, k)]
        for index in indices:
            nothing: dict[str, Any] = {"token_ids": [], "accepted_per_round": [], "error": "large"}
            nothing |= {"decode_seconds": [0.0], "seconds": [0.0], "finish_reason": "error"}
            found[index] = changed(found[index], **nothing, proposed_per_round=[])


def test_speeds_are_compared_on_prompts_that_both_could_run(tmp_path: Path) -> None:
    records = filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0))
    before = {(p.draft_tp, p.batch_size): p for p in records.update_points()}
    spoil(records, Pair(2, 2), 1, range(5))
    spoil(records, Pair(2, 2), 8, range(10))
    records.update_points()
    points = {(p.draft_tp, p.batch_size): p for p in records.points}
    for place in ((1, 1), (2, 1)):
        same = before[place].speedup_vs_equal_tp
        assert points[place].speedup_vs_equal_tp == pytest.approx(same, rel=0.01)
    assert points[2, 8].status == "failed" and points[1, 8].status == "ok"
    assert points[1, 8].speedup_vs_equal_tp is points[2, 8].speedup_vs_equal_tp is None
    assert code_of(records, tokens_of(records)) == 3
    for batch_size in (1, 8):  # k = 0 is that of the pair whose prompts could run
        plain = metrics_of(points[None, batch_size])
        assert plain.num_output_tokens == 300
        speed = metrics_of(before[None, batch_size]).decode_tokens_per_second
        assert plain.decode_tokens_per_second == pytest.approx(speed, rel=0.01)
    assert tokens_of(records).identical, "of prompts that could run"
    spoil(records, Pair(2, 1), 1, range(10))
    spoil(records, Pair(2, 1), 8, range(10))
    spoil(records, Pair(2, 2), 1, range(10))
    records.update_points()
    assert {p.status for p in records.points} == {"failed"}
    assert tokens_of(records).identical is None and tokens_line(tokens_of(records)) is None
    assert code_of(records, tokens_of(records)) == 3, "as where some prompts could run"


@pytest.mark.parametrize("name", ["samples.jsonl", "points.jsonl", "pairs.jsonl"])
def test_a_record_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"target_tp": 1, "draft_tp": 1}\n')
    with pytest.raises(SetupError, match=rf"{name}:1: not a record"):
        ComparisonRecords(SETTINGS, {}).load(RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("k", 7, "its k is 7"),
        ("batch_size", 3, "its batch_size is 3"),
        ("draft", "x", "its draft is x"),
        ("draft", "a\nb" + 99 * "c", r"its draft is a\\nbc{77}…"),
        ("draft_tp", 4, "its degrees are target TP 2, draft TP 4"),
        ("index", 99, "its index is 99"),
    ],
)
def test_a_sample_of_no_point_is_named(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    good = sample(Pair(2, 1), 1, 2, 0)
    folder.append("samples.jsonl", good, changed(good, **{field: value}))
    with pytest.raises(SetupError, match=rf"samples\.jsonl:2: not a record of this run: {said}"):
        ComparisonRecords(SETTINGS, {}).load(folder)


def test_a_record_with_a_value_of_another_kind_is_named(tmp_path: Path) -> None:
    fact = {"target_tp": 1, "draft_tp": 1, "num_blocks": "9", "blocks_per_rank": [9]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(fact) + "\n")
    with pytest.raises(SetupError, match=r"pairs\.jsonl:1: .*num_blocks is damaged"):
        ComparisonRecords(SETTINGS, {}).load(RunFolder(tmp_path))


def test_of_two_records_of_one_prompt_the_last_counts(tmp_path: Path) -> None:
    """A batch size that was cut short is measured again whole, in one start of the ranks."""
    first, last = (sample(Pair(2, 1), 1, 2, 0, verify=ms) for ms in (10.0, 20.0))
    folder = RunFolder(tmp_path)
    folder.append("samples.jsonl", first, last)
    folder.close()
    records = ComparisonRecords(SETTINGS, {})
    records.load(folder)
    assert records.of(Pair(2, 1), 1, 2) == {0: last} != {0: first}


def test_a_folder_has_each_warning_once_and_its_own_environment(tmp_path: Path) -> None:
    folder, notice = RunFolder(tmp_path), Notice("noise", "it was loud")
    write_settings(folder, SETTINGS, [])
    for _ in range(2):
        keep_warnings(folder, SETTINGS, [notice])
    assert [one.message for one in read_warnings(tmp_path)] == ["it was loud"]
    assert earlier_environment(tmp_path, {"now": 1}) == {"now": 1}
    (tmp_path / "environment.json").write_text('{"begun": 1}')
    assert earlier_environment(tmp_path, {"now": 1}) == {"begun": 1}
    (tmp_path / "summary.json").write_text('{"environment": {"measured": 1}}')
    assert earlier_environment(tmp_path, {"now": 1}) == {"measured": 1}


def test_settings_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("[1]")
    with pytest.raises(SetupError, match=r"settings\.json: no settings"):
        read_settings_file(tmp_path)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_figure_is_cut_on_a_terminal(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0))
    for degree, counts in ((1, [57422, 86121]), (2, [70947, 70947])):
        records.kept.facts[Pair(2, degree)] = facts(Pair(2, degree), counts)
    found = verdict(records, tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_results({"points": records.points, **found})
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for point in records.points:
        metrics = metrics_of(point)
        assert f" {metrics.decode_tokens_per_second:.1f} " in shown
        for stage in ("draft", "verify", "round"):
            assert re.search(rf"(?<!\S){metrics.stage_ms(stage):.2f}(?!\S)", shown)
    assert "57,422" in shown and "2 x 70,947" in shown and "…" not in shown
    table = shown.partition("\n\nbatch size 1:")[0]
    assert max(map(len, table.splitlines())) <= max(80, columns)


def test_a_pair_without_all_prompts_is_no_point(tmp_path: Path) -> None:
    records = filled(tp1=(2.0, 8.0))
    del records.kept.samples[SETTINGS.key(Pair(2, 1), 8, 0)][9]
    assert records.open_sizes(Pair(2, 1)) == [8]
    assert {p.batch_size for p in records.update_points()} == {1}
    del records.kept.samples[SETTINGS.key(Pair(2, 1), 1, SETTINGS.k)][0]
    assert records.open_sizes(Pair(2, 1)) == [1, 8]


def test_diverging_tokens_are_found(tmp_path: Path) -> None:
    records = filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0))
    assert tokens_of(records).identical
    other = records.kept.samples[SETTINGS.key(Pair(2, 2), 8, 2)]
    other[3] = changed(other[3], token_ids=[*WRITTEN[:-1], 99])
    found = tokens_of(records)
    assert found.must_be_identical and not found.identical
    (only,) = found.diverging
    assert (only.draft_tp, only.batch_size, only.k) == (2, 8, 2)
    assert (only.num_diverging, only.num_prompts, only.first) == (1, 10, 3)
    assert "but must be the same in float32: 1 of 10 prompts" in (tokens_line(found) or "")
    records.update_points()
    assert code_of(records, tokens_of(records)) == 4

    records.settings = replace(SETTINGS, dtype="bfloat16")
    narrow = tokens_of(records)
    assert not narrow.must_be_identical and "at most in 1 of 10" in (tokens_line(narrow) or "")
    assert code_of(records, narrow) == 0
    sampled = SETTINGS.recipe | {"sampling": {"temperature": 0.7}}
    records.settings = replace(SETTINGS, recipe=sampled)
    assert tokens_of(records).compared is False and tokens_line(tokens_of(records)) is None


def test_the_point_at_which_the_largest_part_of_its_prompts_diverges_is_told() -> None:
    """Points may have different numbers of prompts, as batch sizes do."""
    many = Diverging(batch_size=8, k=2, num_diverging=3, num_prompts=10, first=1)
    most = Diverging(batch_size=1, k=2, num_diverging=2, num_prompts=2, first=0)
    for points in ([many, most], [most, many]):
        found = Tokens(compared=True, must_be_identical=False, identical=False, diverging=points)
        line = tokens_line(found)
        assert line is not None and line.endswith("in 2 of 2 prompts at batch size 1, k = 2")


def test_worlds_are_merged_as_repeats() -> None:
    one, other = ({0: sample(Pair(2, d), 1, 0, 0, verify=ms)} for d, ms in ((1, 10.0), (2, 20.0)))
    merged = merge_repeats([one, other])[0]
    assert merged.decode_seconds == [0.3, 0.6] and merged.stage_ms == {"verify": [300, 600]}
    assert one[0].decode_seconds == [0.3]  # the merged samples are not changed


def test_merged_worlds_counted_experts_if_all_of_them_did() -> None:
    none = sample(Pair(2, 1), 1, 0, 0)
    one, other = (changed(none, distinct_experts=[count]) for count in (8.0, 10.0))
    assert merge_repeats([{0: one}, {0: other}])[0].distinct_experts == [8.0, 10.0]
    for worlds in ([one, none], [none, one], [none, none], [one, none, other]):
        assert merge_repeats([{0: world} for world in worlds])[0].distinct_experts is None


def test_merged_worlds_held_as_much_memory_as_the_one_that_held_most() -> None:
    worlds = [{0: changed(sample(Pair(2, 1), 1, 0, 0), peak_memory_bytes=n)} for n in (5, 9, 7)]
    assert merge_repeats(worlds)[0].peak_memory_bytes == 9
    assert merge_repeats(worlds)[0].ttft_ms == [10.0] * 3


def test_plain_decoding_has_the_smallest_cache_of_the_pairs_that_ran_it(tmp_path: Path) -> None:
    """Their times are merged into one point, and the smallest cache had no room for more."""
    records = filled(tp1=(2.0, 8.0), tp2=(5.0, 3.0))
    held = {1: (9, [9, 12]), 2: (11, [11, 11])}
    for degree, (_, by_rank) in held.items():
        records.kept.facts[Pair(2, degree)] = facts(Pair(2, degree), by_rank)
    records.update_points()
    found = {p.draft_tp: (p.num_blocks, p.blocks_per_rank) for p in records.points}
    assert found == {None: held[1], **held}


def test_plain_decoding_has_failed_once_it_has_at_every_pair(tmp_path: Path) -> None:
    """Before that, the ranks of the next pair may still measure it."""
    records = ComparisonRecords(SETTINGS, {})
    records.failures[Pair(2, 2), 1] = Failure("failed", "rank 0: gone")
    first = records.update_points()
    assert [(p.draft_tp, p.batch_size, p.status) for p in first] == [(2, 1, "failed")]
    records.failures[Pair(2, 1), 1] = Failure("oom", "rank 1: out of memory")
    plain, *_ = records.update_points()
    assert (plain.draft_tp, plain.k, plain.status) == (None, 0, "oom")
    assert plain.reason == "rank 1: out of memory"


def test_the_live_table_shows_what_the_ranks_have_written(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "samples.jsonl"
    view = SweepTable(9, added_records(path, Sample))
    assert column(view, "k") == []
    folder.append("samples.jsonl", *(sample(Pair(2, 1), 8, k, 0, verify=10.0) for k in (0, 2)))
    with path.open("ab") as file:
        file.write(b'{"torn')
    assert column(view, "x k = 0") == ["1.00", "3.00"]
    with path.open("ab") as file:
        file.write(b'": 1}\n')
    folder.append("samples.jsonl", sample(Pair(2, 2), 8, 2, 0, verify=10.0))
    assert column(view, "draft TP") == ["1", "1", "2"] and column(view, "x k = 0")[2] == ""
    assert column(view, "prompts") == ["1", "1", "1"]
    assert view._progress.tasks[0].completed == 3, "each is read once"


def column(view: SweepTable, heading: str) -> list[str]:
    """The present cells of one column of the live table."""
    table: Any = view._render().renderables[1]
    return next([str(cell) for cell in c.cells] for c in table.columns if c.header == heading)


def test_equal_degrees_are_run_first() -> None:
    settings = replace(SETTINGS, target_tps=(1, 4), draft_tps=(1, 2, 4))
    order = [p for p in settings.in_order if p.divides]
    assert order == [Pair(1, 1), Pair(4, 4), Pair(4, 1), Pair(4, 2)]
    recipe = with_degrees(load_recipe("demo"), order[3])
    assert recipe.draft is not None
    found = recipe.target.tensor_parallel_size, recipe.draft.tensor_parallel_size
    assert found == (4, 2)


def test_batches_bound_the_prompts_of_a_batch_size() -> None:
    settings = replace(SETTINGS, batches=2)
    assert [settings.num_prompts(b) for b in (1, 4, 8)] == [2, 8, 10]


@pytest.mark.parametrize(
    ("skips", "failures", "codes", "expected"),
    [
        ({}, {}, [], 0),
        ({Pair(2, 2): Skip("does not divide", True)}, {}, [], 0),
        ({Pair(2, 2): Skip("needs 2 GPUs", False)}, {}, [], 3),
        ({}, {2: "failed"}, [1], 3),
        ({}, {2: "oom"}, [5], 3),
        ({}, {1: "oom", 2: "oom"}, [5, 5], 5),
        ({}, {1: "failed", 2: "oom"}, [1, 5], 1),
        ({}, {1: "oom", 2: "failed"}, [5, 1], 1),
    ],
)
def test_exit_codes(
    skips: dict[Pair, Skip],
    failures: dict[int, str],
    codes: list[int],
    expected: int,
) -> None:
    spent = {f"tp{d}": (2.0, 2.0) for d in (1, 2) if d not in failures}
    records = filled(**{n: s for n, s in spent.items() if Pair(2, int(n[2:])) not in skips})
    records.skips = skips
    for (degree, status), code in zip(failures.items(), codes, strict=True):
        for batch_size in (1, 8):
            records.failures[Pair(2, degree), batch_size] = Failure(status, "so it was", code)
    records.update_points()
    assert code_of(records, tokens_of(records)) == expected


def test_what_was_measured_stays_so_where_fewer_gpus_are_visible() -> None:
    records = filled(tp1=(2.0, 2.0), tp2=(2.0, 2.0))
    before = [point.model_dump_json() for point in records.update_points()]
    reason = "needs 2 GPUs, and this machine has 1"
    records.skips = {pair: Skip(reason, expected=False) for pair in SETTINGS.pairs}
    records.update_points()
    assert [point.model_dump_json() for point in records.points] == before
    assert code_of(records, tokens_of(records)) == 0
    del records.kept.samples[SETTINGS.key(Pair(2, 2), 8, 2)]
    records.update_points()
    skipped = [p for p in records.points if p.status == "skipped"]
    assert [(p.draft_tp, p.batch_size, p.reason) for p in skipped] == [(2, 8, reason)]
    assert code_of(records, tokens_of(records)) == 3


def test_few_prompts_are_told_at_the_batch_size_that_has_fewest() -> None:
    recipe = load_recipe("demo", {"run.device": "cpu"}, {})
    prompts = [Prompt(i, "def f():") for i in range(40)]
    degrees = ((1, 2), (1,))
    found = plan_comparison(recipe, PromptSet(prompts), degrees, (32, 4), 2, Permissions())
    assert [found.settings.num_prompts(b) for b in (32, 4)] == [40, 8]
    said = "8 prompts are few: intervals are wide (--limit, --dataset)"
    assert few_prompts(20) == [] != few_prompts(19)
    assert [one.message for one in warnings_of(found)] == [said]
    degrees = ((3, 2, 1), (1,))  # no 3 ranks can share 8 heads
    found = plan_comparison(recipe, PromptSet(prompts), degrees, (32, 4), None, Permissions())
    assert warnings_of(found) == []
    assert found.to_run[0] == Pair(2, 1) and found.recipe.target.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("report", "status", "reason"),
    [
        (Report(1, End.FAILED, 5, "out of memory on cuda:1"), "oom", "rank 1: out of memory on "),
        (Report(1, End.FAILED, 5, NO_ROOM, is_common=True), "oom", NO_ROOM),
        (Report(1, End.FAILED, 5, "model m is damaged\nhere"), "failed", "rank 1: model m is "),
        (Report(0, End.STOPPED, 143), "failed", "the ranks ended without a report"),
    ],
    ids=["out-of-memory", "no-room-for-a-cache", "other", "silent"],
)
def test_what_ended_the_ranks_is_the_failure_of_each_open_batch_size(
    report: Report, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo", {"run.device": "cpu"}, {})
    degrees = ((1,), (1,))
    plan = plan_comparison(
        recipe, PromptSet([Prompt(0, "def f():")]), degrees, (2, 1), 1, Permissions()
    )
    records, told = ComparisonRecords(plan.settings, plan.skips), []
    monkeypatch.setattr("specdec_cli.experiment.compare.parent.run_ranks", lambda *_, **__: report)
    watcher = SimpleNamespace(begin=lambda pair: None, failed=lambda *found: told.append(found))
    run_pairs(plan, records, RunFolder(tmp_path), ["x.py"], watcher)
    assert {failure.code for failure in records.failures.values()} == {report.code}
    assert [(pair, batch_size) for pair, batch_size, _ in told] == [(Pair(1, 1), b) for b in (2, 1)]
    points = [p for p in records.points if p.k]
    assert [(p.batch_size, p.status) for p in points] == [(2, status), (1, status)]
    for point in points:
        assert (point.reason or "").startswith(reason) and "\n" not in (point.reason or "")


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "samples removed": (
        lambda folder: (folder / "samples.jsonl").unlink(),
        "samples.jsonl lost 2 of 2 records of target TP 2, draft TP 2",
    ),
    "samples cut": (
        lambda folder: os.truncate(
            folder / "samples.jsonl", (folder / "samples.jsonl").read_bytes().index(b"\n") + 1
        ),
        "samples.jsonl lost 1 of 2 records of target TP 2, draft TP 2",
    ),
    "caches removed": (
        lambda folder: (folder / "pairs.jsonl").unlink(),
        "pairs.jsonl lost 1 of 1 records of target TP 2, draft TP 2",
    ),
    "nothing": (lambda folder: None, ""),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_records_of_earlier_pairs_that_are_lost_end_the_run(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo", {"run.device": "cpu", "run.repeats": 1}, {})
    degrees = ((2,), (1, 2))
    plan = plan_comparison(
        recipe, PromptSet([Prompt(0, "def f():")]), degrees, (1,), 1, Permissions()
    )
    change, lost = LOSSES[loss]
    begun: list[Pair] = []

    def ranks(program: Sequence[str], size: int, *, inputs: PairTask, **_: object) -> Report:
        """The ranks of a pair, which append to the files that they find."""
        begun.append(pair := inputs.pair)
        if len(begun) == 2:
            change(tmp_path)
        written = RunFolder(tmp_path)
        written.append("pairs.jsonl", facts(pair, [9, 9]))
        for k in (0, plan.settings.k):
            found = sample(pair, 1, k, 0, draft=1.0, verify=1.0)
            written.append("samples.jsonl", changed(found, draft=plan.settings.draft))
        written.close()
        return Report(0, End.DONE, 0)

    monkeypatch.setattr("specdec_cli.experiment.compare.parent.run_ranks", ranks)
    records = ComparisonRecords(plan.settings, plan.skips)
    watcher = SimpleNamespace(begin=lambda pair: None, failed=lambda *_: None)
    with pytest.raises(LostRecords) if lost else contextlib.nullcontext() as caught:
        run_pairs(plan, records, RunFolder(tmp_path), ["x.py"], watcher)
    assert begun == [Pair(2, 2), Pair(2, 1)]
    if caught is not None:
        assert caught.value.code == 1
        assert caught.value.message.startswith(f"{tmp_path}/{lost} while the run wrote there")


def test_pairs_at_which_no_prompt_fitted_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo", {"run.device": "cpu", "run.repeats": 1}, {})
    prompts = PromptSet([Prompt(i, "def f():") for i in range(2)])
    plan = plan_comparison(recipe, prompts, ((2, 4), (1, 2)), (2, 1), None, Permissions())
    records = ComparisonRecords(plan.settings, plan.skips)
    error = {"error": "large", "finish_reason": "error", "token_ids": []}
    nothing = {**error, "accepted_per_round": [], "proposed_per_round": []}
    # One pair fitted no prompt, two fitted none at one batch size, and one fitted the first prompt.
    lost = {(2, 2): (1, 2), (2, 1): (1,), (4, 2): (2,), (4, 1): ()}
    folder = RunFolder(tmp_path)
    for pair in plan.to_run:
        for batch_size, k, index in itertools.product((1, 2), (0, plan.settings.k), (0, 1)):
            own = changed(sample(pair, batch_size, k, index, verify=1.0), draft=plan.settings.draft)
            fails = batch_size in lost[pair.target_tp, pair.draft_tp] or index == 1
            folder.append("samples.jsonl", changed(own, **nothing) if fails else own)
    begun = []

    def ranks(program: Sequence[str], size: int, *, inputs: PairTask, **_: object) -> Report:
        begun.append((inputs.pair, inputs.batch_sizes))
        return Report(0, End.DONE, 0)

    monkeypatch.setattr("specdec_cli.experiment.compare.parent.run_ranks", ranks)
    watcher = SimpleNamespace(begin=lambda pair: None, failed=lambda *_: None)
    assert records.reopen(folder, plan.to_run)
    run_pairs(plan, records, folder, ["x.py"], watcher)
    assert begun == [(Pair(2, 2), (2, 1)), (Pair(2, 1), (1,)), (Pair(4, 2), (2,))]


def test_pairs_without_gpus_enough_are_skipped() -> None:
    recipe = load_recipe("demo", {"run.device": "cpu"}, {})
    job = prepare(native, recipe, PromptSet([Prompt(0, "def f():")]), Permissions())
    asked = replace(SETTINGS, target_tps=(1, 2, 4), draft_tps=(1, 4))
    skips = skips_of(asked, job, num_gpus=2)
    assert skips[Pair(4, 1)] == skips[Pair(4, 4)]
    assert skips[Pair(4, 1)] == Skip("needs 4 GPUs, and this machine has 2", expected=False)
    assert skips[Pair(2, 4)].expected and skips[Pair(2, 4)].reason.endswith("target TP 2")
    assert set(asked.pairs) - skips.keys() == {Pair(1, 1), Pair(2, 1)}
    assert Pair(4, 4) not in skips_of(asked, job, num_gpus=None)
    with pytest.raises(SetupError, match="no pair can run here: needs 2 GPUs"):
        skips_of(replace(SETTINGS, draft_tps=(1,)), job, num_gpus=1)
    with pytest.raises(SetupError, match="no pair can run here: needs 2 GPUs"):
        skips_of(replace(SETTINGS, target_tps=(2, 3), draft_tps=(1,)), job, num_gpus=1)
    with pytest.raises(UsageError, match=r"no legal pair: .*3") as unsplit:  # heads do not divide
        skips_of(replace(SETTINGS, target_tps=(3,), draft_tps=(1,)), job, num_gpus=None)
    assert unsplit.value.hint == "try another --target-tp or --draft-tp"
    with pytest.raises(UsageError, match="no legal pair: draft TP 4 does not") as indivisible:
        skips_of(replace(SETTINGS, target_tps=(2,), draft_tps=(4,)), job, num_gpus=None)
    assert (indivisible.value.hint or "").startswith("the draft's degree must divide")


@pytest.mark.parametrize(
    "keys",
    [{"draft.model": "demo:target", "draft.share": ["lm_head"]}, {"draft.model": "demo:mtp"}],
)
def test_a_borrowed_head_needs_the_targets_degree(keys: dict[str, Any]) -> None:
    recipe = load_recipe("demo", {"run.device": "cpu"} | keys, {})
    job = prepare(native, recipe, PromptSet([Prompt(0, "def f():")]), Permissions())
    skips = skips_of(replace(SETTINGS, target_tps=(1, 2), draft_tps=(1, 2)), job, num_gpus=None)
    assert set(skips) == {Pair(1, 2), Pair(2, 1)}
    reason = "draft TP 1 cannot borrow lm_head at target TP 2"
    assert skips[Pair(2, 1)] == Skip(reason, expected=True)
    with pytest.raises(UsageError, match=f"no legal pair: {reason}"):
        skips_of(replace(SETTINGS, target_tps=(2,), draft_tps=(1,)), job, num_gpus=None)


def two_targets(draft_ms: dict[Pair, float], verify: dict[int, float]) -> ComparisonRecords:
    """Records at batch size 1. verify: ms of a target's pass, by its degree."""
    settings = replace(SETTINGS, target_tps=(1, 2), batch_sizes=(1,))
    records = ComparisonRecords(settings, {Pair(1, 2): Skip("does not divide", expected=True)})
    for pair, spent in draft_ms.items():
        for index in range(10):
            for k, draft in ((0, 0.0), (2, spent)):
                found = sample(pair, 1, k, index, draft=draft, verify=verify[pair.target_tp])
                records.kept.samples[SETTINGS.key(pair, 1, k)][index] = found
        records.kept.facts[pair] = facts(pair, [9])
    return records


def test_what_is_faster_still_is_the_fastest_plain_decoding(tmp_path: Path) -> None:
    slow = {Pair(1, 1): 70.0, Pair(2, 1): 60.0, Pair(2, 2): 80.0}
    for verify, fastest, gain in (({1: 12.0, 2: 10.0}, 2, 0.43), ({1: 10.0, 2: 12.0}, 1, 0.42)):
        found = verdict(two_targets(slow, verify), tmp_path)["best"]
        assert f"slower than plain decoding at target TP {fastest} ({gain}x)" in found.reason


def test_words_and_verdict_are_against_the_plain_decoding_of_the_same_ranks(tmp_path: Path) -> None:
    """Plain decoding at the other pair of the target TP is faster than in these ranks."""
    records = filled(tp1=(2.0, 2.0), tp2=(40.0, 40.0))
    plain = records.kept.samples[SETTINGS.key(Pair(2, 1), 1, 0)]
    for index in range(10):
        plain[index] = sample(Pair(2, 1), 1, 0, index, verify=16.0)
        for draft_tp, k, ms in ((1, SETTINGS.k, 33.0), (2, 0, 9.0)):
            own = records.kept.samples[SETTINGS.key(Pair(2, draft_tp), 1, k)]
            own[index] = sample(Pair(2, draft_tp), 1, k, index, verify=ms)
    best = verdict(records, tmp_path)["best"]
    (merged,) = [p for p in records.points if p.k == 0 and p.batch_size == 1]
    assert metrics_of(merged).decode_tokens_per_second > best.decode_tokens_per_second
    assert best.draft_tp == 1 and best.speedup_vs_plain == best.speedup > 1.4
    assert "slower" not in best.reason


def test_the_gain_of_the_best_is_over_the_fastest_plain_decoding(tmp_path: Path) -> None:
    spent = {Pair(1, 1): 60.0, Pair(2, 1): 60.0, Pair(2, 2): 2.0}
    found = verdict(two_targets(spent, {1: 10.0, 2: 20.0}), tmp_path)["best"]
    assert (found.target_tp, found.draft_tp) == (2, 2)
    assert found.speedup == pytest.approx(60 / 22, rel=0.01)
    assert found.speedup_vs_plain == pytest.approx(30 / 22, rel=0.01)
    low, high = found.speedup_vs_plain_ci
    assert low <= found.speedup_vs_plain <= high < found.speedup


def test_the_best_is_held_against_its_own_targets_other_degrees(tmp_path: Path) -> None:
    spent = {Pair(1, 1): 2.2, Pair(2, 1): 2.0, Pair(2, 2): 9.0}
    found = verdict(two_targets(spent, {1: 10.0, 2: 10.0}), tmp_path)["best"]
    assert (found.target_tp, found.draft_tp) == (2, 1)
    assert found.decided_by.as_dict() == {
        "stage": "draft", "saved_ms": pytest.approx(7.0, rel=0.01), "draft_tp": 2,
    }  # fmt: skip
    assert "than with draft TP 2" in found.reason


def test_pairs_are_compared_on_the_prompts_of_both(tmp_path: Path) -> None:
    """One pair could not run the prompts that are slow at the other."""
    records = filled(tp1=(3.0, 3.0), tp2=(2.0, 2.0))
    slow = records.kept.samples[SETTINGS.key(Pair(2, 2), 1, 2)]
    for index in range(5):
        slow[index] = sample(Pair(2, 2), 1, 2, index, draft=40.0, verify=10.0)
    spoil(records, Pair(2, 1), 1, range(5))
    records.update_points()
    assert best_of(records, [2], 1).draft_tp == 2
