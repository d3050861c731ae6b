"""`PATH[:SPLIT[:COLUMN]]`: paths and slices that contain colons stay whole."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specdec_cli.errors import UsageError
from specdec_cli.prompts import parse_dataset


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p.jsonl", ("p.jsonl", None, None)),
        ("squad:train", ("squad", "train", None)),
        ("squad:train:question", ("squad", "train", "question")),
        ("owner/name:train[:100]", ("owner/name", "train[:100]", None)),
        ("d:train[10:20]:q", ("d", "train[10:20]", "q")),
        ("d:train[:10%]+test[90%:]:q", ("d", "train[:10%]+test[90%:]", "q")),
        ("p.csv::question", ("p.csv", None, "question")),
        ("p.csv:", ("p.csv", None, None)),
        ("demo:prompts", ("demo:prompts", None, None)),
        ("demo:prompts:train[:5]:prompt", ("demo:prompts", "train[:5]", "prompt")),
        ("https://host/a.jsonl:train", ("https://host/a.jsonl", "train", None)),
        ("http://host:8080/a.jsonl:train:q", ("http://host:8080/a.jsonl", "train", "q")),
        ("hf://datasets/a/b", ("hf://datasets/a/b", None, None)),
        (r"C:\data\p.csv:train:q", (r"C:\data\p.csv", "train", "q")),
        ("c:/data/p.csv", ("c:/data/p.csv", None, None)),
        ("folder[1:2]/p.csv:train", ("folder[1:2]/p.csv", "train", None)),
        ("open[x.jsonl:train", ("open[x.jsonl", "train", None)),
        ("d:[:5]", ("d", "[:5]", None)),
    ],
)
def test_examples(text: str, expected: tuple[str, str | None, str | None]) -> None:
    assert parse_dataset(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no path"),
        (" ", "has no path"),
        (":train", "has no path"),
        ("a:b:c:d", "more than three parts"),
        ("demo:prompts:a:b:c", "more than three parts"),
        ("https://h:1/x:a:b:c", "more than three parts"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_dataset(text)
    assert refused.value.hint is not None and "train[:100]" in refused.value.hint


def test_paths_that_exist_keep_their_colons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b.jsonl").touch()
    (tmp_path / "a:b.jsonl:c").touch()
    assert parse_dataset("a:b.jsonl") == ("a:b.jsonl", None, None)
    assert parse_dataset("a:b.jsonl:train:q") == ("a:b.jsonl", "train", "q")
    assert parse_dataset("a:b.jsonl:c:train") == ("a:b.jsonl:c", "train", None)
    assert parse_dataset(f"{tmp_path}/a:b.jsonl:train[:3]") == (
        f"{tmp_path}/a:b.jsonl",
        "train[:3]",
        None,
    )


PLAIN = st.characters(exclude_characters=":[]", exclude_categories=["Cs"])
NAMES = st.text(PLAIN, min_size=1, max_size=8).filter(lambda name: bool(name.strip()))
BOUND = st.sampled_from(["", "5", "100", "10%"])
SLICES = st.builds(lambda n, a, b: f"{n}[{a}:{b}]", NAMES, BOUND, BOUND)
PREFIX = st.sampled_from(["", "", "demo:", "C:\\", "d:/", "https://host/", "s3://host:9000/", "a/"])
PATHS = st.builds(lambda prefix, name: prefix + name, PREFIX, NAMES | SLICES)
PARTS = st.none() | NAMES | SLICES


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)
@given(path=PATHS, split=PARTS, column=PARTS)
def test_what_was_joined_comes_apart(path: str, split: str | None, column: str | None) -> None:
    assume("\0" not in path and not (len(path) == 1 and (split or column or "")[:1] in "/\\"))
    # A name that ends like a scheme, before an empty part, would read as a scheme.
    tail = f":{split or ''}:{column}" if column else f":{split}" if split else ""
    assume("://" not in tail and not tail.startswith(("://", ":/")))
    assume(path != "demo" and not Path(path).exists())
    assert parse_dataset(path + tail) == (path, split, column)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(text=st.text(st.sampled_from(":[]/\\a%C. \0\ud800"), max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        path, split, column = parse_dataset(text)
    except UsageError:
        return
    assert path.strip() and split != "" and column != ""
    assert ":".join([path, *([split or "", column or ""])]).rstrip(":") == text.rstrip(":")
