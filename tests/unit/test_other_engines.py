"""Other engines get the work that a recipe describes, and their times are counted alike."""

from pathlib import Path

import pytest

from scripts.peers import work


def test_a_bundled_recipe_is_read_as_specdec_reads_it() -> None:
    what = work.read("bench-8b-eagle3-dummy", 3)
    assert what.tokens_a_round == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert what.draft is not None and (Path(what.draft) / "config.json").is_file()
    assert (what.method, what.is_dummy, what.new_tokens) == ("eagle3", True, 256)
    plain = work.read("bench-8b-eagle3-dummy", 0)
    assert (plain.draft, plain.rates, plain.target) == (None, [], what.target)


def test_a_row_leaves_out_the_first_pass_and_counts_rounds_of_a_prompt() -> None:
    """Two prompts of 31 tokens, 10 rounds each, in 3.5 s of which 0.5 went to first tokens."""
    got = work.Decoded(3.5, [[1] * 31] * 2, rounds=20, accepted=40)
    row = work.row("some", 4, got, first=0.5)
    assert (row.tokens_a_round, row.ms_a_round, row.tokens_per_s) == (3.0, 300.0, 20.0)
    plain = work.row("some", 0, work.Decoded(3.5, [[1] * 31] * 2, 0, 0), first=0.5)
    assert (plain.tokens_a_round, plain.ms_a_round) == (1.0, 100.0)
