"""`sweep-k --server` and `generate --server` against the fake: documents, folders, refusals."""

import json
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.app import main
from specdec_cli.commands.servers import named
from specdec_cli.errors import UsageError
from specdec_cli.recipe.choices.registry import METHODS
from specdec_cli.report.findings import warnings
from specdec_cli.report.folder import read_folder
from specdec_cli.report.run_tables import run_tables
from specdec_cli.report.runs import side_by_side
from tests.cli.generate_helpers import Result
from tests.cli.sweep_helpers import gain, samples, specdec, stopped_sweep
from tests.server.fake_server import FakeServer, Faults, Written, running

Run = Callable[..., Result]
COMMON = ("demo", "--limit", 4, "--max-new-tokens", 12, "--set", "run.repeats=1", "-q")


pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("no_pictures")]


def urls(*servers: FakeServer) -> list[str]:
    return [word for server in servers for word in ("--server", server.url)]


def swept(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    found = specdec(capsys, "sweep-k", *map(str, (*COMMON, "--json", *words)))
    assert found.code == code, found.err
    return dict(json.loads(found.out))


def point(document: dict[str, Any], k: int) -> dict[str, Any]:
    (found,) = [p for p in document["points"] if p["k"] == k]
    return dict(found)


def codes(document: dict[str, Any]) -> set[str]:
    return {one["code"] for one in document["warnings"]}


def test_a_sweep_over_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, some, sglang = FakeServer(k=0), FakeServer(k=2), FakeServer("sglang", k=4)
    with running(plain, some, sglang):
        found = swept(capsys, *urls(sglang, plain, some), "-o", tmp_path / "run")
    assert [p["k"] for p in found["points"]] == [0, 2, 4]
    engines = [p["engine"] for p in found["points"]]
    assert engines == [
        {"kind": "vllm", "version": "0.25.1", "acceptance_source": None},
        {"kind": "vllm", "version": "0.25.1", "acceptance_source": "chunks"},
        {"kind": "sglang", "version": "0.25.1", "acceptance_source": "per_request"},
    ]
    for server, k in ((some, 2), (sglang, 4)):
        p = point(found, k)
        m, truth = p["metrics"], [w.rounds for w in server.written[1:]]  # the first warmed up
        every = [a for rounds in truth for a in rounds]
        assert m["num_drafts"] == len(every) and m["num_draft_tokens"] == k * len(every)
        assert m["num_accepted_tokens_per_pos"] == [sum(a > i for a in every) for i in range(k)]
        assert m["acceptance_histogram"] == [every.count(i) for i in range(k + 1)]
        assert m["mean_acceptance_length"] == pytest.approx(1 + sum(every) / len(every))
        low, high = p["mean_acceptance_length_ci"]
        assert low <= m["mean_acceptance_length"] <= high
        assert m["in_text"] == _in_text(truth, k)
        absent = ("draft_ms", "verify_ms", "sample_ms", "broadcast_ms", "prefill_ms")
        assert not set(absent) & m.keys()
        assert set(m["e2el_ms"]) == {"mean", "p50", "p90", "p99"}
        assert gain(p) > 0 and p["num_retries"] == 0
    assert found["tokens"] == {
        "compared": True,
        "must_be_identical": False,
        "identical": True,
        "diverging": [],
    }
    assert found["time_curve"] == [] and point(found, 2)["predicted_speedup"] is None
    assert {s["k"]: s["kind"] for s in found["environment"]["servers"]}[4] == "sglang"
    assert specdec(capsys, "report", str(tmp_path / "run")).code == 0
    assert (tmp_path / "run" / "report.html").exists()
    table = next((tmp_path / "run").rglob("points.csv")).read_text().splitlines()
    heading, row = (line.split(",") for line in table[:2])
    runs = [tmp_path / "run", shutil.copytree(tmp_path / "run", tmp_path / "copy")]
    (engines,) = [t for t in run_tables(side_by_side(runs)) if t.name == "engines"]
    titles = [column.title for column in engines.columns]
    assert [r[titles.index("k")] for r in engines.rows] == [0, 0, 2, 2, 4, 4]
    lengths = [r[titles.index("tokens a round")] for r in engines.rows]
    assert lengths[::2] == lengths[1::2] and lengths[2:5:2] == [
        point(found, k)["metrics"]["in_text"]["mean_acceptance_length"] for k in (2, 4)
    ]
    assert [r[titles.index("text")] for r in engines.rows] == [None, "same"] * 3
    told = specdec(capsys, "report", *map(str, runs), "--json")
    for one, shown in zip(json.loads(told.out)["engines"], engines.rows, strict=True):
        p = point(found, one["k"])
        assert one["engine"] == p["engine"] and one["mean_acceptance_length"] == shown[5]
        assert one["round_ms"] == p["metrics"]["round_ms"] and one["round_ms_ci"] is not None
        assert (one["against_first"] or {"num_diverging": None})["num_diverging"] in (None, 0)
    some_prompts = tmp_path / "fewer"
    shutil.copytree(tmp_path / "run", some_prompts)
    samples = (some_prompts / "samples.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in samples if json.loads(line)["index"] != 0]
    (some_prompts / "samples.jsonl").write_text("".join(left))
    both = run_tables(side_by_side([tmp_path / "run", some_prompts]))
    (engines,) = [t for t in both if t.name == "engines"]
    lengths = [r[titles.index("tokens a round")] for r in engines.rows]
    assert lengths[::2] == lengths[1::2], "over the prompts that both have"
    assert (
        lengths[2]
        == _in_text([w.rounds for w in some.written[1:]][1:], 2)["mean_acceptance_length"]
    )
    assert [row[heading.index(name)] for name in ("commit_ms", "verify_ms", "prefill_ms")] == [
        ""
    ] * 3


def _in_text(truth: list[list[int]], k: int) -> dict[str, Any]:
    """The rounds of texts of 12 tokens, the first of which is the prefill's."""
    drafts = accepted = 0
    for rounds in truth:
        left = 11
        for a in rounds:
            room = min(k, left - 1)
            drafts += room > 0
            accepted += min(a, max(0, room))
            left -= a + 1
    return {
        "num_drafts": drafts,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": pytest.approx(1 + accepted / drafts),
    }


def test_servers_are_never_measured_together(capsys: pytest.CaptureFixture[str]) -> None:
    servers = FakeServer(k=0, round_s=0.002), FakeServer(k=2, round_s=0.002)
    with running(*servers):
        swept(capsys, *urls(*servers), "--batch-size", 2)
    spans = sorted((w.arrived, w.chunk_times[-1], s.k) for s in servers for w in s.written)
    for (_, end, k), (begin, _, other) in pairwise(spans):
        assert k == other or begin > end


def test_without_a_baseline_no_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(k=3)
    with running(server):
        found = swept(capsys, *urls(server))
    assert [p["k"] for p in found["points"]] == [3]
    assert point(found, 3)["speedup"] is None and found["best"]["k"] is None
    assert "no_baseline" in codes(found)


def test_a_baseline_server_and_a_baseline_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, server = FakeServer(k=0), FakeServer(k=3)
    with running(plain, server):
        first = swept(capsys, *urls(server), "--baseline-server", plain.url, "-o", tmp_path / "a")
        asked = plain.asked
        second = swept(capsys, *urls(server), "--baseline", tmp_path / "a", "-o", tmp_path / "b")
        others = [word for text in ("a", "b", "c", "d") for word in ("--prompt", text)]
        for words, why in ((("--limit", 5), "prompts"), (others, "prompts"),
                           (("--max-new-tokens", 13), "max_new_tokens"),
                           (("--batch-size", 2), "batch size 2"),
                           (("--set", "run.repeats=2"), "repeats")):  # fmt: skip
            code, told = _told(capsys, *urls(server), "--baseline", tmp_path / "a", *words)
            assert code == 2 and "--baseline" in told and why in told
    assert plain.asked == asked
    for found in (first, second):
        assert point(found, 0)["speedup"] == 1.0 and gain(point(found, 3)) > 0
    assert point(second, 0) == point(first, 0)


@pytest.mark.parametrize(
    ("algorithm", "words", "told"),
    [
        ("NGRAM", (), "runs NGRAM, but the recipe's method draft_model is SGLang's STANDALONE"),
        ("EAGLE", ("--draft", "demo:eagle3"), "the recipe's method eagle3 is SGLang's EAGLE3"),
        ("NGRAM", ("--draft", "ngram"), None),
        ("eagle3", ("--draft", "demo:eagle3"), None),
        ("NEXTN", ("--set", "speculation.method=none", "--set", "draft=null"), None),
    ],
)
def test_a_server_of_another_method_is_refused(
    capsys: pytest.CaptureFixture[str], algorithm: str, words: tuple[str, ...], told: str | None
) -> None:
    server = FakeServer("sglang", k=2, algorithm=algorithm)
    with running(server):
        found = specdec(capsys, "sweep-k", *map(str, COMMON), *words, *urls(server))
    assert found.code == (0 if told is None else 2), found.err
    assert (told or "") in found.err


@pytest.mark.parametrize(
    ("algorithm", "method", "may_skip"),
    [
        ("NGRAM", "pard", True),  # SGLang has no method pard
        ("EAGLE", "none", False),
        ("NEXT_YEARS", "none", True),
        ("NEXT_YEARS", "pard", False),
    ],
)
def test_a_server_s_own_method_decides_whether_rounds_may_propose_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    algorithm: str,
    method: str,
    may_skip: bool,
) -> None:
    (tmp_path / "config.json").write_text('{"pard_token": 5}')
    server = FakeServer("sglang", k=2, algorithm=algorithm, skips=True)
    with running(server):
        none = ("--set", "speculation.method=none", "--set", "draft=null")
        words = none if method == "none" else ("--draft", tmp_path)
        found = swept(capsys, *urls(server), *words)
    assert ("spec_details_invalid" in codes(found)) != may_skip
    known = point(found, 2)["metrics"]["mean_acceptance_length"]
    told = [a for w in server.written[1:] for a in w.rounds if a]
    assert known == (pytest.approx(1 + sum(told) / len(told)) if may_skip else None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--draft", "mine"), "has no method mine, which is a plugin's"),
        (("--set", "speculation.options.a=1"), "speculation.options.a: the server at"),
        (("--set", "speculation.acceptance=typical"), "vLLM has no rule typical"),
    ],
)
def test_settings_of_speculation_that_no_server_has_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setitem(METHODS, "mine", replace(METHODS["ngram"], code=object()))
    server = FakeServer(k=2)
    with running(server):
        found = specdec(capsys, "sweep-k", *map(str, COMMON), *words, *urls(server))
    assert found.code == 2 and told in found.err and not server.asked


