"""Builds the commands that start servers: translates a recipe to vLLM's or SGLang's flags."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_cli.core.types import Permissions
from specdec_cli.errors import UsageError
from specdec_cli.recipe import ModelSection, Recipe
from specdec_cli.recipe.choices.base import fp8_flags, sglang_flags
from specdec_cli.recipe.choices.registry import METHODS
from specdec_cli.recipe.choices.synthetic import marginal_rates

_LAUNCH = {
    "vllm": ("vllm", "serve", "{model}"),
    "sglang": (sys.executable, "-m", "sglang.launch_server"),
}
_PLACES = re.compile(r"\{(model|host|port|k)\}")
_MODEL_FLAG = {"vllm": "--model", "sglang": "--model-path"}
_UNLIMITED = 256  # SGLang's limit on concurrent requests if the run sets none; vLLM's default
_BOTH_FROM_RULE = {"rejection": None, "block": "block", "synthetic": "synthetic"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts a server.

    launch: the words that begin the command, such as `vllm serve {model}`.
    flags: the flags that the recipe asks for, each with its values.
    args: the user's own arguments, which come last.
    env: variables to add to the environment.
    """

    launch: tuple[str, ...]
    flags: list[tuple[str, ...]]
    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    def words(self, model: str, host: str, port: int, k: int) -> list[str]:
        """Return the whole command line for a server at this address."""
        values = {"model": model, "host": host, "port": str(port), "k": str(k)}
        first = [_PLACES.sub(lambda found: values[found[1]], word) for word in self.launch]
        address = [("--host", host), ("--port", str(port))]
        return [*first, *(w for flag in [*address, *self.flags] for w in flag), *self.args]

    def without(self, unknown: Sequence[str]) -> "Command | None":
        """Return the same command without the flags in `unknown`, which the server's version does
        not have. Returns None if the command has none of them."""
        kept = [flag for flag in self.flags if flag[0] not in unknown]
        if len(kept) == len(self.flags):
            return None
        return Command(self.launch, kept, self.args, self.env)


def model_words(section: ModelSection) -> str:
    """Return a model's name for a server's command line: its local path, or else its id."""
    from specdec_cli.models.resolve import local_place

    place = local_place(section.model, section.file)
    return section.model if place is None else str(place)


def _has_no_tokenizer(section: ModelSection) -> bool:
    """Return True if the model has random weights and its local folder holds no tokenizer. The
    server must then be started without a tokenizer, and can only exchange token ids."""
    from specdec_cli.models.resolve import local_place
    from specdec_cli.models.tokenizer import has_tokenizer

    place = local_place(section.model, section.file)
    return section.load_format == "dummy" and place is not None and not has_tokenizer(place)


