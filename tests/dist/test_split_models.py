"""Models split over ranks, in one world of 4: parts, logits, hidden states and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.core.parallel import ALONE, TensorParallel, make_groups
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models import tp, weights
from specdec_cli.models.loader import load
from tests.dist import cases
from tests.dist.world import World, over_gloo
from tests.engine.test_families import TOLERANCE
from tests.engine.test_formats import STORED, store
from tests.engine.test_loading import to_mxfp4
from tests.support import CPU, FAMILIES, description, save_tiny, tiny_config

pytestmark = pytest.mark.dist

# Families of FAMILIES with fewer key and value heads than 4 ranks, and with as many.
SPLIT: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"num_key_value_heads": 4},
    "gemma2": {},
    "gemma3": {"num_key_value_heads": 4},
    "phi3": {},
    "olmo2": {},
    "cohere": {},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}
# Families that are tested at 4 ranks only.
ALSO_SPLIT = """
    apertus arcee cohere2 cwm deepseek_v2 dots1 ernie4_5 exaone4 gemma gemma4 gemma4-moe glm
    glm4 glm4_moe gpt_neox granite helium llama3-rope mellum mimo_v2_flash ministral ministral3
    mixtral-window olmo olmo3 phi qwen2-window seed_oss smollm3 starcoder2 vaultgemma youtu
    """.split()
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {"num_key_value_heads": 1},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "mixtral": {},
    "gpt_oss": {"num_key_value_heads": 4},
    "glm4_moe": {"use_qk_norm": True, "n_shared_experts": 2},
}


@pytest.mark.parametrize("carried", [(), (over_gloo,)], ids=["memory", "gloo"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives(world: World, size: int, carried: tuple[Any, ...]) -> None:
    """Gloo carries what commands send, and memory most of what the other tests do."""
    found = [x for x in world.run(*carried, cases.collectives, size) if x is not None]
    assert [x["rank"] for x in found] == list(range(size))
    for x in found:
        assert x["sums"] == [[sum(range(1, size + 1))]] * 2  # of few numbers and of many
        assert x["gathered"] == torch.arange(30.0).view(3, 10).tolist()
        assert x["nothing"] == (0, 10)
        assert x["sent"] == [[0, 7]]
        assert x["objects"] == [2 * r for r in range(size)]


def check_passes(
    world: World, folder: Path, size: int, fused: bool, tolerance: float = TOLERANCE
) -> None:
    errors = [e for e in world.run(cases.pass_errors, folder, size, fused) if e is not None]
    assert len(errors) == size
    assert max(max(e.values()) for e in errors) < tolerance, errors


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SPLIT)
def test_passes_match_transformers(world: World, family: str, size: int, tmp_path: Path) -> None:
    """A vocabulary of 97 divides by neither size, so the head's parts are padded."""
    check_passes(world, save_tiny(tmp_path, family, **SPLIT[family]), size, False)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in ALSO_SPLIT if f in FAMILIES])
def test_passes_of_other_families(world: World, family: str, tmp_path: Path) -> None:
    """Another order of sums costs gemma4 slightly more than the tolerance of test_families. A wrong
    plan for a family costs 0.5."""
    check_passes(world, save_tiny(tmp_path, family), 4, False, 2.5 * TOLERANCE)


def test_what_may_be_split_is_what_is_tested() -> None:
    tested = {tiny_config(f).model_type for f in [*SPLIT, *ALSO_SPLIT] if f in FAMILIES}
    assert tested == tp.FAMILIES - ({"mellum", "mimo_v2_flash"} - FAMILIES.keys())


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("family", FUSED)
def test_passes_of_fused_layers(world: World, family: str, size: int, tmp_path: Path) -> None:
    check_passes(world, save_tiny(tmp_path, family, **FUSED[family]), size, True)


def test_biases_are_added_once(world: World, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True, num_attention_heads=8)
    check_passes(world, folder, 4, False)
    folder = save_tiny(tmp_path / "fused", "llama", attention_bias=True)
    check_passes(world, folder, 4, True)


