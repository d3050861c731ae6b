"""Proposing the tokens that followed the same n-gram earlier in the text.

This is prompt lookup (Saxena, "Prompt Lookup Decoding", 2023), as in transformers'
`PromptLookupCandidateGenerator`, except that an end-of-text token is proposed like any other.
"""

from specdec_kernels import ops

from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods.base import Method, MethodParts, Proposer, text_bytes


class Ngram(Proposer):
    """Looks in a sequence's prompt and output for an earlier occurrence of its last n tokens. It
    tries each n from `longest` down to `shortest`."""

    needs_text = True
    is_paged = True

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.shortest = shortest

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose the tokens after the earlier occurrence. They are not sampled, so the proposal
        distribution q is one-hot at each position."""
        assert state.texts is not None
        found = ops.ngram_lookup(
            state.texts.tokens,
            state.row,
            state.length,
            draft.caps,
            self.longest,
            self.shortest,
            draft.k,
        )
        return Candidates(*found)


def _make(parts: MethodParts) -> Ngram:
    return Ngram(parts.speculation.ngram_max, parts.speculation.ngram_min)


METHOD = Method(_make, text_bytes)
