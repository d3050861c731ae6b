"""Computes the matmuls of a decoder layer on CUDA, with this package's kernels or with cuBLAS.

This package's kernels fuse the norm, gate, bias and residual with the matmul.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.comm.peers import Peers
from specdec_kernels.linear.cublas import linear_without_workspace
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.norm_triton import add_norm_triton, gate_triton
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.plain_triton import plain_triton
from specdec_kernels.linear.reference import Normed, linear_reference
from specdec_kernels.linear.stored import Stored
from specdec_kernels.linear.stored_rows_triton import stored_rows_linear
from specdec_kernels.linear.tiles import (
    choose_row_tiles,
    choose_stored_tiles,
    choose_terms_tiles,
    choose_tiles,
    leaves_norm,
)

Product = partial[tuple[Tensor, Tensor, Tensor]]
Choose = Callable[[str, Tensor, Tensor | Stored], Product | None]


def kernel_for(kind: str, x: Tensor, weight: Tensor | Stored) -> Product | None:
    """Return the kernel for a matmul, bound to its launch configuration. Return None if cuBLAS
    should compute the matmul.

    kind: "norm" for `norm_linear`, "gate" for `norm_gate_up`, and "add" for `linear`, `linear_add`
        and `linear_add_norm`.
    """
    row_tiles = choose_row_tiles(kind, x, weight)
    if row_tiles is not None:
        return partial(one_row_linear, tiles=row_tiles)
    if isinstance(weight, Stored):
        as_terms = choose_terms_tiles(kind, x, weight)
        stored_tiles = as_terms or choose_stored_tiles(kind, x, weight)
        if stored_tiles is None:
            return None
        return partial(stored_rows_linear, tiles=stored_tiles, as_terms=as_terms is not None)
    tiles = choose_tiles(kind, x, weight)
    return None if tiles is None else partial(few_rows_linear, tiles=tiles)


def chosen(
    kind: str, x: Tensor, weight: Tensor | Stored, choose: Choose
) -> tuple[Product | None, Tensor | Stored]:
    """Choose the kernel for a matmul. Return it, or None for cuBLAS, and the weight to use with it.

    If no kernel can read a quantised weight, dequantise it, choose a kernel for the dequantised
    weight, and return that weight.
    """
    product = choose(kind, x, weight)
    if product is None and isinstance(weight, Stored):
        weight = plain_triton(weight, x.dtype)
        product = choose(kind, x, weight)
    return product, weight


def norm_linear_triton(
    x: Normed,
    weight: Tensor | Stored,
    bias: Tensor | None = None,
    into: Tensor | None = None,
    choose: Choose = kernel_for,
) -> Tensor:
    """Compute `ops.norm_linear` on CUDA. choose: the function that chooses the kernel."""
    product, weight = chosen("norm", x.scaled, weight, choose)
    if product is None:
        assert x.squares is None and isinstance(weight, Tensor)
        return linear_reference(x.scaled, weight, bias, into)
    return product(x.scaled, weight, squares=x.squares, eps=x.eps, bias=bias, into=into)[0]


def norm_gate_up_triton(
    x: Normed, weight: Tensor | Stored, activation: str = "silu", choose: Choose = kernel_for
) -> Tensor:
    """Compute `ops.norm_gate_up` on CUDA. choose: the function that chooses the kernel."""
    product, weight = chosen("gate", x.scaled, weight, choose)
    if product is None:
        assert x.squares is None and isinstance(weight, Tensor)
        return gate_triton(linear_without_workspace(x.scaled, weight), activation)
    return product(x.scaled, weight, squares=x.squares, eps=x.eps, activation=activation)[0]


def linear_triton(
    x: Tensor, weight: Tensor | Stored, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Compute `ops.linear` on CUDA."""
    product, weight = chosen("add", x, weight, kernel_for)
    if product is None:
        assert isinstance(weight, Tensor)
        return linear_reference(x, weight, bias, into)
    return product(x, weight, bias=bias, into=into)[0]


def linear_to_peers(
    peers: Peers, place: int, x: Tensor, weight: Tensor | Stored, bias: Tensor | None
) -> bool:
    """Compute this rank's part of `ops.linear_reduce`. Return True if it was sent to every rank.
    Return False if it is stored in buffer `place`, where the other ranks will read it."""
    into, inbox = peers.part(place, len(x))
    product, weight = chosen("add", x, weight, kernel_for)
    if product is None:
        assert isinstance(weight, Tensor)
        linear_reference(x, weight, bias, into)
        return False
    # A word holds two values, so a program that computes a single feature cannot send it.
    if inbox is None or product.keywords["tiles"].block_n == 1:
        product(x, weight, bias=bias, into=into)
        return False
    product(x, weight, bias=bias, into=into, inbox=inbox)
    return True


def linear_add_triton(x: Tensor, weight: Tensor | Stored, residual: Tensor) -> Tensor:
    """Compute `ops.linear_add` on CUDA."""
    product, weight = chosen("add", x, weight, kernel_for)
    if product is None:
        assert isinstance(weight, Tensor)
        return torch.addmm(residual, x, weight.T)
    return product(x, weight, residual=residual)[0]


def linear_add_norm_triton(
    x: Tensor,
    weight: Tensor | Stored,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    choose: Choose = kernel_for,
) -> Normed:
    """Compute `ops.linear_add_norm` on CUDA. choose: the function that chooses the kernel."""
    product, weight = chosen("add", x, weight, choose)
    if product is None:
        assert isinstance(weight, Tensor)
        return add_norm_triton(F.linear(x, weight, bias), residual, norm_weight, eps)
    if not leaves_norm(residual):
        hidden = product(x, weight, bias=bias, residual=residual)[0]
        return add_norm_triton(hidden, None, norm_weight, eps)
    hidden, scaled, squares = product(
        x, weight, bias=bias, residual=residual, norm_weight=norm_weight
    )
    return Normed(hidden, scaled, squares, eps)
