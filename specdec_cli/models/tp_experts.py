"""Experts split over ranks by the features inside them, as a dense MLP is split.

Each rank holds a part of every expert, and one sum over ranks ends the layer. With whole experts on
each rank a pass would last as long as on the rank with most of the chosen ones: of 8 among 128, 4
ranks hold 2 on average, and that rank 3.5. The price is narrower matrices: 96 features of an expert
of 768 on 8 ranks. Routers are whole, so all ranks choose the same experts without a message.
"""

from typing import Any

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.models.refusals import Indivisible
from specdec_cli.models.weights import Part

# The bias of what experts write is not a part of a product, so one rank adds it.
ADDED_ONCE = "down_proj_bias"


def parts_of_experts(experts: Any, parallel: TensorParallel, name: str) -> dict[str, Part]:
    """This rank's parts of a module of stacked experts, by its names. Raises `Indivisible`."""
    # [experts, written, read], or with `is_transposed` [experts, read, written].
    read = 1 if experts.is_transposed else 2
    width = int(experts.down_proj.shape[read])
    if width % parallel.size:
        raise Indivisible(name, f"{width} features inside an expert", parallel.size)
    start, stop = parallel.share(width)

    def of_both(tensor: Any, dim: int) -> Part:
        """The part of gate and up, which lie one after the other or in turn."""
        shape = tuple(tensor.shape)
        if experts.is_concatenated:
            return Part(dim, start, stop, shape, blocks=2)
        return Part(dim, 2 * start, 2 * stop, shape)

    parts = {
        "gate_up_proj": of_both(experts.gate_up_proj, 3 - read),
        "down_proj": Part(read, start, stop, tuple(experts.down_proj.shape)),
    }
    if experts.has_bias:
        parts["gate_up_proj_bias"] = of_both(experts.gate_up_proj_bias, 1)
    return parts
