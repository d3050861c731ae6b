"""Choose the method from the draft's own config.json, so that users need to name only the draft."""

from typing import Any

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.config_file import config_file
from specdec_cli.models.resolve import local_place, model_place
from specdec_cli.recipe import DraftSection, Recipe, SpeculationSection
from specdec_cli.recipe.choices.registry import METHODS, Fitting, fitting_forms

_DEFAULT = SpeculationSection().method


def with_method(recipe: Recipe, *, is_free: bool = False) -> Recipe:
    """Return the recipe with the speculation method that its draft's config.json calls for.

    is_free: whether the method may be replaced even if the recipe names one.

    The recipe is returned unchanged if it has no draft, or if the config is missing or damaged;
    loading the draft then reports the error. Raises `UsageError` if the recipe names a method that
    cannot run the draft and `is_free` is False, and `SetupError` if no method can run the draft.
    If the recipe asks for no proposals, neither is raised.
    """
    speculation, draft = recipe.speculation, recipe.draft
    method, has_proposals = speculation.method, speculation.num_speculative_tokens > 0
    asked = METHODS[method]
    is_unused = asked.weights_from != "draft"
    # A plugin with `describe` reads its draft's config itself, so there is nothing to choose here.
    if draft is None or (is_unused and not is_free) or getattr(asked.code, "describe", None):
        return recipe
    if is_unused:  # the user named a draft, so switch to a method that runs drafts
        method, asked = _DEFAULT, METHODS[_DEFAULT]
        speculation = speculation.model_copy(update={"method": method})
        recipe = recipe.model_copy(update={"speculation": speculation})
    config = _config_of(draft, may_download=has_proposals)
    if config is None:
        return recipe
    fitting = fitting_forms(config)
    found = fitting[0].method if fitting else None
    if len(fitting) > 1 or (fitting and found is None):
        if has_proposals:
            raise _not_run(draft.model, fitting)
        return recipe
    if found == method or (found is None and asked.form is None):
        return recipe
    if "method" in speculation.model_fields_set and not is_free:
        if not has_proposals:
            return recipe
        noun = fitting[0].form.noun if fitting else None
        if noun is None and asked.form is not None:
            noun = f"no {asked.form.noun.partition(' ')[2]}"
        raise UsageError(
            f"speculation.method is {method}, but the draft {draft.model} is {noun}",
            "leave the method out: the draft's config determines it",
        )
    changed = speculation.model_copy(update={"method": found or _DEFAULT})
    return recipe.model_copy(update={"speculation": changed})


def _not_run(name: str, fitting: list[Fitting]) -> SetupError:
    kinds = [f"{fits.form.noun} ({fits.seen})" for fits in fitting]
    if len(kinds) > 1:
        told = f"config.json of {name} fits {len(kinds)} kinds of draft: {' and '.join(kinds)}"
        return SetupError(told, "the config was edited, or is of a newer kind")
    runs = [choice.form.noun for choice in METHODS.values() if choice.form is not None]
    return SetupError(
        f"{name} is {kinds[0]}, which is not supported yet",
        f"these work as drafts: models of transformers' families, {', '.join(runs)}",
    )


def _config_of(draft: DraftSection, *, may_download: bool) -> dict[str, Any] | None:
    """Return the draft's config.json, or None if it is missing or cannot be read."""
    try:
        place = local_place(draft.model, draft.file)
        if place is None and may_download:
            place = model_place(draft.model, draft.revision, draft.file, weights=False)
        return None if place is None else config_file(draft.model, place)
    except SetupError:
        return None
