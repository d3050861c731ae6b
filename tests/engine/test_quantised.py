"""Quantised tensors beside a plain dequantisation, and refusals by the tensor's name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.description import describe
from specdec_cli.models.loader import load
from specdec_cli.models.quantised import dequantised, no_scales
from specdec_cli.models.spec import ModelSpec
from tests.support import CPU, decode, greedy_reference, make_engine, reference, save_tiny

BLOCK = 128
FLOAT8 = torch.float8_e4m3fn
MATRIX = "layer.weight"
SCALES = f"{MATRIX}_scale_inv"
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4"}


def plain(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each weight is its code times the scale of the block that it lies in."""
    rows, columns = (torch.arange(n) // BLOCK for n in codes.shape[-2:])
    return codes.float() * scales[..., rows[:, None], columns[None, :]]


def random_fp8(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of this shape, and scales that differ from block to block."""
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = [*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:])]
    codes = torch.randn(shape, generator=generator).to(FLOAT8)
    return codes, 0.5 + torch.rand(blocks, generator=generator)


def read(
    stored: dict[str, torch.Tensor], settings: dict[str, Any], name: str = MATRIX
) -> torch.Tensor:
    tensors = {n: lambda part=None, t=t: t for n, t in stored.items()}
    found = dequantised(tensors, settings, torch.float32, "m")
    assert name in found and len(found) == 1, "codes and scales are no tensors of the module"
    return found[name]()


@pytest.mark.parametrize(
    "shape", [(256, 320), (256, 448), (576, 256), (100, 576), (3, 200, 130), (128, 128), (1, 1)]
)
def test_last_blocks_may_be_smaller(shape: tuple[int, ...]) -> None:
    codes, scales = random_fp8(*shape)
    assert torch.equal(read({MATRIX: codes, SCALES: scales}, FP8), plain(codes, scales))


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_one_scale_a_matrix(scale_shape: tuple[int, ...]) -> None:
    codes, _ = random_fp8(4, 6)
    stored = {MATRIX: codes, SCALES: torch.full(scale_shape, 0.3)}
    assert torch.equal(read(stored, FP8 | {"weight_block_size": None}), codes.float() * 0.3)


def test_scales_of_bytes_are_powers_of_two() -> None:
    codes, _ = random_fp8(2, 64)
    scales = torch.tensor([[127, 128], [126, 120]], dtype=torch.uint8)
    want = codes.float() * torch.tensor([[1.0, 2.0], [0.5, 2**-7]]).repeat_interleave(32, 1)
    settings = FP8 | {"weight_block_size": [1, 32]}
    assert torch.equal(read({"layer.weight": codes, "layer.scale": scales}, settings), want)


@pytest.mark.parametrize(
    ("codes", "scales", "said"),
    [
        (random_fp8(256, 256)[0], torch.ones(4, 4), "scales of shape [4, 4]"),
        (random_fp8(256, 256)[0], torch.ones(1, 2), "scales of shape [1, 2]"),
        (random_fp8(256, 256)[0], torch.ones(()), "they should have shape [2, 2]"),
        (random_fp8(2, 256, 256)[0], torch.ones(2, 2), "they should have shape [2, 2, 2]"),
        (random_fp8(256)[0], torch.ones(2), "is float8_e4m3fn of [256]"),
        (torch.ones(256, 256), torch.ones(2, 2), "is float32 of [256, 256]"),
        (torch.ones(256, 128, dtype=torch.int8), torch.ones(2, 2), "is int8 of [256, 128]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    codes: torch.Tensor, scales: torch.Tensor, said: str
) -> None:
    with pytest.raises(SetupError) as caught:
        read({MATRIX: codes, SCALES: scales}, FP8)
    assert caught.value.message.startswith(f"{MATRIX} of m ")
    assert said in caught.value.message
    assert caught.value.hint


def test_settings_that_are_no_block() -> None:
    for block in ("wide", [128], [0, 128], [True, 128], 128, {}):
        with pytest.raises(SetupError, match="weight_block_size"):
            dequantised({}, FP8 | {"weight_block_size": block}, torch.float32, "m")


CODES = torch.arange(2 * 3 * 2 * 16, dtype=torch.uint8).view(2, 3, 2, 16)
EXPERTS = "layers.0.experts.e"
POWERS = torch.arange(120, 132, dtype=torch.uint8).view(2, 3, 2)


def test_mxfp4_by_hand() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    got = read({f"{EXPERTS}_blocks": CODES, f"{EXPERTS}_scales": POWERS}, MXFP4, EXPERTS)
    assert got.shape == (2, 64, 3)
    for expert, column, out in ((0, 0, 0), (1, 63, 2), (1, 33, 1), (0, 40, 2)):
        block, place = divmod(column, 32)
        code = int(CODES[expert, out, block, place // 2]) >> 4 * (place % 2) & 15
        sign = -1 if code & 8 else 1
        power = 2.0 ** (int(POWERS[expert, out, block]) - 127)
        assert got[expert, column, out] == sign * magnitudes[code & 7] * power


@pytest.mark.parametrize(
    "stored",
    [
        {"blocks": CODES, "scales": POWERS[:1]},
        {"blocks": CODES, "scales": POWERS.float()},
        {"blocks": CODES, "scales": POWERS | 255},
        {"blocks": CODES[..., :8], "scales": POWERS},
        {"blocks": CODES.flatten(2), "scales": POWERS},
        {"blocks": CODES},
    ],
)
def test_mxfp4_of_other_shapes_is_refused(stored: dict[str, torch.Tensor]) -> None:
    named = {f"{EXPERTS}_{part}": tensor for part, tensor in stored.items()}
    with pytest.raises(SetupError, match=r"^layers.0.experts.e of m (has|is).*scales"):
        read(named, MXFP4, EXPERTS)


# Whole models.

WIDE = {"hidden_size": 320, "intermediate_size": 448, "head_dim": 72, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of 320, 448 and 576 columns, and of as many rows."""
    folder = save_tiny(tmp_path_factory.mktemp("fp8"), "llama", **WIDE)
    change(folder, quantise)
    return folder


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "_proj" in n]:
        codes, scales = random_fp8(*tensors[name].shape)
        tensors.update({name: codes, f"{name}_scale_inv": scales / 40})


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))


