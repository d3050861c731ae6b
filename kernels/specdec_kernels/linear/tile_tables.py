"""Tables of launch configurations for matmuls in which x has few rows, one table per compute
capability. They were measured with `scripts/bench/tiles.py`."""

from typing import NamedTuple

from specdec_kernels.tiles import Case

ANY = 1 << 62


class Tiles(NamedTuple):
    """Launch configuration of `few_rows_triton.few_rows_linear_kernel`."""

    block_m: int  # rows of x per program; if below 16, they are the N dimension of mma.sync
    block_n: int  # features per program
    block_k: int  # step along the reduction dimension
    slices: int  # number of equal slices of block_k, each computed by its own warps
    splits: int  # how many programs share the reduction dimension
    prefetch: int  # values of each weight row to prefetch before waiting for the previous kernel
    num_warps: int
    num_stages: int
    # Values of each weight row to load into registers before waiting for the previous kernel. For
    # quantised weights, this is a limit: a program loads its whole share of each row if the share
    # has at most this many values, and otherwise nothing.
    early: int = 0


Products = dict[str, tuple[Case[Tiles | None], ...]]

# For each kind of matmul, the cases in the order in which they are tried. A case consists of the
# tiles, the maximum numbers of rows of x and of output features, and the minimum K. If no case
# fits, or if the case has no tiles, cuBLAS computes the matmul.
#
# With up to 8 rows of x, these are the N dimension of mma.sync. With up to 16, they are its M
# dimension. More rows use an M of 64, which the compiler maps to wgmma. A limit of 2112 features
# means 16 for each of the 132 multiprocessors. With 16 features per program, four warps share
# block_k. A single warp would run all matmuls one after another, and this would take longer than
# loading the weights.
#
# With more than 16 rows of x, each program computes more features. Every program loads and
# multiplies all of x, so fewer programs are faster: at 5120 features, 80 programs with 64 features
# each are faster than 160 programs with 32. From 65 rows on, a gate has tiles only if one wave of
# programs fills at least 80 % of the multiprocessors; otherwise cuBLAS was faster. A Markov head
# has as many features as the vocabulary, and a small K. With such a small K, starting a program
# costs as much as its loads, so each program computes many features. The cases of "add" with more
# than 6720 features, and those with 2816 features and a K of 8192, were measured on halves and
# quarters of a 70B model. There, a sum over ranks runs before the matmul, which may start before
# the sum ends, and then prefetching more gains more than loading into registers.
H200: Products = {
    "norm": (
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 5), (8, 2816), (8192,)),
        Case(Tiles(8, 16, 512, 4, 1, 256, 4, 3, 512), (8, 16896), (3584,)),
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 5, 512), (8, 16896), (2049,)),
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 5, 512), (8, 2112), (1024,)),
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 5), (8, 4224), (0,)),
        Case(Tiles(8, 32, 256, 4, 1, 512, 4, 5), (8, 8448), (2048,)),
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 5), (8, 16896), (0,)),
        Case(Tiles(8, 32, 512, 4, 1, 256, 4, 3), (8, 65536), (2048,)),
        Case(Tiles(16, 32, 256, 1, 1, 1024, 4, 4, 512), (16, 4224), (3584,)),
        Case(Tiles(16, 32, 256, 1, 1, 512, 4, 4, 256), (16, 8448), (3584,)),
        Case(Tiles(16, 32, 256, 1, 1, 256, 4, 4), (16, ANY), (3584,)),
        Case(Tiles(16, 16, 256, 4, 1, 1024, 4, 7), (16, 4224), (0,)),
        Case(Tiles(16, 32, 128, 1, 1, 256, 4, 5), (16, ANY), (0,)),
        Case(Tiles(64, 64, 64, 1, 3, 256, 4, 8), (64, 2816), (8192,)),
        Case(Tiles(64, 32, 128, 1, 1, 256, 4, 5), (64, 4224), (0,)),
        Case(Tiles(64, 64, 128, 1, 1, 256, 4, 5), (64, 8448), (3584,)),
        Case(Tiles(64, 64, 128, 1, 1, 256, 4, 3), (64, ANY), (3584,)),
        Case(Tiles(64, 64, 64, 1, 1, 256, 4, 7), (64, ANY), (0,)),
    ),
    "gate": (
        Case(Tiles(8, 16, 512, 4, 1, 256, 4, 6), (8, 2112), (0,)),
        Case(Tiles(8, 16, 512, 4, 1, 256, 4, 3), (8, 8448), (3584,)),
        Case(Tiles(8, 16, 512, 4, 1, 256, 4, 3), (8, 4224), (0,)),
        Case(Tiles(16, 32, 256, 1, 1, 256, 4, 3), (16, ANY), (3584,)),
        Case(Tiles(16, 32, 256, 1, 1, 256, 4, 3), (16, 4224), (0,)),
        Case(Tiles(16, 32, 128, 1, 1, 256, 4, 5), (16, ANY), (0,)),
        Case(Tiles(64, 64, 64, 1, 1, 256, 4, 5), (64, 8448), (0,)),
        Case(Tiles(64, 64, 128, 1, 1, 256, 8, 4), (64, 16896), (0,)),
        Case(Tiles(64, 64, 64, 1, 1, 256, 4, 5), (64, ANY), (0,)),
        Case(None, (128, 6720), (0,)),
        Case(Tiles(128, 64, 64, 1, 1, 256, 8, 6), (128, 8448), (2048,)),
        Case(None, (128, 13440), (0,)),
        Case(Tiles(128, 128, 64, 1, 1, 256, 8, 4), (128, 16896), (3584,)),
    ),
    "add": (
        Case(Tiles(8, 16, 1024, 4, 1, 512, 4, 5), (8, 2112), (4097,)),
        Case(Tiles(8, 16, 512, 4, 1, 512, 4, 6, 512), (8, 2112), (4096,)),
        Case(Tiles(8, 16, 1024, 4, 1, 512, 4, 5), (8, 2112), (2048,)),
        Case(Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512), (8, 6720), (2049,)),
        Case(Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512), (8, 2112), (1024,)),
        Case(Tiles(8, 16, 256, 4, 1, 512, 4, 6), (8, 2112), (0,)),
        Case(Tiles(8, 16, 512, 4, 1, 512, 4, 5), (8, 6720), (0,)),
        Case(Tiles(8, 32, 256, 4, 1, 512, 4, 4, 512), (8, 16896), (2048,)),
        Case(Tiles(8, 16, 512, 4, 1, 512, 4, 5), (8, 16896), (0,)),
        Case(Tiles(16, 16, 256, 4, 1, 512, 4, 6), (8, ANY), (513,)),
        Case(Tiles(8, 64, 128, 1, 1, 512, 4, 4), (8, ANY), (0,)),
        Case(Tiles(16, 16, 1024, 4, 1, 512, 4, 4), (16, 2112), (2048,)),
        Case(Tiles(16, 16, 256, 4, 1, 512, 4, 6, 512), (16, 4224), (3584,)),
        Case(Tiles(16, 16, 256, 4, 1, 512, 4, 6), (16, 6720), (0,)),
        Case(Tiles(16, 32, 256, 1, 1, 512, 4, 5), (16, 16896), (2048,)),
        Case(Tiles(16, 16, 256, 4, 1, 512, 4, 6), (16, ANY), (0,)),
        Case(Tiles(64, 32, 128, 1, 2, 512, 4, 8), (64, 2112), (0,)),
        Case(Tiles(64, 32, 256, 1, 1, 512, 4, 4), (64, 4224), (0,)),
        Case(Tiles(64, 64, 128, 1, 1, 512, 4, 6), (64, 8448), (0,)),
        Case(Tiles(64, 32, 128, 1, 1, 512, 4, 8), (64, ANY), (0,)),
    ),
}
TABLES = {(9, 0): H200}  # by compute capability