@pytest.mark.parametrize(
    ("dialect", "k", "rule", "is_told"),
    [
        ("vllm", 2, "synthetic", True),
        ("sglang", 2, "synthetic", True),
        ("vllm", 0, "synthetic", False),
        ("vllm", 2, "rejection", False),
    ],
)
def test_a_running_server_accepts_by_its_own_rule(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    dialect: str,
    k: int,
    rule: str,
    is_told: bool,
) -> None:
    """The recipe's rule labels the points, so the reader has to know that nothing checks it."""
    server = FakeServer(dialect, k=k)
    length = "null" if rule == "rejection" else "2"
    words = ("--set", f"speculation.acceptance={rule}", "--limit", "1", "-o", tmp_path)
    words = (*words, "--set", f"speculation.synthetic_acceptance_length={length}")
    with running(server):
        document = swept(capsys, *words, *urls(server))
    told = [one["message"] for one in document["warnings"] if one["code"] == "acceptance_rule"]
    start = "speculation.acceptance is synthetic: a running server accepts as it was started"
    assert [one.startswith(start) for one in told] == [True] * is_told
    assert (start in str(warnings(read_folder(tmp_path)))) == is_told


def test_a_prompt_beyond_the_context_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(k=2)
    with running(server):
        words = ("generate", "demo", "--prompt", "word " * 600, "--prompt", "a", "--json")
        found = specdec(capsys, *words, "--max-new-tokens", "4", "--server", server.url)
    assert found.code == 3 and server.asked == 1
    long, short = json.loads(found.out)["outputs"]
    assert "tokens, but the server's context holds 512 with output" in long["error"]
    assert short["finish_reason"] == "length"


