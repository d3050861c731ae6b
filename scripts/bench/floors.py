"""The shortest possible time of a pass: every weight that it needs is read once, and multiplied by
every token, at rates of this GPU that the run measures first (rates.py). Only the experts that the
pass's tokens choose are read. Engines with fused layers count them. Otherwise they are estimated as
if each token chose uniformly, which is too many if routing is not uniform.
"""

import math
from dataclasses import dataclass
from typing import Any

from specdec_cli.engine.plan import Plan
from specdec_cli.models.description import Description
from specdec_cli.models.heads.base import HEAD
from specdec_cli.models.heads.mtp.draft import MtpDraft
from specdec_cli.models.held import held_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """tb_per_s: the rate of reading a matrix to multiply a vector. tflop_per_s: the rate of dense
    bf16 products."""

    tb_per_s: float
    tflop_per_s: float

    def read_ms(self, num_bytes: float) -> float:
        """The milliseconds for reading this many bytes once."""
        return num_bytes / self.tb_per_s / 1e9

    def product_ms(self, multiplications: float) -> float:
        """The milliseconds for this many multiplications, each with an addition."""
        return 2 * multiplications / self.tflop_per_s / 1e9

    def __str__(self) -> str:
        return (
            f"measured in this run: a matrix-vector read at {self.tb_per_s:.2f} TB/s, products at "
            f"{self.tflop_per_s:.0f} TFLOP/s"
        )


def round_ms(
    planned: Plan, k: int, batch_size: int, rates: Rates, read: float | None = None
) -> float:
    """The floor of a round: each pass reads its weights once. read: as in `bytes_read`."""
    total = bytes_read(planned.target.module, batch_size * (k + 1), read)
    draft = planned.draft
    if k and isinstance(draft, Description):
        passes = draft.passes(k)
        total += passes.count * bytes_read(draft.module, batch_size * passes.rows)
    elif k and isinstance(draft, MtpDraft):
        total += k * bytes_read(draft.body.module, batch_size)
    elif k and draft is not None:  # a head fuses the target's hidden states once a round
        sizes = {n: math.prod(s) for n, s in draft.config.shapes(draft.parallel).items()}
        once = sizes["fc.weight"] * draft.dtype.itemsize
        is_lent = HEAD in draft.borrows and draft.device.type != "cpu"  # on a CPU it packs its own
        lent = sizes[HEAD] * draft.dtype.itemsize if is_lent else 0
        total += draft.passes(k).count * (draft.weight_bytes + lent - once) + once
    return rates.read_ms(total)


def prefill_ms(planned: Plan, tokens: int, k: int, rates: Rates) -> float:
    """The floor of prefill passes over `tokens` tokens together; computed pass by pass it would be
    higher for short ones. k: proposals of the first round. If there are any, the draft or the head
    is fed too."""
    total = 0.0
    for held in planned.models[: 2 if k else 1]:
        if isinstance(held, Description | MtpDraft):
            module = held.body.module if isinstance(held, MtpDraft) else held.module
            read, multiplied = bytes_read(module, tokens), products(module)
        else:  # a head without a pass through its matrix of logits
            head = held.config
            logits = head.draft_vocab_size * head.hidden_size
            read = held.weight_bytes - logits * held.dtype.itemsize
            multiplied = read / held.dtype.itemsize
        total += max(rates.read_ms(read), rates.product_ms(multiplied * tokens))
    return total


def distinct_experts(num_experts: int, num_chosen: int, tokens: int) -> float:
    """The expected number of experts that at least one of `tokens` tokens chooses, if each chooses
    uniformly."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** tokens)


def bytes_read(module: Any, tokens: int, read: float | None = None) -> float:
    """Bytes that a pass over `tokens` reads: no untied input embedding, and only chosen experts.

    module: a transformers model, which needs no weights. Stored weights count as stored. Experts
    are the stacked parameters of submodules named "experts"; others count whole. read: the counted
    experts that were read in a layer; None for those of uniform choices.
    """
    table = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    total = sum(map(held_bytes, module.parameters()))
    total -= 0 if table is head else held_bytes(table)
    for name, parameter in module.named_parameters():
        if ".experts." not in name:
            continue
        count, size = len(parameter), held_bytes(parameter)
        chosen = distinct_experts(count, chosen_of(module), tokens) if read is None else read
        total -= size * (1 - chosen / count)
    return float(total)


def products(module: Any) -> float:
    """The multiplications of a token in a forward pass, without embedding and head."""
    ends = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or id(parameter) in ends:
            continue
        is_expert = ".experts." in name
        if is_expert and parameter.dim() < 3:  # a bias of each expert
            continue
        total += parameter.numel() * (chosen_of(module) / len(parameter) if is_expert else 1)
    return total


def chosen_of(module: Any) -> int:
    """Experts that a token chooses; 0 for a model without experts."""
    config = module.config
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    found = (getattr(config, name, None) for name in names)
    value = next((v for v in found if v), 0)
    return int(max(value) if isinstance(value, list) else value)


def has_experts(module: Any) -> bool:
    return any(".experts." in name for name, _ in module.named_parameters())