def command_of(
    kind: str, recipe: Recipe, k: int, permissions: Permissions, batch_size: int
) -> Command:
    """Build the command that starts a server for a recipe with proposal length `k`.

    kind: "vllm" or "sglang". batch_size: the largest number of concurrent requests; 0 for no limit.
    Raises `UsageError` if the server lacks the recipe's method or acceptance rule, or if the user's
    arguments set its port.
    """
    engine, target = recipe.engine, recipe.target
    if given := [a for a in engine.args if a.partition("=")[0] == "--port"]:
        raise UsageError(
            f"engine.args (--serve-args): {given[0]}: specdec chooses the port of each server",
            "leave it out, or ask a server that you started with --server URL",
        )
    launch = tuple(engine.launch or _LAUNCH[kind])
    flags: list[tuple[str, ...]] = []
    if not any("{model}" in word for word in launch):
        flags.append((_MODEL_FLAG[kind], model_words(target)))
    size = "--tensor-parallel-size" if kind == "vllm" else "--tp-size"
    flags += [(size, str(target.tensor_parallel_size)), ("--dtype", target.dtype)]
    if target.revision is not None:
        flags.append(("--revision", target.revision))
    if target.load_format != "auto":
        flags.append(("--load-format", target.load_format))
    if _has_no_tokenizer(target):
        flags.append(("--skip-tokenizer-init",))
    flags += fp8_flags(target.weights, recipe.cache.dtype)
    if permissions.trust_remote_code:
        flags.append(("--trust-remote-code",))
    if (most := recipe.cache.max_model_len) is not None:
        flags.append(("--max-model-len" if kind == "vllm" else "--context-length", str(most)))
    env = dict(engine.env)
    flags.append(("--no-enable-prefix-caching",) if kind == "vllm" else ("--disable-radix-cache",))
    if kind == "sglang":
        # By default, SGLang runs at most 48 requests at a time if it speculates, and more if not.
        flags.append(("--max-running-requests", str(batch_size or _UNLIMITED)))
    if k and kind == "vllm":
        flags.append(("--speculative-config", json.dumps(_vllm_config(recipe, k))))
        flags.append(("--per-request-spec-decode-metrics", "detailed"))
    elif k:
        flags += _sglang_flags(recipe, k)
        if rule_of(recipe, "SGLang") == "synthetic":  # by a mean: SGLang takes no rates
            env["SGLANG_SIMULATE_ACC_LEN"] = str(1 + sum(_rates(recipe, k)))
    return Command(launch, flags, tuple(engine.args), env)


def _vllm_config(recipe: Recipe, k: int) -> dict[str, Any]:
    speculation, draft = recipe.speculation, recipe.draft
    choice = METHODS[speculation.method]
    if choice.to_vllm is None:
        raise UsageError(f"vLLM has no method {speculation.method}: it cannot run k = {k}")
    values = recipe.model_dump(mode="json")
    own = draft if choice.weights_from == "draft" else None
    named = None if own is None else model_words(own)
    made = choice.to_vllm(lambda section, key: (values[section] or {}).get(key), named)
    found: dict[str, Any] = {**made.config, "num_speculative_tokens": k}
    if own is not None:
        # vLLM refuses a draft model whose tensor-parallel size differs from the target's.
        found["draft_tensor_parallel_size"] = recipe.target.tensor_parallel_size
        if own.revision is not None:
            found["revision"] = own.revision
        if own.weights == "fp8":
            found["quantization"] = "fp8"
    if (rule := rule_of(recipe, "vLLM")) is not None:
        found["rejection_sample_method"] = rule
    if rule == "synthetic":
        found["synthetic_acceptance_rates"] = _rates(recipe, k)
    return found


def _sglang_flags(recipe: Recipe, k: int) -> list[tuple[str, ...]]:
    method, draft = recipe.speculation.method, recipe.draft
    if (choice := METHODS[method]).to_sglang is None:
        raise UsageError(f"SGLang has no method {method}: it cannot run k = {k}")
    own = draft if choice.weights_from == "draft" else None
    named = None if own is None else model_words(own)
    weights = recipe.target.weights, draft.weights if draft is not None else None
    found: list[tuple[str, ...]] = [*sglang_flags(choice, k, named, weights)]
    if own is not None and own.load_format != "auto":
        found.append(("--speculative-draft-load-format", own.load_format))
    if own is not None and own.revision is not None:
        found.append(("--speculative-draft-model-revision", own.revision))
    return found


def _rates(recipe: Recipe, k: int) -> list[float]:
    """Return the acceptance rates at k positions that a server must simulate."""
    speculation = recipe.speculation
    return list(marginal_rates(speculation, speculation.num_speculative_tokens, k)[:k])


def rule_of(recipe: Recipe, engine: str) -> str | None:
    """Return the server's name for the recipe's acceptance rule; None for the server's default.
    Raises `UsageError` if the server has no such rule."""
    rule = recipe.speculation.acceptance
    if rule not in _BOTH_FROM_RULE or (rule == "block" and engine == "SGLang"):
        raise UsageError(f"speculation.acceptance: {engine} has no rule {rule}")
    return _BOTH_FROM_RULE[rule]
