"""Malformed recipes, through `main`: exit 2, file and line named, never a traceback."""

# ruff: noqa: E501 (a table of one case a line)

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_cli.app import main
from specdec_cli.recipe import Recipe, dump_recipe, load_recipe
from specdec_cli.recipe.schema import key_fields, section_models
from specdec_cli.text import inert

GOOD = "target: {model: t}\n"
PAIR = "target: {model: t, tensor_parallel_size: 4}\ndraft: {model: d}\n"

# Recipe text, the line that the message must name, and words it must have.
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
    "options-null": (GOOD + "speculation:\n  options:\n", 3, "speculation.options: should be a section of keys, not null"),
    "sampling-null": (GOOD + "sampling:\n", 2, "sampling: should be a section of keys"),
    "unknown-section": (GOOD + "samplin: {}\n", 2, "did you mean sampling?"),
    "unknown-key": (GOOD + "run:\n  seeds: 1\n", 3, "run.seeds: unknown key (did you mean run.seed?)"),
    "part-of-key": (GOOD + "speculation:\n  num: 1\n", 3, "speculation.num: unknown key (did you mean speculation.num_speculative_tokens?)"),
    "plugin": (GOOD + "speculation: {method: echo}\n", 2, "; a plugin's needs --plugin"),
    "far-key": (GOOD + "run:\n  qqqq: 1\n", 3, "run.qqqq: unknown key (nearest key: run."),
    "slo-number": (GOOD + "load: {request_rate: 1, slo: {ttft: 500}}\n", 2, "load.slo.ttft: expected a time with its unit, ms or s, got '500' (did you mean 500ms?)"),
    "slo-unit": (GOOD + "load: {request_rate: 1, slo: {ttft: 1us}}\n", 2, "load.slo.ttft: expected a time above 0 and below 1000000s, in ms or s, got '1us'"),
    "slo-huge": (GOOD + "load: {request_rate: 1, slo: {tpot: 1e9s}}\n", 2, "load.slo.tpot: expected a time above 0 and below 1000000s, in ms or s, got '1e9s'"),
    "slo-zero": (GOOD + "load: {request_rate: 1, slo: {tpot: 0s}}\n", 2, "load.slo.tpot: expected a time above 0 and below 1000000s"),
    "huge-rate": (GOOD + "load: {request_rate: 1.0e+7}\n", 2, "load.request_rate[0]: should be a number of requests per second from 1e-6 to 1e6, or inf, not 10000000.0"),
    "no-rates": (GOOD + "load: {request_rate: []}\n", 2, "load.request_rate: should not be empty"),
    "misplaced-key": (GOOD + "temperature: 1\n", 2, "did you mean sampling.temperature?"),
    "share-on-target": ("target:\n  model: t\n  share: []\n", 3, "did you mean draft.share?"),
    "never-a-recipe-key": (GOOD + "run: {trust_remote_code: true}\n", 2, "unknown key"),
    "duplicate-key": (GOOD + "run:\n  seed: 1\n  seed: 1\n", 4, "run.seed: duplicate key (first given on line 3)"),
    "duplicate-section": (GOOD + "run: {}\nrun: {}\n", 3, "run: duplicate key"),
    "number-as-key": (GOOD + "1: 2\n", 2, "1: unknown key"),
    "list-as-key": (GOOD + "? [a]\n: b\n", 2, "a key should be plain text"),
    "merge-key": ("target: &t {model: t}\ndraft:\n  <<: *t\n", 3, "draft.<<: merge keys are not supported"),
    "bool-count": (PAIR + "speculation: {num_speculative_tokens: true}\n", 3, "whole number, not true"),
    "float-count": (PAIR + "speculation:\n  num_speculative_tokens: 4.0\n", 4, "whole number, not 4.0"),
    "text-count": (PAIR + "speculation: {num_speculative_tokens: '4'}\n", 3, 'whole number, not "4"'),
    "negative-k": (PAIR + "speculation: {num_speculative_tokens: -1}\n", 3, "greater than or equal to 0"),
    "huge-k": (PAIR + f"speculation: {{num_speculative_tokens: {10**30}}}\n", 3, "less than or equal"),
    "digits": (PAIR + "run:\n  seed: " + "9" * 5000 + "\n", 4, "not a readable int"),
    "tp-zero": ("target:\n  model: t\n  tensor_parallel_size: 0\n", 3, "greater than or equal to 1"),
    "tp-does-not-divide": ("target: {model: t, tensor_parallel_size: 4}\ndraft:\n  model: d\n  tensor_parallel_size: 3\n", 4, "(3) should divide target.tensor_parallel_size (4)"),
    "share-split-otherwise": ("target: {model: t, tensor_parallel_size: 4}\ndraft:\n  model: d\n  share: [lm_head]\n", 4, "draft.tensor_parallel_size is 1"),
    "ranks-in-the-target": ("target: {model: t, tensor_parallel_size: 2}\ndraft:\n  model: mtp\n  tensor_parallel_size: 4\n", 4, "is 4, but the draft of mtp is in the target, which has 2 ranks"),
    "ranks-beside-mtp": (PAIR.replace("d}", "d, tensor_parallel_size: 2}") + "speculation: {method: mtp}\n", 2, "is 2, but the draft of mtp is in the target, which has 4 ranks"),
    "draft-without-model": (GOOD + "draft: {}\n", 2, "draft.model: is required"),
    "draft-empty-model": (GOOD + "draft: {model: ''}\n", 2, "draft.model: should not be empty"),
    "method-without-draft": (GOOD + "draft: null\nspeculation:\n  method: draft_model\n", 4, "draft_model needs a draft section"),
    "layers-twice": (PAIR + "speculation: {eagle3_layers: [1, 1, 2]}\n", 3, "should be numbers in ascending order"),
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
    "synthetic-alone": (PAIR + "speculation: {acceptance: synthetic}\n", 3, "needs exactly one of"),
    "rates-short": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_rates: [0.5]}\n", 3, "(5) rates, has 1"),
    "rates-rise": (PAIR + "speculation: {synthetic_acceptance_rates: [0.5, 0.6]}\n", 3, "should not rise"),
    "rates-range": (PAIR + "speculation: {synthetic_acceptance_rates: [1.5]}\n", 3, "less than or equal to 1"),
    "length-long": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_length: 7}\n", 3, "at most num_speculative_tokens + 1 (6)"),
    "data-of-chat-and-rows": (GOOD + "data: {chat: on, limit: 2}\n", 2, "data.path: is required"),
    "data-misspelt": (GOOD + "data: {pth: x}\n", 2, "did you mean data.path?"),
    "data-without-path": (GOOD + "data: {split: test}\n", 2, "data.path: is required"),
    "nul-escape": ('target: {model: "a\\0b"}\n', 1, "NUL"),
    "variable-nul": (GOOD + 'engine: {env: {A: "b\\0"}}\n', 2, "NUL"),
    "variable-name": (GOOD + "engine: {env: {A=B: c}}\n", 2, "should not contain an equals sign"),
    "line-break": ('target: {model: "a\\nb"}\n', 1, "should not contain a line break"),
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
    "self-alias": ("target: &a\n  model: *a\n", 1, "an alias refers to a node that contains it"),
    "alias-bomb": ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), 1, "too large"),
    "deep": ("target: " + "[" * 5000, 1, "nested too deeply"),
    "too-big": (GOOD + "# " + "x" * 1_000_000, 0, "larger than 1,000,000 bytes"),
    # Keys that users of other tools, or of our own options, would write
    "dotted-key": (GOOD + "sampling.top_p: 0.5\n", 2, "sampling.top_p: should be a section with the key in it"),
    "upper-case": ("TARGET: {model: t}\n", 1, "TARGET: unknown key (did you mean target?)"),
    "dashes": (GOOD + "sampling: {max-new-tokens: 1}\n", 2, "did you mean sampling.max_new_tokens?"),
    "camel-case": (GOOD + "sampling: {maxNewTokens: 1}\n", 2, "did you mean sampling.max_new_tokens?"),
    "short-k": (PAIR + "speculation:\n  k: 4\n", 4, "did you mean speculation.num_speculative_tokens?"),
    "top-level-k": (PAIR + "k: 4\n", 3, "k: unknown key (did you mean speculation.num_speculative_tokens?)"),
    "short-tp": (GOOD + "draft:\n  model: d\n  tp: 1\n", 4, "did you mean draft.tensor_parallel_size?"),
    "max-tokens": (GOOD + "sampling: {max_tokens: 4}\n", 2, "did you mean sampling.max_new_tokens?"),
    "several-drafts": (GOOD + "drafts: [{model: d}]\n", 2, "drafts: unknown key (did you mean draft?)"),
    "no-space-after-colon": ("target:\n  model:t\n", 1, 'target: should be a section of keys, not "model:t"'),
    "equals-sign": ("target = t\n", 1, 'a recipe is a mapping of sections, not "target = t"'),
    "null-key": (GOOD + "run: {~: 1}\n", 2, "run.~: unknown key"),
    "bool-key": (GOOD + "true: 1\n", 2, "true: unknown key"),
    "empty-key": (GOOD + "'': 1\n", 2, "unknown key"),
    "mapping-as-key": ("target: {{ model }}\n", 1, "target: a key should be plain text"),
    "invisible-key": (GOOD + "\ufeffrun: {}\n", 2, "\\ufeffrun: unknown key (did you mean run?)"),
    "newline-in-key": (GOOD + '"a\\nb": 1\n', 2, "a\\nb: unknown key"),
    "escape-in-key": (GOOD + '"a\\e[31m": 1\n', 2, "a\\x1b[31m: unknown key"),
    "surrogate-key": (GOOD + 'run:\n  "\\uD800": 1\n', 3, "run.\\ud800: a key should be valid Unicode text"),
    "endless-key": (GOOD + "? " + "x" * 100_000 + "\n: 1\n", 2, "xxx…: unknown key"),
    "duplicate-below-a-list": (GOOD + "sampling:\n  stop:\n  - {a: 1, a: 2}\n", 4, "sampling.stop[0].a: duplicate key"),
    "duplicate-in-one-line": ("target: {model: t, model: u}\n", 1, "target.model: duplicate key (first given on line 1)"),
    "merge-of-a-list": ("target: &t {model: t}\ndraft:\n  model: d\n  <<: [*t]\n", 4, "draft.<<: merge keys are not supported"),
    # Values that YAML 1.1, or a person, reads otherwise
    "underscores in a number": (GOOD + "run: {timeout_s: 1_0}\n", 2, "should be a number"),
    "a number in quotes": (GOOD + "sampling: {top_p: '0.5'}\n", 2, "should be a number"),
    "underscores": (GOOD + "run: {seed: 1_000}\n", 2, 'whole number, not "1_000"'),
    "hexadecimal": (GOOD + "run: {seed: 0x1F}\n", 2, 'whole number, not "0x1F"'),
    "octal": (GOOD + "run: {seed: 0o17}\n", 2, 'whole number, not "0o17"'),
    "sexagesimal": (GOOD + "run: {timeout_s: 12:30}\n", 2, 'should be a number, not "12:30"'),
    "timeout-of-ages": (GOOD + "run: {timeout_s: 1e10}\n", 2, "run.timeout_s: should be less than or equal to 1000000000, not 1"),
    "exponent-count": (GOOD + "run: {seed: 1e3}\n", 2, "whole number, not 1000.0"),
    "units": (GOOD + "cache: {cpu_bytes: 4 GBs}\n", 2, "expected a size such as 80GiB, got '4 GBs'"),
    "percent": (GOOD + "cache: {gpu_memory_utilization: 90}\n", 2, "less than or equal to 1, not 90"),
    "decimal-comma": (GOOD + "sampling: {temperature: 0,7}\n", 2, "sampling.7: unknown key"),
    "comment-without-space": (GOOD + "run: {seed: 1#2}\n", 2, 'whole number, not "1#2"'),
    "model-number": ("target: {model: 3.1}\n", 1, "target.model: should be text, not 3.1 (put it in quotes)"),
    "revision-number": ("target:\n  model: t\n  revision: 012\n", 3, "should be text, not 12 (put it in quotes)"),
    "model-list": ("target: {model: [a, b]}\n", 1, 'target.model: should be text, not ["a", "b"]'),
    "model-blank": ("target: {model: ' '}\n", 1, "target.model: should be more than white space"),
    "draft-none": (GOOD + "draft: none\n", 2, 'not "none" (did you mean null?)'),
    "draft-model-none": (GOOD + "draft: {model: none}\n", 2, "draft.model: none is no draft; use -k 0"),
    "draft-false": (GOOD + "draft: false\n", 2, "not false (did you mean null?)"),
    "device-number": (GOOD + "run: {device: 0}\n", 2, "run.device: should be text, not 0"),
    "device-newline": (GOOD + 'run: {device: "cpu\\n"}\n', 2, "run.device: should be auto, cpu"),
    "batch-large": (GOOD + "run: {batch_size: 65537}\n", 2, "less than or equal to 65536"),
    "batch-list": (GOOD + "run: {batch_size: [1, 2]}\n", 2, "whole number, not [1, 2]"),
    "chat-word": (GOOD + "data: {path: p, chat: always}\n", 2, "data.chat: should be auto, on or off"),
    "seed-negative": (GOOD + "run: {seed: -1}\n", 2, "greater than or equal to 0, not -1"),
    "seed-64-bits": (GOOD + f"run: {{seed: {2**63}}}\n", 2, "less than or equal to 9223372036854775807"),
    "top-k-minus-one": (GOOD + "sampling: {top_k: -1}\n", 2, "greater than or equal to 0, not -1"),
    "no-new-tokens": (GOOD + "sampling: {max_new_tokens: 0}\n", 2, "greater than or equal to 1, not 0"),
    "null-count": (GOOD + "sampling: {max_new_tokens: null}\n", 2, "whole number, not null"),
    "stop-empty": (GOOD + "sampling: {stop: ['']}\n", 2, "sampling.stop[0]: should not be empty"),
    "one-block": (GOOD + "cache:\n  num_blocks: 1\n", 3, "cache.num_blocks: should be greater than or equal to 2, not 1"),
    "limit-zero": (GOOD + "data: {path: p, limit: 0}\n", 2, "greater than or equal to 1, not 0"),
    "data-text": (GOOD + "data: prompts.txt\n", 2, 'data: should be a section of keys, not "prompts.txt"'),
    # Values that contradict each other
    "rates-and-length": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_rates: [1, 1, 1, 1, 1], synthetic_acceptance_length: 2}\n", 3, "needs exactly one of"),
    "rates-nan": (PAIR + "speculation: {synthetic_acceptance_rates: [0.5, .nan]}\n", 3, "rates[1]: should be a finite number"),
    "rates-negative": (PAIR + "speculation: {synthetic_acceptance_rates: [0.5, -0.1]}\n", 3, "rates[1]: should be greater than or equal to 0"),
    "rates-number": (PAIR + "speculation: {synthetic_acceptance_rates: 0.5}\n", 3, "should be a list, not 0.5"),
    "rates-none": (PAIR + "speculation: {acceptance: synthetic, synthetic_acceptance_rates: []}\n", 3, "(5) rates, has 0"),
    "length-short": (PAIR + "speculation: {synthetic_acceptance_length: 0.5}\n", 3, "greater than or equal to 1, not 0.5"),
    "ngram-zero": (GOOD + "speculation: {ngram_min: 0}\n", 2, "greater than or equal to 1, not 0"),
    "system-without-chat": (GOOD + "data:\n  path: p\n  chat: off\n  system: s\n", 5, "data.system: needs the chat template"),
    "least-above-most": (GOOD + "sampling:\n  min_new_tokens: 9\n  max_new_tokens: 8\n", 3, "sampling.min_new_tokens: should be at most sampling.max_new_tokens (8), not 9"),
    "least-above-default": (GOOD + "sampling: {min_new_tokens: 257}\n", 2, "at most sampling.max_new_tokens (256), not 257"),
    # Files that are something else, or not quite YAML
    "json-lines": ('{"prompt": "a"}\n{"prompt": "b"}\n', 2, "not valid YAML"),
    "csv": ("a,b\n1,2\n", 1, "a recipe is a mapping of sections"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0", 1, "not UTF-8"),
    "utf16-without-mark": (GOOD.encode("utf-16-le"), 1, "U+0000"),
    "tab-after-colon": ("target: {model: t}\nrun:\t{seed: 1}\n", 2, "a tab where only spaces are allowed"),
    "open-quote": (GOOD + "run: {device: 'cpu}\n", 3, "not valid YAML"),
    "at-sign": (GOOD + "data: {path: @p}\n", 2, "character '@' that cannot start any token"),
    "colon-in-value": ("target: {model: a: b}\n", 1, "not valid YAML"),
    "yaml-two": ("%YAML 2.0\n---\n" + GOOD, 1, "incompatible YAML document"),
    "empty-documents": ("---\n---\n---\n", 2, "another document"),
    "after-the-end": (GOOD + "...\nrun: {}\n", 3, "not valid YAML"),
    "same-anchor": ("target: {model: &a t}\ndraft: {model: &a d}\n", 2, "found duplicate anchor 'a'"),
    "binary-tag": ("target: {model: !!binary aGk=}\n", 1, "binary is not allowed"),
    "set-tag": (GOOD + "run: !!set {a, b}\n", 2, "set is not allowed"),
    "float-tag": (GOOD + "run: {seed: !!float 5}\n", 2, "whole number, not 5.0"),
    "text-bomb": ("x: &a '" + "y" * 90_000 + "'\nsampling: {stop: [" + "*a," * 5000 + "]}\n", 1, "too large once its aliases"),
    "deep-mapping": ("target: " + "{a: " * 3000, 1, "nested too deeply"),
    "deep-keys": ("? " * 3000, 1, "nested too deeply"),
}  # fmt: skip


