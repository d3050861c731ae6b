"""MTP modules in the target's file: planned, loaded and run, with transformers' own rounds."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.backends import native
from specdec_cli.core.batch import ForwardBatch, Rectangle, Span, padded_batch
from specdec_cli.core.candidates import TargetOutput, Verdict
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Permissions, Request, SamplingParams, Sequence
from specdec_cli.engine.build import build, load_models
from specdec_cli.engine.memory.measured import weight_bytes
from specdec_cli.engine.plan import Plan, plan_all_ranks
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.experiment.duration import DurationEstimate, Speeds
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.generation import Job
from specdec_cli.lengths.adaptive import Adaptive
from specdec_cli.methods.mtp import ChainedModules
from specdec_cli.models.heads.mtp.draft import MtpDraft
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.prompt_passes import PromptGraphs, PromptPasses
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import load_recipe
from specdec_cli.recipe.choices.mtp import MTP
from tests import drafting, lossless
from tests.cli.generate_helpers import word_tokenizer
from tests.drafting import check_estimates, rounds_of, run, schedules
from tests.engine.test_stored_models import compressed, store_fp8
from tests.support import CPU, FAMILIES, greedy_text, tiny_config

pytest.importorskip("transformers", minversion="5.23")  # earlier ones have no MTP of their own
from tests.mtp_pair import (
    NEW_TOKENS,
    STARTS,
    expected_rounds,
    mtp_rounds,
    rows_of,
    save_mtp,
)

SETTINGS = schedules(17)
# All meet a module's own rounds; further proposals and chains meet those without refills in CI.
IN_CI = [pytest.param(n, marks=[pytest.mark.slow] * (n == "refills")) for n in SETTINGS]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("mtp") / "target")


def planned(target: Path, k: int = 1, **more: Any) -> Plan:
    more = {"sampling.max_new_tokens": NEW_TOKENS - 1, **more}
    return drafting.planned(target, "mtp", k, **more)


def prompts_of(target: Path, starts: list[list[int]] = STARTS) -> list[list[int]]:
    """The prompts of transformers' rounds, with the token that its first pass decides."""
    return [start + greedy_text(target, start, 1) for start in starts]


def same_rounds(seq: Any, accepted: list[int]) -> None:
    """transformers reports a round in the next. Our last may have no room for a proposal."""
    count = len(accepted)
    assert seq.accepted_per_round[:count] == accepted[: len(seq.accepted_per_round)]
    assert abs(count - len(seq.accepted_per_round)) < 2


@pytest.mark.parametrize("case", SETTINGS)
def test_text_and_rounds_are_those_of_transformers(target: Path, case: str) -> None:
    seqs = run(planned(target, **SETTINGS[case]), prompts_of(target))
    found = []
    for seq, start in zip(seqs, STARTS, strict=True):
        tokens, accepted = mtp_rounds(target, start)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
        found += seq.accepted_per_round
    assert 0.1 < sum(found) / len(found) < 0.9, "the case has to see both kinds of rounds"
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


# Families whose modules transformers does not name in their configs.
UNNAMED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": FAMILIES["deepseek_v3"] | {"model_type": "glm4_moe_lite", "n_group": 1},
    "hy_v3": {"model_type": "hy_v3", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_shared_experts": 1},
}
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in UNNAMED]
OTHERS = ["deepseek_v3", "mellum", "mimo_v2_flash", *SLOW]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_rounds_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {}
    if family in UNNAMED:
        monkeypatch.setitem(FAMILIES, family, UNNAMED[family])
        keys = {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]}
    target = save_mtp(tmp_path / "target", family, **keys)
    seqs = run(planned(target, run__batch_size=2), prompts_of(target))
    for seq, start in zip(seqs, STARTS, strict=True):
        tokens, accepted = mtp_rounds(target, start)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
    assert sum(sum(s.accepted_per_round) for s in seqs) > 10