def ranks(size: int) -> list[TensorParallel]:
    """Places in a group that does not exist, which suffice to find a rank's parts."""
    return [TensorParallel(rank, size) for rank in range(size)]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "family", ["llama-tied", "qwen2", "phi3", "gpt_neox", "qwen3_moe", "gpt_oss"]
)
def test_ranks_hold_the_parts_of_what_one_would(
    family: str, load_format: str, tmp_path: Path
) -> None:
    """Dummy weights are split likewise, so that every degree measures the same model."""
    folder = save_tiny(tmp_path, family, num_key_value_heads=4)
    whole = load(description(folder, load_format=load_format), CPU).state_dict()
    shards = [description(folder, parallel=p, load_format=load_format) for p in ranks(4)]
    held = [load(found, CPU).state_dict() for found in shards]
    split = 0
    for name, expected in whole.items():
        tensors = [own[name] for own in held if name in own]
        part = shards[0].shards.parts.get(name)
        if name.endswith("experts.down_proj_bias"):
            # So is this one, but transformers' experts have no form without it.
            assert torch.equal(tensors[0], expected) and len(tensors) == 4
            assert not any(t.any() for t in tensors[1:])
        elif part is None:
            assert all(torch.equal(t, expected) for t in tensors), name
            # A bias that is added once is held by one rank.
            once = name.endswith(("attention.dense.bias", "dense_4h_to_h.bias", "o_proj.bias"))
            assert len(tensors) == (1 if once else 4), name
        else:
            # Gate and up of experts are one tensor, and each rank has a part of both.
            halves = zip(*(t.chunk(part.blocks, part.dim) for t in tensors), strict=True)
            whole_again = torch.cat([torch.cat(half, part.dim) for half in halves], part.dim)
            assert torch.equal(whole_again, expected), name
            split += 1
    assert split >= 2 * 4 + 1
    sums = [sum(t.numel() * t.element_size() for t in own.values()) for own in held]
    tied = [
        sum(own[name].numel() * 4 for name in f.shards.tied)
        for own, f in zip(held, shards, strict=True)
    ]
    bytes_held = [whole - again for whole, again in zip(sums, tied, strict=True)]
    assert [found.weight_bytes for found in shards] == bytes_held


def test_parts_of_experts_end_with_groups() -> None:
    """Equal parts would cut through groups of 32 columns. Elsewhere they stay equal, or would be
    too unequal."""
    held = {w: [tp._share_of_expert(w, p) for p in ranks(4)] for w in (2880, 768, 704, 320, 720)}
    ends = {width: [stop for _, stop in found] for width, found in held.items()}
    assert ends == {
        2880: [768, 1472, 2176, 2880],
        768: [192, 384, 576, 768],
        704: [192, 384, 576, 704],
        320: [80, 160, 240, 320],
        720: [180, 360, 540, 720],
    }
    for found in held.values():
        assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert [tp._share_of_expert(2880, p) for p in ranks(2)] == [(0, 1440), (1440, 2880)]
    eight = [tp._share_of_expert(2880, p) for p in ranks(8)]
    assert {stop - start for start, stop in eight} == {384, 320} and eight[-1][1] == 2880


def test_heads_that_are_held_twice(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    whole = load(description(folder), CPU).state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    for place in ranks(4):
        found = description(folder, parallel=place)
        own = load(found, CPU).state_dict()[name]
        assert torch.equal(own, whole[name].chunk(2)[place.rank // 2])
        assert {s.num_kv_heads for s in found.layers} == {1}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "youtu"])
def test_latent_attention_is_split_by_heads(family: str, tmp_path: Path) -> None:
    found = description(save_tiny(tmp_path, family), parallel=TensorParallel(3, 4))
    assert {shape.num_kv_heads for shape in found.layers} == {1}


STORED_FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "gptq", {}),
    ("llama", "mxfp4", {}),
    ("qwen3", "awq", {"num_attention_heads": 8, "head_dim": 16}),
    ("gemma2", "packed, zeros", {"head_dim": 32}),
    ("qwen3_moe", "modelopt", {"moe_intermediate_size": 128}),
    ("mixtral", "int8, zeros", {}),
    ("gpt_oss", "blocks", {"intermediate_size": 704}),  # of 4 ranks three have 192, and one 128
]


