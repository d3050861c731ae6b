"""Proposing tokens with an EAGLE-3 head (Li et al., arXiv 2503.01840)."""

from specdec_cli.methods.base import DraftPlace, Method
from specdec_cli.methods.step_head import estimate_bytes, make
from specdec_cli.models.heads.eagle3.description import HeadDescription, describe_head


def _describe(place: DraftPlace) -> HeadDescription:
    return describe_head(
        *(place.spec, place.device, place.parallel, place.target, place.max_model_len),
        place.speculation,
    )


METHOD = Method(make, estimate_bytes, _describe)
