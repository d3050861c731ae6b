"""Which models the engine can run, decided before any weight is read.

A model passes when every layer asks our attention function for plain causal or sliding-window
attention. Models that fail would not crash: most would write wrong text.
"""

from typing import Any

import torch

from specdec_cli.engine.kv_cache import LayerShape
from specdec_cli.errors import SetupError
from specdec_cli.models.attention import attach

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their tables follow the longest position in the batch, so a sequence's logits would depend on
# its neighbours.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_PROBE_TOKENS = 3


class Unsupported(SetupError):
    """The model cannot run in this engine, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"model {name} is not supported: {reason}",
            "decoder-only families with plain or sliding-window attention work, among them "
            "llama, qwen2, qwen3, mistral, gemma2 and gpt2",
        )


def check_config(config: Any, name: str) -> None:
    """Refuse what the configuration alone shows to be unsupported. Raises `Unsupported`."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(name, f"{config.model_type} is an encoder-decoder model")
    if any(hasattr(config, key) for key in ("vision_config", "audio_config", "text_config")):
        raise Unsupported(name, f"{config.model_type} is a multimodal model")
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise Unsupported(name, f"it has layers of type {', '.join(sorted(unknown))}")
    for rope in _rope_settings(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in _BATCH_DEPENDENT_ROPE:
            raise Unsupported(name, f"its rotary embedding is of type {kind}")
        if "mrope_section" in rope:
            raise Unsupported(name, "it uses multimodal rotary embedding (M-RoPE)")
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported(name, "its weights are quantised")


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one dict, or one for each layer type."""
    found = []
    for attribute in ("rope_parameters", "rope_scaling"):
        value = getattr(config, attribute, None)
        if isinstance(value, dict):
            found.append(value)
            found.extend(v for v in value.values() if isinstance(v, dict))
    return found


class _Recorder:
    """Attention that only notes who called and with which shapes."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerShape]] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        heads, tokens, _key_dim = query.shape
        shape = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        self.calls.append((layer, shape))
        return query.new_zeros(tokens, heads, value.shape[-1])


@torch.inference_mode()
def probe(model: Any, name: str) -> list[LayerShape]:
    """Run a pass on the meta device; returns what each layer caches, in layer order.

    Raises `Unsupported` unless every layer calls the registered attention exactly once.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(name, f"{type(model).__name__} has attention code of its own")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise Unsupported(name, f"{type(model).__name__} attends to later tokens too")
    recorder = _Recorder()
    attach(model, recorder)
    device = next(model.parameters()).device
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    model(input_ids=ids, position_ids=positions, use_cache=False)
    shapes = dict(recorder.calls)
    layers = model.config.num_hidden_layers
    if len(recorder.calls) != layers or sorted(shapes) != list(range(layers)):
        raise Unsupported(
            name,
            f"{len(recorder.calls)} of its attention calls come through the registered function, "
            f"{layers} were expected, one for each layer",
        )
    return [shapes[layer] for layer in range(layers)]
