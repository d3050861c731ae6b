"""Ranks agree on the outcome of a step: a failure on only some of them ends the run."""

from typing import Any

import pytest

from specdec_cli.launch.agreement import Agreement
from specdec_cli.launch.rank import PeersMissing

FAILURE = ValueError("no memory")


def agreement(
    monkeypatch: pytest.MonkeyPatch, rows: list[list[int]], is_apart: bool = False
) -> Any:
    """Two ranks with given answers. is_apart: they stand at different collectives."""
    two = Agreement(1, 5.0)
    two._group = object()
    places = [[3, -1], [4 if is_apart else 3, -1]]
    monkeypatch.setattr(two, "_places", lambda: (3, -1))
    monkeypatch.setattr(two, "_gather", lambda own, *_: places if own == [3, -1] else rows)
    return two


def test_what_succeeded_or_failed_everywhere_is_told_with_each_ranks_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert agreement(monkeypatch, [[0, 5], [0, 7]]).settle(None, 5) == (False, [5, 7])
    assert agreement(monkeypatch, [[1, 5], [1, 7]]).settle(FAILURE, 5) == (True, [5, 7])


def test_what_failed_on_some_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank ends with its problem, and the other because one is missing."""
    some = agreement(monkeypatch, [[1, 5], [0, 7]])
    with pytest.raises(ValueError, match="no memory"):
        some.settle(FAILURE, 5)
    with pytest.raises(PeersMissing):
        some.settle(None, 7)


def test_ranks_that_failed_at_different_places_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="no memory"):
        agreement(monkeypatch, [[1, 5], [1, 7]], is_apart=True).settle(FAILURE, 5)
