"""The measuring loop of sweeps and comparisons: a warm-up, then every k on a few prompts at a time.
Each group of prompts goes through all points, in a balanced order, before the next group starts, so
that disturbances of the machine affect every point alike."""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from specdec_cli.backends.base import Finished, Served, Session, Written
from specdec_cli.core.figures import Metrics
from specdec_cli.core.garbage import garbage_stays
from specdec_cli.core.types import SamplingParams
from specdec_cli.experiment.folders.records import Key, Point, Sample, given
from specdec_cli.experiment.generation import Job, requests
from specdec_cli.experiment.points import Failure
from specdec_cli.launch.world import World

_log = logging.getLogger("specdec")
# Batches per unit; see `units_of`. There are enough to keep the batch mostly full, although it
# drains at the end of each unit, and few enough that a killed job loses little unfinished work.
_BATCHES_A_UNIT = 8
Guard = Callable[[Key, Callable[[], object]], object]


class Watcher:
    """Receives the progress of a sweep or a comparison. This base class shows nothing."""

    def begin(self, what: Any) -> None:
        """Handle the start of a stage of a sweep, or of a pair of TP degrees in a comparison.

        what: the stage's name, or the pair.
        """

    def told(self, line: str) -> None:
        """Handle a message that comes while nothing is measured."""

    def sample(self, key: Key, sample: Sample) -> None: ...

    def points(self, points: Sequence[Point]) -> None: ...

    def failed(self, pair: Any, batch_size: int, failure: Failure) -> None: ...

    def close(self) -> None: ...


