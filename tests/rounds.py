"""The rounds of greedy decoding one by one, for what `experiment.predict` says of their number."""

from collections.abc import Iterator

from specdec_cli.experiment.predict import Text


def greedy_rounds(text: Text, k: int) -> Iterator[tuple[int, int]]:
    """The rounds that greedy decoding makes: how many tokens each proposes, how many stand."""
    start = 0
    while start < text.length:
        chain = text.round_at(start, k)
        stand = next((i for i, accepted in enumerate(chain) if accepted < 0.5), len(chain))
        yield len(chain), min(stand, text.length - start)
        start += stand + 1
