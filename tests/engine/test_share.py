"""A draft that borrows the target's embeddings and head: same storage, less memory, same text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec_cli.engine.plan
from specdec_cli.core.types import Request
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.recipe import load_recipe
from tests.support import VOCAB, greedy_text, reference, save_tiny, tiny_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
BOTH = ["embeddings", "lm_head"]
ONE_MATRIX = VOCAB * 64 * 4  # bytes


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no tokenizer; tests give ids directly."""
    monkeypatch.setattr(specdec_cli.engine.plan, "tokenizer_of", lambda model: None)
    monkeypatch.setattr(specdec_cli.engine.plan, "check_vocabulary", lambda *given: None)


def shared(found: Plan) -> tuple[list[str], int]:
    assert found.draft is not None
    return list(found.draft.shared), found.draft.shared_bytes


def planned(target: Path, draft: Path, share: list[str], **more: object) -> Plan:
    overrides: dict[str, object] = {
        "target.model": str(target),
        "draft.model": str(draft),
        "draft.share": share,
        "run.device": "cpu",
        "speculation.num_speculative_tokens": 3,
        "sampling.max_new_tokens": 20,
        "sampling.ignore_eos": True,
    }
    return plan(load_recipe(None, overrides | more))


def modules(engine: Engine) -> tuple[Any, Any]:
    assert isinstance(engine.proposer, DraftModel) and engine.proposer.model is not None
    return engine.target.module, engine.proposer.model.module


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {
        "embeddings": module.get_input_embeddings().weight,
        "lm_head": module.get_output_embeddings().weight,
    }


def bytes_on_device(engine: Engine) -> int:
    """Bytes of all parameters of both models; each storage counts once."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for module in modules(engine)
        for p in module.parameters()
    }
    return sum(storages.values())


def outputs(engine: Engine, found: Plan) -> list[list[int]]:
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    return [s.output_ids for s in engine.run(requests, found.k, found.params).seqs]


def rewrite(folder: Path, dropped: str) -> None:
    """Take a tensor out of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[dropped]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("is_tied", "lacking", "borrowed"),
    [
        (True, ["model.embed_tokens.weight"], BOTH),
        (False, ["model.embed_tokens.weight", "lm_head.weight"], BOTH),
        (False, ["model.embed_tokens.weight"], BOTH[:1]),
        (False, ["lm_head.weight"], BOTH[1:]),
        (True, [], []),
        (False, [], []),
    ],
)
def test_a_draft_borrows_what_its_checkpoint_does_not_hold(
    tmp_path: Path, is_tied: bool, lacking: list[str], borrowed: list[str]
) -> None:
    """The recipe need not say so, and memory is the same as if it did."""
    target = save_tiny(tmp_path / "target", "llama")
    changes = {"tie_word_embeddings": is_tied, "num_hidden_layers": 1}
    draft = save_tiny(tmp_path / "draft", "llama", seed=1, **changes)
    for name in lacking:
        rewrite(draft, name)
    found = planned(target, draft, [])
    assert shared(found)[0] == borrowed
    if borrowed:
        assert found.execution["shared"].startswith(", ".join(borrowed))
        said = planned(target, draft, borrowed)
        assert shared(found) == shared(said)
    theirs, ours = (weights(module) for module in modules(build(found, 8)))
    for what in BOTH:
        assert (ours[what] is theirs[what]) == (what in borrowed)


# Each pair of family, tie and borrowed weights once; the other crossings are slow.
CROSSED = [
    pytest.param(
        *(family, tied, share),
        id="-".join((family, "tied" if tied else "untied", "+".join(share))),
        marks=() if (i + tied + j) % 2 == 0 else pytest.mark.slow,
    )
    for i, family in enumerate(("gemma2", "gpt2"))
    for tied in (False, True)
    for j, share in enumerate((BOTH[:1], BOTH[1:], BOTH))
]


