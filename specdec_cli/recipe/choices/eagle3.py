"""An EAGLE-3 head in a recipe, and in vLLM's config. A head is known by its config alone."""

from collections.abc import Mapping
from typing import Any, Literal

from specdec_cli.recipe.choices.base import DraftForm, MethodChoice, Setting, VllmConfig

Dialect = Literal["flat", "model-optimizer", "speculators", "deepspec"]


def dialect_of(config: Mapping[str, Any]) -> Dialect | None:
    """The form in which a config.json describes an EAGLE-3 head; None if it describes none."""
    settings = config.get("speculators_config")
    algorithm = settings.get("algorithm") if isinstance(settings, dict) else None
    if (algorithm := config.get("speculators_model_type", algorithm)) is not None:
        return "speculators" if algorithm == "eagle3" else None
    architectures = config.get("architectures")
    names = [str(a) for a in architectures] if isinstance(architectures, list) else []
    is_named = any("eagle3" in architecture.lower() for architecture in names)
    if is_named and "target_layer_ids" in config:
        return "deepspec"
    if isinstance(config.get("eagle_config"), dict):
        return "model-optimizer"
    return "flat" if is_named or "draft_vocab_size" in config else None


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    config = {"method": "eagle3", "model": draft}
    notes = []
    if str(draft).startswith("demo:"):
        notes.append("demo: models come with specdec; vLLM needs a folder or a Hugging Face id.")
    if setting("sampling", "temperature") not in (None, 0):
        config["draft_sample_method"] = "probabilistic"
        notes.append(
            "Measured with proposals sampled from the head. vLLM drafts greedily by default, and "
            "accepts less so at this temperature; draft_sample_method asks for the same as here "
            "(leave it out where a version does not know it)."
        )
    return VllmConfig(config, tuple(notes))


EAGLE3 = MethodChoice(
    "a head that reads the target's hidden states",
    needs_draft=True,
    to_vllm=_to_vllm,
    form=DraftForm("EAGLE-3 head", lambda config: dialect_of(config) is not None),
)
