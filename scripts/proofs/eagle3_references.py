"""EAGLE-3 heads run by independent code, from a checkout of it. SafeAILab's EAGLE
(`eagle/model/cnets.py`) drafts as in generation, over its own cache. speculators
(`src/speculators/models/eagle3`) has the forward pass of training, in which row t of step j ends a
chain of j rows; the last row gets its own proposals for tokens that the text does not have yet. The
checkouts are not changed.

Shims: EAGLE's config is a plain namespace, since transformers 5 gives `EConfig` a `rope_scaling`
that EAGLE does not know. speculators is imported without being installed: its version is "0", and
clients of servers that prepare its data (`ABSENT`) are empty modules where they are missing. Its
attention is "sdpa": with "eager" its masks are numbers to add, and for later steps it extends them
by ones and zeros, which hide nothing.

Both take hidden state i as the input of the target's layer i. EAGLE reads it in the loop over
layers, before the layer is called (`modeling_llama_kv.py`). speculators counts the last layer's
output as `num_hidden_layers` (`scripts/launch_vllm.py`). Both pair hidden state t with token t + 1
(`topK_genrate` drops the first token, `shift_batch` too). Knows nothing of specdec.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

ABSENT = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "hs_connectors")


class ReferenceHead(Protocol):
    """A head. Legend: T rows, F width of the features, Vd ids that it proposes."""

    def start(self) -> None:
        """Forget the last text."""
        ...

    def rows(self, features: Tensor, tokens: list[int]) -> Tensor:
        """Logits [T, Vd] of every row. features: [T, F]. tokens: T + 1."""
        ...

    def chain(self, features: Tensor, tokens: list[int], k: int) -> tuple[list[int], Tensor]:
        """k greedy proposals after `tokens`, and their logits [k, Vd].

        features: [T, F], of all tokens but the last. The text has grown since the last call.
        """
        ...


def reference_head(checkout: Path, head: Path, embedding: Tensor) -> ReferenceHead:
    """The head in the folder `head`, which is in speculators' form, run by `checkout`'s code.

    embedding: [V, H], also the lm_head; used if the checkpoint has none. Raises `ValueError` if the
    code cannot run such a head.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in _stored(head).items()}
    borrowed = {"embed_tokens.weight": embedding, "lm_head.weight": embedding}
    tensors = borrowed | tensors
    if (checkout / "eagle/model/cnets.py").is_file():
        return SafeAILab(checkout, config, tensors)
    if (checkout / "src/speculators/models/eagle3/core.py").is_file():
        return Speculators(checkout, config, tensors)
    raise ValueError(f"{checkout} is a checkout of neither EAGLE nor speculators")


def _stored(head: Path) -> dict[str, Tensor]:
    return dict(load_file(head / "model.safetensors"))


