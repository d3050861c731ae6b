"""Texts on disk, and as packed rows of one length for training.

A wave is a file of texts that were written together. Legend: R rows, N tokens a row.
"""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

USER, ANSWER = 0.2, 1.0  # weights of a user's tokens and of the target's in the loss
HELD_OUT = 50  # one text of this many is held out


@dataclass(frozen=True)
class Text:
    """Token ids [T]; those from `start` on are the target's answer. kind: of the prompt."""

    ids: npt.NDArray[np.int64]
    start: int
    kind: str


@dataclass(frozen=True)
class Frame:
    """The chat template's ids: before the first message, and between an answer and the next one.

    Both are empty without a template; then texts are not joined. vocab_size: of the target that
    wrote the texts; 0 if it was not kept.
    """

    opening: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    vocab_size: int = 0

    @classmethod
    def of(cls, path: Path) -> "Frame":
        kept = json.loads(path.read_text())
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()})


def write_wave(path: Path, texts: list[Text], record: dict[str, Any]) -> None:
    """Write texts and the wave's record at once: the file is there as a whole or not at all."""
    flat = np.concatenate([t.ids for t in texts]) if texts else np.zeros(0, np.int64)
    kinds = sorted({t.kind for t in texts})
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez(
            file,
            ids=flat.astype(np.uint32),
            lengths=np.array([len(t.ids) for t in texts], np.int32),
            starts=np.array([t.start for t in texts], np.int32),
            kinds=np.array([kinds.index(t.kind) for t in texts], np.uint8),
            record=np.array(json.dumps(record | {"kinds": kinds})),
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_wave(path: Path) -> tuple[list[Text], dict[str, Any]]:
    with np.load(path, allow_pickle=False) as stored:
        record = json.loads(str(stored["record"]))
        ends = stored["lengths"].cumsum()
        rows = np.split(stored["ids"].astype(np.int64), ends[:-1]) if len(ends) else []
        kinds = [record["kinds"][k] for k in stored["kinds"]]
        starts = stored["starts"].tolist()
    return [Text(*row) for row in zip(rows, starts, kinds, strict=True)], record


def read_texts(folder: Path, vocab_size: int) -> tuple[list[Text], list[Text], Frame]:
    """Texts to train on, held-out texts, and the frame of conversations.

    vocab_size: of the target that reads them. Raises `ValueError` for a folder without texts, or
    with those of another vocabulary.
    """
    kept: list[Text] = []
    held: list[Text] = []
    for path in sorted(folder.glob("wave-*.npz")):
        for place, text in enumerate(read_wave(path)[0]):
            (held if place % HELD_OUT == 0 else kept).append(text)
    if not kept:
        raise ValueError(f"{folder} has no texts: run texts.py first")
    frame = Frame.of(folder / "frame.json")
    if frame.vocab_size not in (0, vocab_size):
        raise ValueError(
            f"{folder} has texts of a target with {frame.vocab_size} ids, and this one has "
            f"{vocab_size}: name the texts of this target"
        )
    return kept, held, frame


@dataclass(frozen=True)
class Rows:
    """Texts packed into rows. ids: int64 [R, N]. segment: int64 [R, N], a number for each text of a
    row. position: int64 [R, N], in its text. weight: fp32 [R, N], in the loss; 0 is padding."""

    ids: Tensor
    segment: Tensor
    position: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: Tensor, device: torch.device) -> "Rows":
        """The rows at `places`, on `device`."""
        picked = (t[places] for t in (self.ids, self.segment, self.position, self.weight))
        ids, segment, position, weight = (t.to(device, non_blocking=True) for t in picked)
        return Rows(ids.long(), segment.long(), position.long(), weight.float())


def joined(texts: list[Text], frame: Frame, length: int, share: float, seed: int) -> list[Any]:
    """Texts as (ids, weights), in random order, with at most `length` tokens each. A `share` of
    them begins conversations, to which further texts are added while they fit."""
    rng = random.Random(seed)
    order = list(texts)
    rng.shuffle(order)
    found: list[Any] = []
    while order:
        text = order.pop()
        ids, weights = weighted(text)
        if frame.between and rng.random() < share:
            opening = len(frame.opening)
            while order and len(ids) + len(order[-1].ids) + len(frame.between) <= length:
                if tuple(order[-1].ids[:opening]) != frame.opening:
                    break
                is_ended = int(ids[-1]) in frame.ends
                cut = len(ids) - is_ended
                more, their = weighted(order.pop())
                between = np.array(frame.between, np.int64)
                ids = np.concatenate((ids[:cut], between, more[opening:]))
                middle = np.full(len(between), USER, np.float32)
                if is_ended:
                    middle[0] = ANSWER
                weights = np.concatenate((weights[:cut], middle, their[opening:]))
        found.append((ids[:length], weights[:length]))
    return found


def weighted(text: Text) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    weights = np.full(len(text.ids), ANSWER, np.float32)
    weights[: text.start] = USER
    return text.ids, weights


def packed(pieces: list[Any], length: int, open_rows: int = 64) -> Rows:
    """`pieces` of (ids, weights), packed into rows of `length`. Each goes into the first open row
    with room."""
    rows: list[list[Any]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of open rows
    for piece in pieces:
        size = len(piece[0])
        place = next((i for i, (left, _) in enumerate(room) if left >= size), None)
        if place is None:
            rows.append([])
            room.append((length, len(rows) - 1))
            place = len(room) - 1
            if len(room) > open_rows:
                room.remove(min(room))
                place = len(room) - 1
        left, row = room[place]
        rows[row].append(piece)
        room[place] = (left - size, row)
        if left - size < 16:
            room.pop(place)
    ids = np.zeros((len(rows), length), np.int32)
    segment = np.full((len(rows), length), -1, np.int16)
    position = np.zeros((len(rows), length), np.int16)
    weight = np.zeros((len(rows), length), np.float16)
    for r, row in enumerate(rows):
        at = 0
        for number, (piece, weights) in enumerate(row):
            to = at + len(piece)
            ids[r, at:to], weight[r, at:to], segment[r, at:to] = piece, weights, number
            position[r, at:to] = np.arange(len(piece))
            at = to
        position[r, at:] = np.arange(length - at)
    return Rows(*(torch.from_numpy(a) for a in (ids, segment, position, weight)))


def by_frequency(texts: list[Text], vocab_size: int) -> Tensor:
    """int64 [V]: ids in the order of their frequency in the texts, the most frequent first."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.ids, minlength=vocab_size)
    return torch.from_numpy(np.argsort(-counts, kind="stable"))
