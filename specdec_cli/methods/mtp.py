"""Proposing tokens with the modules for multi-token prediction in the target's checkpoint."""

from specdec_cli.methods.base import DraftPlace, Method
from specdec_cli.methods.step_head import estimate_bytes, make
from specdec_cli.models.heads.mtp.draft import MtpDraft, describe_mtp


def _describe(place: DraftPlace) -> MtpDraft:
    where = place.spec, place.device, place.parallel, place.target, place.max_model_len
    return describe_mtp(*where, place.speculation)


METHOD = Method(make, estimate_bytes, _describe)
