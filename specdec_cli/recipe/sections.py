"""The sections of a recipe: their keys, defaults and valid values.

A key for a single method, acceptance rule or length policy is defined in that choice's module in
`choices`.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    StrictInt,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from specdec_cli.recipe.choices.base import Choice
from specdec_cli.recipe.choices.registry import (
    CHOICES,
    METHODS,
    NONE,
    POLICIES,
    RULES,
    MethodAndRuleKeys,
    PolicyKeys,
)
from specdec_cli.recipe.fields import (
    MAX_BYTES,
    MAX_COUNT,
    NUMBER,
    BatchSize,
    ByteCount,
    Count,
    CountOrZero,
    GgufName,
    Name,
    Part,
    Place,
    Rates,
    Seconds,
    Section,
    Switch,
    Text,
    Tokens,
    Truth,
    VariableName,
    Words,
    entry,
)
from specdec_cli.recipe.objectives import objective
from specdec_cli.recipe.watched import WatchedOptions


class ModelSection(Section):
    """Settings for one model: its source, its weights and dtype, and its number of ranks."""

    model: Place = Field(
        description="folder or .gguf file, Hugging Face id, package:NAME (the model that an "
        "installed package ships), or demo:target / demo:draft"
    )
    revision: Name | None = entry(None, "branch, tag or commit of a Hugging Face id")
    file: GgufName | None = entry(None, "NAME.gguf, if model has several GGUF files")
    tensor_parallel_size: Count = entry(1, "ranks that share the model's weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = entry(
        "auto", "auto is the checkpoint's dtype on CUDA and float32 on CPU"
    )
    load_format: Literal["auto", "dummy"] = entry(
        "auto", "dummy draws random weights of the model's shape (for timing)"
    )
    weights: Literal["auto", "stored", "dequantise", "fp8"] = entry(
        "auto",
        "for quantised checkpoints: stored (auto on CUDA) keeps the codes, dequantise (auto on "
        "CPU) expands them; fp8 quantises plain weights while loading",
    )


class DraftSection(ModelSection):
    """The model that proposes tokens. It runs on the first of the target's ranks."""

    share: tuple[Literal["embeddings", "lm_head"], ...] = entry(
        (), "weights that the draft borrows; default: those missing from its checkpoint"
    )

    @field_validator("model")
    @classmethod
    def _is_a_draft(cls, value: str) -> str:
        if value == NONE:
            raise PydanticCustomError(
                "draft", "none is no draft; use -k 0 or --method none for plain decoding"
            )
        return value


def _one_of(names: Mapping[str, Choice]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names:
            expected = ", ".join(map(repr, names))
            raise PydanticCustomError(
                "literal_error", "should be one of {expected}", {"expected": expected}
            )
        return value

    return check


def _schema(names: Mapping[str, Choice]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(names)})


def _described(choices: Mapping[str, Choice]) -> str:
    return "; ".join(f"{name}: {choice.what}" for name, choice in choices.items())


MethodName = Annotated[StrictStr, AfterValidator(_one_of(METHODS)), _schema(METHODS)]
RuleName = Annotated[StrictStr, AfterValidator(_one_of(RULES)), _schema(RULES)]
PolicyName = Annotated[StrictStr, AfterValidator(_one_of(POLICIES)), _schema(POLICIES)]


class SpeculationKeys(Section):
    """Keys of `speculation` that do not depend on the method or the acceptance rule."""

    method: MethodName = entry("draft_model", f"how tokens are proposed; {_described(METHODS)}")
    num_speculative_tokens: Tokens = entry(5, "proposed tokens per round (k); 0 is plain decoding")
    acceptance: RuleName = entry("rejection", _described(RULES))


class LengthKeys(Section):
    """Keys of `speculation.length` that do not depend on the policy."""

    policy: PolicyName = entry("fixed", _described(POLICIES))


class LengthSection(PolicyKeys, LengthKeys):
    """The length policy, which decides how many tokens each round proposes, at most k."""


class SpeculationSection(MethodAndRuleKeys, SpeculationKeys):
    """The method that proposes tokens, and the rule that accepts them."""

    length: LengthSection = entry(LengthSection(), "how many tokens each round proposes")
    options: WatchedOptions = entry(WatchedOptions({}), "a plugin's own keys")

    @model_validator(mode="after")
    def _suits_its_choices(self) -> Self:
        rule = RULES[self.acceptance]
        if rule.check is not None:
            rule.check(self, self.num_speculative_tokens)
        # In a sweep, plugins of other arms may read them, so every arm may have them.
        if self.options and not any(c.code for of in CHOICES.values() for c in of.values()):
            raise PydanticCustomError(
                "options", "are for plugins, but none is loaded (--plugin)", {"key": "options"}
            )
        return self


