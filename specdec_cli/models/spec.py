"""The settings of a model in a recipe. No file of the model has been read yet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the settings to load it with. role: `target` or `draft`; messages show it."""

    role: str
    name: str
    revision: str | None
    dtype: str  # auto | float32 | bfloat16 | float16
    load_format: str  # auto | dummy
    trust_remote_code: bool = False
    allow_pickle: bool = False
    file: str | None = None  # the GGUF file to load if there are several
    weights: str = "auto"  # auto | stored | dequantise | fp8
    cache: str = "auto"  # the type of cached keys and values: auto | fp8
