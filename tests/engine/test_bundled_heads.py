"""The heads of the demo target that are stored in fp8: method, text, acceptance, and numbers."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec_cli.core.types import Request, Sequence
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.errors import UsageError
from specdec_cli.recipe import load_recipe
from tests.engine.test_demo_pair import prompts

METHODS = {"dflash": "dflash", "dspark": "dspark", "peagle": "peagle", "mtp": "mtp_module"}
# Accepted of three proposals: they have 1.19, 1.53, 1.61 and 1.53, and one that knows nothing has
# almost none. Decoding is greedy, so the figures do not vary. To be set anew with other heads.
FLOORS = {"dflash": 1.1, "dspark": 1.4, "peagle": 1.5, "mtp": 1.4}


def seqs_of(draft: str, *lengths: int) -> list[list[Sequence]]:
    """Two prompts at each k, by one engine."""
    keys = {"run.device": "cpu", "*.dtype": "float32", "sampling.max_new_tokens": 24}
    keys |= {"draft.model": draft, "speculation.num_speculative_tokens": 3, "run.batch_size": 2}
    planned = plan(load_recipe(None, keys))
    assert planned.recipe.speculation.method == METHODS[Path(draft.removeprefix("demo:")).name]
    asked = [Request(i, tuple(planned.tokenizer.encode(p))) for i, p in enumerate(prompts()[2:9:6])]
    engine = build(planned, max(len(request.token_ids) for request in asked))
    return [engine.run(asked, k, planned.params).seqs for k in lengths]


@pytest.mark.parametrize("weights", ["stored", "fp8"])
def test_heads_run_on_plain_weights(weights: str) -> None:
    keys = {"draft.model": "demo:mtp", "draft.weights": weights, "run.device": "cpu"}
    with pytest.raises(UsageError, match=f"draft.weights: {weights} does not suit demo:mtp"):
        plan(load_recipe(None, keys))


def undone(source: Path, folder: Path) -> str:
    """A copy whose matrices are plain."""
    tensors = load_file(source / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    assert scales
    for name, scale in scales.items():
        codes = tensors[name.removesuffix("_scale")]
        tensors[name.removesuffix("_scale")] = codes.float() * scale.float()
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", METHODS)
def test_a_bundled_head(name: str, tmp_path: Path) -> None:
    """Its proposals are those of the numbers that its codes and scales stand for."""
    plain, found = seqs_of(f"demo:{name}", 0, 3)
    assert [seq.output_ids for seq in found] == [seq.output_ids for seq in plain]
    counts = [accepted for seq in found for accepted in seq.accepted_per_round]
    assert sum(counts) / len(counts) > FLOORS[name]
    [again] = seqs_of(undone(demo_path(f"demo:{name}"), tmp_path / name), 3)
    assert [s.accepted_per_round for s in again] == [s.accepted_per_round for s in found]
