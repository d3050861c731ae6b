"""Modules for multi-token prediction (MTP): their keys in a recipe, and their settings in vLLM and
SGLang."""

from typing import Literal

from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig, drafted, sglang_steps
from specdec_cli.recipe.choices.forms import DraftForm, speculator
from specdec_cli.recipe.fields import Section, entry


class MtpKeys(Section):
    """Keys for details of MTP modules that inference tools handle differently."""

    mtp_fed_back: Literal["normed", "raw"] = entry(
        "normed",
        "whether each step of an MTP module reads the previous step's hidden state after the "
        "final norm (normed) or before it (raw); vLLM uses raw for glm4_moe",
    )
    mtp_first_embedding: Literal["used", "zeroed"] = entry(
        "used", "whether an MTP module uses the embedding in its first row; vLLM zeroes it"
    )
    mtp_copies: Literal["ignored", "used"] = entry(
        "ignored",
        "whether an MTP module uses its own embeddings and vocabulary head, if it has them, "
        "instead of the target's; vLLM uses them",
    )


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    found = drafted("mtp", "module")(setting, draft)
    return VllmConfig({k: v for k, v in found.config.items() if v is not None}, found.notes)


MTP = MethodChoice(
    "modules for multi-token prediction in the target's own checkpoint",
    keys=MtpKeys,
    weights_from="target",
    to_vllm=_to_vllm,
    to_sglang=sglang_steps("NEXTN"),
)
MTP_MODULE = MethodChoice(
    "an MTP module in its own folder",
    keys=MtpKeys,
    weights_from="draft",
    to_vllm=_to_vllm,
    form=DraftForm("an MTP module", (speculator("mtp"),), (speculator("mtp", others=True),)),
)
