"""Prompt lookup: its proposals, its rounds, and that the text stays the target's.

transformers' own prompt lookup is the oracle for the proposals and acceptances of every round.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import specdec_cli.engine.plan
from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.figures import Acceptance
from specdec_cli.core.kv_cache import block_bytes
from specdec_cli.core.state import BatchState, Texts
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.methods.ngram import Ngram
from specdec_cli.models import description
from specdec_cli.models.spec import ModelSpec
from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import PROMPTS, generate, prompt_options
from tests.drafting import rounds_of
from tests.engine.fakes import (
    continuation,
    fake_engine,
    looping,
    random_prompt,
    run_checked,
    target_rule,
)
from tests.engine.test_pipeline import Stop, told
from tests.oracle import NgramIndex, with_oracle
from tests.support import (
    CPU,
    decode,
    greedy_reference,
    lookup_rounds,
    ngram_engine,
    reference,
    save_tiny,
)

NEW_TOKENS = 24
FAMILIES = ["llama", "gemma2", "gpt2"]


def random_texts(count: int) -> list[list[int]]:
    """Texts of 2 to 6 different tokens, in which n-grams of every length recur."""
    generator = torch.Generator().manual_seed(5)
    texts = []
    for number in range(count):
        length = int(torch.randint(1, 40, (), generator=generator))
        texts.append(torch.randint(0, 2 + number % 5, (length,), generator=generator).tolist())
    return texts


def found_by_transformers(text: list[int], k: int, longest: int, eos: int | None) -> list[int]:
    ids = torch.tensor([text])
    end = None if eos is None else torch.tensor([eos])
    search = PromptLookupCandidateGenerator(end, k, longest, max_length=10_000)
    found: list[int] = search.get_candidates(ids)[0][0, len(text) :].tolist()
    return found


def found_by_scanning(text: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """The definition of a lookup, as plain Python."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


# Lookups.


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_finds_what_transformers_finds(longest: int) -> None:
    for number, text in enumerate(random_texts(60)):
        k = 1 + number % 6
        found = NgramIndex(longest, 1).continuation(text, k)
        assert found == found_by_transformers(text, k, longest, None)
        # transformers stops before an end-of-text token, which we propose like any other.
        cut = found.index(0) if 0 in found else len(found)
        assert found[:cut] == found_by_transformers(text, k, longest, 0)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_growing_text_is_looked_up_like_a_whole_one(step: int) -> None:
    for text in random_texts(40):
        for longest, shortest in ((4, 1), (3, 2), (2, 2)):
            index = NgramIndex(longest, shortest)
            for end in range(1, len(text) + 1, step):
                found = index.continuation(text[:end], 4)
                assert found == found_by_scanning(text[:end], 4, longest, shortest)


@pytest.mark.parametrize(
    ("text", "longest", "shortest", "want"),
    [
        ([1, 2, 3, 1, 2], 3, 1, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, 1, [3, 1, 2]),
        ([2, 8, 1, 2, 9, 1, 2], 3, 1, [9, 1, 2]),  # the longest match
        ([2, 8, 1, 2, 9, 1, 2], 1, 1, [8, 1, 2, 9]),  # the first of the shorter ones
        ([2, 8, 1, 2], 3, 2, []),
        ([1, 2, 3], 3, 1, []),
        ([5, 5, 5], 3, 1, [5]),  # not more than has been written
        ([5], 3, 1, []),
    ],
)
def test_lookup(text: list[int], longest: int, shortest: int, want: list[int]) -> None:
    assert NgramIndex(longest, shortest).continuation(text, 4) == want


def propose(texts: list[list[int]], lens: list[int], longest: int = 3) -> Candidates:
    seqs = [Sequence(i, text, len(text), 99) for i, text in enumerate(texts)]
    state = BatchState(len(texts), 1, CPU, Texts.empty(len(texts), 99, CPU))
    state.load(seqs, 0)
    drafting = Drafting(max(lens), SamplingParams(temperature=1.0), torch.tensor(lens), 10)
    return Ngram(longest, 1).propose(state, drafting)


def test_a_proposal_says_what_was_found() -> None:
    found = propose([[1, 2, 3, 1], [4, 5], [6, 6], [7, 8, 7]], [2, 4, 4, 0])
    assert found.lens.tolist() == [2, 0, 1, 0]
    assert found.token_ids.tolist() == [[2, 3, 0, 0], [0] * 4, [6, 0, 0, 0], [0] * 4]
    assert found.q is None, "nothing is drawn"


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_finds_what_the_definition_finds(longest: int) -> None:
    texts = random_texts(60)
    found = propose(texts, [1 + i % 6 for i in range(60)], longest)
    for i, (text, row, count) in enumerate(
        zip(texts, found.token_ids.tolist(), found.lens.tolist(), strict=True)
    ):
        assert row[:count] == found_by_scanning(text, 1 + i % 6, longest, 1)


