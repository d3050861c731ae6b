"""Prefill passes that are padded to one of a few widths and captured as CUDA graphs.

The device runs a short pass faster than the host can queue its kernels one by one, while a graph
queues all of them at once. So the first pass of each width runs eagerly and is then captured, and
later passes replay the graph. The inputs and results of a pass are at fixed addresses outside the
graphs' memory pool. Graphs therefore need not preserve anything in the pool, and several models can
share one pool. Legend: W width of a pass (its padded number of tokens), B maximum number of
sequences.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from specdec_kernels.compile_ahead import is_ahead
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch, Span
from specdec_cli.core.garbage import garbage_stays
from specdec_cli.core.packed import PackedInputs, Tokens
from specdec_cli.core.sampling import next_tokens
from specdec_cli.core.state import slot_counts
from specdec_cli.core.types import SamplingParams

WIDTHS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)


def width_of(num_tokens: int) -> int | None:
    """Return the width to which a pass over `num_tokens` tokens is padded, or None if it is too
    long to be padded."""
    place = bisect_left(WIDTHS, num_tokens)
    return WIDTHS[place] if place < len(WIDTHS) else None


# The number of multiplications that a GPU does while the host queues one layer's kernels. This
# takes a host 0.4 to 0.9 ms, and an H200 does 350 multiplications per picosecond.
_WHILE_QUEUED = 2.5e11


def width_busy_with(numbers: float) -> int:
    """Return the largest width at which a graph saves time. Wider passes keep the GPU busy while
    the host queues kernels, so padding them would only cost time.

    numbers: the number of weights per layer.
    """
    return max((w for w in WIDTHS if w * numbers <= _WHILE_QUEUED), default=WIDTHS[0])


class Results(NamedTuple):
    """The results of a pass. Results that are not requested are None.

    logits: [M, V], for the last tokens of the first M sequences.
    hidden: [T, F], hidden states of all tokens.
    tokens: int64 [M], drawn from the logits. If tokens are drawn, `logits` is None.
    told: int64 [B], a buffer on the host whose first M entries are the same tokens. It contains
        them from the end of this pass until the end of the second pass after it, which reuses the
        buffer.

    If a `Body` returns them, `logits` and `hidden` include rows of padding.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None
    tokens: Tensor | None = None
    told: Tokens | None = None


# A function that runs a pass over a batch. Its second argument, `kind`, says which results are
# requested. The third, `given`, is an additional input for each token, such as the target's
# features, [W, ...]; None if there is none. The host must not read any tensor during the pass.
Body = Callable[[ForwardBatch, Any, Tensor | None], Results]


class PromptGraphs:
    """The prefill passes of an engine's models, and the memory that their graphs share.

    num_tokens: the maximum number of tokens in a padded pass; longer passes are not padded.
    num_sequences: the maximum number of sequences in a padded pass.
    num_columns: the number of columns of the block tables.
    is_captured: whether padded passes are captured; tests also run them without graphs.
    """

    def __init__(
        self,
        num_tokens: int,
        num_sequences: int,
        num_columns: int,
        device: torch.device,
        is_captured: bool = True,
    ) -> None:
        self.num_tokens = width_of(num_tokens) or WIDTHS[-1]
        self.num_sequences = num_sequences
        self.num_columns = num_columns
        self.device = device
        self._is_captured = is_captured
        self._passes: list[PromptPasses] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def of(self, body: Body, block_size: int, most: int = WIDTHS[-1]) -> "PromptPasses":
        """Make the `PromptPasses` of one model.

        block_size: the number of tokens in a block of the model's cache.
        most: the model's own limit for the number of tokens in a padded pass.
        """
        sizes = min(most, self.num_tokens), self.num_sequences, self.num_columns
        self._passes.append(PromptPasses(self, body, PackedInputs(*sizes, block_size, self.device)))
        return self._passes[-1]

    @property
    def largest(self) -> list[int]:
        """The number of tokens in the largest captured pass of each model, in ascending order."""
        return sorted({passes.inputs.num_tokens for passes in self._passes})

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """Capture `run` as a CUDA graph. Returns None without capturing if `is_captured` is false,
        or in the dry run of `compile_ahead`. `run` must have run before, so that its kernels are
        compiled."""
        if not self._is_captured or is_ahead():  # a dry run only compiles, so capture nothing
            return None
        if self._stream is None:  # one stream for all: cuBLAS keeps a workspace for each stream
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Unlike `torch.cuda.graph`, do not collect garbage before the capture, which would take
        # longer than the capture, and do not free memory, which the next pass needs again. Collect
        # no garbage during the capture either: freeing another graph, for example, could abort it.
        with torch.cuda.stream(self._stream), garbage_stays():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph

    def close(self) -> None:
        """Free the graphs and the memory that they hold. Later passes are captured again."""
        for passes in self._passes:
            passes.close()
        self._pool = self._stream = None


