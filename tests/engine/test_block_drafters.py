"""DFlash and DSpark drafters: read, planned and run, with the rounds of transformers' own net."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.backends import native
from specdec_cli.core.batch import Rectangle, padded_batch
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.preparing import too_long
from specdec_cli.models.heads.dflash.config import read_dflash_config
from specdec_cli.models.heads.dflash.head import MarkovHead
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.recipe.choices.dflash import DFLASH, DSPARK
from tests import drafting, lossless
from tests.drafting import check_estimates, rounds_of, run, schedules
from tests.support import greedy_text

pytest.importorskip("transformers", minversion="5.23")  # earlier ones have no DFlash of their own
from tests.block_pair import (
    MASK,
    NEW_TOKENS,
    PROMPTS,
    Pair,
    expected_rounds,
    save_drafter,
    save_pair,
    sure_length,
)

SETTINGS = schedules(19)
K = 4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    first = save_pair(folder / "z-lab")
    anchor = save_pair(folder / "anchor", "deepspec", anchor=True)
    reduced: dict[str, Any] = {"dialect": "speculators", "draft_vocab": 60}
    return {
        "z-lab": first,
        "reduced": save_pair(folder / "reduced", like=first, **reduced),
        "anchor": anchor,
        "vanilla": save_pair(folder / "vanilla", like=anchor, markov="vanilla"),
        "gated": save_pair(folder / "gated", "deepspec", like=anchor, markov="gated"),
        "rnn": save_pair(folder / "rnn", like=first, markov="rnn", **reduced),
    }


def planned(pair: Pair, k: int = K, **more: Any) -> Plan:
    return drafting.planned(pair.target, pair.folder, k, **more)


def check_rounds(pair: Pair, k: int, **more: Any) -> list[Any]:
    seqs = run(planned(pair, k, **more), PROMPTS)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.output_ids == greedy_text(pair.target, prompt, NEW_TOKENS)
        assert rounds_of(seq) == expected_rounds(pair, prompt, k)
    return seqs


CASES = [("z-lab", case) for case in SETTINGS]
CASES += [("reduced", "chunks"), ("anchor", "refills"), ("gated", "refills")]
CASES += [("vanilla", "preemption"), ("rnn", "chunks"), ("rnn", "refills")]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_text_and_rounds_are_those_of_the_net(pairs: dict[str, Pair], kind: str, case: str) -> None:
    seqs = check_rounds(pairs[kind], K, **SETTINGS[case])
    assert len({a for seq in seqs for a in seq.accepted_per_round}) > 2
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


def test_a_cache_in_fp8(pairs: dict[str, Pair]) -> None:
    """The rows of a block are rounded before they see each other, and its text is the target's."""
    found = planned(pairs["z-lab"], K, run__batch_size=3, cache__dtype="fp8")
    seqs, plain = run(found, PROMPTS), run(found, PROMPTS, 0)
    assert [seq.output_ids for seq in seqs] == [seq.output_ids for seq in plain]
    assert [s.output_ids for s in seqs] != [
        greedy_text(pairs["z-lab"].target, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    assert sum(sum(seq.accepted_per_round) for seq in seqs) > 10


def test_a_narrower_pass_is_another(pairs: dict[str, Pair]) -> None:
    """k sets the width of the pass, not B: rounds of k = 2 are those of three rows."""
    check_rounds(pairs["z-lab"], 2)


@pytest.mark.parametrize("kind", ["z-lab", "gated"])
def test_passes_of_the_trained_width(pairs: dict[str, Pair], kind: str) -> None:
    """Like in transformers' generator, proposals of a smaller k are the first of a larger one's."""
    pair, key = pairs[kind], {"speculation.block_width": "trained"}
    most = 4 + (kind == "gated")
    engine = build(planned(pair, most, **key), 12)
    requests, params = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)], planned(pair).params
    for seq, request in zip(engine.run(requests, 2, params).seqs, requests, strict=True):
        wanted = expected_rounds(pair, list(request.token_ids), 2, width=most)
        assert rounds_of(seq) == wanted
        told, start = engine.forecast(request, seq.output_ids, most, params), 0
        assert told.ahead is not None and told.only_k is None
        for proposed, accepted in wanted:
            chances = told.ahead[start][:proposed]
            assert accepted == (*(round(c) for c in chances), 0).index(0)
            start += accepted + 1
    assert planned(pair, 1, **key).draft.passes(1).rows == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["z-lab", "anchor"])
