"""The rounds of greedy decoding one by one, to check the numbers of `experiment.predict`."""

from collections.abc import Iterator

from specdec_cli.experiment.predict import Text


def greedy_rounds(text: Text, k: int) -> Iterator[tuple[int, int]]:
    """The rounds of greedy decoding: numbers of proposed and accepted tokens of each."""
    start = 0
    while start < text.length:
        chain = text.round_at(start, k)
        stand = next((i for i, accepted in enumerate(chain) if accepted < 0.5), len(chain))
        yield len(chain), min(stand, text.length - start)
        start += stand + 1
