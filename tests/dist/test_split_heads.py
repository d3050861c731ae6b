"""EAGLE-3 heads beside a target that is split over ranks: rank 0 runs the head, or several share
it. Neither text nor rounds depend on the degrees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.recipe.choices.registry import METHODS
from tests.dist import cases
from tests.dist.world import World
from tests.eagle3_pair import NEW_TOKENS, PROMPTS, Pair, expected_rounds, in_bits, save_pair
from tests.inside import save_inside
from tests.support import greedy_reference, reference, save_noised

pytestmark = pytest.mark.dist
K = 4
GREEDY: dict[str, Any] = {"sampling.temperature": 0.0}
SAMPLED: dict[str, Any] = {"sampling.temperature": 0.4, "sampling.top_k": 20, "run.seed": 5}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A recipe's degree is that of its world."""
    world = World(2, tmp_path_factory.mktemp("two"), "memory")
    yield world
    world.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The second head borrows the target's head, of which each rank holds a part: 97 rows do not
    divide evenly."""
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "reduced": save_pair(folder / "reduced", draft_vocab=60),
        "biases": save_pair(folder / "biases", attention_bias=True, mlp_bias=True),
        "borrowing": save_pair(folder / "borrowing", lends_head=True),
    }


def sets_of(pair: Any, degree: int, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "target.model": str(pair.target),
        "target.tensor_parallel_size": degree,
        "draft.model": str(pair.folder),
        "run.device": "cpu",
        "run.batch_size": 3,
        "cache.block_size": 4,
        "speculation.num_speculative_tokens": K,
        "sampling.max_new_tokens": NEW_TOKENS,
        "sampling.ignore_eos": True,
    } | more


ALONE: dict[str, dict[str, Any]] = {}  # records of one process, by settings


def alone(pair: Any, more: dict[str, Any]) -> dict[str, Any]:
    """The record of one process, which several tests compare with ranks."""
    sets = sets_of(pair, 1, more)
    if (key := repr(sets)) not in ALONE:
        ALONE[key] = cases.built(0, sets, PROMPTS)
    return ALONE[key]


def checked(
    world: World, pair: Any, more: dict[str, Any], draft_tp: int = 1
) -> list[dict[str, Any]]:
    """The records of all ranks, after a comparison with one process's rounds."""
    one = alone(pair, more)
    more = more | {"draft.tensor_parallel_size": draft_tp}
    found = world.run(cases.built, sets_of(pair, world.size, more), PROMPTS)
    assert [x["outputs"] for x in found] == [one["outputs"]] * world.size
    assert [x["rounds"] for x in found] == [one["rounds"]] * world.size
    for told, split in zip(one["forecasts"], found[0]["forecasts"], strict=True):
        assert told.overlap == pytest.approx(split.overlap, abs=1e-4)
        assert [pytest.approx(row, abs=1e-4) for row in told.ahead] == list(split.ahead)
    assert sum(one["accepted"]) >= 3, "nothing stands, so rounds could not differ"
    holders = found[:draft_tp]
    assert [x["draft_bytes"] > 0 for x in found] == [x in holders for x in found]
    assert [x["draft_bytes"] for x in holders] == [x["draft_planned"] for x in holders]
    return found


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        pytest.param("reduced", SAMPLED, id="reduced-sampled"),
        # test_rounds_are_the_reference_s has the other head, greedily.
        pytest.param("reduced", GREEDY, id="reduced-greedy", marks=pytest.mark.slow),
        pytest.param("borrowing", SAMPLED, id="borrowing-sampled", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(two: World, pairs: dict[str, Pair], kind: str, params: dict[str, Any]) -> None:
    checked(two, pairs[kind], params)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        pytest.param("biases", SAMPLED, id="biases-sampled"),
        pytest.param("borrowing", GREEDY, id="borrowing-greedy"),
        pytest.param("reduced", GREEDY | {"cache.dtype": "fp8"}, id="reduced-fp8"),
        pytest.param("biases", GREEDY, id="biases-greedy", marks=pytest.mark.slow),
        pytest.param("reduced", GREEDY, id="reduced-greedy", marks=pytest.mark.slow),
        pytest.param("reduced", SAMPLED, id="reduced-sampled", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_share_a_head(
    two: World, pairs: dict[str, Pair], kind: str, params: dict[str, Any]
) -> None:
    found = checked(two, pairs[kind], params, draft_tp=2)
    whole = alone(pairs[kind], params)["draft_bytes"]
    assert all(x["draft_bytes"] < 0.8 * whole for x in found)


@pytest.mark.slow
@pytest.mark.parametrize("draft_tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["reduced", "borrowing", "biases"])
def test_four_ranks(world: World, pairs: dict[str, Pair], kind: str, draft_tp: int) -> None:
    """Two ranks share it, or all four, which outnumber the key and value heads."""
    checked(world, pairs[kind], GREEDY, draft_tp)


# test_split_models.py has passes of every form of stored weights.
@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_rounds_over_a_quantised_target(
    two: World, pairs: dict[str, Pair], bits: int, tmp_path: Path
) -> None:
    """Each rank holds its part as stored; rounds are the reference's on plain numbers."""
    kept, plain = in_bits(pairs["reduced"], tmp_path, bits)
    first = checked(two, kept, GREEDY | {"target.weights": "stored"})[0]
    assert first["execution"]["target_weights"].endswith("as stored")
    oracle = reference(plain)
    assert first["outputs"] == [greedy_reference(oracle, p, NEW_TOKENS) for p in PROMPTS]
    for prompt, (proposed, accepted) in zip(PROMPTS, first["rounds"], strict=True):
        rounds = [pair for pair in zip(proposed, accepted, strict=True) if pair[0]]
        assert rounds == expected_rounds(plain, kept.head, prompt, K)


@pytest.fixture(scope="module")
def borrowing(two: World, pairs: dict[str, Pair]) -> dict[str, Any]:
    """Rank 0's record of greedy rounds with the head that borrows."""
    return checked(two, pairs["borrowing"], GREEDY)[0]


def test_rounds_are_the_reference_s(borrowing: dict[str, Any], pairs: dict[str, Pair]) -> None:
    target, _, head = pairs["borrowing"]
    first = borrowing
    oracle = reference(target)
    assert first["outputs"] == [greedy_reference(oracle, p, NEW_TOKENS) for p in PROMPTS]
    rounds = [list(zip(*lengths, strict=True)) for lengths in first["rounds"]]
    assert rounds == [expected_rounds(target, head, p, K) for p in PROMPTS]


def test_a_copy_of_the_target_s_head_is_counted(
    borrowing: dict[str, Any], pairs: dict[str, Pair]
) -> None:
    """The copy appears in the notes too. A single process borrows the matrix itself."""
    one, split = alone(pairs["borrowing"], GREEDY), borrowing
    lent = "embed_tokens.weight, lm_head.weight"
    assert one["execution"]["draft_borrows"] == lent
    told = f"{lent} (a copy, since ranks of the target hold parts)"
    assert split["execution"]["draft_borrows"] == told
    assert split["draft_bytes"] == split["draft_planned"]
    assert one["draft_bytes"] == one["draft_planned"]


def test_ranks_share_a_draft_in_the_target_s_files(two: World, tmp_path: Path) -> None:
    pair = save_pair(tmp_path / "pair", steps=0)
    save_inside(pair.target, save_noised(tmp_path / "draft", pair.target))
    sets = sets_of(pair, 1, GREEDY)
    del sets["draft.model"]
    one = cases.inside(0, sets, PROMPTS)
    found = two.run(cases.inside, sets | {"target.tensor_parallel_size": 2}, PROMPTS)
    assert [x["rounds"] for x in found] == [one["rounds"]] * 2 and sum(one["accepted"]) > 10
    assert [x["outputs"] for x in found] == [one["outputs"]] * 2
    assert all(0 < x["draft_bytes"] == x["draft_planned"] < one["draft_bytes"] for x in found)
    del METHODS["inside"]


@pytest.mark.parametrize(
    ("ranks", "family", "count", "params"),
    [
        pytest.param("two", "deepseek_v3", 1, SAMPLED, id="latent-sampled"),
        pytest.param("world", "glm4_moe", 2, GREEDY, id="two-greedy"),
        pytest.param("two", "mimo_v2_flash", 2, GREEDY, id="mimo-two-greedy"),
        *(
            pytest.param("world", *case, id=f"{name} over four", marks=pytest.mark.slow)
            for name, case in {
                "latent-sampled": ("deepseek_v3", 1, SAMPLED),
                "latent-two-greedy": ("deepseek_v3", 2, GREEDY),
                "one-greedy": ("glm4_moe", 1, GREEDY),
                "two-sampled": ("glm4_moe", 2, SAMPLED),
                "mellum-sampled": ("mellum", 1, SAMPLED),
                "mimo-two-greedy": ("mimo_v2_flash", 2, GREEDY),
            }.items()
        ),
    ],
)
def test_ranks_share_modules_in_the_target_s_files(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    ranks: str,
    family: str,
    count: int,
    params: dict[str, Any],
) -> None:
    """MTP modules, whose heads and experts are split over the ranks as the target's are."""
    pytest.importorskip("transformers", minversion="5.23")
    from tests.mtp_pair import save_mtp

    target = save_mtp(tmp_path / "target", family, count)
    sets = {"target.model": str(target), "speculation.method": "mtp", "run.device": "cpu"}
    sets |= {"speculation.num_speculative_tokens": 2, "cache.block_size": 4, "run.batch_size": 3}
    sets |= {"sampling.max_new_tokens": NEW_TOKENS, "sampling.ignore_eos": True, **params}
    one = cases.built(0, sets, PROMPTS)
    world: World = request.getfixturevalue(ranks)
    degree = {"target.tensor_parallel_size": world.size}
    found = world.run(cases.built, sets | degree, PROMPTS)
    assert [x["outputs"] for x in found] == [one["outputs"]] * world.size
    assert [x["rounds"] for x in found] == [one["rounds"]] * world.size
    assert sum(one["accepted"]) >= 3
    assert all(x["held"] == ["target", "draft"] for x in found)
    assert all(x["draft_bytes"] < 0.8 * one["draft_bytes"] for x in found)


@pytest.mark.parametrize(
    ("draft_tp", "params"),
    [
        pytest.param(1, SAMPLED, id="one-sampled", marks=pytest.mark.slow),
        # Its layers are those of DSpark's drafter below.
        pytest.param(2, SAMPLED, id="two-sampled", marks=pytest.mark.slow),
        pytest.param(2, GREEDY, id="two-greedy", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_a_block_drafter(
    two: World, tmp_path: Path, draft_tp: int, params: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    from tests.block_pair import save_pair as save_block_pair

    checked(two, save_block_pair(tmp_path), params, draft_tp)


def saved(kind: str, folder: Path) -> Any:
    """A target and a drafter of this kind."""
    if kind == "peagle":
        from tests.engine.test_peagle import save_pair as save_masked_head

        return save_masked_head(folder, draft_vocab=80)
    if kind == "pard":
        from tests.engine.test_pard import save_pair as save_masked_draft

        return save_masked_draft(folder)
    pytest.importorskip("transformers", minversion="5.23")
    from tests.block_pair import save_pair as save_block_pair

    if kind == "dflash":
        return save_block_pair(folder)
    return save_block_pair(folder, "deepspec", anchor=True, markov="gated")


# test_split_rounds.py has drafts that are models, as PARD's is.
@pytest.mark.parametrize("kind", ["dspark", "peagle", pytest.param("pard", marks=pytest.mark.slow)])
def test_ranks_share_a_drafter_of_another_kind(two: World, tmp_path: Path, kind: str) -> None:
    # Drafters are trained on greedy texts, so of hotter ones too little stands on some processors.
    cool = SAMPLED | {"sampling.temperature": 0.1}
    checked(two, saved(kind, tmp_path), cool, draft_tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle", "pard"])
def test_four_ranks_share_a_drafter(world: World, tmp_path: Path, kind: str) -> None:
    """Four ranks share it, or two of them do, or the first has it alone."""
    pair = saved(kind, tmp_path)
    for draft_tp in (1, 2, 4):
        checked(world, pair, GREEDY, draft_tp)