class SamplingSection(Section):
    """Settings for sampling tokens and for ending an output."""

    source: Literal["recipe", "model"] = entry(
        "recipe",
        "model takes the keys below from the target's generation_config.json, except "
        "max_new_tokens, ignore_eos and stop",
        alias="from",
    )
    temperature: Annotated[float, Field(ge=0.0), NUMBER] = entry(0.0, "0 is greedy")
    top_k: CountOrZero = entry(0, "keep the k most likely tokens; 0 keeps all")
    top_p: Part = entry(1.0, "keep the smallest set with this probability; 1 keeps all")
    repetition_penalty: Annotated[float, Field(gt=0.0, le=1000.0), NUMBER] = entry(
        1.0,
        "divides positive logits of tokens in the text, multiplies negative ones; 1 is off",
    )
    suppress_tokens: tuple[CountOrZero, ...] = entry((), "token ids that are never drawn")
    min_new_tokens: CountOrZero = entry(
        0, "number of tokens before an end-of-text token may be drawn"
    )
    max_new_tokens: Count = entry(256, "maximum number of tokens generated after a prompt")
    ignore_eos: Truth = entry(False, "continue past the end-of-text token")
    stop: tuple[Words, ...] = entry((), "stop strings: texts that end an output")

    @model_validator(mode="after")
    def _least_is_no_more_than_most(self) -> Self:
        least, most = self.min_new_tokens, self.max_new_tokens
        if least > most:
            told = f"should be at most sampling.max_new_tokens ({most}), not {least}"
            raise PydanticCustomError("least", "{told}", {"key": "min_new_tokens", "told": told})
        return self


class CacheSection(Section):
    """The KV cache, whose blocks both models share."""

    block_size: Count = entry(16, "tokens per block")
    dtype: Literal["auto", "fp8"] = entry(
        "auto",
        "dtype of keys and values; auto is the model's own dtype, and fp8 (e4m3) changes the text",
    )
    gpu_memory_utilization: Part = entry(
        0.9, "fraction of the device's memory that the run may use"
    )
    num_blocks: Annotated[StrictInt, Field(ge=2, le=MAX_COUNT)] | None = entry(
        None,
        "number of blocks; the first holds only padding; null takes as many as fit and can be used",
    )
    max_model_len: Count | None = entry(
        None,
        "maximum number of tokens in prompt plus output; null is the model's own limit, which is "
        "also the highest value",
    )
    cpu_bytes: ByteCount | None = entry(
        None, "on CPU: cache memory per host, such as 8GiB, divided among its ranks"
    )


class RunSection(Section):
    """The device, batch size and repeats of a measurement."""

    batch_size: BatchSize = entry(1, "prompts decoded together")
    device: Annotated[StrictStr, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")] = entry(
        "auto", "auto, cpu, cuda or cuda:N"
    )
    seed: Annotated[StrictInt, Field(ge=0, le=MAX_BYTES)] = entry(
        0, "seed of every random number, together with the prompt's index"
    )
    compile: Switch = entry("auto", "compile the models' forward passes")
    cuda_graphs: Switch = entry("auto", "replay rounds as CUDA graphs")
    warmup: CountOrZero = entry(1, "unmeasured repeats before the measured ones")
    repeats: Count = entry(3, "measured repeats of each point")
    prefill_chunk: Count = entry(2048, "maximum number of prompt tokens in one forward pass")
    timeout_s: Seconds = entry(120.0, "seconds without progress after which a rank counts as lost")


class EngineSection(Section):
    """The engine that generates text: our own, a running server (`--server`), or a server that the
    sweep starts (`kind`, `--serve`)."""

    kind: Literal["native", "vllm", "sglang"] = entry(
        "native", "native is our own engine; for the others, a sweep starts servers"
    )
    launch: tuple[Words, ...] | None = entry(
        None,
        "command to run instead of `vllm serve {model}` or `python -m sglang.launch_server`; "
        "{model}, {host}, {port} and {k} are filled in, and flags are appended",
    )
    args: tuple[Words, ...] = entry((), "further command-line arguments for the server")
    env: dict[VariableName, Text] = entry({}, "environment variables to add for the server")
    served_model: Name | None = entry(
        None, "the model's name on the server; null takes its only model"
    )
    start_timeout_s: Seconds = entry(900.0, "seconds for a server to become healthy")
    stop_timeout_s: Seconds = entry(
        30.0, "seconds between SIGTERM and SIGKILL for a started server"
    )
    request_timeout_s: Seconds = entry(600.0, "seconds for a request to be answered")
    retries: CountOrZero = entry(2, "retries of a request after a temporary failure")


