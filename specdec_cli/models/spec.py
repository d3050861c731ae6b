"""A model as a recipe names it, before any of its files is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the settings to load it with. role: target or draft, for messages."""

    role: str
    name: str
    revision: str | None
    dtype: str  # auto | float32 | bfloat16 | float16
    load_format: str  # auto | dummy
    trust_remote_code: bool = False
    allow_pickle: bool = False
    file: str | None = None  # name of one of several GGUF files
    weights: str = "auto"  # auto | stored | dequantise | fp8
    cache: str = "auto"  # auto | fp8, for keys and values
