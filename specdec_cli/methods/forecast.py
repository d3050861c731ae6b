"""Computes the expected acceptance along an existing text, by running a round that begins at each
token of the text.

Instead of sampling, a round draws exactly the tokens that come next in the text, and computes the
probability that they would be accepted. Several rounds run in parallel, each in its own cache
blocks. Legend: N rounds, K proposal length, V vocabulary.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from specdec_cli.acceptance.base import NoForecast
from specdec_cli.core.batch import Span
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import by_target_ids
from specdec_cli.core.state import BatchState, Texts
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.base import Proposer
from specdec_cli.methods.teacher import Teacher, acceptance, logits_of, prefill

_SIDE_BY_SIDE = 64  # maximum number of parallel rounds; each needs memory for distributions


@torch.inference_mode()
def forecast(
    proposer: Proposer,
    teacher: Teacher,
    prompt: Values[int],
    output: Values[int],
    k: int,
    params: SamplingParams,
) -> Forecast:
    """Compute the expected acceptance of rounds with K = k, one from each token of `output`.

    All ranks must call this, but only rank 0's result is valid. Raises `NoForecast` if the proposer
    does not draw its proposals through `Drafting`.
    """
    tokens, reach = [*prompt, *output], min(len(prompt) + len(output), proposer.max_len)
    text = Sequence(0, tokens, len(prompt), len(tokens))
    if (found := proposer.forecast(teacher, text, params)) is None:
        text = Sequence(0, tokens[:reach], len(prompt), reach)
        rounds = list(_Replay(proposer, teacher, text, k, params).rounds())
        found = _told(rounds + [_Round()] * (len(output) - len(rounds)))
        if proposer.takes_decisions and not proposer.is_paged:
            found = found.model_copy(update={"is_rough": True})
    return found.model_copy(update={"only_k": k}) if proposer.depends_on_k else found


@dataclass(slots=True, eq=False)
class Following(Drafting):
    """A `Drafting` that draws the tokens of the text, and records the acceptance probability of
    each.

    written: int64 [N, K], the tokens to draw.
    scored: returns the target's logits [M, V]. Row i + j is for proposal j of round i; for
        proposals past the end of the text, the last row is used.
    noted: the result of `teacher.acceptance` for each proposal position that was drawn.
    """

    written: torch.Tensor = field(kw_only=True)
    scored: Callable[[], torch.Tensor] = field(kw_only=True)
    noted: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, init=False)

    def draw_all(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        step = self.num_drawn
        tokens = self.written[:, step : step + logits.shape[1]]
        if ids is not None:
            logits = by_target_ids(logits, ids, self.vocab_size)
        logits = self.changed(logits[..., : self.vocab_size])
        for place, column in enumerate(tokens.unbind(1) if self.keeps_dist else ()):
            drafted, scored = logits[:, place], None
            if not self.params.is_greedy:
                rows = torch.arange(step + place, step + place + len(column))
                scored = self.scored()
                scored = scored[rows.clamp(max=len(scored) - 1)]
            self.noted.append(acceptance(drafted, scored, column, self.vocab_size, self.params))
        self._tokens.append(tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class _Round:
    """The proposals of a round.

    chances: the acceptance probability of each proposal that lies within the text.
    proposed: the number of proposals, including those past the text's end.
    is_drawn: whether any proposal was drawn from a distribution.
    overlap: the sum of min(p, q) over the vocabulary at the first proposal, where p is the target's
        distribution and q the draft's; 0 if the first proposal was not drawn.
    """

    chances: tuple[float, ...] = ()
    proposed: int = 0
    is_drawn: bool = False
    overlap: float = 0.0


def _told(rounds: list[_Round]) -> Forecast:
    """Make the forecast from all rounds.

    If proposals were drawn from a distribution, the forecast holds their acceptance probabilities.
    Otherwise each proposal is certain to be accepted or rejected, so the forecast holds how many
    tokens each round proposed and how many of them were accepted.
    """
    if any(one.is_drawn for one in rounds):
        overlap = tuple(one.overlap for one in rounds)
        return Forecast(ahead=tuple(one.chances for one in rounds), overlap=overlap)
    stood = ((one.proposed, (*one.chances, 0.0).index(0.0)) for one in rounds)
    return Forecast(chains=tuple(stood))


@dataclass(slots=True, eq=False)
class _Replay:
    """Runs rounds with K = k along `text`.

    begun: the number of tokens that have been fed to the proposer.
    fed: the number of tokens that have been fed to the target.
    features: [T, F], the target's hidden states for the last T of the first `begun` tokens, or
        None.
    scoring_passes: the number of the target's passes that compute the text's probabilities.
    runs_target: whether the proposer itself runs passes of the target, over the target's cache. It
        is known once a round has done so.
    """

    proposer: Proposer
    teacher: Teacher
    text: Sequence
    k: int
    params: SamplingParams
    begun: int = 0
    fed: int = 0
    features: torch.Tensor | None = None
    scoring_passes: int = 0
    runs_target: bool = False

    def rounds(self) -> Iterator[_Round]:
        """Run one round from each token of the output, and yield them in order."""
        allocator, device = self.teacher.allocator, self.teacher.target.device
        reach, size = len(self.text.tokens), allocator.block_size
        ahead = max(self.k, self.proposer.ahead(self.k))
        touched = allocator.blocks_for((size if self.proposer.is_paged else reach) + ahead + 1)
        spare: list[int] = []
        # Rounds near the text's end propose past it, as far as the free blocks allow.
        room = min(reach + ahead, allocator.num_free * size)
        allocator.extend(self.text.block_table, max(reach, room))
        try:
            width = min(_SIDE_BY_SIDE, 1 + allocator.num_free // touched)
            allocator.extend(spare, (width - 1) * touched * size)
            how = self.teacher.processors
            texts = Texts.empty(width, reach, device) if self.proposer.needs_text or how else None
            if texts is not None and how is not None:
                texts.mark(len(how.suppressed))
            columns = allocator.blocks_for(reach + self.k) + touched
            state = BatchState(width, columns, device, texts, self.proposer.tail_for(self.k))
            for begin in range(self.text.num_prompt_tokens, reach, width):
                starts = range(begin, min(begin + width, reach))
                # The last round of each group runs in the text's own blocks. So these blocks fill
                # up group by group, and later rounds can share them.
                copies = [
                    self._copy(n, spare[i * touched :][:touched]) for i, n in enumerate(starts)
                ]
                copies[-1].block_table = list(self.text.block_table)
                self._prefill(copies)
                state.load(copies, self.params.seed)
                yield from self._propose(state, copies, starts)
        finally:
            allocator.shrink(spare, 0)
            allocator.shrink(self.text.block_table, 0)

    def _shared(self, n: int) -> int:
        """Return how many of the text's blocks can be shared by a round that begins after n tokens.

        The block that holds the second-to-last token is not shared. A proposer may store its output
        for that token, and has room for only one output per block, so parallel rounds that shared
        the block would overwrite each other's output.
        """
        return max(0, n - 2) // self.teacher.allocator.block_size if self.proposer.is_paged else 0

    def _copy(self, n: int, own: list[int]) -> Sequence:
        """Return a sequence of the text's first n tokens. Its block table holds as many of
        the text's blocks as can be shared, followed by the blocks in `own`."""
        table = [*self.text.block_table[: self._shared(n)], *own]
        prompt = self.text.num_prompt_tokens
        return Sequence(n, self.text.tokens[:n], prompt, n + self.k + 1, table, draft_kv=n - 1)

    def _prefill(self, copies: list[Sequence]) -> None:
        """Feed the proposer all tokens of each copy, except the copy's last token.

        If blocks can be shared, the last copy is fed first, into the text's own blocks. The other
        copies are then fed only the tokens after the blocks that they share with it.
        """
        chunk, size = self.teacher.prefill_chunk, self.teacher.allocator.block_size
        last, is_paged = copies[-1], self.proposer.is_paged
        kept = len(copies) + size if is_paged else len(last.tokens)
        stop = len(last.tokens) - 1
        for start in range(self.begun, stop, chunk):
            span, rows = Span(last, start, min(start + chunk, stop)), None
            if self.proposer.feature_layers:
                rows = self.teacher.target.forward([span], [0]).hidden
                assert rows is not None, "the target must return hidden states"
                held = rows if self.features is None else torch.cat((self.features, rows))
                self.features, self.fed = held[-kept:], span.stop
            if is_paged:
                self.proposer.prefill([span], rows)
        self.begun = stop
        for group in _groups(self._unshared(copies[:-1] if is_paged else copies), chunk):
            rows = None
            if self.features is not None:
                behind = len(self.features) - stop
                rows = torch.cat([self.features[s.start + behind : s.stop + behind] for s in group])
            self.proposer.prefill(group, rows)

    def _unshared(self, copies: list[Sequence]) -> list[Span]:
        """Return the tokens of each copy that are in blocks of its own, except its last token."""
        size = self.teacher.allocator.block_size
        starts = [self._shared(len(one.tokens)) * size for one in copies]
        return [Span(o, start, len(o.tokens) - 1) for o, start in zip(copies, starts, strict=True)]

    def _feed_target(self, copies: list[Sequence]) -> None:
        """Feed the target all tokens of each copy, except the copy's last token. The last copy is
        in the text's own blocks."""
        target, chunk, stop = self.teacher.target, self.teacher.prefill_chunk, self.begun
        prefill(target, self.text, self.fed, stop, chunk)
        self.fed = stop
        for group in _groups(self._unshared(copies[:-1]), chunk):
            target.forward(group, [0] * len(group), with_hidden=False)

    def _propose(
        self, state: BatchState, copies: list[Sequence], starts: range
    ) -> Iterator[_Round]:
        tokens, k, target = self.text.tokens, self.k, self.teacher.target
        reach, idle = len(tokens), state.num_slots - len(starts)
        scored = cache(partial(self._score, starts.start - 1, min(starts.stop + k - 1, reach) - 1))
        if self.runs_target:
            self._feed_target(copies)
        if (self.teacher.parallel.size > 1 or self.runs_target) and not self.params.is_greedy:
            # All ranks must join this pass, even those that propose nothing. A proposer that runs
            # the target overwrites what the pass writes behind the text of the last copy.
            scored()
        written = [[*tokens[n : n + k], *[0] * k][:k] for n in starts] + [[0] * k] * idle
        most = len(self.text.block_table) * self.teacher.allocator.block_size
        most = min(most, self.proposer.max_len)
        caps = [min(k, most - n) for n in starts] + [0] * idle
        draft = Following(
            *(k, self.params, torch.tensor(caps, device=state.device), target.vocab_size),
            keeps_dist=self.teacher.parallel.is_first,
            written=torch.tensor(written, device=state.device),
            scored=scored,
            texts=how.at(state) if (how := self.teacher.processors) is not None else None,
        )
        others = target.num_passes - self.scoring_passes
        found = self.proposer.propose(state, draft)
        # Scoring fed the target some tokens past `begun`. Do not count them as fed, because the
        # next group of rounds feeds them to the target again.
        self.fed = min(self.fed, self.begun)
        if not self.runs_target and target.num_passes - self.scoring_passes > others:
            self.runs_target = True  # so the copies' blocks must hold the target's keys and values
            yield from self._propose(state, copies, starts)
            return
        same, lens = found.token_ids == draft.written, found.lens.tolist()
        is_drawn, chances = draft.num_drawn > 0, same.float()
        overlap = [0.0] * len(starts)
        if draft.noted:
            chances = torch.stack([chance for chance, _ in draft.noted], dim=1)
            overlap = draft.noted[0][1].tolist()
        for i, n in enumerate(starts):
            count = min(lens[i], reach - n)
            if found.q is not None or (is_drawn and not bool(same[i, :count].all())):
                raise NoForecast
            told = chances[i, :count].tolist()
            yield _Round(tuple(told), lens[i], is_drawn, overlap[i] if told else 0.0)

    def _score(self, start: int, stop: int) -> torch.Tensor:
        """Return the target's logits for the tokens at positions `start` + 1 to `stop`."""
        target = self.teacher.target
        before = target.num_passes
        prefill(target, self.text, self.fed, start, self.teacher.prefill_chunk)
        self.fed = stop
        logits = logits_of(target, self.text, start, stop)
        self.scoring_passes += target.num_passes - before
        return self.teacher.changed(logits, self.text, start)


def _groups(spans: list[Span], most: int) -> Iterator[list[Span]]:
    """Divide `spans`, in order, into groups of at most `most` tokens. Split spans that do not
    fit."""
    group: list[Span] = []
    room = most
    for seq, start, stop in spans:
        while start < stop:
            group.append(Span(seq, start, min(stop, start + room)))
            room -= group[-1].length
            start = group[-1].stop
            if room == 0:
                yield group
                group, room = [], most
    if group:
        yield group
