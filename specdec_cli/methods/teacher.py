"""Teacher forcing: feeds an existing text to the models, to get their probabilities for its tokens
without decoding. It uses the cache blocks of an idle engine."""

from collections.abc import Sequence as Values
from dataclasses import dataclass

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import Span
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.logits_processors import LogitsProcessors
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.sampling import to_probs
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.models.paged import PagedModel

_CHUNK = 64  # number of tokens whose distributions are in memory at once


@dataclass(frozen=True, slots=True)
class Teacher:
    """The parts of an idle engine that teacher forcing needs. parallel: the target's ranks.
    processors: None if there are no logits processors."""

    target: PagedModel
    allocator: BlockAllocator
    prefill_chunk: int
    parallel: TensorParallel
    processors: LogitsProcessors | None = None

    def changed(self, logits: torch.Tensor, seq: Sequence, start: int) -> torch.Tensor:
        """Apply the logits processors to logits [N, V']. Row i predicts the token after token
        `start + i` of the sequence."""
        if self.processors is None:
            return logits
        first, stop = start + 1, start + len(logits)
        texts = self.processors.of_text(seq.tokens[:first], seq.num_prompt_tokens)
        between = torch.tensor([seq.tokens[first:stop]], dtype=torch.int64, device=logits.device)
        return texts.after_each(logits[None, :, : self.target.vocab_size], between)[0]


@torch.inference_mode()
def compare(
    teacher: Teacher,
    draft: PagedModel | None,
    max_len: int,
    text: Sequence,
    params: SamplingParams,
) -> Forecast:
    """Compute a draft model's acceptance probabilities along the output of `text`. Only rank 0's
    result is valid. max_len: the draft's context length."""
    tokens, num_prompt, reach = text.tokens, text.num_prompt_tokens, min(len(text.tokens), max_len)
    draft_seq = Sequence(0, tokens[:reach], num_prompt, reach, text.block_table)
    teacher.allocator.extend(text.block_table, max(1, len(tokens) - 1))
    target = teacher.target if params.temperature > 0.0 else None
    first, last = num_prompt - 1, reach - 1  # logits of `first` decide the first output token
    accept: list[float] = []
    overlap: list[float] = []
    try:
        for model, seq in ((draft, draft_seq), (target, text)):
            if model is not None and first < last:
                prefill(model, seq, 0, first, teacher.prefill_chunk)
        for start in range(first, last, _CHUNK):
            stop = min(start + _CHUNK, last)
            drafted = logits_of(draft, draft_seq, start, stop) if draft is not None else None
            scored = logits_of(target, text, start, stop) if target is not None else None
            if drafted is None or not teacher.parallel.is_first:
                continue
            chances, overlaps = acceptance(
                teacher.changed(drafted, draft_seq, start),
                None if scored is None else teacher.changed(scored, text, start),
                torch.tensor(tokens[start + 1 : stop + 1], device=drafted.device),
                teacher.target.vocab_size,
                params,
            )
            accept += chances.tolist()
            overlap += overlaps.tolist()
    finally:
        teacher.allocator.shrink(text.block_table, 0)
    rest = (0.0,) * (text.num_new_tokens - len(accept))
    return Forecast(accept=(*accept, *rest), overlap=(*overlap, *rest))


def acceptance(
    drafted: torch.Tensor,
    scored: torch.Tensor | None,
    written: torch.Tensor,
    vocab_size: int,
    params: SamplingParams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two values for each of M output tokens, fp32 [M] each: min(1, q / p) for the token,
    and the sum of min(p, q) over the vocabulary. Here q is the draft's distribution and p the
    target's.

    If decoding is greedy, both values are 1 where the draft chooses the output token, and 0
    elsewhere.

    drafted: the draft's logits [M, V'].
    scored: the target's logits [M, V]; None if decoding is greedy.
    written: int64 [M], the output tokens.
    vocab_size: V.
    """
    # Truncate the logits of a draft with a different vocabulary size, or pad them with probability
    # zero.
    more = vocab_size - drafted.shape[-1]
    drafted = torch.nn.functional.pad(drafted, (0, more), value=float("-inf"))
    if scored is None:
        hits = (ops.greedy_argmax(drafted) == written).float()
        return hits, hits
    q, p, place = to_probs(drafted, params), to_probs(scored, params), written[:, None]
    ratio = q.gather(1, place) / p.gather(1, place).clamp(min=torch.finfo(p.dtype).tiny)
    overlap = torch.minimum(p, q).sum(dim=1).clamp(max=1.0)
    return ratio[:, 0].clamp(max=1.0), overlap


@torch.inference_mode()
def last_logits(teacher: Teacher, tokens: Values[int], width: int, num_prompt: int) -> torch.Tensor:
    """Return the target's logits for the token that follows `tokens`, fp32 [V]. They are valid only
    on rank 0. The last `width` tokens are fed in one pass, and earlier ones in prefill passes."""
    seq = Sequence(0, list(tokens), num_prompt, len(tokens))
    teacher.allocator.extend(seq.block_table, len(tokens))
    try:
        start = max(0, len(tokens) - width)
        prefill(teacher.target, seq, 0, start, teacher.prefill_chunk)
        last = logits_of(teacher.target, seq, start, len(tokens))[-1:]
        return teacher.changed(last, seq, len(tokens) - 1)[0].float()
    finally:
        teacher.allocator.shrink(seq.block_table, 0)


def logits_of(model: PagedModel, seq: Sequence, start: int, stop: int) -> torch.Tensor:
    return model.forward([Span(seq, start, stop)], [stop - start], with_hidden=False).logits


def prefill(model: PagedModel, seq: Sequence, start: int, stop: int, chunk: int) -> None:
    """Feed a sequence's tokens from `start` to `stop` to a model, at most `chunk` per pass."""
    for begin in range(start, stop, chunk):
        model.forward([Span(seq, begin, min(stop, begin + chunk))], [0], with_hidden=False)
