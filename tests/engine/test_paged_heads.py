"""A head of another kind than EAGLE-3's, whose rows embed their own token and carry nothing on."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from specdec_kernels import ops
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from specdec_cli.core.batch import ForwardBatch, Rectangle, Span
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Sequence
from specdec_cli.models.fused_stack import FusedStack, storages_of
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, HeadWeights
from specdec_cli.models.heads.checkpoint import dummy_weights
from specdec_cli.models.heads.description import HeadDescription
from specdec_cli.models.heads.layers import fused_layers, rotary_table
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.prompt_passes import PromptGraphs
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.split_products import SplitProducts
from tests.support import CPU

BLOCK, NUM_BLOCKS, VOCAB, FEATURES = 4, 20, 60, 48
BODY = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCAB},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRowConfig(HeadConfig):
    noun: ClassVar[str] = "head of own rows"
    shift: ClassVar[int] = 0
    carries: ClassVar[bool] = False

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"fc.weight": (32, FEATURES), EMBEDDING: (VOCAB, 32), HEAD: (VOCAB, 32)}


class OwnRowHead:
    """Layers over the sum of a token's embedding and its features."""

    ids = None

    def __init__(
        self, config: OwnRowConfig, weights: HeadWeights, max_len: int, parallel: TensorParallel
    ) -> None:
        self.config, self.tensors = config, weights.tensors
        self.dtype = weights.tensors[EMBEDDING].dtype
        self.table = rotary_table(config.body, self.dtype, CPU, max_len)
        body, _ = config.split(parallel)
        layers = fused_layers(body, config.body, config.windows, weights.tensors)
        self.stack = FusedStack(layers, SplitProducts.over(parallel, 32, VOCAB, self.dtype))

    @property
    def storages(self) -> dict[int, int]:
        own = [self.tensors[name] for name in self.config.own_shapes()]
        return storages_of([*own, *self.table, *self.stack.held])

    def fuse(self, features: Tensor) -> Tensor:
        return features @ self.tensors["fc.weight"].T

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        x = self.tensors[EMBEDDING][token_ids] + hidden
        first, rows = self.stack.layers[0], [part[batch.positions] for part in self.table]
        normed = ops.Normed(x, ops.rms_norm(x, first.attention_norm, first.eps), None, first.eps)
        return self.stack.run((normed, rows[0], rows[1]), batch, cache)

    def normed(self, hidden: Tensor) -> ops.Normed:
        return ops.Normed(hidden, ops.rms_norm(hidden, self.tensors["norm.weight"], 1e-6), None, 0)

    def logits(self, x: ops.Normed) -> Tensor:
        return self.stack.split.logits(x, self.tensors[HEAD])

    def fed_back(self, x: ops.Normed) -> Tensor:
        return x.hidden


@pytest.fixture
def config() -> OwnRowConfig:
    sizes = {"target_hidden_size": 24, "vocab_size": VOCAB, "draft_vocab_size": VOCAB}
    return OwnRowConfig(name="x", body=LlamaConfig(**BODY), windows=(0, 0), **sizes)


def paged(config: OwnRowConfig) -> PagedHead:
    """Its norms differ from 1, so that each shows."""
    weights = dummy_weights(config, torch.float32, CPU)
    made = torch.Generator().manual_seed(2)
    for name, tensor in weights.tensors.items():
        scale = 0.5 if tensor.dim() == 1 else 8.0  # dummies have a deviation of 0.02
        tensor.mul_(scale).add_(tensor.dim() == 1, alpha=float(torch.rand((), generator=made)))
        assert tensor.isfinite().all(), name
    cache = KVCache(config.cache_layers(), NUM_BLOCKS, BLOCK, torch.float32, CPU)
    return PagedHead(OwnRowHead(config, weights, 64, ALONE), cache)


@torch.inference_mode()
def reference(tensors: Any, tokens: list[int], features: Tensor) -> Tensor:
    """[T, V], logits by transformers' model."""
    model = LlamaModel(LlamaConfig(**BODY)).eval()
    own = ("fc.weight", HEAD)
    model.load_state_dict({name: t for name, t in tensors.items() if name not in own})
    embeds = tensors[EMBEDDING][tokens] + features @ tensors["fc.weight"].T
    return model(inputs_embeds=embeds[None]).last_hidden_state[0] @ tensors[HEAD].T


