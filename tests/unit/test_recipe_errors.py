"""Malformed recipes, through `main`: exit 2, file and line named, never a traceback."""

# ruff: noqa: E501 (a table of one case a line)

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_cli.app import main

GOOD = "target: {model: t}\n"
PAIR = "target: {model: t, tensor_parallel_size: 4}\ndraft: {model: d}\n"

# Recipe text, the line that has to be named, and words that have to be there.
MALFORMED: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 1, "target.model: is required"),
    "only-comments": ("# nothing\n", 1, "target.model: is required"),
    "null-document": ("---\nnull\n", 2, "target.model: is required"),
    "a-list": ("- 1\n- 2\n", 1, "a recipe is a mapping of sections"),
    "a-scalar": ("\nhello\n", 2, 'not "hello"'),
    "two-documents": (GOOD + "---\n" + GOOD, 2, "another document"),
    "no-target": ("draft: {model: d}\n", 1, "target.model: is required"),
    "no-model": ("run: {seed: 1}\ntarget:\n  dtype: auto\n", 2, "target.model: is required"),
    "target-null": ("target: null\n", 1, "target: should be a section of keys, not null"),
    "target-text": ("target: gpt2\n", 1, 'target: should be a section of keys, not "gpt2"'),
    "run-list": (GOOD + "run: []\n", 2, "run: should be a section of keys, not []"),
    "sampling-null": (GOOD + "sampling:\n", 2, "sampling: should be a section of keys"),
    "unknown-section": (GOOD + "samplin: {}\n", 2, "did you mean sampling?"),
    "unknown-key": (GOOD + "run:\n  seeds: 1\n", 3, "run.seeds: unknown key (did you mean run.seed?)"),
    "far-key": (GOOD + "run:\n  qqqq: 1\n", 3, "run.qqqq: unknown key (nearest key: run."),
    "misplaced-key": (GOOD + "temperature: 1\n", 2, "did you mean sampling.temperature?"),
    "share-on-target": ("target:\n  model: t\n  share: []\n", 3, "did you mean draft.share?"),
    "never-a-recipe-key": (GOOD + "run: {trust_remote_code: true}\n", 2, "unknown key"),
    "duplicate-key": (GOOD + "run:\n  seed: 1\n  seed: 1\n", 4, "run.seed: duplicate key (first given on line 3)"),
    "duplicate-section": (GOOD + "run: {}\nrun: {}\n", 3, "run: duplicate key"),
    "number-as-key": (GOOD + "1: 2\n", 2, "1: unknown key"),
    "list-as-key": (GOOD + "? [a]\n: b\n", 2, "a key should be plain text"),
    "merge-key": ("target: &t {model: t}\ndraft:\n  <<: *t\n", 3, "unknown key"),
    "bool-count": (PAIR + "speculation: {num_speculative_tokens: true}\n", 3, "whole number, not true"),
    "float-count": (PAIR + "speculation:\n  num_speculative_tokens: 4.0\n", 4, "whole number, not 4.0"),
    "text-count": (PAIR + "speculation: {num_speculative_tokens: '4'}\n", 3, 'whole number, not "4"'),
    "negative-k": (PAIR + "speculation: {num_speculative_tokens: -1}\n", 3, "greater than or equal to 0"),
    "huge-k": (PAIR + f"speculation: {{num_speculative_tokens: {10**30}}}\n", 3, "less than or equal"),
    "digits": (PAIR + "run:\n  seed: " + "9" * 5000 + "\n", 4, "not a readable int"),
    "tp-zero": ("target:\n  model: t\n  tensor_parallel_size: 0\n", 3, "greater than or equal to 1"),
    "tp-does-not-divide": ("target: {model: t, tensor_parallel_size: 4}\ndraft:\n  model: d\n  tensor_parallel_size: 3\n", 4, "(3) should divide target.tensor_parallel_size (4)"),
    "draft-without-model": (GOOD + "draft: {}\n", 2, "draft.model: is required"),
    "draft-empty-model": (GOOD + "draft: {model: ''}\n", 2, "draft.model: should not be empty"),
    "method-without-draft": (GOOD + "draft: null\nspeculation:\n  method: draft_model\n", 4, "draft_model needs a draft section"),
    "method": (PAIR + "speculation: {method: draft-model}\n", 3, "did you mean draft_model?"),
    "share": (GOOD + "draft: {model: d, share: [embedding]}\n", 2, "draft.share[0]: should be embeddings or lm_head"),
    "dtype": ("target: {model: t, dtype: bf16}\n", 1, "did you mean bfloat16?"),
    "device": (GOOD + "run: {device: gpu}\n", 2, "auto, cpu, cuda or cuda:N, not \"gpu\""),
    "compile": (GOOD + "run: {compile: maybe}\n", 2, "should be auto, on or off"),
    "temperature-negative": (GOOD + "sampling: {temperature: -0.1}\n", 2, "greater than or equal to 0"),
    "temperature-nan": (GOOD + "sampling: {temperature: .nan}\n", 2, "finite number"),
    "temperature-inf": (GOOD + "sampling: {temperature: .inf}\n", 2, "finite number"),
    "temperature-1e999": (GOOD + "sampling: {temperature: 1e999}\n", 2, "finite number"),
    "temperature-bool": (GOOD + "sampling: {temperature: yes}\n", 2, "should be a number"),
    "top-p-zero": (GOOD + "sampling: {top_p: 0}\n", 2, "greater than 0"),
    "top-p-big": (GOOD + "sampling: {top_p: 1.5}\n", 2, "less than or equal to 1"),
    "stop-text": (GOOD + "sampling: {stop: abc}\n", 2, "should be a list"),
    "stop-number": (GOOD + "sampling:\n  stop:\n    - a\n    - 5\n", 5, "sampling.stop[1]: should be text, not 5"),
    "ignore-eos": (GOOD + "sampling: {ignore_eos: 1}\n", 2, "should be true or false"),
    "memory": (GOOD + "cache: {gpu_memory_utilization: 90%}\n", 2, "should be a number"),
    "block-size": (GOOD + "cache: {block_size: 0}\n", 2, "greater than or equal to 1"),
    "repeats": (GOOD + "run: {repeats: 0}\n", 2, "greater than or equal to 1"),
    "ngram-order": (GOOD + "speculation: {ngram_max: 2, ngram_min: 3}\n", 2, "at most ngram_max (2)"),
    "synthetic-alone": (PAIR + "speculation: {acceptance: synthetic}\n", 3, "needs one of"),
    "rates-short": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_rates: [0.5]}\n", 3, "(5) rates, has 1"),
    "rates-rise": (PAIR + "speculation: {synthetic_acceptance_rates: [0.5, 0.6]}\n", 3, "should not rise"),
    "rates-range": (PAIR + "speculation: {synthetic_acceptance_rates: [1.5]}\n", 3, "less than or equal to 1"),
    "length-long": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_length: 7}\n", 3, "at most num_speculative_tokens + 1 (6)"),
    "data-without-path": (GOOD + "data: {split: test}\n", 2, "data.path: is required"),
    "nul-escape": ('target: {model: "a\\0b"}\n', 1, "NUL"),
    "surrogate": ('target: {model: "\\uD800"}\n', 1, "should be valid Unicode text"),
    "not-utf8": (GOOD.encode() + b"# \xff\n", 2, "not UTF-8"),
    "utf16": (GOOD.encode("utf-16"), 1, "not UTF-8"),
    "control": (GOOD + "# \x07\n", 2, "U+0007"),
    "tab-indent": ("target:\n\tmodel: t\n", 2, "not valid YAML"),
    "open-bracket": ("target: {model: t\nrun: {}\n", 2, "not valid YAML"),
    "bad-indent": ("target:\n  model: t\n run: {}\n", 3, "not valid YAML"),
    "python-tag": (GOOD + "run: !!python/object/apply:os.system [echo]\n", 2, "is not allowed"),
    "own-tag": (GOOD + "run:\n  seed: !x 1\n", 3, "the tag !x is not allowed"),
    "bad-tag": (GOOD + "run:\n  seed: !!int x\n", 3, "not a readable int"),
    "no-anchor": (GOOD + "run: *nowhere\n", 2, "undefined alias"),
    "self-alias": ("target: &a\n  model: *a\n", 1, "an alias refers to what contains it"),
    "alias-bomb": ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), 1, "too large"),
    "deep": ("target: " + "[" * 5000, 1, "nested too deeply"),
    "too-big": (GOOD + "# " + "x" * 1_000_000, 0, "larger than 1,000,000 bytes"),
}  # fmt: skip


