"""Ragged paged attention in torch: the CPU path.

The queries of a sequence are the tokens at its last context positions, and their keys are already
in the cache. A `GatherPlan` holds every index and mask of one forward pass, for all of its layers.

Legend: T packed query tokens, B sequences, H query heads, Hkv key heads (each is shared by H // Hkv
consecutive query heads), BS slots per block, C context positions.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.attention.call import AttentionCall, LayerCache, Side

# A batch with at most this many queries per sequence (decoding, scoring) is padded and computed in
# one call. Batches with more (prefill) are computed one sequence at a time, because computing their
# padding would take longer.
FEW_QUERIES = 16
# The overhead of a call in each layer, expressed as a number of keys. All sequences of a call read
# as many keys as its longest sequence has, so a call for similar lengths may be worth its overhead.
_KEYS_PER_CALL = 128
# The maximum number of keys that a call copies, padding included. Larger copies do not fit into the
# processor's cache, and the C library returns their memory to the system after each layer.
_MOST_KEYS = 4096


class View(NamedTuple):
    """The settings that decide which keys a layer's queries see, as in `AttentionCall`."""

    window: int
    causal: bool = True


@dataclass(frozen=True)
class GatherPart:
    """Sequences whose attention is computed in one call. The queries of each sequence are padded to
    length Q, and the keys that they see to length C."""

    first_token: int
    """The index of the part's first packed token."""
    num_sequences: int
    """The number of sequences, n."""
    num_queries: int
    """Q, the largest number of queries that a sequence of the part has."""
    slots: Tensor | slice
    """The cache slots of the keys, [n * C] int64. Padding repeats a slot of the same sequence,
    since an unused slot may hold NaN. If all keys lie in consecutive slots, this is a slice, so
    that reading them needs no copy."""
    mask: Tensor | None
    """[n, Q, C] bool, True where the query sees the key; None if every query sees every key."""
    causal: bool
    """True if the part is a single sequence that has no earlier keys and no window. Its mask is
    then exactly the lower triangle."""
    padded: Tensor | None
    """[n * Q] int64: for each query, including padding, the index of its token within the part.
    None if no sequence is padded."""
    unpadded: Tensor | None
    """[tokens of the part] int64: for each token, its index in `padded`. None if `padded` is
    None."""


