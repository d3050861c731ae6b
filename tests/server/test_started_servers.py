"""`sweep-k --serve`: servers are started for each k, and none of their processes is left."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.backends.server import times
from specdec_cli.backends.server.flags import Command, command_of
from specdec_cli.backends.server.process import Process
from specdec_cli.backends.server.session import ServerSession
from specdec_cli.core.types import Permissions
from specdec_cli.errors import RunError, UsageError
from specdec_cli.recipe import load_recipe
from specdec_cli.recipe.choices.registry import METHODS
from tests.cli.sweep_helpers import gain, samples, specdec, stopped_sweep

FAKE = Path(__file__).with_name("fake_process.py")
Serve = Callable[..., Any]


pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "SCRAPE_S", "LOOK_S"):
        monkeypatch.setattr(times, name, 0.05)


def words(kind: str, ks: str, wrong: dict[str, Any] | None = None, **engine: Any) -> list[str]:
    launch = json.dumps([sys.executable, str(FAKE), kind])
    found = ["sweep-k", "demo", "--limit", "3", "--max-new-tokens", "8", "--k", ks, "-q"]
    found += ["--serve", kind, "--set", "run.repeats=1", "--set", f"engine.launch={launch}"]
    engine = {"stop_timeout_s": 0.3, "env": {"FAKE": json.dumps(wrong or {})}} | engine
    return found + [w for k, v in engine.items() for w in ("--set", f"engine.{k}={json.dumps(v)}")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def test_a_server_for_each_k(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0.25.1 does not know one of the flags: it is left out, told, and not tried at the next k."""
    for kind, ks, source in (("vllm", [0, 2, 3], "chunks"), ("sglang", [0, 2], "per_request")):
        out = tmp_path / kind
        kept = ("-o", str(out)) if kind == "vllm" else ()
        drafts = ("--draft", "demo:dflash") if kind == "sglang" else ()
        found = specdec(capsys, *words(kind, ",".join(map(str, ks))), "--json", *kept, *drafts)
        assert found.code == 0, found.err
        document = json.loads(found.out)
        assert [p["k"] for p in document["points"]] == ks
        assert {p["metrics"]["num_prompts"] for p in document["points"]} == {3}
        assert document["points"][1]["engine"]["acceptance_source"] == source
        assert gain(document["points"][1]) > 0 and document["tokens"]["identical"]
        told = [w for w in document["warnings"] if w["code"] == "flags_left_out"]
        assert len(told) == (kind == "vllm")
        assert [s["k"] for s in document["environment"]["servers"]] == ks
        if told:
            assert told[0]["evidence"]["flags"] == ["--per-request-spec-decode-metrics"]
            logs = sorted(f.name for f in (out / "servers").iterdir())
            assert logs == ["vllm-demo_draft-k2.log", "vllm-demo_draft-k3.log", "vllm-k0.log"]
            refused = [(out / "servers" / name).read_text().count("unrecognized") for name in logs]
            assert refused == [1, 0, 0]


def test_flags_of_ours_alone_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of the user's own is kept, and the point says why it failed."""
    found = specdec(capsys, *words("vllm", "0,2"), "--serve-args", "--theirs 3", "--json")
    document = json.loads(found.out)
    assert found.code == 1
    for point in document["points"]:
        assert "unrecognized arguments: --theirs 3" in point["reason"]
    (told,) = [w for w in document["warnings"] if w["code"] == "flags_left_out"]
    assert told["evidence"]["flags"] == ["--per-request-spec-decode-metrics"]


def test_what_a_server_dies_of_is_the_points_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started = tmp_path / "pids"
    wrong = {"refuse": 1, "die": [2, 2], "child": str(started)}
    found = specdec(capsys, *words("sglang", "1,2", wrong), "--json", "-o", str(tmp_path / "run"))
    assert found.code == 3, found.err
    plain, refused, dead = json.loads(found.out)["points"]
    assert plain["status"] == "ok"
    assert refused["status"] == "failed" and "exit code 1" in refused["reason"]
    assert "this k is refused: 1" in refused["reason"]
    assert dead["status"] == "failed" and "exit code 9" in dead["reason"]
    assert "a planted death" in dead["reason"]
    run = tmp_path / "run"
    assert not [s for s in samples(run) if s["finish_reason"] == "error"]
    # What failed is measured by a resumed sweep, and nothing else.
    done, starts = [s for s in samples(run) if s["k"] == 0], len(pids(started))
    again = [*words("sglang", "1,2", wrong), "--json", "-o", str(run), "--resume"]
    assert specdec(capsys, *again).code == 3
    assert [s for s in samples(run) if s["k"] == 0] == done
    assert len(pids(started)) == starts + 2, "of k = 2 alone, and of its child"
    assert not [pid for pid in pids(started) if is_alive(pid)]