def test_the_block_bounds_k(pairs: dict[str, Pair], kind: str) -> None:
    most = 4 + (kind == "anchor")
    assert planned(pairs[kind], most).k == most
    told = rf"is {most + 1}: .* at most {most} tokens a round \(block_size 5, .*\)$"
    with pytest.raises(UsageError, match=told) as found:
        planned(pairs[kind], most + 1)
    assert found.value.code == ExitCode.USAGE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mask id": ({"mask_token_id": 97}, "mask_token_id is 97"),
    "no mask id": ({"mask_token_id": None}, "mask_token_id is null"),
    "no block": ({"block_size": None}, "block_size is null"),
    "last layer": ({"target_layer_ids": [0, 3]}, r"hidden states \[1, 4\] .* has 4 layers"),
    "order": ({"target_layer_ids": [2, 0]}, r"hidden states \[3, 1\]"),
    "no layer": ({"target_layer_ids": [-2, 0]}, r"target_layer_ids is \[-2, 0\]"),
    "features": ({"target_layer_ids": [0, 1, 2]}, r"fc.weight has shape \[64, 128\]"),
    "vocabulary": ({"vocab_size": 98}, "its vocab_size is 98"),
    "width": ({"target_hidden_size": 32}, "its target_hidden_size is 32"),
    "layers": ({"num_target_layers": 5}, "its num_target_layers is 5"),
    "sliding": ({"layer_types": ["sliding_attention"] * 2}, "layer_types is .* not supported"),
    "causal": ({"causal": True}, "causal is true: that variant"),
    "no full layer": ({"layer_types": ["chunked_attention"] * 2}, "layer_types .* not supported"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "use_sliding_window is true: layers with a sliding window",
    ),
    "a causal class": ({"is_causal": True}, "is_causal is true: that variant"),
    "shifted labels": ({"shift_label": True}, "shift_label is true: that variant"),
    "embedding's scale": ({"input_embedding_scale": 16.0}, "input_embedding_scale is 16.0: that"),
    "logits' scale": ({"output_multiplier": 0.5}, "output_multiplier is 0.5: that variant"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: that"),
    "latent keys": ({"attention_mode": "mla"}, "attention_mode is .mla.: that variant"),
    "mixed layers": ({"attention_modes": ["gqa", "kda"]}, "attention_modes is .*: that variant"),
    "sinks": ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is true: that"),
    "model type": ({"model_type": "muse_glimmer_assistant"}, "model_type is .*layers of qwen3"),
    "ids": ({"target_layer_ids": 3}, "target_layer_ids is 3"),
    "rope": ({"rope_theta": "x"}, "rope_theta is"),
    **{
        f"kind {value!r}": ({"dflash_config": value}, "dflash_config is .*: it must be a mapping")
        for value in (7, "x", "", [], [1], True)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_is_refused_by_its_key(pairs: dict[str, Pair], case: str, tmp_path: Path) -> None:
    changes, told = REFUSED[case]
    if "dflash_config" not in changes:  # every key may lie in either place
        own = {"mask_token_id": MASK, "target_layer_ids": [0, 2]} | changes
        changes = changes | {"dflash_config": {n: v for n, v in own.items() if v is not None}}
    drafter = pairs["z-lab"].drafter
    folder = save_drafter(tmp_path / "drafter", drafter, "z-lab", **changes)
    with pytest.raises(SetupError, match=told) as found:
        build(planned(replace(pairs["z-lab"], folder=folder)), 12)
    assert found.value.code == ExitCode.ENVIRONMENT and "\n" not in found.value.message


PLAIN: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "is_causal": False,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 4,
}


def test_keys_that_mean_the_plain_net(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Null is as good as no key: DeepSpec's anchor predicts by default."""
    nulls = dict.fromkeys(("sample_from_anchor", "markov_rank", "attention_mode", "use_swa"))
    for changes in (PLAIN, {"layer_types": None, "use_sliding_window": True, "sliding_window": 4}):
        folder = save_drafter(tmp_path / "d", pairs["anchor"].drafter, "deepspec", **changes)
        config = json.loads((folder / "config.json").read_text()) | nulls
        (folder / "config.json").write_text(json.dumps(config))
        check_rounds(replace(pairs["anchor"], folder=folder), K)


@pytest.mark.parametrize("projector", ["dflash", "dspark"])
def test_layers_that_a_config_does_not_name(
    pairs: dict[str, Pair], projector: str, tmp_path: Path
) -> None:
    """Outputs of layers 1, 8.5, 16, 23.5 and 31, halves to even numbers: those are the inputs of
    the next ones."""
    own = {"mask_token_id": MASK, "projector_type": projector}
    drafter = pairs["z-lab"].drafter
    folder = save_drafter(
        tmp_path / "d", drafter, "z-lab", dflash_config=own, num_hidden_layers=5, architectures=None
    )
    config = read_dflash_config("d", folder)
    assert config.noun.startswith(projector[:2].upper())
    assert config.feature_layers(34) == (2, 9, 17, 25, 32)
    assert config.feature_layers(36) == (2, 10, 18, 26, 34)


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm"])
def test_a_missing_tensor_is_named(pairs: dict[str, Pair], name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(pairs["z-lab"].folder, tmp_path / "lacking")
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=f"1 missing tensor, first {name}"):
        planned(replace(pairs["z-lab"], folder=folder))


LENGTHS = [("z-lab", "confidence"), ("z-lab", "adaptive"), ("reduced", "confidence")]
LENGTHS += [("vanilla", "head"), ("rnn", "head"), ("gated", "confidence")]


@pytest.mark.parametrize(("kind", "policy"), LENGTHS)
def test_lengths_of_each_sequence(pairs: dict[str, Pair], kind: str, policy: str) -> None:
    keys = {"speculation.length.policy": policy, "speculation.length.threshold": 0.6}
    keys |= {"speculation.length.choices": [0, 1, 2]}
    seqs = run(planned(pairs[kind], run__batch_size=3, **keys), PROMPTS)
    texts = [greedy_text(pairs[kind].target, p, NEW_TOKENS) for p in PROMPTS]
    assert [s.output_ids for s in seqs] == texts
    if policy != "adaptive":
        assert len({p for s in seqs for p in s.proposed_per_round}) > 1


@pytest.mark.parametrize("kind", ["z-lab", "rnn"])
def test_greedy_replay_is_exact(pairs: dict[str, Pair], kind: str) -> None:
    """Predictions of the k that was run are its rounds; they say that they hold for it alone."""
    found = planned(pairs[kind], run__prefill_chunk=5, run__batch_size=4)
    engine, requests = build(found, 12), [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    for seq, request in zip(engine.run(requests, K, found.params).seqs, requests, strict=True):
        told = engine.forecast(request, seq.output_ids, K, found.params)
        assert told.ahead is not None and told.only_k == K
        start = 0
        for proposed, accepted in rounds_of(seq):
            chances = told.ahead[start][:proposed]
            assert accepted == (*(round(c) for c in chances), 0).index(0)
            start += accepted + 1


ESTIMATED = [("z-lab", 0.8), ("reduced", 0.0), ("gated", 0.8)]


@pytest.mark.usefixtures("steady_memory")
@pytest.mark.parametrize(("kind", "temperature"), ESTIMATED)
def test_estimates_are_near_on_a_cpu(pairs: dict[str, Pair], kind: str, temperature: float) -> None:
    keys = {"run.batch_size": 4, "sampling.temperature": temperature}
    check_estimates(planned(pairs[kind], **keys), off=256)


def test_a_policy_that_asks_for_confidences_needs_some(pairs: dict[str, Pair]) -> None:
    with pytest.raises(UsageError, match=r"^speculation.length.policy is head: .* no confidence"):
        planned(pairs["anchor"], **{"speculation.length.policy": "head"})


def test_a_confidence_cuts_before_its_token(pairs: dict[str, Pair]) -> None:
    """Rounds are those of the blocks, each cut before the first token that is doubted."""
    pair = pairs["gated"]
    keys = {"speculation.length.policy": "head", "speculation.length.threshold": 0.5}
    seqs = run(planned(pair, **keys), PROMPTS)
    cuts = partial(sure_length, pair.drafter, threshold=0.5)
    wanted = [expected_rounds(pair, p, K, cuts) for p in PROMPTS]
    assert list(map(rounds_of, seqs)) == wanted
    assert len({k for rounds in wanted for k, _ in rounds}) > 2


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_what_a_markov_head_adds_along_a_block(pairs: dict[str, Pair], kind: str) -> None:
    drafter, made = pairs[kind].drafter, torch.Generator().manual_seed(4)
    config = read_dflash_config(kind, pairs[kind].folder)
    tensors = load_file(pairs[kind].folder / "model.safetensors")
    head = MarkovHead(config, {config.renamed(n) or "": t for n, t in tensors.items()})
    memory, state = None, torch.zeros(drafter.rank)
    for token in (3, 90, 14, 61):
        h = torch.randn(1, 64, generator=made)
        wanted, state = drafter.bias(h[0], token, state)
        logits = torch.randn(1, len(wanted), generator=made)
        judged = head(h, logits, torch.tensor([token]), memory, needs_confidence=False)
        assert torch.allclose(judged.logits[0] - logits[0], wanted, atol=1e-5)
        assert judged.confidence is None
        memory = judged.memory


MARKOV: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"markov_head_type": "tree"}, "markov_head_type is .tree.: vanilla, gated, rnn"),
    "rank": (
        {"markov_rank": 9},
        r"markov_w1.weight has shape \[97, 8\], but config.json requires \[97, 9\]",
    ),
    "confidence": ({"enable_confidence_head": False}, "2 unknown tensors, first conf"),
    "no word": ({"markov_head_type": ["gated"]}, "markov_head_type is .*: vanilla, gated, rnn"),
    "another type": (
        {"markov_head_type": "rnn"},
        "2 missing tensors, first markov_head.joint_proj.bias",
    ),
    "no number": ({"confidence_head_alpha": "1"}, "confidence_head_alpha is .1.: it must be a"),
    "no flag": ({"enable_confidence_head": "yes"}, "enable_confidence_head is .yes.: it must"),
}


