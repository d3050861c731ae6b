"""Prompt lookup: its recipe keys, and how they are passed to vLLM and SGLang."""

from typing import Annotated

from pydantic import Field, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig, sglang_block
from specdec_cli.recipe.fields import Count, Section, entry


class NgramKeys(Section):
    """Keys of prompt lookup."""

    ngram_max: Annotated[StrictInt, Field(ge=1, le=32)] = entry(
        4, "longest n-gram looked up in the text so far"
    )
    ngram_min: Count = entry(1, "shortest n-gram looked up")

    @field_validator("ngram_min")
    @classmethod
    def _ngram_order(cls, value: int, info: ValidationInfo) -> int:
        longest = info.data.get("ngram_max", value)
        if value > longest:
            raise PydanticCustomError(
                "order", "should be at most ngram_max ({longest})", {"longest": longest}
            )
        return value


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    return VllmConfig(
        {
            "method": "ngram",
            "prompt_lookup_max": setting("speculation", "ngram_max"),
            "prompt_lookup_min": setting("speculation", "ngram_min"),
        }
    )


def _to_sglang(k: int) -> dict[str, str | int]:
    """Ask for a chain of k tokens. Otherwise SGLang would propose a tree of k tokens."""
    return sglang_block("NGRAM")(k) | {"ngram-max-bfs-breadth": 1}


NGRAM = MethodChoice(
    "proposes what followed the same n-gram",
    keys=NgramKeys,
    to_vllm=_to_vllm,
    to_sglang=_to_sglang,
    draws=False,
)
