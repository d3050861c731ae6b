"""Tiny targets and block drafters trained for them; rounds by transformers' own DFlash net.

The net is uncached: each round computes the whole context again. Markov heads are written from the
papers' equations, and share nothing with the product.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from tests.cli.generate_helpers import word_tokenizer
from tests.support import VOCAB, greedy_reference, greedy_text, reference, save_tiny

NEW_TOKENS = 24
PROMPTS = [[5, 9, 3, 11, 60], [7, 30], [4, 8, 15, 16, 23, 42, 50, 61, 12, 90, 33], [44, 2, 71, 6]]
MASK = 95
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}


@dataclass
class Drafter:
    """A drafter's settings and weights; fields may be changed to plant a fault.

    outputs: the layers of the target whose outputs it reads. ids: the target's id of each of its
    own, [Vd]. own: embedding, head, and the Markov and confidence heads' tensors.
    """

    net: Any
    ids: Tensor
    block_size: int = 5
    outputs: tuple[int, ...] = (0, 2)
    anchor: bool = False
    markov: str = ""
    rank: int = 8
    mask: int = MASK
    own: dict[str, Tensor] = field(default_factory=dict)

    def rows(self, features: Tensor, token: int, k: int) -> Tensor:
        """Normed rows [k, H] that decide the k tokens after `token`.

        features: [n - 1, F], of all tokens before it.
        """
        count = k if self.anchor else k + 1
        block = torch.tensor([token, *[self.mask] * (count - 1)])
        out = self.net(
            noise_embeds=self.own["embed_tokens.weight"][block][None],
            context_hidden_states=features[None],
            position_ids=torch.arange(len(features) + count)[None],
        )
        found: Tensor = out.last_hidden_state[0, count - k :]
        return found

    def bias(self, h: Tensor, previous: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The Markov head's addition to the logits of a row h [H], and its next state [r]."""
        e = self.own["markov_head.markov_w1.weight"][previous]
        inner = e
        if self.markov == "gated":
            gate = self._joint("gate_proj", torch.cat((h, e)))
            inner = gate.sigmoid() * e
        elif self.markov == "rnn":
            g, c, o = self._joint("joint_proj", torch.cat((state, e, h))).chunk(3)
            inner, keep = o.tanh(), g.sigmoid()
            state = keep * state + (1 - keep) * c.tanh()
        return linear(inner, self.own["markov_head.markov_w2.weight"]), state

    def _joint(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.own[f"markov_head.{name}.{n}"] for n in ("weight", "bias"))
        return linear(x, weight, bias)

    def propose(
        self, features: Tensor, token: int, k: int, given: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """k greedy proposals and the logits [k, Vd] that they are drawn from. given: tokens that
        replace them when the next is drawn."""
        rows, found, state = self.rows(features, token, k), list[int](), torch.zeros(self.rank)
        logits = list(linear(rows, self.own["lm_head.weight"]))
        for j, h in enumerate(rows):
            if self.markov:
                before = (given or found)[j - 1] if j else token
                added, state = self.bias(h, before, state)
                logits[j] = logits[j] + added
            found.append(int(self.ids[logits[j].argmax()]))
        return found, torch.stack(logits)


@dataclass(frozen=True)
class Pair:
    """The folders of a target and a drafter, and the drafter itself."""

    target: Path
    folder: Path
    drafter: Drafter


def save_pair(
    folder: Path,
    dialect: str = "z-lab",
    steps: int = 50,
    vocab: int = VOCAB,
    like: Pair | None = None,
    **settings: Any,
) -> Pair:
    """A target of four layers and a drafter trained on some of its texts.

    dialect: "z-lab", "deepspec" or "speculators". like: a pair with the same target and trained
    net. settings: of the drafter; draft_vocab: Vd.
    """
    settings = {"draft_vocab": vocab, "mask": min(MASK, vocab - 1)} | settings
    if like is None:
        target = save_tiny(folder / "target", "llama", num_hidden_layers=4, vocab_size=vocab)
        word_tokenizer(target, [f"w{i}" for i in range(vocab)])
    else:
        target, steps = like.target, 0
        settings = {"net": like.drafter.net, "anchor": like.drafter.anchor} | settings
    drafter = make_drafter(reference(target), steps, dialect != "z-lab", **settings)
    return Pair(target, save_drafter(folder / "drafter", drafter, dialect), drafter)


def make_drafter(
    oracle: Any, steps: int, has_own: bool, draft_vocab: int, **settings: Any
) -> Drafter:
    torch.manual_seed(3)
    vocab = oracle.config.vocab_size
    outputs = settings.get("outputs", Drafter.outputs)
    more = {"target_layer_ids": list(outputs), "rope_parameters": {"rope_theta": 10000.0}}
    more["rope_parameters"]["rope_type"] = "default"  # type: ignore[index]
    types = ["full_attention"] * SIZES["num_hidden_layers"]
    sizes = SIZES | {"hidden_size": oracle.config.hidden_size}
    config = MuseGlimmerAssistantConfig(**sizes, layer_types=types, **more)
    if (net := settings.pop("net", None)) is None:
        net = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager")
        _spread(net)
    drafter = Drafter(net, torch.arange(vocab), **settings)
    embedding, head = (
        one.weight.detach().clone()
        for one in (oracle.get_input_embeddings(), oracle.get_output_embeddings())
    )
    if has_own:
        embedding, head = embedding + 0.02 * torch.randn(embedding.shape), head * 1.1
    if draft_vocab < vocab:
        drafter.ids = torch.randperm(vocab)[:draft_vocab].sort()[0]
        head = head[drafter.ids]
    drafter.own |= {"embed_tokens.weight": embedding, "lm_head.weight": head}
    width, rank = sizes["hidden_size"], drafter.rank
    shapes: dict[str, tuple[int, ...]] = {}
    if drafter.markov:
        shapes = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (len(head), rank)}
    if drafter.markov == "gated":
        shapes |= {"gate_proj.weight": (rank, width + rank), "gate_proj.bias": (rank,)}
    if drafter.markov == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + width)}
        shapes |= {"joint_proj.bias": (3 * rank,)}
    drafter.own |= {f"markov_head.{n}": torch.randn(s) * 0.7 for n, s in shapes.items()}
    if drafter.markov:
        drafter.own["confidence_head.proj.weight"] = torch.randn(1, width + rank) * 0.2
        drafter.own["confidence_head.proj.bias"] = torch.randn(1)
    if steps:
        _train(drafter, oracle, steps)
    return drafter


