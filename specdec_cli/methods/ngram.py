"""Proposing tokens without a model: what followed the same words earlier in the text.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023), as transformers'
`PromptLookupCandidateGenerator` does it. Unlike there, an end-of-text token is proposed like any
other: the loop ends the sequence where it is accepted. Padded rounds look the same up on the
device, by `ops.ngram_lookup`. Knows no models and no caches.
"""

import sys

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.types import Proposal, RoundNoise, SamplingParams, Sequence


class NgramIndex:
    """Where every n-gram of a growing list of tokens was first followed by another token.

    A token is entered once, so that a lookup costs the same however long the text is.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._first: dict[tuple[int, ...], int] = {}  # n-gram: position of what followed it
        self._entered = 0  # tokens seen so far

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest suffix of `tokens` that occurred before.

        Of several occurrences the first counts. `tokens` are those of the call before and more.
        """
        # The n-grams that end in the last token are not followed by anything yet.
        for follower in range(max(1, self._entered), len(tokens)):
            for n in self._sizes:
                if n <= follower:
                    self._first.setdefault(tuple(tokens[follower - n : follower]), follower)
        self._entered = len(tokens)
        for n in self._sizes:
            start = self._first.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + count]
        return []


class NgramProposer:
    """Looks n-grams of `longest` down to `shortest` tokens up in a sequence's prompt and output.

    vocab_size: width of the target's logits. max_len: no context length of its own.
    """

    def __init__(self, longest: int, shortest: int, vocab_size: int, device: torch.device) -> None:
        self.longest = longest
        self.shortest = shortest
        self.vocab_size = vocab_size
        self.device = device
        self.max_len = sys.maxsize
        self._indices: dict[Sequence, NgramIndex] = {}

    def prefill(self, spans: list[Span]) -> None:
        """There is no cache to fill."""

    def propose(
        self, seqs: list[Sequence], lens: list[int], noise: RoundNoise, params: SamplingParams
    ) -> Proposal:
        """Propose what was found, at most lens[b] tokens for sequence b; K is the most found.

        Nothing is drawn, so q is one-hot at the proposed token.
        """
        # Sequences that have left, finished or preempted, are forgotten: memory stays bounded.
        self._indices = {
            s: self._indices.get(s) or NgramIndex(self.longest, self.shortest) for s in seqs
        }
        found = [
            index.continuation(seq.tokens, length)
            for (seq, index), length in zip(self._indices.items(), lens, strict=True)
        ]
        k = max(map(len, found))
        padded = [tokens + [0] * (k - len(tokens)) for tokens in found]
        token_ids = torch.tensor(padded, dtype=torch.int64).to(self.device, non_blocking=True)
        kept = 0 if params.is_greedy else k
        probs = torch.zeros(len(seqs), kept, self.vocab_size, device=self.device)
        if kept:
            is_proposed = [[place < len(tokens) for place in range(k)] for tokens in found]
            ones = torch.tensor(is_proposed, dtype=torch.float32).to(self.device, non_blocking=True)
            probs.scatter_(2, token_ids[..., None], ones[..., None])
        return Proposal(token_ids, list(map(len, found)), probs)