def test_a_command_for_a_server_says_whose_times_it_is_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rank of the draft's process group reaches no server, and the times are not ours."""
    servers = FakeServer(k=0, round_s=0.01), FakeServer(k=3, round_s=0.01)
    words = ("--limit", 20, "--set", "target.tensor_parallel_size=4", "-o", tmp_path / "run")
    with running(*servers):
        swept(capsys, *urls(*servers), *words)
    assert specdec(capsys, "report", str(tmp_path / "run")).code == 0
    notes = " ".join(json.loads((tmp_path / "run" / "vllm.json").read_text())["notes"])
    assert "Times are those of vllm 0.25.1. specdec did not start the servers" in notes
    assert "this engine" not in notes and "Measured with draft TP" not in notes


@pytest.mark.parametrize("url", ["x", "http://me:secret@host"])
def test_addresses_in_a_folder_are_checked(tmp_path: Path, url: str) -> None:
    kept = {"urls": ["http://host"], "plain_url": url, "baseline": None, "ks": None}
    (tmp_path / "servers.json").write_text(json.dumps(kept))
    with pytest.raises(UsageError, match=r"servers\.json: ") as found:
        named(None, None, None, None, tmp_path)
    assert "secret" not in str(found.value)


def test_speed_ups_over_another_engine_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A k = 0 of our own engine, of another kind of server and of another version."""
    native = ("--k", "0", "-o", tmp_path / "native")
    swept(capsys, *native)
    server = FakeServer(k=3)
    with running(server):
        found = swept(capsys, *urls(server), "--baseline", tmp_path / "native")
    (told,) = [one for one in found["warnings"] if one["code"] == "other_engine"]
    assert "with specdec and k = 3 with vllm 0.25.1" in told["message"]
    assert told["evidence"] == {"ks": [3]}
    for plain, is_told in (
        (FakeServer("sglang", k=0), True),
        (FakeServer(k=0, version="0.33.0"), True),
        (FakeServer(k=0), False),
    ):
        with running(server, plain):
            found = swept(capsys, *urls(server, plain))
        assert ("other_engine" in codes(found)) == is_told


def test_ks_are_chosen_among_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    servers = [FakeServer(k=k) for k in (0, 2, 3)]
    with running(*servers):
        found = swept(capsys, *urls(*servers), "--k", "3")
        assert [p["k"] for p in found["points"]] == [0, 3] and servers[1].asked == 0
        told = specdec(capsys, "sweep-k", *map(str, COMMON), *urls(*servers), "--k", "3,5")
    assert told.code == 2 and "--k 5" in told.err and servers[1].url in told.err


def test_counters_alone_have_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    plain, server = FakeServer(k=0), FakeServer(k=3, faults=Faults(merge=2))
    with running(plain, server):
        found = point(swept(capsys, *urls(plain, server)), 3)
    every = [a for w in server.written[1:] for a in w.rounds]
    assert found["engine"]["acceptance_source"] == "counters"
    assert found["metrics"]["mean_acceptance_length"] == pytest.approx(1 + sum(every) / len(every))
    assert found["mean_acceptance_length_ci"] is None and "in_text" not in found["metrics"]
    assert found["metrics"]["round_ms"] is None and found["metrics"]["num_rounds"] is None
    assert len(found["metrics"]["acceptance_histogram"]) == 4


def test_details_of_some_requests_and_counters_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The figures are of all requests, by whichever of the two tells each."""

    class OnceWithout(FakeServer):
        def _details(self, done: Written) -> dict[str, Any]:
            return {} if len(self.written) == 2 else super()._details(done)

    server = OnceWithout(k=3, detailed=True)
    with running(server):
        found = point(swept(capsys, *urls(server)), 3)
    every = [a for w in server.written[1:] for a in w.rounds]
    assert found["engine"]["acceptance_source"] == "chunks"
    assert found["metrics"]["acceptance_histogram"] == [every.count(i) for i in range(4)]


