"""The proposers by their names in a recipe."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec_cli.methods import draft_model, ngram
from specdec_cli.methods.base import MethodParts, Proposer


@dataclass(frozen=True, slots=True)
class Method:
    """How a proposer is made on each rank. needs_draft: whether the recipe names a draft model."""

    make: Callable[[MethodParts], Proposer]
    needs_draft: bool = False


METHODS: dict[str, Method] = {
    "draft_model": Method(draft_model.make, needs_draft=True),
    "ngram": Method(ngram.make),
}
