"""Rounds of a target and a draft of any degrees: the output does not depend on the degrees.

Models are tiny and fp32. Their logits lie far enough apart that the order in which ranks' parts are
added never decides a token of these runs.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.dist import cases
from tests.dist.world import World, over_gloo
from tests.support import (
    VOCAB,
    greedy_reference,
    make_engine,
    ngram_engine,
    reference,
    save_noised,
    save_tiny,
    tiny_config,
)

pytestmark = pytest.mark.dist
# Four ranks share two cores, so CI runs a case of each kind; `pytest tests/dist` runs all.
SLOW = pytest.mark.slow

PROMPTS = [
    [random.Random(i).randrange(3, VOCAB) for _ in range(length)]
    for i, length in enumerate((5, 1, 17))
]
PAIRS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (1, 1)]  # (target TP, draft TP)
ROUNDS = {"at once": False, "ahead": True}
NEW = 10
GREEDY = {"max_new_tokens": NEW}
SAMPLED = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 5}
MASKED = {"max_new_tokens": NEW, "temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 2**40 + 1}
CHANGED = {**GREEDY, "repetition_penalty": 1.5, "suppress_tokens": (5, 9)}
RUNS = [(3, GREEDY), (4, SAMPLED), (2, MASKED), (3, CHANGED), (2, {**SAMPLED, **CHANGED})]
# Families differ in passes, which know nothing of these settings: two of them run all.
FEWER = ["gemma3", "qwen3_moe", "mixtral", "gpt_oss"]
Pair = tuple[Path, Path]
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Targets with 2 key and value heads, each with a draft that agrees with it about half of the
    time."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for family in FAMILIES:
        # A tied tiny Gemma repeats its last token even with noise.
        target = save_tiny(folder / family, family, tie_word_embeddings=False)
        found[family] = (target, save_noised(folder / f"{family}-draft", target))
    return found


@pytest.fixture(scope="module")
def alone(pairs: dict[str, Pair]) -> dict[str, Any]:
    """The output of one process, in rounds that are read at once."""
    engines = {family: make_engine(*pair, batch_size=2) for family, pair in pairs.items()}
    return {
        family: cases.told(engine, PROMPTS, runs_of(family)) for family, engine in engines.items()
    }


def runs_of(family: str) -> list[tuple[int, dict[str, Any]]]:
    return RUNS[:2] if family in FEWER else RUNS


def agreed(found: list[Any], size: int) -> dict[str, Any]:
    """Rank 0's result, after a check that the other ranks have the same."""
    members = [x for x in found if x is not None]
    assert len(members) == size
    assert all(x["seqs"] == members[0]["seqs"] for x in members)
    return members[0]


@pytest.mark.parametrize(
    ("family", "tps", "rounds"),
    [
        ("llama", (2, 1), "at once"),
        ("qwen3", (4, 2), "ahead"),
        ("gemma3", (2, 2), "at once"),
        ("qwen3_moe", (2, 1), "ahead"),
        ("mixtral", (2, 2), "at once"),
        ("gpt_oss", (2, 1), "ahead"),
        *[pytest.param("llama", tps, "at once", marks=SLOW) for tps in PAIRS[1:]],
        *[pytest.param("qwen3", tps, "ahead", marks=SLOW) for tps in PAIRS if tps != (4, 2)],
        pytest.param("llama", (4, 2), "ahead", marks=SLOW),
        pytest.param("qwen3", (4, 2), "at once", marks=SLOW),
        pytest.param("gemma3", (4, 2), "ahead", marks=SLOW),
        pytest.param("qwen3_moe", (4, 4), "at once", marks=SLOW),
        pytest.param("mixtral", (4, 1), "ahead", marks=SLOW),
        pytest.param("gpt_oss", (4, 2), "at once", marks=SLOW),
    ],
    ids=str,
)
def test_output_does_not_depend_on_degrees(
    world: World,
    pairs: dict[str, Pair],
    alone: dict[str, Any],
    family: str,
    tps: tuple[int, int],
    rounds: str,
) -> None:
    """Compares tokens, proposals and acceptances, greedy and sampled. Slots are refilled, and
    proposals are cut at a sequence's end."""
    more = {"batch_size": 2, "runs_ahead": ROUNDS[rounds]}
    carried = (over_gloo,) if family == "qwen3" else ()  # its four ranks send as commands do
    found = world.run(*carried, cases.decode, pairs[family], tps, PROMPTS, runs_of(family), **more)
    first = agreed(found, tps[0])
    assert first["seqs"] == alone[family]["seqs"]
    proposing = first["metrics"][0]
    assert 0.2 < proposing.draft_acceptance_rate < 0.9
    lengths = {k for seq in first["seqs"][0] for k in seq[1]}
    assert len(lengths) > 1, "no rounds of mixed proposal lengths"
    # The draft's ranks hold both caches, the other ranks only the target's.
    held = [len(x["kv_bytes"]) for x in found if x is not None]
    assert held == [2] * tps[1] + [1] * (tps[0] - tps[1])
    sent = [m.broadcast_ms for m in first["metrics"]]
    assert all(sent) if tps[0] > 1 else max(sent) < 0.5


