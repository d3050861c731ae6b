"""Preparation that sweeps and comparisons share: settings and warnings."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.backends.base import Prepared
from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.errors import Notice
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.statistics.stats import FEWEST
from specdec_cli.prompts import Prompt

_FEW_PROMPTS = 20


def with_weights(section: dict[str, Any], plan: Prepared, role: str) -> dict[str, Any]:
    """A model's section of the recipe with the fingerprint of its weights, if it takes part."""
    found = plan.fingerprint(role)
    return section if found is None else section | {"weights": found}


def device_settings(job: Job) -> dict[str, str]:
    """The settings `device`, the name of its kind, and `dtype`, the target's."""
    return {"device": job.plan.device_name, "dtype": job.plan.dtype_name}


def no_template(tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: str) -> list[Notice]:
    """A warning if texts go to a model that has a chat template, and nobody chose that.

    chat: `data.chat`, of which `auto` is no choice.
    """
    texts = sum(prompt.text is not None and prompt.messages is None for prompt in prompts)
    if chat != "auto" or not texts or not tokenizer.has_template:
        return []
    told = (
        f"the target has a chat template, and {texts} of {len(prompts)} prompts go to it without: "
        "pass --chat to use it, or --no-chat if plain text is meant"
    )
    return [Notice("no_chat_template", told, {"without": texts, "num_prompts": len(prompts)})]


def few_prompts(count: int) -> list[Notice]:
    """A warning if there are too few prompts for narrow intervals."""
    if count >= _FEW_PROMPTS:
        return []
    few = "1 prompt is" if count == 1 else f"{count} prompts are"
    what = "too few for intervals" if count < FEWEST else "few: intervals are wide"
    told = f"{few} {what} (--limit, --dataset)"
    return [Notice("few_prompts", told, {"num_prompts": count})]