@pytest.mark.parametrize("case", IN_CI)
def test_further_proposals_take_steps_of_the_one_module(target: Path, case: str) -> None:
    seqs = run(planned(target, 3, **SETTINGS[case]), prompts_of(target))
    for seq, prompt in zip(seqs, prompts_of(target), strict=True):
        assert seq.output_ids == greedy_text(target, prompt, NEW_TOKENS - 1)
        assert rounds_of(seq) == expected_rounds(target, prompt, 3)
    accepted = {a for seq in seqs for a in seq.accepted_per_round}
    assert accepted >= {0, 3}, "the case has to see rounds of all kinds"


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_plan_may_be_loaded_again(target: Path, family: str, tmp_path: Path) -> None:
    """Drafts of a sweep take turns in memory in this way. Fused layers rotate whole heads of a
    target that rotates only a part, and a module's own layers give up their final norm."""
    folder = target if family == "glm4_moe" else save_mtp(tmp_path / "target", family)
    found = planned(folder, 3, run__batch_size=3)
    first, again = (run(found, prompts_of(folder)) for _ in range(2))
    assert [seq.output_ids for seq in again] == [seq.output_ids for seq in first]
    assert list(map(rounds_of, again)) == list(map(rounds_of, first))
    assert sum(sum(seq.accepted_per_round) for seq in first) > 5
    assert all(weight.is_meta for weight in found.target.module.parameters())