@pytest.mark.parametrize(("family", "tied", "share"), CROSSED)
def test_borrowed_weights(family: str, tied: bool, share: list[str], tmp_path: Path) -> None:
    """CI has every tie with every choice of borrowed weights, and each family with either."""
    target = save_tiny(tmp_path / "target", family, seed=0)
    draft = save_tiny(tmp_path / "draft", family, seed=1, tie_word_embeddings=tied)
    own = weights(reference(draft))
    bare, found = planned(target, draft, []), planned(target, draft, share)
    assert bare.draft is not None and found.draft is not None
    less = bare.draft.weight_bytes - found.draft.weight_bytes
    alone = build(bare, 8)
    engine = build(found, 8)
    ours, theirs = weights(modules(engine)[1]), weights(modules(engine)[0])
    for what in BOTH:
        if what in share:
            assert ours[what] is theirs[what]
        else:
            assert torch.equal(ours[what], own[what]), "untied: its own weight, as it was"
    # A tied matrix is still needed if only one of its two uses is borrowed.
    saved = (len(share) // 2 if tied else len(share)) * ONE_MATRIX
    assert shared(found)[1] == saved == less == bytes_on_device(alone) - bytes_on_device(engine)
    said = f"{', '.join(share)}: {saved / 2**20:.1f} MiB not loaded for the draft"
    assert found.execution["shared"] == said
    assert outputs(engine, found) == [greedy_text(target, p, 20) for p in PROMPTS]


@pytest.mark.parametrize("share", [BOTH[:1], BOTH[1:], BOTH], ids="+".join)
def test_the_draft_computes_with_what_it_borrowed(share: list[str], tmp_path: Path) -> None:
    """Its proposals equal those of a checkpoint that contains the target's tensors."""
    target = save_tiny(tmp_path / "target", "llama", seed=0)
    draft = save_tiny(tmp_path / "draft", "llama", seed=0, num_hidden_layers=1)
    # Without the borrowed tensors, the draft's head and embeddings are noise.
    names = {"embeddings": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    tensors = load_file(draft / "model.safetensors")
    given = load_file(target / "model.safetensors")
    spoilt = {names[what]: torch.randn_like(tensors[names[what]]) for what in share}
    save_file(tensors | spoilt, draft / "model.safetensors", metadata={"format": "pt"})
    same = save_tiny(tmp_path / "same", "llama", seed=0, num_hidden_layers=1)
    whole = tensors | {names[what]: given[names[what]] for what in share}
    save_file(whole, same / "model.safetensors", metadata={"format": "pt"})
    rounds = []
    for folder, borrowed in ((draft, share), (same, [])):
        found = planned(target, folder, borrowed)
        engine = build(found, 8)
        requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
        seqs = engine.run(requests, found.k, found.params).seqs
        rounds.append([s.accepted_per_round for s in seqs])
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("what", "name"),
    [("embeddings", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")],
)
def test_what_is_borrowed_need_not_be_in_the_checkpoint(
    what: str, name: str, tmp_path: Path
) -> None:
    target = save_tiny(tmp_path / "target", "llama", seed=0)
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    rewrite(draft, name)
    with pytest.raises(SetupError, match="lack 1 tensor"):
        build(planned(target, draft, [other for other in BOTH if other != what]), 8)
    found = planned(target, draft, [what])
    assert outputs(build(found, 8), found) == [greedy_text(target, p, 20) for p in PROMPTS]


def test_dummy_weights_borrow_too(tmp_path: Path) -> None:
    for role, layers in (("target", 2), ("draft", 1)):
        tiny_config("llama", num_hidden_layers=layers).save_pretrained(tmp_path / role)
    dummy = {"target.load_format": "dummy", "draft.load_format": "dummy"}
    found = planned(tmp_path / "target", tmp_path / "draft", BOTH, **dummy)
    target, draft = modules(build(found, 8))
    assert shared(found)[1] == 2 * ONE_MATRIX
    for what in BOTH:
        assert weights(draft)[what] is weights(target)[what]
        assert float(weights(target)[what].detach().std()) > 0


@pytest.mark.parametrize(
    ("changes", "more", "share", "shapes"),
    [
        ({"hidden_size": 32}, {}, BOTH, ("embeddings", "[97, 32] float32", "[97, 64] float32")),
        ({"vocab_size": 128}, {}, BOTH[1:], ("lm_head", "[128, 64] float32", "[97, 64] float32")),
        (
            {},
            {"draft.dtype": "bfloat16"},
            BOTH[:1],
            ("embeddings", "[97, 64] bfloat16", "[97, 64] float32"),
        ),
    ],
    ids=["hidden size", "vocabulary", "dtype"],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    changes: dict[str, Any],
    more: dict[str, object],
    share: list[str],
    shapes: tuple[str, str, str],
    tmp_path: Path,
) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", **changes)
    for folder in (target, draft):
        (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError) as caught:
        planned(target, draft, share, **more)
    problem = caught.value
    assert problem.code == ExitCode.ENVIRONMENT and "\n" not in problem.message
    assert all(part in problem.message for part in shapes)
    assert "draft.share" in problem.message + (problem.hint or "")


@pytest.mark.parametrize("lacking", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"hidden_size": 32}, "97 tokens and a hidden size of 32"),
        ({"vocab_size": 128}, "128 tokens and a hidden size of 64"),
    ],
)
def test_a_draft_of_another_target_that_lacks_weights(
    changes: dict[str, Any], sizes: str, lacking: str, tmp_path: Path
) -> None:
    """The recipe says nothing of `draft.share`, so the message does not either."""
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1, **changes)
    rewrite(draft, lacking)
    with pytest.raises(SetupError, match="is for another target") as caught:
        planned(target, draft, [])
    told = f"{caught.value.message} {caught.value.hint}"
    assert sizes in told and "97 tokens and a hidden size of 64" in told
    assert "draft.share" not in told and "name a different one with --draft" in told


def test_a_draft_of_another_dtype_that_lacks_weights(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1)
    rewrite(draft, "lm_head.weight")
    with pytest.raises(SetupError, match="has no lm_head and cannot borrow") as caught:
        planned(target, draft, [], **{"draft.dtype": "bfloat16"})
    assert caught.value.hint == "give both models the same dtype"


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_nothing_is_borrowed_without_a_draft(method: str, tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    absent = tmp_path / "absent"
    found = planned(target, absent, BOTH, **{"speculation.method": method})
    assert found.draft is None and "shared" not in found.execution