def test_an_unforeseen_failure_of_a_point_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sweep over running servers."""
    run = ServerSession.run

    def fails_at_two(session: ServerSession, requests: Any, k: int, *others: Any) -> None:
        if k == 2:
            raise ZeroDivisionError("a planted fault")
        run(session, requests, k, *others)

    monkeypatch.setattr(ServerSession, "run", fails_at_two)
    found = specdec(capsys, *words("sglang", "2"), "--json")
    plain, failed = json.loads(found.out)["points"]
    assert found.code == 3 and plain["status"] == "ok", found.err
    assert (failed["status"], failed["reason"]) == ("failed", "ZeroDivisionError: a planted fault")


def test_a_server_that_is_never_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    found = specdec(capsys, *words("sglang", "0", {"never": 0}, start_timeout_s=10.0), "--json")
    assert time.monotonic() - began < 40, "it was waited for longer than asked"
    assert found.code == 5
    (point,) = json.loads(found.out)["points"]
    told = "sglang-k0 is not healthy after 10 s (engine.start_timeout_s): the server at http://"
    assert point["reason"].startswith(told) and "is not healthy: HTTP 503" in point["reason"]


def test_a_server_that_wants_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is not waited for: no server of the sweep would let us in."""
    started = tmp_path / "pids"
    wrong = {"key": "hush", "child": str(started)}
    found = specdec(capsys, *words("sglang", "0,2", wrong, start_timeout_s=120))
    assert found.code == 5 and "requires a key (HTTP 401)" in found.err
    assert "OPENAI_API_KEY" in found.err and "healthy" not in found.err
    assert len(pids(started)) == 2 and not [pid for pid in pids(started) if is_alive(pid)]


def test_a_server_that_cannot_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, *words("sglang", "0,1", launch=["/nowhere/serve"]), "--json")
    assert found.code == 5
    assert "cannot start /nowhere/serve" in json.loads(found.out)["error"]["message"]


def test_nothing_is_left_of_a_stubborn_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "pids"
    wrong = {"child": str(file), "stubborn": True}
    assert specdec(capsys, *words("sglang", "0", wrong)).code == 0
    assert len(pids(file)) == 2 and not [pid for pid in pids(file) if is_alive(pid)]


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    wrong = {"child": str(file), "stubborn": True}
    arguments: list[str | Path] = [*words("sglang", "0", wrong), "-o", tmp_path / "run"]
    end, _ = stopped_sweep(arguments, 0.0, signal.SIGKILL, after=1)
    assert end == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids(file))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids(file)) == 2 and not [pid for pid in pids(file) if is_alive(pid)]