# Rounds, on fakes.


@pytest.mark.parametrize("rule", [looping, target_rule], ids=["looping", "random"])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 3], ids=["b1", "b3"])
def test_every_round_obeys_the_arithmetic(rule: Any, k: int, batch_size: int) -> None:
    engine = fake_engine(None, rule, batch_size=batch_size)
    engine.proposer = Ngram(3, 1)
    prompts = [random_prompt(n) for n in (1, 9, 2, 17, 5, 4)]
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    run = engine.start(requests, k, SamplingParams(max_new_tokens=33))
    run_checked(
        engine,
        run,
        lambda tokens, asked: len(found_by_scanning(tokens, asked, 3, 1)),
        is_drafted=False,
    )
    for seq, prompt in zip(run.seqs, prompts, strict=True):
        assert seq.output_ids == continuation(rule, prompt, 33)
        rounds = len(seq.accepted_per_round) + seq.rounds_without_proposal
        assert sum(seq.accepted_per_round) + rounds == 33
    assert engine.allocator.num_used == 0


def test_rounds_without_a_match_are_counted_apart() -> None:
    engine = fake_engine(None, looping, batch_size=2)
    engine.proposer = Ngram(3, 2)
    requests = [Request(i, tuple(random_prompt(4 + i))) for i in range(4)]
    result = engine.run(requests, 4, SamplingParams(max_new_tokens=30))
    idle = [s.rounds_without_proposal for s in result.seqs]
    assert min(idle) > 1, "more than the last round of each has no proposal"
    metrics = result.metrics
    assert metrics.num_drafts == sum(len(s.proposed_per_round) for s in result.seqs) > 0
    assert all(1 <= k <= 4 for s in result.seqs for k in s.proposed_per_round)
    assert metrics.num_rounds_without_proposal == sum(idle) > 0
    written = metrics.num_accepted_tokens + metrics.num_drafts + sum(idle)
    assert written == metrics.num_output_tokens == 120


def test_preemption_changes_nothing() -> None:
    prompts = [random_prompt(n) for n in (9, 12, 5, 7)]
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    found = []
    for num_blocks in (400, 24):
        engine = fake_engine(None, looping, batch_size=4, num_blocks=num_blocks)
        engine.proposer = Ngram(3, 1)
        seqs = engine.run(requests, 3, SamplingParams(max_new_tokens=40)).seqs
        found.append([(s.output_ids, rounds_of(s)) for s in seqs])
    assert sum(s.num_preemptions for s in seqs) > 0
    assert found[0] == found[1]


# Real models from here on.


# The others write with other passes, which lookups do not see.
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "llama")) for f in FAMILIES]
)
def test_greedy_equals_transformers(family: str, device: torch.device, tmp_path: Path) -> None:
    """Compares the output and, with one sequence at a time, every round."""
    folder = save_tiny(tmp_path, family)
    oracle = reference(folder, device=device)
    asked = [random_prompt(n) * repeats for n, repeats in ((1, 1), (4, 3), (9, 2), (20, 1))]
    want = [greedy_reference(oracle, p, NEW_TOKENS) for p in asked]
    alone = ngram_engine(folder, device=device)
    together = ngram_engine(folder, batch_size=4, device=device)
    accepted = 0
    for k in (1, 3, 6):
        seqs = decode(alone, asked, k, max_new_tokens=NEW_TOKENS)
        assert [s.output_ids for s in seqs] == want
        batch = decode(together, asked, k, max_new_tokens=NEW_TOKENS)
        assert [s.output_ids for s in batch] == want
        for seq, prompt in zip(seqs, asked, strict=True):
            expected = lookup_rounds(oracle, prompt, k, 3, NEW_TOKENS)
            assert (seq.output_ids, rounds_of(seq)) == expected
            accepted += sum(seq.accepted_per_round)
    assert accepted > 0, "the prompts should give something to accept"


# Rounds one ahead, which look up in the device's texts, against the oracle's.


def recurring() -> list[list[int]]:
    """Prompts of 1 to 60 tokens with few different ones."""
    return [[3 + t % 7 for t in text] for text in random_texts(9)] + [[5], [5, 5], [8, 9] * 30]


ROUNDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.4, "seed": 5},
    "masked": {"temperature": 1.1, "top_k": 4, "top_p": 0.9, "seed": 2**40 + 1},
}


