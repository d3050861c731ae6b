"""A chain of MTP modules, in which each module reads the hidden states of the previous one.

Row t of module i embeds token t + 1 + i. It can therefore run only when i more tokens are known
than row t of the first module needs. All modules share one cache, in which each has one layer.
Legend: T rows, B slots, Q rows per slot, H width of the target.
"""

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.prompt_passes import PromptGraphs


class MtpChain:
    """The MTP modules of a target, run one after another. heads: the modules, which share one
    cache."""

    def __init__(self, heads: list[PagedHead]) -> None:
        self.heads, self.cache = heads, heads[0].cache

    @property
    def storages(self) -> dict[int, int]:
        return {key: size for one in self.heads for key, size in one.storages.items()}

    def use(self, cache: KVCache) -> None:
        self.cache = cache
        for one in self.heads:
            one.use(cache)

    def capture_prompts(self, graphs: PromptGraphs) -> None:
        """Capture the prefill passes of the first module, for runs that use no other. Passes of the
        whole chain are not captured."""
        self.heads[0].capture_prompts(graphs)

    def clear(self) -> None:
        for one in self.heads:
            one.clear()

    def fed(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input [T, H] of module `index` + 1, given the hidden states [T, H] of module
        `index`."""
        head = self.heads[index].head
        return head.fed_back(head.normed(hidden))

    @torch.inference_mode()
    def prefill(self, spans: list[Span], features: torch.Tensor) -> None:
        """Run all modules over the prompt tokens in `spans`. Each module's spans start and end one
        row earlier than those of the module before it, because each of its rows needs one more
        token. features: [T, H], the target's hidden states of the tokens in `spans`."""
        for index, one in enumerate(self.heads):
            if not spans:
                return
            # The next module's span starts one row earlier, so its first row reads this module's
            # output for the row before the span, which the previous pass stored.
            before = self._carried_before(index, spans)
            hidden = one.forward(spans, features)
            states = self.fed(index, hidden).split([span.length for span in spans])
            found, rows = [], []
            for (seq, start, stop), own, own_before in zip(
                spans, states, before or (), strict=True
            ):
                span = Span(seq, max(0, start - 1), stop - 1)
                if span.length > 0:
                    found.append(span)
                    rows.append(torch.cat((own_before, own[:-1])) if start else own[:-1])
            spans, features = found, torch.cat(rows) if rows else features[:0]

    def _carried_before(self, index: int, spans: list[Span]) -> list[torch.Tensor]:
        """Return, for each span, the output of module `index` for the row before the span,
        converted to the input [1, H] of the next module."""
        one, size = self.heads[index], self.cache.block_size
        blocks = [s.seq.block_table[max(0, s.start - 1) // size] for s in spans]
        rows = one.carry[torch.tensor(blocks, device=one.device)]
        return list(self.fed(index, rows).split(1))