def test_nothing_is_left_after_kill_9_of_the_guardian(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    process = Process(["sh", "-c", f"sleep 60 & echo $! > {file}; wait"], {}, tmp_path / "log", 0.3)
    while not (file.exists() and pids(file)):
        assert not process.has_ended(0.02)
    process._guardian.kill()
    process.stop()
    assert not is_alive(*pids(file))


def test_a_server_that_a_signal_without_a_name_ends(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo words; kill -40 $$"], {}, tmp_path / "log", 0.3)
    with pytest.raises(RunError, match="the server ended with signal 40: words"):
        process.check(10.0)
    process.stop()


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C comes while a slow server answers; the exit code is that of other runs."""
    file, run = tmp_path / "pids", tmp_path / "run"
    wrong = {"child": str(file), "round_s": 0.03}
    arguments: list[str | Path] = [*words("sglang", "0", wrong), "-o", run]
    end, told = stopped_sweep(arguments, 0.1, signal.SIGINT, after=1)
    assert end == 130 and 1 <= len(samples(run)) < 3 and len(told) <= len(samples(run))
    assert len(pids(file)) == 2 and not [pid for pid in pids(file) if is_alive(pid)]


def test_texts_that_differ_in_float32_fail(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, code in (("float32", 4), ("bfloat16", 0)):
        more = ("--json", "--set", f"target.dtype={dtype}")
        found = specdec(capsys, *words("sglang", "2", {"other": 2}), *more)
        assert found.code == code, found.err
        tokens = json.loads(found.out)["tokens"]
        assert not tokens["identical"] and tokens["must_be_identical"] == (code == 4)


def test_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for more, names in (
        (["--serve", "native"], "native"),
        (["--serve", "tgi"], "tgi"),
        (["--serve", "vllm", "--server", "http://h:1"], "--serve"),
        (["--serve-args", "x"], "--serve-args"),
        (["--serve", "vllm", "--serve-args", "'x"], "--serve-args"),
        (["--serve", "vllm", "--serve-args", "--port 1234"], "engine.args (--serve-args): --port:"),
        (
            ["--serve", "sglang", "--set", "engine.args=[--port=1234]"],
            "engine.args (--serve-args): --port=1234",
        ),
        (["--serve", "vllm", "--check-lossless"], "--check-lossless"),
        (["--serve", "vllm", "--predict-only"], "--predict-only"),
        (["--serve", "vllm", "--set", "speculation.acceptance=typical"], "typical"),
    ):
        told = specdec(capsys, "sweep-k", "demo", "--limit", "2", "-q", *more)
        assert told.code == 2 and names in told.err and told.out == "", (more, told.err)
    for command in (
        ["generate"],
        ["compare-tp"],
        ["profile-blocks"],
        ["profile-blocks", "--estimate"],
    ):
        told = specdec(capsys, *command, "demo", "--limit", "1", "--set", "engine.kind=vllm")
        assert told.code == 2 and "engine.kind" in told.err, command


def commanded(kind: str, k: int, *sets: str, batch_size: int = 1) -> list[str]:
    recipe = load_recipe("demo", dict(word.split("=", 1) for word in sets))
    return command_of(kind, recipe, k, Permissions(), batch_size).words("MODEL", "H", 8, k)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_commands() -> None:
    vllm = commanded("vllm", 3)
    assert vllm[:3] == ["vllm", "serve", "MODEL"] and "--no-enable-prefix-caching" in vllm
    assert (value(vllm, "--host"), value(vllm, "--port")) == ("H", "8")
    config = json.loads(value(vllm, "--speculative-config"))
    assert config["method"] == "draft_model" and config["num_speculative_tokens"] == 3
    assert os.path.isdir(config["model"]) and config["draft_tensor_parallel_size"] == 1
    plain = commanded("vllm", 0)
    assert not [w for w in plain if "spec" in w]
    sglang = commanded("sglang", 3)
    assert sglang[1:3] == ["-m", "sglang.launch_server"] and "--disable-radix-cache" in sglang
    assert os.path.isdir(value(sglang, "--model-path"))
    assert value(sglang, "--speculative-algorithm") == "STANDALONE"
    assert value(sglang, "--speculative-num-draft-tokens") == "4"
    assert value(sglang, "--speculative-eagle-topk") == "1"
    for k, size, most in ((0, 64, "64"), (3, 64, "64"), (0, 0, "256"), (3, 0, "256")):
        limited = commanded("sglang", k, batch_size=size)
        assert value(limited, "--max-running-requests") == most, "the same at every k"
    ngram = commanded("sglang", 3, "speculation.method=ngram")
    assert value(ngram, "--speculative-num-draft-tokens") == "4"
    assert value(ngram, "--speculative-ngram-max-bfs-breadth") == "1", "a chain"
    for kind in ("vllm", "sglang"):
        assert "--kv-cache-dtype" not in commanded(kind, 3)
        assert value(commanded(kind, 3, "cache.dtype=fp8"), "--kv-cache-dtype") == "fp8_e4m3"


def test_weights_that_are_quantised_while_loading() -> None:
    """Each model has its own form. By default SGLang gives the draft the target's form."""
    of_draft = "--speculative-draft-model-quantization"
    for in_fp8 in (set(), {"target"}, {"draft"}, {"target", "draft"}):
        sets = [f"{role}.weights=fp8" for role in in_fp8]
        vllm, sglang = (commanded(kind, 3, *sets) for kind in ("vllm", "sglang"))
        for words in (vllm, sglang, commanded("vllm", 0, *sets)):
            found = value(words, "--quantization") if "--quantization" in words else None
            assert found == ("fp8" if "target" in in_fp8 else None)
        config = json.loads(value(vllm, "--speculative-config"))
        assert config.get("quantization") == ("fp8" if "draft" in in_fp8 else None)
        if in_fp8:
            assert value(sglang, of_draft) == ("fp8" if "draft" in in_fp8 else "unquant")
        else:
            assert of_draft not in sglang


def test_shapes_without_a_tokenizer() -> None:
    """Both servers then take ids alone. Acceptance is rates for vLLM, and for SGLang their sum."""
    recipe = load_recipe("bench-8b-1b-dummy", {})
    rates = recipe.speculation.synthetic_acceptance_rates
    assert rates is not None
    for kind in ("vllm", "sglang"):
        command = command_of(kind, recipe, 3, Permissions(), 1)
        found = command.words("M", "H", 8, 3)
        assert "--skip-tokenizer-init" in found and value(found, "--load-format") == "dummy"
        with_one = commanded(kind, 3, "target.load_format=dummy")
        assert "--load-format" in with_one and "--skip-tokenizer-init" not in with_one
        if kind == "vllm":
            config = json.loads(value(found, "--speculative-config"))
            assert config["synthetic_acceptance_rates"] == list(rates[:3])
        else:
            assert float(command.env["SGLANG_SIMULATE_ACC_LEN"]) == pytest.approx(2.952)
            assert value(found, "--speculative-draft-load-format") == "dummy"
            assert not command_of(kind, recipe, 0, Permissions(), 1).env
    with pytest.raises(UsageError, match="8 are given, but --k goes up to 9"):
        command_of("vllm", recipe, 9, Permissions(), 1)


def test_a_mean_length_belongs_to_the_recipe_s_k() -> None:
    """At k = 4 a rate of 0.5 writes 1.9375 tokens a round, and at k = 2 1.75; vLLM would spread a
    length over places in another way."""
    sets = {
        "speculation.acceptance": "synthetic",
        "speculation.synthetic_acceptance_length": 1.9375,
    }
    recipe = load_recipe("demo", sets)
    config = json.loads(
        value(
            command_of("vllm", recipe, 2, Permissions(), 1).words("M", "H", 8, 2),
            "--speculative-config",
        )
    )
    assert config["synthetic_acceptance_rates"] == pytest.approx([0.5, 0.25])
    assert "synthetic_acceptance_length" not in config
    env = command_of("sglang", recipe, 2, Permissions(), 1).env
    assert float(env["SGLANG_SIMULATE_ACC_LEN"]) == pytest.approx(1.75)


def test_launch_words_are_replaced_and_nothing_else() -> None:
    command = Command(("run", "{model}:{port}", "{k}", "{other}", "$HOST"), [("--x", "1")], ("y",))
    assert command.words("{k}M", "h", 7, 2) == [
        *("run", "{k}M:7", "2", "{other}", "$HOST"),
        *("--host", "h", "--port", "7", "--x", "1", "y"),
    ]
    assert command.without(["--z"]) is None and command.without(["--x"]) is not None


def test_a_draft_s_revision_is_named() -> None:
    draft = ("draft.model=org/draft", "draft.revision=v1")
    assert value(commanded("sglang", 2, *draft), "--speculative-draft-model-revision") == "v1"
    assert (
        json.loads(value(commanded("vllm", 2, *draft), "--speculative-config"))["revision"] == "v1"
    )


@pytest.mark.parametrize(
    ("key", "given"),
    [("sampling.suppress_tokens", "[5, 6]"), ("speculation.length.policy", "adaptive")],
)
def test_keys_that_reach_no_server_start_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, given: str
) -> None:
    for kind in ("vllm", "sglang"):
        started = words(kind, "0,2", {"child": str(tmp_path / "pids")})
        found = specdec(capsys, *started, "--set", f"{key}={given}")
        assert found.code == 2 and key in found.err and kind in found.err
    assert not (tmp_path / "pids").exists()


def test_methods_that_a_server_has_not() -> None:
    for name in ("peagle", "pard"):
        with pytest.raises(UsageError, match=f"SGLang has no method {name}: it cannot run k = 2"):
            commanded("sglang", 2, f"speculation.method={name}")
    recipe = load_recipe("demo", {"speculation.method": "none"})
    for kind in ("vllm", "sglang"):
        with pytest.raises(UsageError, match="no method none"):
            command_of(kind, recipe, 2, Permissions(), 1)
    unknown = [name for name, method in METHODS.items() if method.to_sglang is None]
    assert "pard" in unknown
    for name in unknown:
        recipe = load_recipe("demo", {"speculation.method": name})
        with pytest.raises(UsageError, match=f"SGLang has no method {name}"):
            command_of("sglang", recipe, 2, Permissions(), 1)


def test_a_rule_that_sglang_has_not_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started = words("sglang", "0,2", {"child": str(tmp_path / "pids")})
    found = specdec(capsys, *started, "--set", "speculation.acceptance=block")
    assert found.code == 2 and "SGLang has no rule block" in found.err
    assert not (tmp_path / "pids").exists(), "not even for k = 0"


def test_a_server_gets_the_signals_that_end_it(tmp_path: Path) -> None:
    """A server without handlers gets them too, such as a script that starts the server."""
    log = tmp_path / "log"
    script = "trap 'echo told to end; exit' TERM; echo ready; while :; do sleep 0.02; done"
    for command in (["bash", "-c", script], ["sleep", "60"]):
        log.write_text("")
        process = Process(command, {}, log, stop_timeout_s=30.0)
        deadline = time.monotonic() + 10
        while command[0] == "bash" and not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        process.stop()
        assert time.monotonic() - began < 15, "it was killed, and not told to end"
        assert command[0] != "bash" or "told to end" in log.read_text()
