"""Compile kernels for sm_90; print the sizes of cubin and shared memory as JSON.

    python tests/ops/aot_compile.py [--anew | --record-of FILE] [CASE ...]
    python tests/ops/aot_compile.py --write      # keeps the results of all cases in compiled.json

compiled.json keeps results by a digest of the code of the kernel and of what it calls, its types
and constants, the target and Triton's version: a case that none of these changed is not compiled
again. Comments, docstrings and line numbers are no part of the code. The names of cases that differ
from the record go to stderr.

test_aot_compile.py runs this in a separate process, since a process that interprets kernels cannot
compile them. The compiler refuses code that the interpreter accepts, and needs no GPU.
"""

import argparse
import ast
import hashlib
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from specdec_kernels.attention.call import Form
from specdec_kernels.attention.dense_triton import TILES as DENSE_TILES
from specdec_kernels.attention.tiles import PagedTiles, choose_cut, paged_tiles
from specdec_kernels.experts.down_triton import down_constants
from specdec_kernels.experts.gate_up_triton import gate_up_constants
from specdec_kernels.experts.grouped_triton import grouped_constants
from specdec_kernels.experts.mixture_triton import readable
from specdec_kernels.experts.reference import CLAMPED, Experts, Routing
from specdec_kernels.experts.route_triton import router_constants
from specdec_kernels.experts.tiles import choose_expert_tiles, choose_group_tiles, way_of
from specdec_kernels.gpu import SHARED_MEMORY, Gpu, power_of_2_from
from specdec_kernels.launch_triton import launch_options, options_of
from specdec_kernels.linear.stored import Storage
from specdec_kernels.linear.stored_groups_triton import form_of
from specdec_kernels.linear.tiles import (
    can_be_tiled,
    choose_row_tiles,
    choose_stored_tiles,
    choose_terms_tiles,
    choose_tiles,
)
from specdec_kernels.sampling.logit_rows_triton import cut
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable

INT64 = {"tokens", "positions", "slots", "draft_tokens"}
INT32 = {
    *("out_start", "block_tables", "query_start", "context_lens"),
    *("lens", "accepted", "counters", "epochs"),
}
FP32 = {"row_max", "row_sum", "partial"}
FORM = Form(8, 4, 128, 128, block_size=16, window=0, has_softcap=False, causal=True)
PRESENT = "present"  # an operand that a case has and the cases like it lack


def absent(*names: str) -> dict[str, None]:
    """Operands that a launch passes as None."""
    return {f"{name}_ptr": None for name in names}


def attention(
    max_query_len: int, dim: int = 128, itemsize: int = 2, splits: int = 1, **extra: Any
) -> dict[str, Any]:
    """Constants as the launcher chooses them, with 16-bit dots, unlike in the interpreter."""
    block_m, block_n = paged_tiles(max_query_len, 4, dim * itemsize)
    form = {name: extra.pop(name) for name in Form._fields if name in extra}
    tiles = PagedTiles(block_m, block_n, dim, dim, splits, extra.pop("packed", False), 4)
    constants = {"FORM": FORM._replace(dim=dim, value_dim=dim, **form), "TILES": tiles}
    constants |= {"num_stages": 3} | absent("sinks", "slots", "scales") | extra
    return {name: value for name, value in constants.items() if value != PRESENT}


LOGITS = {"CUT": cut(128256, 126), "DRAFT_V": 128000, "WAYS": 16, "SHIFT": 16}
LOGITS |= {"K": 5, "BLOCK_K": 8, "DEPENDENT": True}
MANY_LOGITS = {**LOGITS, "CUT": cut(128256, 32), "WAYS": 4}
LOGIT_TYPES = {
    **{f"{name}_ptr": "*i32" for name in ("counters", "keys", "equals")},
    **{f"{name}_ptr": "*fp32" for name in ("rows", "parts", "tops", "sums", "noise", "residuals")},
    **{f"{name}_ptr": "*fp32" for name in ("draft_rows", "target_rows", "target_parts")},
    **{f"{name}_ptr": "*fp32" for name in ("accept_noise", "sample_noise")},
    **{"out_ptr": "*i64", "accepted_ptr": "*i64", "lens_ptr": "*i64", "goal": "fp32"},
}
OTHER_TYPES = {"draft_logits_ptr": "*fp16", "lens_ptr": "*i32"}


def search(by_mass: bool, first: bool, after_top_k: bool = False, **extra: Any) -> dict[str, Any]:
    return LOGITS | {"BY_MASS": by_mass, "FIRST": first, "AFTER_TOP_K": after_top_k} | extra


SQUARES = {"squares_ptr": "*fp32", "out_squares_ptr": "*fp32"}
# A product that sends its result to the inboxes of four ranks.
SENT = {"SIZE": 4, "inboxes_ptr": PRESENT, "counts_ptr": PRESENT}
SENT |= absent("residual", "norm", "scaled", "out_squares")
INBOX = {"inboxes_ptr": "*i64", "counts_ptr": "*i32"}
APART = {"PARTS": 0, "squares_ptr": None}  # the norm is a kernel of its own


def linear(
    kind: str,
    rows: int,
    width: int,
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    room: int | None = None,
) -> dict[str, Any]:
    """Constants of a product on a residual stream 4096 wide, as the launcher chooses them."""
    x = torch.empty(rows, width, dtype=dtype, device="meta")
    tiles = choose_tiles(kind, x, torch.empty(features, width, dtype=dtype, device="meta"), room)
    assert tiles is not None
    return {"TILES": tiles} | options_of(tiles) | around(kind, width)