def both_engines(folder: Path, device: torch.device, **settings: Any) -> list[Any]:
    """Engines with the oracle's rounds, and with ours one ahead over unwritten memory."""
    both = [ngram_engine(folder, device=device, runs_ahead=p, **settings) for p in (False, True)]
    both[0] = with_oracle(both[0])
    for tensor in both[1].target.cache.pools:
        tensor.fill_(1e4)
    return both


def both_rounds(
    folder: Path, device: torch.device, k: int, stop: int | None = None, **settings: Any
) -> list[Any]:
    """Results of ragged rounds, and of padded ones. params: sampling settings."""
    params = SamplingParams(**{"max_new_tokens": 40} | settings.pop("params", {}))
    results = []
    for engine in both_engines(folder, device, **settings):
        requests = [
            Request(i, tuple(p), None if stop is None else partial(Stop, stop))
            for i, p in enumerate(recurring())
        ]
        results.append(engine.run(requests, k, params))
        assert engine.allocator.num_used == 0
    return results


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ngram"), "llama")


@pytest.mark.each_value
@pytest.mark.parametrize("settings", ROUNDS)
@pytest.mark.parametrize(
    ("k", "longest", "shortest", "batch_size"), [(1, 3, 1, 5), (4, 2, 2, 3), (6, 4, 1, 1)]
)
def test_padded_rounds_equal_ragged_ones(
    llama: Path,
    device: torch.device,
    k: int,
    longest: int,
    shortest: int,
    batch_size: int,
    settings: str,
) -> None:
    """Compares tokens, proposals and acceptances, with EOS, refills and fewer slots at the end."""
    sizes = {"batch_size": batch_size, "longest": longest, "shortest": shortest}
    ragged, padded = both_rounds(
        llama, device, k, eos_ids=frozenset({7, 40}), params=ROUNDS[settings], **sizes
    )
    assert told(ragged) == told(padded)
    assert {s.finish_reason for s in padded.seqs} >= {"length"}
    rates = padded.metrics
    counts = set(Acceptance.model_fields)
    assert rates.model_dump(include=counts) == ragged.metrics.model_dump(include=counts)
    assert 0 < rates.num_accepted_tokens < rates.num_draft_tokens
    assert sum(s.rounds_without_proposal for s in padded.seqs) > 0


def test_padded_rounds_of_stopped_and_preempted_sequences(
    llama: Path, device: torch.device
) -> None:
    """Sequences that return, and sequences that take their place, look up in their own texts."""
    unstopped = both_rounds(llama, device, 3, batch_size=4)[1]
    token = max(s.output_ids[12] for s in unstopped.seqs)
    tight = {"batch_size": 4, "num_blocks": 40}
    ragged, padded = both_rounds(llama, device, 3, stop=token, **tight)
    assert told(ragged) == told(padded)
    assert "stop" in {s.finish_reason for s in padded.seqs}
    ragged, padded = both_rounds(llama, device, 3, **tight)
    assert told(ragged) == told(padded) == told(unstopped)
    assert padded.metrics.num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_padded_rounds_of_synthetic_acceptance(
    llama: Path, device: torch.device, temperature: float
) -> None:
    rates = SyntheticAcceptance.from_rates((0.8, 0.5, 0.2))
    params = {"temperature": temperature}
    ragged, padded = both_rounds(llama, device, 3, batch_size=3, rule=rates, params=params)
    assert told(ragged) == told(padded)
    assert padded.metrics.num_accepted_tokens > 0


def test_runs_after_one_another_find_their_own_texts(llama: Path, device: torch.device) -> None:
    ragged, padded = both_engines(llama, device, batch_size=3)
    prompts = recurring()
    for k, few in ((3, prompts), (2, prompts[::-1]), (0, prompts[:2]), (3, prompts[4:])):
        want = [(s.output_ids, rounds_of(s)) for s in decode(ragged, few, k, max_new_tokens=20)]
        seqs = decode(padded, few, k, max_new_tokens=20)
        assert [(s.output_ids, rounds_of(s)) for s in seqs] == want
    padded.forget_rounds()
    seqs = decode(padded, few, 3, max_new_tokens=20)
    assert [(s.output_ids, rounds_of(s)) for s in seqs] == want


