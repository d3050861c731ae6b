"""`specdec generate`: its document, its prompts and its errors for bad input."""

import io
import json
import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import specdec_cli.engine.build
import specdec_cli.engine.plan
import specdec_cli.models.description
from specdec_cli import demo
from specdec_cli.commands.options import Asked, resolve
from specdec_cli.commands.unused import warn_of_unused
from specdec_cli.launch.world import Place
from specdec_cli.models import description
from specdec_cli.models.spec import ModelSpec
from specdec_cli.recipe import dump_recipe
from tests.cli.generate_helpers import (
    DEMO,
    PROMPTS,
    Result,
    Run,
    command,
    copy_of_demo,
    demo_tokenizer,
    environment,
    prompt_options,
    tiny_model,
)
from tests.support import greedy_reference, reference, tiny_config

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("--max-new-tokens", "6")
OUTPUT_KEYS = {
    "index",
    "prompt",
    "text",
    "prompt_token_ids",
    "token_ids",
    "finish_reason",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_round",
}
COUNTS = {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
PER_POSITION = {
    "num_accepted_tokens_per_pos",
    "acceptance_rate_per_pos",
    "conditional_acceptance_rate_per_pos",
}
METRIC_KEYS = (
    COUNTS
    | PER_POSITION
    | {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"}
    | {
        "draft_ms",
        "broadcast_ms",
        "verify_ms",
        "sample_ms",
        "commit_ms",
        "round_ms",
        "prefill_ms",
        "decode_seconds",
    }
    | {"output_tokens_per_second", "decode_tokens_per_second", "ttft_ms", "tpot_ms"}
)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled run of three prompts of different lengths, from a file."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return path


def texts(result: Result) -> list[str]:
    return [output["text"] for output in result.outputs]


def tokens(result: Result) -> list[list[int]]:
    return [output["token_ids"] for output in result.outputs]


# The document


@pytest.mark.parametrize("k", [0, 1, 3])
def test_document(k: int, run: Run) -> None:
    result = run("--json", *prompt_options(*PROMPTS), "-k", str(k), "--max-new-tokens", "12")
    assert result.code == 0
    assert result.out.count("\n") == 1 and result.err.count("\n") == 1
    document, metrics = result.document, result.document["metrics"]
    assert set(document) == {"schema", "recipe", "environment", "outputs", "metrics", "warnings"}
    assert set(metrics) >= METRIC_KEYS
    assert [o["index"] for o in result.outputs] == [0, 1, 2]
    for output, prompt in zip(result.outputs, PROMPTS, strict=True):
        check_output(output, prompt)
    for count in COUNTS:
        assert metrics[count] == sum(o[count] for o in result.outputs)
    for name in PER_POSITION:
        assert len(metrics[name]) == k
    rounds = [a for o in result.outputs for a in o["accepted_per_round"]]
    check_acceptance(metrics, rounds, k)
    for name in ("ttft_ms", "tpot_ms"):
        assert list(metrics[name]) == ["mean", "p50", "p90", "p99"]
    assert metrics["num_output_tokens"] == sum(map(len, tokens(result)))


def check_output(output: dict[str, Any], prompt: str) -> None:
    assert set(output) >= OUTPUT_KEYS and "error" not in output
    tokenizer = demo_tokenizer()
    assert output["prompt"] == prompt
    assert output["prompt_token_ids"] == tokenizer(prompt)["input_ids"]
    assert output["text"] == tokenizer.decode(
        output["token_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    accepted = output["accepted_per_round"]
    assert output["num_drafts"] == len(accepted)
    assert output["num_accepted_tokens"] == sum(accepted) <= output["num_draft_tokens"]
    assert output["num_draft_tokens"] == sum(output["proposed_per_round"])
    assert output["finish_reason"] in ("length", "eos")


def check_acceptance(metrics: dict[str, Any], rounds: list[int], k: int) -> None:
    drafts, accepted = metrics["num_drafts"], metrics["num_accepted_tokens"]
    histogram = [rounds.count(i) for i in range(k + 1)]
    assert metrics["acceptance_histogram"] == histogram and sum(histogram) == drafts
    assert metrics["num_accepted_tokens_per_pos"] == [sum(histogram[i + 1 :]) for i in range(k)]
    assert sum(metrics["num_accepted_tokens_per_pos"]) == accepted
    if k == 0:
        assert (drafts, accepted, metrics["mean_acceptance_length"]) == (0, 0, 1.0)
        assert metrics["draft_acceptance_rate"] is None
        return
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / metrics["num_draft_tokens"])
    marginal = [n / drafts for n in metrics["num_accepted_tokens_per_pos"]]
    assert metrics["acceptance_rate_per_pos"] == pytest.approx(marginal)


@pytest.fixture(scope="module")
def transformers_text(small_demo: None) -> list[list[int]]:
    """Greedy text of transformers for the prompts."""
    model = reference(demo.FOLDER / "target")
    ids = [demo_tokenizer()(p)["input_ids"] for p in PROMPTS]
    return [greedy_reference(model, prompt, 24) for prompt in ids]


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_text_is_that_of_transformers(
    k: int, run: Run, transformers_text: list[list[int]]
) -> None:
    options = ("-k", str(k), "--max-new-tokens", "24", "--ignore-eos")
    result = run("--json", *prompt_options(*PROMPTS), *options)
    assert tokens(result) == transformers_text


def test_plain_decoding_never_touches_the_draft(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    original = description.describe

    def spy(spec: ModelSpec, *more: Any) -> description.Description:
        described.append(spec.role)
        return original(spec, *more)

    monkeypatch.setattr(specdec_cli.engine.plan, "describe", spy)
    result = run("--json", "--prompt", "x", "-k", "0", *SHORT, "--draft", "/no/such/folder")
    assert result.code == 0 and described == ["target"]
    assert result.outputs[0]["num_drafts"] == 0
    assert run("--json", "--prompt", "x", "-k", "1", "--draft", "/no/such/folder").code == 5


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_recipe_of_the_document_runs_again(
    suffix: str, run: Run, tmp_path: Path, sampled: Path
) -> None:
    options = ("--temperature", "0.8", "--top-k", "50", "--seed", "11", "-k", "2", *SHORT)
    first = run("--json", "--prompt-file", sampled, *options)
    recipe = first.document["recipe"]
    again = tmp_path / f"again.{suffix}"
    again.write_text(json.dumps(recipe) if suffix == "json" else yaml.safe_dump(recipe))
    second = run(again, "--json")
    assert second.code == 0 and second.document["recipe"] == recipe
    assert tokens(second) == tokens(first)


def test_recipe_names_no_prompts_that_were_not_run(run: Run) -> None:
    assert run("--json", "--prompt", "x", *SHORT).document["recipe"]["data"] is None
    document = run("--json", "-k", "0", "--set", "data.limit=1", *SHORT).document
    assert document["recipe"]["data"]["path"] == "demo:prompts"


def test_seed_and_batch_size(run: Run, sampled: Path) -> None:
    base = ("--json", "--prompt-file", sampled, "--temperature", "1.0", "-k", "2", *SHORT)
    first = tokens(run(*base, "--seed", "1"))
    assert tokens(run(*base, "--seed", "1", "--batch-size", "3")) == first
    assert tokens(run(*base, "--seed", "2")) != first
    assert tokens(run(*base, "--seed", "1", "--set", "run.prefill_chunk=4")) == first


def test_losslessness_is_checked_where_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--json", "--prompt", "def f(x):", "--check-lossless", *SHORT)
    result = run(*options, "-k", "2")
    check = result.document["lossless_check"]
    assert result.code == 0 and check["passed"] and check["num_compared"] == 1
    assert "lossless: the same greedy tokens in float32 (1 prompt" in result.err
    refused = run(*options, "-k", "0")
    assert refused.code == 2 and "nothing to compare with k = 0" in refused.err
    from specdec_cli.commands import generate_run

    texts = generate_run.greedy_texts
    monkeypatch.setattr(  # a fault: the target alone would have written another first token
        generate_run, "greedy_texts", lambda *a: {i: [1, *t[1:]] for i, t in texts(*a).items()}
    )
    result = run(*options, "-k", "2")
    assert result.code == 4 and result.document["lossless_check"]["num_diverging"] == 1
    assert result.err.count("not lossless: 1 of 1 texts diverge in float32") == 1


# Prompts


def test_prompt_options_and_files(run: Run, tmp_path: Path) -> None:
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    result = run("--json", "--prompt", "zero", "--prompt-file", lines, "-k", "0", *SHORT)
    assert [o["prompt"] for o in result.outputs] == ["zero", "one", "two"]
    objects = tmp_path / "p.jsonl"
    objects.write_text('{"prompt": "a b", "category": "data"}\n{"prompt_token_ids": [310, 963]}\n')
    first, second = run("--json", "--prompt-file", objects, "-k", "0", *SHORT).outputs
    assert first["category"] == "data" and "category" not in second
    assert second["prompt_token_ids"] == [310, 963]
    assert second["prompt"] == demo_tokenizer().decode([310, 963])


class _Input(io.TextIOWrapper):
    """Standard input over a file descriptor, as the interpreter opens it."""


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[_Input] = []

    def use(descriptor: int) -> None:
        opened.append(_Input(open(descriptor, "rb")))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield use
    for stream in opened:
        stream.close()


def test_piped_prompts(run: Run, stdin: Any) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n")
    os.close(writing)
    stdin(reading)
    result = run("--json", "-k", "0", *SHORT)
    assert [o["prompt"] for o in result.outputs] == ["one", "two"]
    assert result.document["recipe"]["data"] is None


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (("data.column=a",), "data.column has no effect"),
        (("data.limit=1", "data.path=gone.jsonl"), "data.limit, data.path have no effect"),
        (("data={path: gone.jsonl, limit: 1, chat: off}",), "data.path, data.limit have no effect"),
        (("data.chat=off", "data.system=null", "data.limit=null"), None),
    ],
)
def test_keys_of_a_file_are_told_beside_prompts_without_one(
    run: Run, keys: tuple[str, ...], told: str | None
) -> None:
    sets = [word for key in keys for word in ("--set", key)]
    found = run("--prompt", "x", "-k", "0", "--max-new-tokens", "1", "-q", *sets)
    said = "" if told is None else f"warning: {told} on prompts of --prompt or a pipe\n"
    assert (found.code, found.err) == (0, said)


@pytest.mark.parametrize("source", ["/dev/null", "empty pipe"])
def test_nothing_piped_falls_back_to_the_recipe(source: str, run: Run, stdin: Any) -> None:
    if source == "/dev/null":
        stdin(os.open(source, os.O_RDONLY))
    else:
        reading, writing = os.pipe()
        os.close(writing)
        stdin(reading)
    result = run("--json", "-k", "0", "--max-new-tokens", "1", "--set", "data.limit=2")
    first = json.loads((DEMO / "prompts.jsonl").read_text().partition("\n")[0])
    output, _ = result.outputs
    assert (output["prompt"], output["category"]) == (first["prompt"], first["category"])
    assert ("the pipe is empty, so the recipe's prompts" in result.err) == (source == "empty pipe")


def test_a_pipe_that_waits_is_told(
    run: Run, stdin: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.prompts.load._PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    stdin(reading)
    told = "waiting for prompts on standard input"

    def close_when_told() -> None:
        deadline = time.monotonic() + 60
        while told not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(writing)

    closing = threading.Thread(target=close_when_told)
    closing.start()
    run("--json", "-k", "0", "--max-new-tokens", "1", "--set", "data.limit=1")
    closing.join()
    assert told in caplog.text


def test_a_socket_is_read_if_it_has_data(
    run: Run, stdin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some launchers connect standard input to a socket, with prompts or without."""
    monkeypatch.setattr("specdec_cli.commands.reading._PATIENCE_S", 0.01)
    few = ("--json", "-k", "0", "--max-new-tokens", "1", "--set", "data.limit=1")
    near, far = socket.socketpair()
    with far:
        far.sendall(b"one\ntwo\n")
        far.shutdown(socket.SHUT_WR)
        stdin(near.detach())
        assert [o["prompt"] for o in run(*few).outputs] == ["one", "two"]
    near, silent = socket.socketpair()
    with silent:  # it stays open, so that reading it would not end
        stdin(near.detach())
        (output,) = run(*few).outputs
    assert output["prompt"] not in ("one", "two")


def test_prompts_of_options_leave_standard_input_alone(run: Run, stdin: Any) -> None:
    """A shell's `while read` loop around the command keeps its lines."""
    reading, writing = os.pipe()
    os.write(writing, b"of the loop")
    os.close(writing)
    stdin(reading)
    run("--json", "-k", "0", "--prompt", "x", *SHORT)
    assert os.read(reading, 99) == b"of the loop"


def test_dash_is_standard_input(run: Run, stdin: Any) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "one"}\n')
    os.close(writing)
    stdin(reading)
    result = run("--json", "--prompt-file", "-", "-k", "0", *SHORT)
    assert [o["prompt"] for o in result.outputs] == ["one"]


def test_prompt_id_outside_the_vocabulary(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt_token_ids": [5, 4096]}\n')
    refused(
        run("--prompt-file", path),
        2,
        "prompt 1 contains token id 4096, but the vocabulary has only 4096 ids",
    )


def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(specdec_cli.engine.build, "load", load)


@pytest.mark.parametrize("limit", [None, 8])
def test_single_prompt_too_long(
    limit: int | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights(monkeypatch)
    sets = [] if limit is None else ["--set", f"cache.max_model_len={limit}"]
    result = run("--prompt", "x " * (limit or 2048), *sets)
    refused(result, 2, rf"the prompt has \d+ tokens, .* holds {limit or 2048}")


def test_one_of_several_too_long(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text(f"{'def ' * 40}\n{PROMPTS[0]}")
    options = ("--prompt-file", path, "--set", "cache.max_model_len=20", *SHORT)
    partly_done(run(*options, "--json"), run(*options), "the prompt has 41 tokens")
    alone = run("--json", "--prompt", PROMPTS[0].strip(), *SHORT)
    assert tokens(run(*options, "--json"))[1] == tokens(alone)[0]


def test_one_of_several_never_fits(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text(f"{'def ' * 40}\n{PROMPTS[0]}")
    options = ("--prompt-file", path, "--num-blocks", "3", *SHORT)
    partly_done(run(*options, "--json"), run(*options), "needs 3 KV blocks of 16 tokens")
    alone = run("--prompt", "def " * 40, "--num-blocks", "3", *SHORT)
    refused(alone, 2, "the prompt cannot run: needs 3 KV blocks of 16 tokens for 47 tokens")


def partly_done(as_json: Result, as_text: Result, reason: str) -> None:
    """Check a run in which the first of two prompts failed for `reason`."""
    bad, good = as_json.outputs
    assert as_json.code == as_text.code == 3
    assert as_json.document["metrics"]["num_prompts"] == 1, "it counts for nothing"
    assert bad["finish_reason"] == "error" and reason in bad["error"]
    assert (bad["token_ids"], bad["text"], bad["num_drafts"]) == ([], "", 0)
    assert good["finish_reason"] == "length" and len(good["token_ids"]) == 6
    expected = f"==> prompt 0 <==\n\n==> prompt 1 <==\n{good['text']}\n"
    assert as_text.out == expected
    assert as_text.err.startswith(f"prompt 0 failed: {bad['error']}\n")


def test_every_prompt_failed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("def add(a, b): pass\n")
    result = run("--json", "--prompt-file", path, "--set", "cache.max_model_len=4")
    assert result.code == 3
    assert result.document["metrics"]["decode_tokens_per_second"] == 0


# Where a text ends


@pytest.mark.parametrize("k", [0, 3])
def test_stop_strings(k: int, run: Run) -> None:
    options = ("--json", "--prompt", PROMPTS[0], "-k", str(k), "--max-new-tokens", "24")
    whole = run(*options).outputs[0]["text"]
    stop = whole[7:10]  # within and across tokens
    (output,) = run(*options, "--set", f"sampling.stop={json.dumps([stop, 'zzz'])}").outputs
    assert output["finish_reason"] == "stop"
    assert output["text"] == whole[: whole.index(stop)]
    assert stop in demo_tokenizer().decode(output["token_ids"])
    assert output["num_accepted_tokens"] == sum(output["accepted_per_round"])


@pytest.mark.parametrize("k", [0, 3])
def test_end_of_text(k: int, run: Run, tmp_path: Path) -> None:
    """The fifth greedy token is declared the end-of-text token."""
    model = copy_of_demo(tmp_path / "model")
    options = ("--prompt", PROMPTS[0], "--target", str(model), "-k", str(k), *SHORT, "--json")
    (plain,) = run(*options).outputs
    eos = plain["token_ids"][2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, eos]}))
    (output,) = run(*options).outputs
    first = plain["token_ids"].index(eos)
    assert output["token_ids"] == plain["token_ids"][: first + 1]
    assert output["finish_reason"] == "eos"
    assert run(*options, "--ignore-eos").outputs[0]["token_ids"] == plain["token_ids"]


# Bad input


def refused(result: Result, code: int, message: str) -> None:
    """Check for one error line (a hint may follow), an empty stdout and no traceback."""
    assert (result.code, result.out) == (code, "")
    error, *rest = result.err.splitlines()
    assert re.match(f"error: .*{message}", error), error
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest)


def refused_both_ways(run: Run, code: int, message: str, *arguments: str | Path) -> None:
    """Check the same refusal as text and as one JSON document."""
    arguments = ("--prompt", "def f(x):", *SHORT, *arguments)
    result = run(*arguments)
    refused(result, code, message)
    as_json = run(*arguments, "--json")
    assert as_json.code == code and list(as_json.document) == ["error"]
    error = as_json.document["error"]
    assert error["code"] == code and result.err.startswith(f"error: {error['message']}\n")


OPTIONS: dict[str, tuple[int, str, list[str]]] = {
    "unknown folder": (5, "no such model folder: /no/such", ["--target", "/no/such"]),
    "unknown draft": (5, "no such model folder: ./nope", ["--draft", "./nope"]),
    "hub id offline": (5, "some-one/nothing is neither", ["--target", "some-one/nothing"]),
    "long name": (5, "no such model: a{80}…: File name too long", ["--target", "a" * 300]),
    "nobody's home": (5, "no such model: ~no-one-here/x: ", ["--target", "~no-one-here/x"]),
    "no demo model": (5, "no bundled model demo:x", ["--target", "demo:x"]),
    "k": (2, "num_speculative_tokens", ["-k", "-1"]),
    "k no number": (2, "--k: should be a whole number", ["-k", "two"]),
    "no cuda": (5, "no CUDA device for run.device: cuda", ["--device", "cuda"]),
    "device": (2, "--device: run.device: should be auto, cpu", ["--device", "tpu"]),
    "temperature": (2, "temperature: should be greater", ["--temperature", "-0.5"]),
    "set": (2, "expected KEY=VALUE", ["--set", "x"]),
    "unknown set": (2, r"did you mean sampling.top_p\?", ["--set", "sampling.topp=1"]),
    "no recipe": (2, "nope.yaml: no such recipe", ["nope.yaml"]),
    "one block": (
        2,
        "--num-blocks: cache.num_blocks: should be greater than or equal to 2, not 1",
        ["--num-blocks", "1"],
    ),
    "tiny cache": (
        5,
        r"no room for a KV cache on cpu: 0\.0 MiB .* 16 tokens takes 0\.\d MiB",
        ["--set", "cache.cpu_bytes=1000"],
    ),
    "empty prompt": (2, "--prompt: empty prompt", ["--prompt", ""]),
    "prompt file without a name": (2, "name of the prompt file is empty", ["--prompt-file", ""]),
    "no prompt file": (2, "nope.txt: no such prompt file", ["--prompt-file", "nope.txt"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(case: str, run: Run) -> None:
    code, message, arguments = OPTIONS[case]
    if case == "no cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    refused_both_ways(run, code, message, *arguments)


def test_recipe_with_an_unknown_key(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("target:\n  model: demo:target\nsampling:\n  temprature: 1\n")
    where = re.escape(f"{path}:4: sampling.temprature: unknown key (did you mean ")
    refused_both_ways(run, 2, f"{where}sampling.temperature", path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"model_type": "t5"}, "encoder-decoder"), ({"model_type": "nope"}, "model_type")],
    ids=["t5", "unknown"],
)
def test_unsupported_family(config: dict[str, Any], reason: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused_both_ways(run, 5, f"is not supported: .*{reason}", "--target", tmp_path)


def test_proposals_that_nobody_makes_are_warned_of(run: Run) -> None:
    alone = ("--target", "demo:target", "--prompt", "x", "--max-new-tokens", "1", "-q")
    said = "warning: -k 3 has no effect: the recipe has no draft\n"
    assert (run(*alone, "-k", "3").err, run(*alone, "-k", "0").err) == (said, "")
    said = "warning: -k 3 has no effect: speculation.method is none\n"
    without = ("--prompt", "x", "--max-new-tokens", "1", "-q", "--set", "speculation.method=none")
    assert run(*without, "-k", "3").err == said
    key = "speculation.num_speculative_tokens"
    assert run(*without, "--set", f"{key}=3").err == said.replace("-k 3", key)
    assert run(*without, "--set", f"{key}=0").err == ""
    whole = ("--set", "speculation={method: none, num_speculative_tokens: 3}")
    assert run(*without, *whole).err == said.replace("-k 3", key)
    assert run(*without, "--set", f"{key}=0", *whole).err == "", "a section comes before its keys"
    said = "warning: run.repeats, run.warmup have no effect in this command\n"
    assert run(*without, "--set", "run.repeats=2", "--set", "run.warmup=0").err == said
    assert run(*without, "--set", "run={repeats: 4, warmup: 0, seed: 1}").err == said
    other = ("--set", "speculation.method=ngram", "--draft", "demo:draft")
    said = "warning: --draft has no effect: speculation.method is ngram\n"
    assert run(*alone, *other).err == said


@pytest.mark.parametrize(("room", "is_cut"), [(8, True), (64, False)])
def test_a_text_that_the_context_cuts_is_told(run: Run, room: int, is_cut: bool) -> None:
    sets = ("--set", f"cache.max_model_len={room}")
    found = run("--prompt", "def f(", "--max-new-tokens", "9", "--ignore-eos", "-q", *sets)
    assert found.code == 0
    assert found.err.startswith("warning: texts ended before max_new_tokens, because") is is_cut


SYNTHETIC = "speculation.synthetic_acceptance_length"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([f"{SYNTHETIC}=2"], f"{SYNTHETIC} has no effect: speculation.acceptance is rejection"),
        ([f"{SYNTHETIC}=2", "speculation.acceptance=synthetic"], None),
        ([f"{SYNTHETIC}=null"], None),
        (
            ["speculation.length.threshold=0.9"],
            "speculation.length.threshold has no effect: speculation.length.policy is fixed",
        ),
        (
            ["speculation.length.threshold=0.9", "speculation.length.policy=confidence"],
            "speculation.length.policy has no effect: ngram draws no tokens",
        ),
        (
            ["speculation.block_width=trained"],
            "speculation.block_width has no effect: speculation.method is ngram",
        ),
        (["speculation.ngram_max=2"], None),
        (["sampling.top_k=5"], "sampling.top_k has no effect: sampling.temperature is 0"),
        (["sampling.top_p=0.9"], "sampling.top_p has no effect: sampling.temperature is 0"),
        (["sampling.top_p=0.9", "sampling.temperature=0.5"], None),
        (["sampling.top_p=1"], None),
    ],
)
def test_keys_that_no_choice_reads_are_warned_of(
    given: list[str], told: str | None, run: Run
) -> None:
    sets = [word for one in given for word in ("--set", one)]
    found = run("demo-ngram", "--prompt", "x", "--max-new-tokens", "1", "-q", *sets)
    assert found.code == 0 and found.err == ("" if told is None else f"warning: {told}\n")


@pytest.mark.parametrize(
    ("speculation", "key", "told"),
    [
        ("synthetic_acceptance_rates: [0.9, 0.5]", "synthetic_acceptance_rates", "acceptance"),
        (f"acceptance: block, {SYNTHETIC.partition('.')[2]}: 2", SYNTHETIC, "acceptance"),
        ("length: {threshold: 0.9}", "length.threshold", "length.policy"),
        ("ngram_max: 3", "ngram_max", "method"),
        ("ngram_max: 4, length: {policy: fixed}", None, None),
        ("acceptance: synthetic, synthetic_acceptance_length: 2", None, None),
    ],
)
def test_keys_of_a_file_that_no_choice_reads_are_warned_of(
    speculation: str,
    key: str | None,
    told: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file that has all keys with their defaults, as a run folder's, is not."""
    file = tmp_path / "recipe.yaml"
    models = "target: {model: demo:target}\ndraft: {model: demo:draft}\n"
    file.write_text(f"{models}speculation: {{{speculation}}}\n")
    asked = Asked(Place(("specdec_cli", "generate"), None, None), {})
    resolved = resolve(str(file), None, {})
    warn_of_unused(asked, [resolved], has_draft=False)
    err = capsys.readouterr().err
    if key is None:
        assert err == ""
    else:
        key = key.removeprefix("speculation.")
        assert err.startswith(f"warning: speculation.{key} has no effect: speculation.{told} is ")
        assert err.count("\n") == 1
    every = tmp_path / "every.yaml"
    every.write_text(dump_recipe(resolved))
    warn_of_unused(asked, [resolve(str(every), None, {})], has_draft=False)
    assert capsys.readouterr().err == err


def test_ranks_of_a_draft_that_has_none(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("demo-ngram", "--prompt", "x", "--max-new-tokens", "1", "-q")
    degree = "draft.tensor_parallel_size"
    for given, name in [(("--draft-tp", "3"), "--draft-tp"), (("--set", f"{degree}=3"), degree)]:
        said = f"warning: {name} has no effect: speculation.method is ngram\n"
        assert run(*alone, "--draft", "ngram", *given).err == said
    mtp = ("--draft", "mtp", "--target-tp", "2")
    told = r"draft.tensor_parallel_size: is 3, but the draft of mtp is in the target, which has 2 "
    refused_both_ways(run, 2, f"--draft-tp: {told}", *alone, *mtp, "--draft-tp", "3")
    refused_both_ways(run, 2, f"--set: {told}", *alone, *mtp, "--set", f"{degree}=3")
    asked = Asked(Place(("specdec_cli", "sweep-k"), None, None), {"draft_tp": 2})
    ngram, both, one = (
        resolve(None, None, {"target_tp": 2, "draft": draft, "draft_tp": tp})
        for draft, tp in (("ngram", 2), ("mtp", 2), ("mtp", 1))
    )
    for recipes, is_warned in [((ngram, both), False), ((ngram,), True), ((both,), False)]:
        warn_of_unused(asked, recipes, has_draft=True)
        assert ("--draft-tp has no effect" in capsys.readouterr().err) is is_warned
    warn_of_unused(replace(asked, given={"draft_tp": 1}), [one], has_draft=True)
    assert "--draft-tp has no effect: speculation.method is mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--draft", "ngram", "--set", "draft.dtype=float16"], "draft.dtype"),
        (["--set", "draft.model=ngram", "--set", "draft.share=[lm_head]"], "draft.share"),
        (["--method", "none", "--set", "draft={model: demo:draft}"], "draft.model"),
        (["--method", "none", "--set", "draft.revision=null"], None),
        (["--set", "draft.model=ngram"], None),
        (["--set", "draft.dtype=float32"], None),
    ],
)
def test_keys_of_a_draft_that_nothing_reads_are_warned_of(
    given: list[str], told: str | None, run: Run
) -> None:
    err = run("--prompt", "x", "--max-new-tokens", "1", "-q", *given).err
    said = [line for line in err.splitlines() if "no effect" in line]
    assert [line.partition(" has no effect: speculation.method is ")[0] for line in said] == (
        [f"warning: {told}"] if told else []
    )


@pytest.mark.parametrize("names", ["--draft", "--set draft.model"])
@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("pard=demo:draft", "pard, but the draft demo:draft is no PARD draft"),
        ("eagle3=demo:draft", "eagle3, but the draft demo:draft is no EAGLE-3 head"),
        ("draft_model=demo:eagle3", "draft_model, but the draft demo:eagle3 is an EAGLE-3 head"),
    ],
)
def test_a_method_named_with_its_draft_is_never_replaced(
    names: str, draft: str, kind: str, run: Run
) -> None:
    option, _, key = names.partition(" ")
    result = run("demo", "--prompt", "x", option, f"{key}={draft}" if key else draft)
    assert result.code == 2
    assert f"error: speculation.method is {kind}\n" in result.err


