"""Models with a damaged tokenizer or chat template, and commands that read them."""

import json
import random
from pathlib import Path
from typing import Any

from specdec_cli.demo import demo_path
from tests.hostile.commands import SHORT, Found, linked, model_in
from tests.hostile.materials import Materials
from tests.hostile.values import Raw, damaged, deep, dumped, encoded, mutated, text

_REGEXES = [
    r"(a+)+$",
    r"(?:a|a?)+$",
    r"(a|aa)+\1$",
    r"(?=(a+)+$)x",
    "(",
    "[",
    "",
    "(?:)*",
    r"(?:(?:(?:a{1,999}){1,999}){1,999}){1,999}",
    "a" * 100_000,
    "(?:" * 3000 + "a" + ")" * 3000,
    "\\p{L}" * 5000,
    "(?<x>a)(?<x>b)\\k<x>",
]


def _steps(kind: str, rng: random.Random) -> Any:
    """A hostile normaliser, pre-tokenizer, decoder or post-processor."""
    regex = {"Regex": rng.choice(_REGEXES)}
    replace = {"type": "Replace", "pattern": rng.choice([regex, {"String": "a"}, {"String": ""}])}
    replace["content"] = rng.choice(["", "a" * 30, "a" * 20_000, "b", "\x00"])
    step: Any = rng.choice(
        [replace, {"type": "Strip"}, {"type": "Strip", "content": "a", "start": 10**12, "stop": -1}]
    )
    if kind == "normalizer":
        others = [{"type": "Prepend", "prepend": "a" * 20_000}, {"type": "Precompiled"}]
        others += [
            {"type": "Precompiled", "precompiled_charsmap": c} for c in ("", "AAAA", "/" * 99)
        ]
        step = rng.choice([step, *others])
    elif kind == "pre_tokenizer":
        step = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": True}
        step = rng.choice(
            [step, step, {"type": "Punctuation", "behavior": "x"}, {"type": "Digits"}]
        )
    elif kind == "post_processor":
        piece = rng.choice([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B"}}])
        special = {"SpecialToken": {"id": "<s>", "type_id": rng.choice([0, -1, 2**40])}}
        ids = {"id": "<s>", "ids": [rng.choice([0, 4096, 2**31, -1])], "tokens": ["<s>"]}
        single = [piece, special] * rng.choice([0, 1, 10_000, 100_000])
        step = {"type": "TemplateProcessing", "single": single, "pair": [piece]}
        step["special_tokens"] = {"<s>": ids}
        return step
    many = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    for _ in range(rng.choice([0, 0, 1, 2, 60, 200])):
        step = {"type": "Sequence", many[kind]: [step] * rng.choice([1, 1, 2])}
        if len(json.dumps(step)) > 2**20:
            return step
    if rng.random() < 0.2:
        step = {"type": "Sequence", many[kind]: [step] * rng.choice([0, 30, 900])}
    return step


def _vocabulary(values: Any, rng: random.Random) -> str:
    """Damage the model of a tokenizer."""
    model = values["model"]
    names = list(model["vocab"])
    how = rng.choice(
        [
            "ids",
            "same ids",
            "empty",
            "few",
            "kind",
            "merges",
            "more merges",
            "dropout",
            "unk",
            "long",
        ]
    )
    if how == "ids":
        model["vocab"][rng.choice(names)] = rng.choice([-1, 2**32, 2**31, 10**12, 4096, "x", 1.5])
    elif how == "same ids":
        model["vocab"] = dict.fromkeys(names, 5)
    elif how == "empty":
        model["vocab"], model["merges"] = {}, []
    elif how == "few":
        model["vocab"] = dict(list(model["vocab"].items())[:50])
    elif how == "kind":
        model["type"] = kind = rng.choice(["WordPiece", "WordLevel", "Unigram", "x", None])
        if kind == "Unigram":
            score = rng.choice([-1.0, 0.0, 1e308, Raw("NaN"), Raw("1e999")])
            model["vocab"] = [[name, score] for name in names]
            model["unk_id"] = rng.choice([0, None, 10**9, -1])
        model |= {"unk_token": rng.choice(["x", "<|endoftext|>"]), "max_input_chars_per_word": 0}
        model["continuing_subword_prefix"] = rng.choice(["", "##", "n" * 5000])
    elif how == "merges":
        model["merges"] = rng.choice(
            [["a"], ["a b c"], [["x", "nope"]], [[]], "a b", {}, [1], None]
        )
    elif how == "more merges":
        model["merges"] = model["merges"] * 20
    elif how == "dropout":
        model["dropout"] = rng.choice([1.0, -1, 2, 0.5, "x"])
    elif how == "unk":
        model |= {"unk_token": text(rng), "fuse_unk": True, "byte_fallback": True}
    else:
        model["vocab"] |= {"n" * 2**20: 5000, "\n" * 5000: 5001}
    return how


def _added(values: Any, rng: random.Random) -> None:
    one = {"id": 0, "content": "x", "special": True, "single_word": False, "lstrip": False}
    one |= {"rstrip": False, "normalized": False}
    values["added_tokens"] = rng.choice(
        [
            [one | {"content": ""}],
            [one | {"content": "a", "lstrip": True, "rstrip": True}, one | {"id": 1}],
            [one | {"id": i, "content": f"<{i}>"} for i in range(50_000)],
            [one | {"id": rng.choice([-1, 2**32, 10**12, 10**9])}],
            [one | {"content": "n" * 10**6}],
            [one | {"content": rng.choice(["a\nb", "\ud800", "\x00", " "])}],
        ]
    )


_TEMPLATES = [
    "{{ 'a' * 10**11 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(10**6) %}{{ messages }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no\nno') }}",
    "{{ messages[99]['content'] }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ x.y.z }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{% set a = [1] %}{% for i in range(99) %}{% set a = a + a %}{% endfor %}",
    "{{ '\ud800' }}",
    "{%" + " if x %}" * 5000,
    "(" * 5000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "",
    *([], {}, 3, [{"name": "default", "template": "{{ x"}], [{"name": "a"}], {"default": 3}),
]
_CLASSES = "LlamaTokenizer GPT2TokenizerFast BertTokenizer T5TokenizerFast X PreTrainedTokenizer"
_SETTINGS: dict[str, list[Any]] = {
    "tokenizer_class": [*_CLASSES.split(), None, 3, "__class__", "AutoTokenizer"],
    "model_max_length": ["x", -1, 0, 1e30, Raw("1e999"), None, [], True],
    "chat_template": _TEMPLATES,
    "bos_token": [{}, {"content": 3}, [], 3, "n" * 5000, {"content": "x", "lstrip": "y"}, True],
    "unk_token": [{}, 3, "nope", "\ud800", ""],
    "additional_special_tokens": ["x", [3], [[]], ["a"] * 10_000, {"a": "b"}, [""]],
    "extra_special_tokens": ["x", [3], {"a": 3}, {"eos_token": "y"}, {"__class__": "y"}],
    "added_tokens_decoder": [
        {"x": {"content": "y"}},
        {"-1": {"content": "y"}},
        {str(10**12): {"content": "y"}},
        {"5000": {"content": ""}},
        {"0": 3},
        {"0": {"nope": 1}},
        *([], "x"),
    ],
    "auto_map": [{"AutoTokenizer": ["x.Y", None]}, {"AutoTokenizer": "x.Y"}, "x"],
    "add_prefix_space": ["x", 3, True],
    "clean_up_tokenization_spaces": ["x", 3],
    "padding_side": ["x", 3],
    "truncation_side": ["x", 3],
    "model_input_names": ["x", 3, []],
    "tokenizer_file": ["/dev/zero", "x", 3],
    "backend": ["x", 3, "sentencepiece", "mistral-common"],
    "add_bos_token": ["x", True],
    "is_local": [False, 3],
    "name_or_path": ["/dev/zero", 3],
    "init_inputs": [[1], "x"],
    "save_pretrained": [1],
    "__class__": ["x"],
}
_WORDS = [
    *("def add(a, b):", "a" * 40 + "b", ("a" * 25 + "b") * 60, "x ", "x" + "\n" * 100, "a" * 1500),
    *("<|endoftext|>" * 100, "\u0301" * 5000, "é" * 900, "🙂" * 400, "ﷺ" * 600, "a" * 20_000),
]


_DAMAGES = (
    *("steps", "steps", "steps", "steps", "vocabulary", "vocabulary", "settings", "settings"),
    *("settings", "template", "any", "any", "bytes", "added", "lengths", "deep", "other files"),
)
_OTHERS = (
    *("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("tokenizer.model", "chat_template.jinja", "tekken.json", "spiece.model"),
)


def tokenizer(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A small model with another tokenizer."""
    source = demo_path("demo:draft")
    model = linked(source, model_in(folder, rng), "tokenizer.json", "tokenizer_config.json")
    values = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    extra: list[str] = []
    how = rng.choice(_DAMAGES)
    told = how
    if how == "steps":
        part = rng.choice(["normalizer", "pre_tokenizer", "decoder", "post_processor"])
        values[part] = _steps(part, rng)
        told = f"{part} {str(values[part])[:80]}"
    elif how == "vocabulary":
        told = f"vocabulary: {_vocabulary(values, rng)}"
    elif how == "added":
        _added(values, rng)
    elif how == "lengths":
        fixed = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
        fixed |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
        cut = {"max_length": rng.choice([0, 1, 2]), "stride": rng.choice([0, 1, 5])}
        cut |= {"strategy": "LongestFirst", "direction": "Right"}
        values |= {"padding": rng.choice([fixed, None]), "truncation": rng.choice([cut, None])}
    elif how == "any":
        values, told = mutated(values, rng, rng.choice([1, 3]))
    elif how == "settings":
        key = rng.choice(list(_SETTINGS))
        settings[key] = rng.choice(_SETTINGS[key])
        told = f"{key}: {str(settings[key])[:80]}"
    if how == "template" or "chat_template" in settings:
        settings.setdefault("chat_template", rng.choice(_TEMPLATES))
        told, extra = f"template {str(settings['chat_template'])[:80]}", ["--chat"]
    if rng.random() < 0.1:
        settings, more = mutated(settings, rng)
        told += f", settings: {more}"
    data = encoded(dumped(values if how != "deep" else deep(rng), rng))
    if how == "bytes":
        data, told = damaged(data, rng)
    (model / "tokenizer.json").write_bytes(data)
    (model / "tokenizer_config.json").write_bytes(encoded(dumped(settings, rng)))
    if "chat_template" in settings and rng.random() < 0.3:
        template = settings.pop("chat_template")
        (model / "chat_template.jinja").write_bytes(encoded(str(template)))
        (model / "tokenizer_config.json").write_bytes(encoded(dumped(settings, rng)))
    if how == "other files":
        name = rng.choice(_OTHERS)
        if rng.random() < 0.5:
            (model / "tokenizer.json").unlink()
        other = rng.choice(
            ["", "{}", "[]", "x", '{"bos_token": {"content": 3}}', "{{", "a b\n" * 9]
        )
        (model / name).write_text(other)
        told = f"{name}: {other[:20]!r}"
    text_of = rng.choice(_WORDS)
    extra += ["--set", 'sampling.stop=["zz"]'] if rng.random() < 0.3 else []
    if rng.random() < 0.2:
        (folder / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6, 7, 300, 4000]}\n')
        prompt = ["--prompt-file", "ids.jsonl"]
    else:
        prompt = ["--prompt", text_of.replace("\x00", "")]
    role = rng.choice(["--target", "--target", "--draft"])
    k = ["-k", "0"] if role == "--target" else ["-k", "2"]
    start = ["generate", "demo", role, str(model), *k] if role == "--draft" else []
    start = start or ["generate", role, str(model), *k]
    return told, [*start, *prompt, *SHORT, *extra]
