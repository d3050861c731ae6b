"""Describes the method that drafts with a smaller model, and its settings in vLLM and SGLang."""

from specdec_cli.recipe.choices.base import MethodChoice, drafted, sglang_steps

_REFUSED = (
    "vLLM refuses a draft whose vocabulary size differs from the target's (unless "
    "use_heterogeneous_vocab), multimodal drafts, drafts with M-RoPE, and "
    "disable_padded_drafter_batch."
)
DRAFT_MODEL = MethodChoice(
    "a smaller model",
    weights_from="draft",
    to_vllm=drafted("draft_model", "draft", _REFUSED),
    to_sglang=sglang_steps("STANDALONE"),
)
