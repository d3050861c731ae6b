"""The products of a decoder layer on CUDA: choose a kernel, or the library.

Norm, gate and sum are fused into the products around them.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.linear.cublas import linear_without_workspace
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.norm_triton import add_norm_triton, gate_triton
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.reference import Normed, linear_reference, norm_linear_reference
from specdec_kernels.linear.stored import Stored
from specdec_kernels.linear.tiles import FEW_ROWS, choose_row_tiles, choose_tiles

Product = Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(kind: str, x: Tensor, weight: Tensor) -> Product | None:
    """The kernel for a product of `kind` "norm", "gate" or "add", configured; None for cuBLAS."""
    row_tiles = choose_row_tiles(kind, x, weight)
    if row_tiles is not None:
        return partial(one_row_linear, tiles=row_tiles)
    tiles = choose_tiles(kind, x, weight)
    return None if tiles is None else partial(few_rows_linear, tiles=tiles)


def chosen(kind: str, x: Tensor, weight: Tensor | Stored) -> tuple[Product | None, Tensor]:
    """As `kernel_for`, and the weight as that kernel reads it."""
    if not isinstance(weight, Tensor):
        weight = weight.plain(x.dtype)
    return kernel_for(kind, x, weight), weight


def norm_linear_triton(
    x: Normed, weight: Tensor | Stored, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """See `ops.norm_linear`."""
    product, plain = chosen("norm", x.scaled, weight)
    return norm_linear_by(product, x, plain, bias, into)


def norm_linear_by(
    product: Product | None,
    x: Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """`ops.norm_linear` by a kernel from `kernel_for`."""
    if product is None:
        return norm_linear_reference(x, weight, bias, into)
    return product(x.scaled, weight, squares=x.squares, eps=x.eps, bias=bias, into=into)[0]


def norm_gate_up_triton(x: Normed, weight: Tensor | Stored, activation: str = "silu") -> Tensor:
    """See `ops.norm_gate_up`."""
    product, plain = chosen("gate", x.scaled, weight)
    return norm_gate_up_by(product, x, plain, activation)


def norm_gate_up_by(
    product: Product | None, x: Normed, weight: Tensor, activation: str = "silu"
) -> Tensor:
    """`ops.norm_gate_up` by a kernel from `kernel_for`."""
    if product is None:
        assert x.squares is None
        return gate_triton(linear_without_workspace(x.scaled, weight), activation)
    return product(x.scaled, weight, squares=x.squares, eps=x.eps, activation=activation)[0]


def linear_triton(
    x: Tensor, weight: Tensor | Stored, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """See `ops.linear`."""
    product, plain = chosen("add", x, weight)
    if product is None:
        return linear_reference(x, plain, bias, into)
    return product(x, plain, bias=bias, into=into)[0]


def linear_add_norm_triton(
    x: Tensor,
    weight: Tensor | Stored,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """See `ops.linear_add_norm`."""
    product, plain = chosen("add", x, weight)
    return linear_add_norm_by(product, x, plain, residual, norm_weight, eps, bias)


def linear_add_norm_by(
    product: Product | None,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """`ops.linear_add_norm` by a kernel from `kernel_for`."""
    if product is None:
        return add_norm_triton(F.linear(x, weight, bias), residual, norm_weight, eps)
    if x.shape[0] > FEW_ROWS:  # the next product may be cuBLAS', which takes no unfinished norm
        hidden = product(x, weight, bias=bias, residual=residual)[0]
        return add_norm_triton(hidden, None, norm_weight, eps)
    hidden, scaled, squares = product(
        x, weight, bias=bias, residual=residual, norm_weight=norm_weight
    )
    return Normed(hidden, scaled, squares, eps)