@pytest.mark.parametrize("merge", [1, 2])
def test_counters_of_several_prompts_are_not_of_a_category(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, merge: int
) -> None:
    server = FakeServer(k=3, faults=Faults(merge=merge))
    words = ("--limit", 10, "--sample", "stratified", "--batch-size", 5, "-o", tmp_path)
    with running(server):
        found = point(swept(capsys, *urls(server), *words), 3)
    told = {n: c["mean_acceptance_length"] for n, c in found["per_category"].items()}
    if merge == 2:
        assert found["metrics"]["mean_acceptance_length"] > 1 and set(told.values()) == {None}
    for name, length in told.items() if merge == 1 else ():
        own = [s["accepted_per_round"] for s in samples(tmp_path) if s["category"] == name]
        assert length == pytest.approx(1 + sum(map(sum, own)) / sum(map(len, own)))


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        (Faults(foreign=3), "other_traffic"),
        (Faults(reset_after=3), "counters_reset"),
        (Faults(unread_after=3), "counters_unread"),
    ],
)
def test_acceptance_that_is_not_known_is_null(
    capsys: pytest.CaptureFixture[str], faults: Faults, code: str
) -> None:
    server = FakeServer(k=3, faults=faults)
    with running(server):
        found = swept(capsys, *urls(server))
    p = point(found, 3)
    assert p["status"] == "ok" and p["engine"]["acceptance_source"] is None
    for name in ("num_drafts", "mean_acceptance_length", "acceptance_histogram"):
        assert p["metrics"][name] is None
    assert p["mean_acceptance_length_ci"] is None and code in codes(found)
    assert p["metrics"]["decode_tokens_per_second"] > 0


