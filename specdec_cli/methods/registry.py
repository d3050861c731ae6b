"""The methods by the names that recipes give them."""

from specdec_cli.methods import draft_model, eagle3, ngram
from specdec_cli.methods.base import Method

METHODS: dict[str, Method] = {
    "draft_model": draft_model.METHOD,
    "eagle3": eagle3.METHOD,
    "ngram": ngram.METHOD,
}