@pytest.mark.parametrize(("count", "k"), [(1, 3), (2, 2)])
def test_padded_passes_have_the_same_rounds(
    target: Path, two: Path, count: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are padded as on a GPU, up to the end of the context."""
    folder = target if count == 1 else two
    most = len(STARTS[2]) + 9
    found = planned(folder, k, cache__max_model_len=most, run__batch_size=3, run__prefill_chunk=4)
    live = run(found, prompts_of(folder))

    def padded(self: PagedHead, what: Rectangle, state: BatchState) -> Any:
        return padded_batch(what, state, self.cache.block_size, self.head.config.vocab_size), None

    monkeypatch.setattr(PagedHead, "_batch", padded)
    seqs = run(found, prompts_of(folder))
    assert list(map(rounds_of, seqs)) == list(map(rounds_of, live))
    assert [seq.output_ids for seq in seqs] == [seq.output_ids for seq in live]
    assert sum(sum(seq.accepted_per_round) for seq in seqs) > 5


def edited(original: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other values of config keys; None removes one."""
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def without(original: Path, folder: Path, dropped: str) -> Path:
    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not re.search(dropped, name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", ["target", "two", "mimo"])
def test_tensors_that_the_config_declares_are_not_told(
    case: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = request.getfixturevalue(case)
    for k in (1, 0):
        load_models(planned(folder, k))
    load_models(drafting.planned(folder, "ngram", 2))
    assert "will not be used" not in caplog.text
    if case == "target":
        load_models(planned(edited(folder, tmp_path / "less", num_nextn_predict_layers=None), 0))
        assert "will not be used, first model.layers." in caplog.text


@pytest.mark.parametrize("value", [None, 0])
def test_a_target_that_promises_none_is_refused(target: Path, value: Any, tmp_path: Path) -> None:
    folder = edited(target, tmp_path / "none", num_nextn_predict_layers=value, num_mtp_layers=value)
    with pytest.raises(SetupError, match="declares no MTP modules: num_nextn_predict_lay") as found:
        planned(folder)
    assert found.value.code == ExitCode.ENVIRONMENT
    assert planned(folder, 0).draft is None


@pytest.mark.parametrize(
    "name",
    "eh_proj.weight enorm.weight hnorm.weight shared_head.norm.weight self_attn.q_proj.weight "
    "mlp.gate.e_score_correction_bias".split(),
)
def test_a_missing_tensor_is_named(target: Path, name: str, tmp_path: Path) -> None:
    folder = without(target, tmp_path / "lacking", rf"layers\.2\.{re.escape(name)}")
    with pytest.raises(SetupError, match=rf"first model\.layers\.2\.{re.escape(name)}"):
        planned(folder)


@pytest.mark.parametrize(
    "name",
    "0.enorm.weight 1.hnorm.weight 0.final_layernorm.weight 1.pre_mlp_layernorm.weight "
    "1.self_attn.attention_sink_bias 0.mlp.up_proj.weight".split(),
)
def test_a_missing_tensor_of_mimo_is_named(mimo: Path, name: str, tmp_path: Path) -> None:
    folder = without(mimo, tmp_path / "lacking", stored := rf"model\.mtp\.layers\.{name}")
    with pytest.raises(SetupError, match=f"first {stored}"):
        planned(folder, 2)


def test_mimo_s_file_tells_the_number_of_its_modules(mimo: Path, tmp_path: Path) -> None:
    told = "num_nextn_predict_layers is missing, and its weights have no model.mtp.layers.0.eh_proj"
    with pytest.raises(SetupError, match=told):
        planned(without(mimo, tmp_path / "none", "layers.0.eh_proj"))
    with pytest.raises(UsageError, match=r"is 3: .* at most 2 tokens a round \(a chain of 2"):
        planned(mimo, 3)
    dummy = planned(mimo, 3, target__load_format="dummy")
    assert all(len(s.output_ids) == NEW_TOKENS - 1 for s in run(dummy, STARTS))
    with pytest.raises(UsageError, match="mtp_fed_back: raw does not suit"):
        planned(mimo, 2, speculation__mtp_fed_back="raw")
    seqs, first = (
        run(planned(mimo, 1), prompts_of(mimo)),
        run(planned(mimo, 2), prompts_of(mimo), 1),
    )
    assert list(map(rounds_of, seqs)) == list(map(rounds_of, first))
    single = without(mimo, tmp_path / "one", "mtp.layers.1.")
    seqs = run(planned(single, 3), prompts_of(mimo))
    for seq, prompt in zip(seqs, prompts_of(mimo), strict=True):
        assert rounds_of(seq) == expected_rounds(single, prompt, 3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("eh_proj.weight", r"has shape \[64, 64\] .* \[64, 128\]"),
        ("self_attn.o_proj.weight", r"has shape \[64, 32\] .* \[64, 64\]"),
        ("hnorm.weight", "is quantised, but config.json does not say how"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    target: Path, tmp_path: Path, name: str, told: str
) -> None:
    folder = shutil.copytree(target, tmp_path / "narrow")
    tensors = load_file(folder / "model.safetensors")
    whole = tensors[name := f"model.layers.2.{name}"]
    tensors[name] = whole.chunk(2, -1)[0].clone() if whole.dim() > 1 else whole.to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=rf"^{name} of .* {told}"):
        build(planned(folder), 12)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with two modules."""
    return save_mtp(tmp_path_factory.mktemp("mtp") / "two", count=2)


@pytest.mark.parametrize("case", IN_CI)
def test_a_chain_has_the_rounds_of_transformers(two: Path, case: str) -> None:
    seqs = run(planned(two, 2, **SETTINGS[case]), prompts_of(two))
    for seq, start in zip(seqs, STARTS, strict=True):
        tokens, accepted = mtp_rounds(two, start, 2)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
    assert {a for seq in seqs for a in seq.accepted_per_round} == {0, 1, 2}
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


# Starts of 6 to 10 tokens, since transformers fails at a rejection near the start of a text.
LONGER = [[(7 * i + 3 * j) % 97 for j in range(6 + i)] for i in range(5)]


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modules that both read the target's hidden states."""
    return save_mtp(tmp_path_factory.mktemp("mtp") / "mimo", "mimo_v2_flash", count=2)


@pytest.mark.parametrize("case", IN_CI)
def test_a_chain_of_mimo_has_the_rounds_of_transformers(mimo: Path, case: str) -> None:
    found = planned(mimo, 2, **SETTINGS[case])
    assert "hidden states of the target" in found.execution["draft_conventions"]
    assert found.draft is not None and not found.draft.readings()
    starts = [start for start in STARTS if len(start) > 2] + LONGER
    seqs = run(found, prompts_of(mimo, starts))
    for seq, start in zip(seqs, starts, strict=True):
        tokens, accepted = mtp_rounds(mimo, start, 2)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
    assert {a for seq in seqs for a in seq.accepted_per_round} == {0, 1, 2}
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


# Prompts in one piece and in chunks, and a round of each kind.
CHAINS_IN_CI = {((10,), None), ((10,), 0), ((3, 4, 10), None), ((1, 5, 9, 10), 2)}


@pytest.mark.parametrize(
    ("stops", "accepted"),
    [
        pytest.param(s, a, marks=[pytest.mark.slow] * ((s, a) not in CHAINS_IN_CI))
        for s in ((10,), (3, 4, 10), (1, 5, 9, 10))
        for a in (None, 0, 2)
    ],
)
def test_rows_of_a_chain_are_those_of_transformers(
    two: Path, stops: tuple[int, ...], accepted: int | None
) -> None:
    """This holds for any chunks of a prompt, and after a round that accepted so many proposals. The
    last rows are carried."""
    proposer = build(planned(two, 2), 12).proposer
    assert isinstance(proposer, ChainedModules)
    text, chain = [5, 9, 3, 11, 60, 7, 30, 4, 8, 15, 16], proposer.chain
    seq = Sequence(0, text, len(text), 40, block_table=[1, 2, 3])
    states, (first, second) = rows_of(two, text, 2)
    last = 10 if accepted is None else 9 - accepted
    for start, stop in pairwise((0, *(min(stop, last) for stop in stops))):
        if start < stop:
            chain.prefill([Span(seq, start, stop)], states[start:stop])
    if accepted is not None:
        seq.tokens = text[: last + 1]
        state = BatchState(1, 3, CPU)
        state.load([seq], 0)
        decided = ([*text, 0, 0])[last + 1 : last + 4]
        features = torch.cat((states, states[:2]))[None, last : last + 3]
        verdict = Verdict(torch.tensor([decided]), torch.tensor([accepted]))
        proposer.commit(state, verdict, TargetOutput(torch.zeros(0), features))
    # Blocks of four rows: the last are row 9 of the first module, and row 8 of the second.
    for index, wanted in enumerate((first[9], second[8])):
        found = chain.fed(index, chain.heads[index].carry[3][None])[0]
        assert torch.allclose(found, wanted, atol=1e-4), index


@pytest.fixture(scope="module")
def three_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A target of a family with three modules."""
    return cache(lambda family: save_mtp(tmp_path_factory.mktemp("mtp") / family, family, 3))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The number of rows that each module of a chain has run over."""
    found, passed = Counter[int](), PagedHead._run

    def counted(self: PagedHead, batch: ForwardBatch, hidden: torch.Tensor) -> Any:
        found[self.head.config.index] += len(batch.token_ids)  # type: ignore[attr-defined]
        return passed(self, batch, hidden)

    monkeypatch.setattr(PagedHead, "_run", counted)
    return found


@pytest.mark.parametrize(
    "family",
    [
        "glm4_moe",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("mimo_v2_flash", "deepseek_v3")),
    ],
)
def test_a_chain_of_three(family: str, three_of: Callable[[str], Path]) -> None:
    """A short prompt has no row of the last module yet."""
    target, starts = three_of(family), STARTS
    if family == "mimo_v2_flash":
        starts = [STARTS[2], *LONGER]
    prompts = prompts_of(target, starts)
    seqs = run(planned(target, 3, run__batch_size=3, run__prefill_chunk=4), prompts)
    for seq, start in zip(seqs, starts, strict=True):
        tokens, accepted = mtp_rounds(target, start, 3)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
    assert sum(sum(s.accepted_per_round) for s in seqs) > 10
    seqs = run(planned(target, 3), [[7], [5, 9]])
    wanted = [greedy_text(target, p, NEW_TOKENS - 1) for p in ([7], [5, 9])]
    assert [seq.output_ids for seq in seqs] == wanted


@pytest.mark.parametrize("k", [1, 2])
def test_a_run_of_few_proposals_is_one_of_few_modules(
    three_of: Callable[[str], Path], k: int, rows: Counter[int]
) -> None:
    """With three modules loaded, as in a sweep, it has the texts, rounds and rows of a run for
    which only k were loaded."""
    target, found = three_of("glm4_moe"), []
    prompts = prompts_of(target)
    for loaded in (3, k):
        rows.clear()
        made = planned(target, loaded, run__batch_size=2, run__prefill_chunk=4)
        assert made.draft is not None and len(made.draft.layers) == loaded
        seqs = run(made, prompts, k)
        found.append(([s.output_ids for s in seqs], list(map(rounds_of, seqs)), dict(rows)))
    assert found[0] == found[1] and set(rows) == set(range(k))
    assert sum(accepted for rounds in found[0][1] for _, accepted in rounds) > 5


def test_an_estimate_of_time_counts_the_modules_that_run(three_of: Callable[[str], Path]) -> None:
    ids = list(map(tuple, STARTS))
    prompts = [Prompt(i, None, one) for i, one in enumerate(ids)]

    def seconds(loaded: int, k: int, new_tokens: int) -> float:
        made = planned(three_of("glm4_moe"), loaded)
        found = DurationEstimate(Job(native, native.prepared(made), prompts, ids), Speeds(1e9, 1e9))
        params = replace(made.params, max_new_tokens=new_tokens)
        return found.run_seconds(Key("mtp", 2, k), len(ids), params)

    for k in (1, 2):
        assert seconds(3, k, 9) == pytest.approx(seconds(k, k, 9), rel=1e-6)
    plain, one, two = (seconds(3, k, 0) for k in (0, 1, 2))  # prompts alone
    assert two - one == pytest.approx(one - plain)


def test_a_run_of_one_proposal_captures_prompts_as_one_module_does(two: Path) -> None:
    engine = build(planned(two, 2), 12)
    assert isinstance(engine.proposer, ChainedModules)
    graphs = PromptGraphs(8, 4, 12, CPU, is_captured=False)
    engine.proposer.chain.capture_prompts(graphs)
    with patch.object(PromptPasses, "__call__", autospec=True) as replayed:
        for k in (2, 1):
            assert not replayed.called
            engine.run([Request(0, (5, 9, 3, 11))], k, planned(two, k).params)
        assert replayed.called


def test_rounds_of_one_proposal_keep_the_other_modules_of_their_run(
    two: Path, rows: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer round may follow."""
    monkeypatch.setattr(Adaptive, "next_k", lambda *_: 1)
    keys = {"speculation.length.policy": "adaptive", "speculation.length.choices": [1]}
    seqs = run(planned(two, 2, **keys), prompts_of(two))
    assert {k for seq in seqs for k in seq.proposed_per_round} <= {0, 1}
    assert rows[1] == rows[0] - len(seqs)  # a text's last row belongs to the first module alone


def test_a_chain_bounds_k(two: Path) -> None:
    with pytest.raises(
        UsageError, match=r"is 3: .* at most 2 tokens a round \(a chain of 2"
    ) as found:
        planned(two, 3)
    assert found.value.code == ExitCode.USAGE


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["confidence", "adaptive"])
@pytest.mark.parametrize("count", [1, 2])
def test_lengths_of_each_sequence(target: Path, two: Path, count: int, policy: str) -> None:
    folder = target if count == 1 else two
    keys = {"speculation.length.policy": policy, "speculation.length.threshold": 0.6}
    keys |= {"speculation.length.choices": [0, 1, 2]}
    prompts = prompts_of(folder)
    seqs = run(planned(folder, 2, run__batch_size=3, **keys), prompts)
    texts = [greedy_text(folder, p, NEW_TOKENS - 1) for p in prompts]
    assert [s.output_ids for s in seqs] == texts
    if policy == "confidence":
        assert len({p for s in seqs for p in s.proposed_per_round}) > 1


@pytest.mark.parametrize(("count", "k"), [pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_sampled_text_follows_the_target(count: int, k: int, tmp_path: Path) -> None:
    """Joint distribution of the first tokens."""
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1}
    sizes |= {"first_k_dense_replace": 0}
    target = save_mtp(tmp_path / "eight", count=count, steps=0, **sizes)
    more = {"sampling.temperature": 0.9, "sampling.top_p": 0.95, "sampling.max_new_tokens": 4}
    found = planned(target, k, run__batch_size=1000, cache__num_blocks=4000, **more)
    engine = build(found, 12)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1, ignore_eos=True)
    told = lossless.engine_trial(engine, target, [3, 1, 4, 5], k, params, 4000)
    assert lossless.adjusted(told) > 1e-4


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"run.prefill_chunk": 3}], ids=["whole", "chunks"])
@pytest.mark.parametrize("count", [1, 2])
def test_greedy_replay_is_exact(
    target: Path, two: Path, count: int, options: dict[str, Any]
) -> None:
    """Predictions from the texts of one length are the rounds of every length."""
    folder, largest = (target, 4) if count == 1 else (two, 2)
    found = planned(folder, largest, **options)
    engine, prompts = build(found, 12), [*prompts_of(folder), [7]]
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    seqs = engine.run(requests, largest, found.params).seqs
    for seq, request in zip(seqs, requests, strict=True):
        told = engine.forecast(request, seq.output_ids, largest, found.params)
        assert told.ahead is not None
        start = 0
        for proposed, accepted in rounds_of(seq):
            chances = told.ahead[start][:proposed]
            assert accepted == (*(round(c) for c in chances), 0).index(0)
            start += accepted + 1


READINGS = {"fed back raw": {"fed_back": "raw"}, "first zeroed": {"first_embedding": "zeroed"}}


@pytest.mark.parametrize("case", READINGS)
def test_readings_change_proposals_and_no_text(target: Path, case: str) -> None:
    keys = {f"speculation.mtp_{key}": value for key, value in READINGS[case].items()}
    ours, theirs = (run(planned(target, 3, **k), prompts_of(target)) for k in ({}, keys))
    assert [s.output_ids for s in ours] == [s.output_ids for s in theirs]
    assert list(map(rounds_of, ours)) != list(map(rounds_of, theirs))
    told = planned(target, 3, **keys)
    assert set(READINGS[case].values()) & set(re.findall(r"\w+", str(told.execution)))
    assert len(told.draft.readings()) == 2


def test_copies_of_embedding_and_head(target: Path, tmp_path: Path) -> None:
    """They are ignored unless the recipe says otherwise."""
    folder = shutil.copytree(target, tmp_path / "copies")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["model.layers.2.shared_head.head.weight"] = head.roll(1, 0).clone()
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain, ignored = (run(planned(t), prompts_of(target)) for t in (target, folder))
    assert list(map(rounds_of, plain)) == list(map(rounds_of, ignored))
    found = planned(folder, speculation__mtp_copies="used")
    assert found.draft is not None and "draft_borrows" not in found.execution
    own = run(found, prompts_of(target))
    assert [s.output_ids for s in own] == [s.output_ids for s in plain]
    assert sum(sum(s.accepted_per_round) for s in own) < 5
    saved = planned(folder).draft.weight_bytes  # type: ignore[union-attr]
    assert found.draft.weight_bytes - saved == 2 * 97 * 64 * 4


@pytest.mark.usefixtures("steady_memory")
@pytest.mark.each_value
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_estimates_are_near_on_a_cpu(
    target: Path, two: Path, count: int, temperature: float
) -> None:
    keys = {"run.batch_size": 4, "sampling.temperature": temperature}
    check_estimates(planned(target if count == 1 else two, 2, **keys), off=256)


def test_a_tied_head_over_ranks_is_left_out_once() -> None:
    keys = {"target.tensor_parallel_size": 2, "draft.tensor_parallel_size": 2}
    recipe = load_recipe("demo", {"draft.model": "demo:mtp", **keys})
    first, _ = plan_all_ranks(recipe, Permissions(), torch.device("cpu"))
    assert isinstance(first.draft, MtpDraft)
    body, lent = first.draft.body, ("model.embed_tokens.weight", "lm_head.weight")
    own = [p for name, p in body.module.named_parameters() if name not in lent]
    assert body.weight_bytes == sum(p.nbytes for p in own)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [97, 1024, 2048])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "mimo_v2_flash"])
def test_all_that_a_module_holds_on_a_cpu_is_counted(
    family: str, vocab: int, dtype: str, tmp_path: Path
) -> None:
    """A CPU may hold the projection in two forms, and the head again, in one or two, beside layers
    that are not fused."""
    told = {} if family == "mimo_v2_flash" else {"num_nextn_predict_layers": 1}
    config = tiny_config(family, hidden_size=512, vocab_size=vocab, **told)
    config.save_pretrained(tmp_path)
    word_tokenizer(tmp_path, [f"w{i}" for i in range(vocab)])
    found = planned(tmp_path, 2, target__load_format="dummy", target__dtype=dtype)
    assert found.draft is not None
    _, held = weight_bytes(load_models(found))
    assert held == pytest.approx(found.draft.loaded_bytes(is_compiled=False), abs=256)


def test_a_head_of_a_module_s_own_is_held_in_copies_only(tmp_path: Path) -> None:
    folder = save_mtp(tmp_path, "deepseek_v3", steps=0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = planned(folder, 1, speculation__mtp_copies="used")
    assert found.draft is not None
    _, held = weight_bytes(load_models(found))
    assert held == pytest.approx(found.draft.loaded_bytes(is_compiled=False), abs=256)


def test_vllm_s_config() -> None:
    settings = {("sampling", "temperature"): 0.7, ("target", "model"): "t"}
    found = MTP.to_vllm(lambda *key: settings.get(key), None)  # type: ignore[misc]
    assert found.config == {"method": "mtp", "draft_sample_method": "probabilistic"}


def test_dummy_modules_run(target: Path) -> None:
    seqs = run(planned(target, 3, target__load_format="dummy"), STARTS)
    assert all(len(seq.output_ids) == NEW_TOKENS - 1 for seq in seqs)


def test_facts_of_a_run(target: Path) -> None:
    found = planned(target)
    assert (found.recipe.proposer, found.recipe.draft, found.k) == ("mtp", None, 1)
    assert found.execution["draft_borrows"] == "embeddings, lm_head"
    assert "fed back normed" in found.execution["draft_conventions"]
    engine = build(found, 12)
    assert isinstance(engine.proposer.head, PagedHead)  # type: ignore[union-attr]


def extracted(target: Path, folder: Path, **changes: Any) -> Path:
    """The module of a target in a folder of its own, as speculators writes it."""
    folder.mkdir()
    names = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
    names |= {"shared_head.norm": "final_layernorm"}
    tensors, experts = {}, dict[str, dict[int, Any]]()
    for name, tensor in load_file(target / "model.safetensors").items():
        if not name.startswith("model.layers.2."):
            continue
        own = name.removeprefix("model.layers.2.")
        if found := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", own):
            experts.setdefault(found[2], {})[int(found[1])] = tensor
            continue
        head = next((h for h in names if own.startswith(f"{h}.")), None)
        own = own if head is None else own.replace(head, names[head], 1)
        tensors[f"mtp_layers.0.{own}"] = tensor
    gate, up, down = (
        torch.stack([experts[n][e] for e in sorted(experts[n])])
        for n in ("gate_proj", "up_proj", "down_proj")
    )
    tensors["mtp_layers.0.mlp.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors["mtp_layers.0.mlp.experts.down_proj"] = down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layer = json.loads((target / "config.json").read_text()) | changes
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    config |= {"architectures": ["MTPDraftModel"], "num_speculative_steps": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_extracted_module_runs_as_the_one_inside(target: Path, tmp_path: Path) -> None:
    folder = extracted(target, tmp_path / "module")
    found = planned(target, 3, draft__model=str(folder))
    assert (found.recipe.speculation.method, found.recipe.proposer) == ("mtp_module", str(folder))
    mine, inside = (run(p, prompts_of(target)) for p in (found, planned(target, 3)))
    assert list(map(rounds_of, mine)) == list(map(rounds_of, inside))
    assert [s.output_ids for s in mine] == [s.output_ids for s in inside]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 96),
        ("hidden_size", 32),
        ("model_type", "mellum"),
        ("num_attention_heads", 2),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 0.5),
        ("rope_theta", 123),
    ],
)
def test_a_module_of_another_target_is_refused(
    target: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = extracted(target, tmp_path / "module", **{key: value})
    told = f"another target: its transformer_layer_config[.]{key} is .?{value}"
    with pytest.raises(SetupError, match=told) as found:
        planned(target, draft__model=str(folder))
    assert found.value.code == ExitCode.ENVIRONMENT and "\n" not in found.value.message


def test_a_module_with_other_positions_is_refused(target: Path, tmp_path: Path) -> None:
    rope = json.loads((target / "config.json").read_text())["rope_parameters"]
    rope |= {"rope_theta": 123.0}
    folder = extracted(target, tmp_path / "module", rope_parameters=rope)
    with pytest.raises(SetupError, match=r"rope_parameters[.]rope_theta is 123.0, but the target"):
        planned(target, draft__model=str(folder))


def test_a_module_s_settings_may_be_few_or_rounded(target: Path, tmp_path: Path) -> None:
    keys = "head_dim hidden_act rope_parameters rope_theta intermediate_size".split()
    eps = json.loads((target / "config.json").read_text())["rms_norm_eps"] * (1 + 3e-8)
    folder = extracted(target, tmp_path / "one", rms_norm_eps=eps, **dict.fromkeys(keys))
    assert planned(target, draft__model=str(folder)).recipe.proposer == str(folder)


def test_a_second_module_in_a_folder_is_refused(target: Path, tmp_path: Path) -> None:
    folder = extracted(target, tmp_path / "module")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    more = {name.replace("layers.0.", "layers.1.", 1): t.clone() for name, t in tensors.items()}
    save_file(tensors | more, file, metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"a second module .*first mtp_layers.1.* only one"):
        planned(target, draft__model=str(folder))


@pytest.mark.parametrize(("count", "is_fine"), [(1, True), (None, True), (2, False), (0, False)])
def test_a_folder_that_declares_other_modules_than_one_is_refused(
    target: Path, tmp_path: Path, count: int | None, is_fine: bool
) -> None:
    folder = extracted(target, tmp_path / "module")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (folder / "config.json").write_text(json.dumps(config))
    told = f"config.json of the MTP module .*: num_nextn_predict_layers is {count}: "
    with nullcontext() if is_fine else pytest.raises(SetupError, match=told):
        planned(target, draft__model=str(folder))


def test_an_extracted_module_has_the_ranks_of_its_target(target: Path, tmp_path: Path) -> None:
    sets = {"target.model": str(target), "draft.model": str(extracted(target, tmp_path / "one"))}
    recipe = load_recipe(None, sets | {"target.tensor_parallel_size": 2})
    with pytest.raises(UsageError, match=r"draft.tensor_parallel_size is 1: .* over 2 ranks"):
        plan_all_ranks(recipe, Permissions(), CPU)


@pytest.mark.parametrize("weights", ["auto", "stored"])
def test_modules_of_a_float8_checkpoint(target: Path, tmp_path: Path, weights: str) -> None:
    """They are dequantised, also beside a target that keeps its codes."""
    folder = shutil.copytree(target, tmp_path / "fp8")
    plain = store_fp8(folder, compressed("channel"), "_scale", (1, 0))
    found = planned(folder, 3, target__weights=weights)
    mine, wanted = (run(p, prompts_of(target)) for p in (found, planned(plain, 3)))
    assert [s.output_ids for s in mine] == [s.output_ids for s in wanted]
    assert list(map(rounds_of, mine)) == list(map(rounds_of, wanted))
    assert sum(sum(s.accepted_per_round) for s in mine) > 5


def test_a_config_names_modules_as_the_file_does(target: Path, tmp_path: Path) -> None:
    """Layer 0 of the target stays plain. The module, which is a layer 0 here, does not."""
    folder = shutil.copytree(target, tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if re.match(r"model[.]layers[.]0[.].*_proj", n)}
    left = [name.removesuffix(".weight") for name in kept]
    plain = store_fp8(folder, compressed("channel") | {"ignore": left}, "_scale", (1, 0))
    for place in (folder, plain):
        tensors = load_file(place / "model.safetensors")
        for name in kept:
            tensors.pop(f"{name}_scale", None)
        save_file(tensors | kept, place / "model.safetensors", metadata={"format": "pt"})
    mine, wanted = (run(planned(p, 3), prompts_of(target)) for p in (folder, plain))
    assert [s.output_ids for s in mine] == [s.output_ids for s in wanted]
    assert list(map(rounds_of, mine)) == list(map(rounds_of, wanted))
    assert sum(sum(s.accepted_per_round) for s in mine) > 5


def test_a_module_has_the_format_of_its_own_group(target: Path, tmp_path: Path) -> None:
    """Layer 0 of the target is in int8, and all else in float8."""
    folder = shutil.copytree(target, tmp_path / "mixed")
    whole, eight = compressed("channel"), {"num_bits": 8, "type": "int", "symmetric": True}
    rest = whole["config_groups"]["group_0"] | {"format": "float-quantized"}
    first = {"targets": [r"re:model[.]layers[.]0[.]"], "format": "int-quantized"}
    first |= {"weights": eight | {"strategy": "channel"}}
    groups = {"config_groups": {"group_0": rest, "group_1": first}}
    plain = store_fp8(folder, whole | groups, "_scale", (1, 0))
    stored, numbers = (load_file(place / "model.safetensors") for place in (folder, plain))
    for name in [n for n in stored if re.match(r"model[.]layers[.]0[.].*_proj.*weight$", n)]:
        scales = numbers[name].abs().amax(1, keepdim=True) / 127
        stored[name] = (numbers[name] / scales).round().to(torch.int8)
        stored[f"{name}_scale"], numbers[name] = scales, stored[name].float() * scales
    for place, tensors in ((folder, stored), (plain, numbers)):
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    mine, wanted = (run(planned(p, 3), prompts_of(target)) for p in (folder, plain))
    assert [s.output_ids for s in mine] == [s.output_ids for s in wanted]
    assert list(map(rounds_of, mine)) == list(map(rounds_of, wanted))


def test_modules_of_mimo_s_float8_checkpoint(mimo: Path, tmp_path: Path) -> None:
    """As published: the matrices in ignored_layers and each eh_proj stay plain."""
    folder = shutil.copytree(mimo, tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if re.search(r"[.](o_proj|eh_proj)[.]", n)}
    left = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": [16, 16], "ignored_layers": left}
    plain = store_fp8(folder, settings, "_scale_inv", (16, 16))
    for place in (folder, plain):
        tensors = load_file(place / "model.safetensors")
        for name in kept:
            tensors.pop(f"{name}_scale_inv", None)
        save_file(tensors | kept, place / "model.safetensors", metadata={"format": "pt"})
    mine, wanted = (run(planned(p, 2), prompts_of(mimo, STARTS + LONGER)) for p in (folder, plain))
    assert [s.output_ids for s in mine] == [s.output_ids for s in wanted]
    assert list(map(rounds_of, mine)) == list(map(rounds_of, wanted))
    assert sum(sum(s.accepted_per_round) for s in mine) > 5
