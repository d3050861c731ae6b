"""Other engines get the work that a recipe describes, and times and rounds are counted alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.peers import agree, work
from specdec_cli.demo import demo_path
from specdec_cli.recipe import load_recipe


def test_a_bundled_recipe_is_read_as_specdec_reads_it() -> None:
    what = work.read("bench-8b-eagle3-dummy", 3)
    assert what.tokens_a_round == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert what.draft is not None and (Path(what.draft) / "config.json").is_file()
    assert (what.method, what.is_dummy, what.new_tokens) == ("eagle3", True, 256)
    assert what.tensor_parallel_size == 1
    assert work.read("bench-70b-1b-dummy", 5).tensor_parallel_size == 4
    plain = work.read("bench-8b-eagle3-dummy", 0)
    assert (plain.draft, plain.rates, plain.target) == (None, [], what.target)


def test_bundled_models_are_their_folders(tmp_path: Path) -> None:
    """`demo:draft` is no hub id; a name that is neither a folder nor bundled is one."""
    what = work.read("demo", 4)
    assert (what.target, what.draft) == (
        str(demo_path("demo:target")),
        str(demo_path("demo:draft")),
    )
    assert what.eos_ids, "they are read from the folder"
    recipe = tmp_path / "own.yaml"
    recipe.write_text("target: {model: owner/name}\ndraft: {model: beside}\n")
    (tmp_path / "beside").mkdir()
    what = work.read(str(recipe), 4)
    assert (what.target, what.draft) == ("owner/name", str(tmp_path / "beside"))


def test_other_engines_quantise_what_the_recipe_has_in_fp8() -> None:
    pair = work.read("bench-8b-fp8-1b-dummy", 5)
    assert (pair.target_weights, pair.draft_weights) == ("fp8", "fp8")
    target_alone = work.read("bench-70b-fp8-1b-dummy", 5)
    assert (target_alone.target_weights, target_alone.draft_weights) == ("fp8", None)
    assert work.read("bench-8b-fp8-1b-dummy", 0).draft_weights is None


@pytest.mark.parametrize("name", ["bench-8b-fp8-1b-dummy", "bench-8b-eagle3-dummy"])
def test_ours_runs_what_the_recipe_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(work.__file__).parent))
    from scripts.peers.run_specdec import settings

    found, whole = load_recipe(None, settings(work.read(name, 5), 8)), load_recipe(name, {})
    assert found.run.batch_size == 8
    for section in ("target", "draft", "speculation", "sampling"):
        ours, theirs = getattr(found, section), getattr(whole, section)
        same = {"load_format", "weights", "dtype", "method", "acceptance", "ignore_eos"}
        for key in same & type(theirs).model_fields.keys():
            assert getattr(ours, key) == getattr(theirs, key), f"{section}.{key}"
    rates = whole.speculation.synthetic_acceptance_rates
    assert found.speculation.synthetic_acceptance_rates == (rates and rates[:5])
    with pytest.raises(SystemExit, match="one rank"):
        settings(work.read("bench-70b-1b-dummy", 5), 1)


TWO = [[[1] * 5, [1] * 7]]


def test_a_row_leaves_out_the_first_pass_and_counts_rounds_of_a_prompt() -> None:
    """Two prompts of 31 tokens, 10 rounds each, in 3.5 s of which 0.5 went to first tokens."""
    got = work.Decoded(3.5, [[1] * 31] * 2, rounds=20)
    row = work.row("some", 4, 2, TWO, got, first=0.5)
    assert (row.tokens_a_round, row.ms_a_round, row.tokens_per_s) == (3.0, 300.0, 20.0)
    assert row.prompt_tokens == 6
    plain = work.row("some", 0, 2, TWO, work.Decoded(3.5, [[1] * 31] * 2, 0), first=0.5)
    assert (plain.tokens_a_round, plain.ms_a_round) == (1.0, 100.0)


def test_small_batches_of_real_prompts_are_several() -> None:
    """Four batches of two hold eight of ten prompts; three of three take one again."""
    asked = [[i] for i in range(10)]
    parts = work.batches(asked, 2)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert len({prompt[0] for part in parts for prompt in part}) == 8
    assert [len(part) for part in work.batches(asked, 32)] == [32]
    assert {prompt[0] for prompt in work.batches(asked, 32)[0]} == set(range(10))
    assert len(work.batches(asked[:3], 1)) == 3


def test_a_row_over_several_batches_has_the_time_of_one_round() -> None:
    """Two batches of one take 3 s for 20 rounds behind first tokens of 0.25 s each."""
    got = work.joined([work.Decoded(2.0, [[1] * 31], 10), work.Decoded(1.5, [[1] * 31], 10)])
    row = work.row("some", 4, 1, [[[1] * 4], [[1] * 8]], got, first=0.5)
    assert (row.rounds, row.tokens_a_round, row.ms_a_round) == (20, 3.0, 150.0)
    assert (row.tokens_per_s, row.first_token_ms) == (20.0, 250.0)


def test_each_batch_size_is_timed_at_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int, int]] = []

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        seen.append((len(ids), len(ids[0]), new))
        return work.Decoded(1.0 if new == 1 else 2.0, [[1] * new] * len(ids), 0)

    def start(what: work.Work, batch: int, longest: int) -> work.Started:
        assert (batch, longest) == (2, 9 + 4 + 16)
        return work.Started(decode, lambda ids, new: [])

    given = ["bench-8b-1b-dummy", "--batch-size", "1,2", "--prompt-tokens", "5,9", "--repeats", "1"]
    args = work.arguments("some").parse_args(given)
    what = replace(work.read("bench-8b-1b-dummy", 0), new_tokens=4)
    rows = work.timed("some", what, start, args, None)
    assert [(r.batch, r.prompt_tokens) for (r,) in rows] == [(1, 5), (1, 9), (2, 5), (2, 9)]
    assert [size[:2] for size in seen if size[2] == 4] == [(1, 5), (1, 9), (2, 5), (2, 9)]
    work.show(rows)
    assert "| some | 2 | 9 | 0 | 6 | 1.00 | 333.33 (333.33 – 333.33) |" in capsys.readouterr().out


def test_first_tokens_count_where_a_round_wrote_them() -> None:
    """The first round of each prompt is among the rounds, but its time is that of first tokens."""
    got = work.Decoded(3.2, [[1] * 31] * 2, rounds=20, apart=0)
    row = work.row("some", 4, 2, TWO, got, first=0.5)
    assert (row.rounds, row.tokens_a_round) == (20, 3.1)
    assert row.ms_a_round == pytest.approx(2700 * 2 / 18)
    assert row.tokens_per_s == pytest.approx(60 / 2.7)


def test_a_row_of_an_even_number_of_repeats_is_one_repeat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = (3.5, 2.5)
    repeats = [
        work.row("some", 4, 2, TWO, work.Decoded(s, [[1] * 31] * 2, 20), first=0.5) for s in times
    ]
    work.show([repeats])
    row = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert row[6:8] == ["200.00 (200.00 – 300.00)", "30.0"]


def test_the_ids_that_end_a_text_come_from_the_target(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target: {model: m}")
    assert work.read(str(recipe), 0).eos_ids == (2,)
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert work.read(str(recipe), 0).eos_ids == (0, 2)


def made_up(new_tokens: int = 8) -> work.Work:
    return work.Work("t", "d", "draft_model", 3, [], "float32", False, new_tokens, False, (9,))


def test_an_engine_that_drafts_first_tokens_gets_them_with_the_prompt() -> None:
    """A text that ends with its first token has no rounds."""
    given: list[list[int]] = []

    def count(longer: list[list[int]]) -> list[work.Counted]:
        given.extend(longer)
        return [work.Counted([5, 6], 1, [2]) for _ in longer]

    found = work.behind_first([[1], [2], [3]], [7, 9, 8], made_up(), count)
    assert given == [[1, 7], [3, 8]]
    assert [c.token_ids for c in found] == [[7, 5, 6], [9], [8, 5, 6]]
    assert [c.rounds for c in found] == [1, 0, 1]
    given.clear()
    assert work.behind_first([[1]], [7], made_up(new_tokens=1), count)[0].token_ids == [7]
    assert given == []


def a_run(engine: str, prompts: list[dict[str, object]], k: int = 3) -> dict[str, object]:
    about = {"engine": engine, "recipe": "head", "k": k, "dtype": "float32", "new_tokens": 8}
    return about | {"prompts": prompts}


def a_prompt(text: list[int], rounds: int, **told: list[int]) -> dict[str, object]:
    return {"token_ids": text, "rounds": rounds, "written": None, "histogram": None} | told


OURS = [
    a_prompt([1, 2, 3, 4, 5, 6], 2, written=[4, 1]),
    a_prompt([1, 2, 3, 4], 2, written=[2, 1]),
    a_prompt([7, 7, 7, 7, 7], 1, written=[4]),
    a_prompt([9], 0, written=[]),
]


def test_engines_that_write_the_same_rounds_agree_however_they_count_the_end() -> None:
    """The other engine accepted three proposals in the last round of the first text, of which the
    end of the text let none be written."""
    told = [[0, 0, 0, 2], [1, 1, 0, 0], [0, 0, 0, 1], []]
    theirs = [
        a_prompt(ours["token_ids"], ours["rounds"], histogram=h)
        for ours, h in zip(OURS, told, strict=True)
    ]
    [row] = agree.beside_ours([a_run("specdec", OURS), a_run("other", theirs)])
    assert (row.equal, row.same_rounds, row.ratio, row.is_near) == (4, 4, 1.0, True)
    assert row.ours == row.theirs == (5 + 3 + 4) / 5
    assert row.ends is None
    assert row.accepted[0] == [1.0, 0.5, 0.5]  # of the two rounds that end no text
    assert row.accepted[1] == [0.8, 0.6, 0.6]


def test_a_text_that_differs_is_left_out_and_a_gap_is_seen() -> None:
    theirs = [
        a_prompt([1, 2, 3, 4, 5, 6], 3),
        a_prompt([1, 2, 3, 4], 2),
        a_prompt([7, 7, 8, 7, 7], 4),
        a_prompt([9], 0),
    ]
    [row] = agree.beside_ours([a_run("specdec", OURS), a_run("other", theirs)])
    assert (row.equal, row.same_rounds, row.is_near) == (3, 2, False)
    assert row.ratio == pytest.approx((8 / 5) / (8 / 4))
    assert row.ratio_of_all == pytest.approx((12 / 9) / (12 / 5))
    assert row.accepted[1] == []
    assert "3 / 4" in agree.table([row])[-1]


def test_runs_that_cannot_be_held_beside_ours_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing of specdec beside other head k=2"):
        agree.beside_ours([a_run("specdec", OURS), a_run("other", OURS, k=2)])
    with pytest.raises(ValueError, match="other prompts"):
        agree.beside_ours([a_run("specdec", OURS), a_run("other", OURS[:2])])
