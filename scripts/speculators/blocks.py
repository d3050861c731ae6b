"""Rows after anchors that are drawn from the texts: a drafter reads them to propose a block at
once. A row of masks stands some places after its anchor. It sees true rows of its text up to the
anchor, and rows of its own block. Legend: B rows of texts, N tokens a row, Q rows of blocks for
each, H heads, G key and value heads, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.speculators.kinds.base import following
from scripts.speculators.target import Reading

KEPT = 0.8  # share of the anchors with a mask that have one mask more


@dataclass(frozen=True)
class Blocks:
    """Rows of blocks, sorted by place.

    reading: that of the texts. column: int64 [B, Q], the place of each row's anchor in its row of
    texts. place: int64 [Q], 0 at the anchor. sees: bool [B, 1, Q, N + Q], True where a row sees a
    true row, then a row of blocks.
    """

    reading: Reading
    column: Tensor
    place: Tensor
    sees: Tensor

    @property
    def position(self) -> Tensor:
        """int64 [B, Q], positions in the text"""
        return self.reading.rows.position.gather(1, self.column) + self.place

    @property
    def positions(self) -> Tensor:
        """int64 [B, N + Q], those of the true rows, then of these rows"""
        return torch.cat((self.reading.rows.position, self.position), 1)

    def goals(self, shift: int) -> tuple[Tensor, Tensor]:
        """The target's row `shift` rows after each one's place: int64 [B * Q] in the flattened
        batch, and its weight in the loss, fp32 [B * Q], 0 outside the anchor's text."""
        rows = self.reading.rows
        batch, length = rows.ids.shape
        at = self.column + self.place + shift
        inside = at.clamp(0, length - 1)
        is_own = rows.segment.gather(1, inside) == rows.segment.gather(1, self.column)
        weight = following(rows).gather(1, inside) * is_own * (at == inside)
        first = torch.arange(batch, device=at.device)[:, None] * length
        return (inside + first).flatten(), weight.flatten()


def drawn(
    reading: Reading, counts: Sequence[int], first: int, generator: torch.Generator,
    *, is_causal: bool, sees_anchor: bool,
) -> Blocks:  # fmt: skip
    """Blocks after anchors drawn by the weight of the token after them.

    counts: for each place from `first` on, the number of anchors with a row there, so that there
    may be fewer deep rows. is_causal: whether rows see only earlier rows of their block.
    sees_anchor: whether they see the true row of their anchor.
    """
    rows = reading.rows
    device, length = rows.ids.device, rows.ids.shape[1]
    weight = following(rows) + 1e-6  # padding is used if a text has too few
    anchors = torch.multinomial(weight, min(max(counts), length), generator=generator)
    counts = [min(count, length) for count in counts]
    which = torch.cat([torch.arange(count, device=device) for count in counts])
    places = torch.arange(first, first + len(counts), device=device)
    place = places.repeat_interleave(torch.tensor(counts, device=device))
    column = anchors[:, which]
    before = torch.arange(length, device=device) < (column + sees_anchor)[..., None]
    segment = rows.segment.gather(1, column)
    context = before & (rows.segment[:, None] == segment[..., None])
    own = which[:, None] == which
    if is_causal:
        own = own & (place <= place[:, None])
    sees = torch.cat((context, own.expand(len(context), -1, -1)), -1)
    return Blocks(reading, column, place, sees[:, None])


def thinned(count: int, depth: int) -> list[int]:
    """The number of anchors with a mask at each of `depth` places: first `count`, then fewer by a
    share."""
    return [max(1, round(count * KEPT**place)) for place in range(depth)]


def attend(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention [B, Q, H, D] of rows of blocks. q: [B, Q, H, D]. k and v: [B, N + Q, G, D]."""
    groups = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    found = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=blocks.sees, scale=scale
    )
    return found.transpose(1, 2)


def attend_both(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention [B, N + Q, H, D] of true rows, then of blocks. k and v: [B, N + Q, G, D]."""
    count = blocks.reading.rows.ids.shape[1]
    true = blocks.reading.layout.attend(q[:, :count], k[:, :count], v[:, :count], scale)
    return torch.cat((true, attend(blocks, q[:, count:], k, v, scale)), 1)
