"""Preparation that sweeps and comparisons share: the engine's recipe, settings, warnings."""

from itertools import accumulate
from operator import mul
from typing import Any

import torch

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.errors import UsageError
from specdec_cli.models.fingerprint import fingerprint
from specdec_cli.models.loader import Description
from specdec_cli.recipe import Recipe

_FEW_PROMPTS = 20


def for_engine(recipe: Recipe, largest: int, batch_size: int) -> Recipe:
    """The recipe for engine and cache, with the largest k and batch size.

    A mean length of synthetic acceptance belongs to the recipe's own k, so it becomes rates.
    """
    speculation = recipe.speculation
    changes: dict[str, Any] = {"num_speculative_tokens": largest}
    if speculation.acceptance == "synthetic":
        rates = speculation.synthetic_acceptance_rates
        if rates is None:
            length = speculation.synthetic_acceptance_length
            assert length is not None, "the recipe's schema saw to it"
            own_k = speculation.num_speculative_tokens or largest
            conditional = SyntheticAcceptance.from_length(length, own_k).rates(largest)
            rates = tuple(accumulate(conditional, mul))
        if len(rates) < largest:
            raise UsageError(
                f"synthetic_acceptance_rates: {len(rates)} are given, and --k goes to {largest}",
                "give a rate for every position, or synthetic_acceptance_length",
            )
        changes |= {"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": None}
    return recipe.model_copy(
        update={
            "speculation": speculation.model_copy(update=changes),
            "run": recipe.run.model_copy(update={"batch_size": batch_size}),
        }
    )


def with_weights(section: dict[str, Any], model: Description | None) -> dict[str, Any]:
    """A model's section of the recipe with the fingerprint of its weights, if it takes part."""
    if model is None:
        return section
    return section | {"weights": fingerprint(model.folder, model.spec.load_format)}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def few_prompts(count: int) -> list[str]:
    """A warning if there are too few prompts for narrow intervals."""
    if count >= _FEW_PROMPTS:
        return []
    few = "1 prompt is" if count == 1 else f"{count} prompts are"
    return [f"{few} few: intervals are wide (--limit, --dataset)"]
