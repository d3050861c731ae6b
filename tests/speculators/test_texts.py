"""Texts for training: loops, overlaps, frames of conversations, waves and rows."""

import json
import random
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scripts.speculators.cleaning import OVERLAP, Avoided, end_of_sense
from scripts.speculators.corpus import (
    Frame,
    Text,
    by_frequency,
    joined,
    packed,
    read_wave,
    write_wave,
)
from scripts.speculators.fit import fitted, outlook
from scripts.speculators.frames import Passage, seed, shortened, task
from scripts.speculators.texts import (
    KINDS,
    TEMPERATURES,
    Writer,
    temperature_of,
    turns_in,
    turns_of,
)


def test_a_loop_is_cut_to_its_first_turn() -> None:
    sense = np.arange(100, 140)
    for period in (1, 2, 7, 30):
        turn = np.arange(period)
        for turns in (4, 9):
            ids = np.concatenate((sense, np.tile(turn, turns), turn[: period // 2]))
            is_loop = period * turns + period // 2 >= 24
            assert end_of_sense(ids) == (len(sense) + period if is_loop else len(ids))
    assert end_of_sense(sense) == len(sense)
    assert end_of_sense(np.zeros(0, np.int64)) == 0
    twice = np.concatenate((sense, np.arange(30), np.arange(30)))
    assert end_of_sense(twice) == len(twice)  # said twice is no loop


def test_texts_that_share_thirteen_tokens_are_found() -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 50_000, n).tolist() for n in (5, 12, 13, 200)]
    avoided = Avoided(prompts)
    other = generator.integers(50_000, 60_000, 40)
    for shared, wanted in ((OVERLAP, True), (OVERLAP - 1, False)):
        for at in (0, 77, 200 - shared):
            ids = np.concatenate((other, prompts[3][at : at + shared], other))
            assert avoided.is_in(ids) is wanted
    assert avoided.is_in(np.array(prompts[2])) and not avoided.is_in(np.array(prompts[1]))
    assert not Avoided([]).is_in(other)


def test_tasks_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    kinds = ("english", "foreign", "code", "problem")
    passages = [Passage(kind, f"{kind} " * 90) for kind in kinds] + [Passage("question", "Who?")]
    drawn = [[task(random.Random(s), passages) for s in range(300)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert all("{" not in text for text in drawn[0])
    for kind in kinds:
        assert sum(f"{kind} {kind}" in text for text in drawn[0]) > 10
    lengths = [len(text) for text in drawn[0]]
    assert min(lengths) < 40 and max(lengths) > 600
    assert {seed(random.Random(s))[0] for s in range(100)} == {
        "english",
        "foreign",
        "problem",
        "code",
        "question",
    }


def test_a_passage_ends_with_a_sentence() -> None:
    assert shortened("One two. Three four. Five", 21) == "One two. Three four."
    assert shortened("Short.", 100) == "Short."
    assert shortened("x" * 50, 20) == "x" * 20


def test_each_kind_of_wave_has_each_temperature() -> None:
    pairs = {(KINDS[w % len(KINDS)], temperature_of(w)) for w in range(3 * len(KINDS))}
    assert pairs >= {(kind, t) for kind in ("turns", "tasks") for t in TEMPERATURES}


def test_a_wave_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = [Text(np.arange(5), 2, "b"), Text(np.arange(70_000, 70_003), 1, "a")]
    write_wave(tmp_path / "wave-00000.npz", texts, {"seed": 4})
    found, record = read_wave(tmp_path / "wave-00000.npz")
    assert [(t.ids.tolist(), t.start, t.kind) for t in found] == [
        (t.ids.tolist(), t.start, t.kind) for t in texts
    ]
    assert record["seed"] == 4
    assert [p.name for p in tmp_path.iterdir()] == ["wave-00000.npz"]


def test_joined_texts_are_conversations() -> None:
    """Opening 1 2, between an answer and the next turn 9 7, end 9."""
    frame = Frame((1, 2), (9, 7), (9,))
    texts = [Text(np.array([1, 2, 20 + i, 3, 30 + i] + [9] * (i % 2)), 4, "") for i in range(8)]
    alone = joined(texts, frame, 100, 0.0, 0)
    assert sorted(len(ids) for ids, _ in alone) == [5] * 4 + [6] * 4
    (whole,) = joined(texts, frame, 100, 1.0, 0)
    ids, weights = whole
    assert ids[:2].tolist() == [1, 2] and (ids[2:] == 1).sum() == 0
    assert (ids == 7).sum() == 7 and (ids == 9).sum() in (7, 8)
    answers = {30 + i for i in range(8)}
    # An end that the target wrote is its own word; one that stands for a cut answer is not.
    ended = {30 + i for i in range(8) if i % 2}
    for place, (token, weight) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        is_own_end = token == 9 and ids[place - 1] in ended
        assert weight == pytest.approx(1.0 if token in answers or is_own_end else 0.2)
    assert max(len(ids) for ids, _ in joined(texts, frame, 12, 1.0, 0)) <= 12


def test_rows_hold_every_token_once() -> None:
    generator = np.random.default_rng(1)
    pieces = [
        (generator.integers(1, 99, n), np.full(n, 1.0, np.float32))
        for n in generator.integers(3, 60, 200)
    ]
    rows = packed(pieces, 64)
    assert int((rows.segment >= 0).sum()) == sum(len(p) for p, _ in pieces)
    assert (rows.segment >= 0).float().mean() > 0.85
    found = []
    for r in range(len(rows)):
        for number in range(int(rows.segment[r].max()) + 1):
            mine = rows.segment[r] == number
            assert rows.position[r][mine].tolist() == list(range(int(mine.sum())))
            found.append(rows.ids[r][mine].tolist())
    assert sorted(found) == sorted(p.tolist() for p, _ in pieces)
    assert not rows.weight[rows.segment < 0].any()


def test_ids_by_frequency() -> None:
    texts = [Text(np.array([5, 5, 5, 7, 7, 2]), 1, "")]
    ranked = by_frequency(texts, 10)
    assert set(ranked[:2].tolist()) == {5, 7} and ranked[-1] == 9
    assert torch.equal(ranked.sort().values, torch.arange(10))


def test_a_curve_finds_the_law_behind_a_log() -> None:
    seconds = [30.0 * i for i in range(1, 12)]
    errors = [0.15 + 2.0 * t**-0.6 for t in seconds]
    curve = fitted(seconds, errors)
    assert curve is not None
    assert curve.error(1320) == pytest.approx(0.15 + 2.0 * 1320**-0.6, abs=2e-3)
    log: list[dict[str, object]] = [
        {"done": s / 330, "seconds": s, "accuracy": [1 - e]}
        for s, e in zip(seconds, errors, strict=True)
    ]
    (line,) = outlook(log)
    assert "0.823 at x4" in line, line
    assert fitted(seconds[:3], errors[:3]) is None
    assert asdict(curve)["floor"] >= 0


@pytest.mark.parametrize(
    ("line", "turns"),
    [
        ({"prompt": "a", "text": "b"}, ["a"]),
        ({"question": "a"}, ["a"]),
        ({"instruction": "a", "input": "b"}, ["a\n\nb"]),
        ({"turns": ["a", "b"]}, ["a", "b"]),
        ({"prompt": "a", "turns": ["b", "c"]}, ["a", "b", "c"]),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                    {"role": "assistant", "content": "no"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "no"},
                ]
            },
            ["a\nb", "c"],
        ),
        ({"body": {"messages": [{"role": "user", "content": "a"}]}}, ["a"]),
        (
            {
                "conversations": [
                    {"from": who, "value": what}
                    for who, what in zip(("human", "gpt") * 3, "axbxcx", strict=True)
                ]
            },
            ["a", "b", "c"],
        ),
    ],
)
def test_every_turn_of_a_user_is_avoided(line: dict[str, object], turns: list[str]) -> None:
    assert turns_of(line) == turns


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"answer": "a"}, "has no prompt"),
        ({"prompt_token_ids": [1, 2]}, "has no text of a user"),
        ({"messages": [{"role": "system", "content": "s"}]}, "has no text of a user"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no turn of a user"),
    ],
)
def test_a_line_without_a_text_to_avoid_is_named(
    line: dict[str, object], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "avoid.jsonl"
    file.write_text('{"prompt": "a"}\n\n' + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"avoid\.jsonl:3: .*{told}"):
        turns_in(file)


class Scribe(Writer):
    """Writes six tokens for each prompt, which is one token of its length."""

    def __init__(self, out: Path, answer: str) -> None:
        self.args = Namespace(out=out, shards=1, batch=3, new_tokens=6, prompt_tokens=9, seed=1)
        self.given, self.passages, self.greedy = [], [], set()
        self.overlapping, self.avoided = 0, Avoided([])
        self.chat: Any = SimpleNamespace(
            prompts=lambda texts: [(len(text),) for text in texts],
            decode=lambda rows: [answer for _ in rows],
            eos_ids=frozenset({0}),
        )

    def params(self, **changed: Any) -> Any:
        return None

    def write(self, wave: int, rows: list[tuple[int, ...]], params: Any) -> list[list[int]]:
        return [[1, 2, 3, 4, 5, 6] for _ in rows]


@pytest.mark.parametrize(("answer", "kind"), [("x", "seeds"), ("x" * 30, "tasks")])
def test_tasks_wait_for_a_passage(answer: str, kind: str, tmp_path: Path) -> None:
    """A passage of one letter is not kept, so its first tasks are requests for passages."""
    assert KINDS[0] == "seeds" and KINDS[2] == "tasks"
    scribe = Scribe(tmp_path, answer)
    assert scribe.wave(0)["kind"] == "seeds"
    record = scribe.wave(2)
    assert record["kind"] == kind and record["texts"] == 3
