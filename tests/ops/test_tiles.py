"""Launch configurations: every product has tiles, and models keep those that were measured."""

import hashlib
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from specdec_kernels.attention.tiles import DEPTHS, choose_cut, depth_of, paged_tiles
from specdec_kernels.gpu import CAPABILITY, Gpu
from specdec_kernels.linear.tile_tables import ANY, TABLES
from specdec_kernels.linear.tiles import FEW_ROWS, choose_row_tiles, choose_tiles, tiles_for

# Width of the residual stream, MLP, query heads, key heads, features of a head, vocabulary.
MODELS = {
    "llama-8b": (4096, 14336, 32, 8, 128, 128256),
    "llama-1b": (2048, 8192, 32, 8, 64, 128256),
    "qwen-7b": (3584, 18944, 28, 4, 128, 152064),
    "qwen-14b": (5120, 13824, 40, 8, 128, 152064),
    "gemma-9b": (3584, 14336, 16, 8, 256, 256000),
    "gemma-2b": (2304, 9216, 8, 4, 256, 256000),
}
# Shared memory of a program and multiprocessors, by compute capability.
GPUS = {80: (163 * 1024, 108), 89: (99 * 1024, 142), 90: (227 * 1024, 132)}
WIDTHS = (32, 1023, 1024, 2047, 2048, 2049, 3583, 3584, 4096, 14336)
FEATURES = (16, 2112, 2113, 4224, 4225, 6720, 8448, 8449, 13440, 16896, 16897, 150000)
ROWS = (*range(1, FEW_ROWS + 2), 128, 129)


def chosen(model: str, gpu: int) -> Iterator[object]:
    """All that is launched for products and attention of a model's layers and its logits."""
    hidden, ffn, heads, kv_heads, dim, vocabulary = MODELS[model]
    room, multiprocessors = GPUS[gpu]
    products = [
        ("norm", (heads + 2 * kv_heads) * dim, hidden),
        ("add", hidden, heads * dim),
        ("gate", 2 * ffn, hidden),
        ("add", hidden, ffn),
        ("norm", vocabulary, hidden),
    ]
    for rows, dtype in product(
        (1, 2, 6, 8, 9, 16, 17, 48, 64, 65, 256), (torch.bfloat16, torch.float32)
    ):
        for kind, features, width in products:
            x, weight = (torch.empty(n, width, dtype=dtype, device="meta") for n in (1, features))
            x = x.expand(rows, -1)
            yield choose_tiles(kind, x, weight, room), choose_row_tiles(kind, x, weight)
    shape = (heads // kv_heads, kv_heads, dim)
    for queries, sequences, context in product((1, 6, 17), (1, 8, 32, 256), (128, 4096, 131072)):
        limits = Gpu(CAPABILITY, multiprocessors, room)
        yield choose_cut(queries, *shape, 2, sequences, context, gpu=limits)
        yield paged_tiles(queries, shape[0], 2 * dim, room)


DIGESTS = {
    ("llama-8b", 80): "88cedf15",
    ("llama-8b", 89): "6a940152",
    ("llama-8b", 90): "8a2e4d22",
    ("llama-1b", 80): "700af8bf",
    ("llama-1b", 89): "9d2d5137",
    ("llama-1b", 90): "fe0f5c93",
    ("qwen-7b", 80): "2032b4a2",
    ("qwen-7b", 89): "58426783",
    ("qwen-7b", 90): "fea6bcc6",
    ("qwen-14b", 80): "08f50224",
    ("qwen-14b", 89): "5d026fa9",
    ("qwen-14b", 90): "b4aff931",
    ("gemma-9b", 80): "a421e239",
    ("gemma-9b", 89): "a5de717c",
    ("gemma-9b", 90): "a0c07526",
    ("gemma-2b", 80): "c539a48e",
    ("gemma-2b", 89): "7d9797be",
    ("gemma-2b", 90): "a4a8070a",
}


@pytest.mark.parametrize(("model", "gpu"), list(product(MODELS, GPUS)))
def test_models_keep_their_launch_configurations(model, gpu):
    """A change of a table or a formula that is meant changes the digests too."""
    found = "\n".join(map(str, chosen(model, gpu)))
    assert hashlib.sha256(found.encode()).hexdigest()[:8] == DIGESTS[model, gpu]


@pytest.mark.parametrize("device", TABLES)
def test_every_product_has_tiles_and_every_case_is_used(device):
    used = set()
    for kind, rows, width, features in product(("norm", "gate", "add"), ROWS, WIDTHS, FEATURES):
        tiles = tiles_for(device, kind, rows, width, features)
        assert tiles is not None or rows > FEW_ROWS
        assert tiles is None or tiles.block_m >= rows
        used |= {(kind, tiles)}
    library = {(kind, None) for kind in ("norm", "gate", "add")}
    cases = [(kind, case) for kind, found in TABLES[device].items() for case in found]
    assert used == {(kind, case.tiles) for kind, case in cases} | library
    assert any(case.most[1] == ANY for _, case in cases)


def test_gates_of_more_rows_have_tiles_where_these_were_faster_than_cublas():
    """From 65 to 128 rows, in 16 bits, with an H200's shared memory, where one wave of programs
    fills four of five multiprocessors."""

    def chosen(
        features: int, width: int, rows: int, dtype: torch.dtype, room: int | None = None
    ) -> int | None:
        x, weight = (
            torch.empty(n, width, dtype=dtype, device="meta") for n in (rows, 2 * features)
        )
        tiles = choose_tiles("gate", x, weight, room)
        return None if tiles is None else tiles.block_n

    sizes = {(14336, 4096): 128, (13824, 5120): 128, (8192, 2048): 64, (7168, 4096): 64}
    sizes |= {(18944, 3584): None, (9216, 2304): None, (3584, 4096): None, (1536, 576): None}
    sizes |= {(12288, 4096): None, (14336, 2048): None, (8192, 1024): None}
    for (features, width), expected in sizes.items():
        for dtype in (torch.bfloat16, torch.float16):
            assert chosen(features, width, 128, dtype) == expected
            assert chosen(features, width, 129, dtype) is None
            assert chosen(features, width, 128, dtype, GPUS[80][0]) is None
        assert chosen(features, width, 128, torch.float32) is None
        assert chosen(features, width, FEW_ROWS, torch.float32) is not None


def test_devices_without_a_table_use_that_of_an_h200():
    for table in (TABLES, DEPTHS):
        assert (1, 0) not in table and CAPABILITY in table
    assert tiles_for((1, 0), "add", 8, 4096, 4096) == tiles_for(CAPABILITY, "add", 8, 4096, 4096)
    assert depth_of((1, 0), 128, 16, 9.0) == depth_of(CAPABILITY, 128, 16, 9.0) == 7


@pytest.mark.parametrize("device", DEPTHS)
def test_every_depth_is_used(device):
    def first(head_bytes: int, block_m: int, crowding: float) -> int:
        return depth_of(device, head_bytes, block_m, min(crowding, 100.0))

    assert [first(*case.most) for case in DEPTHS[device]] == [c.tiles for c in DEPTHS[device]]