@runtime_checkable
class Captures(Protocol):
    """A model whose prefill passes can be captured."""

    def capture_prompts(self, graphs: PromptGraphs) -> None: ...


class PromptPasses:
    """The prefill passes of one model. `PromptGraphs.of` makes them."""

    def __init__(self, graphs: PromptGraphs, body: Body, inputs: PackedInputs) -> None:
        self.inputs = inputs
        self._graphs = graphs
        self._body = body
        self._given: Tensor | None = None
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Results]] = {}
        # Pad the number of rows with logits to one of the batch sizes that decoding rounds use,
        # because the kernels for those sizes are already compiled.
        counts = (0, *slot_counts(inputs.num_sequences))
        self._num_rows = [
            next(n for n in counts if n >= count) for count in range(inputs.num_sequences + 1)
        ]

    def fits(self, spans: list[Span]) -> bool:
        """Return True if `spans` are few and short enough for a padded pass."""
        count = sum(stop - start for _, start, stop in spans)
        most = min(self._graphs.num_tokens, self.inputs.num_tokens)
        return count <= most and len(spans) <= self.inputs.num_sequences

    def __call__(
        self,
        spans: list[Span],
        kind: Hashable = None,
        *,
        given: Tensor | None = None,
        shift: int = 0,
        num_logits: int = 0,
        draws: SamplingParams | None = None,
    ) -> Results:
        """Run a pass over `spans`. Its results are valid until the next pass.

        kind: passed on to the `Body`. given: [T, ...], an additional input for each token. shift:
        as in `PackedInputs.fill`. num_logits, draws: as in `PagedModel.prefill`.
        """
        count = sum(stop - start for _, start, stop in spans)
        width = width_of(count)
        assert width is not None
        self.inputs.fill(spans, width, shift, draws.seed if draws is not None else 0)
        if given is not None:
            self._give(given, count)
        num_rows = self._num_rows[num_logits]
        key = (width, kind, num_rows, draws.filters if draws is not None and num_rows else None)
        told = self.inputs.told
        if (made := self._captured.get(key)) is not None:
            graph, (logits, hidden, tokens, _) = made
            graph.replay()
            self.inputs.passed()
        else:
            logits, hidden, tokens, _ = self._first(key, draws)
        # Slice only if necessary: for a tensor that was not used for a while, it takes the host
        # 70 us.
        if num_rows != num_logits:
            logits, tokens = (None if t is None else t[:num_logits] for t in (logits, tokens))
        if width != count and hidden is not None:
            hidden = hidden[:count]
        return Results(logits, hidden, tokens, None if tokens is None else told)

    @torch.inference_mode()
    def _give(self, given: Tensor, count: int) -> None:
        """Copy the additional input of the first `count` tokens to the fixed address that graphs
        read."""
        if self._given is None:
            self._given = given.new_zeros(self.inputs.num_tokens, *given.shape[1:])
        self._given[:count].copy_(given)

    @torch.inference_mode()
    def _first(
        self, key: tuple[int, Hashable, int, object], draws: SamplingParams | None
    ) -> Results:
        """Run the first pass with this `key` eagerly, then capture it for later ones."""
        width, kind, num_rows, _ = key

        def run() -> Results:
            self.inputs.fetch()
            rows = None if self._given is None else self._given[:width]
            found = self._body(self.inputs.batch(width, num_rows), kind, rows)
            if draws is not None and found.logits is not None:
                found = Results(None, found.hidden, self._drawn(found.logits, draws))
            logits, hidden, tokens = map(self._keep, Results._fields[:3], found[:3])
            self.inputs.tell(tokens)
            return Results(logits, hidden, tokens)

        results = run()
        if not is_ahead():  # a dry run only compiles and launches no pass
            self.inputs.passed()
        if (captured := self._graphs.capture(run)) is not None:
            self._captured[key] = captured, results
        return results

    def _drawn(self, logits: Tensor, params: SamplingParams) -> Tensor:
        """Draw the next tokens of the first sequences, whose prompts end in this pass."""
        inputs, count = self.inputs, len(logits)
        lengths = inputs.context_lens[:count].long()
        return next_tokens(logits, params, inputs.seed, inputs.index[:count], lengths)

    def _keep(self, name: str, result: Tensor | None) -> Tensor | None:
        """Copy `result` to a buffer that no graph overwrites, and return the copy."""
        if result is None:
            return None
        rows, *features = result.shape
        key = (name, *features)
        if key not in self._kept:
            most = self.inputs.num_tokens if name == "hidden" else self.inputs.num_sequences
            self._kept[key] = result.new_zeros(most, *features)
        return self._kept[key][:rows].copy_(result)

    def close(self) -> None:
        """Free the graphs and the results."""
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured.clear()
        self._kept.clear()
        self._given = None
