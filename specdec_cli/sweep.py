"""A sweep: which points are measured in which order, and what is kept of them.

Prompts go through all proposal lengths one after the other, so that whatever disturbs the machine
disturbs every point alike. Knows nothing of terminals.
"""

import gc
import hashlib
import json
import logging
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Protocol

import torch

from specdec_cli.engine.build import build
from specdec_cli.engine.draft import DraftWorker
from specdec_cli.engine.loop import Emission, Engine
from specdec_cli.engine.teacher import forecast
from specdec_cli.engine.types import Sequence as Seq
from specdec_cli.errors import SetupError, UsageError, is_out_of_memory
from specdec_cli.generation import Job, requests
from specdec_cli.models.paged import PagedModel
from specdec_cli.points import Failure, Forecasts, Key, Point, Sample, block_points, recommend
from specdec_cli.predict import Text, with_recorded
from specdec_cli.recipe import Recipe
from specdec_cli.results import RunFolder

_log = logging.getLogger("specdec")

# Batches of this many refills: long enough to be full most of the time, short enough that little
# is lost when a job is killed.
_BATCHES_A_UNIT = 8
# The time curve is measured in parts, spread over the sweep.
_MOST_CURVE_PARTS = 8
_CURVE_PARTS_OF_BATCHES = 2
_CURVE_REFILLS = 4


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What a sweep's samples depend on; two folders with equal settings may be joined.

    recipe: as resolved, without what the other fields say. prompts: how many, and a digest of their
    tokens. shard: place and number of shards, or None.
    """

    recipe: dict[str, Any]
    drafts: tuple[str | None, ...]
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    predict_only: bool
    prompts: dict[str, Any]
    shard: tuple[int, int] | None
    device: str
    dtype: str

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def measured_ks(self) -> tuple[int, ...]:
        return (0, max(self.ks)) if self.predict_only and max(self.ks) else self.ks

    @property
    def blocks(self) -> list[tuple[str | None, int]]:
        """Drafts and batch sizes in the order in which they are measured."""
        return list(product(self.drafts, self.batch_sizes))

    @property
    def is_greedy(self) -> bool:
        return bool(self.recipe["sampling"]["temperature"] == 0.0)

    @property
    def is_synthetic(self) -> bool:
        return bool(self.recipe["speculation"]["acceptance"] == "synthetic")

    @property
    def seed(self) -> int:
        return int(self.recipe["run"]["seed"])

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> "SweepSettings":
        values = dict(found)
        for name in ("drafts", "ks", "batch_sizes"):
            values[name] = tuple(values[name])
        values["shard"] = tuple(values["shard"]) if values["shard"] else None
        return cls(**values)


@dataclass(slots=True)
class SweepPlan:
    """A checked sweep: no weights are loaded yet.

    recipe: as the user's command line resolves. jobs: one for each draft, with this shard's
    prompts only.
    """

    recipe: Recipe
    settings: SweepSettings
    jobs: list[Job]

    @property
    def num_prompts(self) -> int:
        return len(self.jobs[0].prompts)

    @property
    def num_samples(self) -> int:
        s = self.settings
        return self.num_prompts * len(s.blocks) * len(s.measured_ks)

    @property
    def random_tokens(self) -> bool:
        """Whether acceptance is an accident: random weights, and no rates given."""
        models = [m for job in self.jobs for m in job.plan.models]
        is_dummy = any(m.spec.load_format == "dummy" for m in models)
        return is_dummy and max(self.settings.ks) > 0 and not self.settings.is_synthetic


def settings_of(
    recipe: Recipe,
    jobs: Sequence[Job],
    ks: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    predict_only: bool,
    shard: tuple[int, int] | None,
    device_name: str,
) -> SweepSettings:
    """Settings of a sweep whose jobs still have the prompts of every shard."""
    values = recipe.model_dump(mode="json")
    del values["data"], values["draft"], values["run"]["batch_size"], values["run"]["device"]
    values["drafts"] = [
        job.plan.recipe.draft.model_dump(mode="json") if job.plan.recipe.draft else None
        for job in jobs
    ]
    digest = hashlib.sha256(json.dumps(jobs[0].token_ids).encode()).hexdigest()[:16]
    return SweepSettings(
        recipe=values,
        drafts=tuple(job.plan.proposer for job in jobs),
        ks=tuple(ks),
        batch_sizes=tuple(batch_sizes),
        predict_only=predict_only,
        prompts={"count": len(jobs[0].prompts), "sha256": digest},
        shard=shard,
        device=device_name,
        dtype=str(jobs[0].plan.target.dtype).removeprefix("torch."),
    )


def only(job: Job, keep: Callable[[int], bool]) -> Job:
    """The job with those of its prompts whose index `keep` says yes to."""
    pairs = [(p, ids) for p, ids in zip(job.prompts, job.token_ids, strict=True) if keep(p.index)]
    return replace(job, prompts=[p for p, _ in pairs], token_ids=[ids for _, ids in pairs])


class Watcher(Protocol):
    """Is told how a sweep goes on."""

    def begin(self, what: str) -> None: ...

    def sample(self, key: Key, sample: Sample) -> None: ...

    def points(self, points: Sequence[Point]) -> None: ...


@dataclass(slots=True)
class Records:
    """What a sweep has found so far, in memory and in its folder.

    texts: by draft and prompt, how proposals for its output would fare. costs: the time curves.
    """

    folder: RunFolder | None = None
    samples: dict[Key, dict[int, Sample]] = field(default_factory=lambda: defaultdict(dict))
    texts: dict[str | None, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    costs: dict[Key, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    points: dict[Key, Point] = field(default_factory=dict)

    def load(self, folder: RunFolder) -> None:
        """Take over what lies in a folder; the first record of a sample counts."""
        for sample in folder.read("samples.jsonl"):
            self.samples[Key.of(sample)].setdefault(sample["index"], sample)
        for text in folder.read("replay.jsonl"):
            self.texts[text["draft"]].setdefault(text["index"], text)
        for cost in folder.read("curve.jsonl"):
            self.costs[Key.of(cost)].setdefault(cost["part"], cost)
        for point in folder.read("points.jsonl"):
            self.points[Key.of(point)] = point

    def add_sample(self, sample: Sample) -> None:
        self._keep("samples.jsonl", sample)
        self.samples[Key.of(sample)][sample["index"]] = sample

    def add_text(self, text: dict[str, Any]) -> None:
        self._keep("replay.jsonl", text)
        self.texts[text["draft"]][text["index"]] = text

    def add_cost(self, cost: dict[str, Any]) -> None:
        self._keep("curve.jsonl", cost)
        self.costs[Key.of(cost)][cost["part"]] = cost

    def add_point(self, point: Point) -> None:
        """A point that was retried has a second line, and the last one counts."""
        if self.points.get(Key.of(point)) != point:
            self._keep("points.jsonl", point)
            self.points[Key.of(point)] = point

    def _keep(self, name: str, record: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.append(name, record)


@dataclass(slots=True)
class Clock:
    """Where the time of a sweep went, in seconds.

    rounds: inside rounds and prefill passes of measured runs. measuring: the whole measured part,
    with all that is recorded and written. processor: of this process, over the same part.
    """

    rounds: float = 0.0
    measuring: float = 0.0
    processor: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        outside = 1 - self.rounds / self.measuring if self.measuring else None
        return asdict(self) | {"share_outside_rounds": outside}


class Sweep:
    """Runs a plan; what is finished is in `records` at any moment."""

    def __init__(self, plan: SweepPlan, records: Records, watcher: Watcher) -> None:
        self.plan = plan
        self.records = records
        self.watcher = watcher
        self.failures: dict[Key, Failure] = {}
        self.clock = Clock()

    def run(self, on_plan: Callable[[Job], None], on_stage: Callable[[str], None]) -> list[Point]:
        """Measure what is not recorded yet; the points of the whole sweep.

        on_plan: called with a draft's job before its models are loaded. on_stage: see `build`.
        Raises what loading the only draft raises; with several, its points have failed.
        """
        points: list[Point] = []
        target: PagedModel | None = None
        for job in self.plan.jobs:
            engine: Engine | None = None
            if any(self._is_open(job, b) for b in self.plan.settings.batch_sizes):
                on_plan(job)
                engine = self._build(job, on_stage, target)
                target = engine.target.model if engine is not None else None
            for batch_size in self.plan.settings.batch_sizes:
                if engine is not None and self._is_open(job, batch_size):
                    self._measure(job, engine.with_batch_size(batch_size))
                found = points_of_block(
                    self.plan.settings,
                    self.records,
                    (job.plan.proposer, batch_size),
                    self.failures,
                )
                for point in found:
                    self.records.add_point(point)
                self.watcher.points(found)
                points += found
        return points

    def _build(
        self, job: Job, on_stage: Callable[[str], None], target: PagedModel | None
    ) -> Engine | None:
        try:
            return build(job.plan, job.longest_prompt, on_stage, target)
        except SetupError as problem:
            if len(self.plan.jobs) == 1:
                raise
            status = "oom" if problem.message.startswith("out of memory") else "failed"
            for batch_size in self.plan.settings.batch_sizes:
                for k in self.plan.settings.measured_ks:
                    key = Key(job.plan.proposer, batch_size, k)
                    self.failures[key] = Failure(status, problem.message)
            return None

    def _is_open(self, job: Job, batch_size: int) -> bool:
        """Whether a block lacks a sample, or what its predictions need."""
        draft = job.plan.proposer
        keys = [Key(draft, batch_size, k) for k in self.plan.settings.measured_ks]
        return (
            any(p.index not in self.records.samples[key] for key in keys for p in job.prompts)
            or any(
                len(self.records.costs[Key(draft, batch_size, k)]) < _curve_parts(job, batch_size)
                for k in self.plan.settings.ks
            )
            or bool(self._without_text(job))
        )

    def _measure(self, job: Job, engine: Engine) -> None:
        """All points of one draft and batch size."""
        settings, draft = self.plan.settings, job.plan.proposer
        self.watcher.begin("warming up")
        first = only(job, {p.index for p in job.prompts[: engine.batch_size]}.__contains__)
        for k in settings.ks:
            for _ in range(job.plan.recipe.run.warmup):
                self._guarded(
                    Key(draft, engine.batch_size, k), partial(self._engine_run, engine, first, k)
                )
        self.watcher.begin("measuring")
        began, processor = time.perf_counter(), time.process_time()
        units = list(units_of(job, engine.batch_size))
        for number, unit in enumerate(units):
            curve_began = time.perf_counter(), time.process_time()
            parts = _curve_parts(job, engine.batch_size)
            for part in range(parts):
                if part * len(units) // parts == number:
                    self._time_curve(job, engine, part)
            # What the time curve takes is neither measuring nor recording.
            began += time.perf_counter() - curve_began[0]
            processor += time.process_time() - curve_began[1]
            self._measure_unit(unit, engine, number)
            if engine.batch_size == settings.batch_sizes[0]:
                self._forecast(unit, engine)
        self.clock.measuring += time.perf_counter() - began
        self.clock.processor += time.process_time() - processor

    def _time_curve(self, job: Job, engine: Engine, part: int) -> None:
        """What a round costs at each k, on a batch of prompts.

        A part of the curve at a time, spread over the sweep like the points that it predicts.
        """
        sample = _part(job, part, engine.batch_size)
        for k in self.plan.settings.ks:
            key = Key(job.plan.proposer, engine.batch_size, k)
            if part not in self.records.costs[key]:
                self._guarded(key, partial(self._cost, engine, sample, key, part))

    def _cost(self, engine: Engine, job: Job, key: Key, part: int) -> None:
        result = engine.run(requests(job), key.k, job.plan.params)
        done = [s for s in result.seqs if s.finish_reason != "error"]
        metrics = result.metrics
        self.records.add_cost(
            asdict(key)
            | {
                "part": part,
                "sequence_rounds": sum(
                    len(s.proposed_per_round) + s.rounds_without_proposal for s in done
                ),
                "rounds": metrics.num_rounds,
                "decode_seconds": metrics.decode_seconds,
                "draft_ms": metrics.draft_ms * metrics.num_rounds,
                "verify_ms": metrics.verify_ms * metrics.num_rounds,
                "sample_ms": metrics.sample_ms * metrics.num_rounds,
            }
        )

    def _measure_unit(self, unit: Job, engine: Engine, number: int) -> None:
        """Every k over a few prompts, as often as the recipe repeats, in a turning order."""
        repeats = unit.plan.recipe.run.repeats
        draft, ks = unit.plan.proposer, self.plan.settings.measured_ks
        open_jobs: dict[Key, Job] = {}
        for k in ks:
            key = Key(draft, engine.batch_size, k)
            done = self.records.samples[key]
            missing = {p.index for p in unit.prompts} - done.keys()
            job = only(unit, missing.__contains__)
            if job.prompts:
                open_jobs[key] = job
        taken: dict[Key, dict[int, list[Seq]]] = {
            key: {p.index: [] for p in job.prompts} for key, job in open_jobs.items()
        }
        keys = list(open_jobs)
        for repeat in range(repeats):
            turn = (number * repeats + repeat) % max(1, len(keys))
            for key in keys[turn:] + keys[:turn]:
                take = self._taker(open_jobs[key], key, taken[key])
                self._guarded(key, partial(self._engine_run, engine, open_jobs[key], key.k, take))

    def _taker(
        self, job: Job, key: Key, taken: dict[int, list[Seq]]
    ) -> Callable[[list[Emission]], None]:
        """A callback that keeps finished sequences, and records them after the last repeat."""
        categories = {p.index: p.category for p in job.prompts}
        repeats = job.plan.recipe.run.repeats
        limit = job.plan.params.max_new_tokens

        def on_emit(emissions: list[Emission]) -> None:
            for seq in (e.seq for e in emissions if e.seq.finish_reason is not None):
                runs = taken[seq.index]
                runs.append(seq)
                if len(runs) == repeats:
                    found = sample_of(key, categories[seq.index], runs, limit)
                    found["peak_memory_bytes"] = peak_memory(job.plan.device)
                    self.records.add_sample(found)
                    self.watcher.sample(key, found)

        return on_emit

    def _engine_run(
        self,
        engine: Engine,
        job: Job,
        k: int,
        on_emit: Callable[[list[Emission]], None] | None = None,
    ) -> None:
        result = engine.run(requests(job), k, job.plan.params, on_emit)
        if on_emit is not None:
            self.clock.rounds += result.metrics.decode_seconds + result.metrics.prefill_seconds

    def _forecast(self, unit: Job, engine: Engine) -> None:
        """How proposals for the outputs of the largest k would fare, for the predictions."""
        k = max(self.plan.settings.ks)
        key = Key(unit.plan.proposer, engine.batch_size, k)
        for index in self._without_text(unit):
            sample = self.records.samples[key].get(index)
            if sample is None or sample["finish_reason"] == "error":
                continue
            prompt = tuple(sample["prompt_token_ids"])
            try:
                found = forecast(engine, prompt, sample["token_ids"], k, unit.plan.params)
            except (torch.OutOfMemoryError, MemoryError):
                _log.warning("prompt %d: no memory to predict from it", index)
                _free_memory()
                continue
            reach = engine.draft.max_len if isinstance(engine.draft, DraftWorker) else 2**31
            self.records.add_text(
                {
                    "draft": unit.plan.proposer,
                    "index": index,
                    "limit": min(
                        unit.plan.params.max_new_tokens, engine.max_model_len - len(prompt)
                    ),
                    "draft_limit": reach - len(prompt),
                    **asdict(found),
                }
            )

    def _without_text(self, job: Job) -> list[int]:
        """Prompts that nothing can be predicted from yet."""
        settings, draft = self.plan.settings, job.plan.proposer
        if settings.is_synthetic or max(settings.ks) == 0:
            return []
        samples = self.records.samples[Key(draft, settings.batch_sizes[0], max(settings.ks))]
        return [
            p.index
            for p in job.prompts
            if p.index not in self.records.texts[draft]
            and samples.get(p.index, {}).get("finish_reason") != "error"
        ]

    def _guarded(self, key: Key, run: Callable[[], None]) -> None:
        """Run a part of a point. A point that fails is given up, and the sweep goes on."""
        if key in self.failures:
            return
        try:
            run()
        except (SetupError, UsageError):
            raise
        except Exception as problem:
            _log.debug("k = %d at batch size %d", key.k, key.batch_size, exc_info=True)
            reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
            self.failures[key] = Failure("oom" if is_out_of_memory(problem) else "failed", reason)
        if key in self.failures:
            _free_memory()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _curve_size(job: Job, batch_size: int) -> int:
    """Prompts of one part of the time curve: of larger batches, enough to refill them."""
    return min(len(job.prompts), batch_size if batch_size == 1 else _CURVE_REFILLS * batch_size)


def _curve_parts(job: Job, batch_size: int) -> int:
    """In how many parts the time curve is measured: over half of the prompts at most."""
    most = len(job.prompts) // (2 * _curve_size(job, batch_size))
    return max(1, min(_MOST_CURVE_PARTS if batch_size == 1 else _CURVE_PARTS_OF_BATCHES, most))


def _part(job: Job, part: int, batch_size: int) -> Job:
    """Prompts from one place among all of them."""
    count = len(job.prompts)
    start = part * count // _curve_parts(job, batch_size)
    size = _curve_size(job, batch_size)
    chosen = {job.prompts[(start + i) % count].index for i in range(size)}
    return only(job, chosen.__contains__)


def units_of(job: Job, batch_size: int) -> Iterator[Job]:
    """Prompts that go through every k before the next ones come."""
    size = 1 if batch_size == 1 else _BATCHES_A_UNIT * batch_size
    for start in range(0, len(job.prompts), size):
        yield replace(
            job,
            prompts=job.prompts[start : start + size],
            token_ids=job.token_ids[start : start + size],
        )


def sample_of(key: Key, category: str | None, runs: Sequence[Seq], limit: int) -> Sample:
    """A line of samples.jsonl: one prompt at one point, from its sequence in each repeat.

    What follows the contract's fields is what metrics are computed from: lists have a number for
    each repeat, and shares add up over prompts to the engine's time, rounds and stages.
    """
    seq = runs[0]
    if any(other.tokens != seq.tokens for other in runs):
        _log.warning("prompt %d at k = %d: repeats wrote different tokens", seq.index, key.k)
    stages = {stage: None for run in runs for stage in run.stage_ms}
    found: Sample = {
        "draft": key.draft,
        "k": key.k,
        "batch_size": key.batch_size,
        "index": seq.index,
        "category": category,
        "prompt_token_ids": seq.tokens[: seq.num_prompt_tokens],
        "token_ids": seq.output_ids,
        "finish_reason": seq.finish_reason,
        "accepted_per_round": seq.accepted_per_round,
        "seconds": [s.prefill_seconds + s.decode_seconds for s in runs],
        "proposed_per_round": seq.proposed_per_round,
        "rounds_without_proposal": seq.rounds_without_proposal,
        "num_preemptions": seq.num_preemptions,
        "max_output_tokens": min(limit, seq.max_tokens - seq.num_prompt_tokens),
        "decode_seconds": [s.decode_seconds for s in runs],
        "round_share": [s.round_share for s in runs],
        "stage_ms": {stage: [s.stage_ms.get(stage, 0.0) for s in runs] for stage in stages},
        "ttft_ms": [t for s in runs if (t := _ttft_ms(s)) is not None],
        "tpot_ms": [t for s in runs if (t := _tpot_ms(s)) is not None],
    }
    if seq.error is not None:
        found["error"] = seq.error
    return found


def _ttft_ms(seq: Seq) -> float | None:
    if seq.first_token_at is None or seq.admitted_at is None:
        return None
    return (seq.first_token_at - seq.admitted_at) * 1e3


def _tpot_ms(seq: Seq) -> float | None:
    if seq.first_token_at is None or seq.finished_at is None or seq.num_new_tokens < 2:
        return None
    return (seq.finished_at - seq.first_token_at) * 1e3 / (seq.num_new_tokens - 1)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by torch of the device's memory, or by this process of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def points_of_block(
    settings: SweepSettings,
    records: Records,
    block: tuple[str | None, int],
    failures: Mapping[Key, Failure],
) -> list[Point]:
    """The points of one draft and batch size from what is recorded."""
    draft, batch_size = block
    keys = [Key(draft, batch_size, k) for k in settings.ks]
    failures = dict(failures)
    for key in keys:
        if key.k not in settings.measured_ks:
            failures.setdefault(key, Failure("skipped", "predicted, not measured"))
    forecasts = Forecasts(
        largest_k=max(settings.ks),
        texts=None if settings.is_synthetic else _texts(settings, records, draft),
        costs={
            key.k: curve_point(key, found)["seconds_per_sequence_round"]
            for key in keys
            if (found := records.costs[key])
        },
        is_greedy=settings.is_greedy,
    )
    return block_points(records.samples, keys, failures, forecasts, settings.seed)


def curve_point(key: Key, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What a round costs at one point, from the parts of the time curve."""
    total = {
        name: sum(part[name] for part in parts.values()) for name in ("rounds", "decode_seconds")
    }
    rounds = max(1, total["rounds"])
    draft, verify, sample = (
        sum(part[name] for part in parts.values()) / rounds
        for name in ("draft_ms", "verify_ms", "sample_ms")
    )
    return asdict(key) | {
        "rounds": total["rounds"],
        "draft_ms_per_step": draft / key.k if key.k else None,
        "verify_ms": verify,
        "sample_ms": sample,
        "round_ms": total["decode_seconds"] * 1e3 / rounds,
        # The median: whatever disturbs one part says nothing of the others.
        "seconds_per_sequence_round": median(
            part["decode_seconds"] / max(1, part["sequence_rounds"]) for part in parts.values()
        ),
    }