@pytest.mark.parametrize(("tps", "rounds"), [((2, 1), "at once"), ((4, 2), "ahead")], ids=str)
def test_arrivals_are_those_of_the_first_ranks_clock(
    world: World, pairs: dict[str, Pair], tps: tuple[int, int], rounds: str
) -> None:
    """Each rank admits the same sequences in the same step, and texts are those of one process."""
    more = {"batch_size": 2, "runs_ahead": ROUNDS[rounds]}
    due = [0.0, *[0.02 * i for i in range(1, len(PROMPTS) - 1)], 0.6]
    found = world.run(cases.arriving, pairs["llama"], tps, PROMPTS, due, **more)
    first = agreed(found, tps[0])
    members = [x for x in found if x is not None]
    assert all(x["steps"] == first["steps"] and x["sent"] == first["sent"] for x in members)
    assert sum(first["sent"]) == len(PROMPTS) - 1 and first["sent"].count(0) > 0
    closed = cases.told(make_engine(*pairs["llama"], **more), PROMPTS, [(3, {"max_new_tokens": 9})])
    assert first["seqs"] == closed["seqs"][0]


@pytest.mark.parametrize("rounds", [pytest.param("at once", marks=SLOW), "ahead"])
def test_plain_decoding_and_single_proposals(
    world: World, pairs: dict[str, Pair], rounds: str
) -> None:
    runs = [(0, GREEDY), (0, SAMPLED), (1, SAMPLED)]
    want = cases.told(make_engine(*pairs["llama"], batch_size=2), PROMPTS, runs)
    more = {"batch_size": 2, "runs_ahead": ROUNDS[rounds]}
    found = world.run(cases.decode, pairs["llama"], (4, 2), PROMPTS, runs, **more)
    assert agreed(found, 4)["seqs"] == want["seqs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_transformers(pairs: dict[str, Pair], alone: dict[str, Any], family: str) -> None:
    """With the test above this holds at every degree."""
    model = reference(pairs[family][0])
    for prompt, told in zip(PROMPTS, alone[family]["seqs"][0], strict=True):
        assert told[0] == greedy_reference(model, prompt, NEW)


@pytest.mark.parametrize("rounds", [pytest.param("at once", marks=SLOW), "ahead"])
@pytest.mark.parametrize("tps", [(2, 1), pytest.param((4, 2), marks=SLOW)], ids=str)
def test_preemption_and_eos(
    world: World, pairs: dict[str, Pair], tps: tuple[int, int], rounds: str
) -> None:
    runs = [(4, SAMPLED | {"max_new_tokens": 30})]
    freely = cases.told(make_engine(*pairs["llama"]), PROMPTS, runs)["seqs"][0]
    settings: dict[str, Any] = {"batch_size": 3, "eos_ids": frozenset({freely[0][0][13]})}
    ample = cases.told(make_engine(*pairs["llama"], **settings), PROMPTS, runs)
    found = world.run(
        cases.decode,
        pairs["llama"],
        tps,
        PROMPTS,
        runs,
        num_blocks=17,
        runs_ahead=ROUNDS[rounds],
        **settings,
    )
    first = agreed(found, tps[0])
    assert [s[:4] for s in first["seqs"][0]] == [s[:4] for s in ample["seqs"][0]]
    assert sum(s[4] for s in first["seqs"][0]) > 0
    assert {s[3] for s in first["seqs"][0]} == {"eos", "length"}


@pytest.mark.parametrize("rounds", [pytest.param("at once", marks=SLOW), "ahead"])
def test_synthetic_acceptance(world: World, pairs: dict[str, Pair], rounds: str) -> None:
    rates = (0.8, 0.5, 0.2)
    runs = [(3, GREEDY), (3, SAMPLED)]
    one, four = (
        agreed(
            world.run(
                cases.decode,
                pairs["llama"],
                tps,
                PROMPTS,
                runs,
                rates=rates,
                batch_size=2,
                runs_ahead=ROUNDS[rounds],
            ),
            tps[0],
        )
        for tps in ((1, 1), (4, 2))
    )
    assert one["seqs"] == four["seqs"]


@pytest.mark.parametrize("rounds", [pytest.param("at once", marks=SLOW), "ahead"])
def test_prompt_lookup(world: World, pairs: dict[str, Pair], rounds: str) -> None:
    """Each rank looks up separately and finds the same tokens."""
    target = pairs["llama"][0]
    prompts = [p * 3 for p in PROMPTS]
    runs = [(4, GREEDY), (4, SAMPLED)]
    want = cases.told(ngram_engine(target, batch_size=2), prompts, runs)
    more = {"batch_size": 2, "runs_ahead": ROUNDS[rounds]}
    first = agreed(world.run(cases.decode, (target, None), (4, 1), prompts, runs, **more), 4)
    assert first["seqs"] == want["seqs"]
    assert first["metrics"][0].num_draft_tokens > 0


@pytest.mark.parametrize("rounds", [pytest.param("at once", marks=SLOW), "ahead"])
def test_logits_that_are_not_finite_end_the_run_everywhere(
    world: World, pairs: dict[str, Pair], rounds: str, tmp_path: Path
) -> None:
    """Only rank 0 sees such logits; the others must not continue without it."""
    said = world.run(cases.spoilt, pairs["llama"], (4, 2), PROMPTS, runs_ahead=ROUNDS[rounds])
    assert said == ["the draft produced logits that are not finite (NaN or infinity)"] * 4


def test_the_demo_pair_from_a_recipe(world: World) -> None:
    """The cache fits on rank 0, which holds both models and has the least room."""
    # Blocks of 16 tokens, fp32, keys and values 32 wide: 8 layers of one head, and the draft's 2.
    draft_tp = 2
    block = 16 * 4 * 64 * (8 * 1 + 2 * 4 // draft_tp)
    sets = {
        "speculation.num_speculative_tokens": 3,
        "sampling.max_new_tokens": NEW,
        "sampling.temperature": 0.7,
        "sampling.ignore_eos": True,
        "run.device": "cpu",
        "run.batch_size": 2,
        "cache.cpu_bytes": 4 * 5 * block,
    }
    split = {"target.tensor_parallel_size": 4, "draft.tensor_parallel_size": draft_tp}
    one = cases.built(0, sets, PROMPTS)
    found = world.run(cases.built, sets | split, PROMPTS)
    assert [x["outputs"] for x in found] == [one["outputs"]] * 4
    assert {x["num_blocks"] for x in found} == {5}
    roles = [["target", "draft"]] * draft_tp + [["target"]] * (4 - draft_tp)
    assert [x["held"] for x in found] == roles
    assert [x["draft_bytes"] > 0 for x in found] == [len(held) == 2 for held in roles]
    assert {x["kv_heads"] for x in found} == {1}


def shared(folder: Path, target_tp: int, draft_tp: int) -> dict[str, Any]:
    """A recipe with one random model as target and draft, which share all weights they can."""
    tiny_config("llama").save_pretrained(folder)
    return {
        "target.model": str(folder),
        "target.load_format": "dummy",
        "target.tensor_parallel_size": target_tp,
        "draft.model": str(folder),
        "draft.load_format": "dummy",
        "draft.tensor_parallel_size": draft_tp,
        "draft.share": ["embeddings", "lm_head"],
        "speculation.num_speculative_tokens": 3,
        "sampling.max_new_tokens": NEW,
        "run.device": "cpu",
    }


def test_a_shared_head_over_ranks(world: World, tmp_path: Path) -> None:
    one = cases.built(0, shared(tmp_path, 1, 1), PROMPTS)
    found = world.run(cases.built, shared(tmp_path, 4, 4), PROMPTS)
    assert [x["outputs"] for x in found] == [one["outputs"]] * 4
    assert one["accepted"] == found[0]["accepted"] and min(one["accepted"]) > 0


def test_a_head_that_is_split_in_other_ways_is_not_shared(world: World, tmp_path: Path) -> None:
    said = world.run(cases.refused, shared(tmp_path, 4, 2))
    assert len(set(said)) == 1, "a rank that goes on alone would wait for ever"
    assert "split over 4 ranks" in said[0]
    assert "draft.tensor_parallel_size is 2" in said[0]


def test_ranks_that_met_differently_often_do_not_meet_again(world: World) -> None:
    """In torch such ranks would wait for each other forever."""
    said = world.run(cases.refusal_to_meet, [2, 2, 0, 0])
    assert said == ["some ranks have connected through shared memory more often than others"] * 4
    assert world.run(cases.refusal_to_meet, [2, 2, 2, 2]) == [None] * 4


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ({"target.tensor_parallel_size": 2}, "is 2, but 4 processes are running"),
        ({"target.tensor_parallel_size": 1}, "is 1, but 4 processes are running"),
        (
            {"target.tensor_parallel_size": 4, "run.device": "cuda:1"},
            "cuda:1 is a single device, but each of the 4 ranks needs its own",
        ),
    ],
)
def test_a_world_that_does_not_fit(world: World, sets: dict[str, Any], reason: str) -> None:
    said = world.run(cases.refused, {"run.device": "cpu", **sets})
    assert len(set(said)) == 1 and reason in said[0]
