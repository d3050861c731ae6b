"""The block drafters DFlash and DSpark: their keys in a recipe, and their settings in vLLM and
SGLang."""

from typing import Literal

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import (
    MethodChoice,
    Setting,
    VllmConfig,
    VllmMaker,
    drafted,
    sglang_block,
)
from specdec_cli.recipe.choices.forms import DraftForm, speculator
from specdec_cli.recipe.fields import Section, entry


class BlockKeys(Section):
    """Keys of block drafters."""

    block_width: Literal["k", "trained"] = entry(
        "k",
        "rows in each pass of a DFlash or DSpark drafter: k takes only as many as k needs (as "
        "z-lab and vLLM do); trained always takes block_size (as transformers does), so that one "
        "run predicts every k",
    )


_WIDTH = (
    "Measured with passes of block_size rows (speculation.block_width: trained). vLLM's passes "
    "have only the rows that k needs, so its proposals and their acceptance differ."
)


def _to_vllm(method: str, *notes: str) -> VllmMaker:
    def config_of(setting: Setting, draft: str | None) -> VllmConfig:
        is_wide = setting("speculation", "block_width") == "trained"
        return drafted(method, "drafter", *notes, *[_WIDTH] * is_wide)(setting, draft)

    return config_of


def _dspark_to_sglang(k: int) -> dict[str, str | int]:
    """Make SGLang's settings for k. SGLang accepts a k other than the drafter's `block_size` only
    if both flags, `num-draft-tokens` and `dspark-block-size`, set it."""
    return sglang_block("DSPARK")(k) | {"dspark-block-size": k}


DFLASH = MethodChoice(
    "drafts a whole block in one pass",
    keys=BlockKeys,
    weights_from="draft",
    to_vllm=_to_vllm("dflash"),
    to_sglang=sglang_block("DFLASH"),
    form=DraftForm(
        "a DFlash drafter",
        (forms.DFLASH,),
        (forms.BEYOND_DFLASH, forms.DSPARK, speculator("dflash", others=True)),
    ),
)
DSPARK = MethodChoice(
    "drafts a block, with a head that reads the previously drawn token",
    keys=BlockKeys,
    weights_from="draft",
    to_vllm=_to_vllm("dspark", "vLLM runs DSpark drafters only with vanilla Markov heads."),
    to_sglang=_dspark_to_sglang,
    form=DraftForm(
        "a DSpark drafter",
        (forms.DSPARK,),
        (forms.BEYOND_DFLASH, speculator("dspark", others=True)),
    ),
)
