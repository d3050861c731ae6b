"""Check, before weights are read, that a model's output would be correct: all its layers must use
causal or sliding-window attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.errors import SetupError
from specdec_cli.models.attention import NotPlainAttention, Recorder, attach, masks_named
from specdec_cli.models.formats import FORMATS
from specdec_cli.models.known_results import KnownResults
from specdec_cli.models.refusals import Unsupported
from specdec_cli.text import one_line, reason_of

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary tables of these types depend on the largest position in the batch, so a sequence's logits
# would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_PROBE_TOKENS = 3


def check_config(config: Any, name: str) -> None:
    """Raise `Unsupported` if a model's config shows that it cannot run here."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(name, f"{config.model_type} is an encoder-decoder model")
    if any(hasattr(config, key) for key in ("vision_config", "audio_config", "text_config")):
        raise Unsupported(name, f"{config.model_type} is a multimodal model")
    if getattr(config, "num_hidden_layers", 1) < 1:
        raise Unsupported(name, "config.json says that it has no layers")
    unknown = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    unknown -= _KNOWN_LAYER_TYPES
    if unknown:
        raise Unsupported(name, f"it has layers of type {', '.join(sorted(unknown))}")
    for rope in rope_settings(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in _BATCH_DEPENDENT_ROPE:
            raise Unsupported(name, f"its rotary embedding is of type {kind}")
        if "mrope_section" in rope:
            raise Unsupported(name, "it uses multimodal rotary embedding (M-RoPE)")
    turns = getattr(config, "no_rope_layers", None) or ()
    if getattr(config, "attn_temperature_tuning", False) and 0 in turns:
        # llama4: such a layer scales a query by its place in the pass, not by its position.
        raise Unsupported(
            name, "attn_temperature_tuning is set, and no_rope_layers has layers without positions"
        )
    method = quantisation(config)
    if method is not None and method not in FORMATS:
        raise Unsupported(
            name,
            f"its weights are quantised, and quantization_config.quant_method is {method}",
            "use the original, unquantised checkpoint; of quantised ones, those stored as "
            f"{' or '.join(sorted(FORMATS))} work",
        )


def check_layers(config: Any, name: str, held: int) -> None:
    """Raise `SetupError` if the config has more layers than the weights. held: the number of layers
    in the weights."""
    layers = config.num_hidden_layers
    if layers > held:
        raise SetupError(
            f"the config of {name}: num_hidden_layers is {layers}, but the weights have {held}",
            "its config and the weights do not belong together, or a file is missing",
        )


def quantisation(config: Any) -> str | None:
    """Return the quantisation method that a config names, or None for unquantised weights."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    return one_line(str(stored.get("quant_method") or "missing"))


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the dicts of rotary settings in a config. If a dict holds one dict per layer type,
    these are listed after it."""
    found = []
    for attribute in ("rope_parameters", "rope_scaling"):
        value = getattr(config, attribute, None)
        if isinstance(value, dict):
            found.append(value)
            found.extend(v for v in value.values() if isinstance(v, dict))
    return found


@torch.inference_mode()
def probe(model: Any, name: str) -> list[LayerShape]:
    """Check a model by running a pass on the meta device. Returns the cache shapes of the layers in
    order.

    Raises `Unsupported` unless each layer calls our attention once and nothing else mixes tokens.
    """
    kind = model.config.model_type
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(name, f"{kind} has attention code of its own")
    for module in (model.config, *model.modules()):
        if getattr(module, "is_causal", True) is False:
            raise Unsupported(name, f"{kind} attends to later tokens too")
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            raise Unsupported(name, f"{kind} mixes neighbouring tokens by convolution")
    recorder = Recorder()
    attach(model, recorder)
    _trial_pass(model, name)
    shapes = {layer: shape for layer, shape, _ in recorder.calls}
    layers = model.config.num_hidden_layers
    if len(recorder.calls) != layers or sorted(shapes) != list(range(layers)):
        raise Unsupported(
            name,
            f"{kind} does not attend once in each of its {layers} layers: {len(recorder.calls)} "
            f"calls came from {len(shapes)} layers",
        )
    return [shapes[layer] for layer in range(layers)]


def _trial_pass(model: Any, name: str) -> None:
    """Run a pass over a few tokens, through all layers. Raises `Unsupported` if it fails, or if its
    code depends on the values of tensors."""
    kind = model.config.model_type
    device = next(model.parameters()).device
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    try:
        with batched_experts(model), masks_named(model), KnownResults():
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except NotPlainAttention as problem:
        raise Unsupported(name, str(problem)) from None
    except NotImplementedError as problem:
        # The meta device raises this if code reads tensor values, which would also stall a GPU.
        raise Unsupported(
            name, f"{kind} looks at values in the middle of a pass to decide what to compute"
        ) from problem
    except Exception as problem:
        reason = reason_of(problem)
        raise Unsupported(name, f"a trial pass through {kind} fails ({reason})") from problem


@contextmanager
def batched_experts(model: Any) -> Iterator[None]:
    """Switch `model`, during the `with` block, to the only implementation of experts whose tensor
    shapes do not depend on routing."""
    chosen = model.get_experts_implementation()
    model.set_experts_implementation(dict.fromkeys(chosen, "batched_mm"))
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)