def test_a_report_of_acceptance_that_is_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its plot has the points with known acceptance; without such a point there is no plot."""
    told, untold = FakeServer(k=2), FakeServer(k=3, faults=Faults(foreign=3))
    for name, servers in (("some", (told, untold)), ("none", (untold,))):
        run = tmp_path / name
        with running(*servers):
            swept(capsys, *urls(*servers), "-o", run)
        found = specdec(capsys, "report", str(run), "--format", "html,png")
        assert found.code == 0, found.err
        assert (run / "report.html").exists()
        assert (run / "plots" / "acceptance.png").exists() == (name == "some")


@pytest.mark.parametrize(
    ("faults", "code", "remedy"),
    [
        (Faults(usage=5), "usage_differs", "do not compare with"),
        (Faults(hits=True), "prefix_cache_hits", "without prefix caching"),
        (Faults(bad_details="sum"), "spec_details_invalid", "update the server"),
    ],
)
def test_warnings(
    capsys: pytest.CaptureFixture[str], faults: Faults, code: str, remedy: str
) -> None:
    server = FakeServer(k=3, detailed=True, faults=faults)
    with running(server):
        found = swept(capsys, *urls(server))
    p = point(found, 3)
    (told,) = [one["message"] for one in found["warnings"] if one["code"] == code]
    assert remedy in told and p["metrics"]["num_output_tokens"] == 48
    # Counters have what rounds accepted beyond the ends of texts; chunks have not.
    for name in ("acceptance_rate_per_pos", "conditional_acceptance_rate_per_pos"):
        pairs = zip(p["metrics"][name], p[f"{name}_ci"], strict=True)
        assert all(low <= rate <= high for rate, (low, high) in pairs)


def test_other_texts_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    servers = FakeServer(k=0), FakeServer(k=3, faults=Faults(other_text=True))
    with running(*servers):
        found = swept(capsys, *urls(*servers))
    (one,) = found["tokens"]["diverging"]
    assert (one["k"], one["num_diverging"], one["first"]) == (3, 4, 0)


def test_what_fails_is_a_sample_and_the_point_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = FakeServer(k=3, faults=Faults(statuses=[(500, {}), (400, {})]))
    with running(server):
        found = swept(capsys, *urls(server), "--set", "run.warmup=0", "-o", tmp_path, code=3)
    first, *others = sorted(samples(tmp_path), key=lambda s: s["index"])
    assert first["finish_reason"] == "error" and "planted 400" in first["error"]
    assert first["num_retries"] == 1 and {s["finish_reason"] for s in others} == {"length"}
    p = point(found, 3)
    assert p["status"] == "ok" and p["num_retries"] == 1 and p["metrics"]["num_prompts"] == 3
    with running(server := FakeServer(k=3)):  # the prompt that failed runs again, and no other
        found = swept(capsys, *urls(server), "--set", "run.warmup=0", "-o", tmp_path, "--resume")
    assert len(server.written) == 1 and point(found, 3)["metrics"]["num_prompts"] == 4
    server = FakeServer(k=3, faults=Faults(statuses=[(500, {}), *[(400, {})] * 9]))
    with running(server):
        found = swept(capsys, *urls(server), "--set", "run.warmup=0", code=3)
    p = point(found, 3)
    assert p["status"] == "failed" and "planted 400" in p["reason"] and p["num_retries"] == 1
    assert p["engine"] == {"kind": "vllm", "version": "0.25.1", "acceptance_source": None}


def test_a_repeat_that_fails_is_the_prompt_s_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its time of 0 s would make the others outliers. Request 1 is the warm-up's."""
    with running(server := FakeServer(k=3, faults=Faults(refuse=frozenset({3})))):
        found = swept(
            capsys, *urls(server), "--set", "run.repeats=3", "--limit", 3, "-o", tmp_path, code=3
        )
        (failed,) = [s for s in samples(tmp_path) if s["finish_reason"] == "error"]
        assert "planted" in failed["error"] and failed["index"] == 0
        assert point(found, 3)["metrics"]["num_prompts"] == 2
        asked = server.asked
        words = ("--set", "run.repeats=3", "--limit", 3, "-o", tmp_path, "--resume")
        again = swept(capsys, *urls(server), *words)
    assert server.asked == asked + 3 + 1 and point(again, 3)["metrics"]["num_prompts"] == 3


