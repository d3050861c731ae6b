"""The proposers by the names that recipes give them."""

from collections.abc import Callable

from specdec_cli.methods import draft_model, ngram
from specdec_cli.methods.base import MethodParts, Proposer

METHODS: dict[str, Callable[[MethodParts], Proposer]] = {
    "draft_model": draft_model.make,
    "ngram": ngram.make,
}