@pytest.mark.parametrize("case", MARKOV)
def test_a_markov_head_is_refused_by_its_key(
    pairs: dict[str, Pair], case: str, tmp_path: Path
) -> None:
    changes, told = MARKOV[case]
    folder = save_drafter(tmp_path / "d", pairs["gated"].drafter, "deepspec", **changes)
    with pytest.raises(SetupError, match=told):
        build(planned(replace(pairs["gated"], folder=folder)), 12)


@pytest.mark.parametrize("layers", [None, [], {}, "x"])
def test_layers_that_are_no_mapping(pairs: dict[str, Pair], layers: Any, tmp_path: Path) -> None:
    drafter, keys = pairs["reduced"].drafter, {"transformer_layer_config": layers}
    folder = save_drafter(tmp_path / "d", drafter, "speculators", **keys)
    with pytest.raises(
        SetupError, match=r"DFlash drafter .*: transformer_layer_config is .*: a lay"
    ):
        planned(replace(pairs["reduced"], folder=folder))


def test_an_anchor_that_tools_read_differently_is_told(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    drafter = pairs["rnn"].drafter
    folder = save_drafter(tmp_path / "d", drafter, "speculators", sample_from_anchor=None)
    found = planned(replace(pairs["rnn"], folder=folder))
    assert "the anchor predicts," in found.execution["draft_block"]
    assert "sample_from_anchor: not given" in found.execution["draft_conventions"]
    assert len(found.draft.readings()) == 1


def test_facts_of_a_run(pairs: dict[str, Pair]) -> None:
    found = planned(pairs["z-lab"])
    assert found.recipe.speculation.method == "dflash"
    assert found.execution["draft_borrows"] == "embed_tokens.weight, lm_head.weight"
    assert found.execution["draft_features"] == "hidden states 1, 3 of the target"
    assert found.execution["draft_block"].startswith("block_size 5, mask_token_id 95")
    settings = {("sampling", "temperature"): 0.7, ("target", "model"): "t"}
    told = DFLASH.to_vllm(lambda *key: settings.get(key), "d")  # type: ignore[misc]
    wanted = {"method": "dflash", "model": "d", "draft_sample_method": "probabilistic"}
    assert told.config == wanted
    settings[("speculation", "block_width")] = "trained"
    told = DFLASH.to_vllm(lambda *key: settings.get(key), "d")  # type: ignore[misc]
    assert told.config == wanted and any("block_width: trained" in n for n in told.notes)
    assert planned(pairs["anchor"]).recipe.speculation.method == "dspark"
    told = DSPARK.to_vllm(lambda *key: None, "d")  # type: ignore[misc]
    assert told.config == {"method": "dspark", "model": "d"} and "vanilla" in told.notes[0]


@pytest.mark.parametrize("kind", ["z-lab", "reduced", "gated"])
def test_dummy_weights_and_given_acceptance(pairs: dict[str, Pair], kind: str) -> None:
    keys = {
        "speculation.acceptance": "synthetic",
        "speculation.synthetic_acceptance_rates": [0.5] * K,
    }
    seqs = run(planned(pairs[kind], draft__load_format="dummy", **keys), PROMPTS)
    assert all(len(seq.output_ids) == NEW_TOKENS for seq in seqs)
    assert sum(sum(seq.accepted_per_round) for seq in seqs) > 10


def test_blocks_need_room_near_the_end(pairs: dict[str, Pair]) -> None:
    """The last rounds propose fewer tokens than their blocks have rows. A plan tells before the run
    which prompts do not fit."""
    # The last round that proposes begins with 27 of 29 tokens: its block ends with the 31st.
    assert len(PROMPTS[0]) + NEW_TOKENS == 29 and K == 4
    for blocks, reason in ((9, "length"), (8, "error")):
        plan = planned(pairs["z-lab"], cache__num_blocks=blocks)
        assert run(plan, PROMPTS[:1])[0].finish_reason == reason
        job = Job(native, native.prepared(plan), [], [tuple(PROMPTS[0])])
        assert bool(too_long([job])) == (reason == "error")


def test_a_single_new_token_needs_no_block_ahead(pairs: dict[str, Pair]) -> None:
    """Nothing is proposed before the last token."""
    prompt = PROMPTS[0][:4]
    sizes = {"cache__num_blocks": 2, "sampling__max_new_tokens": 1}  # the first holds padding
    (seq,) = run(planned(pairs["z-lab"], **sizes), [prompt])
    assert seq.output_ids == greedy_text(pairs["z-lab"].target, prompt, 1)


@pytest.mark.parametrize("kind", ["z-lab", "vanilla"])
def test_padded_passes_have_the_same_rounds(
    pairs: dict[str, Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are padded as on a GPU, up to the end of the context. There, a sequence whose block
    would not fit proposes nothing."""
    most = len(PROMPTS[2]) + 9
    found = planned(pairs[kind], cache__max_model_len=most, run__batch_size=3)
    live = run(found, PROMPTS)

    def padded(self: PagedHead, what: Rectangle, state: BatchState) -> Any:
        return padded_batch(what, state, self.cache.block_size, self.head.config.vocab_size), None

    monkeypatch.setattr(PagedHead, "_batch", padded)
    seqs = run(found, PROMPTS)
    assert list(map(rounds_of, seqs)) == list(map(rounds_of, live))
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        count = min(NEW_TOKENS, most - len(prompt))
        assert seq.output_ids == greedy_text(pairs[kind].target, prompt, count)
        # The last block begins with the token before that round's.
        written = sum(accepted + 1 for _, accepted in rounds_of(seq)[:-1])
        assert len(prompt) + written - 1 + K + (kind == "z-lab") <= most


SAMPLED: dict[str, dict[str, Any]] = {
    "dflash": {},
    "vanilla": {"markov": "vanilla", "anchor": True},
    "rnn, cut by its confidence": {"markov": "rnn", "dialect": "speculators", "draft_vocab": 6},
}


# A block without a Markov head is drawn as the reference draws: test_distribution.py has such. Of
# the heads the one with a state between places runs, whose law needs more to be right.
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * ("cut" not in n)) for n in SAMPLED]
)
def test_sampled_text_follows_the_target(case: str, tmp_path: Path) -> None:
    """Joint distribution of the first tokens."""
    pair, k = save_pair(tmp_path, steps=0, vocab=8, **SAMPLED[case]), 3
    more = {"sampling.temperature": 0.9, "sampling.top_p": 0.95, "sampling.max_new_tokens": 4}
    if "cut" in case:
        more |= {"speculation.length.policy": "head", "speculation.length.threshold": 0.5}
    found = planned(pair, k, run__batch_size=1000, cache__num_blocks=6000, **more)
    engine = build(found, 12)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1, ignore_eos=True)
    told = lossless.engine_trial(engine, pair.target, [3, 1, 4, 5], k, params, 4000)
    assert lossless.adjusted(told) > 1e-4