def test_text_equals_transformers_on_dequantised_weights(fp8_model: Path, tmp_path: Path) -> None:
    tensors = load_file(fp8_model / "model.safetensors")
    widths = {t.shape[1] for n, t in tensors.items() if t.dtype == FLOAT8}
    assert widths == {320, 448, 576}
    for name in [n for n in tensors if f"{n}_scale_inv" in tensors]:
        tensors[name] = plain(tensors[name], tensors.pop(f"{name}_scale_inv"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((fp8_model / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = [5, 17, 31, 60, 8]
    want = greedy_reference(reference(tmp_path), prompt, 24)
    [got] = decode(make_engine(fp8_model, None), [prompt], 0, max_new_tokens=24)
    assert got.tokens[len(prompt) :] == want
    assert len(set(want)) > 4, "any weights would do"


NAMED = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("scales", [[torch.ones(3, 3)], []], ids=["other", "none"])
def test_a_refusal_names_the_tensor_and_ends_five(
    scales: list[torch.Tensor], fp8_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(fp8_model, tmp_path / "model"))

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{NAMED}_scale_inv"]
        tensors.update({f"{NAMED}_scale_inv": scale for scale in scales})

    change(folder, damage)
    with pytest.raises(SetupError) as caught:
        load(describe(ModelSpec("target", str(folder), None, "auto", "auto"), CPU), CPU)
    assert caught.value.code == ExitCode.ENVIRONMENT == 5
    assert caught.value.message.startswith(f"{NAMED} of {folder} ")
    assert "scales" in caught.value.message


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_where_blocks_are_meant_names_the_key(shape: tuple[int, ...]) -> None:
    """AutoFP8's form, with its names: the config does not say that a matrix has one scale."""
    codes, _ = random_fp8(300, 140)
    scale = torch.full(shape, 0.3)
    stored = {MATRIX: codes, f"{MATRIX}_scale": scale, "layer.input_scale": torch.ones(())}
    tensors = {n: lambda part=None, t=t: t for n, t in stored.items()}
    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    with pytest.raises(SetupError, match=r"128 x 128 they should have shape \[3, 2\]") as caught:
        dequantised(tensors, settings, torch.float32, "m")[MATRIX]()
    assert "weight_block_size" in (caught.value.hint or "")
    found = dequantised(tensors, settings | {"weight_block_size": None}, torch.float32, "m")
    assert torch.equal(found[MATRIX](), codes.float() * 0.3)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.q_proj.weight", "a.q_proj.weight_scale_2"], "not read: a.q_proj.weight_scale_2"),
        (["q_proj.scales", "k_proj.scales"], "not read: q_proj.scales"),
        (["a.k_proj.weight_scale", "a.q_proj.bias"], "scales are missing"),
    ],
)
def test_scales_under_another_name_are_not_called_missing(names: list[str], told: str) -> None:
    assert told in no_scales("model.a.q_proj.weight", names)
