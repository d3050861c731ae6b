"""Rounds of a target and a draft of any degrees: what is written does not depend on them.

fp32 and tiny models, whose logits lie far enough apart that the order in which ranks' parts are
added never decides a token of these runs.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.engine.parallel import ONE_RANK
from tests.dist import cases
from tests.dist.world import World
from tests.support import VOCAB, greedy_reference, make_engine, ngram_engine, reference, save_tiny

pytestmark = pytest.mark.dist

PROMPTS = [
    [random.Random(i).randrange(3, VOCAB) for _ in range(length)]
    for i, length in enumerate((5, 1, 2, 17, 9, 30))
]
PAIRS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # (target TP, draft TP)
ROUNDS = {"ragged": False, "padded": True}
SAMPLED = {"temperature": 0.8, "seed": 5}
MASKED = {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 2**40 + 1}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Targets, each with a draft that agrees with it about half of the time. Both llamas have 2 key
    and value heads, so 4 ranks hold each of them twice."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for family in ("llama", "qwen3"):
        target = save_tiny(folder / family, family)
        found[family] = (target, noised(target, folder / f"{family}-draft"))
    return found
