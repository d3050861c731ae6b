"""Training of speculators: its attention, chains and files against code written otherwise."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from scripts.speculators import attention
from scripts.speculators.attention import Layout, chained
from scripts.speculators.blocks import attend, drawn
from scripts.speculators.corpus import Frame, Rows, Text, joined, packed
from scripts.speculators.kinds import dflash, draft, dspark, eagle3, mtp, pard, peagle
from scripts.speculators.kinds.base import Options
from scripts.speculators.kinds.base import chained as links_of
from scripts.speculators.loss import Candidates, SoftLoss
from scripts.speculators.store import plain_tensors
from scripts.speculators.target import Reading, Target, logit_scale
from specdec_cli.core.types import Request
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.recipe import load_recipe
from tests.support import save_tiny

CPU = torch.device("cpu")
LENGTHS = (40, 57, 31)
BLOCKS = {"dflash": dflash, "dspark": dspark, "peagle": peagle, "pard": pard}


def random_rows(lengths: tuple[int, ...], length: int, vocab: int) -> tuple[Rows, list[Tensor]]:
    """Rows of random texts, and the texts."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, vocab, (n,), generator=generator) for n in lengths]
    pieces = [(t.numpy(), torch.ones(len(t)).numpy()) for t in texts]
    return packed(pieces, length).at(torch.arange(len(packed(pieces, length))), CPU), texts


@pytest.fixture(scope="module")
def target() -> Target:
    return Target("demo:target", CPU)


