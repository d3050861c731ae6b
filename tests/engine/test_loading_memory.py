"""Memory that loading takes beside the weights that it leaves: some matrices, never a plain model.

This file, run as a program, prints the megabytes of the heap at most and at the end.
"""

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec_cli.models.description import describe
from specdec_cli.models.held import return_unused
from specdec_cli.models.loader import load
from specdec_cli.models.spec import ModelSpec
from tests.support import CPU, tiny_config

HIDDEN, INNER, LAYERS = 768, 3072, 6
SHAPES = {f"self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qkvo"}
SHAPES |= {f"mlp.{n}_proj": (INNER, HIDDEN) for n in ("gate", "up")}
SHAPES["mlp.down_proj"] = (HIDDEN, INNER)
LAYER = sum(rows * columns for rows, columns in SHAPES.values()) * 4 / 2**20  # in fp32, MiB
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def write(folder: Path, kind: str) -> Path:
    """A model of 57 M numbers, in bf16 or in four bits."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    config = tiny_config("llama", **sizes, **heads).to_dict()
    config |= {"quantization_config": GPTQ} if kind == "gptq" else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    plain = {"model.norm": (HIDDEN,)}
    plain |= dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], HIDDEN))
    tensors: dict[str, torch.Tensor] = {}
    for i in range(LAYERS):
        norms = ("input_layernorm", "post_attention_layernorm")
        plain |= dict.fromkeys((f"model.layers.{i}.{norm}" for norm in norms), (HIDDEN,))
        for name, (rows, columns) in SHAPES.items():
            stem = f"model.layers.{i}.{name}"
            if kind != "gptq":
                tensors[f"{stem}.weight"] = torch.full((rows, columns), 0.01).bfloat16()
                continue
            tensors[f"{stem}.qweight"] = torch.full((columns // 8, rows), 7, dtype=torch.int32)
            tensors[f"{stem}.scales"] = torch.full((columns // 128, rows), 0.01).half()
    tensors |= {f"{name}.weight": torch.ones(shape).bfloat16() for name, shape in plain.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def heap() -> float:
    """MiB of this process's memory that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("RssAnon"))


def measure(folder: Path, weights: str) -> dict[str, float]:
    spec = ModelSpec("target", str(folder), None, "bfloat16", "auto", weights=weights)
    about = describe(spec, CPU).within(256)
    gc.collect()  # the model before
    return_unused(CPU)
    before, highest, is_over = heap(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            highest[0] = max(highest[0], heap())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = about.paged(load(about, CPU), 16, None)
    finally:
        is_over.set()
        watcher.join()
    assert model.fused is not None
    held = about.weight_bytes / 2**20
    return {"most": highest[0] - before, "end": heap() - before, "held": held}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_no_plain_model(tmp_path: Path) -> None:
    """Stored weights of 28 and 54 MiB, which are 108 MiB in bf16 and 216 in fp32."""
    cases = {"gptq": "stored", "plain": "fp8"}
    given = [f"{write(tmp_path / kind, kind)}={weights}" for kind, weights in cases.items()]
    command = [sys.executable, "-m", "tests.engine.test_loading_memory", *given]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    for line in told.splitlines():
        found = json.loads(line)
        assert found["held"] > 28, found
        assert found["most"] < found["held"] + 2 * LAYER, found
        assert found["end"] < found["held"] + LAYER / 4, found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for item in sys.argv[1:]:
        name, _, form = item.partition("=")
        print(json.dumps(measure(Path(name), form)))
