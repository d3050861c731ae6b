"""Proposers by their names in a recipe."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec_cli.methods import draft_model, ngram
from specdec_cli.methods.base import MethodParts, Proposer


@dataclass(frozen=True, slots=True)
class Method:
    """The constructor of a proposer on each rank. needs_draft: whether it needs a draft model."""

    make: Callable[[MethodParts], Proposer]
    needs_draft: bool = False


METHODS: dict[str, Method] = {
    "draft_model": Method(draft_model.make, needs_draft=True),
    "ngram": Method(ngram.make),
}
