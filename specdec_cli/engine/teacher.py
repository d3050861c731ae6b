"""How proposals for a text that is already written would fare, token by token.

One pass of each model over the text ("teacher forcing") instead of rounds. `predict` says what may
be concluded from it. Knows nothing of rounds and changes no sequence.
"""

from dataclasses import dataclass

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Span
from specdec_cli.core.sampling import round_noise, to_probs
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.run import Request
from specdec_cli.methods.draft_model import AbsentDraft, DraftWorker
from specdec_cli.methods.ngram import NgramIndex, NgramProposer
from specdec_cli.models.paged import PagedModel

_CHUNK = 64  # tokens whose distributions are held at a time


@dataclass(frozen=True, slots=True)
class Forecast:
    """For each output token of a text, of N.

    accept: N chances that it is accepted where it is proposed, min(1, q(x) / p(x)); 0 past the
    draft's context. overlap: N times the sum of min(p, q) over the vocabulary, the acceptance rate
    before it was known which token would be written. chains: for n-grams in place of both, how many
    tokens a round that begins there proposes and how many of them stand. draws, rates: under
    synthetic acceptance in place of all these, N uniform numbers, and the chance of acceptance at
    each place of a draft: a token stands where its number is below the rate of its place.
    """

    accept: tuple[float, ...] | None = None
    overlap: tuple[float, ...] | None = None
    chains: tuple[tuple[int, int], ...] | None = None
    draws: tuple[float, ...] | None = None
    rates: tuple[float, ...] | None = None


def forecast(
    engine: Engine, request: Request, output: list[int], k: int, params: SamplingParams
) -> Forecast:
    """What became of proposals for `output`, had each of its tokens been proposed.

    k: most tokens a round may propose. The engine must be idle: blocks for one sequence are
    borrowed from its cache. With several ranks all of them call this; what it returns means
    something on rank 0.
    """
    prompt = request.token_ids
    if engine.synthetic is not None:
        rates = torch.tensor(engine.synthetic.rates(k), dtype=torch.float32)
        noise = round_noise(
            [request.index],
            [len(prompt)],
            len(output),
            params,
            torch.device("cpu"),
            even_greedy=True,
        )
        return Forecast(draws=tuple(noise.accept[0].tolist()), rates=tuple(rates.tolist()))
    tokens = [*prompt, *output]
    if isinstance(engine.draft, NgramProposer):
        index = NgramIndex(engine.draft.longest, engine.draft.shortest)
        return Forecast(chains=_chains(index, tokens, len(prompt), k))
    assert isinstance(engine.draft, DraftWorker | AbsentDraft), "nobody proposes"
    reach = min(len(tokens), engine.draft.max_len)
    draft_seq = Sequence(0, tokens[:reach], len(prompt), reach)
    engine.allocator.extend(draft_seq.block_table, max(1, len(tokens) - 1))
    target_seq = Sequence(0, tokens, len(prompt), len(tokens), list(draft_seq.block_table))
    try:
        accept, overlap = _compare(engine, target_seq, draft_seq, params)
    finally:
        engine.allocator.shrink(draft_seq.block_table, 0)
    rest = (0.0,) * (len(output) - len(accept))
    return Forecast((*accept, *rest), (*overlap, *rest))


@torch.inference_mode()
def _compare(
    engine: Engine, target_seq: Sequence, draft_seq: Sequence, params: SamplingParams
) -> tuple[list[float], list[float]]:
    """Chances of acceptance and overlaps up to the end of the draft's sequence; on rank 0.

    Each rank takes part in the passes of the models that it holds a part of.
    """
    # None on a rank that holds no part of the draft.
    draft = engine.draft if isinstance(engine.draft, DraftWorker) else None
    target = engine.target.model if params.temperature > 0.0 else None
    first = draft_seq.num_prompt_tokens - 1  # its logits are those of the first output token
    if first >= len(draft_seq.tokens) - 1:  # nothing was ever proposed
        return [], []
    if draft is not None:
        _prefill(draft.model, draft_seq, first, engine.prefill_chunk)
    if target is not None:
        _prefill(target, target_seq, first, engine.prefill_chunk)
    accept: list[float] = []
    overlap: list[float] = []
    for start in range(first, len(draft_seq.tokens) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(draft_seq.tokens) - 1)
        drafted = _logits(draft.model, draft_seq, start, stop) if draft is not None else None
        scored = _logits(target, target_seq, start, stop) if target is not None else None
        if draft is None or drafted is None or not engine.parallel.is_first:
            continue
        written = torch.tensor(draft_seq.tokens[start + 1 : stop + 1])
        if scored is None:
            hits = ops.greedy_argmax(draft.fit(drafted)).cpu() == written
            accept += hits.float().tolist()
            overlap += hits.float().tolist()
            continue
        q, p = to_probs(draft.fit(drafted), params), to_probs(scored, params)
        place = written[:, None].to(p.device)
        ratio = q.gather(1, place) / p.gather(1, place).clamp(min=torch.finfo(p.dtype).tiny)
        accept += ratio[:, 0].clamp(max=1.0).tolist()
        overlap += torch.minimum(p, q).sum(dim=1).clamp(max=1.0).tolist()
    return accept, overlap


def _logits(model: PagedModel, seq: Sequence, start: int, stop: int) -> torch.Tensor:
    return model.forward([Span(seq, start, stop)], [stop - start]).logits


def _prefill(model: PagedModel, seq: Sequence, stop: int, chunk: int) -> None:
    for start in range(0, stop, chunk):
        model.forward([Span(seq, start, min(stop, start + chunk))], [0])


def _chains(
    index: NgramIndex, tokens: list[int], first: int, k: int
) -> tuple[tuple[int, int], ...]:
    """Proposed and standing tokens of a round that begins at each position from `first` on."""
    chains = []
    for start in range(first, len(tokens)):
        found = index.continuation(tokens[:start], k)
        ahead = tokens[start:]
        stand = next(
            (i for i, (a, b) in enumerate(zip(found, ahead, strict=False)) if a != b),
            min(len(found), len(ahead)),
        )
        chains.append((len(found), stand))
    return tuple(chains)