def test_history_is_written_once() -> None:
    """Rounds append to the history; a sequence keeps its row as long as it is in the batch."""
    history = Texts.empty(3, 9, CPU)
    seqs = [Sequence(i, [10 * i + j for j in range(i + 2)], 1, 9) for i in range(5)]
    rows = history.enter(seqs[:3])
    assert sorted(rows) == [0, 1, 2]
    for seq, row in zip(seqs, rows, strict=False):
        assert history.tokens[row].tolist() == seq.tokens + [0] * (9 - len(seq.tokens))
    history.tokens.add_(1)
    again = history.enter([seqs[3], seqs[2], seqs[0]])
    assert again == [rows[1], rows[2], rows[0]]
    for seq, row, more in zip((seqs[3], seqs[2], seqs[0]), again, (0, 1, 1), strict=True):
        assert history.tokens[row, : len(seq.tokens)].tolist() == [t + more for t in seq.tokens]
    (row,) = history.enter([seqs[0]])
    history.enter(seqs[1:3])
    seqs[0].tokens.append(77)  # written in other rounds, such as after a preemption
    (row,) = history.enter([seqs[0]])
    assert history.tokens[row, : len(seqs[0].tokens)].tolist() == seqs[0].tokens


@cache
def demo_oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        demo_path("demo:target"), dtype=torch.float32
    ).eval()


def demo_plan(k: int, **more: object) -> specdec_cli.engine.plan.Plan:
    overrides: dict[str, object] = {
        "run.device": "cpu",
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS,
        "sampling.ignore_eos": True,
    }
    return plan(load_recipe("demo-ngram", overrides | more))


@pytest.mark.parametrize(
    "k", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 4, 5, 6))]
)
def test_demo_rounds_equal_transformers_prompt_lookup(k: int) -> None:
    """Every 40th bundled prompt, alone and four at a time."""
    lines = demo_path("demo:prompts").read_text(encoding="utf-8").splitlines()[::40]
    longest = 1 + k % 4
    found = []
    for batch_size in (1, 4):
        sizes = {"speculation.ngram_max": longest, "run.batch_size": batch_size}
        planned = demo_plan(k, **sizes)
        ids = [tuple(planned.tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
        engine = build(planned, max(map(len, ids)))
        result = engine.run([Request(i, p) for i, p in enumerate(ids)], planned.k, planned.params)
        found.append([(s.output_ids, rounds_of(s)) for s in result.seqs])
    want = [lookup_rounds(demo_oracle(), list(p), k, longest, NEW_TOKENS) for p in ids]
    assert found == [want, want]
    rates = result.metrics
    assert 0 < rates.num_accepted_tokens < rates.num_draft_tokens


def test_no_draft_is_loaded_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the recipe names a draft that does not exist."""
    roles: list[str] = []
    original = description.describe

    def spy(spec: ModelSpec, *more: Any) -> description.Description:
        roles.append(spec.role)
        return original(spec, *more)

    monkeypatch.setattr(specdec_cli.engine.plan, "describe", spy)
    one_block = block_bytes(original(spec_of_demo(), CPU).layers, 16, torch.float32)
    planned = demo_plan(3, **{"draft.model": "/no/such/folder", "cache.cpu_bytes": 9 * one_block})
    assert (roles, planned.k, planned.draft) == (["target"], 3, None)
    assert planned.recipe.proposer == "ngram"
    engine = build(planned, 100)
    assert engine.allocator.num_usable == 9 - 1, "all the memory is for the target's blocks"
    assert isinstance(engine.proposer, Ngram)
    assert demo_plan(0).k == 0 and build(demo_plan(0), 10).proposer is None


def spec_of_demo() -> ModelSpec:
    return ModelSpec("target", "demo:target", None, "auto", "auto")


# The command line.


@pytest.mark.parametrize("models", [(), ("--target", "demo:target")], ids=["pair", "no draft"])
@pytest.mark.usefixtures("smaller_demo")
def test_generate(models: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--json", *prompt_options(*PROMPTS), "--max-new-tokens", "24", "--ignore-eos")
    plain = generate(capsys, *models, *options, "-k", "0")
    result = generate(capsys, *models, *options, "--set", "speculation.method=ngram", "-k", "4")
    assert result.code == 0
    assert [o["token_ids"] for o in result.outputs] == [o["token_ids"] for o in plain.outputs]
    metrics = result.document["metrics"]
    assert metrics["k"] == 4 and metrics["num_accepted_tokens"] > 0
    assert metrics["num_drafts"] == sum(o["num_drafts"] for o in result.outputs)


def test_bundled_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ("--set", "data.limit=2", "--max-new-tokens", "16")
    result = generate(capsys, "demo-ngram", *short, "-o", out)
    assert result.code == 0 and "of proposals accepted" in result.err
    lines = (out / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 2 and '"draft": "ngram"' in lines[0]
