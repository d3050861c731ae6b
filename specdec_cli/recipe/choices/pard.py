"""A PARD draft in a recipe, and in vLLM's config."""

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig, drafted
from specdec_cli.recipe.choices.forms import DraftForm, Sign, valued


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    found = drafted("draft_model", "draft", setting, draft, ())
    return VllmConfig(found.config | {"parallel_drafting": True}, found.notes)


PARD = MethodChoice(
    "a model that drafts all tokens in one pass",
    weights_from="draft",
    to_vllm=_to_vllm,
    form=DraftForm(
        "a PARD draft",
        ((Sign("pard_token"), valued("spd_type", "pard")),),
        (forms.BEYOND_PARD, forms.DSPARK, forms.DFLASH, forms.PEAGLE, forms.EAGLE3),
    ),
)
