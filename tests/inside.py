"""A method of tests: a draft whose tensors lie in the target's own files, under `inside.`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec_cli.core.parallel import Groups
from specdec_cli.methods import draft_model
from specdec_cli.models import loader
from specdec_cli.models.description import Description, DraftPlace, describe
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.weights import open_checkpoint
from specdec_cli.recipe.choices.base import MethodChoice
from specdec_cli.recipe.choices.registry import METHODS


@dataclass(frozen=True)
class Inside:
    """model: the draft, of the target's own shapes. source: the target."""

    model: Description
    source: Description
    target_tensors = re.compile(r"^inside\.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def within(self, reach: int) -> "Inside":
        return replace(self, model=self.model.within(reach))

    def load(
        self,
        target: PagedModel,
        groups: Groups,
        block_size: int,
        on_compile: Callable[[str], None] | None = None,
    ) -> PagedModel | None:
        assert groups.draft is not None, "every rank of the target holds a part"
        model, device = self.model, self.model.device
        with open_checkpoint(self.source.place, allow_pickle=False) as tensors:
            assert set(tensors) > {"lm_head.weight", "inside.lm_head.weight"}
            loader._fill(model, device, lambda n, _, part: tensors[f"inside.{n}"](part), {})
        loader._restore_buffers(model.module, device)
        return model.paged(model.module, block_size, on_compile)


def register(max_k: int | None = None) -> None:
    """Let recipes name the method `inside`. max_k: of its drafts."""

    def described(place: DraftPlace) -> Any:
        assert (place.spec.role, place.spec.name) == ("draft", place.target.spec.name)
        assert place.parallel.size == place.target.parallel.size
        found = describe(place.spec, place.device, place.parallel)
        draft = Inside(found.within(place.max_model_len), place.target)
        object.__setattr__(draft, "max_k", max_k)
        return draft

    code = replace(draft_model.METHOD, describe=described)
    METHODS["inside"] = MethodChoice(weights_from="target", code=code)


def save_inside(folder: Path, draft: Path) -> None:
    """Put the tensors of `draft` into the files of the target in `folder`."""
    file = folder / "model.safetensors"
    own, others = load_file(file), load_file(draft / "model.safetensors")
    inside: dict[str, torch.Tensor] = {f"inside.{name}": t for name, t in others.items()}
    save_file(own | inside, file, metadata={"format": "pt"})
