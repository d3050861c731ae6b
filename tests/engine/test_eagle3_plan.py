"""EAGLE-3 heads as a recipe names them: planned, loaded, measured and run."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.core.types import Permissions, Request, SamplingParams
from specdec_cli.engine.build import build, load_models
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.memory.budget import CacheNeed
from specdec_cli.engine.memory.estimate import estimate_passes
from specdec_cli.engine.memory.measured import weight_bytes
from specdec_cli.engine.plan import Plan, block_bytes_of, plan, plan_all_ranks
from specdec_cli.errors import ExitCode, SetupError, SpecdecError
from specdec_cli.methods.base import RoundSize
from specdec_cli.methods.eagle3 import METHOD
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.eagle3.config import read_head_config
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import load_recipe
from tests.drafting import check_estimates, estimates, rounds_of
from tests.eagle3 import Head, head_config, save_head
from tests.eagle3_pair import NEW_TOKENS, PROMPTS, Pair, expected_rounds, in_bits, save_pair
from tests.support import CPU, greedy_reference, greedy_text, reference, save_noised

SLOW = pytest.mark.slow
SIZES: dict[str, Any] = {
    "hidden": 64,
    "target_hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "outputs": (0, 1, 2),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"), draft_vocab=60)


Rounds = Callable[[int], list[list[tuple[int, int]]]]


@pytest.fixture(scope="module")
def rounds_at(pair: Pair) -> Rounds:
    """The reference's rounds of every prompt at a k, made once."""

    def rounds(k: int) -> list[list[tuple[int, int]]]:
        return [expected_rounds(pair.target, pair.head, p, k) if k else [] for p in PROMPTS]

    return cache(rounds)


def planned(target: Path, draft: Path, k: int = 4, **keys: object) -> Plan:
    overrides: dict[str, object] = {
        "target.model": str(target),
        "draft.model": str(draft),
        "run.device": "cpu",
        "cache.block_size": 4,
        "run.batch_size": 4,
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS,
        "sampling.ignore_eos": True,
    }
    more = {name.replace("__", "."): value for name, value in keys.items()}
    return plan(load_recipe(None, overrides | more))


def run(engine: Engine, k: int, params: SamplingParams) -> list[Any]:
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    seqs = engine.run(requests, k, params).seqs
    assert engine.allocator.num_used == 0
    return seqs


def texts_of(target: Path) -> list[list[int]]:
    return [greedy_text(target, prompt, NEW_TOKENS) for prompt in PROMPTS]


SETTINGS: dict[str, dict[str, object]] = {
    "one by one": {"run__batch_size": 1},
    "refills": {"run__batch_size": 3},
    "chunks": {"run__batch_size": 3, "run__prefill_chunk": 3},
    "preemption": {"run__batch_size": 4, "cache__num_blocks": 17},
}


@pytest.mark.parametrize(
    "case",
    ["preemption", *(pytest.param(c, marks=SLOW) for c in SETTINGS if c != "preemption")],
)
def test_text_is_the_target_s_and_rounds_are_the_reference_s(
    pair: Pair, rounds_at: Rounds, case: str
) -> None:
    """This holds at each k up to the planned one, on one engine."""
    found = planned(pair.target, pair.folder, 4, **SETTINGS[case])
    assert found.recipe.speculation.method == "eagle3" and found.k == 4
    engine = build(found, 11)
    wanted = texts_of(pair.target)
    for k in (4, 1, 0, 2):
        seqs = run(engine, k, found.params)
        assert [s.output_ids for s in seqs] == wanted
        assert list(map(rounds_of, seqs)) == rounds_at(k)
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


