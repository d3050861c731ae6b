"""The ranks of one pair: they load both models and decode the prompts at every batch size.

Rank 0 writes each sample as soon as it is done, so that it is kept if a rank fails.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specdec_cli import plugin
from specdec_cli.backends import native
from specdec_cli.backends.base import Session
from specdec_cli.core.parallel import local_world_size
from specdec_cli.core.types import Permissions
from specdec_cli.engine.memory.budget import available_memory, host_budget, room_now
from specdec_cli.engine.plan import Plan, block_bytes_of
from specdec_cli.errors import Notice
from specdec_cli.experiment.compare.comparison_records import ComparisonSettings, point_of
from specdec_cli.experiment.folders.records import Key, Pair, PairFacts, Point, Sample
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.generation import Job, tokenised
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.measure import MeasuringLoop, units_of
from specdec_cli.launch.world import World
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import Recipe

# A warm-up generates at most this many tokens per prompt. A few rounds are enough, because the
# first one already captures CUDA graphs and compiles kernels.
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PairTask:
    """The task that the parent sends to the ranks of one pair.

    recipe: the comparison's recipe; its degrees are replaced by those of `pair`.
    batch_sizes: the batch sizes that are still to be measured.
    warnings: warnings about the machine from ranks that measured this pair earlier.
    """

    pair: Pair
    settings: ComparisonSettings
    recipe: Recipe
    prompts: list[Prompt]
    permissions: Permissions
    batch_sizes: tuple[int, ...]
    folder: Path
    warnings: Sequence[dict[str, Any]] = ()


def with_degrees(recipe: Recipe, pair: Pair) -> Recipe:
    """Return the recipe with the degrees of one pair. A draft in the target's checkpoint has no
    section in the recipe, and always has the target's degree."""
    of_target = recipe.changed("target", tensor_parallel_size=pair.target_tp)
    if recipe.draft is None:
        return of_target
    return of_target.changed("draft", tensor_parallel_size=pair.draft_tp)


def measure(world: World, task: PairTask, on_point: Callable[[Point], None]) -> None:
    """Measure a pair. Every rank of `world` calls this. The number of ranks is the pair's target
    TP.

    on_point: called on rank 0 after each batch size with two points: the one at k = 0, and the one
        at the comparison's k.
    """
    began = time.perf_counter()
    for file in task.permissions.plugins:
        plugin.load(file)
    largest = task.settings.k, max(task.settings.batch_sizes)
    planned = native.prepare(with_degrees(task.recipe, task.pair), task.permissions, largest)
    job = tokenised(native, planned, task.prompts)
    session = native.open_session(planned, job.longest_prompt)
    num_blocks = session.weights.cache.num_blocks
    blocks = _blocks_per_rank(planned.own, num_blocks)
    world.ready()
    folder = RunFolder(task.folder)
    facts = PairFacts(
        target_tp=task.pair.target_tp,
        draft_tp=task.pair.draft_tp,
        num_blocks=num_blocks,
        blocks_per_rank=blocks,
        load_seconds=time.perf_counter() - began,
        execution=planned.own.execution,
        warnings=list(task.warnings),
    )
    if world.is_first:
        folder.append("pairs.jsonl", facts)
    watch = MachineWatch(planned.device)
    for batch_size in task.batch_sizes:
        chosen = job.part(0, task.settings.num_prompts(batch_size))
        # `session` has captured CUDA graphs for the largest batch size, so `resized` returns it
        # unchanged for that size. For other sizes, it returns a session that captures its own.
        sized = session.resized(batch_size)
        samples = _measure_size(world, task, chosen, sized, folder, watch)
        warnings = _warnings(task.pair, planned.own.parallel.gather_objects(watch.notices()))
        if world.is_first:
            if warnings:
                seen = {"warnings": [*task.warnings, *warnings]}
                folder.append("pairs.jsonl", facts.model_copy(update=seen))
            plain, *_ = samples.values()
            for key, own in samples.items():
                found = point_of(key, own, plain, None, task.settings.seed)
                with world.outside():
                    on_point(found)
        sized.forget_rounds()
        del sized
        native.free_memory(planned)
    folder.close()


def _measure_size(
    world: World,
    task: PairTask,
    job: Job,
    session: Session,
    folder: RunFolder,
    watch: MachineWatch,
) -> dict[Key, dict[int, Sample]]:
    """Measure every prompt at k = 0 and at the comparison's k. Return the samples by point and
    prompt; rank 0 also writes them."""
    keys = task.settings.keys(task.pair, session.batch_size)
    found: dict[Key, dict[int, Sample]] = {key: {} for key in keys}

    def keep(key: Key, samples: list[Sample]) -> None:
        if world.is_first:
            folder.append("samples.jsonl", *samples)
        found[key] |= {sample.index: sample for sample in samples}

    loop = MeasuringLoop(lambda _: session, world, keep, partial(native.peak_memory, job.plan))
    loop.warm_up(dict.fromkeys(keys, job), WARM_UP_TOKENS)
    watch.begin()
    for number, unit in enumerate(units_of(job, session.batch_size)):
        loop.measure(dict.fromkeys(keys, unit), number)
        watch.look()
    watch.look(at_end=True)
    return found


def _warnings(pair: Pair, by_rank: Sequence[Sequence[Notice]]) -> list[dict[str, Any]]:
    """Merge the ranks' warnings about a pair: one warning of each kind, with the first rank's
    message and a list of all ranks that gave it."""
    found: dict[str, dict[str, Any]] = {}
    for rank, notices in enumerate(by_rank):
        for one in notices:
            about = {"target_tp": pair.target_tp, "draft_tp": pair.draft_tp, "ranks": []}
            told = Notice(one.code, f"{pair}: {one.message}", {**one.evidence, **about}).as_dict()
            found.setdefault(one.code, told)["evidence"]["ranks"].append(rank)
    return list(found.values())


def _blocks_per_rank(planned: Plan, held: int) -> list[int]:
    """Return, for each rank, how many KV blocks would fit into its memory beside the models. This
    differs from `held`, the number of allocated blocks, because the engine allocates the same
    number on every rank: as many as fit on the rank with the least free memory, but no more than
    the run can use."""
    cache, block = planned.recipe.cache, sum(block_bytes_of(planned))
    if planned.device.type == "cuda":
        fits = held + max(0, room_now(planned.device, cache)) // block
    else:
        # The budget is a share of the memory that was free before the ranks allocated their caches,
        # so count the caches as free.
        caches = sum(planned.parallel.gather_objects(held * block))
        budget = host_budget(cache, available_memory() + caches, local_world_size())
        fits = budget // block
    return planned.parallel.gather_objects(fits)
