"""Passes over every token of a rectangle, padding included: fixed shapes, as graphs need them."""

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, Rectangle
from specdec_cli.core.state import BatchState


class PaddedBatches:
    """Makes the batches of one model's passes; keeps what depends on shapes alone."""

    def __init__(self) -> None:
        self._rectangles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def batch(
        self, what: Rectangle, state: BatchState, block_size: int, num_ids: int
    ) -> ForwardBatch:
        """A pass over all of `what`; keys and values of padding go to the trash block.

        num_ids: size of the model's vocabulary; token ids are clamped into it.
        """
        count, width = what.token_ids.shape
        ids, positions, kv_slots, context_lens = ops.padded_pass(
            what.token_ids,
            state.length,
            what.lens,
            state.active,
            state.block_tables,
            what.offset,
            what.margin,
            block_size,
            what.max_len,
            num_ids,
        )
        query_start, last_rows = self._rectangle(count, width, state.device)
        plan = None
        if state.device.type == "cpu":
            where = state.block_tables, query_start, context_lens
            plan = ops.gather_plan(*where, block_size, kv_slots)
        return ForwardBatch(
            token_ids=ids,
            positions=positions,
            slots=kv_slots,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=state.block_tables,
            max_query_len=width,
            logit_rows=last_rows if what.last_only and width > 1 else None,
            plan=plan,
        )

    def _rectangle(
        self, count: int, width: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows where each sequence's queries begin, int32 [B + 1], and its last row, int64 [B]."""
        if (count, width) not in self._rectangles:
            starts = width * torch.arange(count + 1, device=device)
            self._rectangles[count, width] = (starts.to(torch.int32), starts[1:] - 1)
        return self._rectangles[count, width]
