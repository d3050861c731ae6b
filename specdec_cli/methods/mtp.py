"""Proposing tokens with the modules for multi-token prediction in the target's checkpoint.

A single module makes all proposals, one per pass. In a chain of modules, module i makes
proposal i + 1. Row t of module i embeds token t + 1 + i, so in a round the last i rows embed
proposals. When the tokens are decided, `commit` computes these rows again, because every module
needs keys and values for all tokens of the text. Legend: B slots.
"""

import torch

from specdec_cli.core.batch import Rectangle, Span
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState
from specdec_cli.methods import step_head
from specdec_cli.methods.base import Method, MethodParts, Proposer
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.mtp.chain import MtpChain
from specdec_cli.models.heads.mtp.config import tensors_of_modules
from specdec_cli.models.heads.mtp.draft import describe_mtp


class ChainedModules(Proposer):
    """Draws one token from each module in turn.

    Texts cannot share cache blocks, because the blocks with a module's keys do not suffice: the
    module also reads an output of the previous module, which may be stored with another block.
    """

    def __init__(self, chain: MtpChain, feature_layers: tuple[int, ...], max_len: int) -> None:
        self.chain, self.feature_layers, self.max_len = chain, feature_layers, max_len

    def up_to(self, k: int) -> Proposer:
        """Return a proposer with the first k modules, because module i makes no proposal before
        i + 1. No module reads the output of a later one."""
        if k >= len(self.chain.heads):
            return self
        if k == 1:
            return StepHead(self.chain.heads[0], self.feature_layers, self.max_len)
        return ChainedModules(MtpChain(self.chain.heads[:k]), self.feature_layers, self.max_len)

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        assert features is not None, "the target must return hidden states"
        self.chain.prefill(spans, features)

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose one token per module. Module 0 needs no pass, because `commit` kept its output.
        Module i first runs over the i rows that embed proposals. They start at position
        length - 1 - i."""
        heads = self.chain.heads
        x, rows, step = heads[0].carried(state), None, 0
        tokens = x.hidden.new_zeros(len(x.hidden), 0, dtype=torch.int64)
        while not draft.is_over:
            if step:
                first = heads[step - 1].head.fed_back(heads[step - 1].carried(state))[:, None]
                hidden = first if rows is None else torch.cat((first, rows), dim=1)
                place = Rectangle(tokens, draft.lens, -1 - step, step + 3, self.max_len, True)
                x = heads[step].forward_slots(place, state, hidden, fused=True)
                rows = heads[step].head.fed_back(x).unflatten(0, (-1, step))
                x = heads[step].head.normed(x.hidden.unflatten(0, (-1, step))[:, -1])
            token = draft.draw(heads[step].head.logits(x), heads[step].head.ids)
            tokens, step = torch.cat((tokens, token[:, None]), dim=1), step + 1
        return draft.candidates()

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Run every module over the rows that are complete now that the round's tokens are decided.
        Row t of module i embeds token t + 1 + i, so its rows lie i positions before those of module
        0."""
        assert target.features is not None, "the target must return hidden states"
        inputs, accepted = target.features, verdict.num_accepted
        for index, one in enumerate(self.chain.heads):
            before = one.head.fed_back(one.carried(state))[:, None]
            rows = Rectangle(
                *(verdict.token_ids, accepted, -1 - index, 1 + index, self.max_len, False)
            )
            x = one.forward_slots(rows, state, inputs, fused=index > 0)
            one.carry_on(state, x.hidden.view(*verdict.token_ids.shape, -1), accepted)
            own = one.head.fed_back(x).view(*verdict.token_ids.shape, -1)
            inputs = torch.cat((before, own[:, :-1]), dim=1)

    def clear(self) -> None:
        self.chain.clear()


def _make(parts: MethodParts) -> Proposer:
    if not isinstance(parts.draft, MtpChain):
        return step_head.make(parts)
    return ChainedModules(parts.draft, parts.target.hidden_layers, parts.draft_max_len)


METHOD = Method(
    *(_make, step_head.estimate_bytes, describe_mtp), tensors_in_target=tensors_of_modules
)