def units_of(job: Job, batch_size: int) -> list[Job]:
    """Cut the job into units of nearly equal size. A unit is a group of prompts that is measured at
    every k before the next unit starts."""
    size = 1 if batch_size == 1 else _BATCHES_A_UNIT * batch_size
    total = len(job.prompts)
    count = -(-total // size)
    bounds = [place * total // count for place in range(count + 1)]
    return [job.part(start, stop) for start, stop in pairwise(bounds)]


@dataclass(slots=True)
class MeasuringLoop:
    """Runs prompts at points, and stores each prompt's sample once its last repeat is done.

    session_of: returns the session for a point. Sessions run one at a time.
    keep: stores the samples that a round completed at a point. Called on every rank.
    peak_memory: returns the largest number of bytes held so far.
    guard: runs a function for a point and handles its failure. By default errors propagate.
    seconds: the total time of the rounds and prefill passes of measured runs.
    """

    session_of: Callable[[Key], Session]
    world: World
    keep: Callable[[Key, list[Sample]], None]
    peak_memory: Callable[[], int]
    guard: Guard = lambda _, run: run()
    seconds: float = 0.0

    def warm_up(self, jobs: Mapping[Key, Job], most_tokens: int | None = None) -> None:
        """Run the first batch at each point, without keeping samples.

        most_tokens: the limit on new tokens; None for the recipe's limit.
        """
        for key, job in jobs.items():
            first, params = job.part(0, key.batch_size or 1), job.plan.params
            if most_tokens is not None:
                params = replace(params, max_new_tokens=min(most_tokens, params.max_new_tokens))
            for _ in range(job.plan.recipe.run.warmup):
                self.guard(key, partial(self.run, key, first, params))

    def measure(self, jobs: Mapping[Key, Job], number: int) -> None:
        """Run all repeats of a unit's prompts at each point.

        number: the index of the unit, which determines the order of the points.
        """
        taken: dict[Key, dict[int, list[Finished]]] = {key: defaultdict(list) for key in jobs}
        if not jobs:
            return
        run = next(iter(jobs.values())).plan.recipe.run
        for repeat in range(run.repeats):
            for key in balanced(list(jobs), number * run.repeats + repeat, run.seed):
                self.guard(key, partial(self._repeat, jobs[key], key, taken[key]))

    def run(
        self,
        key: Key,
        job: Job,
        params: SamplingParams,
        on_finished: Callable[[list[Finished]], None] = lambda _: None,
    ) -> Metrics | None:
        """Decode the prompts of a job once, with a heartbeat after each round."""

        def on_round(_: Sequence[Written], finished: list[Finished]) -> None:
            self.world.beat()
            on_finished(finished)

        session = self.session_of(key)
        # With the thousands of samples of a sweep in memory, a garbage collection takes 0.2 s. In a
        # run, this time would count as decoding.
        with garbage_stays():
            return session.run(requests(job), key.k, params, on_round)

    def _repeat(self, job: Job, key: Key, taken: dict[int, list[Finished]]) -> None:
        """Run one repeat of a point and add its results to `taken`, which holds those of all
        repeats by prompt. Keep the samples of the prompts whose repeats are complete."""
        categories = {p.index: p.category for p in job.prompts}
        limit = job.plan.params.max_new_tokens
        # Other policies may follow the times of rounds, which differ between repeats.
        is_fixed = job.plan.recipe.speculation.length.policy == "fixed"

        def on_finished(finished: list[Finished]) -> None:
            for one in finished:
                taken[one.index].append(one)
                self.seconds += one.seconds
            whole = [
                sample_of(
                    *(key, categories[one.index], taken[one.index], limit, self.peak_memory()),
                    must_propose_alike=is_fixed,
                )
                for one in finished
                if len(taken[one.index]) == job.plan.recipe.run.repeats
            ]
            if whole:
                self.keep(key, whole)

        self.run(key, job, job.plan.params, on_finished)


def sample_of(
    key: Key,
    category: str | None,
    runs: Sequence[Finished],
    limit: int,
    peak_memory_bytes: int,
    *,
    must_propose_alike: bool = False,
) -> Sample:
    """Make the sample of one prompt at one point from its answers in all repeats. If one of them
    failed, the sample has its error.

    must_propose_alike: whether to remark on repeats that proposed or accepted different numbers of
        tokens. The sample has the acceptance of one repeat, which does not belong to the times of
        the others.
    """
    first = next((run for run in runs if run.error is not None), runs[0])
    if first.error is None and any(other.token_ids != first.token_ids for other in runs):
        _log.warning("prompt %d at k = %d: repeats wrote different tokens", first.index, key.k)
    stages = dict.fromkeys(stage for run in runs for stage in run.stage_ms)
    experts = [s.distinct_experts for s in runs if s.distinct_experts is not None]
    are_counted = len(experts) == len(runs)
    parts = [part for s in runs if (part := s.ttft_parts_ms) is not None]
    of_server = [s.served for s in runs if s.served is not None]
    remarks = []
    if first.finish_reason == "length" and first.max_output_tokens < limit:
        remarks.append("context_full")
    if must_propose_alike and len({_rounds_of(run) for run in runs if run.error is None}) > 1:
        remarks.append("repeats_propose_differently")
    return Sample(
        **key.as_dict(),
        index=first.index,
        category=category,
        prompt_token_ids=first.prompt_token_ids,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        accepted_per_round=first.accepted_per_round or [],
        seconds=[s.seconds for s in runs],
        proposed_per_round=first.proposed_per_round or [],
        rounds_without_proposal=first.rounds_without_proposal,
        num_preemptions=first.num_preemptions,
        max_output_tokens=min(limit, first.max_output_tokens),
        decode_seconds=[s.decode_seconds for s in runs],
        round_share=[s.round_share for s in runs],
        stage_ms={stage: [s.stage_ms.get(stage, 0.0) for s in runs] for stage in stages},
        ttft_ms=[t for s in runs if (t := s.ttft_ms) is not None],
        tpot_ms=[t for s in runs if (t := s.tpot_ms) is not None],
        peak_memory_bytes=peak_memory_bytes,
        **given(
            error=first.error,
            num_tokens_from_prefill=first.num_tokens_from_prefill or None,
            distinct_experts=experts if are_counted else None,
            ttft_parts_ms={n: [p[n] for p in parts] for n in parts[0]} if parts else None,
            remarks=remarks if remarks and first.served is None else None,
        ),
        **(_served_fields(first.served, of_server) if first.served is not None else {}),
    )


def _rounds_of(run: Finished) -> tuple[tuple[int, ...], ...]:
    """Return how many tokens each round of an answer proposed, and how many it accepted."""
    return tuple(run.proposed_per_round or ()), tuple(run.accepted_per_round or ())


def _served_fields(first: Served, runs: Sequence[Served]) -> dict[str, Any]:
    """Compute the sample fields that exist only for servers, from the answers in all repeats.
    first: the answer that the sample's tokens are from."""
    return {
        "engine": first.engine,
        "num_retries": sum(run.num_retries for run in runs),
        "e2el_ms": [ms for run in runs if (ms := run.e2el_ms) is not None],
        **given(
            acceptance_histogram=first.acceptance_histogram,
            counted=first.counted,
            num_tokens=first.num_tokens,
            text=first.text,
            remarks=sorted({code for run in runs for code in run.remarks}) or None,
        ),
    }


T = TypeVar("T")


def balanced(values: Sequence[T], turn: int, seed: int) -> list[T]:
    """Return `values` in the order for one turn. The order is the same on every rank.

    Over n turns, each of the n values occurs once at every position, and once directly after every
    other value. If n is odd, this takes 2n turns, and each happens twice. So the effects of one
    point on the next, such as a warm cache or a hot device, are spread evenly.

    The orders are the rows of a Williams square (Williams 1949, Experimental designs balanced for
    the estimation of residual effects). The seed shuffles values and rows, differently for each
    square.
    """
    n = len(values)
    if n < 2:
        return list(values)
    height = n if n % 2 == 0 else 2 * n
    square, row = divmod(turn, height)
    shuffled = random.Random(f"{seed} {square}")
    labels = shuffled.sample(range(n), n)
    row = shuffled.sample(range(height), height)[row]
    # In the sequence 0, 1, n - 1, 2, n - 2, ..., each difference of neighbours modulo n occurs once
    # if n is even. If n is odd, each occurs twice in this sequence and its reverse together.
    steps = [(place + 1) // 2 if place % 2 else (n - place // 2) % n for place in range(n)]
    if row >= n:
        steps.reverse()
    return [values[labels[(step + row) % n]] for step in steps]
