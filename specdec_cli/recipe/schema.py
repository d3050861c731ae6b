"""The recipe's keys, their defaults and their valid values.

Knows nothing of YAML, files, positions or options, which are for `source` and `resolve`.
"""

import re
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.names import MethodName, PolicyName, RuleName
from specdec_cli.text import is_unicode

_YES = frozenset({"yes", "on", "y", "true"})
_NO = frozenset({"no", "off", "n", "false"})
_EXPONENTIAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _switch_word(value: object) -> object:
    """Turn booleans back into on/off, which YAML 1.1 tools write so. Yes is on, no is off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return {"yes": "on", "no": "off"}.get(value, value) if isinstance(value, str) else value


def _yes_or_no(value: object) -> object:
    """Turn yes/no/on/off, which `source` reads as words, into truth values."""
    word = value.lower() if isinstance(value, str) else None
    return True if word in _YES else False if word in _NO else value


def _number(value: object) -> object:
    """Refuse text and booleans as numbers, except text like 1e-6, which YAML 1.1 takes for text."""
    if isinstance(value, bool) or (isinstance(value, str) and not _EXPONENTIAL.fullmatch(value)):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


def _usable(value: str) -> str:
    """Refuse text that no file can hold, or no file system accepts as a path."""
    if not is_unicode(value):
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text")
    if "\0" in value:
        raise PydanticCustomError("text", "should not contain a NUL character")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("text", "should be more than white space")
    return value


# Counts stay far below what a tensor index or a file size can hold.
_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**63 - 1
# torch counts a timeout's nanoseconds in 64 bits, which 1e10 seconds overflow.
_MAX_SECONDS = 1e9

Text = Annotated[StrictStr, AfterValidator(_usable)]
Words = Annotated[StrictStr, Field(min_length=1), AfterValidator(_usable)]
Name = Annotated[Words, AfterValidator(_not_blank)]
Count = Annotated[StrictInt, Field(ge=1, le=_MAX_COUNT)]
CountOrZero = Annotated[StrictInt, Field(ge=0, le=_MAX_COUNT)]
Number = Annotated[float, BeforeValidator(_number)]
Truth = Annotated[StrictBool, BeforeValidator(_yes_or_no)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_word)]
Probability = Annotated[Number, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """A model, how it is loaded, and over how many ranks."""

    model: Name = Field(description="folder, Hugging Face id, or demo:target / demo:draft")
    revision: Name | None = Field(
        default=None, description="branch, tag or commit of a Hugging Face id"
    )
    tensor_parallel_size: Count = Field(
        default=1, description="ranks that share the model's weights"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto is the checkpoint's on CUDA and float32 on CPU"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy draws random weights of the model's shape (for timing)"
    )


class DraftSection(ModelSection):
    """The model that proposes tokens, on the first ranks of the target's."""

    share: tuple[Literal["embeddings", "lm_head"], ...] = Field(
        default=(), description="what the draft borrows from the target"
    )


class LengthSection(_Section):
    """The number of proposed tokens of each round, k at most."""

    policy: PolicyName = Field(
        default="fixed",
        description="confidence stops a draft that is unsure; adaptive chooses k by its gain",
    )
    threshold: Probability = Field(
        default=0.4, description="confidence: a draft stops behind a less likely token"
    )
    choices: tuple[Annotated[StrictInt, Field(ge=0, le=1024)], ...] = Field(
        default=(0, 1, 2, 4, 8), description="adaptive: lengths to choose from, beside k itself"
    )


