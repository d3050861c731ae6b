"""Forward passes of llama-like decoders in a few large kernels.

On CUDA the original module keeps working: its weights become views of the merged ones. On a CPU
large weights are packed, and the module's own weights are freed. Legend: T packed tokens.
"""

from typing import Any

import torch
from specdec_kernels import ops
from specdec_kernels.linear.reference import Normed
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.attention import Recorder, attach
from specdec_cli.models.fused_layer import (
    FusedLayer,
    family_of,
    fusable_family,
    has_experts,
    matrices,
    merged,
    numbers_multiplied,
)
from specdec_cli.models.fused_stack import FusedStack, storages_of
from specdec_cli.models.gate import batched_experts
from specdec_cli.models.held import LARGE, StoredParameter, return_unused
from specdec_cli.models.prompt_passes import width_busy_with
from specdec_cli.models.rotary_tables import turn_whole_heads, turns_of
from specdec_cli.models.split_products import SplitProducts


class FusedForward:
    """The fused forward pass of a model, created by `fuse`.

    max_len: the number of positions that passes may use.
    parallel: the ranks over which the module is split.
    experts_read: int32 [L], one entry per layer: the number of distinct experts whose weights the
        last pass read; 0 for a layer without experts.
    num_mixtures: the number of layers with experts.
    """

    def __init__(self, module: Any, max_len: int, parallel: TensorParallel = ALONE) -> None:
        family = fusable_family(module)
        if family.turns_partly:
            turn_whole_heads(module)
        self.cos, self.sin, turns = turns_of(module, max_len)
        layers = module.model.layers
        # Align rows to 16 bytes, because Triton would recompile kernels for unaligned addresses.
        read = torch.zeros(len(layers), 4, dtype=torch.int32, device=module.device)
        self.experts_read = read[:, 0]
        self.num_mixtures = sum(map(has_experts, layers))
        following = [*(layer.input_layernorm for layer in layers[1:]), module.model.norm]
        fused: list[FusedLayer] = []
        for index, call in enumerate(_recorded_calls(module)):
            place = index, turns[index], call, following[index], read[index, :1]
            fused.append(FusedLayer.of_layer(layers[index], module.config, family, *place))
            # Return free memory to the device, as the loader does. Otherwise the next layer would
            # be allocated in fragments of the freed buffers, which would then stay reserved.
            if sum(p.numel() for p in layers[index].parameters()) >= LARGE:
                return_unused(module.device)
        # Keep the head's weight: a tied head is also the embedding, and drafts may borrow it.
        self.head = merged([module.lm_head.weight], keep=True)
        self.head_bias: Tensor | None = module.lm_head.bias
        self.embedding: Tensor = module.model.embed_tokens.weight
        is_tied = module.lm_head.weight is module.model.embed_tokens.weight
        if is_tied and isinstance(self.head, Tensor):
            self.embedding = self.head
        width = self.embedding.shape[1]
        root = torch.tensor(width**0.5, dtype=module.dtype).item()
        self.embedding_scale = root if family.is_gemma else 1.0
        self.logit_softcap: float | None = None
        if family.caps_logits:
            self.logit_softcap = module.config.final_logit_softcapping
        vocab_size = int(module.config.vocab_size)
        split = SplitProducts.over(parallel, width, vocab_size, module.dtype)
        self.stack = FusedStack(fused, split, len(set(turns)))
        self._parts: dict[tuple[int, ...], FusedStack] = {}

    @property
    def storages(self) -> dict[int, int]:
        """The size in bytes of each memory block that the model uses. Keys are addresses, or ids of
        Python objects for packed weights."""
        return storages_of([self.cos, self.sin, self.head, self.embedding, *self.stack.held])

    def __call__(
        self,
        token_ids: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        hidden_layers: tuple[int, ...] = (),
        only: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass. Return the logits [M, V] of the batch's logit rows, and the hidden states
        [T, L * H] of the L layers in `hidden_layers`, or None if `hidden_layers` is empty.

        only: the layers that the pass runs, instead of all. It then returns no hidden states.
        """
        stack = self.stack
        if only is not None:
            if only not in self._parts:
                self._parts[only] = self.stack.only(only)
            stack, hidden_layers = self._parts[only], ()
        first = stack.layers[0]
        states: dict[int, Tensor] = {}

        def keep(layer: int, x: Normed) -> Normed:
            if layer in hidden_layers:
                states[layer] = x.hidden
            return x

        x = stack.run(
            ops.embed(
                *(token_ids, batch.positions, self.embedding, self.cos, self.sin),
                *(first.attention_norm, first.eps, self.embedding_scale),
            ),
            *(batch, cache, keep),
        )
        hidden = self._hidden(x, states, hidden_layers) if hidden_layers else None
        if batch.logit_rows is not None:
            x = x.take(batch.logit_rows)
        logits = self.stack.split.logits(x, self.head, self.head_bias)
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits, hidden

    def _hidden(self, x: Normed, states: dict[int, Tensor], layers: tuple[int, ...]) -> Tensor:
        """Return the hidden states [T, L * H] of `layers`. states: the recorded inputs of layers,
        keyed by the layer's index. x: the last layer's output."""
        count, last = len(self.stack.layers), self.stack.layers[-1]
        if count in layers and x.squares is None:
            states[count] = x.scaled
        elif count in layers:
            states[count] = ops.rms_norm(x.hidden, last.following_norm, last.eps)
        return torch.cat([states[layer] for layer in layers], dim=1)


def busy_width(module: Any) -> int:
    """Return the largest width (padded number of tokens) at which a CUDA graph makes a pass faster.
    At larger widths the GPU takes longer to run the pass than the host takes to queue its kernels,
    so a graph would not save time. The module may be on meta."""
    family, layers = fusable_family(module), module.model.layers
    numbers = sum(numbers_multiplied(layer, module.config, family) for layer in layers)
    return width_busy_with(numbers / len(layers))


def fuse(module: Any, max_len: int, parallel: TensorParallel = ALONE) -> FusedForward | None:
    """Return the fused form of a loaded model, or None if its family has none."""
    return FusedForward(module, max_len, parallel) if family_of(module) is not None else None


def bytes_held_twice(module: Any, *, splits_embedding: bool = False) -> int:
    """Return the size in bytes of the weights that `fuse` keeps both packed and unpacked on a CPU.
    Each weight is counted once. The module may be on meta.

    splits_embedding: whether the head is a view of a part of the embedding. Its unpacked form is
        then one more copy.
    """
    groups = [group for layer in module.model.layers for group in matrices(layer)]
    merged = [sum(p.numel() for p in m) for m in groups if not isinstance(m[0], StoredParameter)]
    twice = [n for n in merged if all(ops.forms_of(n, module.dtype))]
    head = module.lm_head.weight
    forms = ops.forms_of(head.numel(), module.dtype)
    copies = forms.packed + (forms.plain and splits_embedding)
    twice += [head.numel()] * (0 if isinstance(head, StoredParameter) else copies)
    return sum(twice) * int(module.dtype.itemsize)


@torch.inference_mode()
def _recorded_calls(module: Any) -> list[ops.AttentionCall]:
    """Run a pass through the original layers and return the arguments that each layer passes to
    attention. They are recorded in a real pass, because the attributes of the attention modules may
    differ from them."""
    recorder = Recorder()
    attach(module, recorder)
    token = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    with batched_experts(module):
        module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    calls = {layer: call for layer, _, call in recorder.calls}
    return [calls[layer] for layer in range(len(calls))]
