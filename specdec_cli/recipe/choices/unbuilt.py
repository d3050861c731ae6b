"""Kinds of drafts that are known and that no method here runs yet."""

from specdec_cli.recipe.choices.forms import (
    DFLASH_SIGNS,
    DSPARK_SIGNS,
    EAGLE3_SIGNS,
    EAGLE_SIGNS,
    MASK_SIGNS,
    PARD2_SIGNS,
    PEAGLE_SIGNS,
    DraftForm,
    Sign,
    named,
    speculator,
    valued,
)

_KNOWN = "eagle3", "peagle", "dspark", "dflash", "eagle", "mtp"

UNBUILT = (
    DraftForm("a DSpark drafter", (DSPARK_SIGNS,), speculator("dspark", others=True)),
    DraftForm(
        "a DFlash drafter", (DFLASH_SIGNS,), (*DSPARK_SIGNS, *speculator("dflash", others=True))
    ),
    DraftForm(
        "a P-EAGLE head",
        ((*PEAGLE_SIGNS, *MASK_SIGNS), (*PEAGLE_SIGNS, *EAGLE3_SIGNS)),
        (*DSPARK_SIGNS, *DFLASH_SIGNS, *EAGLE_SIGNS, *speculator("peagle", "eagle3", others=True)),
    ),
    DraftForm(
        "a PARD draft",
        ((Sign("pard_token"), valued("spd_type", "pard")),),
        (*PARD2_SIGNS, *DSPARK_SIGNS, *DFLASH_SIGNS, *PEAGLE_SIGNS, *EAGLE3_SIGNS),
    ),
    DraftForm("a PARD-2 draft", (PARD2_SIGNS,)),
    DraftForm(
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        (EAGLE_SIGNS,),
        speculator("eagle", others=True),
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
        ((*speculator("mtp"), named("nextn|mtpmodel|mtpspeculator")),),
    ),
    DraftForm(
        "an assistant that reads the target's cache",
        ((valued("model_type", "gemma4_assistant", "gemma4_unified_assistant"),),),
    ),
    DraftForm("a stage of DeepSeek V4", ((Sign("dspark_target_layer_ids"),),), DSPARK_SIGNS),
    DraftForm("a speculator of an unknown kind", (speculator(*_KNOWN, others=True),)),
)