# Matmuls with quantised weights, by kind of code. The weight is the left operand, in registers, so
# features are the M of the tensor-core instruction. For up to 16 rows of x, programs have 16
# features, the M of mma.sync. For more rows, they have 64 or 128, because the M of wgmma is 64.
# If `splits` is 0, `choose_stored_tiles` chooses enough splits, within its limits, to give every
# multiprocessor three programs of four warps, or one program of eight warps.
_BYTES: Products = {
    "norm": (
        Case(Tiles(8, 16, 1024, 4, 1, 1024, 4, 3), (8, ANY), (0,)),
        Case(Tiles(16, 16, 1024, 4, 1, 1024, 4, 3), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 0, 256, 4, 4), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 2, 256, 8, 4), (64, ANY), (0,)),
    ),
    "gate": (
        Case(Tiles(8, 16, 512, 4, 1, 1024, 4, 3), (8, ANY), (0,)),
        Case(Tiles(16, 16, 512, 4, 1, 1024, 4, 3), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 0, 256, 4, 3), (32, ANY), (0,)),
        Case(Tiles(64, 64, 128, 1, 1, 256, 4, 4), (64, ANY), (0,)),
    ),
    "add": (
        Case(Tiles(8, 16, 1024, 4, 1, 1024, 4, 4), (8, ANY), (0,)),
        Case(Tiles(16, 16, 1024, 4, 1, 1024, 4, 4), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 0, 256, 4, 4), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 0, 256, 8, 4), (64, ANY), (0,)),
    ),
}
_HALVES: Products = {
    "norm": (
        Case(Tiles(8, 16, 1024, 4, 1, 512, 4, 3), (8, ANY), (0,)),
        Case(Tiles(16, 16, 1024, 4, 1, 512, 4, 3), (16, ANY), (0,)),
        *_BYTES["norm"][2:],
    ),
    "gate": (
        Case(Tiles(8, 16, 512, 4, 1, 256, 4, 3), (8, ANY), (0,)),
        Case(Tiles(16, 16, 512, 4, 1, 256, 4, 3), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 1, 256, 4, 3), (32, ANY), (0,)),
        Case(Tiles(64, 64, 128, 1, 1, 256, 4, 4), (64, ANY), (0,)),
    ),
    "add": (
        Case(Tiles(8, 16, 1024, 4, 2, 512, 4, 3), (8, ANY), (0,)),
        Case(Tiles(16, 16, 1024, 4, 2, 512, 4, 3), (16, ANY), (0,)),
        *_BYTES["add"][2:],
    ),
}
# Tiles for weights with minima, or with groups of fewer than 32 columns. With larger tiles, or with
# more values loaded early in a gate, the compiler runs out of registers. These tiles were not
# timed.
FINE: Products = {
    kind: (
        Case(Tiles(8, 16, 256, 4, splits, 256, 4, 3, few), (8, ANY), (0,)),
        Case(Tiles(16, 16, 256, 4, splits, 256, 4, 3, more), (16, ANY), (0,)),
        Case(Tiles(32, 32, 128, 1, 0, 256, 8, 3), (32, ANY), (0,)),
        Case(Tiles(64, 32, 128, 1, 0, 256, 8, 3), (64, ANY), (0,)),
    )
    for kind, splits, few, more in (
        ("norm", 1, 1024, 1024),
        ("gate", 1, 768, 0),
        ("add", 2, 1024, 1024),
    )
}
# Up to this many rows, kernels read quantised weights. For more rows, weights are dequantised.
STORED_ROWS = 64
STORED = {"fp8": _BYTES, "int8": _BYTES, "int4": _HALVES, "mxfp4": _HALVES}

