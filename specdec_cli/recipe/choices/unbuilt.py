"""Known kinds of drafts that specdec cannot run yet."""

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.forms import DraftForm, Sign, named, speculator, valued

_KNOWN = "eagle3", "peagle", "dspark", "dflash", "eagle", "mtp"

UNBUILT = (
    DraftForm("a PARD-2 draft", (forms.PARD2,)),
    DraftForm("a draft of an unknown kind", (forms.BEYOND_PARD,), (forms.PARD2,)),
    DraftForm(
        "a successor of DFlash (DFlash 2, Domino)",
        (forms.BEYOND_DFLASH,),
        (speculator(*_KNOWN, others=True),),
    ),
    DraftForm(
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        (forms.EAGLE,),
        (speculator("eagle", others=True),),
    ),
    DraftForm(
        "a set of Medusa heads",
        ((Sign("medusa_num_heads"), Sign("num_medusa_heads"), valued("model_type", "medusa")),),
    ),
    DraftForm("a set of Hydra heads", ((Sign("hydra_num_heads"), Sign("hydra_head_arch")),)),
    DraftForm(
        "an MLP speculator", ((valued("model_type", "mlp_speculator"), named("mlpspeculator")),)
    ),
    DraftForm(
        "a multi-token-prediction module on its own",
        ((named("nextn|mtpmodel|mtpspeculator"),),),
        (speculator("mtp"),),
    ),
    DraftForm(
        "an assistant that reads the target's cache",
        ((valued("model_type", "gemma4_assistant", "gemma4_unified_assistant"),),),
    ),
    DraftForm("a stage of DeepSeek V4", ((Sign("dspark_target_layer_ids"),),), (forms.DSPARK,)),
    DraftForm("a speculator of an unknown kind", (speculator(*_KNOWN, others=True),)),
)
