"""Compiled passes: the same logits, whole graphs, and nothing compiled twice.

Dynamo works here as it does with inductor. Its backends "eager" and "aot_eager" need no C++
compiler.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from specdec_cli.core.batch import Rectangle, padded_batch
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.loop import Engine
from specdec_cli.models.compiled import CompiledForward
from specdec_cli.models.paged import PagedModel, PassOutput
from tests.engine.test_families import STATES
from tests.engine.test_pipeline import PROMPTS, told
from tests.support import Request, make_engine, save_tiny

CASES = ["llama", "gemma2", "gpt2", "gpt_oss"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_engine(
    target: Path, draft: Path, backend: str, of_both: bool = True, **settings: Any
) -> Engine:
    """of_both: whether the draft is compiled too."""
    engine = make_engine(target, draft, runs_ahead=True, fused=False, **settings)
    engine.target.compiled = CompiledForward(engine.target.module, "target", backend)
    worker: Any = engine.proposer
    if of_both:
        worker.model.compiled = CompiledForward(worker.model.module, "draft", backend)
    for model in (engine.target, worker.model):
        for tensor in model.cache.pools:
            tensor.zero_()  # padding reads unwritten memory with weight zero
    return engine


def run(engine: Engine, k: int, **params: Any) -> Any:
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS[:4])]
    return engine.run(requests, k, SamplingParams(max_new_tokens=9, **params))


def compare_passes(model: PagedModel) -> set[int]:
    """Make each padded pass run uncompiled too, and compare the two. Returns a set that collects
    the widths of the passes."""
    forward, widths = model.forward_slots, set()

    def both(what: Rectangle, state: BatchState, **_: Any) -> PassOutput:
        batch = padded_batch(what, state, model.cache.block_size, model.vocab_size)
        plain = model._run(batch)
        found = forward(what, state)
        assert plain.hidden is not None and found.hidden is not None
        assert found.hidden.shape == (*what.token_ids.shape, len(STATES) * 64)
        torch.testing.assert_close(found.hidden.flatten(0, 1), plain.hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logits.flatten(0, 1), plain.logits, rtol=1e-5, atol=1e-5)
        widths.add(what.token_ids.shape[1])
        return found

    model.forward_slots = both  # type: ignore[method-assign]
    return widths


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in CASES],  # the sweep below compares passes
)
def test_compiled_rounds_equal_plain_ones(family: str, tmp_path: Path) -> None:
    """Draft and target have the same class and so share their forward's code, which runs compiled
    for one of them. The target also returns hidden states, as if a proposer read them."""
    target = save_tiny(tmp_path / "target", family)
    draft = save_tiny(tmp_path / "draft", family, seed=1)
    plain = make_engine(target, draft, batch_size=2, fused=False)
    compiled = compiled_engine(target, draft, "aot_eager", of_both=False, batch_size=2)
    compiled.target.hidden_layers = STATES
    widths = compare_passes(compiled.target)
    assert told(run(compiled, 3)) == told(run(plain, 3))
    assert widths == {4}


def test_a_sweep_compiles_two_graphs_a_model(tmp_path: Path) -> None:
    """The number of graphs does not depend on k or on the batch's tokens, and a second run compiles
    none. Nor does it on passes that ran eagerly before, as where kernels are compiled ahead. The
    target's graphs have hidden states among their outputs."""
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    engine = compiled_engine(target, draft, "eager")
    engine.target.hidden_layers = STATES
    with torch.compiler.set_stance("force_eager"):
        run(engine, 4)
    assert counters["stats"]["unique_graphs"] == 0
    widths = compare_passes(engine.target)
    for _ in range(2):
        for k in (4, 0, 2, 7):
            run(engine, k)
        assert counters["stats"]["unique_graphs"] == 4
        assert not counters["graph_break"]
    assert widths == {5, 1, 3, 8}


@pytest.mark.slow  # the sweep above counts the graphs of two models of one shape
def test_models_of_one_shape_do_not_share_a_graph(tmp_path: Path) -> None:
    """Together they stay within the number of compilations that Dynamo allows one code object."""
    target = save_tiny(tmp_path / "target", "llama")
    other = save_tiny(tmp_path / "other", "llama", seed=1)
    with torch._dynamo.config.patch(recompile_limit=1):
        for draft in (target, other):
            plain = make_engine(target, draft, fused=False)
            compiled = compiled_engine(target, draft, "eager")
            assert told(run(compiled, 2)) == told(run(plain, 2))
    assert counters["stats"]["unique_graphs"] == 2 * 3


def test_what_cannot_be_compiled_whole_is_an_error(tmp_path: Path) -> None:
    """The alternative would be a slow run that looks like a compiled one."""
    folder = save_tiny(tmp_path, "llama")
    engine = compiled_engine(folder, folder, "eager")
    model = engine.target.module.model

    def peeks(hidden: torch.Tensor) -> torch.Tensor:
        return hidden if float(hidden.sum()) > 0 else hidden + 0

    model.norm.register_forward_hook(lambda _, __, out: peeks(out))
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        run(engine, 0)


def test_a_second_compilation_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    engine = compiled_engine(folder, folder, "eager")
    run(engine, 0)
    engine.target.hidden_layers = (1,)  # too late
    with pytest.raises(torch._dynamo.exc.RecompileError):
        run(engine, 0)
    engine.target.hidden_layers = ()
    run(engine, 0)
    engine.target.module.model.layers[0].self_attn.scaling = 0.5  # a guarded constant
    with pytest.raises(torch._dynamo.exc.RecompileError):
        run(engine, 0)
