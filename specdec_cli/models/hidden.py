"""Record the hidden states of transformers' own modules, for drafts that read them.

State 0 is the output of the embedding, state i is the input of layer i, and the last state is the
output of the final norm. Fused passes (`models.fused`) record hidden states themselves.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.errors import SetupError


def check_hidden_layers(module: Any, layers: tuple[int, ...]) -> None:
    """Raise `SetupError` unless `module` has the hidden states `layers`, with one vector of
    `hidden_size` values per token. For example, gemma3n has several vectors per token, and
    OPT-350m's embeddings have another width."""
    if not layers:
        return
    config = module.config
    kind, last = config.model_type, config.num_hidden_layers
    for layer in layers:
        if not 0 <= layer <= last:
            raise SetupError(
                f"there is no hidden state {layer}: this {kind} has {last} layers",
                f"0 is the embedding output and {last} the output of the final norm",
            )
    if getattr(config, "altup_num_inputs", 1) > 1:
        raise SetupError(f"hidden states of {kind} cannot be used: there are several per token")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise SetupError(
            f"hidden states of this {kind} cannot be used: embeddings and layers differ in width"
        )


class HiddenStates:
    """Records hidden states with hooks while `module` runs. Make this object before a pass is
    compiled, because compiled passes ignore hooks that are registered later."""

    def __init__(self, module: Any, layers: tuple[int, ...]) -> None:
        decoder, stack = _decoder_of(module)
        last = len(stack)
        self._layers = layers
        self._states: dict[int, Tensor] = {}
        self._hooks = [
            stack[layer].register_forward_pre_hook(partial(_keep, self._states, layer))
            for layer in sorted(set(layers) - {last})
        ]
        if last in layers:
            self._hooks.append(decoder.register_forward_hook(partial(_keep, self._states, last)))

    def take(self) -> Tensor:
        """Return the states [T, L * H] of the pass that just ran, side by side in the requested
        order, and forget them."""
        taken = torch.cat([self._states[layer] for layer in self._layers], dim=-1)
        self.forget()
        return taken[0]

    def forget(self) -> None:
        """Drop the states that a failed pass has recorded, because the next compiled pass expects
        to start with none."""
        self._states.clear()

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()


def _decoder_of(module: Any) -> tuple[nn.Module, nn.ModuleList]:
    """Return a module's decoder, which runs the layers and the final norm, and the decoder's list
    of layers."""
    count = module.config.num_hidden_layers
    return next(
        (owner, child)
        for owner in module.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    )


def _keep(
    states: dict[int, Tensor], layer: int, _: Any, args: tuple[Any, ...], output: Any = None
) -> None:
    """Store a hidden state. A hook before a layer stores the layer's input. A hook after the
    decoder, which also gets `output`, stores the last hidden state."""
    states[layer] = args[0] if output is None else output.last_hidden_state
