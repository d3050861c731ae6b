"""A PARD draft (An et al., arXiv 2504.18583): a draft that proposes all tokens in one pass.

It is the kind `draft`, which also learns the tokens that masks after a true row decide. Masks see
true rows up to their anchor and the masks before them. Fewer anchors have deep masks (conditional
drop). The mask is a token of the target's embedding.
"""

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from scripts.speculators.blocks import attend_both, drawn, thinned
from scripts.speculators.kinds.base import Kind, Link, Options, chained
from scripts.speculators.kinds.draft import Draft
from scripts.speculators.target import Reading, Target, forward

OPTIONS = ("depth", "block", "anchors", "blank")


class Pard(Kind):
    """A draft in training."""

    name = "pard"
    fade = 0.9
    kept = ("mask",)

    def __init__(self, target: Target, options: Options) -> None:
        self.draft = Draft(target, options)
        self.module = self.draft.module
        self.num_links, self.anchors, self.mask = options.block, options.anchors, options.mask

    def prepare(self, reading: Reading) -> None:
        self.draft.prepare(reading)

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        counts = thinned(self.anchors, self.num_links - 1)
        blocks = drawn(reading, counts, 1, generator, is_causal=True, sees_anchor=True)
        rows = reading.rows
        masks = torch.full_like(blocks.column, self.mask)
        ids = torch.cat((rows.ids, masks), 1)
        attend = partial(attend_both, blocks)
        found = forward(self.draft.decoder, ids, blocks.positions, attend).last_hidden_state
        true, deep = (self.draft.scale * found).split((rows.ids.shape[1], masks.shape[1]), 1)
        goal, weight = blocks.goals(0)
        place = blocks.place.repeat(len(rows))
        first = chained([true.flatten(0, 1)], rows, 0)
        return [*first, Link(deep.flatten(0, 1), place, weight, goal)]

    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        self.draft.save(target, ranked, folder)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"spd_type": "pard", "pard_token": self.mask}
        file.write_text(json.dumps(config, indent=2) + "\n")


def make(target: Target, options: Options) -> Pard:
    return Pard(target, options)
