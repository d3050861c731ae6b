"""Check a model's folder before any rank is started, so that a bad model is reported at once:
starting the ranks takes seconds. This module does not import torch."""

from specdec_cli.models.config_file import config_file
from specdec_cli.models.refusals import Indivisible
from specdec_cli.models.resolve import local_place
from specdec_cli.recipe import DraftSection, ModelSection, Recipe
from specdec_cli.recipe.choices.registry import weights_from


def check_ahead(recipe: Recipe) -> None:
    """Check the target and, if the recipe uses one, the draft. Raises `SetupError` for a model that
    is missing or damaged, and `Indivisible` for attention heads that cannot be split over the
    ranks."""
    _check(recipe.target)
    speculation = recipe.speculation
    if weights_from(speculation.method) == "draft" and speculation.num_speculative_tokens:
        _check(recipe.draft)


def _check(section: ModelSection | DraftSection | None) -> None:
    if section is None or (place := local_place(section.model, section.file)) is None:
        return
    heads = config_file(section.model, place).get("num_attention_heads")
    if type(heads) is int and heads % section.tensor_parallel_size:
        raise Indivisible(section.model, f"{heads} attention heads", section.tensor_parallel_size)