def _spread(net: Any) -> None:
    for parameter in net.parameters():
        middle, std = (1.0, 0.2) if parameter.dim() == 1 else (0.0, 0.15)
        nn.init.normal_(parameter, middle, std)


def _train(drafter: Drafter, oracle: Any, steps: int) -> None:
    """Train a drafter on all texts but the last, in blocks of its size."""
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]]
    features = [features_of(oracle, drafter, text) for text in texts]
    places = torch.full((VOCAB,), -100)  # tokens that it cannot propose teach nothing
    places[drafter.ids] = torch.arange(len(drafter.ids))
    k = drafter.block_size - (not drafter.anchor)
    with torch.inference_mode(False), torch.enable_grad():
        adam = torch.optim.Adam(drafter.net.parameters(), lr=3e-3)
        for step in range(steps):
            which = step % len(texts)
            text, loss = texts[which], torch.zeros(())
            for n in range(1 + step % 3, len(text) - k, 3):
                _, logits = drafter.propose(
                    features[which][: n - 1], text[n - 1], k, text[n : n + k]
                )
                loss = loss + cross_entropy(logits, places[torch.tensor(text[n : n + k])])
            adam.zero_grad()
            loss.backward()
            adam.step()
    drafter.net.requires_grad_(False)


def features_of(oracle: Any, drafter: Drafter, tokens: list[int]) -> Tensor:
    """Features [T, F] by transformers."""
    with torch.no_grad():
        out = oracle(torch.tensor([tokens]), output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1][0] for i in drafter.outputs], dim=1)


