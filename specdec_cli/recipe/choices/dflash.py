"""Drafters of a whole block in one pass, DFlash and DSpark, in a recipe and in vLLM's config."""

from typing import Literal

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import MethodChoice, drafted, sglang_block
from specdec_cli.recipe.choices.forms import DraftForm, speculator
from specdec_cli.recipe.fields import Section, entry


class BlockKeys(Section):
    """The keys of drafters that draft a block."""

    block_width: Literal["k", "trained"] = entry(
        "k",
        "rows of a DFlash or DSpark drafter's pass: as many as k asks for (z-lab, "
        "vLLM), or always block_size (transformers), so that one run predicts every k",
    )


def _dspark_to_sglang(k: int) -> dict[str, str | int]:
    """SGLang refuses a k that differs from the drafter's `block_size`, unless two flags give it."""
    return sglang_block("DSPARK")(k) | {"dspark-block-size": k}


DFLASH = MethodChoice(
    "a drafter of a whole block in one pass",
    weights_from="draft",
    to_vllm=drafted("dflash", "drafter"),
    to_sglang=sglang_block("DFLASH"),
    form=DraftForm(
        "a DFlash drafter",
        (forms.DFLASH,),
        (forms.BEYOND_DFLASH, forms.DSPARK, speculator("dflash", others=True)),
    ),
)
DSPARK = MethodChoice(
    "the same with a head that reads the previously drawn token",
    weights_from="draft",
    to_vllm=drafted(
        *("dspark", "drafter", "vLLM runs DSpark drafters with vanilla Markov heads alone.")
    ),
    to_sglang=_dspark_to_sglang,
    form=DraftForm(
        "a DSpark drafter",
        (forms.DSPARK,),
        (forms.BEYOND_DFLASH, speculator("dspark", others=True)),
    ),
)