def test_two_methods_for_a_draft_are_refused(run: Run, tmp_path: Path) -> None:
    """Neither is dropped, whichever way each is given, unless an option replaces --set's."""
    file = tmp_path / "r.yaml"
    models = "target: {model: demo:target}\ndraft: {model: draft_model=demo:draft}\n"
    file.write_text(f"{models}speculation: {{method: eagle3}}\n")
    told = 'draft.model: names the method draft_model, but speculation.method is "eagle3"'
    named = "draft_model=demo:draft"
    for origin, given in {
        "--draft": ["--draft", named, "--method", "eagle3"],
        "--set": ["--set", f"draft.model={named}", "--set", "speculation.method=eagle3"],
        f"{file}:2": [str(file)],
    }.items():
        refused = run("--prompt", "x", *given)
        assert (refused.code, f"error: {origin}: {told}\n" in refused.err) == (2, True), given
    short = ("--prompt", "x", "--max-new-tokens", "1", "--json")
    used = run(file, *short, "--draft", named, "--set", "speculation.method=eagle3")
    assert used.document["recipe"]["speculation"]["method"] == "draft_model"
    both = ("--set", "draft.model=ngram", "--set", "speculation.method=x")
    assert "--set: speculation.method: should be draft_model, " in run("--prompt", "x", *both).err


