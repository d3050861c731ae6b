"""Checkpoints in the formats that people store, written here by the formats' own descriptions.

Each writer packs random codes in its format's order; what they mean is computed beside it.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.description import Description, describe
from specdec_cli.models.held import plain_weight
from specdec_cli.models.loader import load
from specdec_cli.models.quantised import dequantised
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import stored_parameters
from specdec_cli.models.weights import same
from tests import lossless
from tests.engine.test_loading import to_mxfp4
from tests.support import CPU, decode, greedy_reference, make_engine, reference, save_tiny

PROMPT = [5, 17, 31, 60, 8]
Tensors = dict[str, Tensor]
# Writes a matrix of [N, K] under a stem, and returns its numbers.
Write = Callable[[Tensors, str, tuple[int, int]], Tensor]


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of the last dimension; place i of a word has number order[i] of its run."""
    per_word = 32 // bits
    found = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // per_word, dtype=torch.int64)
    for place, which in enumerate(order or range(per_word)):
        found |= numbers[..., which::per_word].long() << bits * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def drawn(
    shape: tuple[int, int], group: int, bits: int, stem: str, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros and scales [N, G] that differ from group to group."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(sum(map(ord, stem)))
    groups, most = columns // (group or columns), 1 << bits
    codes = torch.randint(most, shape, generator=generator)
    zeros = torch.randint(most // 2 - 2, most // 2 + 3, (rows, groups), generator=generator)
    scales = (0.5 + torch.rand(rows, groups, generator=generator)) * 0.5 / most
    return codes, zeros, scales.to(dtype)


def meant(
    codes: Tensor, zeros: Tensor | int, scales: Tensor, order: Tensor | None = None
) -> Tensor:
    columns = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    columns = columns if order is None else order
    zeros = zeros[:, columns] if isinstance(zeros, Tensor) else zeros
    return (codes - zeros).float() * scales[:, columns].float()


def gptq(bits: int, group: int, *, sym: bool, version: int = 1, ordered: bool = False) -> Write:
    def write(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales = drawn(shape, group, bits, stem)
        zeros = torch.full_like(zeros, 1 << bits - 1) if sym else zeros
        order = torch.arange(shape[1]) // (group or shape[1])
        if ordered:
            order = order[torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))]
        held = zeros - 1 if version == 1 else zeros
        tensors |= {
            f"{stem}.qweight": words(codes, bits).T.contiguous(),
            f"{stem}.qzeros": words(held.T, bits),
            f"{stem}.scales": scales.T.contiguous(),
            f"{stem}.g_idx": order.to(torch.int32),
        }
        return meant(codes, zeros, scales, order)

    return write


def gptq_settings(bits: int, group: int, sym: bool, version: int = 1, **more: Any) -> Any:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": sym}
    settings |= {"checkpoint_format": "gptq"} if version == 1 else {"format": "gptq_v2"}
    return settings | {"desc_act": False} | more


def awq(group: int, *, zero_point: bool) -> Write:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales = drawn(shape, group, 4, stem)
        tensors |= {f"{stem}.qweight": words(codes.T, 4, order)}
        tensors |= {f"{stem}.scales": scales.T.contiguous()}
        if zero_point:
            tensors |= {f"{stem}.qzeros": words(zeros.T, 4, order)}
        return meant(codes, zeros if zero_point else 8, scales)

    return write


def packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    return words(pad(zeros.T, (0, -len(zeros) % (32 // bits))), bits).T.contiguous()


def packed(bits: int, group: int, *, symmetric: bool) -> Write:
    def write(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales = drawn(shape, group, bits, stem, torch.bfloat16)
        tensors |= {
            f"{stem}.weight_packed": words(codes, bits),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors |= {f"{stem}.weight_zero_point": packed_zeros(zeros, bits)}
        return meant(codes, 1 << bits - 1 if symmetric else zeros, scales)

    return write


def int8(scales_of: str, *, symmetric: bool) -> Write:
    def write(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales = drawn(shape, 0, 8, stem, torch.float32)
        scales = scales[:1, 0] if scales_of == "tensor" else scales
        tensors |= {f"{stem}.weight": (codes - 128).to(torch.int8), f"{stem}.weight_scale": scales}
        if not symmetric:
            tensors |= {f"{stem}.weight_zero_point": (zeros - 128).to(torch.int8)}
        return (codes - (128 if symmetric else zeros)).float() * scales.view(-1, 1)

    return write


def mxfp4(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
    codes, _, _ = drawn(shape, 32, 4, stem)
    powers = torch.arange(shape[0] * shape[1] // 32).view(shape[0], -1) % 5 + 121
    tensors |= {f"{stem}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    tensors |= {f"{stem}.weight_scale": powers.to(torch.uint8)}
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = sizes[codes & 7] * torch.where(codes > 7, -1, 1)
    return numbers * 2.0 ** (powers - 127).repeat_interleave(32, 1)


def fp8(scales_of: str) -> Write:
    def write(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
        codes, _, scales = drawn(shape, 0, 8, stem, torch.float32)
        codes = ((codes - 128) / 4).to(torch.float8_e4m3fn)
        scales = scales[0, 0] * 4 if scales_of == "tensor" else scales * 4
        tensors |= {f"{stem}.weight": codes, f"{stem}.weight_scale": scales}
        tensors |= {f"{stem}.input_scale": torch.ones(())}
        return codes.float() * scales

    return write


def compressed(form: str, bits: int, strategy: str, **more: Any) -> Any:
    kind = "float" if "float" in form or "mxfp4" in form else "int"
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return found | {"ignore": ["lm_head"]}


def mixed(tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor:
    write = packed(4, 32, symmetric=True) if ".mlp." in stem else fp8("channel")
    return write(tensors, stem, shape)


def mixed_settings() -> Any:
    four, eight = (
        compressed(form, bits, strategy, **more)["config_groups"]["group_0"] | {"format": form}
        for form, bits, strategy, more in (
            ("pack-quantized", 4, "group", {"group_size": 32}),
            ("float-quantized", 8, "channel", {}),
        )
    )
    four["targets"] = [r"re:.*\.mlp\..*_proj$"]
    groups = {"config_groups": {"group_0": eight, "group_1": four}}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision"} | groups


HADAMARD = {"config_groups": {"v": {"type": "hadamard", "apply": [{"location": "input"}]}}}
NO_ZEROS = {"symmetric": False}
G32 = {"group_size": 32}
GPTQ = gptq_settings(4, 32, True), gptq(4, 32, sym=True)
AWQ = (
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    awq(32, zero_point=True),
)
PACKED = (
    compressed("pack-quantized", 4, "group", **G32 | NO_ZEROS),
    packed(4, 32, symmetric=False),
)
STORED: dict[str, tuple[Any, Write]] = {
    "gptq": GPTQ,
    "gptq v2, zeros": (gptq_settings(4, 32, False, 2), gptq(4, 32, sym=False, version=2)),
    "gptq, zeros, rows": (gptq_settings(4, 0, False), gptq(4, 0, sym=False)),
    "gptq, 8 bits, zeros": (gptq_settings(8, 32, False), gptq(8, 32, sym=False)),
    "gptq, 8 bits": (gptq_settings(8, 32, True), gptq(8, 32, sym=True)),
    "awq": AWQ,
    "awq, no zeros": (AWQ[0] | {"zero_point": False}, awq(32, zero_point=False)),
    "packed, zeros": PACKED,
    "packed": (compressed("pack-quantized", 4, "group", **G32), packed(4, 32, symmetric=True)),
    "packed, 8 bits": (
        compressed("pack-quantized", 8, "channel", **NO_ZEROS),
        packed(8, 0, symmetric=False),
    ),
    "int8": (compressed("int-quantized", 8, "channel"), int8("row", symmetric=True)),
    "int8, zeros": (
        compressed("int-quantized", 8, "channel", **NO_ZEROS),
        int8("row", symmetric=False),
    ),
    "int8, naive": (compressed("naive-quantized", 8, "tensor"), int8("tensor", symmetric=True)),
    "mxfp4": (compressed("mxfp4-pack-quantized", 4, "group", **G32), mxfp4),
    "mixed": (mixed_settings(), mixed),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("tensor")),
}


def store(folder: Path, family: str, settings: Any, write: Write, **sizes: Any) -> Path:
    """Write a model whose projections are stored to `folder / "stored"`, and one with their numbers
    beside it."""
    kept = save_tiny(folder / "stored", family, **sizes)
    store_as(kept, folder / "plain", settings, write)
    return kept


def store_as(kept: Path, numbers: Path, settings: Any, write: Write) -> None:
    """Store a model's projections in place, with random numbers; `numbers` gets those."""
    shutil.copytree(kept, numbers)
    tensors = load_file(kept / "model.safetensors")
    plain = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        shape = tuple(tensors.pop(name).shape)
        plain[name] = write(tensors, name.removesuffix(".weight"), (shape[0], shape[1]))
    save_file(plain, numbers / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, kept / "model.safetensors", metadata={"format": "pt"})
    describe_as(kept, settings)


def describe_as(folder: Path, settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))


def described(folder: Path, weights: str = "stored", rank: int = 0, size: int = 1) -> Description:
    spec = ModelSpec("target", str(folder), None, "float32", "auto", weights=weights)
    return describe(spec, CPU, TensorParallel(rank, size, None, CPU))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", STORED)
def test_numbers_are_those_that_the_format_means(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored and dequantised, whole and in a rank's part. No tensor is told to be without use."""
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder = store(tmp_path, family, *STORED[name], **wide)
    want = dict(load(described(tmp_path / "plain", "auto"), CPU).named_parameters())
    about = described(folder)
    module = load(about, CPU)
    held = stored_parameters(module)
    assert len(held) >= 10 and about.weight_bytes == sum(
        p.value.num_bytes if n in held and p.value is not None else p.nbytes
        for n, p in module.named_parameters()
    )
    for parameters in (
        dict(module.named_parameters()),
        dict(load(described(folder, "dequantise"), CPU).named_parameters()),
    ):
        assert parameters.keys() == want.keys()
        for key, parameter in parameters.items():
            assert torch.equal(plain_weight(parameter), want[key]), key
    assert "will not be used" not in caplog.text
    if family == "qwen3_moe":
        return
    half = described(folder, rank=1, size=2)
    for key, held_part in stored_parameters(load(half, CPU)).items():
        mine = half.shards.parts[key].of(want[key]) if key in half.shards.parts else want[key]
        assert torch.equal(plain_weight(held_part), mine), key


@pytest.mark.parametrize("name", ["gptq", "awq", "packed, zeros", "mxfp4", "int8, zeros", "mixed"])
def test_texts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = store(tmp_path, "llama", *STORED[name])
    want = greedy_reference(reference(tmp_path / "plain"), PROMPT, 16)
    [seq] = decode(make_engine(folder, None, weights="stored"), [PROMPT], 0, max_new_tokens=16)
    assert seq.tokens[len(PROMPT) :] == want and len(set(want)) > 3


@pytest.mark.parametrize("bits", [4, 8])
def test_the_last_word_of_zeros_may_be_padded(bits: int) -> None:
    tensors: Tensors = {}
    numbers = packed(bits, 32, symmetric=False)(tensors, "one", (13, 64))
    settings = compressed("pack-quantized", bits, "group", **G32 | NO_ZEROS)

    def read(settings: Any) -> Tensor:
        readers: dict[str, Any] = {name: partial(same, t) for name, t in tensors.items()}
        return dequantised(readers, settings, torch.float32, "a model")["one.weight"]()

    assert torch.equal(read(settings), numbers)
    symmetric = changed(settings, symmetric=True)
    with pytest.raises(SetupError, match="symmetric says that it has none"):
        read(symmetric)
    tensors["one.weight_zero_point"] = packed_zeros(torch.full((13, 2), 1 << bits - 1), bits)
    assert torch.equal(read(symmetric), read(settings))


def test_a_quantised_pair_follows_the_target_s_distribution(tmp_path: Path) -> None:
    """The joint distribution of 3 tokens in 3000 runs, beside transformers' probabilities."""
    four = compressed("pack-quantized", 4, "channel", **NO_ZEROS), packed(4, 0, symmetric=False)
    eight = compressed("float-quantized", 8, "channel"), fp8("channel")
    pair = lossless.save_eight(tmp_path)
    for folder, (settings, write) in zip(pair, (four, eight), strict=True):
        store_as(folder, tmp_path / f"plain {folder.name}", settings, write)
    engine = make_engine(*pair, batch_size=1000, num_blocks=2500, weights="stored")
    assert stored_parameters(engine.target.module)
    params = SamplingParams(temperature=0.9, top_k=5, max_new_tokens=4, seed=4)
    plain = tmp_path / f"plain {pair[0].name}"
    found = lossless.engine_trial(engine, plain, [3, 1, 4, 5], 3, params, 3000)
    assert lossless.adjusted(found) > 1e-4


def test_experts_of_gpt_oss_stay_stored(tmp_path: Path) -> None:
    """Their numbers are those of transformers' own dequantisation, on each rank too."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = save_tiny(tmp_path, "gpt_oss")
    to_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    whole = stored_parameters(load(described(folder), CPU))
    assert len(whole) == 4 and all(".experts." in name for name in whole)
    for rank in range(2):
        half = described(folder, rank=rank, size=2)
        for name, parameter in stored_parameters(load(half, CPU)).items():
            blocks, scales = (tensors[f"{name}_{what}"] for what in ("blocks", "scales"))
            want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(plain_weight(whole[name]), want), name
            assert torch.equal(plain_weight(parameter), half.shards.parts[name].of(want)), name
    texts = [
        decode(make_engine(folder, None, weights=weights), [PROMPT], 0, max_new_tokens=12)
        for weights in ("stored", "dequantise")
    ]
    assert texts[0][0].tokens == texts[1][0].tokens


def test_a_split_through_a_group_is_dequantised_unless_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` is stored on CUDA, where a part of the matrices cannot be cut for these ranks."""
    folder = save_tiny(tmp_path, "gpt_oss", intermediate_size=96)
    to_mxfp4(folder)
    told = "columns 0 and 48 of 96: 32 columns share a scale"
    with pytest.raises(SetupError, match=told):
        described(folder, size=2)
    spec = ModelSpec("target", str(folder), None, "float32", "auto")
    for size, held in ((1, {"gate_up_proj", "down_proj"}), (2, {"gate_up_proj"})):
        caplog.clear()
        about = describe(spec, torch.device("cuda"), TensorParallel(0, size, None, CPU))
        assert {name.rpartition(".")[2] for name in stored_parameters(about.module)} == held
        assert (told in caplog.text) == (size == 2)
        found = dict(load(about, CPU).named_parameters())
        for key, numbers in load(
            described(folder, "dequantise", size=size), CPU
        ).named_parameters():
            assert torch.equal(plain_weight(found[key]).float(), numbers), key
    whole = describe(spec, torch.device("cuda")).weight_bytes
    assert whole < described(folder, "auto").weight_bytes


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    """Dequantising gives the right numbers, but the stored form cannot be kept. Other matrices of
    the checkpoint keep theirs."""
    settings = gptq_settings(4, 32, False, desc_act=True)
    folder = store(tmp_path, "llama", settings, gptq(4, 32, sym=False, ordered=True))
    want = dict(load(described(tmp_path / "plain", "auto"), CPU).named_parameters())
    for key, parameter in load(described(folder, "dequantise"), CPU).named_parameters():
        assert torch.equal(parameter, want[key]), key
    with pytest.raises(SetupError, match=r"_proj.weight of .* do not lie together \(desc_act or"):
        described(folder)
    describe_as(folder, settings | {"desc_act": False})
    with pytest.raises(SetupError, match="desc_act says that it does not"):
        load(described(folder), CPU)
    settings = mixed_settings()
    settings["config_groups"]["group_1"]["weights"]["actorder"] = "group"
    folder = store(tmp_path / "mixed", "llama", settings, mixed)
    spec = ModelSpec("target", str(folder), None, "float32", "auto")
    held = stored_parameters(describe(spec, torch.device("cuda")).module)
    assert held and all(".self_attn." in name for name in held)


def test_model_optimizer_s_own_file(tmp_path: Path) -> None:
    settings, write = STORED["modelopt"]
    folder = store(tmp_path, "llama", settings, write)
    describe_as(folder, None)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
    (folder / "hf_quant_config.json").write_text(text)
    assert described(folder).notes == {"weights": "modelopt, as stored"}
    (folder / "hf_quant_config.json").write_text(text.replace('"FP8"', '"NVFP4"'))
    told = r"^hf_quant_config\.json of .*: quantization\.quant_algo is 'NVFP4'$"
    with pytest.raises(SetupError, match=told):
        described(folder)


NAMED = "model.layers.1.mlp.up_proj"


def with_code(code: int) -> Callable[[Tensor], Tensor]:
    """The codes of a matrix with another one at one place."""
    place = torch.tensor([77])
    one = torch.tensor([code], dtype=torch.uint8)
    return lambda t: (
        t.view(torch.uint8).flatten().index_copy(0, place, one).view(t.dtype).view(t.shape)
    )


@pytest.mark.parametrize(
    ("form", "change", "told"),
    [
        (GPTQ, {"scales": lambda t: t[:1]}, r"scales of shape \[128, 1\]"),
        (GPTQ, {"scales": None}, "scales are missing"),
        (GPTQ, {"scales": lambda t: t / 0}, r"scales that are not numbers \(NaN or infinite\)"),
        (STORED["int8"], {"weight_scale": lambda t: t * torch.nan}, "scales that are not numbers"),
        (GPTQ, {"qweight": lambda t: t.float()}, "float32 of .* not int32"),
        (GPTQ, {"qzeros": lambda t: t + 1}, "sym says that it has none"),
        (GPTQ, {"g_idx": lambda t: t.flip(0)}, "permutes its columns"),
        (AWQ, {"qzeros": lambda t: t[:1]}, r"zeros of shape \[128, 1\]"),
        (AWQ, {"qzeros": None}, "lacks its zeros"),
        (AWQ, {"weight_scale_2": lambda t: torch.ones(1)}, "its format is not supported"),
        (PACKED, {"weight_shape": lambda t: t.flip(0)}, "the weight_shape of"),
        (PACKED, {"weight_zero_point": None}, "lacks its zeros"),
        (PACKED, {"weight_scale": lambda t: t.double()}, "scales that are float64"),
        (STORED["mxfp4"], {"weight_scale": lambda t: t.float()}, "scales that are float32"),
        (STORED["mxfp4"], {"weight_packed": lambda t: t.int()}, "codes that are int32"),
        (STORED["int8, zeros"], {"weight_zero_point": lambda t: t.int()}, "zeros that are int32"),
        (GPTQ, {"qweight": lambda t: t[:1], "g_idx": None}, r"has shape \[128, 8\]"),
        (GPTQ, {"scales": lambda t: t[0, 0]}, r"scales of shape \[\]"),
        (AWQ, {"qzeros": lambda t: t[:0]}, r"zeros of shape \[128, 0\]"),
        (PACKED, {"weight_shape": lambda t: t.float()}, "the weight_shape of"),
        (STORED["mxfp4"], {"weight_scale": lambda t: t | 255}, "scales that are not numbers"),
        (STORED["mxfp4"], {"weight_scale": lambda t: t * 0 + 161}, r"scales above 2\^33"),
        (STORED["modelopt"], {"weight": with_code(0x7F)}, r"not numbers \(NaN\)"),
        (STORED["modelopt"], {"weight": with_code(0xFF)}, r"not numbers \(NaN\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_tensor_s_name(
    form: tuple[Any, Write], change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = store(tmp_path, "llama", *form)
    tensors = load_file(folder / "model.safetensors")
    for leaf, how in change.items():
        found = tensors.pop(f"{NAMED}.{leaf}", None)
        if how is not None:
            tensors[f"{NAMED}.{leaf}"] = how(found).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for weights in ("stored", "dequantise"):
        with pytest.raises(SetupError, match=told) as caught:
            load(described(folder, weights), CPU)
        assert NAMED in caught.value.message and "\n" not in caught.value.message
        assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("weights", ["stored", "dequantise"])
def test_the_largest_and_smallest_scales_of_mxfp4_are_read(weights: str, tmp_path: Path) -> None:
    """Codes next to those that are refused: 2^33, and 2^-127 for a byte of zero."""
    folder = store(tmp_path, "llama", *STORED["mxfp4"])
    tensors, plain = load_file(folder / "model.safetensors"), []
    for code in (127, 160, 0):
        scales = torch.full_like(tensors[f"{NAMED}.weight_scale"], code)
        save_file(
            tensors | {f"{NAMED}.weight_scale": scales},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        parameters = dict(load(described(folder, weights), CPU).named_parameters())
        plain.append(plain_weight(parameters[f"{NAMED}.weight"]).float())
    assert torch.equal(plain[1], plain[0] * 2.0**33)
    assert torch.equal(plain[2], plain[0] * 2.0**-127)


def add(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def test_scales_of_activations_are_refused_by_name(tmp_path: Path) -> None:
    """AWQ divides activations by them, where nothing before can take them up."""
    folder, name = store(tmp_path, "llama", *AWQ), "model.layers.0.mlp.act.scales"
    add(folder, {name: torch.full((128,), 2.0)})
    for weights in ("stored", "dequantise"):
        with pytest.raises(SetupError, match=f"^{name} of .* scales activations") as caught:
            load(described(folder, weights), CPU)
        assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("weights", ["stored", "dequantise"])
@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "int8", "mxfp4", "modelopt"])
def test_tensors_without_use_are_told_unless_they_change_nothing(
    name: str, weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = store(tmp_path, "llama", *STORED[name])
    caches = {f"model.layers.0.self_attn.{x}_scale": torch.ones(1) for x in "kv"}
    add(folder, caches | {f"{NAMED}.bias": torch.zeros(128), f"{NAMED}.input_scale": torch.ones(1)})
    load(described(folder, weights), CPU)
    assert "will not be used" not in caplog.text
    add(folder, {f"{NAMED}.bias": torch.ones(128), "model.layers.0.other": torch.ones(1)})
    load(described(folder, weights), CPU)
    said = [one for one in caplog.messages if "will not be used" in one]
    assert len(said) == 1 and said[0].startswith("2 tensors in the weights of ")
    assert "first model.layers.0.other: not in the model" in said[0]


def test_a_config_that_lists_no_transforms_is_read(tmp_path: Path) -> None:
    settings, write = STORED["int8"]
    folder = store(tmp_path, "llama", settings, write)
    for transforms in (None, {}, {"config_groups": {}}):
        describe_as(folder, settings | {"transform_config": transforms})
        assert described(folder).notes["weights"].endswith("as stored")


def changed(settings: Any, **weights: Any) -> Any:
    group = settings["config_groups"]["group_0"]
    return settings | {
        "config_groups": {"g": group | {"weights": group["weights"] | weights}},
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (GPTQ[0] | {"bits": 3}, "bits is 3"),
        (GPTQ[0] | {"group_size": 0}, "group_size is 0"),
        (GPTQ[0] | {"group_size": 1 << 70}, "group_size is 1180591620717411303424"),
        (GPTQ[0] | {"sym": None}, "sym is None"),
        (GPTQ[0] | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ[0] | {"checkpoint_format": None, "format": "qqq"}, "format is 'qqq'"),
        (GPTQ[0] | {"dynamic": {"-:a": {}}}, "dynamic is"),
        (GPTQ[0] | {"desc_act": "no"}, "desc_act is 'no'"),
        (GPTQ[0] | {"modules_to_not_convert": {}}, "modules_to_not_convert is {}"),
        (AWQ[0] | {"version": "gemv"}, "version is 'gemv'"),
        (AWQ[0] | {"version": None, "format": "gemv"}, "format is 'gemv'"),
        (AWQ[0] | {"bits": 8}, "bits is 8"),
        (AWQ[0] | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (changed(PACKED[0], group_size=None), "group_size is None"),
        (changed(PACKED[0], dynamic=True), "dynamic is True"),
        (changed(PACKED[0], actorder="else"), "actorder is 'else'"),
        (changed(STORED["mxfp4"][0], group_size=16), "group_size is 16"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (
            STORED["int8"][0] | {"transform_config": HADAMARD},
            "transform_config is {'config_groups'",
        ),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_refused_by_key(
    settings: Any, told: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    describe_as(folder, settings)
    for weights in ("auto", "stored"):
        with pytest.raises(SetupError, match=told) as caught:
            described(folder, weights)
        assert "quantization_config." in caught.value.message
        assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("form", "other", "told"),
    [
        (PACKED, PACKED[0] | {"ignore": [r"re:.*up_proj"]}, "ignore says that it is not"),
        (PACKED, PACKED[0] | {"ignore": [NAMED]}, "ignore says that it is not"),
        (PACKED, GPTQ[0], "does not describe"),
        (PACKED, changed(PACKED[0], group_size=48), "groups of 48"),
        (PACKED, changed(PACKED[0], symmetric=True), "symmetric says that it has none"),
        (AWQ, AWQ[0] | {"zero_point": False}, "zero_point says that it has none"),
        (
            STORED["int8, zeros"],
            changed(STORED["int8, zeros"][0], symmetric=True),
            "symmetric says that it has none",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_contradicts_the_file_is_refused(
    form: tuple[Any, Write], other: Any, told: str, tmp_path: Path
) -> None:
    folder = store(tmp_path, "llama", *form)
    describe_as(folder, other)
    with pytest.raises(SetupError, match=told) as caught:
        load(described(folder, "dequantise"), CPU)
    assert caught.value.code == ExitCode.ENVIRONMENT
