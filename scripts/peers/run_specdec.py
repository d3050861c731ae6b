"""Times a recipe's models in specdec, in the same way as the other engines' scripts.

    PYTHONPATH=. python scripts/peers/run_specdec.py smollm2-offline --k 5 --batch-size 1,8,32

With a speculator the first round writes a text's first token too. --count adds that token to the
prompts, so that rounds begin at the same place as in other engines.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import work

from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import plan
from specdec_cli.recipe import load_recipe


@dataclass(frozen=True)
class Built:
    """The engine of one work. by_batch: the same engine with other numbers of slots; each keeps its
    captured rounds."""

    largest: Engine
    params: SamplingParams
    by_batch: dict[int, Engine]

    def engine(self, batch: int) -> Engine:
        if batch not in self.by_batch:
            self.by_batch[batch] = self.largest.with_batch_size(batch)
        return self.by_batch[batch]


built: list[Built] = []  # an engine takes k with each run, so one serves every k


def start(what: work.Work, batch: int, longest: int) -> work.Started:
    if not built:
        built.append(_built(what, batch, longest))
    params = built[0].params

    def run(ids: list[list[int]], new: int, k: int) -> list[Sequence]:
        engine = built[0].engine(len(ids))
        requests = [Request(i, tuple(prompt)) for i, prompt in enumerate(ids)]
        seqs = engine.run(requests, k, replace(params, max_new_tokens=new)).seqs
        if failed := [seq.error for seq in seqs if seq.error is not None]:
            raise SystemExit(failed[0])
        return seqs

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        began = time.perf_counter()
        seqs = run(ids, new, what.k)
        seconds = time.perf_counter() - began
        rounds = sum(rounds_of(seq) for seq in seqs) if what.k else 0
        return work.Decoded(seconds, [text(seq) for seq in seqs], rounds, apart=0)

    def count(ids: list[list[int]], new: int) -> list[work.Counted]:
        first = [text(seq)[0] for seq in run(ids, 1, 0)]
        return work.behind_first(
            ids, first, what, lambda longer: [counted(s) for s in run(longer, new - 1, what.k)]
        )

    return work.Started(decode, count)


def settings(what: work.Work, batch: int) -> dict[str, Any]:
    """The recipe's keys for some work. Ends this process for more than one rank."""
    if what.tensor_parallel_size > 1:
        raise SystemExit("this script runs one rank: scripts/bench/rounds.py times several")
    sets: dict[str, Any] = {
        "target.model": what.target,
        "target.dtype": what.dtype,
        "speculation.num_speculative_tokens": max(1, what.k),
        "sampling.max_new_tokens": what.new_tokens,
        "sampling.ignore_eos": what.ignore_eos,
        "run.batch_size": batch,
    }
    if what.k:
        sets["speculation.method"] = what.method
    if what.rates:
        sets["speculation.acceptance"] = "synthetic"
        sets["speculation.synthetic_acceptance_rates"] = what.rates
    models = {"target": what.target_weights}
    if what.draft is not None:
        sets |= {"draft.model": what.draft, "draft.dtype": what.dtype}
        models["draft"] = what.draft_weights
    for role, weights in models.items():
        if what.is_dummy:
            sets[f"{role}.load_format"] = "dummy"
        if weights is not None:
            sets[f"{role}.weights"] = weights
    return sets


def _built(what: work.Work, batch: int, longest: int) -> Built:
    planned = plan(load_recipe(None, settings(what, batch)))
    return Built(build(planned, longest - what.new_tokens), planned.params, {})


def text(seq: Sequence) -> list[int]:
    return seq.tokens[seq.num_prompt_tokens :]


def rounds_of(seq: Sequence) -> int:
    return len(seq.accepted_per_round) + seq.rounds_without_proposal - seq.num_tokens_from_prefill


def counted(seq: Sequence) -> work.Counted:
    """A prompt's rounds. Without room for a proposal the last round writes one token."""
    rounds = rounds_of(seq)
    written = [a + 1 for a in seq.accepted_per_round]
    written += [1] * (rounds - len(written))
    over = sum(written) - len(text(seq))
    assert 0 <= over < (written or [1])[-1], "rounds wrote other than the text"
    if over:
        written[-1] -= over
    return work.Counted(text(seq), rounds, written)


if __name__ == "__main__":
    work.main("specdec", start)