# Tiles for matmuls in which x has more than 8 rows and is split into fp8 terms, by kind of code. If
# `splits` is 0, `choose_terms_tiles` chooses as many splits as possible with at most one program of
# eight warps, or two programs of four warps, on each multiprocessor.
_TERMS: Products = {
    kind: (
        Case(Tiles(32, 128, 128, 1, 0, 256, 8, few), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 0, 256, 8, many), (256, ANY), (0,)),
    )
    for kind, few, many in (("norm", 5, 5), ("gate", 4, 3), ("add", 5, 5))
}
_TERMS_HALVES: Products = {
    "norm": (
        Case(Tiles(16, 64, 128, 1, 0, 256, 4, 6), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 0, 256, 4, 6), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 0, 256, 8, 5), (64, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 1, 256, 8, 5), (128, ANY), (0,)),
    ),
    "gate": (
        Case(Tiles(16, 64, 128, 1, 1, 256, 4, 6), (16, ANY), (0,)),
        Case(Tiles(32, 64, 128, 1, 1, 256, 4, 6), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 1, 256, 8, 3), (128, ANY), (0,)),
    ),
    "add": (
        Case(Tiles(16, 128, 128, 1, 8, 256, 8, 5), (16, 4224), (8193,)),
        Case(Tiles(16, 64, 128, 1, 0, 256, 4, 6), (16, ANY), (0,)),
        Case(Tiles(32, 128, 128, 1, 8, 256, 8, 5), (32, 4224), (8193,)),
        Case(Tiles(32, 64, 128, 1, 0, 256, 4, 6), (32, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 0, 256, 8, 5), (64, ANY), (0,)),
        Case(Tiles(64, 128, 128, 1, 2, 256, 8, 5), (128, ANY), (0,)),
    ),
}
TERMS = {(9, 0): {"fp8": _TERMS, "int4": _TERMS_HALVES}}