def save_drafter(folder: Path, drafter: Drafter, dialect: str, **changes: Any) -> Path:
    """Write `drafter` as `dialect` does. changes: to the config; None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
    tensors = {}
    for name, tensor in drafter.net.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        tensors[f"{names.get(stem, stem)}.{leaf}"] = tensor
    kept = ("markov_head", "confidence_head") if dialect == "z-lab" else ("",)
    tensors |= {n: t for n, t in drafter.own.items() if n.startswith(kept)}
    vocab = len(drafter.own["embed_tokens.weight"])
    if len(drafter.ids) < vocab:
        tensors["d2t"] = drafter.ids - torch.arange(len(drafter.ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][drafter.ids] = True
    tensors = {n: t.clone().contiguous() for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(drafter, dialect) | changes
    kept_keys = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept_keys))
    return folder


def config_of(drafter: Drafter, dialect: str) -> dict[str, Any]:
    layer = SIZES | {"hidden_size": drafter.net.config.hidden_size, "model_type": "qwen3"}
    layer |= {"vocab_size": len(drafter.own["embed_tokens.weight"]), "rope_theta": 10000.0}
    layer |= {"max_position_embeddings": 64, "hidden_act": "silu", "torch_dtype": "float32"}
    layer["num_target_layers"] = 4
    heads: dict[str, Any] = {"markov_rank": drafter.rank if drafter.markov else 0}
    if drafter.markov:
        heads |= {"markov_head_type": drafter.markov, "enable_confidence_head": True}
        heads["confidence_head_with_markov"] = True
    own = {"block_size": drafter.block_size, "mask_token_id": drafter.mask}
    if dialect == "deepspec":
        kind = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(drafter.outputs)}
        return kind | layer | own | heads
    if dialect == "speculators":
        kind = {"speculators_model_type": "dspark" if drafter.markov else "dflash"}
        inputs = {"aux_hidden_state_layer_ids": [i + 1 for i in drafter.outputs]}
        reduced = {"draft_vocab_size": len(drafter.ids), "sample_from_anchor": drafter.anchor}
        more = heads if drafter.markov else {}
        return {"transformer_layer_config": layer, **kind, **own, **inputs, **reduced, **more}
    nested = {"mask_token_id": drafter.mask, "target_layer_ids": list(drafter.outputs)}
    if drafter.markov:  # SpecForge's
        nested |= heads | {"projector_type": "dspark"}
    kind = {"architectures": ["DFlashDraftModel"], "block_size": drafter.block_size}
    return kind | layer | {"dflash_config": nested}


def sure_length(
    drafter: Drafter, features: Tensor, token: int, proposed: list[int], threshold: float
) -> int:
    """The number of tokens before the first that the confidence head doubts."""
    weight, bias = (drafter.own[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
    rows = drafter.rows(features, token, len(proposed))
    e = drafter.own["markov_head.markov_w1.weight"][[token, *proposed[:-1]]]
    sure = linear(torch.cat((rows, e), 1), weight, bias)[:, 0].sigmoid()
    return next((j for j, c in enumerate(sure) if c < threshold), len(proposed))


def expected_rounds(
    pair: Pair,
    prompt: list[int],
    k: int,
    cut: Callable[..., int] | None = None,
    width: int | None = None,
) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round of greedy decoding, without any cache; those without
    proposals are left out. cut: gives the length of a block, as `sure_length` does. width:
    tokens that passes draft, k by default."""
    oracle, drafter = reference(pair.target), pair.drafter
    text = prompt + greedy_text(pair.target, prompt, NEW_TOKENS)
    features, found, n = features_of(oracle, drafter, text), [], len(prompt)
    while n < len(text):
        count, stand = min(k, len(text) - n - 1), 0
        if count:
            # The block keeps its width near the end.
            with torch.no_grad():
                proposed, _ = drafter.propose(features[: n - 1], text[n - 1], width or k)
                if cut is not None:
                    count = min(count, cut(features[: n - 1], text[n - 1], proposed))
            stand = next((i for i in range(count) if proposed[i] != text[n + i]), count)
            found += [(count, stand)] * (count > 0)
        n += stand + 1
    return found
