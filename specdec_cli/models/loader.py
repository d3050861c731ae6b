"""Loading a transformers model for the engine: config, gate, weights, buffers.

The module is built on the meta device, so that what the gate refuses costs nothing, and then
filled tensor by tensor from safetensors, or with random numbers for `load_format: dummy`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, initialization

from specdec_cli.engine.kv_cache import LayerShape
from specdec_cli.errors import SetupError
from specdec_cli.models.attention import ATTENTION_NAME
from specdec_cli.models.gate import Unsupported, check_config, probe
from specdec_cli.models.resolve import model_folder
from specdec_cli.models.weights import Read, open_checkpoint

_DUMMY_TILE = 1 << 20  # numbers drawn for a dummy weight on CPU; larger tensors repeat them


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to load and how; `role` ("target", "draft") names it in messages."""

    role: str
    name: str
    revision: str | None
    dtype: str  # auto | float32 | bfloat16 | float16
    load_format: str  # auto | dummy
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """A model that passed the gate and holds no weights yet (its tensors are on meta)."""

    spec: ModelSpec
    folder: Path
    module: Any
    layers: list[LayerShape]
    dtype: torch.dtype
    max_len: int
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on the device; tied ones count once."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())


def describe(spec: ModelSpec, device: torch.device) -> Description:
    """Read the config, build the module on meta and pass it through the gate.

    Raises `SetupError` for what cannot be found, read or supported.
    """
    folder = model_folder(spec.name, spec.revision)
    config = _config(spec, folder)
    check_config(config, spec.name)
    dtype = _dtype(spec.dtype, config, device)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
            )
        # With a padding id, gpt2 looks for it in every input, which waits for the device.
        module.config.pad_token_id = None
        module.eval()
        layers = probe(module, spec.name)
    except SetupError:
        raise
    except Exception as problem:
        # Families with attention classes of their own look them up by name.
        is_own = isinstance(problem, KeyError) and ATTENTION_NAME in problem.args
        reason = f"transformers cannot build it ({_line(problem)})"
        if is_own:
            reason = f"{config.model_type} has attention code of its own"
        raise Unsupported(spec.name, reason) from problem
    return Description(
        spec=spec,
        folder=folder,
        module=module,
        layers=layers,
        dtype=dtype,
        max_len=_max_len(config),
        eos_ids=_eos_ids(config, folder),
    )


def load(description: Description, device: torch.device) -> Any:
    """Fill the described module with its weights on `device` and return it.

    Raises `SetupError` naming the file or tensor when the checkpoint does not fit the config.
    """
    module, spec = description.module, description.spec
    if spec.load_format == "dummy":
        _fill(module, description.dtype, device, _dummy_source(module, device))
    else:
        with open_checkpoint(description.folder, spec.allow_pickle) as tensors:
            _fill(module, description.dtype, device, _checkpoint_source(module, spec, tensors))
    _restore_buffers(module, device)
    return module


Source = Callable[[str, torch.Tensor], torch.Tensor | None]


def _fill(module: Any, dtype: torch.dtype, device: torch.device, source: Source) -> None:
    """Replace every meta parameter by the tensor `source` gives for its name.

    A tied parameter is one object under several names and is read once. Where the source has
    nothing, the parameter is left to transformers' own initialisation (`_restore_buffers`).
    """
    done: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for prefix, owner in module.named_modules():
            for name, meta in list(owner._parameters.items()):
                if meta is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if id(meta) not in done:
                    value = source(full, meta)
                    filled = torch.empty(meta.shape, dtype=dtype, device=device)
                    parameter = torch.nn.Parameter(filled, requires_grad=False)
                    if value is not None:
                        parameter.copy_(value)
                        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
                    done[id(meta)] = parameter
                owner._parameters[name] = done[id(meta)]


def _checkpoint_source(module: Any, spec: ModelSpec, tensors: dict[str, Read]) -> Source:
    """Parameters by name, with the base model's prefix added or dropped where files differ."""
    prefix = f"{module.base_model_prefix}."
    # Old names of tied weights: a file may hold the tied tensor under any of its names.
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = []
    found: dict[int, Read] = {}
    for identity, aliases in names.items():
        candidates = [
            c for name in aliases for c in (name, name.removeprefix(prefix), prefix + name)
        ]
        key = next((c for c in candidates if c in tensors), None)
        if key is None:
            missing.append(aliases[0])
        else:
            found[identity] = tensors[key]
    if missing:
        raise SetupError(
            f"the weights of {spec.name} lack {len(missing)} tensors, first {missing[0]}",
            "config.json and the weights do not belong together, or a file is missing",
        )

    def source(name: str, meta: torch.Tensor) -> torch.Tensor:
        value = found[id(meta)]()
        if value.shape != meta.shape:
            raise SetupError(
                f"{name} of {spec.name} has shape {list(value.shape)} in the weights and "
                f"{list(meta.shape)} by its config.json",
                "config.json and the weights do not belong together",
            )
        return value

    return source


def _dummy_source(module: Any, device: torch.device) -> Source:
    """Random matrices seeded by parameter name; vectors are left to their own initialisation,
    which makes norms neutral and biases zero."""
    std = float(getattr(module.config, "initializer_range", 0.02))

    def source(name: str, meta: torch.Tensor) -> torch.Tensor | None:
        if meta.dim() < 2:
            return None
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator(device).manual_seed(seed)
        count = meta.numel()
        if device.type == "cpu":
            # Drawing billions of numbers takes minutes on a CPU; repeating a tile takes none.
            tile = torch.empty(min(count, _DUMMY_TILE)).normal_(0.0, std, generator=generator)
            repeats = -(-count // tile.numel())
            return tile.repeat(repeats)[:count].view(meta.shape)
        value = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        return value.normal_(0.0, std, generator=generator)

    return source


def _restore_buffers(module: Any, device: torch.device) -> None:
    """Give buffers (rotary tables, embedding scales) and unread vectors their initial values.

    They are computed in code, not stored, and a meta build leaves them empty. transformers'
    `initialize_weights` skips what is marked as initialised.
    """
    for owner in module.modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.no_grad(), initialization.guard_torch_init_functions():
        module.initialize_weights()


def _config(spec: ModelSpec, folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
    except Exception as problem:
        if "trust_remote_code" in str(problem):
            raise SetupError(
                f"model {spec.name} needs code from its own repository",
                "pass --trust-remote-code if you trust it",
            ) from None
        if "model type" in str(problem) or "model_type" in str(problem):
            raise Unsupported(spec.name, "transformers does not know its model_type") from None
        raise SetupError(
            f"cannot read config.json of {spec.name}: {_line(problem)}", "is it a model folder?"
        ) from None


def _dtype(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's on CUDA and float32 on CPU, where halves are slow."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    if device.type != "cuda":
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def _max_len(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20


def _eos_ids(config: Any, folder: Path) -> frozenset[int]:
    """Ids that end a text: the generation config's, else the model config's."""
    eos = getattr(config, "eos_token_id", None)
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            stored = GenerationConfig.from_pretrained(folder).eos_token_id
        except Exception as problem:
            raise SetupError(
                f"cannot read {file}: {_line(problem)}", "it is damaged; download it again"
            ) from None
        eos = eos if stored is None else stored
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
