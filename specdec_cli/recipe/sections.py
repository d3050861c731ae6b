"""The sections of a recipe: their keys, defaults and valid values.

Knows nothing of YAML, files, positions or options. Keys of one method or rule are in its file in
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

from specdec_cli.recipe.choices.registry import (
    METHODS,
    POLICIES,
    RULES,
    Choice,
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
    Words,
    entry,
)
from specdec_cli.recipe.objectives import objective


class ModelSection(Section):
    """A model, how it is loaded, and over how many ranks."""

    model: Place = Field(
        description="folder or .gguf file, Hugging Face id, package:NAME (the model that an "
        "installed package ships), or demo:target / demo:draft"
    )
    revision: Name | None = entry(None, "branch, tag or commit of a Hugging Face id")
    file: GgufName | None = entry(None, "NAME.gguf, where model has several such files")
    tensor_parallel_size: Count = entry(1, "ranks that share the model's weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = entry(
        "auto", "auto is the checkpoint's on CUDA and float32 on CPU"
    )
    load_format: Literal["auto", "dummy"] = entry(
        "auto", "dummy draws random weights of the model's shape (for timing)"
    )
    weights: Literal["auto", "stored", "dequantise", "fp8"] = entry(
        "auto",
        "for quantised checkpoints: stored (auto on CUDA) keeps codes, dequantise (auto "
        "on CPU) makes plain ones; fp8 quantises plain weights while loading",
    )


class DraftSection(ModelSection):
    """The model that proposes tokens, on the first ranks of the target's."""

    share: tuple[Literal["embeddings", "lm_head"], ...] = entry(
        (), "weights that the draft borrows; by default those that its checkpoint lacks"
    )


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
    """The keys of `speculation` that every recipe has."""

    method: MethodName = entry("draft_model", f"who proposes; {_described(METHODS)}")
    num_speculative_tokens: Tokens = entry(5, "proposed tokens a round (k); 0 is plain decoding")
    acceptance: RuleName = entry("rejection", _described(RULES))


class LengthKeys(Section):
    """The keys of `speculation.length` that every recipe has."""

    policy: PolicyName = entry("fixed", _described(POLICIES))


class LengthSection(PolicyKeys, LengthKeys):
    """The number of proposed tokens of each round, k at most."""


class SpeculationSection(MethodAndRuleKeys, SpeculationKeys):
    """The method that proposes tokens, and the rule that accepts them."""

    length: LengthSection = entry(LengthSection(), "how many tokens each round proposes")
    options: dict[str, JsonValue] = entry({}, "keys of a plugin's own")

    @model_validator(mode="after")
    def _suits_its_choices(self) -> Self:
        rule = RULES[self.acceptance]
        if rule.check is not None:
            rule.check(self, self.num_speculative_tokens)
        chosen = METHODS[self.method], rule, POLICIES[self.length.policy]
        if self.options and all(choice.code is None for choice in chosen):
            raise PydanticCustomError(
                "options",
                "are for plugins, and the method, the rule and the policy are built in",
                {"key": "options"},
            )
        return self


class SamplingSection(Section):
    """The way tokens are drawn, and the ends of texts."""

    source: Literal["recipe", "model"] = entry(
        "recipe",
        "model takes the target's generation_config.json in place of the keys below, "
        "but for max_new_tokens, ignore_eos and stop",
        alias="from",
    )
    temperature: Annotated[float, Field(ge=0.0), NUMBER] = entry(0.0, "0 is greedy")
    top_k: CountOrZero = entry(0, "keep the k most likely tokens; 0 keeps all")
    top_p: Part = entry(1.0, "keep the smallest set with this probability; 1 keeps all")
    repetition_penalty: Annotated[float, Field(gt=0.0, le=1000.0), NUMBER] = entry(
        1.0, "divides logits of tokens of the text, multiplies negative ones; 1 is off"
    )
    suppress_tokens: tuple[CountOrZero, ...] = entry((), "token ids that are never drawn")
    min_new_tokens: CountOrZero = entry(0, "tokens before which no end-of-text token is drawn")
    max_new_tokens: Count = entry(256, "most tokens written after a prompt")
    ignore_eos: Truth = entry(False, "write on past the end-of-text token")
    stop: tuple[Words, ...] = entry((), "texts that end an output")


class CacheSection(Section):
    """The KV cache that both models' blocks come from."""

    block_size: Count = entry(16, "tokens a block")
    dtype: Literal["auto", "fp8"] = entry(
        "auto", "dtype of keys and values; auto is the models', and fp8 (e4m3) changes the text"
    )
    gpu_memory_utilization: Part = entry(0.9, "share of the device's memory that the run may use")
    num_blocks: Annotated[StrictInt, Field(ge=2, le=MAX_COUNT)] | None = entry(
        None, "blocks; null takes all that fit and can be used; the first block holds nothing"
    )
    max_model_len: Count | None = entry(
        None, "longest prompt plus output, at most the model's own limit, which null is"
    )
    cpu_bytes: ByteCount | None = entry(
        None, "cache memory of a host on CPU, such as 8GiB, divided by its ranks"
    )