@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_embed_their_own_token(config: OwnRowConfig, is_padded: bool) -> None:
    """Chunks of a prompt, then rows of a round, which read what the chunks wrote."""
    head, made = paged(config), torch.Generator().manual_seed(1)
    tensors = {name: t.clone() for name, t in head.head.tensors.items()}  # type: ignore[attr-defined]
    if is_padded:
        head.capture_prompts(PromptGraphs(60, 2, 12, CPU, is_captured=False))
    tokens = torch.randint(VOCAB, (2, 14), generator=made).tolist()
    features = torch.randn(2, 14, FEATURES, generator=made)
    seqs = [
        Sequence(i, ids[:11], 11, 40, [1 + 4 * i + j for j in range(4)])
        for i, ids in enumerate(tokens)
    ]
    for start, stop in ((0, 5), (5, 11)):  # the last known token has a row too
        head.prefill([Span(s, start, stop) for s in seqs], features[:, start:stop].flatten(0, 1))
    state = BatchState(2, 12, CPU)
    state.load(seqs, 0)
    ids = torch.tensor(tokens)[:, 11:]
    rows = Rectangle(ids, torch.tensor([3, 3]), 0, 1, 64, False)
    x = head.forward_slots(rows, state, features[:, 11:], fused=False)
    got = head.head.logits(x).view(2, 3, VOCAB)
    for i in range(2):
        want = reference(tensors, tokens[i], features[i])
        torch.testing.assert_close(got[i], want[11:], atol=1e-4, rtol=1e-4)
        assert (
            want[11:] - reference(tensors, tokens[i], features[i].roll(1, 0))[11:]
        ).abs().max() > 0.1


def test_a_head_that_carries_nothing_keeps_no_vectors(config: OwnRowConfig) -> None:
    head = paged(config)
    assert not head.carry.numel()
    told = HeadDescription(
        spec=ModelSpec("draft", "", None, "float32", "dummy"),
        place=Path(),
        config=config,
        make=OwnRowHead,
        dtype=torch.float32,
        device=CPU,
        max_len=64,
        num_target_layers=4,
        feature_layers=(1, 2),
        borrows=frozenset(),
        gathers_head=False,
        parallel=ALONE,
    )
    assert told.block_bytes(BLOCK) * NUM_BLOCKS == head.cache.num_bytes
    assert told.loaded_bytes() == sum(head.storages.values())


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_carried_row_is_the_last_complete_one_across_borders_of_blocks(shift: int) -> None:
    """Row t of a head with shift s is complete with token t + s, in the block of its own key."""
    settings = SimpleNamespace(shift=shift, carries=True, output_size=2)
    head: Any = SimpleNamespace(
        config=settings, dtype=torch.float32, normed=lambda rows: SimpleNamespace(hidden=rows)
    )
    cache: Any = SimpleNamespace(num_blocks=13, block_size=3, device=torch.device("cpu"))
    paged, state = PagedHead(head, cache), BatchState(3, 4, torch.device("cpu"))
    state.block_tables.copy_(torch.arange(1, 13).view(3, 4))
    state.active.copy_(torch.tensor([True, True, False]))
    state.length[:2] = 1
    kept = torch.zeros(3, 2)
    for number, accepted in enumerate([[0, 1], [2, 0], [1, 1], [0, 2], [1, 0], [1, 1]]):
        place = torch.tensor([*accepted, -1])
        hidden = torch.arange(18.0).view(3, 3, 2) + 100 * (number + 1)
        paged.carry_on(state, hidden, place)
        for slot, row in enumerate(accepted):
            if int(state.length[slot]) - shift + row >= 0:
                kept[slot] = hidden[slot, row]
        state.length += place + 1
        found = paged.carried(state).hidden
        assert torch.equal(found[:2], kept[:2]), (number, state.length)
