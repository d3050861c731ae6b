"""The methods by the names that recipes give them."""

from specdec_cli.methods import draft_model, ngram
from specdec_cli.methods.base import Method

METHODS: dict[str, Method] = {"draft_model": draft_model.METHOD, "ngram": ngram.METHOD}
