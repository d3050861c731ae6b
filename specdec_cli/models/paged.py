"""A transformers model bound to a paged cache: tokens in, logits and hidden states out."""

from typing import Any, NamedTuple

import torch

from specdec_cli.core.batch import (
    ForwardBatch,
    Rectangle,
    Span,
    live_batch,
    make_batch,
    padded_batch,
)
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import SetupError
from specdec_cli.models.attention import PagedAttention, attach
from specdec_cli.models.compiled import CompiledForward
from specdec_cli.models.fused import FusedForward, busy_width
from specdec_cli.models.fused_stack import storages_of
from specdec_cli.models.hidden import HiddenStates, check_hidden_layers
from specdec_cli.models.prompt_passes import PromptGraphs, PromptPasses, Results


class PassOutput(NamedTuple):
    """The logits and hidden states that a pass returns, in the model's dtype.

    logits: [M, V] for the M tokens that need logits; in a padded pass [B, N, V], where N is
        `Rectangle.num_logits`.
    hidden: the hidden states of `PagedModel.hidden_layers` for all tokens, [T, L * H]; in a padded
        pass [B, Q, L * H]. None if no layers are requested.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None


class PagedModel:
    """Runs passes through `module`, keeping keys and values in `cache`.

    vocab_size: the width of the logits.
    foreign_ids: whether passes may contain token ids beyond the vocabulary, as in a draft whose
    target has more padding ids. Such ids are replaced by the last id of the vocabulary.
    fused: if given, runs all passes in place of `module`.
    compiled: if given, runs padded passes.
    num_passes: the number of passes so far, not counting those that replay a CUDA graph.
    hidden_layers: the layers whose hidden states passes also return, counted as in `models.hidden`.
    Set it before a pass is compiled or captured. Setting it raises `SetupError` for layers that the
    model does not have.
    """

    def __init__(
        self,
        module: Any,
        cache: KVCache,
        foreign_ids: bool = False,
        fused: FusedForward | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        self.module = module
        self.cache = cache
        self.vocab_size: int = module.config.vocab_size
        self.foreign_ids = foreign_ids
        self.num_passes = 0
        self.fused = fused
        self.compiled: CompiledForward | None = None
        self._prompts: PromptPasses | None = None
        self._attention = PagedAttention(cache)
        attach(module, self._attention)
        self._states: HiddenStates | None = None
        self.hidden_layers = hidden_layers

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._hidden_layers

    @hidden_layers.setter
    def hidden_layers(self, layers: tuple[int, ...]) -> None:
        check_hidden_layers(self.module, layers)
        if self._states is not None:
            self._states.remove()
        self._hidden_layers = layers
        is_hooked = bool(layers) and self.fused is None
        self._states = HiddenStates(self.module, layers) if is_hooked else None

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def use(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on. Graphs captured over another cache become
        invalid."""
        self.cache = self._attention.cache = cache
        self._prompts = None

    def capture_prompts(self, graphs: PromptGraphs) -> None:
        """Let `prefill` run its passes as CUDA graphs from now on. `graphs` captures them. Do
        nothing if the model has no fused form."""
        if self.fused is not None:
            most = busy_width(self.module)
            self._prompts = graphs.of(self.prompt_pass, self.cache.block_size, most)

    @property
    def mixtures(self) -> FusedForward | None:
        """The fused form of the model, which counts the experts that passes read; None if the model
        has no mixture-of-experts layers or no fused form."""
        return self.fused if self.fused is not None and self.fused.num_mixtures else None

    @property
    def storages(self) -> dict[int, int]:
        found = storages_of([*self.module.parameters(), *self.module.buffers()])
        return found if self.fused is None else found | self.fused.storages

    @torch.inference_mode()
    def forward(
        self, spans: list[Span], logits_per_span: list[int], *, with_hidden: bool = True
    ) -> PassOutput:
        """Run a pass over `spans`. Returns logits [M, V] for the last `logits_per_span[i]` tokens
        of each span i, and hidden states of all tokens if `with_hidden` is true."""
        found = make_batch(spans, logits_per_span, self.cache.block_size, self.device)
        return self._run(found, with_hidden=with_hidden)

    def prefill(
        self,
        spans: list[Span],
        *,
        with_hidden: bool = False,
        num_logits: int = 0,
        draws: SamplingParams | None = None,
    ) -> Results:
        """Run a pass over `spans`. The results are valid until the next call.

        num_logits: M. The last tokens of the first M spans get logits [M, V].
        draws: if given, a pass that runs in `PromptPasses` draws M tokens from the logits, and
            returns the tokens instead. Other passes return logits, and the caller must draw.
        """
        if self._prompts is None or not self._prompts.fits(spans):
            rows = [1] * num_logits + [0] * (len(spans) - num_logits)
            return Results(*self.forward(spans, rows, with_hidden=with_hidden))
        layers = self.hidden_layers if with_hidden else ()
        return self._prompts(spans, layers, num_logits=num_logits, draws=draws)

    def prompt_pass(
        self, batch: ForwardBatch, layers: tuple[int, ...], given: torch.Tensor | None = None
    ) -> Results:
        """Run one prefill pass; `PromptPasses` calls this as its `Body`. Returns the hidden states
        of `layers`, and logits if the batch asks for any."""
        assert given is None
        logits, hidden = self._run(batch, with_hidden=bool(layers))
        return Results(logits if len(logits) else None, hidden)

    @torch.inference_mode()
    def forward_slots(
        self,
        what: Rectangle,
        state: BatchState,
        *,
        with_hidden: bool = True,
        only: tuple[int, ...] | None = None,
    ) -> PassOutput:
        """Run a padded pass over all slots. Keys and values of padding are written to block 0.

        what: the tokens of each slot.
        only: the layers that the pass runs, by index; None for all. A pass of some layers returns
            no hidden states. Raises `SetupError` if the model has no fused form.

        Returns logits [B, N, V], where N is `Rectangle.num_logits`, and hidden states
        [B, Q, L * H].
        """
        batch, width = what.token_ids.shape
        if self.device.type == "cpu" and self.compiled is None:
            logits, hidden = self._run_live(what, state, with_hidden, only)
        else:
            found = padded_batch(what, state, self.cache.block_size, self.vocab_size)
            logits, hidden = self._run(found, self.compiled, with_hidden, only)
        return PassOutput(
            logits.view(batch, -1, logits.shape[-1]),
            None if hidden is None else hidden.view(batch, width, hidden.shape[-1]),
        )

    def _run_live(
        self,
        what: Rectangle,
        state: BatchState,
        with_hidden: bool,
        only: tuple[int, ...] | None,
    ) -> PassOutput:
        """Run a pass over only the live tokens of `what`. The results of padding are zeros."""
        with_hidden = with_hidden and only is None
        found, live = live_batch(what, state, self.cache.block_size, self.vocab_size)
        batch, width = what.token_ids.shape
        num_rows = batch * what.num_logits
        if len(found.token_ids) == batch * width:
            return self._run(found, with_hidden=with_hidden, only=only)
        if len(found.token_ids):
            logits, hidden = self._run(found, with_hidden=with_hidden, only=only)
        else:  # every slot is idle: rounds may start after all sequences have ended
            width_of_states = len(self.hidden_layers) * int(self.module.config.hidden_size)
            logits = torch.zeros(0, self.vocab_size, dtype=self.module.dtype)
            has_hidden = with_hidden and self.hidden_layers
            hidden = logits.new_zeros(0, width_of_states) if has_hidden else None
        whole = logits.new_zeros(num_rows, self.vocab_size)
        whole.index_copy_(0, live.logits, logits)
        if hidden is not None:
            states = hidden.new_zeros(batch * width, hidden.shape[-1])
            hidden = states.index_copy_(0, live.tokens, hidden)
        return PassOutput(whole, hidden)

    def _run(
        self,
        batch: ForwardBatch,
        compiled: CompiledForward | None = None,
        with_hidden: bool = True,
        only: tuple[int, ...] | None = None,
    ) -> PassOutput:
        """Run a pass. Returns logits [M, V] of the rows in `batch.logit_rows`, and hidden states of
        all rows if `with_hidden` is true."""
        self.num_passes += 1
        token_ids = batch.token_ids
        if self.foreign_ids:
            token_ids = token_ids.clamp(max=self.vocab_size - 1)
        if self.fused is not None:
            layers = self.hidden_layers if with_hidden else ()
            return PassOutput(*self.fused(token_ids, batch, self.cache, layers, only))
        if only is not None:
            told = "this model has no fused form, so its passes run all of its layers"
            raise SetupError(told, "propose with a draft model, or take a target of another family")
        self._attention.batch = batch
        try:
            if compiled is not None:
                # Compiled passes always compute hidden states, because leaving them out would take
                # a second compiled version.
                rows = batch.logit_rows
                logits, hidden = compiled(token_ids, batch.positions, rows, self._states)
                return PassOutput(logits, hidden if with_hidden else None)
            out = self.module(
                input_ids=token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=0 if batch.logit_rows is None else batch.logit_rows,
            )
            states = self._states if with_hidden else None
            return PassOutput(out.logits[0], None if states is None else states.take())
        finally:
            self._attention.batch = None
            if self._states is not None:
                self._states.forget()
