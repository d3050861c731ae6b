"""Weights that a draft borrows from the target: embeddings and head."""

from typing import Any

import torch


def borrowed_weights(
    draft: Any, target: Any, share: tuple[str, ...]
) -> dict[str, torch.nn.Parameter]:
    """The target's weights that the draft module is to use, by their names in the draft.

    Modules are not shared, because those of some families scale their outputs.
    """
    names = {id(module): name for name, module in draft.named_modules()}
    found = {}
    for what in share:
        ours, theirs = (
            m.get_input_embeddings() if what == "embeddings" else m.get_output_embeddings()
            for m in (draft, target)
        )
        found[f"{names[id(ours)]}.weight"] = theirs.weight
    return found
