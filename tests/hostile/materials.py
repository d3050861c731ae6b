"""The intact models and run folders that cases damage."""

import json
import os
import shutil
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.demo import demo_path

FAMILIES = (
    *("llama3-rope", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi3", "olmo2"),
    *("cohere2", "gemma3n", "mistral", "opt"),
)
_QUICK = ["--device", "cpu", "--max-new-tokens", "6", "-q", "--set", "run.warmup=0"]
SWEEP = ["sweep-k", "demo", *_QUICK, "--k", "0,2", "--limit", "4", "--set", "run.repeats=2"]
COMPARE = ["compare-tp", "demo", *_QUICK, "--target-tp", "1", "--draft-tp", "1", "--limit", "2"]
GENERATE = ["generate", "demo", *_QUICK, "--limit", "6"]
RUNS = {
    "sweep": SWEEP,
    "shard-0": [*SWEEP, "--shard", "0/2"],
    "shard-1": [*SWEEP, "--shard", "1/2"],
    "generate": GENERATE,
    "compare": COMPARE,
}


@dataclass(frozen=True)
class Materials:
    """Folders under `root`; the run folders are those of the commands in `RUNS`."""

    root: Path

    @property
    def tiny(self) -> list[Path]:
        """Random models of several families."""
        return [found for name in FAMILIES if (found := self.root / name).exists()]

    @property
    def fp8(self) -> Path:
        return self.root / "fp8"

    @property
    def sharded(self) -> Path:
        """The demo draft in two files with an index."""
        return self.root / "sharded"

    @property
    def runs(self) -> list[Path]:
        return [found for name in RUNS if (found := self.root / name).exists()]


def _make(root: Path, families: Collection[str], runs: Collection[str]) -> None:
    """Write the materials. Runs torch, whose threads would not survive a fork."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from specdec_cli.app import main
    from tests.engine.test_quantised import WIDE, change, quantise
    from tests.support import VOCAB, save_tiny

    materials = Materials(root)
    for name in families:
        save_tiny(root / name, name)
    change(save_tiny(materials.fp8, "llama", **WIDE), quantise)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for folder in (*materials.tiny, materials.fp8):
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    shutil.copytree(demo_path("demo:draft"), materials.sharded)
    file = materials.sharded / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {key: names[place % 2] for place, key in enumerate(tensors)}
    for name in names:
        part = {key: tensors[key] for key in tensors if where[key] == name}
        save_file(part, materials.sharded / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (materials.sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in runs:
        code = main([*RUNS[name], "-o", str(root / name), "--json"])
        assert code == 0, f"{name} ended {code}"


def made_in_fork(
    root: Path, families: Collection[str] = FAMILIES, runs: Collection[str] = tuple(RUNS)
) -> Materials:
    """Materials with models of these families and these run folders, made by another process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            root.mkdir()
            quiet = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            _make(root, families, runs)
            code = 0
        except BaseException:
            (root / "log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, (root / "log").read_text()
    return Materials(root)
