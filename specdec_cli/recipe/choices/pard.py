"""Configures vLLM for PARD drafts, and recognises them by their config.json."""

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import MethodChoice, drafted
from specdec_cli.recipe.choices.forms import DraftForm, Sign, valued

PARD = MethodChoice(
    "a model that drafts all tokens in one pass",
    weights_from="draft",
    to_vllm=drafted("draft_model", "draft", parallel_drafting=True),
    form=DraftForm(
        "a PARD draft",
        ((Sign("pard_token"), valued("spd_type", "pard")),),
        (forms.BEYOND_PARD, forms.DSPARK, forms.DFLASH, forms.PEAGLE, forms.EAGLE3),
    ),
)
