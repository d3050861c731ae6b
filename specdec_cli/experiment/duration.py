"""Estimates how long a sweep or a comparison will take, before any weights are loaded.

A forward pass is assumed to read the weights once, to compute matmuls for each token, and to take a
fixed time per layer. The memory bandwidth and the matmul speed are measured on this device when the
estimate is made. The time per layer is a constant. If several drafts take turns in memory, the time
to load them again is not included.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.plan import Plan
from specdec_cli.experiment.folders.records import Key, Pair
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import units_of
from specdec_cli.experiment.sweep.time_curve import curve_parts
from specdec_cli.models.draft import Draft
from specdec_cli.models.held import held_bytes

# Seconds that a pass takes per layer, in addition to reading weights and computing matmuls:
# - captured: on a GPU, if the round is a captured CUDA graph (measured on an H200 with models of
#   135M, 1B and 8B parameters: 10 to 12 microseconds);
# - launched: on a GPU, if the host launches each kernel;
# - CPU: on a CPU.
_LAYER_CAPTURED, _LAYER_LAUNCHED, _LAYER_CPU = 11e-6, 250e-6, 250e-6
# Seconds per all-reduce: between GPUs (docs/performance.md), and between processes on one host over
# gloo (measured on two busy cores: 0.3 to 0.8 milliseconds). Each layer has two all-reduces.
_SUM_CUDA, _SUM_CPU = 6e-6, 400e-6
# Assumed probability that a proposal is accepted, given that all earlier proposals of its round
# were accepted: for draft models, and for methods without one, such as n-grams.
_ACCEPTED, _ACCEPTED_WITHOUT_DRAFT = 0.7, 0.55
_START_CPU, _START_CUDA = 3.0, 30.0  # seconds from start to first pass, except loading weights
_LOAD = 1e9  # bytes of weights loaded per second
_PROBE_BYTES, _PROBE_SIDE, _PROBES = 64 * 2**20, 512, 3
# Real durations usually differ from the estimate by no more than this factor. `docs/sweep.md` and
# `docs/compare-tp.md` list the runs that show this.
_OFTEN_OFF_BY = 2.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """A device's speeds: bytes read per second, and floating-point operations per second in
    matmuls."""

    bytes: float
    operations: float


def own_plan(job: Job) -> Plan:
    """Return a job's plan. The job must use our own engine, because the sizes of a server's models
    are not known."""
    assert isinstance(job.plan.own, Plan), "other engines have no estimate"
    return job.plan.own


@cache
def speeds_of(device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure the speeds of `device` in this dtype, once per process, so that all estimates of a
    command agree. This takes a few hundredths of a second."""
    many = _PROBE_BYTES // 4 * (16 if device.type == "cuda" else 1)
    numbers = torch.ones(many // 1024, 1024, dtype=torch.float32, device=device)
    vector = torch.ones(1024, dtype=torch.float32, device=device)
    square = torch.ones(_PROBE_SIDE, _PROBE_SIDE, dtype=dtype, device=device)
    read = _fastest(lambda: numbers @ vector, device)
    multiply = _fastest(lambda: square @ square, device)
    return Speeds(many * 4 / read, 2 * _PROBE_SIDE**3 / multiply)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Call `run` several times and return the shortest duration, in seconds."""
    times = []
    for _ in range(1 + _PROBES):  # the first call warms up
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-6)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes of a model that determine the time of a pass.

    always: the bytes of weights that each pass reads.
    experts: the bytes of all experts; 0 for a dense model.
    share: the fraction of the experts that one token is routed to.
    parameters: how many parameters one token uses.
    layers: the number of layers.
    """

    always: float
    experts: float
    share: float
    parameters: float
    layers: int

    def bytes_read(self, tokens: int) -> float:
        return self.always + self.experts * (1 - (1 - self.share) ** tokens)


@dataclass(frozen=True, slots=True)
class DurationEstimate:
    """Estimates how many seconds the runs of one job take.

    degrees: the tensor-parallel degrees of the target and of the draft, if the job's plan describes
        whole models. (1, 1) if the plan already describes the shards of one rank.
    shapes: the shapes that were computed so far, by a model's id and the parts of a pass. Several
        estimates may share them.
    """

    job: Job
    speeds: Speeds
    degrees: tuple[int, int] = (1, 1)
    shapes: dict[tuple[int, int], _Shape] = field(default_factory=dict)

    def pass_seconds(self, model: Draft, tokens: int, parts: int = 1) -> float:
        """Estimate how many seconds a forward pass over `tokens` tokens takes. parts: as in
        `Passes`."""
        key = id(model), parts
        shape = self.shapes[key] = self.shapes.get(key) or _shape_of(model, parts)
        products = 2 * shape.parameters * tokens / self.speeds.operations
        work = shape.bytes_read(tokens) / self.speeds.bytes + products
        degree = self.degrees[0 if model.spec.role == "target" else 1]
        # On a CPU, the target's ranks divide the measured speeds among them. On GPUs, each rank has
        # the full speeds.
        shared = 1 if self._is_cuda else self.degrees[0]
        sums = 2 * (_SUM_CUDA if self._is_cuda else _SUM_CPU) if degree > 1 else 0.0
        layer = _LAYER_CAPTURED if self._plan.no_cuda_graphs is None else _LAYER_LAUNCHED
        layer = layer if self._is_cuda else _LAYER_CPU
        return work * shared / degree + shape.layers * (layer + sums)

    @property
    def _plan(self) -> Plan:
        return own_plan(self.job)

    @property
    def _is_cuda(self) -> bool:
        return self._plan.device.type == "cuda"

    def round_seconds(self, key: Key) -> float:
        """Estimate how many seconds one round of a full batch takes."""
        plan, batch = self._plan, min(key.batch_size, len(self.job.prompts))
        found = self.pass_seconds(plan.target, batch * (key.k + 1))
        if key.k and plan.draft is not None:
            passes = plan.draft.passes(key.k)
            once = self.pass_seconds(plan.draft, batch * passes.rows, passes.parts)
            found += passes.count * once
        return found

    def tokens_a_round(self, k: int) -> float:
        """Estimate how many tokens a round adds to a sequence. This uses the recipe's synthetic
        acceptance rates if it has any, and otherwise an assumed acceptance rate."""
        speculation = self._plan.recipe.speculation
        if (rates := speculation.synthetic_acceptance_rates) is not None:
            return 1 + sum(rates[:k])
        chance = _ACCEPTED if self._plan.draft is not None else _ACCEPTED_WITHOUT_DRAFT
        return (1 - chance ** (k + 1)) / (1 - chance)

    def run_seconds(self, key: Key, num_prompts: int, params: SamplingParams) -> float:
        """Estimate how many seconds one run of the first `num_prompts` prompts at a point takes if
        all texts reach their maximum length."""
        plan, lengths = self._plan, self.job.token_ids[:num_prompts]
        prefill = sum(self.pass_seconds(plan.target, max(1, len(ids))) for ids in lengths)
        if key.k and plan.draft is not None:
            passes = plan.draft.passes(key.k)
            each = (self.pass_seconds(plan.draft, max(1, len(i)), passes.parts) for i in lengths)
            prefill += passes.in_prompt * sum(each)
        texts = [min(params.max_new_tokens, plan.max_model_len - len(ids)) for ids in lengths]
        rounds = sum(max(0, t) for t in texts) / self.tokens_a_round(key.k)
        return prefill + rounds / min(key.batch_size, num_prompts) * self.round_seconds(key)

    def point_seconds(
        self, key: Key, num_prompts: int, most_warm_up: int | None = None, *, repeats: int
    ) -> float:
        """Estimate how many seconds the warm-ups and `repeats` repeats of a point take.

        most_warm_up: the maximum number of new tokens per prompt in a warm-up; None if only the
            run's own maximum applies.
        """
        run, params = self._plan.recipe.run, self._plan.params
        most = min(most_warm_up or params.max_new_tokens, params.max_new_tokens)
        first = min(key.batch_size, num_prompts)
        warm_up = self.run_seconds(key, first, replace(params, max_new_tokens=most))
        return repeats * self.run_seconds(key, num_prompts, params) + run.warmup * warm_up


def _shape_of(model: Draft, parts: int) -> _Shape:
    size, layers = model.weight_bytes / parts + model.shared_bytes, len(model.layers) // parts or 1
    module: Any = getattr(model, "module", None)
    if module is None:
        return _Shape(size, 0.0, 1.0, size / model.dtype.itemsize, layers)
    config, weights = module.config, dict(module.named_parameters())
    if not getattr(config, "tie_word_embeddings", False):
        embedding = module.get_input_embeddings().weight  # a pass reads only a few of its rows
        size -= held_bytes(embedding)
        weights = {name: p for name, p in weights.items() if p is not embedding}
    a_number = sum(map(held_bytes, weights.values())) / sum(p.numel() for p in weights.values())
    experts = sum(held_bytes(p) for name, p in weights.items() if ".experts." in name)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for name in names if (n := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not experts or not chosen or not count:
        return _Shape(size, 0.0, 1.0, size / a_number, layers)
    share, always = chosen / count, size - experts
    return _Shape(always, experts, share, (always + experts * share) / a_number, layers)


def total_seconds(
    jobs: Mapping[Key, Job],
    *,
    measured: Collection[Key] | None = None,
    has_curve: bool = False,
    most_warm_up: int | None = None,
) -> float:
    """Estimate how many seconds it takes to measure all points. For each pair of degrees, new ranks
    are started, which load both models.

    measured: the points to measure; None for all. The others are only warmed up, and timed for the
        time curve.
    has_curve: whether a time curve is measured too.
    most_warm_up: as for `point_seconds`.
    """
    if not jobs:
        return 0.0
    plans = [own_plan(job) for job in jobs.values()]
    speeds = speeds_of(plans[0].device, plans[0].target.dtype)
    # Starting the ranks takes a fixed time, plus the time to load each model once.
    models = {m.spec.name: m for plan in plans for m in plan.models}
    start = _START_CUDA if plans[0].device.type == "cuda" else _START_CPU
    loading = sum(model.weight_bytes for model in models.values()) / _LOAD
    found = (start + loading) * len({Pair.of(key) for key in jobs})
    shapes: dict[tuple[int, int], _Shape] = {}
    for key, job in jobs.items():
        count = len(job.prompts)
        degrees = key.target_tp or 1, key.draft_tp or 1
        estimate = DurationEstimate(job, speeds, degrees, shapes)
        repeats = own_plan(job).recipe.run.repeats if measured is None or key in measured else 0
        found += estimate.point_seconds(key, count, most_warm_up, repeats=repeats)
        if has_curve:
            parts = curve_parts(job, key.batch_size) / len(units_of(job, key.batch_size))
            found += estimate.run_seconds(key, max(1, round(parts * count)), job.plan.params)
    return found


def estimated(jobs: Mapping[Key, Job], **more: Any) -> tuple[str, dict[str, Any]]:
    """Estimate the run's duration. Return a line of text that a dry run prints, and the fields to
    add to the JSON document.

    more: keyword arguments of `total_seconds`.
    """
    seconds = total_seconds(jobs, **more)
    line = (
        f"time: about {in_words(seconds)}, usually right within a factor of {_OFTEN_OFF_BY:g}; "
        "texts that end early take less"
    )
    between = [seconds / _OFTEN_OFF_BY, seconds * _OFTEN_OFF_BY]
    return line, {"seconds": seconds, "seconds_range": between}


def in_words(seconds: float) -> str:
    """Format a duration with a fitting unit: `40 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