class SafeAILab:
    """EAGLE's `Model`, whose tree has one branch: `topK_genrate` then drafts a chain."""

    def __init__(self, checkout: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        body = config["transformer_layer_config"]
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        rope = body["rope_parameters"]
        if body["model_type"] != "llama" or body["num_hidden_layers"] != 1:
            raise ValueError("EAGLE has llama heads of one layer")
        if any(config.get(flag) for flag in flags) or body.get("attention_bias"):
            raise ValueError("EAGLE has no further norms and no biases")
        if rope["rope_type"] != "default" or len(config["eagle_aux_hidden_state_layer_ids"]) != 3:
            raise ValueError("EAGLE has plain rotary embeddings and three hidden states")
        sys.path.insert(0, str(checkout))
        made = types.SimpleNamespace(
            **{key: value for key, value in body.items() if key != "rope_parameters"},
            **{"rope_theta": rope["rope_theta"], "rope_scaling": None},
            **{"pretraining_tp": 1, "pad_token_id": None},
            draft_vocab_size=config["draft_vocab_size"],
            target_hidden_size=config.get("target_hidden_size", body["hidden_size"]),
        )
        self.model = importlib.import_module("eagle.model.cnets").Model(made, top_k=1).eval()
        names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
        _load(self.model, {names[name]: tensor for name, tensor in tensors.items()})
        self.model.init_tree()
        self.logits = _recorded(self.model.lm_head)
        self.start()

    def start(self) -> None:
        self.model.reset_kv()
        self.model.reset()

    def rows(self, features: Tensor, tokens: list[int]) -> Tensor:
        following = torch.tensor([tokens[1:]])
        self.model.reset()
        hidden = self.model(features[None], input_ids=following)
        found: Tensor = self.model.lm_head(self.model.norm(hidden))[0]
        return found

    def chain(self, features: Tensor, tokens: list[int], k: int) -> tuple[list[int], Tensor]:
        model = self.model
        model.total_tokens, model.depth = k, k - 1
        known = 0 if model.stable_kv is None else model.stable_kv[0][0].shape[2]
        self.logits.clear()
        ids = torch.tensor([tokens])
        drafted = model.topK_genrate(features[None, known:], ids, model.lm_head, None)[0]
        logits = torch.cat([rows.reshape(-1, rows.shape[-1])[-1:] for rows in self.logits])
        return drafted[0, 1:].tolist(), logits


class Speculators:
    """speculators' `Eagle3DraftModel`, by its forward pass of training."""

    def __init__(self, checkout: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        body = config["transformer_layer_config"]
        if config.get("target_hidden_size", body["hidden_size"]) != body["hidden_size"]:
            raise ValueError("speculators has heads of the target's width")
        if "sliding_attention" in body.get("layer_types", ()):
            raise ValueError("in speculators' training a window does not move with a chain")
        sys.path.insert(0, str(checkout / "src"))
        package = _import_speculators()
        wanted = {key: config[key] for key in _SPECULATORS_KEYS if key in config}
        made = package.Eagle3SpeculatorConfig(transformer_layer_config=dict(body), **wanted)
        made.transformer_layer_config._attn_implementation = "sdpa"
        self.model = package.Eagle3DraftModel(made).eval()
        _load(self.model, tensors)
        self.logits = _recorded(self.model.lm_head)
        self.model.embed_tokens.register_forward_pre_hook(self._own_proposal)

    def start(self) -> None:
        """Nothing is kept between calls."""

    def rows(self, features: Tensor, tokens: list[int]) -> Tensor:
        return self._steps(features, tokens, 1)[0]

    def chain(self, features: Tensor, tokens: list[int], k: int) -> tuple[list[int], Tensor]:
        logits = self._steps(features, tokens, k)[:, -1]
        return [self._proposal(row) for row in logits], logits

    def _steps(self, features: Tensor, tokens: list[int], count: int) -> Tensor:
        """Logits [count, T, Vd] of each step of training."""
        self.logits.clear()
        ids = torch.tensor([tokens[1:]])
        self.model(features[None], ids, torch.zeros_like(ids), ttt_steps=count)
        return torch.cat(self.logits)

    def _proposal(self, logits: Tensor) -> int:
        best = logits.argmax()
        return int(best if self.model.d2t is None else best + self.model.d2t[best])

    def _own_proposal(self, module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """In later steps the text ends before the last row's token, which is its proposal."""
        ids = inputs[0].clone()
        if self.logits:
            ids[0, -1] = self._proposal(self.logits[-1][0, -1])
        return (ids,)


_SPECULATORS_KEYS = (
    *("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    "eagle_aux_hidden_state_layer_ids",
)


class _Empty(types.ModuleType):
    """A module whose every name is a class without contents."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _import_speculators() -> Any:
    for name in ABSENT:
        top = name.partition(".")[0]
        if top in sys.modules and isinstance(sys.modules[top], _Empty):
            sys.modules[name] = _Empty(name)
        elif name == top and importlib.util.find_spec(name) is None:
            sys.modules[name] = _Empty(name)
    version = importlib.metadata.version

    def known(distribution_name: str) -> str:
        return "0" if distribution_name == "speculators" else version(distribution_name)

    with patch.object(importlib.metadata, "version", known):
        return importlib.import_module("speculators")


def _recorded(module: Any) -> list[Tensor]:
    """The list to which every result of `module` is added from now on."""
    found: list[Tensor] = []
    module.register_forward_hook(lambda module, inputs, output: found.append(output))
    return found


# These are made from the target's text or from the config alone, and drafting does not read them.
_NOT_IN_CHECKPOINTS = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")


def _load(model: Any, tensors: dict[str, Tensor]) -> None:
    """Load every tensor. None may be unknown, and none that drafting reads may be missing."""
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown, f"the reference does not know {unknown}"
    assert set(missing) <= set(_NOT_IN_CHECKPOINTS), f"the reference lacks {missing}"