def error_document(output: str) -> dict[str, object]:
    document = json.loads(output)
    assert list(document) == ["error"]
    error: dict[str, object] = document["error"]
    assert list(error) == ["code", "message", "hint"]
    return error


def test_an_option_inside_a_section_is_named_not_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The demo recipe has no section `load`, so no line of it is at fault."""
    assert main(["generate", "demo", "--set", "load.slo.ttft=1s"]) == 2
    said = "error: --set: load.slo: needs load.request_rate (--request-rate)\n"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", ["medusa", "lookahead", "suffix"])
def test_a_method_of_others_is_no_slip_of_a_letter(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(PAIR + f"speculation: {{method: {name}}}\n")
    assert main(["recipe", "validate", str(path)]) == 2
    told = capsys.readouterr().err
    assert f'not "{name}"' in told and "did you mean" not in told


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
    assert error["code"] == 2 and words in inert(str(error["message"]))


def test_not_a_file_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fifo, locked = tmp_path / "pipe.yaml", tmp_path / "locked.yaml"
    os.mkfifo(fifo)
    locked.write_text(GOOD)
    locked.chmod(0)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "file.txt").touch()
    cases = {
        "": "is a directory",
        ".": "is a directory",
        "Demo": "did you mean demo?",
        "demo.yml": "did you mean demo?",
        "demo_sampled": "did you mean demo-sampled?",
        str(tmp_path / "loop.yaml"): "no such recipe",
        str(tmp_path / "file.txt" / "r.yaml"): "no such recipe",
        "/dev/zero": "not a regular file",
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


def test_thousands_of_unknown_keys_take_no_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "many.yaml"
    path.write_text(GOOD + "".join(f"key{i}: 1\n" for i in range(5000)))
    started = time.process_time()
    assert main(["recipe", "validate", str(path)]) == 2
    assert time.process_time() - started < 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {path}:2: key0: unknown key")
    assert lines[50] == "error: and 4950 more problems"


# Generated recipes: they resolve, or the error names the place that is wrong.

SEEDS = [
    *(
        Path(__file__).parents[2].joinpath("recipes", name).read_text(encoding="utf-8")
        for name in ("demo.yaml", "bench-8b-1b-dummy.yaml")
    ),
    "target: &t {model: t, revision: '1.0'}\nsampling: {stop: [a, \"\\n\"], temperature: 1e-3}\n",
]
PIECES = [
    *":[]{}&*!|>'\"%@#,-?\n \t", "<<: *x", "!!python/name:os.system", "~", "1e999", "\x00", "é",
    "---\n", "\ud800", "target", "null", "0x1F", "9" * 5000, "{a: &a [*a]}", "\n  model: 5\n",
    "\\ud800", "\ufeff", "\x85", "\r", "*t", "\x1b[31m", "\u202e",
]  # fmt: skip
GENERATED = settings(
    max_examples=120,  # scripts/proofs/hostile.py tries thousands
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check(path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(content)
    code = main(["recipe", "show", str(path), "--json"])
    captured = capsys.readouterr()
    assert code in (0, 2) and "Traceback" not in captured.err
    document = json.loads(captured.out)
    if code == 0:
        recipe = load_recipe(str(path))
        dumped = dump_recipe(recipe)
        assert inert(dumped) == dumped
        path.write_text(dumped, encoding="utf-8")
        assert load_recipe(str(path)) == recipe
        return
    assert document["error"]["code"] == 2
    lines = len(content.decode("utf-8", "replace").splitlines()) + 1
    for message in document["error"]["message"].splitlines()[:50]:
        number = int(message.removeprefix(f"{path}:").partition(":")[0])
        assert 1 <= number <= lines


@GENERATED
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 30), st.sampled_from(PIECES)), max_size=4
    ),
)
def test_mutated_recipes(
    seed: str,
    edits: list[tuple[int, int, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = seed
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    check(tmp_path / "mutated.yaml", text.encode("utf-8", "surrogatepass"), capsys)


NUMBERS = [0, 1, -1, 4, 0.5, 1.5, 1e308, float("inf"), float("nan"), 2**63, 2**31]
WORDS = [
    "",
    " ",
    "t",
    "auto",
    "on",
    "off",
    "none",
    "ngram",
    "cpu",
    "synthetic",
    "\ud800",
    "\0",
    "é",
]
SCALARS = st.sampled_from([None, True, False, *NUMBERS, *WORDS])
VALUES = SCALARS | st.lists(SCALARS, max_size=6) | st.dictionaries(st.just("x"), SCALARS)
KEYS = [*section_models(), *key_fields(), "x", "run.x"]


@GENERATED
@given(edits=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_values_of_any_kind(
    edits: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe.model_validate({"target": {"model": "t"}, "draft": {"model": "d"}})
    data = recipe.model_dump(mode="json")
    for key, value in edits.items():
        section, _, last = key.partition(".")
        if last and isinstance(data.get(section), dict):
            data[section][last] = value
        else:
            data[section] = value
    # JSON is YAML, except for its words for infinity and NaN.
    text = json.dumps(data, indent=1).replace("Infinity", ".inf").replace("NaN", ".nan")
    check(tmp_path / "values.yaml", text.encode(), capsys)