class LoadSection(Section):
    """Settings for a sweep whose requests arrive at a given rate. See docs/load.md."""

    request_rate: Rates | None = entry(
        None,
        "requests per second; each rate is measured as a point of its own; inf sends all requests "
        "at once; null measures a closed batch",
    )
    arrivals: Place = entry(
        "poisson", "poisson, constant, gamma:SHAPE or a file of send times in seconds, one per line"
    )
    max_concurrency: BatchSize | None = entry(
        None, "maximum concurrent requests; null is run.batch_size, or no limit for servers"
    )
    duration_s: Seconds | None = entry(
        None, "repeat prompts until arrivals cover this many seconds"
    )
    slo: dict[Name, StrictStr] = entry(
        {}, "latency objectives: ttft, tpot or e2el, each with a time such as 500ms"
    )

    @field_validator("slo", mode="before")
    @classmethod
    def _times_have_units(cls, value: object) -> object:
        for name, time in value.items() if isinstance(value, dict) else ():
            try:
                objective(name, str(time))
            except ValueError as problem:
                context = {"key": str(name), "told": str(problem)}
                raise PydanticCustomError("slo", "{told}", context) from None
        return value

    @model_validator(mode="after")
    def _counts_at_rates(self) -> Self:
        for key, info in type(self).model_fields.items() if self.request_rate is None else ():
            if getattr(self, key) != info.default:
                told = "needs load.request_rate (--request-rate)"
                raise PydanticCustomError("load", "{told}", {"key": key, "told": told})
        return self


# Keys of `data` that select rows or columns of the file or dataset in `data.path`. They have no
# meaning without a path.
ABOUT_ROWS = {"split", "subset", "column", "limit", "sample", "turn", "categories"}


class DataSection(Section):
    """The source of prompts."""

    path: Place | None = entry(
        None,
        "file (.txt, .jsonl, .json, .csv, .tsv, .parquet), Hugging Face dataset id, or "
        "demo:prompts; may be left out if only the chat template is set",
    )
    split: Name | None = entry(None, "split of a dataset id, or a slice such as train[:100]")
    subset: Name | None = entry(None, "configuration of a dataset id")
    column: Name | None = entry(
        None,
        "column with the prompt; null takes the first of these that exists: prompt, question, "
        "instruction, text, turns (the first turn), messages, prompt_token_ids, conversations "
        "(ShareGPT's)",
    )
    limit: Count | None = entry(None, "use only the first N prompts")
    sample: Literal["random", "stratified"] | None = entry(
        None,
        "draw `limit` prompts with run.seed: random, or stratified to balance categories; null "
        "takes the first ones",
    )
    turn: Count = entry(
        1,
        "which user turn of a ShareGPT conversation is the prompt; shorter conversations are left "
        "out",
    )
    categories: Literal["own", "spec_bench"] = entry(
        "own", "spec_bench merges Spec-Bench's 13 categories into its six subtasks"
    )
    chat: Switch = entry(
        "auto", "use the target's chat template: auto for messages, on for every prompt"
    )
    system: Text | None = entry(
        None, "system message for conversations without one; turns chat: auto into on"
    )

    template: dict[str, JsonValue] = entry(
        {}, "the chat template's own switches, such as {enable_thinking: false}"
    )
    chat_template: Name | None = entry(
        None, "Jinja file of another chat template, or the name of one of the tokenizer's templates"
    )
    date: Name | None = entry(
        None,
        "date, or date and time, for chat templates that insert it, such as 2026-01-31; null "
        "takes the run's start, which the run folder records",
    )

    @model_validator(mode="before")
    @classmethod
    def _rows_have_a_path(cls, values: object) -> object:
        if isinstance(values, dict) and "path" not in values and values.keys() & ABOUT_ROWS:
            missing: Any = {"type": "missing", "loc": ("path",), "input": values}
            raise ValidationError.from_exception_data(cls.__name__, [missing])
        return values

    @field_validator("date")
    @classmethod
    def _date_is_iso(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                datetime.fromisoformat(value)
        except ValueError:
            raise PydanticCustomError("date", "should be a date such as 2026-01-31") from None
        return value

    @field_validator("system")
    @classmethod
    def _system_needs_chat(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("chat") == "off":
            raise PydanticCustomError("chat", "needs the chat template, but data.chat is off")
        return value