def test_kill_9_and_resume_ask_for_nothing_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    servers = FakeServer(k=0, round_s=0.004), FakeServer(k=3, round_s=0.004)
    words: list[str | Path] = ["sweep-k", *map(str, COMMON), "-o", tmp_path]
    with running(*servers):
        words += urls(*servers)
        end, told = stopped_sweep(words, 0.02, signal.SIGKILL, after=3)
        assert end == -signal.SIGKILL
        begun = len(samples(tmp_path))
        while any(s.running for s in servers):  # the killed client's last request may still run
            time.sleep(0.01)
        before = [len(s.written) for s in servers]
        assert 3 <= begun < 8
        found = specdec(capsys, *map(str, [*words, "--resume", "--json"]))
        assert found.code == 0, found.err
        again = [len(s.written) - b for s, b in zip(servers, before, strict=True)]
        alone = ["sweep-k", "--resume", "-o", str(tmp_path)]
        assert specdec(capsys, *alone, *urls(*servers)).code == 0
        for damaged in ("{}", "[", '{"urls": [3]}'):
            (tmp_path / "servers.json").write_text(damaged)
            unnamed = specdec(capsys, *alone)
            assert unnamed.code == 2 and "hint: name them with --server" in unnamed.err
    assert len(samples(tmp_path)) == 8 and {(k, i) for _, _, k, i in told} <= {
        (s["k"], s["index"]) for s in samples(tmp_path)
    }
    assert sum(again) <= 8 - begun + 2  # and a warm-up of each server


def _cut(folder: Path, lines: int) -> int:
    """Leave the first samples of a run alone, as an interruption does; returns how many."""
    kept = (folder / "samples.jsonl").read_text().splitlines(keepends=True)[:lines]
    (folder / "samples.jsonl").write_text("".join(kept))
    (folder / "summary.json").unlink()
    return len(kept)


def test_the_folder_names_the_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the k of a server that reports none, and the source of k = 0, but no API key."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    plain, server = FakeServer("openai", k=0), FakeServer("openai", k=3)
    one, other = tmp_path / "one", tmp_path / "other"
    with running(plain, server):
        measured = ["--k", "3", *urls(server)]
        swept(capsys, *measured, "--baseline-server", plain.url, "-o", one)
        swept(capsys, *measured, "--baseline", one, "-o", other)
        for folder, asked in ((one, plain), (other, server)):
            assert _cut(folder, 2) == 2
            before = len(asked.written)
            again = specdec(capsys, "sweep-k", "--resume", "--json", "-o", str(folder))
            assert again.code == 0, again.err
            assert gain(point(json.loads(again.out), 3)) > 0
            assert len(asked.written) > before
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert not any(b"secret-key" in path.read_bytes() for path in files)


def test_a_server_of_texts_alone_needs_its_k(capsys: pytest.CaptureFixture[str]) -> None:
    plain, server = FakeServer("openai", k=0), FakeServer("openai", k=3)
    with running(plain, server):
        told = specdec(capsys, "sweep-k", *map(str, COMMON), *urls(server))
        assert told.code == 2 and "--k" in told.err and server.url in told.err
        for words in (("--top-k", "5"), ("--set", "sampling.suppress_tokens=[3]")):
            code, told = _told(capsys, *urls(server), "--k", "3", *words)
            assert code == 2 and "does not accept it" in told and server.url in told
        found = swept(capsys, *urls(server), "--baseline-server", plain.url, "--k", "3")
    assert gain(point(found, 3)) > 0
    assert point(found, 3)["metrics"]["mean_acceptance_length"] is None
    assert found["tokens"]["identical"] is True