def test_the_target_reads_packed_texts_as_if_alone(target: Target) -> None:
    rows, texts = random_rows(LENGTHS, 100, target.vocab_size)
    reading = target.read(rows, (2, 7))
    assert (rows.segment >= 0).sum() == sum(LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(demo_path("demo:target"), dtype=torch.float32)
    found = 0
    for r in range(len(rows)):
        for number in range(int(rows.segment[r].max()) + 1):
            mine = rows.segment[r] == number
            ids = rows.ids[r][mine]
            assert any(torch.equal(ids, text) for text in texts)
            with torch.no_grad():
                alone = plain(ids[None], output_hidden_states=True)
            logits = reading.logits[r][mine]
            torch.testing.assert_close(logits, alone.logits[0], atol=1e-4, rtol=1e-4)
            for feature, layer in zip(reading.features, (2, 7), strict=True):
                wanted = alone.hidden_states[layer][0]
                torch.testing.assert_close(feature[r][mine], wanted, atol=1e-4, rtol=1e-4)
            found += 1
    assert found == len(LENGTHS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_target_reads_other_rows_too() -> None:
    device = torch.device("cuda")
    target = Target("demo:target", device)
    batches = []
    for lengths in (LENGTHS, (90, 20, 13, 80)):
        rows, _ = random_rows(lengths, 500, target.vocab_size)
        batches.append(rows.at(torch.arange(1), device))
    wanted = [target.read(rows, (2, 7)) for rows in batches]
    target.capture(batches[0], (2, 7))
    assert target.captured is not None
    for rows, want in zip(batches, wanted, strict=True):
        reading = target.read(rows, (2, 7))
        assert reading.logits.data_ptr() == target.captured.logits.data_ptr()
        torch.testing.assert_close(reading.logits, want.logits, atol=0, rtol=0)
        torch.testing.assert_close(reading.features, want.features, atol=0, rtol=0)


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_captured_pass_reads_everything_of_other_rows(
    target: Target, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that computes the captured pass again from the same tensors, and by bounds alone
    where attention does not read segments."""
    plain, passes = target._pass, list[tuple[Any, ...]]()

    def once(*given: Any) -> Any:
        found = plain(*given)
        passes.append((given, found))
        return found

    class Graph:
        def replay(self) -> None:
            (ids, position, layout, layers), (_, logits) = passes[-1]
            if not is_dense:
                counts = layout.bounds.diff()
                texts = torch.arange(len(counts)).repeat_interleave(counts)
                layout = Layout(texts.view(ids.shape), layout.bounds)
            logits.copy_(plain(ids, position, layout, layers)[1])

    lengths = LENGTHS, (90, 20, 13, 80)
    first, other = (random_rows(some, 500, target.vocab_size)[0] for some in lengths)
    want = target.read(other).logits
    monkeypatch.setattr(target, "_pass", once)
    monkeypatch.setattr(target, "captured", None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    segment = first.segment.clone()
    target.capture(first, ())
    got = target.read(other)
    assert target.captured is not None and len(passes) == 2
    known = other.segment >= 0
    torch.testing.assert_close(got.logits[known], want[known], atol=1e-4, rtol=1e-4)
    assert torch.equal(first.segment, segment), "the first rows stay as they are"


def slow_chain(
    q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: list[int], scale: float
) -> Tensor:
    """`chained`, one row and one head at a time; rows that mean nothing are zero."""
    step, out = len(keys) - 1, torch.zeros_like(q)
    groups = q.shape[1] // keys[0].shape[1]
    rows = []
    for begin, end in pairwise(bounds):
        for t in range(begin, end):
            if t - step < begin:
                rows.append(out[t])
                continue
            seen_k = [keys[0][s] for s in range(begin, t - step + 1)]
            seen_v = [values[0][s] for s in range(begin, t - step + 1)]
            seen_k += [keys[i][t - step + i] for i in range(1, step + 1)]
            seen_v += [values[i][t - step + i] for i in range(1, step + 1)]
            k, v = torch.stack(seen_k), torch.stack(seen_v)
            heads = [
                ((k[:, h // groups] @ q[t, h]) * scale).softmax(0) @ v[:, h // groups]
                for h in range(q.shape[1])
            ]
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_attention_of_chains_and_its_gradients() -> None:
    bounds = [0, 9, 14, 20]
    segment = torch.tensor([0] * 9 + [1] * 5 + [2] * 6).view(1, -1)
    layout = Layout.of(segment)
    assert layout.bounds.tolist() == bounds
    generator = torch.Generator().manual_seed(1)

    def draw(heads: int) -> Tensor:
        drawn = torch.randn(20, heads, 8, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    q, k, v = ([draw(h) for _ in range(4)] for h in (4, 2, 2))
    position = torch.cat([torch.arange(n) for n in (9, 5, 6)])
    everything = [*q, *k, *v]
    for step in range(4):
        means = (position >= step)[:, None, None]
        keys, values = k[: step + 1], v[: step + 1]
        ours = chained(q[step], keys, values, layout, 0.3, attention.DENSE) * means
        theirs = slow_chain(q[step], keys, values, bounds, 0.3)
        # Outputs are merged in fp32.
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
        weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
        grads = (torch.autograd.grad((o * weight).sum(), everything, allow_unused=True)
                 for o in (ours, theirs))  # fmt: skip
        for mine, wanted in zip(*grads, strict=True):
            if wanted is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, wanted, atol=5e-6, rtol=5e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_gives_the_numbers_of_dense_scores() -> None:
    assert attention.flash_is_right(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_of_blocks_and_its_gradients_on_a_gpu(target: Target) -> None:
    rows, _ = random_rows(LENGTHS, 100, target.vocab_size)
    reading = target.read(rows)
    seen = {"is_causal": False, "sees_anchor": False}
    made = drawn(reading, [9] * 4, 0, torch.Generator().manual_seed(2), **seen)
    generator = torch.Generator().manual_seed(1)
    shapes = ((36, 6), (136, 2), (136, 2))
    inputs = [torch.randn(len(rows), n, heads, 64, generator=generator) for n, heads in shapes]
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        there = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attend(replace(made, sees=made.sees.to(device)), *there, 0.125)
        grads = torch.autograd.grad((out.float() ** 2).sum(), there)
        found.append([out, *grads])
    for wanted, got in zip(*found, strict=True):
        reach = wanted.abs().max()
        torch.testing.assert_close(got.float().cpu() / reach, wanted / reach, atol=2e-2, rtol=0)


def test_the_loss_over_a_subset_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 6, generator=generator, requires_grad=True)
    head, logits = (torch.randn(*s, generator=generator) for s in ((30, 6), (12, 30)))
    weight = torch.rand(12, generator=generator)
    candidates = Candidates.of(torch.tensor([3, 7, 9, 20]), 30, 5, CPU)
    ids = candidates.draw(generator)
    assert len(ids.unique()) == 9 and ids[:4].tolist() == [3, 7, 9, 20]
    loss = SoftLoss(False)
    wanted = loss.probabilities(logits, ids)
    mine = head[ids].requires_grad_()
    ours, common = loss(hidden, mine, wanted, weight)
    each = cross_entropy(hidden @ mine.T, logits[:, ids].softmax(-1), reduction="none")
    theirs = (each * weight).sum()
    torch.testing.assert_close(ours, theirs)
    for of in (hidden, mine):
        grads = [torch.autograd.grad(3 * x, of, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*grads)
    # A draft from one distribution stands under the other as often as half their distance leaves.
    apart = ((hidden @ mine.T).softmax(-1) - logits[:, ids].softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(common, 1 - apart / 2)


def test_weights_are_those_of_the_tokens_that_rows_predict() -> None:
    texts = [Text(torch.arange(10, 16).numpy(), 2, ""), Text(torch.arange(20, 23).numpy(), 1, "")]
    rows = packed(joined(texts, Frame(), 12, 0.0, 0), 12).at(torch.tensor([0]), CPU)
    ids, segment = rows.ids[0].tolist(), rows.segment[0].tolist()
    for link, shift in ((0, 0), (0, 1), (2, 1)):
        outs = [torch.zeros(12, 1)] * (link + 1)
        for r, weight in enumerate(links_of(outs, rows, shift)[link].weight.tolist()):
            begin = segment.index(segment[r])
            is_one = r + 1 < 12 and segment[r] >= 0 and segment[r + 1] == segment[r]
            if not is_one or r - begin < link + shift:
                assert weight == 0
            else:
                is_answer = ids[r + 1] in (12, 13, 14, 15, 21, 22)
                assert weight == pytest.approx(1.0 if is_answer else 0.2, abs=1e-3)


def greedy_rounds(
    target: Target, settings: dict[str, object], k: int
) -> tuple[list[int], list[int], int]:
    """A text of the target after a prompt, the accepted counts of its rounds, and the prompt's
    length, by the engine in fp32."""
    sets = {
        "target.model": "demo:target",
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": 60,
        "run.device": "cpu",
    }
    planned = plan(load_recipe(None, sets | settings))
    prompt = tuple(planned.tokenizer.encode('def mean(values):\n    """Return the mean'))
    engine = build(planned, len(prompt))
    (seq,) = engine.run([Request(0, prompt)], k, planned.params).seqs
    return seq.tokens, seq.accepted_per_round, len(prompt)


def walk(right: Tensor, start: int, k: int) -> list[int]:
    """Accepted counts of rounds; right: bool [links, T], whether link i's proposal for a place is
    the text's token."""
    found, n, total = [], start, right.shape[1]
    while n < total:
        count = min(k, total - n - 1)
        accepted = next((i for i in range(count) if not right[i, n + i]), count)
        if count:
            found.append(accepted)
        n += accepted + 1
    return found


@cache
def own_text(target: Target) -> tuple[Tensor, Rows, int]:
    """A text that the target writes greedily, alone in a row, and the length of its prompt."""
    tokens, _, start = greedy_rounds(target, {"speculation.method": "none"}, 0)
    ids = torch.tensor(tokens)
    rows = packed([(ids.numpy(), torch.ones(len(ids)).numpy())], len(ids))
    return ids, rows.at(torch.tensor([0]), CPU), start


def hidden_of(kind: Any, reading: Reading) -> Tensor:
    """[links, T, H]; the row before a token proposes it."""
    return torch.stack([link.hidden for link in kind.links(reading, torch.Generator())])


def train_a_moment(kind: Any, reading: Reading, ids: Tensor, rate: float, steps: int) -> None:
    """Train four links on a text, so that some proposals stand and others fall."""
    optimiser = torch.optim.AdamW(kind.module.parameters(), rate)
    goals = ids[2:].expand(4, -1).flatten()
    for _ in range(steps):
        optimiser.zero_grad()
        found = hidden_of(kind, reading)[:, 1:-1] @ kind.target.head.T
        cross_entropy(found.flatten(0, 1), goals).backward()
        optimiser.step()
    kind.module.to(torch.bfloat16).float()  # as it is stored


def predicted(kind: Any, reading: Reading, ids: Tensor, start: int) -> list[int]:
    """Accepted counts of rounds of four proposals, by the links that training unrolls."""
    with torch.no_grad():
        found = hidden_of(kind, reading) @ kind.target.head.T
    right = torch.zeros(4, len(ids), dtype=torch.bool)
    right[:, 1:] = found.argmax(-1)[:, :-1] == ids[1:]
    counts = walk(right, start, 4)
    assert 1 < len(set(counts)), counts
    return counts


def test_the_engine_accepts_what_training_predicts(target: Target, tmp_path: Path) -> None:
    """A saved head, whose features were scaled in training, proposes what its chains say."""
    torch.manual_seed(0)
    kind = eagle3.make(target, Options(links=4))
    ids, rows, start = own_text(target)
    reading = target.read(rows, kind.feature_layers)
    kind.prepare(reading)
    assert max(kind.scales) > 1.05 * min(kind.scales)
    train_a_moment(kind, reading, ids, 1e-3, 12)
    kind.save(target, torch.arange(8), tmp_path / "head")
    with torch.no_grad():
        kind.module.fc.weight.copy_(stored_fc(tmp_path / "head", kind.scales))
    got = greedy_rounds(target, {"draft.model": str(tmp_path / "head")}, 4)
    assert got[:2] == (ids.tolist(), predicted(kind, reading, ids, start))


def test_the_engine_accepts_what_a_modules_training_predicts(
    target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind = mtp.make(target, Options(links=4))
    ids, rows, start = own_text(target)
    reading = target.read(rows, kind.feature_layers)
    train_a_moment(kind, reading, ids, 2e-3, 10)
    kind.save(target, torch.arange(8), tmp_path / "module")
    got = greedy_rounds(target, {"draft.model": str(tmp_path / "module")}, 4)
    assert got[:2] == (ids.tolist(), predicted(kind, reading, ids, start))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_engine_accepts_what_a_blocks_training_predicts(
    target: Target, tmp_path: Path, name: str
) -> None:
    """A saved drafter of blocks, trained a moment on a text, proposes what its rows say of it.

    A Markov head reads true tokens here and drafts in the engine: these are the same up to the
    first that falls."""
    torch.manual_seed(0)
    block = 5 if name == "dflash" else 4
    kind = BLOCKS[name].make(target, Options(block=block, anchors=999, mask=7, rank=8))
    ids, rows, start = own_text(target)
    reading = target.read(rows, kind.feature_layers)
    kind.prepare(reading)
    optimiser = torch.optim.AdamW(kind.module.parameters(), 1e-3)
    for _ in range(12):
        optimiser.zero_grad()
        told = judged(kind, reading, target.head)
        sum(cross_entropy(logits, ids[goal]) for logits, _, goal in told).backward()
        optimiser.step()
    kind.module.to(torch.bfloat16).float()
    kind.save(target, torch.arange(8), tmp_path)
    with torch.no_grad():
        if name != "pard":
            kind.module.fc.weight.copy_(stored_fc(tmp_path, kind.scales))
        told = judged(kind, reading, target.head)
    right = torch.zeros(4, len(ids), dtype=torch.bool)
    for logits, place, goal in told:
        right[place, goal] = logits.argmax(-1) == ids[goal]
    wanted = walk(right, start, 4)
    assert 1 < len(set(wanted)), wanted
    settings: dict[str, object] = {"draft.model": str(tmp_path)}
    if name == "pard":
        settings["draft.share"] = ["embeddings", "lm_head"]
    got = greedy_rounds(target, settings, 4)
    assert got[:2] == (ids.tolist(), wanted)


@pytest.mark.parametrize("kind_of", [dspark, dflash])
def test_a_training_begins_with_a_stored_drafter(
    target: Target, kind_of: Any, tmp_path: Path
) -> None:
    """The engine's weights and mask come back unchanged, although scales are of another batch.
    DFlash takes the backbone of DSpark."""
    sizes = {"inner": 192, "depth": 2, "rank": 32}
    kind = kind_of.make(target, Options(start="demo:dspark", mask=7, **sizes))
    _, rows, _ = own_text(target)
    kind.prepare(target.read(rows, kind.feature_layers))
    kind.save(target, torch.arange(8), tmp_path)
    (wanted, theirs), (got, config) = (
        plain_tensors(place) for place in (demo_path("demo:dspark"), tmp_path)
    )
    settings = theirs["dflash_config"]
    if kind_of is dflash:
        settings = {key: settings[key] for key in ("mask_token_id", "target_layer_ids")}
        wanted = {name: t for name, t in wanted.items() if "_head" not in name}
    assert config["dflash_config"] == settings
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=2**-7, atol=0)
    for options, told in (
        (Options(start="demo:dspark", **sizes | {"inner": 96}), "size mismatch"),
        (Options(start="demo:eagle3", **sizes), "no drafter of this form"),
        (Options(start="demo:dspark", layers=(1, 2, 3), **sizes), r"over the layers \[0, 1, 2\]"),
    ):
        kind = kind_of.make(target, options)
        with pytest.raises(ValueError, match=told):
            kind.prepare(target.read(rows, kind.feature_layers))


def judged(kind: Any, reading: Reading, head: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits of every proposal that training compares, its place, and where its token stands."""
    found = []
    for link in kind.links(reading, torch.Generator()):
        known = link.weight > 0
        goal = torch.arange(len(known)) if link.goal is None else link.goal
        place = torch.as_tensor(link.place).expand(known.shape)
        logits = link.hidden[known] @ link.head(head).T
        found.append((logits, place[known], goal[known] + 1))
    return found


def stored_fc(folder: Path, scales: list[float]) -> Tensor:
    """fc as the file has it, unfolded: bf16 rounds after the scale is folded in."""
    from safetensors.torch import load_file

    weight = load_file(folder / "model.safetensors")["fc.weight"].float()
    width = weight.shape[1] // len(scales)
    scale = torch.tensor(scales).repeat_interleave(width)
    return weight / scale


def test_a_head_with_fewer_ids_has_the_targets_rows_of_them(target: Target, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kind = eagle3.make(target, Options(vocabulary=5))
    kind.save(target, torch.tensor([31, 9, 4, 30, 11, 3, 99]), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    ids = stored["d2t"] + torch.arange(5)
    assert ids.tolist() == [4, 9, 11, 30, 31]
    assert torch.equal(stored["lm_head.weight"].float(), target.head[ids].bfloat16().float())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 5
    plan(load_recipe(None, {"target.model": "demo:target", "draft.model": str(tmp_path)}))


def test_a_saved_draft_accepts_what_training_predicts(target: Target, tmp_path: Path) -> None:
    kind = draft.make(target, Options(depth=2))
    ids, rows, start = own_text(target)
    reading = target.read(rows)
    kind.prepare(reading)
    optimiser = torch.optim.AdamW(kind.module.parameters(), 2e-3)
    for _ in range(6):
        optimiser.zero_grad()
        found = hidden_of(kind, reading)[0, :-1] @ target.head.T
        cross_entropy(found, ids[1:]).backward()
        optimiser.step()
    kind.module.to(torch.bfloat16).float()
    kind.save(target, ids, tmp_path / "draft")
    with torch.no_grad():
        choice = (hidden_of(kind, reading)[0] @ target.head.T).argmax(-1)
    right = torch.zeros(4, len(ids), dtype=torch.bool)
    right[:, 1:] = choice[:-1] == ids[1:]
    wanted = walk(right, start, 4)
    assert 1 < len(set(wanted)), wanted
    share = {"draft.model": str(tmp_path / "draft"), "draft.share": ["embeddings", "lm_head"]}
    got = greedy_rounds(target, share, 4)
    assert got[0] == ids.tolist()
    assert got[1] == wanted


@pytest.mark.parametrize(
    ("family", "scale"), [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.25})]
)
def test_a_draft_learns_the_logits_that_it_runs_with(
    family: str, scale: dict[str, float], tmp_path: Path
) -> None:
    """A copy of all of the target's layers has its logits."""
    scaled = Target(str(save_tiny(tmp_path, family, **scale)), CPU)
    rows, _ = random_rows(LENGTHS, 100, scaled.vocab_size)
    reading = scaled.read(rows)
    for module in (draft, pard):
        kind = module.make(scaled, Options(depth=scaled.num_layers, block=3, anchors=4))
        kind.prepare(reading)
        links = kind.links(reading, torch.Generator().manual_seed(1))
        known = rows.segment.flatten() >= 0
        logits = links[0].hidden @ scaled.head.T
        wanted = reading.logits.flatten(0, 1)
        torch.testing.assert_close(logits[known], wanted[known], atol=1e-4, rtol=1e-3)
    # Those of masks, by the norm's output before the scale.
    found: list[Tensor] = []
    kind.draft.decoder.norm.register_forward_hook(lambda _, __, out: found.append(out))
    deep = kind.links(reading, torch.Generator().manual_seed(1))[-1].hidden
    (normed,) = found
    masks = normed[:, rows.ids.shape[1] :].flatten(0, 1)
    factor = scale.get("logit_scale", 1 / scale.get("logits_scaling", 1.0))
    torch.testing.assert_close(deep, factor * masks)


def test_a_draft_of_capped_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="with final_logit_softcapping are not built"):
        logit_scale(SimpleNamespace(final_logit_softcapping=30.0))
    assert logit_scale(SimpleNamespace(final_logit_softcapping=None)) == 1.0


def test_a_loss_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> Callable[..., object]:
        def fail(*_: object) -> object:
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", refuse)
    loss, plain = SoftLoss(True), SoftLoss(False)
    logits = torch.randn(3, 9)
    for _ in range(2):
        ids = torch.tensor([1, 4])
        assert torch.equal(loss.probabilities(logits, ids), plain.probabilities(logits, ids))
    assert capsys.readouterr().out.count("no compiler") == 1
