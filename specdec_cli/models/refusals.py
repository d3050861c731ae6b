"""Errors for models that cannot run in this engine. This module does not import torch or other
large packages."""

from specdec_cli.errors import ExitCode, SetupError

_WHAT_WORKS = (
    "decoder-only families with plain or sliding-window attention work, dense or with experts, "
    "among them llama, qwen2, qwen3, mistral, mixtral, gemma3, phi3, gpt_oss, deepseek_v3, glm4, "
    "granite, olmo2, cohere2 and gpt2"
)
ANOTHER_DRAFT = (
    "a draft works only with the target that it was trained for: name a different one with "
    "--draft, or its own target with --target (`specdec methods` lists the bundled ones with "
    "their targets)"
)


class Unsupported(SetupError):
    """Raised for a model that cannot run in this engine. The message gives the reason."""

    is_common = True

    def __init__(self, name: str, reason: str, hint: str = _WHAT_WORKS) -> None:
        super().__init__(f"model {name} is not supported: {reason}", hint)


class Indivisible(Unsupported):
    """Raised if a part of the model, such as its heads, cannot be split over the recipe's number of
    ranks."""

    code = ExitCode.USAGE

    def __init__(self, name: str, what: str, size: int) -> None:
        super().__init__(
            name, f"its {what} cannot be divided among {size} ranks", "use fewer ranks"
        )
