"""Preparation that sweeps and comparisons share: the engine's recipe, settings, warnings."""

from typing import Any

import torch

from specdec_cli.acceptance.registry import for_k
from specdec_cli.errors import Notice
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.statistics.stats import FEWEST
from specdec_cli.models.draft import Draft
from specdec_cli.models.fingerprint import fingerprint
from specdec_cli.recipe import Recipe

_FEW_PROMPTS = 20


def for_engine(recipe: Recipe, largest: int, batch_size: int) -> Recipe:
    """The recipe for engine and cache, with the largest k and batch size."""
    speculation = for_k(recipe.speculation, largest)
    speculation = speculation.model_copy(update={"num_speculative_tokens": largest})
    run = recipe.run.model_copy(update={"batch_size": batch_size})
    return recipe.model_copy(update={"speculation": speculation, "run": run})


def with_weights(section: dict[str, Any], model: Draft | None) -> dict[str, Any]:
    """A model's section of the recipe with the fingerprint of its weights, if it takes part."""
    if model is None:
        return section
    return section | {"weights": fingerprint(model.place, model.spec.load_format)}


def device_settings(job: Job) -> dict[str, str]:
    """The settings `device`, the name of its kind, and `dtype`, the target's."""
    device = job.plan.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(job.plan.target.dtype).removeprefix("torch."),
    }


def warnings_of_texts(job: Job, chat: str) -> list[Notice]:
    """Warnings about texts that go to a model as they are.

    That they have its first token already, which comes twice then; or that the model has a chat
    template, and nobody chose to leave it out. chat: `data.chat`, of which `auto` is no choice.
    """
    tokenizer, count, found = job.plan.tokenizer, len(job.prompts), list[Notice]()
    first = tuple(tokenizer.encode("")[:1])
    pairs = zip(job.prompts, job.token_ids, strict=True)
    texts = [ids for prompt, ids in pairs if prompt.token_ids is None and prompt.messages is None]
    twice = sum(bool(first) and ids[:2] == first * 2 for ids in texts)
    if twice:
        told = (
            f"{twice} of {count} prompts begin with the model's first token, and get it twice: "
            "leave it out of the text, or give messages and let --chat write it"
        )
        found.append(Notice("first_token_twice", told, {"prompts": twice, "num_prompts": count}))
    if chat == "auto" and len(texts) > twice and tokenizer.has_template:
        told = (
            f"the target has a chat template, and {len(texts)} of {count} prompts go to it "
            "without: pass --chat to use it, or --no-chat if plain text is meant"
        )
        evidence = {"without": len(texts), "num_prompts": count}
        found.append(Notice("no_chat_template", told, evidence))
    return found


def few_prompts(count: int) -> list[Notice]:
    """A warning if there are too few prompts for narrow intervals."""
    if count >= _FEW_PROMPTS:
        return []
    few = "1 prompt is" if count == 1 else f"{count} prompts are"
    what = "too few for intervals" if count < FEWEST else "few: intervals are wide"
    told = f"{few} {what} (--limit, --dataset)"
    return [Notice("few_prompts", told, {"num_prompts": count})]
