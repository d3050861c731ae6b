"""The first prompts, and samples of prompts: shares of categories, seeds, warnings."""

import json
from collections import Counter
from pathlib import Path

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import load_prompts, read_prompts
from specdec_cli.prompts.choose import sampled
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import DataSection

SIZES = {"math": 40, "qa": 10, "rag": 3, None: 7}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of prompts, one category after the other."""
    lines = [
        {"prompt": f"{name} {i}"} | ({} if name is None else {"category": name})
        for name, size in SIZES.items()
        for i in range(size)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, seed: int = 0, **keys: object) -> PromptSet:
    return load_prompts(DataSection.model_validate({"path": str(path), **keys}), seed=seed)


def counts(loaded: PromptSet) -> dict[str | None, int]:
    return dict(Counter(prompt.category for prompt in loaded.prompts))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (4, {"math": 1, "qa": 1, "rag": 1, None: 1}),
        (10, {"math": 3, "qa": 3, "rag": 2, None: 2}),
        (20, {"math": 6, "qa": 5, "rag": 3, None: 6}),
        (50, {"math": 30, "qa": 10, "rag": 3, None: 7}),
        (500, SIZES),
    ],
)
def test_shares_are_as_even_as_the_data_allow(
    limit: int, expected: dict[str | None, int], rows: Path
) -> None:
    found = read(rows, limit=limit, sample="stratified")
    assert sum(counts(found).values()) == min(limit, 60)
    small = {c: n for c, n in expected.items() if n == SIZES[c]}
    assert counts(found).items() >= small.items()
    others = [n for c, n in counts(found).items() if c not in small]
    assert not others or max(others) - min(others) <= 1
    assert sorted(counts(found).values()) == sorted(expected.values())
    places = [int(prompt.where.rpartition(":")[2]) for prompt in found.prompts]
    assert places == sorted(set(places))
    assert [prompt.index for prompt in found.prompts] == list(range(len(places)))


@pytest.mark.parametrize("sample", ["random", "stratified"])
def test_the_seed_decides_and_a_larger_sample_contains_a_smaller(sample: str, rows: Path) -> None:
    def texts(limit: int, seed: int) -> list[str | None]:
        found = read(rows, seed, limit=limit, sample=sample).prompts
        return [prompt.text for prompt in found]

    assert texts(12, 1) == texts(12, 1)
    assert len({tuple(texts(12, seed)) for seed in range(8)}) == 8
    assert set(texts(12, 1)) < set(texts(30, 1))
    assert not read(rows, limit=12, sample=sample).notices


def test_a_random_sample_has_every_prompt_alike(rows: Path) -> None:
    prompts = read(rows).prompts
    draws = (sampled(prompts, 15, "random", seed) for seed in range(400))
    times = Counter(prompt.text for drawn in draws for prompt in drawn)
    # 400 draws of a quarter: 100 times each, with a standard deviation of 8.7.
    assert len(times) == 60 and 65 < min(times.values()) and max(times.values()) < 135


def test_first_prompts_of_few_categories_are_told(rows: Path) -> None:
    (notice,) = read(rows, limit=42).notices
    assert notice.code == "limit_by_category"
    assert "the first 42 prompts are from 2 of 4 categories (math, qa)" in notice.message
    assert notice.evidence["categories"]["(none)"] == {"taken": 0, "data": 7}
    assert notice.evidence["categories"]["math"] == {"taken": 40, "data": 40}
    assert (notice.evidence["rows"], notice.evidence["is_whole"]) == (60, True)
    for whole in (read(rows), read(rows, limit=60), read(rows, limit=60, sample="random")):
        assert not whole.notices


def test_first_prompts_with_other_shares_are_told(tmp_path: Path) -> None:
    def notices(text: str, limit: int) -> list[str]:
        path = tmp_path / "x.csv"
        path.write_text("prompt,category\n" + "".join(f"p,{letter}\n" for letter in text))
        return [notice.message for notice in read(path, limit=limit).notices]

    assert notices("ab" * 30, 10) == []
    assert notices("aab" * 20, 10) == []
    (told,) = notices("aaaaaaaab" + "b" * 20, 9)
    assert "a is 89% of them and 28% there" in told
    # A damaged rest is another run's problem.
    (told,) = notices("aaa" + "b" * 9 + '"', 3)
    assert "1 of 2 categories" in told


def test_samples_that_make_no_sense(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(UsageError, match="a random sample needs a size"):
        read(rows, sample="random")
    plain = tmp_path / "p.txt"
    plain.write_text("a\nb\nc\n")
    with pytest.raises(UsageError, match="needs categories, but no prompt has one"):
        read(plain, limit=2, sample="stratified")
    assert len(read(plain, limit=2, sample="random").prompts) == 2
    given = read_prompts(["x", "y"], str(plain), None, limit=3, sample="random", seed=1)
    assert len(given) == 3 and [prompt.index for prompt in given] == [0, 1, 2]
