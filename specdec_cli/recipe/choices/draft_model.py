"""A draft model in vLLM's config."""

from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    config = {"method": "draft_model", "model": draft}
    notes = [
        "vLLM refuses a draft whose vocabulary size differs from the target's (unless "
        "use_heterogeneous_vocab), multimodal drafts, drafts with M-RoPE, and "
        "disable_padded_drafter_batch."
    ]
    names = (str(draft), str(setting("target", "model")))
    if any(name.startswith("demo:") for name in names):
        notes.append("demo: models come with specdec; vLLM needs a folder or a Hugging Face id.")
    if setting("sampling", "temperature") not in (None, 0):
        config["draft_sample_method"] = "probabilistic"
        notes.append(
            "Measured with proposals sampled from the draft. vLLM drafts greedily by default, and "
            "accepts less so at this temperature; draft_sample_method asks for the same as here "
            "(leave it out where a version does not know it)."
        )
    return VllmConfig(config, tuple(notes))


DRAFT_MODEL = MethodChoice("a smaller model", weights_from="draft", to_vllm=_to_vllm)