def test_generate_with_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = FakeServer(k=3)
    with running(server):
        words = ("generate", "demo", "--limit", "2", "--max-new-tokens", "8", "--server")
        found = specdec(capsys, *words, server.url, "--json", "-o", str(tmp_path))
        assert found.code == 0, found.err
        document = json.loads(found.out)
        assert [o["token_ids"] for o in document["outputs"]] == [w.tokens for w in server.written]
        assert document["metrics"]["k"] == 3 and document["metrics"]["num_drafts"] > 0
        told = specdec(capsys, *words, server.url, "-k", "5")
        assert told.code == 2 and "-k 5" in told.err.replace("--k 5", "-k 5")
        told = specdec(capsys, *words, server.url, "--check-lossless")
        assert told.code == 2 and "--check-lossless" in told.err
        kept = json.loads((tmp_path / "points.jsonl").read_text())
        assert kept["engine"]["kind"] == "vllm"
        _cut(tmp_path, 1)
        again = specdec(capsys, "generate", "--resume", "-o", str(tmp_path), "--json")
        assert again.code == 0, again.err
        assert f"servers from {tmp_path}: {server.url}\n" in again.err  # prompts go there
        assert "servers from" not in found.err
        texts = [[o["text"] for o in d["outputs"]] for d in (document, json.loads(again.out))]
        assert texts[0] == texts[1] and len(server.written) == 3  # one of the two again
    failing = FakeServer(k=3, faults=Faults(statuses=[(400, {})]))
    with running(failing):
        words = (*words, failing.url, "--json", "-o", str(tmp_path / "failed"))
        assert specdec(capsys, *words).code == 3
        again = specdec(capsys, *words, "--resume")
        assert again.code == 0 and len(failing.written) == 2, again.err
    failing.faults.statuses.append((400, {}))
    with running(failing):
        words = ("generate", "demo", "--prompt", "x", "--server", failing.url, "--json")
        found = specdec(capsys, *words)
    assert found.code == 3 and "prompt 0 failed: HTTP 400: planted 400" in found.err
    assert json.loads(found.out)["outputs"][0]["finish_reason"] == "error"
    with running(other := FakeServer(k=2)):
        resumed = ("generate", "--resume", "-o", str(tmp_path), "--server", other.url)
        told = specdec(capsys, *resumed)
    assert told.code == 2 and "a run with k = 3, and the server has k = 2" in told.err


def test_a_key_is_sent_and_written_nowhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer(key="secret-7")
    with running(server):
        told = specdec(capsys, "sweep-k", *map(str, COMMON), *urls(server))
        assert told.code == 5 and "OPENAI_API_KEY" in told.err
        monkeypatch.setenv("OPENAI_API_KEY", "secret-7\n")  # as a file has it
        swept(capsys, *urls(server), "-o", tmp_path)
        monkeypatch.setenv("OPENAI_API_KEY", "one-3\ntwo-4")
        code, words = _told(capsys, *urls(server))
        assert code == 2 and "OPENAI_API_KEY" in words and "one-3" not in words
        monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    ill = FakeServer(health=503, ill=f"{'no ' * 98}secret-7 is no key")
    with running(ill):
        code, words = _told(capsys, *urls(ill), "--set", "engine.start_timeout_s=0.05")
        assert code == 5 and "HTTP 503: no no" in words and "secr" not in words
        assert "--set engine.start_timeout_s=0.1 waits longer" in words
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [f for f in files if b"secret-7" in f.read_bytes()]


def _told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    found = specdec(capsys, "sweep-k", *map(str, (*COMMON, *words)))
    assert found.out == "" and "Traceback" not in found.err
    return found.code, found.err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--server", "ftp://host"], "ftp://host"),
        (["--server", "localhost:8000"], "localhost:8000"),
        (["--server", "http://host:1/v1?version=2"], "a query"),
        (["--server", "http://host:1#x"], "a fragment"),
        (["--baseline-server", "http://host"], "--baseline-server"),
        (["--baseline", "."], "--baseline"),
        (["--server", "http://h:1", "--predict-only"], "--predict-only"),
        (["--server", "http://h:1", "--check-lossless"], "--check-lossless"),
        (["--server", "http://h:1", "--draft", "a", "--draft", "ngram"], "--draft"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], words: list[str], names: str) -> None:
    code, told = _told(capsys, *words)
    assert code == 2 and names in told


def test_a_password_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """This holds even if the rest of the address is invalid."""
    for address in (
        "http://me:{}@host:1",
        "http://me:{}@host:99999",
        "me:{}@host",
        "http://{}@host[",
    ):
        code, told = _told(capsys, "--server", address.format("hush"))
        assert code == 2 and "hush" not in told and "host" in told and "OPENAI_API_KEY" in told


