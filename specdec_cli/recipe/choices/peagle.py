"""Configures vLLM for P-EAGLE heads, and recognises them by their config.json."""

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import MethodChoice, drafted
from specdec_cli.recipe.choices.eagle3 import Eagle3Keys
from specdec_cli.recipe.choices.forms import DraftForm, speculator

PEAGLE = MethodChoice(
    "an EAGLE-3 head that drafts all tokens in one pass",
    keys=Eagle3Keys,
    weights_from="draft",
    to_vllm=drafted("eagle3", "head", parallel_drafting=True),
    form=DraftForm(
        "a P-EAGLE head",
        ((*forms.PEAGLE, *forms.MASK), (*forms.PEAGLE, *forms.EAGLE3)),
        (forms.DSPARK, forms.DFLASH, forms.EAGLE, speculator("peagle", "eagle3", others=True)),
    ),
)