def error_document(output: str) -> dict[str, object]:
    document = json.loads(output)
    assert list(document) == ["error"]
    error: dict[str, object] = document["error"]
    assert list(error) == ["code", "message", "hint"]
    return error


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line, words = MALFORMED[case]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["recipe", "validate", str(path)]) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert "Traceback" not in plain.err
    where = f"error: {path}:{line}: " if line else f"error: {path}: "
    assert where in plain.err and words in plain.err, plain.err

    assert main(["recipe", "validate", str(path), "--json"]) == 2
    error = error_document(capsys.readouterr().out)
    assert error["code"] == 2 and words in str(error["message"])


def test_not_a_file_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fifo, locked = tmp_path / "pipe.yaml", tmp_path / "locked.yaml"
    os.mkfifo(fifo)
    locked.write_text(GOOD)
    locked.chmod(0)
    cases = {
        str(tmp_path): "is a directory",
        str(fifo): "not a regular file",
        str(tmp_path / "none.yaml"): "no such recipe",
        "dmo": "did you mean demo?",
        "../recipes/demo": "no such recipe",
        "a" * 5000: "cannot be the path of a recipe",
        "a\0b": "no such recipe",
    }
    if os.geteuid() != 0:
        cases[str(locked)] = "cannot be read"
    for source, words in cases.items():
        assert main(["recipe", "validate", source]) == 2
        assert words in capsys.readouterr().err, source


SEEDS = [
    Path(__file__).parents[2].joinpath("recipes", name).read_text(encoding="utf-8")
    for name in ("demo.yaml", "bench-8b-1b-dummy.yaml")
]
PIECES = [
    *":[]{}&*!|>'\"%@#,-?\n \t", "<<: *x", "!!python/name:os.system", "~", "1e999", "\x00", "é",
    "---\n", "\ud800", "target", "null", "0x1F", "9" * 5000, "{a: &a [*a]}", "\n  model: 5\n",
]  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 30), st.sampled_from(PIECES)), max_size=4
    ),
)
def test_mutated_recipes_never_give_a_traceback(
    seed: str,
    edits: list[tuple[int, int, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = seed
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    path = tmp_path / "mutated.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    code = main(["recipe", "show", str(path), "--json"])
    captured = capsys.readouterr()
    assert code in (0, 2) and "Traceback" not in captured.err
    document = json.loads(captured.out)
    if code:
        assert str(path) in str(document["error"]["message"])