@dataclass(frozen=True)
class GatherPlan:
    """The cache slots and masks that attention needs in one forward pass. They are computed when a
    layer first asks for them, and are then kept for the other layers."""

    block_tables: Tensor
    query_lens: list[int]
    context_lens: list[int]
    block_size: int
    ends: list[int] | None = None
    """For each sequence, the end of the keys that non-causal queries see. The rest of its context
    is padding. If None, they see the whole context."""
    parts_by_view: dict[View, list[GatherPart]] = field(default_factory=dict)
    masks: dict[tuple[View, int, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def parts(self, view: View) -> list[GatherPart]:
        found = self.parts_by_view.get(view)
        if found is None:
            sees_all = view.window > 0 and view.window >= max(self.context_lens, default=0)
            found = self.parts(View(0, view.causal)) if sees_all else self._build_parts(view)
            self.parts_by_view[view] = found
        return found

    def mask(self, view: View, part: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of the part with index `part`, in a form that can be added to the scores.

        The mask is [n, 1, group * Q, C] in `dtype`: 0 where the query sees the key, otherwise -inf.
        It is None if every query sees every key.
        """
        key = (view, part, group, dtype)
        if key not in self.masks:
            self.masks[key] = self._build_mask(self.parts(view)[part], group, dtype)
        return self.masks[key]

    def _build_mask(self, part: GatherPart, group: int, dtype: torch.dtype) -> Tensor | None:
        if part.mask is None:
            return None
        mask = torch.zeros(part.mask.shape, dtype=dtype, device=part.mask.device)
        mask = mask.masked_fill_(~part.mask, float("-inf"))
        return mask.repeat(1, group, 1)[:, None]

    def _build_parts(self, view: View) -> list[GatherPart]:
        indices = [b for b, length in enumerate(self.query_lens) if length > 0]
        if max(self.query_lens, default=0) <= FEW_QUERIES:
            batches = self._batches(indices, view)
        else:
            batches = [[b] for b in indices]
        first_token, parts = 0, []
        for batch in batches:
            part = None
            if len(batch) == 1:
                part = self._in_one_piece(batch[0], first_token, view)
            parts.append(part or self._build_part(batch, first_token, view))
            first_token += sum(self.query_lens[b] for b in batch)
        return parts

    def _batches(self, indices: list[int], view: View) -> list[list[int]]:
        """Split `indices` into consecutive batches, each of which is computed in one call. A
        sequence joins the batch before it unless the padding costs more than another call."""
        batches, longest, ends = list[list[int]](), 0, self._ends(view)
        for b in indices:
            keys = ends[b]
            if view.window:
                keys = min(keys, self.query_lens[b] + view.window)
            count = len(batches[-1]) if batches else 0
            wide = max(longest, keys)
            padding = count * (wide - longest) + wide - keys
            if count and padding <= _KEYS_PER_CALL and (count + 1) * wide <= _MOST_KEYS:
                batches[-1].append(b)
                longest = wide
            else:
                batches.append([b])
                longest = keys
        return batches

    def _in_one_piece(self, b: int, first_token: int, view: View) -> GatherPart | None:
        """Return the part for sequence `b` if its keys lie in consecutive slots, otherwise None.

        This is a shortcut for the usual case of a single sequence: the dozen tensor operations of
        `_build_part` would slow down every decoding step.
        """
        num_queries, context = self.query_lens[b], self.context_lens[b]
        older = context - num_queries
        if older < 0 or self._ends(view)[b] < context:
            return None
        first = max(0, older - view.window + 1) if view.window else 0
        begin, end = first // self.block_size, -(-context // self.block_size)
        blocks = self.block_tables[b, begin:end].tolist()
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        first_slot = blocks[0] * self.block_size + first % self.block_size
        num_keys = context - first
        mask = None
        if num_queries > 1 and (view.causal or view.window):
            device = self.block_tables.device
            mask = torch.ones(1, num_queries, num_keys, dtype=torch.bool, device=device)
            mask = mask.tril_(older - first + (0 if view.causal else view.window - 1))
            if view.window:
                mask = mask.triu_(older - first - view.window + 1)
        return GatherPart(
            first_token=first_token,
            num_sequences=1,
            num_queries=num_queries,
            slots=slice(first_slot, first_slot + num_keys),
            mask=mask,
            causal=view.causal and older == 0 and not view.window,
            padded=None,
            unpadded=None,
        )

    def _build_part(self, batch: list[int], first_token: int, view: View) -> GatherPart:
        device = self.block_tables.device
        lens = [self.query_lens[b] for b in batch]
        contexts = [self.context_lens[b] for b in batch]
        ends = [self._ends(view)[b] for b in batch]
        firsts = [0] * len(batch)
        if view.window:
            firsts = [max(0, c - n - view.window + 1) for c, n in zip(contexts, lens, strict=True)]
        num_queries = max(lens)
        num_keys = max(end - first for end, first in zip(ends, firsts, strict=True))

        table = self.block_tables
        if len(batch) < table.shape[0]:
            table = table[torch.tensor(batch, device=device)]
        context = torch.tensor(contexts, device=device)[:, None]
        last = torch.tensor(ends, device=device)[:, None] - 1
        key_position = torch.tensor(firsts, device=device)[:, None] + torch.arange(
            num_keys, device=device
        )
        stored = key_position.clamp(max=last)
        slots = table.gather(1, stored // self.block_size).long()
        slots = slots * self.block_size + stored % self.block_size

        query = torch.arange(num_queries, device=device)
        length = torch.tensor(lens, device=device)[:, None]
        # Every query must see a key, since a softmax over no keys is NaN. A query that pads a
        # sequence to length Q sees the keys of the sequence's last query. A query before the
        # sequence's first token sees the first key.
        query_position = context - length + torch.minimum(query, length - 1)
        query_position = torch.minimum(query_position, last).clamp(min=0)
        ahead = 0 if view.causal else (view.window or num_keys) - 1
        mask = key_position[:, None] <= torch.minimum(query_position + ahead, last)[:, :, None]
        if view.window:
            mask &= key_position[:, None] > query_position[:, :, None] - view.window

        padded = unpadded = None
        if min(lens) < num_queries:
            begin = length.cumsum(0) - length
            padded = (begin + torch.minimum(query, length - 1)).reshape(-1)
            unpadded = (query < length).reshape(-1).nonzero().squeeze(1)
        return GatherPart(
            first_token=first_token,
            num_sequences=len(batch),
            num_queries=num_queries,
            slots=slots.reshape(-1),
            mask=None if bool(mask.all()) else mask,
            causal=view.causal and firsts == [0] and num_queries == num_keys and not view.window,
            padded=padded,
            unpadded=unpadded,
        )

    def _ends(self, view: View) -> list[int]:
        return self.context_lens if view.causal or self.ends is None else self.ends


def gather_plan(
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_size: int,
    slots: Tensor | None = None,
) -> GatherPlan:
    """Make the plan that `gather_attention` needs; the arguments are those of `paged_attention`.

    This copies the lengths to the host. The plan is valid for one forward pass, as long as the
    block tables do not change.
    """
    starts = query_start.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    # A sequence that consists only of padding has a context length of 0. Its queries must still see
    # one key, since a softmax over no keys is NaN.
    contexts, ends = context_lens.clamp(min=1).tolist(), list[int]()
    if slots is not None:
        is_live = (slots >= block_size).tolist()
        for start, end, context in zip(starts, starts[1:], contexts, strict=False):
            padding = [*reversed(is_live[start:end]), True].index(True)
            # At least one key must remain visible, since a softmax over no keys is NaN.
            ends.append(max(1, context - min(padding, max(0, end - start - 1))))
    return GatherPlan(block_tables, query_lens, contexts, block_size, ends or None)


def gather_attention(
    query: Tensor,
    cache: LayerCache,
    plan: GatherPlan,
    call: AttentionCall,
) -> Tensor:
    """Compute `ops.paged_attention` with a plan's slots and masks. The query heads that share a key
    head are stacked as additional queries of that head, so that its keys need not be repeated."""
    (num_tokens, num_heads, dk), (kv_heads, dv) = query.shape, cache.values.shape[2:]
    group = num_heads // kv_heads
    sides = cache.sides
    outs = []
    done = 0
    view = View(call.sliding_window, call.causal)
    for index, part in enumerate(plan.parts(view)):
        n, q_len = part.num_sequences, part.num_queries
        taken = n * q_len if part.unpadded is None else part.unpadded.shape[0]
        q = query
        if taken < num_tokens:
            q = q[part.first_token : part.first_token + taken]
        if part.padded is not None:
            q = q.index_select(0, part.padded)
        if q_len > 1:  # [n, Q, Hkv, G, Dk] -> [n, Hkv, G, Q, Dk]
            q = q.reshape(n, q_len, kv_heads, group, dk).permute(0, 2, 3, 1, 4)
        q = q.reshape(n, kv_heads, group * q_len, dk)
        k, v = (_visible(side, part, q.dtype) for side in sides)
        if call.softcap or call.sinks is not None:
            mask = plan.mask(view, index, group, torch.float32)
            out = _explicit_attention(q, k, v, mask, call)
        elif part.causal:
            # With is_causal, torch skips the upper triangle. This saves more time than it takes to
            # repeat the keys and values for every query head.
            q = q.view(n, num_heads, q_len, dk)
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale)
        else:
            mask = plan.mask(view, index, group, q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
        if q_len > 1:
            out = out.reshape(n, kv_heads, group, q_len, dv).permute(0, 3, 1, 2, 4)
        out = out.reshape(n * q_len, num_heads, dv)
        if part.unpadded is not None:
            out = out.index_select(0, part.unpadded)
        outs.append(out)
        done += taken
    if done < num_tokens:
        outs.append(query.new_zeros((num_tokens - done, num_heads, dv)))
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs)


def _visible(side: Side, part: GatherPart, dtype: torch.dtype) -> Tensor:
    """Return the keys or values that a part's queries see, [n, Hkv, C, D] in `dtype`."""
    slots, sizes = part.slots, side.pool.shape[2:]
    pool = side.pool.view(1, -1, *sizes)
    if isinstance(slots, slice):
        found = pool[:, slots]
    else:
        found = pool.index_select(1, slots).view(part.num_sequences, -1, *sizes)
    return side.decoded(found, dtype).transpose(1, 2)


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall
) -> Tensor:
    """Compute attention in fp32, with softcap and sinks, which torch's
    scaled_dot_product_attention does not support.

    Shapes: q [n, Hkv, G * Q, Dk], k [n, Hkv, C, Dk], v [n, Hkv, C, Dv], mask [n, 1, G * Q, C]; G is
    the number of query heads per key head. A mask of None hides nothing. Returns
    [n, Hkv, G * Q, Dv] in the dtype of `q`.
    """
    n, kv_heads, rows, _ = q.shape
    scores = q.float() @ k.float().transpose(2, 3) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if call.sinks is None:
        weights = torch.softmax(scores, dim=3)
    else:
        group = call.sinks.shape[0] // kv_heads
        sink = call.sinks.float().view(1, kv_heads, group, 1).expand(n, -1, -1, rows // group)
        scores = torch.cat([scores, sink.reshape(n, kv_heads, rows, 1)], dim=3)
        weights = torch.softmax(scores, dim=3)[..., :-1]
    return (weights @ v.float()).to(q.dtype)
