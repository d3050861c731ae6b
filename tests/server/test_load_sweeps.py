"""`sweep-k --request-rate` over servers that are up, started and our own engine."""

import csv
import json
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from matplotlib.figure import Figure

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Best
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.report.drawings.load import draw_load
from specdec_cli.report.findings import best_by_batch_size
from specdec_cli.report.folder import read_folder
from tests.cli.sweep_helpers import due_times, samples, specdec, stopped_sweep
from tests.server.fake_server import FakeServer, Faults, running
from tests.server.test_server_sweeps import codes, urls
from tests.server.test_started_servers import words as serve_words

COMMON = ("demo", "--limit", 4, "--max-new-tokens", 8, "--set", "run.repeats=1", "-q")
POISSON = process_of("poisson")
# A busy machine answers as one near its capacity does, or sends its requests late.
BUSY = re.compile("the queue lasts too long for this window|times were disturbed .client_late")

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("no_pictures")]


def swept(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    found = specdec(capsys, "sweep-k", *map(str, (*COMMON, "--json", *words)))
    assert found.code == code, found.err
    return dict(json.loads(found.out))


def point(document: dict[str, Any], k: int, rate: Any) -> dict[str, Any]:
    (found,) = [p for p in document["points"] if (p["k"], p["request_rate"]) == (k, rate)]
    return dict(found)


def test_texts_of_other_lengths_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that ends texts early looks fast."""
    plain = FakeServer(k=0)
    for most, is_told in ((1, True), (None, False)):
        with running(plain, short := FakeServer(k=3, faults=Faults(most=most))):
            found = swept(capsys, *urls(plain, short), "--request-rate", "60")
        told = [w for w in found["warnings"] if w["code"] == "lengths_differ"]
        assert [w["evidence"]["k"] for w in told] == ([3] if is_told else [])
        assert all("1 tokens on average, and 8 at k = 0" in w["message"] for w in told)


def test_empty_texts_have_no_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A server that sends text alone sends nothing if the model ends a text at once."""
    plain = FakeServer(k=0, faults=Faults(no_ids=True))
    silent = FakeServer(k=3, faults=Faults(most=1, silent=True, no_ids=True))
    run = tmp_path / "run"
    with running(plain, silent):
        found = swept(capsys, *urls(plain, silent), "--request-rate", "60", "-o", run)
    speeds = [(p["metrics"]["e2el_ms"]["mean"], p["speedup"]) for p in found["points"]]
    assert speeds[0][1] == 1.0 and speeds[1] == (None, None)
    shown = specdec(capsys, "report", str(run), str(shutil.copytree(run, tmp_path / "copy")))
    assert shown.code == 0, shown.err


def test_servers_under_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, fast = FakeServer(k=0, round_s=0.004), FakeServer(k=3, round_s=0.004)
    run = tmp_path / "run"
    with running(plain, fast):
        words = (*urls(plain, fast), "--request-rate", "inf,80", "--duration", 0.5)
        found = swept(capsys, *words, "--slo", "e2el:10s", "--slo", "ttft:1ms", "-o", run)
    assert [(p["request_rate"], p["k"]) for p in found["points"]] == [
        *((80.0, 0), (80.0, 3), ("inf", 0), ("inf", 3))
    ]
    due = due_times(POISSON, 80.0, 40, 0)
    for p in found["points"]:
        load, at_rate = p["load"], p["request_rate"] != "inf"
        assert p["batch_size"] is None and p["metrics"]["batch_size"] is None
        assert load["num_requests"] == (40 if at_rate else 4) == p["metrics"]["num_prompts"]
        assert (load["arrivals"], load["seed"], load["num_failed"]) == ("poisson", 0, 0)
        assert load["slo"] == {"e2el_ms": 10000.0, "ttft_ms": 1.0}
        assert load["slo_attainment"] == 0.0 and not load["overloaded"], "no first token in 1 ms"
        own = [
            s for s in samples(run) if (s["k"], s["request_rate"]) == (p["k"], p["request_rate"])
        ]
        assert [s["request"] for s in own] == list(range(load["num_requests"]))
        assert [s["index"] for s in own] == [i % 4 for i in range(len(own))]
        of_own = mean(s["e2el_ms"][0] for s in own)
        assert p["metrics"]["e2el_ms"]["mean"] == pytest.approx(of_own)
        if not at_rate:
            assert load["offered_rate"] is None and load["goodput"] is None
            assert load["num_unmeasured"] == 0 and load["window_seconds"] > 0
            continue
        assert load["num_unmeasured"] >= 4 and load["goodput"] == 0.0
        # A busy machine answers as one near its capacity does.
        is_near = any(w["code"] == "autocorrelated" for w in found["warnings"])
        if (ends := load["goodput_ci"]) is None:
            assert is_near
        else:  # none of 40, and the upper end depends on how crowded the server was
            assert ends[0] == 0.0 and 0.056 < ends[1] / load["offered_rate"] < 0.102
        assert load["send_lag_ms"]["p50"] >= 0
        assert load["offered_rate"] == pytest.approx(39 / (due[-1] - due[0]))
        assert [s["due"] for s in own] == pytest.approx([at - due[0] for at in due], abs=1e-6)
        m, rounds = p["metrics"], [a for s in own for a in s["accepted_per_round"]]
        if p["k"]:
            assert p["engine"]["acceptance_source"] == "chunks", "those of the measured alone"
            assert (m["num_drafts"], m["num_accepted_tokens"]) == (len(rounds), sum(rounds))
            assert m["in_text"]["num_drafts"] <= len(rounds) and m["mean_acceptance_length"] > 1
        # The server got them when they were due, and no earlier.
    for server in (plain, fast):
        by_arrival = sorted(server.written, key=lambda w: w.arrived)
        first, second = by_arrival[:2]
        assert second.arrived > first.chunk_times[-1], "a closed batch warmed up each k before"
        arrived = [w.arrived for w in by_arrival]
        assert sum(b - a for a, b in pairwise(arrived)) > due[-1] - due[0]
    assert point(found, 3, 80.0)["speedup"] > 1.2
    assert point(found, 0, 80.0)["speedup"] == 1.0
    best = found["best_by_request_rate"]
    assert list(best) == ["80", "inf"] and best["80"]["by"] == "goodput"
    assert found["best"] == best["80"] and found["best_by_batch_size"] == {}
    assert best["80"].keys() == Best.model_fields.keys(), "every field that docs/python.md lists"
    if best["80"]["verdict"] == "inconclusive":  # on a busy machine, see above
        assert BUSY.search(best["80"]["reason"])
        return
    assert best["80"]["k"] == 3 and best["inf"]["by"] == "latency"
    assert found["crossover"] == {"below": 80.0, "above": None}
    figure, shown_run = Figure(), read_folder(run)
    assert draw_load(figure, shown_run, best_by_batch_size(shown_run))
    drawn = [list(line.get_xdata()) for axis in figure.axes for line in axis.lines]
    assert drawn == [[80.0]] * 5, "two lines of goodput and of times, and the recommended k"
    assert specdec(capsys, "report", str(run), "--format", "csv,png").code == 0
    assert (run / "plots" / "load.png").exists()
    rows = list(csv.DictReader((run / "points.csv").read_text().splitlines()))
    assert [(r["request_rate"], r["k"]) for r in rows] == [
        *(("80.0", "0"), ("80.0", "3"), ("inf", "0"), ("inf", "3"))
    ]
    assert float(rows[0]["offered_rate"]) == point(found, 0, 80.0)["load"]["offered_rate"]
    merged = specdec(capsys, "merge", str(run), "-o", str(tmp_path / "whole"), "--json")
    assert merged.code == 0, merged.err
    assert json.loads(merged.out)["points"] == found["points"]
    shown = specdec(capsys, "report", str(run))
    assert shown.code == 0 and "80 requests/s" in shown.out
    assert "Under load" in (run / "report.html").read_text()


def test_counters_alone_are_of_all_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Chunks of two rounds do not show rounds, so counters cover all requests of the stretch."""
    server = FakeServer(k=3, faults=Faults(merge=2))
    with running(server):
        words = (*urls(server), "--request-rate", 60, "-o", tmp_path / "run")
        found = swept(capsys, *words, "--set", "run.warmup=0")
    (p,) = found["points"]
    assert p["engine"]["acceptance_source"] == "counters"
    assert p["metrics"]["num_drafts"] == sum(len(w.rounds) for w in server.written)
    # On a busy machine the last of those that are due may be left unsent.
    assert 4 < len(server.written) <= 4 + p["load"]["num_unmeasured"]


def test_a_slow_server_is_overloaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Two slots of some 9 rounds of 5 ms each: about 40 answers a second, and 200 are asked for."""
    server = FakeServer(k=0, slots=2, round_s=0.005)
    with running(server):
        words = (*urls(server), "--request-rate", 200, "--duration", 0.3)
        found = swept(capsys, *words, "--slo", "e2el:50ms")
    p = point(found, 0, 200.0)
    assert p["load"]["overloaded"] and "overloaded" in codes(found)
    assert 5 < p["load"]["achieved_rate"] < 60
    assert p["speedup"] is None and p["load"]["goodput"] is None
    assert {p["metrics"][n]["p50"] for n in ("ttft_ms", "tpot_ms", "e2el_ms")} == {None}
    best = found["best_by_request_rate"]["200"]
    assert best["k"] is None and "overloaded" in best["reason"]
    assert found["crossover"] == {"below": None, "above": None}


def test_failures_count_and_waiting_at_the_client_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = FakeServer(k=0, round_s=0.003)
    run = tmp_path / "run"
    with running(server):
        words = (*urls(server), "--request-rate", 100, "--duration", 0.2, "--arrivals", "constant")
        alone = swept(capsys, *words, "--max-concurrency", 1, "-o", run)
        server.faults.statuses = [(400, {})] * 8
        words = (*urls(server), "--request-rate", 25, "--set", "run.repeats=3")
        failed = swept(capsys, *words, "--slo", "e2el:20s", code=3)
    p = point(alone, 0, 100.0)
    assert p["batch_size"] == 1 and p["load"]["max_in_flight"] > 3
    arrived = sorted(w.arrived for w in server.written[1:25])
    apart = sorted(b - a for a, b in pairwise(arrived))
    assert apart[0] > 0.01, "one at a time"
    assert samples(run)[-1]["e2el_ms"][0] > 4e3 * apart[len(apart) // 2], "those behind waited"
    load = point(failed, 0, 25.0)["load"]
    assert 0 < load["num_failed"] < load["num_requests"] == 12
    assert load["slo_attainment"] == pytest.approx(1 - load["num_failed"] / 12)


def test_a_server_that_refuses_most_requests_is_not_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is fast since it does little, and its refusals are no answers."""
    refuse = frozenset(n for n in range(2, 400) if n % 4)
    plain = FakeServer(k=0, round_s=0.004)
    shy = FakeServer(k=3, round_s=0.004, faults=Faults(refuse=refuse))
    with running(plain, shy):
        words = (*urls(plain, shy), "--request-rate", 40, "--set", "run.repeats=12")
        found = swept(capsys, *words, code=3)
    load = point(found, 3, 40.0)["load"]
    assert load["num_failed"] > 30 and load["achieved_rate"] < 0.4 * load["offered_rate"]
    best = found["best_by_request_rate"]["40"]
    if point(found, 0, 40.0)["load"]["overloaded"]:  # by a stall of a busy machine
        assert best["verdict"] == "inconclusive" and "k = 0 is overloaded" in best["reason"]
    else:
        assert best["k"] == 0, best


def seconds_a_round(server: FakeServer) -> float:
    """The mean time between the chunks that a server wrote."""
    return mean(b - a for text in server.written for a, b in pairwise(text.chunk_times))


def test_a_crowded_server_loses_by_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    """With speculation, rounds take longer in a crowd."""
    plain, fast = FakeServer(k=0, round_s=0.008), FakeServer(k=3, round_s=0.008, crowd=4.0)
    with running(plain, fast):
        words = (*urls(plain, fast), "--request-rate", "25,60", "--set", "run.repeats=25")
        found = swept(capsys, *words)
    best = found["best_by_request_rate"]
    if best["60"]["k"] is None:  # this machine was too busy to answer so many requests
        assert "every k is overloaded" in best["60"]["reason"]
        assert seconds_a_round(plain) > 1.5 * plain.round_s
    else:
        assert best["60"]["k"] == 0, best
    assert 3 in best["25"]["tied"], best
    shown = [rate for rate, one in best.items() if one["verdict"] != "inconclusive"]
    for rate in best.keys() - shown:
        assert BUSY.search(best[rate]["reason"])
    if "25" in shown:
        assert best["25"]["k"] == 3
    assert found["crossover"] == {
        "below": 25.0 if "25" in shown else None,
        "above": 60.0 if "60" in shown else None,
    }


def test_all_rates_on_one_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*serve_words("sglang", "2"), "--request-rate", "60,inf", "-o", str(tmp_path / "run")]
    found = specdec(capsys, *words, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert [(p["request_rate"], p["k"]) for p in document["points"]] == [
        *((60.0, 0), (60.0, 2), ("inf", 0), ("inf", 2))
    ]
    assert [s["k"] for s in document["environment"]["servers"]] == [0, 2], "each started once"
    again = specdec(capsys, *words, "--json", "--resume")
    assert again.code == 0 and json.loads(again.out)["points"] == document["points"]


def test_kill_9_and_resume_ask_for_no_whole_point_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, fast = FakeServer(k=0), FakeServer(k=2)
    run = tmp_path / "run"
    words = ["sweep-k", *map(str, COMMON), "-o", str(run), "--request-rate", "20,40"]
    words += ["--duration", "1"]
    with running(plain, fast):
        end, _ = stopped_sweep([*words, *urls(plain, fast)], 0.0, signal.SIGKILL, after=21)
        assert end == -signal.SIGKILL
        asked = plain.asked + fast.asked
        whole = [json.loads(one) for one in (run / "load.jsonl").read_text().splitlines()]
        assert specdec(capsys, *words, *urls(plain, fast), "--resume").code == 0
        again = plain.asked + fast.asked - asked
    measured = {20.0: 20, 40.0: 40}
    left = 120 - sum(measured[one["request_rate"]] for one in whole)
    assert left < 120 and left <= again <= 3 * left + 2
    assert len((run / "load.jsonl").read_text().splitlines()) == 4


def test_a_load_goes_on_after_plain_decoding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, fast, run = FakeServer(k=0), FakeServer(k=2), tmp_path / "run"
    with running(plain, fast):
        words = (*urls(plain, fast), "--request-rate", 100, "-o", run)
        swept(capsys, *words)
        for name in ("samples.jsonl", "load.jsonl"):
            lines = (run / name).read_text().splitlines(keepends=True)
            (run / name).write_text("".join(one for one in lines if json.loads(one)["k"] == 0))
        for name in ("points.jsonl", "summary.json"):
            (run / name).unlink()
        found = swept(capsys, *words, "--resume")
    assert [p["status"] for p in found["points"]] == ["ok", "ok"]


def test_our_own_engine_under_load(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is watched while requests arrive, and what disturbs it leaves no verdict."""
    seen = []

    def notices(watch: MachineWatch) -> list[Notice]:
        seen.append([len(one) for one in watch._stretches])
        return [Notice("cpu_load", "9.0 processes were ready to run")]

    monkeypatch.setattr(MachineWatch, "notices", notices)
    words = ("--k", "0,2", "--request-rate", "30", "--max-concurrency", 2, "--slo", "ttft:9s")
    more = ("--set", "run.repeats=4", "-o", tmp_path / "a", "--strict")
    found = swept(capsys, *words, *more, code=3)
    assert len(seen[-1]) == 2 and min(seen[-1]) > 2, "readings of two points"
    assert "cpu_load" in codes(found) and found["best"]["verdict"] == "inconclusive"
    assert "times were disturbed (cpu_load)" in found["best"]["reason"]
    assert found["tokens"]["identical"] and found["tokens"]["must_be_identical"]
    for k in (0, 2):
        p = point(found, k, 30.0)
        assert p["batch_size"] == 2 and p["load"]["num_requests"] == 16
        assert p["load"]["send_lag_ms"]["mean"] is None
        assert p["metrics"]["verify_ms"] > 0 and p["metrics"]["round_ms"] > 0
    ours = [s["due"] for s in samples(tmp_path / "a") if s["k"] == 2]
    due = due_times(POISSON, 30.0, 16, 0)
    assert ours == pytest.approx([at - due[0] for at in due], abs=1e-6), "as for servers"


def test_prompts_that_our_own_engine_refuses_are_no_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    ids = [[5] * 8, [5] * 3000]
    file.write_text("".join(json.dumps({"prompt_token_ids": one}) + "\n" for one in ids))
    words = ("--dataset", file, "--k", "0", "--request-rate", "inf", "--set", "run.repeats=4")
    load = swept(capsys, *words, code=3)["points"][0]["load"]
    assert (load["num_requests"], load["num_failed"]) == (8, 4)
    assert load["achieved_rate"] * load["window_seconds"] == pytest.approx(4)


def test_shards_of_a_load_are_merged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = FakeServer(k=0)
    with running(server):
        words = (*urls(server), "--request-rate", 100, "--set", "run.repeats=4")
        parts = [
            swept(capsys, *words, "--shard", f"{i}/2", "-o", tmp_path / str(i))["points"][0]
            for i in (0, 1)
        ]
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    found = specdec(capsys, "merge", *folders, "-o", str(tmp_path / "whole"), "--json")
    assert found.code == 0, found.err
    (whole,) = json.loads(found.out)["points"]
    assert whole["load"]["num_requests"] == 16
    for name in ("window_seconds", "num_unmeasured"):
        want = sum(one["load"][name] for one in parts)
        assert whole["load"][name] == pytest.approx(want)
    kept = samples(tmp_path / "whole")
    assert [s["request"] for s in kept] == list(range(16))
    assert {s["index"] for s in kept} == {0, 1, 2, 3}
    twice = specdec(capsys, "merge", folders[0], folders[0], "-o", str(tmp_path / "x"))
    assert twice.code == 2 and "has prompt" in twice.err


def test_points_that_a_shard_lacks_are_compared_on_the_others_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first shard's machine is three times as slow, and was stopped before k = 2."""
    plain, fast = FakeServer(k=0), FakeServer(k=2)
    folders = [tmp_path / "0", tmp_path / "1"]
    with running(plain, fast):
        words = (*urls(plain, fast), "--request-rate", 200, "--set", "run.repeats=8")
        for i, folder in enumerate(folders):
            swept(capsys, *words, "--shard", f"{i}/2", "-o", folder)
    for name in ("samples", "load", "points"):
        for folder, is_kept, ms in ((folders[0], {0}, 300.0), (folders[1], {0, 2}, 100.0)):
            file = folder / f"{name}.jsonl"
            lines = [json.loads(one) for one in file.read_text().splitlines()]
            changed = {"samples": {"e2el_ms": [ms]}, "load": {"overloaded": False}}.get(name, {})
            kept = [one | changed for one in lines if one["k"] in is_kept]
            file.write_text("".join(json.dumps(one) + "\n" for one in kept))
    merged = specdec(capsys, "merge", *folders, "-o", tmp_path / "whole", "--json")
    assert merged.code == 3, "prompts are missing"
    again = specdec(capsys, "merge", tmp_path / "whole", "-o", tmp_path / "again", "--json")
    for found in (merged, again):
        assert point(found.document, 2, 200.0)["speedup"] == pytest.approx(1.0)
        (told,) = (w for w in found.document["warnings"] if w["code"] == "points_lack_prompts")
        assert told["message"].startswith("1 point lacks prompts")
        assert told["message"].endswith("finish each shard with --resume, then merge again")
    by_request = [
        {s["request"]: s["index"] for s in samples(tmp_path / "whole") if s["k"] == k}
        for k in (0, 2)
    ]
    assert list(by_request[0]) == list(range(32)) and list(by_request[1]) == list(range(16, 32))
    assert by_request[1].items() <= by_request[0].items()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--request-rate", "0"],
            "--request-rate: load.request_rate[0]: should be a number of requests",
        ),
        (["--request-rate", "-1"], "or inf, not -1"),
        (["--request-rate", "1e12"], "from 1e-6 to 1e6, or inf, not 1000000000000.0"),
        (["--request-rate", "1,1e-12"], "from 1e-6 to 1e6, or inf, not 1e-12"),
        (["--slo", "a,b"], "--slo: expected NAME:TIME such as ttft:500ms, got 'a,b'"),
        (["--slo", "ttft"], "--slo: expected NAME:TIME such as ttft:500ms, got 'ttft'"),
        (["--slo", "ttft:5ms,tpot:2ms"], "hint: repeat --slo for each objective"),
        (["--request-rate", "1,fast"], 'not "fast"'),
        (["--request-rate", "nan"], 'not "nan"'),
        (["--slo", "ttft:5ms"], "--slo"),
        (["--max-concurrency", "4"], "--max-concurrency"),
        (["--duration", "4"], "--duration"),
        (["--arrivals", "constant"], "--arrivals"),
        (
            ["--request-rate", "1", "--slo", "ttft:500"],
            "--slo: load.slo.ttft: expected a time with",
        ),
        (["--request-rate", "1", "--slo", "itl:5ms"], "got 'itl'"),
        (["--request-rate", "1", "--slo", "ttft:5ms", "--slo", "ttft:6ms"], "ttft is given twice"),
        (["--request-rate", "1", "--arrivals", "uniform"], "--arrivals: expected poisson, const"),
        (["--request-rate", "1", "--arrivals", "gamma:-1"], "--arrivals: the shape of gamma"),
        (
            ["--request-rate", "1", "--max-concurrency", "4", "--batch-size", "4"],
            "--batch-size and --max-concurrency exclude each other",
        ),
        (["--request-rate", "1", "--batch-size", "1,4"], "--batch-size: one number is possible at"),
        (["--request-rate", "1", "--predict-only"], "--predict-only and --request-rate exclude"),
        (
            ["--request-rate", "1", "--server", "http://h:1", "--baseline", "."],
            "--baseline and --request-rate exclude",
        ),
        (
            ["--request-rate", "1", "--server", "http://h:1", "--batch-size", "4"],
            "--batch-size and --request-rate exclude",
        ),
        (["--request-rate", "1", "--minutes", "2"], "--minutes and --request-rate exclude"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    found = specdec(capsys, "sweep-k", *map(str, COMMON), *words)
    assert found.code == 2 and told in found.err, found.err
    assert len(found.err.strip().splitlines()) <= 2, "one line, and a hint"


def test_other_commands_have_no_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, "generate", "demo", "--prompt", "x", "--set", "load.request_rate=4")
    assert found.code == 2 and "load.request_rate" in found.err
    told = specdec(capsys, "sweep-k", *map(str, COMMON), "--set", "load.request_rate=[4, 0]")
    assert told.code == 2 and "load.request_rate[1]: should be a number" in told.err
    assert "from 1e-6 to 1e6, or inf, not 0" in told.err


def test_a_dry_run_knows_rates(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(capsys, "--k", "0,2", "--request-rate", "4,inf", "--duration", 10, "--dry-run")
    assert found["num_samples"] == 2 * (40 + 4)
    rates = [(p["request_rate"], p["k"]) for p in found["points"]]
    assert rates == [(4.0, 0), (4.0, 2), ("inf", 0), ("inf", 2)]
