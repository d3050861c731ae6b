"""Hidden states: rows, refusals and cost. test_families and test_fused compare their values with
transformers', and tests/dist those of split models."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.types import Sequence
from specdec_cli.errors import SetupError
from specdec_cli.models.hidden import check_hidden_layers
from specdec_cli.models.paged import PagedModel, PassOutput
from tests.engine.test_families import BLOCK, STATES
from tests.support import description, paged_model, save_tiny, tiny_config


class Operators(TorchDispatchMode):
    """A count of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def feed(model: PagedModel, num_logits: int) -> PassOutput:
    """Feed a prefill chunk of five tokens."""
    seq = Sequence(0, [5, 17, 31, 60, 8], 5, 40)
    BlockAllocator(model.cache.num_blocks, BLOCK).extend(seq.block_table, 5)
    return model.forward([Span(seq, 0, 5)], [num_logits])


def operators(model: PagedModel) -> Counter[str]:
    with Operators() as seen:
        feed(model, 1)
    return seen.counts


@pytest.mark.parametrize("fused", [False, True])
def test_all_tokens_have_hidden_states_whatever_logits_are_asked_for(
    fused: bool, tmp_path: Path
) -> None:
    model = paged_model(save_tiny(tmp_path, "llama"), 9, BLOCK, fused=fused, hidden_layers=STATES)
    passes = [feed(model, num_logits) for num_logits in (5, 1, 0)]
    for num_logits, (logits, hidden) in zip((5, 1, 0), passes, strict=True):
        assert hidden is not None and hidden.shape == (5, 4 * 64) and len(logits) == num_logits
        torch.testing.assert_close(hidden, passes[0].hidden)


@pytest.mark.parametrize("fused", [False, True])
def test_hidden_states_cost_nothing_when_nobody_asks(fused: bool, tmp_path: Path) -> None:
    """Asking adds one operator that joins the states, and a view in the module's own layers."""
    model = paged_model(save_tiny(tmp_path, "llama"), 9, BLOCK, fused=fused)
    before = operators(model)
    assert feed(model, 1).hidden is None
    model.hidden_layers = STATES
    more = operators(model)
    added = {"aten.cat.default": 1} | ({} if fused else {"aten.select.int": 1})
    assert more - before == added and not before - more
    model.hidden_layers = ()
    assert operators(model) == before
    hooks = [m for m in model.module.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks


def test_a_failed_pass_keeps_nothing(tmp_path: Path) -> None:
    """The pass may have run out of memory, and a compiled pass would be compiled again."""
    model = paged_model(save_tiny(tmp_path, "llama"), 9, BLOCK, hidden_layers=(0,))
    kept = []

    def fail(*_: Any) -> None:
        raise MemoryError

    first = model.module.model.layers[0]
    first.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    hook = model.module.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        feed(model, 1)
    hook.remove()
    gc.collect()
    assert kept[0]() is None


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[int, ...], str]] = {
    "too late": ("llama", {}, (0, 3), "no hidden state 3: this llama has 2 layers"),
    "from the end": ("gpt2", {}, (-1,), "no hidden state -1: this gpt2 has 2 layers"),
    "several streams": (
        "gemma3n",
        {},
        (1,),
        "gemma3n_text cannot be used: there are several per token",
    ),
    "other widths": ("opt", {"word_embed_proj_dim": 32}, (1,), "opt cannot be used: embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_does_not_have_is_refused(case: str, tmp_path: Path) -> None:
    """The refusal comes before weights are read; the folder has none."""
    family, changes, layers, reason = REFUSED[case]
    tiny_config(family, **changes).save_pretrained(tmp_path)
    module = description(tmp_path, load_format="dummy").module
    check_hidden_layers(module, ())
    with pytest.raises(SetupError, match=reason):
        check_hidden_layers(module, layers)


def test_a_model_refuses_too(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    with pytest.raises(SetupError, match="no hidden state 3"):
        paged_model(folder, 9, BLOCK, hidden_layers=(3,))
    model = paged_model(folder, 9, BLOCK, hidden_layers=(1,))
    with pytest.raises(SetupError, match="no hidden state 7"):
        model.hidden_layers = (7,)
    assert model.hidden_layers == (1,)