def _texts(settings: SweepSettings, records: Records, draft: str | None) -> list[Text]:
    samples = records.samples[Key(draft, settings.batch_sizes[0], max(settings.ks))]
    texts = []
    for index, record in sorted(records.texts[draft].items()):
        text = Text(
            limit=record["limit"],
            draft_limit=record["draft_limit"],
            accept=tuple(record["accept"]) if record["accept"] is not None else None,
            chains=tuple((a, b) for a, b in record["chains"])
            if record["chains"] is not None
            else None,
            overlap=tuple(record["overlap"] or ()),
        )
        sample = samples.get(index)
        if settings.is_greedy and text.accept is not None and sample is not None:
            rounds = zip(sample["proposed_per_round"], sample["accepted_per_round"], strict=True)
            text, _ = with_recorded(text, rounds)
        texts.append(text)
    return texts


def sweep_document(
    settings: SweepSettings,
    recipe: dict[str, Any],
    where: dict[str, Any],
    records: Records,
    points: Sequence[Point],
    warnings: Sequence[str],
    clock: Clock | None = None,
) -> dict[str, Any]:
    """`sweep-k --json`, and summary.json."""
    best = {
        b: recommend([p for p in points if p["batch_size"] == b], records.samples, settings.seed)
        for b in settings.batch_sizes
    }
    return {
        "schema": "specdec.sweep-k/1",
        "recipe": recipe,
        "environment": where,
        "sweep": settings.as_dict() | {"settings_hash": settings.digest},
        "points": list(points),
        "best": best[settings.batch_sizes[0]],
        "best_by_batch_size": {str(b): found for b, found in best.items()},
        "time_curve": [
            curve_point(key, found)
            for key in sorted(records.costs, key=_order(settings))
            if (found := records.costs[key])
        ],
        "warnings": list(warnings),
        "measuring": clock.as_dict() if clock is not None else None,
    }


def _order(settings: SweepSettings) -> Callable[[Key], tuple[int, int, int]]:
    places = {draft: place for place, draft in enumerate(settings.drafts)}
    return lambda key: (places[key.draft], key.batch_size, key.k)


def sorted_samples(settings: SweepSettings, records: Records) -> list[Sample]:
    """Every sample in the order of its point, then of its prompt."""
    keys = sorted(records.samples, key=_order(settings))
    return [sample for key in keys for _, sample in sorted(records.samples[key].items())]