class RunSection(Section):
    """The device, size and repeats of a measurement."""

    batch_size: BatchSize = entry(1, "prompts decoded together")
    device: Annotated[StrictStr, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")] = entry(
        "auto", "auto, cpu, cuda or cuda:N"
    )
    seed: Annotated[StrictInt, Field(ge=0, le=MAX_BYTES)] = entry(
        0, "with the prompt's index, the key of every random number"
    )
    compile: Switch = entry("auto", "compile the models' forward passes")
    cuda_graphs: Switch = entry("auto", "replay rounds as CUDA graphs")
    warmup: CountOrZero = entry(1, "unmeasured repeats before the measured ones")
    repeats: Count = entry(3, "measured repeats of each point")
    prefill_chunk: Count = entry(2048, "most prompt tokens in one forward pass")
    timeout_s: Seconds = entry(120.0, "seconds after which a silent rank counts as lost")


class EngineSection(Section):
    """The engine: our own, or servers, that are up (`--server`) or started (`kind`, `--serve`)."""

    kind: Literal["native", "vllm", "sglang"] = entry(
        "native", "native is our own engine; of others, a sweep starts servers"
    )
    launch: tuple[Words, ...] | None = entry(
        None,
        "words that take the place of `vllm serve {model}` or `python -m "
        "sglang.launch_server`; {model}, {host}, {port} and {k} are replaced, flags follow",
    )
    args: tuple[Words, ...] = entry((), "further words for the server")
    env: dict[Name, StrictStr] = entry({}, "its environment, beside ours")
    served_model: Name | None = entry(
        None, "the server's name of the model; null takes the only one"
    )
    start_timeout_s: Seconds = entry(900.0, "seconds in which a server has to become healthy")
    stop_timeout_s: Seconds = entry(
        30.0, "seconds from SIGTERM to SIGKILL of a server that was started"
    )
    request_timeout_s: Seconds = entry(600.0, "seconds in which a request has to be answered")
    retries: CountOrZero = entry(2, "further attempts at a request after a temporary failure")


class LoadSection(Section):
    """Requests that arrive at a rate, in a sweep. See docs/load.md."""

    request_rate: Rates | None = entry(
        None,
        "requests a second, each rate a point of its own, and inf for all at once; "
        "null measures a closed batch",
    )
    arrivals: Place = entry(
        "poisson", "poisson, constant, gamma:SHAPE or a file of due times, in seconds, one a line"
    )
    max_concurrency: BatchSize | None = entry(
        None, "most requests under way; null is run.batch_size, or no limit for servers"
    )
    duration_s: Seconds | None = entry(
        None, "seconds over which arrivals are measured, if prompts are too few"
    )
    slo: dict[Name, StrictStr] = entry(
        {}, "objectives: ttft, tpot or e2el, each with a time such as 500ms"
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


# Keys of `data` that describe the rows at its path.
ABOUT_ROWS = {"split", "subset", "column", "limit", "sample", "turn", "categories"}


class DataSection(Section):
    """The source of prompts."""

    path: Place | None = entry(
        None,
        "file (.txt, .jsonl, .json, .csv, .tsv, .parquet), Hugging Face dataset id, or "
        "demo:prompts; may be left out where only the chat template is described",
    )
    split: Name | None = entry(None, "split of a dataset id, or a slice such as train[:100]")
    subset: Name | None = entry(None, "configuration of a dataset id")
    column: Name | None = entry(
        None,
        "column with the prompt; null takes the first there is of prompt, text, "
        "question, instruction, turns (the first turn), messages, prompt_token_ids and "
        "conversations (ShareGPT's)",
    )
    limit: Count | None = entry(None, "use only the first N prompts")
    sample: Literal["random", "stratified"] | None = entry(
        None,
        "draw the limit's prompts by run.seed, stratified evenly over categories; null "
        "takes the first",
    )
    turn: Count = entry(
        1,
        "the user's turn of a ShareGPT conversation that is the prompt; shorter "
        "conversations are left out",
    )
    categories: Literal["own", "spec_bench"] = entry(
        "own", "spec_bench merges Spec-Bench's 13 categories into its six subtasks"
    )
    chat: Switch = entry(
        "auto", "use the target's chat template: auto for messages, on for every prompt"
    )
    system: Text | None = entry(
        None, "opens conversations without a system message; auto becomes on"
    )

    template: dict[str, JsonValue] = entry(
        {}, "the chat template's own switches, such as {enable_thinking: false}"
    )
    chat_template: Name | None = entry(
        None, "Jinja file of another chat template, or a name among the tokenizer's"
    )
    date: Name | None = entry(
        None,
        "date, or date and time, that chat templates write, such as 2026-01-31; null "
        "takes the run's start, and the run folder keeps it",
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
            raise PydanticCustomError("chat", "needs the chat template, and data.chat is off")
        return value