class SpeculationSection(_Section):
    """The proposal of tokens, and the rule that accepts them."""

    method: MethodName = Field(
        default="draft_model", description="who proposes; none when there is no draft model"
    )
    num_speculative_tokens: Annotated[StrictInt, Field(ge=0, le=1024)] = Field(
        default=5, description="proposed tokens a round (k); 0 is plain decoding"
    )
    acceptance: RuleName = Field(
        default="rejection",
        description="rejection and block are lossless, typical is not; synthetic fixes the rate",
    )
    synthetic_acceptance_rates: tuple[Probability, ...] | None = Field(
        default=None, description="chance that position i is accepted, at least k of them, falling"
    )
    synthetic_acceptance_length: Annotated[Number, Field(ge=1.0)] | None = Field(
        default=None, description="mean tokens a round, bonus token included (1 to k + 1)"
    )
    ngram_max: Annotated[StrictInt, Field(ge=1, le=32)] = Field(
        default=4, description="longest n-gram looked up in the text so far"
    )
    ngram_min: Count = Field(default=1, description="shortest n-gram looked up")
    typical_threshold: Probability = Field(
        default=0.09, description="typical: proposals of higher probability always stand"
    )
    typical_alpha: Probability = Field(
        default=0.3, description="typical: share of exp(-entropy) that lets a proposal stand"
    )
    length: LengthSection = Field(
        default=LengthSection(), description="how many tokens each round proposes"
    )

    @field_validator("ngram_min")
    @classmethod
    def _ngram_order(cls, value: int, info: ValidationInfo) -> int:
        longest = info.data.get("ngram_max", value)
        if value > longest:
            raise PydanticCustomError(
                "order", "should be at most ngram_max ({longest})", {"longest": longest}
            )
        return value

    @field_validator("synthetic_acceptance_rates")
    @classmethod
    def _rates_fall(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        rates = value or ()
        if any(later > earlier for earlier, later in pairwise(rates)):
            raise PydanticCustomError(
                "order", "should not rise: position i is reached only when i - 1 was accepted"
            )
        return value

    @model_validator(mode="after")
    def _synthetic(self) -> Self:
        if self.acceptance != "synthetic":
            return self
        k, rates = self.num_speculative_tokens, self.synthetic_acceptance_rates
        length = self.synthetic_acceptance_length
        if (rates is None) == (length is None):
            raise PydanticCustomError(
                "synthetic",
                "acceptance: synthetic needs one of synthetic_acceptance_rates and "
                "synthetic_acceptance_length",
                {"key": "acceptance"},
            )
        if rates is not None and len(rates) < k:
            raise PydanticCustomError(
                "synthetic",
                "should have at least num_speculative_tokens ({k}) rates, has {n}",
                {"key": "synthetic_acceptance_rates", "k": k, "n": len(rates)},
            )
        if length is not None and k > 0 and length > k + 1:
            raise PydanticCustomError(
                "synthetic",
                "should be at most num_speculative_tokens + 1 ({most})",
                {"key": "synthetic_acceptance_length", "most": k + 1},
            )
        return self


class SamplingSection(_Section):
    """The sampling of tokens, and the end of a text."""

    temperature: Annotated[Number, Field(ge=0.0)] = Field(default=0.0, description="0 is greedy")
    top_k: CountOrZero = Field(default=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="keep the smallest set with this probability; 1 keeps all"
    )
    max_new_tokens: Count = Field(default=256, description="most tokens written after a prompt")
    ignore_eos: Truth = Field(default=False, description="write on past the end-of-text token")
    stop: tuple[Words, ...] = Field(default=(), description="texts that end an output")


class CacheSection(_Section):
    """The KV cache that both models' blocks come from."""

    block_size: Count = Field(default=16, description="tokens a block")
    gpu_memory_utilization: Annotated[Number, Field(gt=0.0, le=1.0)] = Field(
        default=0.9, description="part of the device's memory that may be used in all"
    )
    num_blocks: Annotated[StrictInt, Field(ge=2, le=_MAX_COUNT)] | None = Field(
        default=None,
        description="null takes what fits and can be used; the first of them holds nothing",
    )
    max_model_len: Count | None = Field(
        default=None,
        description="longest prompt plus output, at most the model's own limit, which null is",
    )
    cpu_bytes: Annotated[StrictInt, Field(ge=1, le=_MAX_BYTES)] | None = Field(
        default=None, description="cache memory of a host on CPU, divided by its ranks"
    )


class RunSection(_Section):
    """The device and the settings of a measurement."""

    batch_size: Count = Field(default=1, description="prompts decoded together")
    device: Annotated[StrictStr, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")] = Field(
        default="auto", description="auto, cpu, cuda or cuda:N"
    )
    seed: Annotated[StrictInt, Field(ge=0, le=_MAX_BYTES)] = Field(
        default=0, description="with the prompt's index, the key of every random number"
    )
    compile: Switch = Field(default="auto", description="compile the models' forward passes")
    cuda_graphs: Switch = Field(default="auto", description="replay rounds as CUDA graphs")
    warmup: CountOrZero = Field(
        default=1, description="unmeasured repeats before the measured ones"
    )
    repeats: Count = Field(default=3, description="measured repeats of each point")
    prefill_chunk: Count = Field(default=2048, description="most prompt tokens in one forward pass")
    timeout_s: Annotated[Number, Field(gt=0.0, le=_MAX_SECONDS)] = Field(
        default=120.0, description="seconds after which a silent rank counts as lost"
    )


class DataSection(_Section):
    """The source of prompts."""

    path: Name = Field(
        description="file (.txt, .jsonl, .json, .csv, .tsv, .parquet), Hugging Face dataset id, or "
        "demo:prompts"
    )
    split: Name | None = Field(
        default=None, description="split of a dataset id, or a slice such as train[:100]"
    )
    subset: Name | None = Field(default=None, description="configuration of a dataset id")
    column: Name | None = Field(
        default=None,
        description="column with the prompt; null takes the first there is of prompt, text, "
        "question, instruction, turns (the first turn), messages and prompt_token_ids",
    )
    limit: Count | None = Field(default=None, description="use only the first so many prompts")
    chat: Switch = Field(
        default="auto",
        description="use the target's chat template: auto for messages, on for every prompt",
    )
    system: Text | None = Field(
        default=None, description="opens conversations without a system message; auto becomes on"
    )

    @field_validator("system")
    @classmethod
    def _system_needs_chat(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("chat") == "off":
            raise PydanticCustomError("chat", "needs the chat template, and data.chat is off")
        return value


class Recipe(_Section):
    """Everything a run depends on, apart from the machine."""

    # Order matters: a field's validator sees the fields above it.
    target: ModelSection
    draft: DraftSection | None = None
    speculation: SpeculationSection = SpeculationSection()
    sampling: SamplingSection = SamplingSection()
    cache: CacheSection = CacheSection()
    run: RunSection = RunSection()
    data: DataSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _method_without_draft(cls, data: Any) -> Any:
        """Without a draft model `method` defaults to none; draft_model with k = 0 becomes none."""
        if not isinstance(data, dict) or data.get("draft") is not None:
            return data
        speculation = data.get("speculation", {})
        if not isinstance(speculation, dict):
            return data
        written = speculation.get("method")
        is_plain = speculation.get("num_speculative_tokens") == 0
        if "method" not in speculation or (written == "draft_model" and is_plain):
            return {**data, "speculation": {**speculation, "method": "none"}}
        return data

    @field_validator("draft")
    @classmethod
    def _draft_divides_target(
        cls, value: DraftSection | None, info: ValidationInfo
    ) -> DraftSection | None:
        target = info.data.get("target")
        if value is None or target is None:
            return value
        ours, theirs = value.tensor_parallel_size, target.tensor_parallel_size
        if theirs % ours:
            raise PydanticCustomError(
                "divides",
                "draft.tensor_parallel_size ({ours}) should divide "
                "target.tensor_parallel_size ({theirs})",
                {"key": "tensor_parallel_size", "ours": ours, "theirs": theirs},
            )
        return value

    @field_validator("draft")
    @classmethod
    def _head_is_split_alike(
        cls, value: DraftSection | None, info: ValidationInfo
    ) -> DraftSection | None:
        target = info.data.get("target")
        if value is None or target is None or "lm_head" not in value.share:
            return value
        ours, theirs = value.tensor_parallel_size, target.tensor_parallel_size
        if ours != theirs:
            raise PydanticCustomError(
                "share",
                "lm_head cannot be borrowed: the target's is split over "
                "target.tensor_parallel_size ({theirs}) ranks, and "
                "draft.tensor_parallel_size is {ours}",
                {"key": "share", "ours": ours, "theirs": theirs},
            )
        return value

    @field_validator("speculation")
    @classmethod
    def _has_its_draft(cls, value: SpeculationSection, info: ValidationInfo) -> SpeculationSection:
        lacks_draft = "draft" in info.data and info.data["draft"] is None
        if lacks_draft and value.method == "draft_model" and value.num_speculative_tokens > 0:
            raise PydanticCustomError(
                "draft",
                "draft_model needs a draft section, and draft is null",
                {"key": "method"},
            )
        return value


def section_models() -> dict[str, type[BaseModel]]:
    """Each section's model by its name."""
    return {
        "target": ModelSection,
        "draft": DraftSection,
        "speculation": SpeculationSection,
        "sampling": SamplingSection,
        "cache": CacheSection,
        "run": RunSection,
        "data": DataSection,
    }


INNER_SECTIONS: dict[str, type[BaseModel]] = {"speculation.length": LengthSection}


def key_fields() -> dict[str, FieldInfo]:
    """Every dotted key of a recipe, in order."""
    found: dict[str, FieldInfo] = {}
    for section, model in section_models().items():
        for key, info in model.model_fields.items():
            inner = INNER_SECTIONS.get(f"{section}.{key}")
            if inner is None:
                found[f"{section}.{key}"] = info
            else:
                found |= {f"{section}.{key}.{k}": i for k, i in inner.model_fields.items()}
    return found
