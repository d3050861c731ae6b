"""The frozen target of a training: its hidden states and distributions over packed rows.

Works through transformers' own classes. Even for a batch that fills a GPU, a pass takes half as
long as the host's launches, so training's passes replay a CUDA graph. Legend: B rows, N tokens a
row, H width, V ids.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.speculators.attention import NAME, Attend, Layout, reading
from scripts.speculators.corpus import Rows
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.resolve import model_place

MODEL_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
SHORT = 64  # least mean length of a captured batch's texts: each has programs


@dataclass(frozen=True)
class Reading:
    """The target's results for a batch. features: the requested hidden states, [B, N, H] each, as
    transformers counts them: i is the input of layer i. logits: [B, N, V] of the next token."""

    rows: Rows
    layout: Layout
    features: tuple[Tensor, ...]
    logits: Tensor


@dataclass(frozen=True)
class Captured:
    """A pass over batches of one shape as a CUDA graph. The next replay overwrites its results.
    layout: with empty texts at the end."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    position: Tensor
    layout: Layout
    features: tuple[Tensor, ...]
    logits: Tensor

    def takes(self, rows: Rows, layout: Layout) -> bool:
        return rows.ids.shape == self.ids.shape and len(layout.bounds) <= len(self.layout.bounds)

    def replay(self, rows: Rows, layout: Layout) -> Reading:
        self.ids.copy_(rows.ids)
        self.position.copy_(rows.position)
        # Flash attention reads the bounds, and dense scores the segments.
        self.layout.segment.copy_(layout.segment)
        self.layout.bounds.copy_(padded(layout.bounds, len(self.layout.bounds)))
        self.graph.replay()
        return Reading(rows, layout, self.features, self.logits)


def padded(bounds: Tensor, count: int) -> Tensor:
    """[count]: the bounds of texts, and of empty ones after them."""
    return torch.cat((bounds, bounds[-1:].expand(count - len(bounds))))


class Target:
    """A target's module, on a device and without gradients."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.place: Path = model_place(name, None)
        self.device = device
        self.module = plain_model(self.place, device).requires_grad_(False)
        self.config = self.module.config
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.module.get_input_embeddings().weight.shape[0]
        self.captured: Captured | None = None

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[V, H]"""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def read(self, rows: Rows, layers: tuple[int, ...] = ()) -> Reading:
        """Read rows on the device."""
        layout = Layout.of(rows.segment)
        if self.captured is not None and self.captured.takes(rows, layout):
            return self.captured.replay(rows, layout)
        return Reading(rows, layout, *self._pass(rows.ids, rows.position, layout, layers))

    @torch.no_grad()
    def capture(self, rows: Rows, layers: tuple[int, ...]) -> None:
        """Let later reads of this shape, for the same layers, replay a CUDA graph. If a pass cannot
        be captured, reads do not change, and the reason is printed."""
        ids, position = rows.ids.clone(), rows.position.clone()
        bounds, count = Layout.of(rows.segment).bounds, ids.numel() // SHORT + 1
        if len(bounds) > count:
            return
        layout, graph = Layout(rows.segment.clone(), padded(bounds, count)), torch.cuda.CUDAGraph()
        try:
            self._pass(ids, position, layout, layers)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                features, logits = self._pass(ids, position, layout, layers)
        except RuntimeError as problem:
            print(f"the target's pass is not captured: {str(problem)[:200]}", flush=True)
            return
        self.captured = Captured(graph, ids, position, layout, features, logits)

    def _pass(
        self, ids: Tensor, position: Tensor, layout: Layout, layers: tuple[int, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The features of some layers, and the logits."""
        found = forward(
            self.module, ids, position, layout.attend, output_hidden_states=bool(layers)
        )
        return tuple(found.hidden_states[i] for i in layers), found.logits


def named(place: Path) -> tuple[Path, dict[str, str]]:
    """A folder or GGUF file as arguments of transformers' `from_pretrained`."""
    return (place.parent, {"gguf_file": place.name}) if is_gguf(place) else (place, {})


def plain_model(place: Path, device: torch.device) -> Any:
    """A checkpoint as transformers loads it, with attention over packed rows."""
    folder, file = named(place)
    settings = {"dtype": MODEL_DTYPES[device.type], "attn_implementation": NAME}
    model = AutoModelForCausalLM.from_pretrained(folder, **file, **settings)
    return model.to(device).eval()


def logit_scale(config: Any) -> float:
    """The number by which a model multiplies its head's products. Raises `ValueError` for logits
    that are changed in another way."""
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError("drafts for targets with final_logit_softcapping are not built here")
    divided = getattr(config, "logits_scaling", None) or 1.0  # Granite's
    return float(getattr(config, "logit_scale", None) or 1.0) / divided  # Cohere's


def smaller_model(config: Any, layers: int) -> Any:
    """A model of the config's family with `layers` layers and random weights, in fp32."""
    settings = AutoConfig.for_model(**{**config.to_dict(), "num_hidden_layers": layers})
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:layers]
    settings.tie_word_embeddings = config.tie_word_embeddings
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=NAME)


def forward(model: Any, ids: Tensor, position: Tensor, attend: Attend, **more: Any) -> Any:
    """transformers' output for rows [B, N] of tokens, with our attention."""
    with reading(attend):
        return model(input_ids=ids, position_ids=position, use_cache=False, **more)