# Two ranks hold parts of four bits in test_split_heads.py too.
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("family", "name", "sizes"), STORED_FAMILIES, ids=str)
def test_passes_of_stored_weights(
    world: World, family: str, name: str, sizes: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """Logits are as far from transformers' as those of plain weights, which are larger here than in
    other tests. Each of 4 ranks has one group of 32 columns of what is split by columns, or more of
    gpt-oss's experts."""
    sizes = {"hidden_size": 128, "num_key_value_heads": 4} | sizes
    if name == "blocks":
        folder, plain = stored_experts(tmp_path, **sizes)
    else:
        folder, plain = store(tmp_path, family, *STORED[name], **sizes), tmp_path / "plain"
    kept = world.run(cases.pass_errors, folder, size, True, plain)
    assert kept == world.run(cases.pass_errors, plain, size, True)
    assert 0 < max(max(e.values()) for e in kept if e is not None) < 100 * TOLERANCE


def stored_experts(folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """gpt-oss with experts as it stores them, and with transformers' numbers of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kept = save_tiny(folder / "stored", "gpt_oss", **sizes)
    plain = Path(shutil.copytree(kept, folder / "plain"))
    to_mxfp4(kept)
    found = load_file(kept / "model.safetensors")
    for name in [n for n in found if n.endswith("_blocks")]:
        fields = found.pop(name), found.pop(name.replace("_blocks", "_scales"))
        numbers = convert_moe_packed_tensors(*fields, dtype=torch.float32)
        found[name.removesuffix("_blocks")] = numbers.contiguous()
    save_file(found, plain / "model.safetensors", metadata={"format": "pt"})
    return kept, plain


def test_experts_in_four_bits_are_split_anywhere(tmp_path: Path) -> None:
    """4 ranks have 24 of 96 features each, and a block of codes has 32."""
    folder = save_tiny(tmp_path, "gpt_oss", intermediate_size=96)
    to_mxfp4(folder)
    whole = load(description(folder), CPU).state_dict()
    for place in ranks(4):
        found = description(folder, parallel=place)
        own = load(found, CPU).state_dict()
        for leaf, dim in {"gate_up_proj": 2, "down_proj": 1}.items():
            name = f"model.layers.1.mlp.experts.{leaf}"
            assert torch.equal(own[name], whole[name].chunk(4, dim)[place.rank])


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama-tied")
    found = description(folder, parallel=TensorParallel(1, 4))
    module = load(found, CPU)
    embedding, head = module.model.embed_tokens.weight, module.lm_head.weight
    assert embedding.shape == (97, 64) and torch.equal(head, embedding[25:50])
    assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()
    own = [p for n, p in module.named_parameters() if n != "lm_head.weight"]
    assert found.weight_bytes == sum(p.numel() * p.element_size() for p in own)


class Counted:
    """Stand-in for an open file or a tensor in it, which counts the bytes that are read of it."""

    def __init__(self, inside: Any, read: list[int]) -> None:
        self.inside, self.read = inside, read

    def __enter__(self) -> Any:
        return Counted(self.inside.__enter__(), self.read)

    def __exit__(self, *problem: Any) -> None:
        self.inside.__exit__(*problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.counted(self.inside.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return Counted(self.inside.get_slice(name), self.read)

    def __getitem__(self, places: Any) -> torch.Tensor:
        return self.counted(self.inside[places])

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.read.append(tensor.nbytes)
        return tensor


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe"])
def test_only_the_part_is_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads as many bytes as it holds, also of experts that the file has one by one."""
    folder = save_tiny(tmp_path, family)
    read: list[int] = []
    opened = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda *a, **k: Counted(opened(*a, **k), read))
    sizes = []
    for parallel in (ALONE, TensorParallel(0, 4), TensorParallel(3, 4)):
        read.clear()
        held = load(description(folder, parallel=parallel), CPU).state_dict()
        assert sum(read) == sum(tensor.nbytes for tensor in held.values())
        sizes.append(sum(read))
    assert max(sizes[1:]) < 0.5 * sizes[0]


@pytest.mark.parametrize("change", ["missing", "narrow"])
def test_experts_that_do_not_fit_their_config(change: str, tmp_path: Path) -> None:
    """A rank's part of the remaining experts could have a fitting shape."""
    folder = save_tiny(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :16].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = []
    for parallel in (ALONE, TensorParallel(0, 2)):
        with pytest.raises(SetupError) as refused:
            load(description(folder, parallel=parallel), CPU)
        told.append(str(refused.value))
    assert "model.layers.1.mlp.experts.down_proj" in told[0] and told[0] == told[1]


def test_a_checkpoint_of_another_shape(tmp_path: Path) -> None:
    """The parts would fit; only the whole shape shows the error."""
    folder = save_tiny(tmp_path, "llama")
    config = folder / "config.json"
    smaller = json.loads(config.read_text()) | {"intermediate_size": 64}
    config.write_text(json.dumps(smaller))
    with pytest.raises(SetupError, match=r"has shape \[128, 64\] in the weights, .* \[64, 64\]"):
        load(description(folder, parallel=TensorParallel(0, 2)), CPU)


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "no plan": ("gpt2", 2, {}, "no tensor parallel plan for the layers of gpt2"),
    "experts": (
        "mixtral",
        4,
        {"intermediate_size": 90},
        "its 90 features inside an expert cannot be divided among 4 ranks",
    ),
    "other experts": ("olmoe", 2, {}, "no test shows that olmoe gives the same"),
    "heads": ("llama", 3, {}, "its 4 attention heads cannot be divided among 3 ranks"),
    "more ranks than heads": ("llama", 8, {}, "its 4 attention heads cannot be divided among 8"),
    "key and value heads": (
        "llama",
        4,
        {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 96, "head_dim": 4},
        "its 6 key and value heads cannot be divided among 4 ranks",
    ),
    "features": (
        "llama",
        4,
        {"intermediate_size": 90},
        "its 90 features written by model.layers.0.mlp.gate_proj cannot be divided among 4 ranks",
    ),
    "features read": (
        "phi3",
        4,
        {"intermediate_size": 90},
        "its 90 features read by model.layers.0.mlp.down_proj cannot be divided among 4 ranks",
    ),
    "statistics over all features": (
        "gemma3n",
        2,
        {},
        "no test shows that gemma3n_text gives the same",
    ),
    "rows of experts": (
        "deepseek_v3",
        2,
        {"moe_intermediate_size": 12},
        "its experts, whose rows would be 6 numbers in float32 and must be multiples of 16 bytes, "
        "cannot be divided among 2 ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused(case: str, tmp_path: Path) -> None:
    """The refusal comes before weights are read; the folder has none."""
    family, size, changes, reason = REFUSED[case]
    tiny_config(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=reason) as raised:
        description(tmp_path, parallel=TensorParallel(0, size))
    # The recipe's degree is at fault, or the family cannot be split at all.
    is_degree = "cannot be divided" in reason
    assert (raised.value.code == ExitCode.USAGE) == is_degree and "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("linear", "style", "reason"),
    [
        ("q_proj", "embedding_colwise", r"not supported \(embedding_colwise\)"),
        ("o_proj", "replicated", "its layers do not run in 2 parts"),
    ],
)
def test_another_kind_of_splitting_is_refused(
    linear: str, style: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {f"model.layers.*.self_attn.{linear}": style}
    monkeypatch.setitem(tp._OWN_PLANS, "llama", plan)
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=reason):
        description(tmp_path, parallel=TensorParallel(0, 2))


def test_a_draft_that_does_not_divide_the_target() -> None:
    with pytest.raises(ValueError, match="draft TP 3 does not divide target TP 4"):
        make_groups(4, 3, CPU)


def test_one_rank_needs_no_world() -> None:
    x = torch.ones(2, 3)
    assert make_groups(1, 1, CPU) == (ALONE, ALONE)
    assert ALONE.all_reduce(x) is ALONE.all_gather(x, 3) is ALONE.broadcast(x) is x
    assert ALONE.gather_objects(5) == [5]
