"""The rounds of greedy decoding one by one, to check the numbers of `experiment.predict`."""

from collections.abc import Iterator

from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.experiment.forecasts import Text, expected_rounds

LARGEST = 6


def greedy_rounds(text: Text, k: int) -> Iterator[tuple[int, int]]:
    """The rounds of greedy decoding: numbers of proposed and accepted tokens of each."""
    start = 0
    while start < text.length:
        chain = text.round_at(start, k)
        stand = next((i for i, accepted in enumerate(chain) if accepted < 0.5), len(chain))
        yield len(chain), min(stand, text.length - start)
        start += stand + 1


def text_of(engine: Engine, seq: Sequence, params: SamplingParams) -> Text:
    prompt = tuple(seq.tokens[: seq.num_prompt_tokens])
    found = engine.forecast(Request(seq.index, prompt), seq.output_ids, LARGEST, params)
    assert engine.allocator.num_used == 0
    assert engine.proposer is not None
    return Text(
        limit=min(params.max_new_tokens, engine.max_model_len - len(prompt)),
        draft_limit=engine.proposer.max_len - len(prompt),
        **dict(found),
    )


def same_rounds(seqs: list[Sequence], texts: list[Text], k: int) -> None:
    """Check that replayed rounds and counts equal those of `seqs`, one by one."""
    for seq, text in zip(seqs, texts, strict=True):
        rounds = list(greedy_rounds(text, k))
        assert [p for p, _ in rounds if p] == seq.proposed_per_round, (seq.index, k)
        assert [a for p, a in rounds if p] == seq.accepted_per_round, (seq.index, k)
        assert sum(p == 0 for p, _ in rounds) == seq.rounds_without_proposal
    found = expected_rounds(texts, k)
    assert found.drafts == sum(len(s.proposed_per_round) for s in seqs)
    assert found.draft_tokens == sum(sum(s.proposed_per_round) for s in seqs)
    assert found.accepted == sum(sum(s.accepted_per_round) for s in seqs)
