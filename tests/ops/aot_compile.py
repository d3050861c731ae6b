"""Compile every kernel for sm_90; print the sizes of cubin and shared memory as JSON.

Run by test_aot_compile.py as a process of its own, since a process that interprets kernels cannot
compile them. The compiler refuses what the interpreter lets pass, and needs no GPU.
"""

import importlib
import json
from typing import Any

import triton
from specdec_kernels.attention_triton import tile_sizes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INT64 = {"tokens", "next_tokens", "merged", "positions", "slots", "draft_tokens"}
INT32 = {
    *("start", "end", "next_lens", "out_start", "block_tables", "query_start", "context_lens"),
    *("lens", "accepted"),
}
FP32 = {"row_max", "row_sum", "partial"}


def attention(
    max_query_len: int, dim: int = 128, itemsize: int = 2, splits: int = 1, **extra: Any
) -> dict[str, Any]:
    """Constants as the launcher chooses them; 16-bit dots, which the interpreter is spared."""
    block_m, block_n = tile_sizes(max_query_len, 4, dim * itemsize)
    sizes = {"DK": dim, "DV": dim, "BLOCK_DK": dim, "BLOCK_DV": dim, "BLOCK_SIZE": 16, "GROUP": 4}
    sizes |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLITS": splits}
    flags = {"WINDOW": 0, "HAS_SOFTCAP": False, "HAS_SINKS": False, "UPCAST": False}
    return {**sizes, **flags, "PRECISION": "ieee", **extra}


REJECTION = {"K": 5, "BLOCK_K": 8, "CHUNKS": 32, "CHUNK": 4096, "BLOCK_CHUNKS": 32}

# Case: module, kernel, type of its other pointers, constants, types that are not the usual ones.
CASES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, str]]] = {
    "merge_tokens": (
        "merge_triton",
        "merge_tokens_kernel",
        "*i1",
        {"STEPS": 3, "BLOCK": 256},
        {},
    ),
    "slot_mapping": (
        "slots_triton",
        "slot_mapping_kernel",
        "*i1",
        {"HAS_REJECTED": True, "BLOCK_SIZE": 16, "STEPS": 3, "BLOCK": 256},
        {},
    ),
    "write_kv": (
        "kv_triton",
        "write_kv_kernel",
        "*bf16",
        {"HEADS": 8, "DK": 128, "DV": 128, "BLOCK_SIZE": 16, "BLOCK_K": 1024, "BLOCK_V": 1024},
        {},
    ),
    "chunk_sums": ("rejection_triton", "chunk_sums_kernel", "*fp32", REJECTION, {}),
    "draw": ("rejection_triton", "draw_kernel", "*fp32", REJECTION, {}),
    "chunk_sums-k0": ("rejection_triton", "chunk_sums_kernel", "*fp32", {**REJECTION, "K": 0}, {}),
    "draw-k0": ("rejection_triton", "draw_kernel", "*fp32", {**REJECTION, "K": 0}, {}),
    **{
        f"attention-{name}": ("attention_triton", "paged_attention_kernel", pointer, *rest)
        for name, pointer, *rest in [
            ("decode", "*bf16", attention(1, splits=8), {"out_ptr": "*fp32"}),
            ("verify", "*bf16", attention(6, splits=8), {"out_ptr": "*fp32"}),
            ("prefill", "*bf16", attention(4096), {}),
            ("prefill-D256", "*bf16", attention(4096, 256), {}),
            ("fp32-D256", "*fp32", attention(4096, 256, 4), {}),
            (
                "everything-fp64-scalars",
                "*bf16",
                attention(4096, WINDOW=512, HAS_SOFTCAP=True, HAS_SINKS=True),
                {"scale": "fp64", "softcap": "fp64"},
            ),
        ]
    },
    "combine_splits": (
        "attention_triton",
        "combine_splits_kernel",
        "*bf16",
        {"DV": 128, "BLOCK_DV": 128, "HAS_SINKS": True, "SPLITS": 8},
        {},
    ),
}


def type_of(parameter: str, pointer: str) -> str:
    name = parameter.removesuffix("_ptr")
    if name == parameter:
        return "fp32" if name in ("scale", "softcap") else "i32"
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    return "*fp32" if name in FP32 else pointer


def compile_case(
    module: str, kernel: str, pointer: str, constants: dict[str, Any], types: dict[str, str]
) -> dict[str, int]:
    function = getattr(importlib.import_module(f"specdec_kernels.{module}"), kernel)
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, type_of(name, pointer))
        for name in names
    }
    # What a launch finds out about its arguments; vector loads depend on it.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.endswith("_ptr") or "stride" in name
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_stages": 3} if kernel == "paged_attention_kernel" else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"cubin": len(compiled.asm["cubin"]), "shared": compiled.metadata.shared}


if __name__ == "__main__":
    print(json.dumps({name: compile_case(*case) for name, case in CASES.items()}))