def test_a_draft_that_an_option_names_is_used_whatever_the_recipe_s_method(run: Run) -> None:
    asked = ("demo-ngram", "--draft", "demo:draft", "--prompt", "x", "--max-new-tokens", "4", "-q")
    result = run(*asked, "--json")
    assert result.document["recipe"]["speculation"]["method"] == "draft_model"
    assert result.document["recipe"]["draft"]["model"] == "demo:draft" and result.err == ""


def test_a_draft_that_does_not_exist_is_missed_whatever_the_recipe_s_method(run: Run) -> None:
    refused_both_ways(
        run, 5, "no bundled model demo:nosuch", "demo-ngram", "--draft", "demo:nosuch"
    )


def test_a_long_prompt_is_told_of_once(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gives no second warning."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (tmp_path / "p.txt").write_text("x" * 5000)
    result = run("--prompt-file", tmp_path / "p.txt", "-k", "0", "-q")
    assert result.code == 3 and result.err.count("\n") == 1
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


def test_vocabulary_mismatch(run: Run, tmp_path: Path) -> None:
    target = tiny_model(tmp_path / "a")
    draft = tiny_model(tmp_path / "b", first_word="v")
    message = "different vocabularies: id 0 is 'w0' for the target and 'v0' for the draft"
    refused_both_ways(run, 5, message, "--target", target, "--draft", draft)


def test_pickled_weights(run: Run, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m")
    weights = model / "model.safetensors"
    torch.save(load_file(weights), model / "pytorch_model.bin")
    weights.unlink()
    refused_both_ways(run, 5, "pickled weights only", "--target", model, "-k", "0")
    allowed = run("--prompt", "w1 w2", "--target", model, "-k", "0", *SHORT, "--allow-pickle")
    assert allowed.code == 0


def test_truncated_weights(run: Run, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m")
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    refused_both_ways(run, 5, "cannot read the weights in ", "--target", model, "-k", "0")


def test_more_blocks_than_there_is_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that overcommits memory would kill the process without a message."""
    monkeypatch.setattr(specdec_cli.engine.build, "available_memory", lambda: 2**20)
    message = r"out of memory: 1000 blocks of the caches take \S+ MiB, and 1.0 MiB are free"
    refused_both_ways(run, 5, message, "--num-blocks", "1000")


def test_paths_that_no_recipe_can_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bad\udcff"
    folder.mkdir()
    wrong = "is not valid Unicode, so no recipe could name it"
    refused_both_ways(run, 2, wrong, "-o", folder / "run")
    shutil.move(tiny_model(tmp_path / "m"), folder / "m")
    monkeypatch.chdir(folder)
    refused_both_ways(run, 2, wrong, "-o", "run")
    options = ("--target", "m", "-k", "0", "-o", tmp_path / "run")
    refused_both_ways(run, 2, f"target.model: .* {wrong}", *options)
    assert not (tmp_path / "run").exists()
    assert run("--prompt", "w1 w2", "--target", "m", "-k", "0", *SHORT).code == 0


def test_a_model_without_its_tokenizer(run: Run, tmp_path: Path) -> None:
    """transformers' error ends in a list over several lines; the message is still one line."""
    target = copy_of_demo(tmp_path / "target")
    (target / "tokenizer.json").unlink()
    result = run("--prompt", "x", "--target", target, *SHORT)
    assert result.code == 5 and result.err.count("error: ") == 1
    (line,) = [one for one in result.err.splitlines() if one.startswith("error: ")]
    assert line.startswith(f"error: cannot load the tokenizer of {target}: ")
    assert not line.endswith(":")
    assert "tokenizer.json" in result.err


def test_a_second_file_of_prompts_is_refused(run: Run, tmp_path: Path) -> None:
    """Only the last file would run, and the others would be ignored silently."""
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("w1 w2\n")
    twice = [argument for file in files for argument in ("--prompt-file", file)]
    refused_both_ways(run, 2, "--prompt-file was given 2 times", *twice)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_that_are_no_numbers(role: str, run: Run, tmp_path: Path) -> None:
    good, bad = tiny_model(tmp_path / "good"), tiny_model(tmp_path / "bad")
    weights = load_file(bad / "model.safetensors")
    name = next(n for n in weights if n.endswith("norm.weight"))
    weights[name].fill_(float("nan"))
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    pair = {"target": good, "draft": good} | {role: bad}
    arguments = ("--target", pair["target"], "--draft", pair["draft"])
    refused_both_ways(run, 1, f"{role}.*not finite", *arguments)


def test_target_alone_decodes_without_a_draft(run: Run, tmp_path: Path) -> None:
    result = run("--json", "--prompt", "w1 w2", "--target", tiny_model(tmp_path / "m"), *SHORT)
    assert result.code == 0 and result.document["metrics"]["k"] == 0
    assert result.document["recipe"]["draft"] is None


def test_out_of_memory_says_the_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(specdec_cli.models.description, "KVCache", full)
    message = r"out of memory on cpu; the weights alone are target \d+ MiB \+ draft \d+ MiB"
    refused_both_ways(run, 5, message, "--device", "cpu")


def test_dummy_weights_need_no_download(run: Run, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    load = ("--set", "target.load_format=dummy")
    result = run("--json", "--prompt", "ab", "--target", tmp_path, *load, *SHORT)
    assert result.code == 0 and len(result.outputs[0]["token_ids"]) == 6


# Help


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]], ids=" ".join)
def test_help_is_quick(arguments: list[str]) -> None:
    code = (
        "import sys; from specdec_cli.app import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    took = []
    for _ in range(3):  # the best of three, in processor time: other processes run here too
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        line = [command()[0], "-c", code, *arguments]
        subprocess.run(line, env=environment(), check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        if took[-1] < 0.7:
            return
    assert min(took) < 1.5, took
