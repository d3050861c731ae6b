"""The method that a draft's own config calls for, so that naming the draft is enough.

Reads config.json alone. Imports nothing heavy.
"""

from typing import Any

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.config_file import config_file
from specdec_cli.models.resolve import local_place, model_place
from specdec_cli.recipe import DraftSection, Recipe, SpeculationSection
from specdec_cli.recipe.choices.registry import METHODS, weights_from


def with_method(recipe: Recipe, *, is_free: bool = False) -> Recipe:
    """The recipe with the method that runs its draft.

    is_free: whether the draft may replace a method that the recipe names. A missing or damaged
    draft changes nothing: describing it reports that. Raises `UsageError` where a method is asked
    for that cannot run the draft.
    """
    speculation, draft = recipe.speculation, recipe.draft
    method, has_proposals = speculation.method, speculation.num_speculative_tokens > 0
    if draft is None or weights_from(method) != "draft":
        return recipe
    config = _config_of(draft, may_download=has_proposals)
    if config is None:
        return recipe
    asked = METHODS[method].form
    fitting = (name for name, choice in METHODS.items() if choice.form and choice.form.fits(config))
    found = next(fitting, None)
    if found == method or (found is None and asked is None):
        return recipe
    if "method" in speculation.model_fields_set and not is_free:
        if not has_proposals:
            return recipe
        form = asked if found is None else METHODS[found].form
        assert form is not None
        raise UsageError(
            f"speculation.method is {method}, and the draft {draft.model} is "
            f"{'no' if found is None else 'an'} {form.noun}",
            "leave speculation.method out: the draft's config says which it is",
        )
    changed = speculation.model_copy(update={"method": found or SpeculationSection().method})
    return recipe.model_copy(update={"speculation": changed})


def _config_of(draft: DraftSection, *, may_download: bool) -> dict[str, Any] | None:
    """The draft's config.json; None where there is none or it cannot be read."""
    try:
        place = local_place(draft.model, draft.file)
        if place is None and may_download:
            place = model_place(draft.model, draft.revision, draft.file, weights=False)
        return None if place is None else config_file(draft.model, place)
    except SetupError:
        return None