@pytest.mark.slow  # dist/test_split_heads.py has one process's rounds over four bits, too
@pytest.mark.parametrize("bits", [8, 4])
def test_rounds_over_a_quantised_target_are_the_reference_s(
    pair: Pair, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs on transformers' dequantised model in 8 bits, or on 4-bit numbers."""
    kept, plain = in_bits(pair, tmp_path, bits)
    found = planned(kept.target, kept.folder, 4, run__batch_size=3, target__weights="stored")
    assert found.target.keeps_stored
    engine = build(found, 11)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # it dequantises then
    needed = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
    monkeypatch.setattr(needed, lambda: True)  # to place modules on several devices only
    oracle, wanted = kept.target if bits == 8 else plain, texts_of(plain)
    assert texts_of(oracle) == wanted != texts_of(pair.target)
    for k in (4, 2):
        seqs = run(engine, k, found.params)
        assert [s.output_ids for s in seqs] == wanted
        rounds = [expected_rounds(oracle, kept.head, p, k) for p in PROMPTS]
        assert list(map(rounds_of, seqs)) == rounds
        assert sum(stand for found in rounds for _, stand in found) > 5


def test_positions_that_no_text_reaches_cost_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.engine.build._FEWEST_POSITIONS", 1)
    found = planned(pair.target, pair.folder)
    engine = build(found, 11)
    assert engine.proposer is not None and engine.proposer.max_len == engine.max_model_len
    assert engine.max_model_len == 11 + NEW_TOKENS < found.max_model_len
    assert [s.output_ids for s in run(engine, 4, found.params)] == texts_of(pair.target)


def test_a_sequence_that_proposes_nothing_beside_others(pair: Pair) -> None:
    """Its context is full after one token. All are prefilled in one pass, whose hidden states the
    head takes in as a whole."""
    found = planned(pair.target, pair.folder, run__batch_size=4, cache__max_model_len=12)
    seqs = run(build(found, 11), 4, found.params)
    room = [12 - len(prompt) for prompt in PROMPTS]
    wanted = [text[:count] for text, count in zip(texts_of(pair.target), room, strict=True)]
    assert [s.output_ids for s in seqs] == wanted
    assert [bool(s.accepted_per_round) for s in seqs] == [True, True, False, True]


@pytest.mark.parametrize(
    "family",
    ["gemma2", *(pytest.param(f, marks=SLOW) for f in ("qwen3", "mixtral", "gpt2", "gpt_oss"))],
)
def test_other_targets(family: str, tmp_path: Path) -> None:
    """Two without fused layers, and one that scales embeddings: the head reads them unscaled."""
    target, folder, head = save_pair(tmp_path, family)
    found = planned(target, folder, run__batch_size=2)
    seqs = run(build(found, 11), 4, found.params)
    assert [s.output_ids for s in seqs] == texts_of(target)
    assert list(map(rounds_of, seqs)) == [expected_rounds(target, head, p, 4) for p in PROMPTS]


def test_a_head_with_weights_of_its_own(pair: Pair, tmp_path: Path) -> None:
    target, _, head = pair
    folder = save_head(tmp_path / "own", head, "safeailab")
    found = planned(target, folder)
    assert "borrows" not in " ".join(found.execution)
    seqs = run(build(found, 11), 4, found.params)
    assert list(map(rounds_of, seqs)) == [expected_rounds(target, head, p, 4) for p in PROMPTS]


def test_plain_decoding_runs_no_head(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At k = 0 no head is loaded, and in an engine with a head plain passes do not run it."""
    bare = planned(pair.target, pair.folder, 0)
    engine = build(bare, 11)
    assert bare.draft is None and engine.proposer is None and not engine.target.hidden_layers
    found = planned(pair.target, pair.folder, 4)
    engine = build(found, 11)
    assert engine.target.hidden_layers == (1, 2, 3)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("called")

    for name in ("prefill", "propose", "commit"):
        monkeypatch.setattr(StepHead, name, fail)
    kept = Counter[bool]()
    run_pass = PagedModel._run

    def watched(self: PagedModel, *args: Any, **more: Any) -> Any:
        out = run_pass(self, *args, **more)
        kept[out.hidden is not None] += 1
        return out

    monkeypatch.setattr(PagedModel, "_run", watched)
    assert [s.output_ids for s in run(engine, 0, found.params)] == texts_of(pair.target)
    assert kept[False] > 20 and not kept[True]


def test_a_length_policy_that_proposes_nothing_at_times(pair: Pair) -> None:
    """A round of no proposals writes the head's rows too, so that later ones lack nothing."""
    policy = {"policy": "adaptive", "choices": [0, 4]}
    found = planned(pair.target, pair.folder, 4, run__batch_size=1, speculation__length=policy)
    engine = build(found, 11)
    turns, expected_turns = cycle([4, 0, 4, 0, 0]), cycle([4, 0, 4, 0, 0])
    engine.policy.next_k = lambda *_: next(turns)  # type: ignore[method-assign]
    seqs = run(engine, 4, found.params)
    assert [s.output_ids for s in seqs] == texts_of(pair.target)
    wanted = [expected_rounds(pair.target, pair.head, p, expected_turns) for p in PROMPTS]
    assert list(map(rounds_of, seqs)) == wanted
    assert sum(a for rounds in wanted for _, a in rounds) > 10


def test_a_target_serves_several_drafts(pair: Pair, rounds_at: Rounds, tmp_path: Path) -> None:
    """Drafts with and without hidden states use weights that are loaded once, like in a sweep."""
    noised = save_noised(tmp_path / "noised", pair.target)
    wanted, target = texts_of(pair.target), None
    for draft, layers in ((pair.folder, (1, 2, 3)), (noised, ()), (pair.folder, (1, 2, 3))):
        found = planned(pair.target, draft, 4)
        engine = build(found, 11, loaded_target=target)
        target = engine.target
        assert target.hidden_layers == layers
        seqs = run(engine, 4, found.params)
        assert [s.output_ids for s in seqs] == wanted
        if layers:
            assert list(map(rounds_of, seqs)) == rounds_at(4)


def test_the_record_of_a_run(pair: Pair) -> None:
    told = planned(pair.target, pair.folder).execution
    assert told["draft_features"] == "hidden states 1, 2, 3 of the target"
    assert told["draft_borrows"] == "embed_tokens.weight"


def test_the_recipe_s_layers_are_read(pair: Pair) -> None:
    """They differ from the layers in training, so fewer proposals are accepted; the reference reads
    them too. The record and a remark say so."""
    found = planned(pair.target, pair.folder, speculation__eagle3_layers=[0, 1, 3])
    assert found.target.hidden_layers == (0, 1, 3)
    assert found.execution["draft_features"] == "hidden states 0, 1, 3 of the target"
    told = "speculation.eagle3_layers: in place of the config's, which names [1, 2, 3] as inputs"
    assert [told in reading.told for reading in found.draft.readings()] == [True]
    assert told in found.execution["draft_conventions"]
    seqs = run(build(found, 11), 4, found.params)
    assert [s.output_ids for s in seqs] == texts_of(pair.target)
    other = replace(pair.head, outputs=(-1, 0, 2))
    rounds, right = (
        [expected_rounds(pair.target, head, p, 4) for p in PROMPTS] for head in (other, pair.head)
    )
    assert list(map(rounds_of, seqs)) == rounds
    accepted = [sum(a for seq in each for _, a in seq) for each in (rounds, right)]
    assert accepted[0] < 0.8 * accepted[1]


def test_readings_are_drafts_that_can_be_loaded(pair: Pair, tmp_path: Path) -> None:
    """The layers by the config's own word, and steps fed before the norm; and none where the
    target has no such layers."""
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    lent = ("embed_tokens.weight",)
    folder = save_head(
        tmp_path / "head", pair.head, "model-optimizer", lent, norm_output=True, **ids
    )
    found = planned(pair.target, folder)
    counted, fed = found.draft.readings()
    assert "read as outputs" in counted.told and "norm_output" in fed.told
    assert found.execution["draft_conventions"] == f"{counted.told}; {fed.told}"
    assert found.draft is not None and found.draft.feature_layers == (1, 2, 3)
    assert counted.draft is not None and counted.draft.feature_layers == (0, 1, 2)
    assert fed.draft is not None and fed.draft.feature_layers == (1, 2, 3)
    target = load_models(found).target
    heads = [
        draft.load(target, found.groups, 4) for draft in (found.draft, counted.draft, fed.draft)
    ]
    feeds = [head.head.config.feeds_norm for head in heads if isinstance(head, PagedHead)]
    assert feeds == [True, True, False]
    seqs = run(build(replace(found, draft=counted.draft), 11), 4, found.params)
    assert [s.output_ids for s in seqs] == texts_of(pair.target)
    deep = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    folder = save_head(tmp_path / "deep", pair.head, "model-optimizer", lent, **deep)
    (own,) = planned(pair.target, folder, speculation__eagle3_counting="inputs").draft.readings()
    assert own.draft is None and "names [1, 2, 3] as outputs" in own.told


@pytest.mark.parametrize(
    ("dialect", "ids", "key", "value", "told"),
    [
        ("model-optimizer", [1, 2, 3], "eagle3_counting", "inputs", "names [1, 2, 3] as outputs"),
        ("speculators", [0, 1, 2], "eagle3_counting", "outputs", "names [0, 1, 2] as inputs"),
        ("model-optimizer", [1, 2, 3], "eagle3_layers", [1, 2, 3], "names [1, 2, 3] as outputs"),
        ("speculators", None, "eagle3_layers", [1, 2, 3], "names no layers"),
    ],
)
def test_a_config_that_counts_in_another_way(
    dialect: str,
    ids: list[int] | None,
    key: str,
    value: object,
    told: str,
    pair: Pair,
    tmp_path: Path,
) -> None:
    """The key of the recipe makes its proposals those that the head was trained for."""
    name = "eagle_aux_hidden_state_layer_ids"
    changes = {name: ids} if dialect == "speculators" else {"eagle_config": {name: ids}}
    lent = ("embed_tokens.weight",)
    folder = save_head(tmp_path / "head", pair.head, dialect, lent, **changes)
    if ids == [0, 1, 2]:
        assert planned(pair.target, folder).target.hidden_layers == (0, 1, 2)
    else:
        with pytest.raises(SetupError, match="reads hidden states") as caught:
            planned(pair.target, folder)
        assert "speculation.eagle3_layers" in (caught.value.hint or "")
    found = planned(pair.target, folder, **{f"speculation__{key}": value})
    assert found.target.hidden_layers == (1, 2, 3)
    assert told in found.execution["draft_conventions"]
    assert "read as outputs" not in found.execution["draft_conventions"]
    seqs = run(build(found, 11), 4, found.params)
    wanted = [expected_rounds(pair.target, pair.head, p, 4) for p in PROMPTS]
    assert list(map(rounds_of, seqs)) == wanted


WRONG_LAYERS: dict[str, tuple[dict[str, object], str]] = {
    "too few": ({"eagle3_layers": [1, 2]}, "eagle3_layers is .1, 2.: .* reads 3 hidden states"),
    "too many": ({"eagle3_layers": [0, 1, 2, 3]}, "eagle3_layers .* reads 3 hidden states"),
    "too deep": ({"eagle3_layers": [1, 2, 4]}, "eagle3_layers .* 4 layers, .* states 0 to 3"),
    "descending": ({"eagle3_layers": [2, 1, 3]}, "eagle3_layers.* ascending order"),
    "none": ({"eagle3_layers": []}, "eagle3_layers.* ascending order"),
    "negative": ({"eagle3_layers": [-1, 1, 3]}, "eagle3_layers.* greater than or equal to 0"),
    "counting": ({"eagle3_counting": "both"}, "eagle3_counting.* should be inputs or outputs"),
    "two keys": (
        {"eagle3_layers": [1, 2, 3], "eagle3_counting": "inputs"},
        "eagle3_counting.* should be null where eagle3_layers",
    ),
    "nothing to count": ({"eagle3_counting": "outputs"}, "eagle3_counting: .* names no layers"),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_layers_that_cannot_be_are_one_line(case: str, pair: Pair, tmp_path: Path) -> None:
    keys, told = WRONG_LAYERS[case]
    ids: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": None}
    folder = save_head(tmp_path, pair.head, "speculators", ("embed_tokens.weight",), **ids)
    with pytest.raises(SpecdecError, match=f"speculation.{told}") as caught:
        planned(pair.target, folder, **{f"speculation__{k}": v for k, v in keys.items()})
    assert "\n" not in caught.value.message and caught.value.code == ExitCode.USAGE


REFUSED: dict[str, tuple[dict[str, Any], dict[str, object], str]] = {
    "hidden size": ({"target_hidden": 48}, {}, "its target_hidden_size is 48, .* has 64"),
    "vocabulary": ({"vocab": 98, "draft_vocab": 98}, {}, "its vocab_size is 98, .* has 97"),
    "layers": ({"outputs": (0, 1, 5)}, {}, "reads hidden states .1, 2, 6. of a target that has 4"),
    "width": ({"hidden": 48}, {}, r"embed_tokens.weight is missing, .* \[97, 64\] float32"),
    "dtype": ({}, {"draft__dtype": "bfloat16"}, r"embed_tokens.weight .* \[97, 64\] bfloat16"),
    "share": ({}, {"draft__share": ["lm_head"]}, "draft.share: lm_head: .* borrows the weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_before_weights_are_read(
    case: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, keys, told = REFUSED[case]
    head = Head(**(SIZES | changes))
    folder = save_head(tmp_path / "head", head, "speculators", without=("embed_tokens.weight",))
    with pytest.raises(SpecdecError, match=told) as caught:
        planned(pair.target, folder, **keys)
    assert "\n" not in caught.value.message
    assert caught.value.code in (ExitCode.USAGE, ExitCode.ENVIRONMENT)


def test_a_penalty_changes_a_head_s_proposals_too(pair: Pair) -> None:
    """The head's ids are a part of the target's. Texts are those of `generate` at each k, and some
    proposals are accepted."""
    settings: dict[str, Any] = {"repetition_penalty": 1.4, "suppress_tokens": [50, 61]}
    oracle = reference(pair.target)
    want = [greedy_reference(oracle, p, NEW_TOKENS, **settings) for p in PROMPTS]
    assert want != texts_of(pair.target)
    keys = {f"sampling__{key}": value for key, value in settings.items()}
    found = planned(pair.target, pair.folder, 4, **keys)
    engine = build(found, 11)
    accepted = {}
    for k in (4, 0, 1):
        seqs = run(engine, k, found.params)
        assert [s.output_ids for s in seqs] == want
        accepted[k] = sum(map(sum, (s.accepted_per_round for s in seqs)))
    assert accepted[4] > 0


LAYER_KEYS = {
    "speculators": "eagle_aux_hidden_state_layer_ids: .1, 2, 9., inputs of layers",
    "safeailab": "no eagle_aux_hidden_state_layer_ids, so the default three are used",
    "model-optimizer": r"eagle_config.eagle_aux_hidden_state_layer_ids: .1, 2, 9., outputs",
    "deepspec": "target_layer_ids: .1, 2, 9., outputs of layers",
}


@pytest.mark.parametrize("dialect", LAYER_KEYS)
def test_layers_that_the_target_lacks_are_told_by_their_key(dialect: str, tmp_path: Path) -> None:
    body = {**head_config(Head(**SIZES), "safeailab"), "num_hidden_layers": 1}
    ids = [1, 2, 9]
    changes: dict[str, dict[str, Any]] = {
        "speculators": {"eagle_aux_hidden_state_layer_ids": ids},
        "safeailab": {"eagle_aux_hidden_state_layer_ids": None},
        "model-optimizer": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        "deepspec": {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": ids},
    }
    config = body | changes[dialect]
    if dialect in ("model-optimizer", "deepspec"):
        config.pop("eagle_aux_hidden_state_layer_ids", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_head_config("head", tmp_path)
    with pytest.raises(SetupError, match=f"config.json has {LAYER_KEYS[dialect]}"):
        found.feature_layers(3)


def test_the_target_s_embedding_in_place_of_an_untrained_one(pair: Pair, tmp_path: Path) -> None:
    """`draft.share: [embeddings]`: the rounds of the head with the target's own."""
    drawn = torch.randn(pair.head.tensors["embed_tokens.weight"].shape)
    untrained = replace(pair.head, tensors=pair.head.tensors | {"embed_tokens.weight": drawn})
    folder = save_head(tmp_path, untrained, "speculators")
    want = [expected_rounds(pair.target, pair.head, p, 4) for p in PROMPTS]
    rounds = {}
    for share in ([], ["embeddings"]):
        found = planned(pair.target, folder, draft__share=share)
        assert found.draft is not None
        assert ("embed_tokens.weight" in found.draft.notes.get("borrows", "")) is bool(share)
        rounds[bool(share)] = list(map(rounds_of, run(build(found, 11), 4, found.params)))
    assert rounds[True] == want and rounds[False] != want


def test_the_degrees_of_a_head(pair: Pair) -> None:
    """Each of two ranks caches one of the head's two heads of keys."""
    keys = {"target.model": str(pair.target), "draft.model": str(pair.folder)}
    degrees = {"target.tensor_parallel_size": 2, "draft.tensor_parallel_size": 2}
    shared = plan_all_ranks(load_recipe(None, keys | degrees), Permissions(), CPU)
    degrees["draft.tensor_parallel_size"] = 1
    first, second = plan_all_ranks(load_recipe(None, keys | degrees), Permissions(), CPU)
    assert block_bytes_of(first)[1] > 0 == block_bytes_of(second)[1]
    assert first.target.hidden_layers == second.target.hidden_layers == (1, 2, 3)
    # Heads of 16, keys and values, 16 tokens; and the carried vector.
    assert [block_bytes_of(p)[1] for p in shared] == [(2 * 16 * 16 + 64) * 4] * 2


def test_a_head_that_does_not_divide(pair: Pair, tmp_path: Path) -> None:
    head = replace(pair.head, heads=3, kv_heads=3, tensors={})
    folder = save_head(tmp_path / "head", head, "speculators", without=("embed_tokens.weight",))
    keys = {"target.model": str(pair.target), "draft.model": str(folder)}
    degrees = {"target.tensor_parallel_size": 2, "draft.tensor_parallel_size": 2}
    with pytest.raises(SetupError, match="3 attention heads cannot be divided among 2") as caught:
        plan_all_ranks(load_recipe(None, keys | degrees), Permissions(), CPU)
    assert caught.value.code == ExitCode.USAGE


def test_blocks_and_weights_by_hand(pair: Pair) -> None:
    found = planned(pair.target, pair.folder)
    # One layer of two heads of 16, keys and values, four tokens; and the carried vector.
    assert block_bytes_of(found)[1] == (2 * 2 * 16 * 4 + 64) * 4
    models = load_models(found)
    (guess,) = estimates(found, CacheNeed(1, 64, 4, 4))
    held = weight_bytes(models)
    assert held[1] == guess.draft_weight_bytes
    assert held[0] == pytest.approx(guess.target_weight_bytes, abs=256)
    own = sum(t.numel() for n, t in pair.head.tensors.items() if n not in ("embed_tokens.weight",))
    tables = 2 * 512 * 16
    assert guess.draft_weight_bytes == 4 * (own + tables) + 4 * 60  # ids are int64
    assert found.draft is not None
    engine = build(found, 11)
    assert isinstance(engine.proposer, StepHead) and engine.proposer.head is not None
    carry, cache = engine.proposer.head.carry, engine.proposer.head.cache
    num_bytes = carry.numel() * carry.element_size() + cache.num_bytes
    assert num_bytes == block_bytes_of(found)[1] * cache.num_blocks


@pytest.mark.usefixtures("steady_memory")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_estimates_are_near_on_a_cpu(pair: Pair, temperature: float) -> None:
    keys: dict[str, object] = {"run__batch_size": 4, "sampling__temperature": temperature}
    check_estimates(planned(pair.target, pair.folder, 6, **keys))


def test_a_head_runs_in_its_targets_dtype(pair: Pair, tmp_path: Path) -> None:
    """The dtype in its config is that of training."""
    folder = shutil.copytree(pair.folder, tmp_path / "head")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    draft = planned(pair.target, folder, 3).draft
    assert draft is not None and draft.dtype == torch.float32


def test_what_a_round_holds_is_counted(pair: Pair) -> None:
    """On a GPU, beside the target alone: hidden states, distributions and the head's passes."""
    keys = {"target.model": str(pair.target), "draft.model": str(pair.folder)}
    more: dict[str, object] = {"sampling.temperature": 1.0, "target.dtype": "bfloat16"}
    recipe = load_recipe(None, keys | more | {"speculation.num_speculative_tokens": 5})
    (found,) = plan_all_ranks(recipe, Permissions(), torch.device("cuda"))
    bare = load_recipe(None, keys | more | {"speculation.num_speculative_tokens": 0})
    (alone,) = plan_all_ranks(bare, Permissions(), torch.device("cuda"))
    need = CacheNeed(3, 100, 5, 4)
    with_head, without = estimate_passes(found, need), estimate_passes(alone, need)
    features, q = 3 * 6 * 3 * 64, 2 * 3 * 5 * 97
    assert with_head.graphs - without.graphs > 2 * 2 * (features + q)
    assert with_head.activation - without.activation > 2 * 3 * 99 * (3 * 64 + 3 * 64)
    # Greedy decoding keeps no distributions, and draws from one step's logits at a time.
    size = RoundSize(3, 5, 100, 97, False, True, True, found.draft)
    drawn, greedy = (METHOD.estimate_bytes(size._replace(is_greedy=g)) for g in (False, True))
    assert found.draft is not None
    assert drawn.in_round - greedy.in_round == 2 * (2 * 3 * 5 * 97 - 2 * 3 * found.draft.vocab_size)