def _greet(listener: socket.socket) -> None:
    """Answer one connection as a program that does not speak HTTP."""
    caller, _ = listener.accept()
    with caller:
        caller.recv(1)
        caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_servers_that_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = FakeServer("openai", page="<html>hello</html>")
    two = FakeServer(models=("one", "two"))
    ill = FakeServer(health=503)
    fast, other = FakeServer(k=3), FakeServer(k=3)
    none, shell = FakeServer(models=()), socket.create_server(("127.0.0.1", 0))
    with running(page, two, ill, fast, other, none), shell:
        url = f"http://127.0.0.1:{shell.getsockname()[1]}"
        threading.Thread(target=_greet, args=[shell], daemon=True).start()
        for address in (page.url, none.url, url):
            code, told = _told(capsys, "--server", address)
            assert code == 5 and f"{address} is not an OpenAI-compatible server" in told
        code, told = _told(capsys, *urls(two))
        assert code == 2 and "one, two" in told and "engine.served_model" in told
        code, told = _told(capsys, *urls(two), "--set", "engine.served_model=three")
        assert code == 2 and "three" in told and "one, two" in told
        code, told = _told(capsys, *urls(ill), "--set", "engine.start_timeout_s=0.05")
        assert code == 5 and ill.url in told and "hint: its log says" in told
        code, told = _told(capsys, *urls(fast), "--baseline-server", other.url)
        assert code == 2 and other.url in told and "speculates" in told
        code, told = _told(capsys, *urls(fast, other))
        assert code == 2 and "k = 3" in told
        swept(capsys, *urls(fast), "-o", tmp_path)
        code, told = _told(capsys, *urls(fast), "--baseline", tmp_path)
        assert code == 2 and "no samples at k = 0, only at k = 3" in told
    code, told = _told(capsys, *urls(fast))
    assert code == 5 and f"no server answers at {fast.url}: Connect call failed" in told
    assert "hint: check that it is up, its host and its port; sweep-k --serve" in told


def test_one_of_several_models_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(models=("one", "two"))
    with running(server):
        swept(capsys, *urls(server), "--set", "engine.served_model=two")
    assert {w.body["model"] for w in server.written} == {"two"}


def test_the_client_of_servers_imports_no_torch() -> None:
    import subprocess

    program = (
        "import sys, specdec_cli.backends.server.backend, specdec_cli.experiment.served; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_dry_run_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(k=3)
    with running(server):
        assert main(["sweep-k", *map(str, COMMON), *urls(server), "--dry-run"]) == 0
    assert "k: 3" in capsys.readouterr().out and server.asked == 0


def test_options_of_our_own_engine_are_told_beside_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So is no cache of a server that is up, whose dtype is unknown. No prompt is too long for the
    blocks."""
    ours = ("--num-blocks", "2", "--dtype", "float16", "--set", "cache.dtype=fp8")
    ours = (*ours, "--set", "cache.gpu_memory_utilization=0.5", "--set", "cache.num_blocks=3")
    key = "cache.gpu_memory_utilization"
    common = [*map(str, COMMON), "--limit", "1", "--max-new-tokens", "2", "--json"]
    plain = FakeServer(k=0)
    told = "warning: {} have no effect on a server\n"
    with running(plain):
        for command in ("sweep-k", "generate"):
            found = specdec(capsys, command, *common, *ours, *urls(plain))
            names = f"--num-blocks, --dtype, cache.dtype, {key}"
            assert found.code == 0 and told.format(names) in found.err
            assert not {"rounded_cache", "prompts_too_long"} & codes(json.loads(found.out))
    started = ("--serve", "vllm", "--dry-run", "--device", "cpu", "--draft-tp", "1")
    found = specdec(capsys, "sweep-k", *common, *ours, *started)
    assert told.format(f"--draft-tp, --device, --num-blocks, {key}") in found.err
    assert "rounded_cache" in codes(json.loads(found.out)), "the started server is told of it"
    assert "prompts_too_long" not in codes(json.loads(found.out))


def test_keys_of_servers_are_told_where_nothing_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = ("engine.args=[--x]", "engine.stop_timeout_s=9", "engine.retries=1")
    sets = ("demo", *(word for key in keys for word in ("--set", key)))
    told = "warning: {} have no effect {}\n"
    of_all = told.format("engine.args, engine.stop_timeout_s, engine.retries", "without a server")
    for command in ("sweep-k", "compare-tp", "profile-blocks"):
        how = "--estimate" if command == "profile-blocks" else "--dry-run"
        assert of_all in specdec(capsys, command, *sets, how).err
    dry = ("sweep-k", *sets, "--limit", "1", "--dry-run")
    with running(server := FakeServer(k=0)):
        found = specdec(capsys, *dry, *urls(server))
        expected = told.format("engine.args, engine.stop_timeout_s", "on a server that is running")
        assert [line for line in found.err.splitlines(True) if "no effect" in line] == [expected]
    assert "no effect" not in specdec(capsys, *dry, "--serve", "vllm").err
