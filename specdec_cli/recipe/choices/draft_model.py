"""A draft model in vLLM's config."""

from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig, drafted, sglang_steps


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    refused = (
        "vLLM refuses a draft whose vocabulary size differs from the target's (unless "
        "use_heterogeneous_vocab), multimodal drafts, drafts with M-RoPE, and "
        "disable_padded_drafter_batch."
    )
    return drafted("draft_model", "draft", setting, draft, [refused])


DRAFT_MODEL = MethodChoice(
    "a smaller model", weights_from="draft", to_vllm=_to_vllm, to_sglang=sglang_steps("STANDALONE")
)