def one_row(
    kind: str,
    width: int,
    features: int,
    dtype: torch.dtype = torch.bfloat16,
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Constants of a product of one row, as the launcher chooses them."""
    size = (features * (2 if kind == "gate" else 1), width)
    x = torch.empty(1, width, dtype=dtype, device="meta")
    plain = torch.empty(size, dtype=dtype, device="meta")
    weight = plain if storage is None else storage.on_meta(size)
    tiles = choose_row_tiles(kind, x, weight)
    assert tiles is not None
    constants = {"TILES": tiles, "FORM": form_of(weight)} | options_of(tiles) | around(kind, width)
    return constants | (without_zeros(storage) if storage else absent("scales", "zeros"))


def stored_types(storage: Storage) -> dict[str, str]:
    scale = {torch.float32: "fp32", torch.uint8: "u8", torch.float16: "fp16"}
    names = dict.fromkeys(
        ("codes_ptr", "zeros_ptr", "gate_up_ptr", "down_ptr", "weight_ptr"), "*u8"
    )
    names["scales_ptr"] = f"*{scale.get(storage.scales, 'bf16')}"
    return names | ({"zeros_ptr": names["scales_ptr"]} if storage.has_minima else {})


def sent(constants: dict[str, Any], types: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The constants and types of a product that sends its result instead of storing it."""
    constants = {name: value for name, value in (constants | SENT).items() if value != PRESENT}
    return constants, types | INBOX


def without_zeros(storage: Storage) -> dict[str, None]:
    return absent(*([] if storage.has_zeros or storage.has_minima else ["zeros"]))


def stored(
    kind: str, rows: int, width: int, features: int, storage: Storage, **more: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Constants of a product with a stored weight, as the launcher chooses them, and types."""
    weight, dtype = storage.on_meta((features, width)), more.pop("dtype", torch.bfloat16)
    x = torch.empty(rows, width, dtype=dtype, device="meta")
    as_terms = choose_terms_tiles(kind, x, weight)
    tiles = as_terms or choose_stored_tiles(kind, x, weight)
    assert tiles is not None
    constants = {"TILES": tiles, "FORM": form_of(weight)} | options_of(tiles)
    constants |= around(kind, width) | more
    constants |= without_zeros(storage)
    constants |= absent(*([] if as_terms else ["x_scales"]))
    constants |= absent(*([] if as_terms and storage.kind == "int4" else ["x_sums"]))
    constants |= absent(*([] if tiles.splits > 1 else ["partial", "counters"]))
    types = SQUARES | stored_types(storage)
    if as_terms:
        types |= OF_TERMS | {"x_sums_ptr": "*fp32"}
    return constants, types


def around(kind: str, width: int) -> dict[str, Any]:
    """Constants of the work beside a product."""
    parts = 0 if kind == "add" else 256
    constants = {"K": width, "PARTS": parts, "BLOCK_P": max(parts, 1), "DEPENDENT": True}
    constants |= {"ACTIVATION": "silu" if kind == "gate" else "", "SIZE": 0}
    constants |= absent("inboxes", "counts")
    if kind == "add":
        return constants | absent("bias", "squares")
    constants |= absent("residual", "norm", "scaled", "out_squares")
    return constants if kind == "norm" else constants | absent("bias")


def rope_attention(
    max_query_len: int,
    sequences: int = 1,
    dim: int = 128,
    itemsize: int = 2,
    room: int = SHARED_MEMORY,
    **extra: Any,
) -> dict[str, Any]:
    gpu = Gpu(shared_memory=room)
    cut = choose_cut(max_query_len, 4, 8, dim, itemsize, sequences, 2**17, gpu=gpu)
    form = {name: extra.pop(name) for name in Form._fields if name in extra}
    constants = {"CUT": cut, "FORM": FORM._replace(dim=dim, value_dim=dim, **form)}
    constants |= {"num_warps": cut.num_warps, "num_stages": cut.num_stages, "maxnreg": cut.maxnreg}
    constants |= absent("sinks", "query_norm", "key_norm", "scales")
    if cut.splits == 1:
        constants |= absent("partial", "stats", "epochs")
    constants |= {"DEPENDENT": True, **extra}
    return {name: value for name, value in constants.items() if value != PRESENT}


QWEN_EXPERTS = Routing(8, renormalise=True)
DEEPSEEK = Routing(8, renormalise=True, sigmoid=True, num_groups=8, kept_groups=4, scaling=2.5)


def mixture(
    name: str,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = (128, 2048, 768),
    routing: Routing = QWEN_EXPERTS,
    room: int = SHARED_MEMORY,
    **more: Any,
) -> dict[str, Any]:
    """Constants of a kernel of experts as its launcher chooses them. sizes: E, K and F."""
    num_experts, width, features = sizes
    storage, ranks = more.pop("storage", None), more.pop("ranks", 0)
    router, gate_up, down = (
        torch.empty(size, dtype=dtype, device="meta")
        for size in (
            (num_experts, width),
            (num_experts, 2 * features, width),
            (num_experts, width, features),
        )
    )
    experts = Experts(router, gate_up, down, routing, **more)
    if storage is not None:
        held = [storage.on_meta(weight.shape) for weight in (gate_up, down)]
        if can_be_tiled(dtype, router.device, *held):
            held = [replace(w, storage=replace(storage, is_tiled=True)) for w in held]
        experts = experts._replace(gate_up=held[0], down=held[1])
    fields = absent("scales", "zeros") if storage is None else without_zeros(storage)
    if "group" in name:
        return grouped(name, rows, experts, room) | fields
    way = way_of(experts.gate_up, experts.down)
    tiles = choose_expert_tiles(rows, dtype.itemsize, way)
    _, (gate_tiles, down_tiles) = readable(experts, tiles, dtype)
    if name == "route":
        found: dict[str, Any] = router_constants(128, experts, dtype.itemsize)
        found |= {"BLOCK_T": power_of_2_from(rows)}
        found |= {} if routing.sigmoid else absent("choice_bias")
    elif name == "gate_up":
        found = gate_up_constants(width, True, experts, gate_tiles)
    else:
        found = down_constants(features, experts, down_tiles, True, ranks)
        found |= {} if found["SIZE"] else absent("inboxes", "counts")
    found |= {"DEPENDENT": True} | fields
    return found if "activation" in more else found | absent("bias")


def grouped(name: str, rows: int, experts: Experts, room: int) -> dict[str, Any]:
    """Constants of a kernel of grouped tokens, which are normed."""
    dtype, width = experts.router.dtype, experts.router.shape[1]
    if name == "group":
        found = router_constants(0, experts, dtype.itemsize)
        return found | {"DEPENDENT": True} | absent("bias", "choice_bias", "squares", "factors")
    num_chosen = experts.routing.num_chosen
    sizes = rows, num_chosen, experts.num_experts
    way = way_of(experts.gate_up, experts.down)
    tiles = choose_group_tiles(*sizes, dtype.itemsize, room, way)
    assert tiles is not None
    _, tiles = readable(experts, tiles, dtype)
    is_gate = name == "grouped_gate_up"
    width = width if is_gate else experts.num_features
    found = grouped_constants(width, False, experts, tiles[0 if is_gate else 1], is_gate)
    return (
        found | {"DEPENDENT": True} | absent("factors", *([] if experts.interleaved else ["bias"]))
    )


OF_TERMS = {"x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32"}
FP16 = torch.float16
GPTQ = Storage("int4", (1, 128), scales=torch.bfloat16)
AWQ = Storage("int4", (1, 32), True, torch.float16)
Q4_K = Storage("int4", (1, 32), scales=torch.float16, has_minima=True)
MIXED = Storage("int8", (1, 16), scales=torch.float16, has_minima=True)
MX = Storage("mxfp4", (1, 32), scales=torch.uint8)
BLOCKS = Storage("fp8", (128, 128))
ROWS = Storage("int4", has_zeros=True, scales=torch.float16)
CODES = SQUARES | {"weight_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
BYTES = SQUARES | {"weight_ptr": "*u8", "scales_ptr": "*bf16", "zeros_ptr": "*u8"}
SIGNED = SQUARES | stored_types(MIXED) | {"weight_ptr": "*i8"}
HALVES, POWERS = SQUARES | stored_types(Q4_K), SQUARES | stored_types(MX)

OSS = {"activation": CLAMPED, "interleaved": True}
OSS_SIZES = {"sizes": (32, 2880, 2880), "routing": Routing(4, False), **OSS}
MIXTURE = {
    **{"count_ptr": "*i32", "experts_ptr": "*i32", "chosen_ptr": "*i64", "weights_ptr": "*fp32"},
    **{"factors_ptr": "*fp32", "slope": "fp32", "limit": "fp32", **SQUARES},
}
GROUPS = {**MIXTURE, **dict.fromkeys(("sizes_ptr", "pairs_ptr", "read_ptr"), "*i32")}
EVERYTHING = {"window": 512, "has_softcap": True}
EVERYTHING |= dict.fromkeys(("sinks_ptr", "query_norm_ptr", "key_norm_ptr"), PRESENT)

WRITE_KV = {"HEADS": 8, "DK": 128, "DV": 128, "BLOCK_K": 1024, "BLOCK_V": 1024}
GATHER_KV = {"KV_HEADS": 8, "D": 128, "BLOCK_SIZE": 16, "BLOCK_ROWS": 8, "BLOCK": 1024}
ROPE_KV = {"KV_HEADS": 8, "D": 128, "BLOCK_HALF": 64, "BLOCK_HEADS": 8}
ROPE_KV |= {"DEPENDENT": True, "num_warps": 4, "num_stages": 3}

IN_FP8 = {"scales_ptr": PRESENT}  # a case with a cache in fp8
FP8 = {**dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*fp8e4nv"), "scales_ptr": "*fp32"}

PEERS = {"addresses_ptr": "*i64", "flags_ptr": "*i64", "epochs_ptr": "*i32"}

# Case: module, kernel, type of its other pointers, constants, and unusual types of arguments.
CASES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, str]]] = {
    "slot_mapping": (
        "attention.cache_triton",
        "slot_mapping_kernel",
        "*i1",
        {"BLOCK_SIZE": 16, "STEPS": 3, "BLOCK": 256},
        {},
    ),
    **{
        f"{name}{'-fp8' * bool(types)}": (
            *(f"attention.{module}_triton", f"{name}_kernel", "*bf16"),
            constants if types else constants | absent("scales"),
            types,
        )
        for module, name, constants in (
            ("cache", "write_kv", WRITE_KV),
            ("chunks", "gather_kv", GATHER_KV),
            ("rope", "rope_kv", ROPE_KV | {"HEADS": 32}),
        )
        for types in ({}, FP8)
    },
    **{
        f"dense_attention-D{dim}": (
            *("attention.dense_triton", "dense_attention_kernel", "*bf16"),
            {"GROUP": 4, "D": dim, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
            | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
            dict.fromkeys(("key_desc", "value_desc"), f"tensordesc<bf16[{tiles.block_n},{dim}]>"),
        )
        for dim, tiles in DENSE_TILES.items()
    },
    "stamp": ("round.steps_triton", "stamp_kernel", "*i64", {"PLACE": 2}, {}),
    "uniform_rows": (
        "sampling.noise_triton",
        "uniform_rows_kernel",
        "*i64",
        {"WIDTH": 6, "BY_ROUND": True, "BLOCK": 128},
        {"out_ptr": "*fp32"},
    ),
    **{
        name: (
            "round.steps_triton",
            "padded_pass_kernel",
            "*i64",
            {"WIDTH": 6, "MARGIN": 1, "BLOCK_SIZE": 16, "BLOCK": 128} | lens,
            {"lens_ptr": "*i64", "active_ptr": "*i1"},
        )
        for name, lens in (("padded_pass", {}), ("padded_pass-whole", absent("lens")))
    },
    **{
        f"accept-{name}": (
            "round.steps_triton",
            "accept_kernel",
            "*i64",
            {"K": 5, "BLOCK": 8} | rates,
            {
                **{"lens_ptr": "*i64", "accepted_ptr": "*i64"},
                **{"accept_noise_ptr": "*fp32", "rates_ptr": "*fp32"},
            },
        )
        for name, rates in (("greedy", absent("accept_noise", "rates")), ("rates", {}))
    },
    **{
        name: (
            "round.steps_triton",
            "advance_kernel",
            "*i64",
            {"WIDTH": 6, "BLOCK": 8} | more,
            {
                **{"lens_ptr": "*i64", "accepted_ptr": "*i64", "active_ptr": "*i1"},
                "history_ptr": "*i32",
            },
        )
        for name, more in (
            ("advance", {"TAIL": 2, "TAIL_BLOCK": 2} | absent("history", "rows")),
            ("advance-tail", {"TAIL": 7, "TAIL_BLOCK": 8} | absent("history", "rows")),
            ("advance-history", {"TAIL": 2, "TAIL_BLOCK": 2}),
        )
    },
    **{
        f"ngram_lookup-{longest}": (
            "round.steps_triton",
            "ngram_lookup_kernel",
            "*i64",
            {
                **{"K": 5, "BLOCK_K": 8, "LONGEST": longest, "SHORTEST": 1},
                **{"BLOCK": 2048, "num_warps": 8},
            },
            {"history_ptr": "*i32", "lens_ptr": "*i64"},
        )
        for longest in (1, 4, 32)
    },
    **{
        f"{kernel}-{name}": (
            "sampling.logit_rows_triton",
            f"{kernel}_kernel",
            pointer,
            constants,
            types,
        )
        for kernel, name, pointer, constants, types in [
            ("row_sums", "few", "*bf16", LOGITS, LOGIT_TYPES),
            ("row_sums", "many", "*bf16", MANY_LOGITS, LOGIT_TYPES),
            ("row_sums", "fp64-scalar", "*fp32", LOGITS, {**LOGIT_TYPES, "scale": "fp64"}),
            ("search", "top-k", "*bf16", search(False, True), LOGIT_TYPES),
            ("search", "top-k-on", "*bf16", search(False, False), LOGIT_TYPES),
            ("search", "top-p", "*bf16", search(True, True), LOGIT_TYPES),
            ("search", "both", "*bf16", search(True, True, True), LOGIT_TYPES),
            ("search", "top-p-on", "*bf16", search(True, False), LOGIT_TYPES),
            ("search", "fp16-many", "*fp16", search(True, True) | MANY_LOGITS, LOGIT_TYPES),
            (
                *("search", "fp64-scalars", "*fp32", search(True, True, SHIFT=0)),
                {**LOGIT_TYPES, "scale": "fp64", "goal": "fp64"},
            ),
            ("settle", "top-k", "*bf16", {**LOGITS, "BY_MASS": False}, LOGIT_TYPES),
            ("settle", "top-p", "*bf16", {**MANY_LOGITS, "BY_MASS": True}, LOGIT_TYPES),
        ]
    },
    **{
        f"{kernel}-{name}": (
            "sampling.logits_triton",
            f"{kernel}_kernel",
            pointer,
            constants,
            types,
        )
        for kernel, name, pointer, constants, types in [
            ("sample_logits", "few", "*bf16", LOGITS, LOGIT_TYPES),
            ("sample_logits", "many", "*fp32", MANY_LOGITS, LOGIT_TYPES),
        ]
    },
    **{
        name: (
            *("sampling.verify_triton", "verify_kernel", "*bf16"),
            constants | {"BY_BLOCK": name.startswith("block")},
            LOGIT_TYPES | types,
        )
        for name, constants, types in [
            ("reject_logits-few", LOGITS, {}),
            ("reject_logits-other-dtype", MANY_LOGITS, OTHER_TYPES),
            ("reject_logits-one-hot", LOGITS | absent("draft_logits", "draft_rows"), {}),
            ("reject_logits-k0", {**LOGITS, "K": 0, "BLOCK_K": 1}, {}),
            ("block_verify-few", LOGITS, {}),
            ("block_verify-other-dtype", {**MANY_LOGITS, "K": 31, "BLOCK_K": 32}, OTHER_TYPES),
        ]
    },
    **{
        f"attention-{name}": ("attention.paged_triton", "paged_attention_kernel", pointer, *rest)
        for name, pointer, *rest in [
            ("decode", "*bf16", attention(1, splits=8), {"out_ptr": "*fp32"}),
            ("verify", "*bf16", attention(6, splits=8), {"out_ptr": "*fp32"}),
            ("prefill", "*bf16", attention(4096), {}),
            ("prefill-fp8", "*bf16", attention(4096, **IN_FP8), FP8),
            ("decode-fp8", "*bf16", attention(1, splits=8, **IN_FP8), {"out_ptr": "*fp32", **FP8}),
            ("prefill-D256", "*bf16", attention(4096, 256, packed=True), {}),
            ("fp32-D256", "*fp32", attention(4096, 256, 4), {}),
            (
                "everything-fp64-scalars",
                "*bf16",
                attention(4096, window=512, has_softcap=True, sinks_ptr=PRESENT),
                {"scale": "fp64", "softcap": "fp64"},
            ),
            (
                *("bidirectional", "*bf16"),
                attention(16, splits=8, window=512, causal=False, slots_ptr=PRESENT),
                {"out_ptr": "*fp32"},
            ),
        ]
    },
    "combine_splits": (
        "attention.paged_triton",
        "combine_splits_kernel",
        "*bf16",
        attention(1, splits=8, sinks_ptr=PRESENT),
        {},
    ),
    **{
        f"stored-{name}": ("linear.stored_rows_triton", "stored_rows_kernel", pointer, *case)
        for name, pointer, case in [
            ("fp8-1", "*bf16", stored("norm", 1, 4096, 6144, Storage("fp8"))),
            ("fp8-gate-16", "*fp16", stored("gate", 16, 4096, 28672, Storage("fp8"), dtype=FP16)),
            ("fp8-blocks-64", "*bf16", stored("add", 64, 14336, 4096, Storage("fp8", (128, 128)))),
            ("fp8-gate-48", "*bf16", stored("gate", 48, 4096, 28672, Storage("fp8"))),
            ("fp8-32", "*fp16", stored("norm", 32, 4096, 6144, Storage("fp8"), dtype=FP16)),
            ("int8-32", "*fp16", stored("norm", 32, 4096, 6144, Storage("int8"), dtype=FP16)),
            ("int4-add-6", "*bf16", stored("add", 6, 14336, 4096, GPTQ)),
            ("fp8-sent-6", "*bf16", sent(*stored("add", 6, 7168, 8192, BLOCKS))),
            ("int4-16", "*bf16", stored("gate", 16, 4096, 28672, GPTQ)),
            ("int4-48", "*bf16", stored("norm", 48, 4096, 6144, GPTQ)),
            ("int4-zeros-48", "*bf16", stored("gate", 48, 4096, 28672, AWQ)),
            ("int4-minima-6", "*bf16", stored("gate", 6, 4096, 28672, Q4_K)),
            ("narrow-minima-6", "*bf16", stored("gate", 6, 576, 3072, Q4_K)),
            ("int8-minima-16", "*bf16", stored("norm", 16, 4096, 6144, MIXED)),
            ("int4-minima-48", "*bf16", stored("gate", 48, 4096, 28672, Q4_K)),
            ("mxfp4-6", "*bf16", stored("norm", 6, 2880, 5760, MX)),
            ("mxfp4-fp32", "*fp32", stored("gate", 6, 2880, 5760, MX, dtype=torch.float32)),
        ]
    },
    "terms": (
        *("linear.terms_triton", "terms_kernel", "*bf16"),
        {"K": 14336, "SUM": 128, "BLOCK": 16384, "DEPENDENT": True, "num_warps": 16},
        {"terms_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "sums_ptr": "*fp32"},
    ),
    **{
        f"plain-{name}": (
            *("linear.plain_triton", "plain_kernel", "*bf16"),
            {"K": 4096, "FORM": stored("norm", 1, 4096, 64, storage)[0]["FORM"], "BLOCK": 1024}
            | without_zeros(storage),
            stored_types(storage),
        )
        for name, storage in [("fp8", Storage("fp8")), ("int4", AWQ), ("minima", Q4_K)]
    },
    "plain-tiled": (
        *("linear.plain_triton", "plain_tiled_kernel", "*bf16"),
        {"K": 2880, "FORM": form_of(replace(MX, is_tiled=True).on_meta((64, 2880)))},
        {"codes_ptr": "*u8", "scales_ptr": "*u8"},
    ),
    **{
        f"linear-{name}": (
            "linear.few_rows_triton",
            "few_rows_linear_kernel",
            pointer,
            constants,
            types,
        )
        for name, pointer, constants, types in [
            *(
                (f"{kind}-{rows}", "*bf16", linear(kind, rows, *size), SQUARES)
                for rows in (1, 48)
                for kind, size in {
                    "norm": (4096, 6144),
                    "gate": (4096, 28672),
                    "add": (14336, 4096),
                }.items()
            ),
            ("gate-of-8", "*bf16", linear("gate", 1, 4096, 7168), SQUARES),
            *(
                (f"gate-128-of-{width}", "*bf16", linear("gate", 128, width, rows) | APART, SQUARES)
                for width, rows in ((4096, 28672), (2048, 16384))
            ),
            ("add-16", "*bf16", linear("add", 16, 14336, 4096), SQUARES),
            ("norm-16", "*bf16", linear("norm", 16, 4096, 6144), SQUARES),
            ("add-wide", "*bf16", linear("add", 48, 13824, 5120), SQUARES),
            ("add-split", "*bf16", linear("add", 48, 2048, 2048), SQUARES),
            ("head", "*bf16", linear("norm", 8, 4096, 128256), SQUARES),
            *(
                (f"sent-{rows}", "*bf16", *sent(linear("add", rows, 7168, 8192), SQUARES))
                for rows in (1, 6)
            ),
            ("one-feature", "*bf16", linear("norm", 8, 584, 1) | {"num_features": 1}, SQUARES),
            (
                *("fp64-scalar", "*fp16", linear("gate", 48, 896, 9728) | {"PARTS": 28}),
                {**SQUARES, "eps": "fp64"},
            ),
            ("fp32", "*fp32", linear("norm", 8, 4096, 6144, torch.float32), SQUARES),
            ("fp32-many", "*fp32", linear("gate", 48, 4096, 28672, torch.float32), SQUARES),
        ]
    },
    **{
        f"one_row_linear-{name}": (
            "linear.one_row_triton",
            "one_row_linear_kernel",
            pointer,
            constants,
            types,
        )
        for name, pointer, constants, types in [
            ("norm", "*bf16", one_row("norm", 2048, 3072), SQUARES),
            ("gate", "*bf16", one_row("gate", 2048, 8192), SQUARES),
            ("add", "*bf16", one_row("add", 8192, 2048), SQUARES),
            ("sent", "*bf16", *sent(one_row("add", 2048, 2048), SQUARES)),
            ("uneven", "*fp32", one_row("add", 4864, 896, torch.float32), SQUARES),
            ("fp8", "*bf16", one_row("norm", 2048, 3072, storage=Storage("fp8")), CODES),
            ("fp8-blocks", "*bf16", one_row("gate", 2048, 8192, storage=BLOCKS), CODES),
            ("int4", "*bf16", one_row("add", 8192, 2048, storage=GPTQ), BYTES),
            ("int4-zeros", "*bf16", one_row("gate", 2048, 8192, storage=ROWS), BYTES),
            ("minima", "*bf16", one_row("add", 8192, 2048, storage=MIXED), SIGNED),
            ("narrow", "*bf16", one_row("norm", 576, 960), SQUARES),
            ("narrow-minima", "*bf16", one_row("gate", 576, 1536, storage=Q4_K), HALVES),
            ("narrow-mxfp4", "*bf16", one_row("add", 576, 576, storage=MX), POWERS),
            ("fp64-scalar", "*fp16", one_row("gate", 896, 4864), {**SQUARES, "eps": "fp64"}),
        ]
    },
    **{
        f"{name}-{rows}": (
            f"experts.{name}_triton",
            f"{name}_kernel",
            "*bf16",
            mixture(name, rows),
            MIXTURE,
        )
        for name in ("route", "gate_up", "down")
        for rows in (1, 8, 16)
    },
    **{
        f"{name}-clamped": (
            f"experts.{name}_triton",
            f"{name}_kernel",
            "*bf16",
            mixture(name, 8, sizes=(32, 2880, 2880), routing=Routing(4, False), **OSS),
            {**MIXTURE, "eps": "fp64", "slope": "fp64", "limit": "fp64"},
        )
        for name in ("route", "gate_up", "down")
    },
    **{
        f"{name}-fp32": (
            f"experts.{name}_triton",
            f"{name}_kernel",
            "*fp32",
            mixture(name, 16, torch.float32),
            MIXTURE,
        )
        for name in ("route", "gate_up", "down")
    },
    "down-sent": (
        *("experts.down_triton", "down_kernel", "*bf16"),
        mixture("down", 6, ranks=4) | absent("residual", "norm", "scaled", "out_squares"),
        {**MIXTURE, **INBOX},
    ),
    "route-sigmoid": (
        *("experts.route_triton", "route_kernel", "*bf16"),
        mixture("route", 1, routing=DEEPSEEK),
        {**MIXTURE, "logits_ptr": "*fp32", "choice_bias_ptr": "*fp32"},
    ),
    **{
        f"group-{routing.num_chosen}": (
            *("experts.group_triton", "group_kernel", "*bf16"),
            mixture("group", 128, routing=routing),
            GROUPS,
        )
        for routing in (QWEN_EXPERTS, Routing(4, False))
    },
    **{
        f"{name}-{kind}": (
            *("experts.grouped_triton", "grouped_linear_kernel", pointer),
            mixture(name, rows, **sizes),
            GROUPS,
        )
        for name in ("grouped_gate_up", "grouped_down")
        for kind, pointer, rows, sizes in (
            ("17", "*bf16", 17, {}),
            ("128", "*bf16", 128, {}),
            ("512", "*bf16", 512, {}),
            ("clamped", "*bf16", 128, {"sizes": (32, 2880, 2880), "routing": Routing(4), **OSS}),
            ("fp32", "*fp32", 128, {"dtype": torch.float32}),
        )
    },
    **{
        f"{name}-{kind}": (
            f"experts.{'grouped' if 'group' in name else name}_triton",
            f"{'grouped_linear' if 'group' in name else name}_kernel",
            "*bf16",
            mixture(name, rows, storage=storage, **sizes),
            GROUPS | stored_types(storage),
        )
        for name, kind, rows, storage, sizes in (
            ("gate_up", "mxfp4", 2, MX, OSS_SIZES),
            ("down", "mxfp4", 2, MX, OSS_SIZES),
            ("down", "mxfp4-half", 1, MX, {**OSS_SIZES, "sizes": (128, 2880, 1440)}),
            ("down", "mxfp4-quarter", 4, MX, {**OSS_SIZES, "sizes": (128, 2880, 736)}),
            ("gate_up", "fp8", 8, Storage("fp8"), {}),
            ("down", "fp8", 8, Storage("fp8"), {}),
            ("down", "minima", 8, Q4_K, {}),
            ("grouped_gate_up", "mxfp4", 32, MX, OSS_SIZES),
            ("grouped_gate_up", "mxfp4-many", 128, MX, OSS_SIZES),
            ("grouped_gate_up", "mxfp4-prompt", 2048, MX, OSS_SIZES),
            ("grouped_down", "mxfp4", 64, MX, {**OSS_SIZES, "sizes": (128, 2880, 1440)}),
            ("grouped_down", "mxfp4-prompt", 512, MX, OSS_SIZES),
            ("grouped_gate_up", "fp8", 256, BLOCKS, {}),
            ("grouped_down", "fp8", 128, BLOCKS, {}),
            ("grouped_gate_up", "int4-prompt", 1024, GPTQ, {}),
            ("grouped_down", "int4-prompt", 1024, GPTQ, {}),
            ("grouped_gate_up", "minima", 128, Q4_K, {}),
        )
    },
    "in_order": (
        *("linear.mx_sums_triton", "in_order_kernel", "*bf16"),
        {"K": 2880, "BLOCK_K": 1024, "DEPENDENT": True},
        {},
    ),
    "combine": (
        *("experts.sorted_triton", "combine_kernel", "*bf16"),
        {"K": 2048, "NUM_CHOSEN": 8, "BLOCK": 2048, "num_warps": 4, "DEPENDENT": True},
        {"places_ptr": "*i64"},
    ),
    "combine-part": (
        *("experts.sorted_triton", "combine_kernel", "*bf16"),
        {"K": 2048, "NUM_CHOSEN": 8, "BLOCK": 2048, "num_warps": 4, "DEPENDENT": True}
        | absent("places", "residual", "norm", "out"),
        {},
    ),
    "combine-in-order": (
        *("experts.sorted_triton", "combine_kernel", "*bf16"),
        {"K": 2880, "NUM_CHOSEN": 4, "BLOCK": 4096, "num_warps": 8, "DEPENDENT": True}
        | absent("places"),
        {"weights_ptr": "*fp32"},
    ),
    **{
        f"reduce_add_norm-{rows}-{residual}-{for_norm}" + f"-{way}" * (way != "read"): (
            "comm.peers_triton",
            "reduce_add_norm_kernel",
            "*bf16",
            {
                **{"N": 8192, "RANK": 1, "SIZE": 4, "BLOCK_RANKS": 4, "BLOCK_M": rows},
                **{"BLOCK_N": 256, "PUSHED": 32768, "num_warps": rows, "DEPENDENT": True},
                **({} if way in ("pushed", "sent") else absent("pushed")),
                **{"SHARED_OUT": way == "shared", "SENT": way == "sent"},
                **({} if residual else absent("residual")),
                **({} if for_norm else absent("norm", "scaled", "squares")),
            },
            {**PEERS, "pushed_ptr": "*i64", "squares_ptr": "*fp32"},
        )
        for rows, residual, for_norm, way in (
            *((1, True, True, "read"), (4, True, True, "read"), (4, True, False, "read")),
            *((4, False, False, "read"), (1, True, True, "pushed"), (4, True, True, "pushed")),
            *((4, True, False, "shared"), (1, True, True, "sent"), (4, True, True, "sent")),
        )
    },
    **{
        f"gather_columns-{rows}": (
            "comm.peers_triton",
            "gather_columns_kernel",
            "*bf16",
            {
                **{"SHARE": 32064, "RANK": 1, "SIZE": 4, "BLOCK_M": rows, "BLOCK_N": 1024},
                **{"GROUPS": 8, "DEPENDENT": True},
            },
            PEERS,
        )
        for rows in (1, 4)
    },
    **{
        f"rms_norm{'-post' * post}": (
            "linear.norm_triton",
            "rms_norm_kernel",
            "*bf16",
            {"K": 4096, "BLOCK": 4096, "DEPENDENT": True} | ({} if post else absent("post")),
            {"norm_ptr": "*fp32", "post_ptr": "*fp32"} if post else {},
        )
        for post in (False, True)
    },
    **{
        f"embed{'-scaled' * scaled}": (
            "linear.embed_triton",
            "embed_kernel",
            "*bf16",
            {"K": 4096, "D": 128, "BLOCK": 4096, "BLOCK_D": 128}
            | {"HAS_SCALE": scaled, "DEPENDENT": True},
            {"norm_ptr": "*fp32"} if scaled else {},
        )
        for scaled in (False, True)
    },
    "fetch_staged": (
        "comm.staging_triton",
        "fetch_staged_kernel",
        "*i32",
        {"BLOCK": 1024},
        {},
    ),
    **{
        f"tell_tokens{'' if has_tokens else '-none'}": (
            "comm.staging_triton",
            "tell_tokens_kernel",
            "*i32",
            {"BLOCK": 4} | ({} if has_tokens else {"tokens_ptr": None}),
            {"told_ptr": "*i64"} | ({"tokens_ptr": "*i64"} if has_tokens else {}),
        )
        for has_tokens in (True, False)
    },
    "gate": (
        "linear.norm_triton",
        "gate_kernel",
        "*bf16",
        {"ACTIVATION": "gelu_tanh", "BLOCK": 1024, "DEPENDENT": True},
        {},
    ),
    **{
        f"rope_attention-{name}": (
            *("attention.decode_triton", "rope_attention_kernel", pointer, constants),
            {"stats_ptr": "*i64", **types},
        )
        for name, pointer, constants, types in [
            ("decode", "*bf16", rope_attention(1), {}),
            ("verify", "*bf16", rope_attention(6), {}),
            ("verify-D64", "*bf16", rope_attention(6, 8, dim=64), {}),
            ("verify-long", "*bf16", rope_attention(32, 4), {}),
            ("batch-16", "*bf16", rope_attention(6, 16), {}),
            ("decode-fp8", "*bf16", rope_attention(1, **IN_FP8), FP8),
            ("verify-fp8", "*bf16", rope_attention(6, **IN_FP8), FP8),
            ("batch-32-fp8", "*bf16", rope_attention(1, 32, **IN_FP8), FP8),
            ("batch-32", "*bf16", rope_attention(1, 32), {}),
            ("D256", "*bf16", rope_attention(6, 8, dim=256), {}),
            ("fp32-D128", "*fp32", rope_attention(1, 8, itemsize=4), {}),
            ("bidirectional", "*bf16", rope_attention(16, window=512, causal=False), {}),
            (
                *("everything-fp64-scalars", "*bf16", rope_attention(6, 8, **EVERYTHING)),
                {"scale": "fp64", "softcap": "fp64", "eps": "fp64"},
            ),
        ]
    },
    "rope_kv-without-queries": (
        *("attention.rope_triton", "rope_kv_kernel", "*bf16"),
        ROPE_KV | {"HEADS": 0} | absent("query_norm", "scales"),
        {},
    ),
    "greedy_argmax": (
        "sampling.argmax_triton",
        "greedy_argmax_kernel",
        "*bf16",
        {"V": 128256, "PARTS": 32, "BLOCK": 4096, "DEPENDENT": True},
        {"tops_ptr": "*fp32", "indices_ptr": "*i32", "out_ptr": "*i64"},
    ),
}


# Shared memory that a program can have on an A100, and on an L40S or a GPU of a workstation.
ROOMS = {80: 163 * 1024, 89: 99 * 1024}

_LINEAR = ("linear.few_rows_triton", "few_rows_linear_kernel", "*bf16")
_GROUPED = ("experts.grouped_triton", "grouped_linear_kernel", "*bf16")
_ROPE = ("attention.decode_triton", "rope_attention_kernel", "*bf16")

# Kernels that take most of an H100's shared memory, with the tiles for GPUs that have less.
SMALLER: dict[str, tuple[int, tuple[str, str, str, dict[str, Any], dict[str, str]]]] = {
    f"{name}-sm_{arch}": (arch, (*kernel, constants | {"DEPENDENT": False}, types))
    for arch, room in ROOMS.items()
    for name, kernel, constants, types in [
        ("linear-add-2", _LINEAR, linear("add", 2, 8192, 2048, room=room), SQUARES),
        ("linear-add-48", _LINEAR, linear("add", 48, 14336, 4096, room=room), SQUARES),
        *(
            (f"{name}-512", _GROUPED, mixture(name, 512, room=room), GROUPS)
            for name in ("grouped_gate_up", "grouped_down")
        ),
        ("batch-16", _ROPE, rope_attention(6, 16, room=room), {"stats_ptr": "*i64"}),
    ]
}


def type_of(parameter: str, pointer: str) -> str:
    name = parameter.removesuffix("_ptr")
    if name == parameter:
        return "fp32" if name in ("scale", "softcap", "eps") else "i32"
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    return "*fp32" if name in FP32 else pointer


def code_of(source: str) -> str:
    """The source of one function without its docstring and comments."""
    tree = ast.parse(source)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def keep_code_only() -> None:
    """Reduce each function that Triton compiles to its code, without its place in a file."""
    modules = [module for name, module in sys.modules.items() if name.startswith("specdec_kernels")]
    functions = [value for module in modules for value in vars(module).values()]
    for function in functions:
        if isinstance(function, JITCallable):
            function._unsafe_update_src(code_of(function.src))
            function.starting_line_number = 1


RECORD = Path(__file__).with_name("compiled.json")
Sizes = dict[str, int]


def compile_case(
    module: str,
    kernel: str,
    pointer: str,
    constants: dict[str, Any],
    types: dict[str, str],
    arch: int = 90,
    known: tuple[str, Sizes] | None = None,
) -> tuple[str, Sizes]:
    """The digest of a case and its sizes, which are those of `known` if it has the same digest."""
    function = getattr(importlib.import_module(f"specdec_kernels.{module}"), kernel)
    names = function.arg_names
    chosen = {name: constants.get(name) for name in ("num_warps", "num_stages", "maxnreg")}
    options = {name: value for name, value in chosen.items() if value is not None}
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, type_of(name, pointer))
        for name in names
    }
    # Alignment that a launch finds out about its arguments; vector loads depend on it.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or "stride" in name or name == "place")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options |= launch_options(constants.get("DEPENDENT", False))
    said = json.dumps([source.hash(), sorted(options.items()), arch, triton.__version__])
    key = hashlib.sha256(said.encode()).hexdigest()[:32]
    if known is not None and known[0] == key:
        return key, known[1]
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # it holds this folder's path
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    before_wait, _, after_wait = compiled.asm["ptx"].partition("griddepcontrol.wait")
    return key, {
        "cubin": len(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "early_barriers": before_wait.count("bar.sync"),
        "late_barriers": after_wait.count("bar.sync"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile kernels ahead of time.")
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--anew", action="store_true", help="compile what the record has, too")
    parser.add_argument("--record-of", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write the record of all cases")
    args = parser.parse_args()
    cases = {name: (*case, 90) for name, case in CASES.items()}
    cases |= {name: (*case, arch) for name, (arch, case) in SMALLER.items()}
    for module, *_ in cases.values():
        importlib.import_module(f"specdec_kernels.{module}")
    keep_code_only()
    known: dict[str, tuple[str, Sizes]] = {}
    if not args.anew and args.record_of.exists():
        known = {
            name: (key, sizes)
            for name, (key, sizes) in json.loads(args.record_of.read_text()).items()
        }
    found = {name: compile_case(*cases[name], known.get(name)) for name in args.names or cases}
    compiled = [name for name, one in found.items() if known.get(name) != one]
    print(*(compiled if known else []), file=sys.stderr)
    if args.write:
        lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(found.items()))
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(json.dumps({name: sizes for name, (_, sizes) in found.items()}))


if __name__ == "__main__":
    main()
