"""Proposing tokens with an EAGLE-3 head (Li et al., arXiv 2503.01840)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from specdec_cli.methods.base import Method
from specdec_cli.methods.step_head import estimate_bytes, make
from specdec_cli.models.description import DraftPlace
from specdec_cli.models.heads.description import Bind, HeadDescription, describe_head
from specdec_cli.models.heads.eagle3.config import Eagle3Config, overridden, read_head_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head
from specdec_cli.models.heads.paged import PagedHead


def describe(
    place: DraftPlace,
    read_config: Callable[[str, Path], Eagle3Config] = read_head_config,
    bind: Bind = PagedHead,
) -> HeadDescription:
    """Describe the head that is stored in the draft's folder. The recipe may choose the target
    layers whose hidden states the head reads; otherwise the head's config names them."""

    def read(name: str, folder: Path, num_target_layers: int) -> Eagle3Config:
        config = overridden(read_config(name, folder), place.speculation, num_target_layers)
        return replace(config, takes_embedding="embeddings" in place.share)

    return describe_head(place, read, Eagle3Head, bind)


METHOD = Method(make, estimate_bytes, describe, can_share=("embeddings",))
