"""A layer's arguments to attention: one value, from the model to the kernels."""

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """A layer's arguments to attention, the same in every pass."""

    scale: float
    """Positive factor on the scores."""
    sliding_window: int = 0
    """A key is visible iff its position > the query's - window, and < the query's + window where
    rows are not causal; 0 for no window."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 for none."""
    sinks: Tensor | None = None
    """[H], per-head logits that join the softmax and carry no value, as in GPT-OSS."""
    causal: bool = True
    """False: the rows of a pass also see the rows after them, but no padding."""
