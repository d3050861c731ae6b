"""The records of a run's conclusions, as in summary.json and the documents of `--json`.

Imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from specdec_cli.core.figures import Count, Figure, Interval, Name, Rate, Record, Slots, impossible
from specdec_cli.errors import Notice, UsageError
from specdec_cli.experiment.folders.records import FEWEST, Point
from specdec_cli.text import one_line

# The version of settings.json, summary.json and all records. Increment it when old code would
# misread new folders, or new code old folders.
VERSION = 1


def refuse_other_version(path: Path, found: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the document `found`, read from the file `path`, has another
    version."""
    if (version := found.get("version")) == VERSION:
        return
    told = "has no version" if version is None else f"has version {one_line(str(version))[:20]}"
    raise UsageError(
        f"{path.parent} is from a different version of specdec: its {path.name} {told}, but this "
        f"one reads version {VERSION}",
        "read it with the specdec that wrote it, or run again with another folder for -o",
    )


Verdict = Literal["use", "none", "inconclusive"]


class Needed(Record):
    """The measurement that would settle an undecided verdict. prompts: how many prompts it needs.
    minutes: how long it takes; None if unknown. at_least: whether too few prompts were measured to
    estimate that number; then `prompts` is the number needed to estimate it."""

    prompts: Count
    minutes: Figure = None
    at_least: bool = False


class Arm(Record):
    """One side of a comparison. Plain decoding has k = 0 and no draft."""

    k: Count
    draft: Name | None


class Fastest(Arm):
    """The fastest point. speedup: predicted in sweeps with predicted points, otherwise measured."""

    speedup: Figure = None


class Best(Record):
    """The recommended point of one batch size, or of one category's prompts: the contract's `best`.

    k: the recommended k; 0 for no speculation, None if nothing could be compared. draft: the
    recommended draft; None at k = 0. tied: the k of all points with this draft that are tied with
    the fastest point. tied_points: the tied points of every draft. significant: whether the point
    is faster than k = 0 beyond chance, in an undisturbed run. verdict: "use" if the point is
    significant; "none" if, beyond chance, no point gains enough to be worth a draft; "inconclusive"
    if neither was shown, so that k is only a guess; None if every point at a rate is overloaded or
    failed. needed: the measurement that would settle the verdict. by: the deciding figure, if
    requests arrive at a rate.
    """

    k: Count | None
    draft: Name | None
    tied: list[Count]
    reason: Name
    by: Literal["goodput", "latency"] | None = None
    speedup: Figure = None
    fastest: Fastest | None = None
    tied_points: list[Arm] = Field(default_factory=list)
    significant: bool = False
    verdict: Verdict | None = None
    needed: Needed | None = None
    per_category: dict[Name, "Best"] = Field(default_factory=dict)

    @classmethod
    def none(cls, reason: str, **more: Any) -> "Best":
        """The record if no point can be named. It has the keys of any other, as null or empty."""
        values: dict[str, Any] = {"k": None, "draft": None, "speedup": None, "fastest": None}
        values |= {"tied": [], "tied_points": [], "significant": False, "needed": None}
        return cls.model_validate({**values, "reason": reason, "verdict": None, **more})


class Crossover(Record):
    """The rates between which the recommendation changes. below: the largest rate at which some k >
    0 is recommended. above: the smallest rate at which k = 0 is recommended. Either is None if
    there is no such rate."""

    below: Rate | None
    above: Rate | None


class Degrees(Record):
    """The degrees of one pair of a comparison."""

    target_tp: Count
    draft_tp: Count | None


class Decision(Record):
    """The stage in which a round of the best pair saves the most time over a round with the next
    best draft TP. stage: its name, or `host` for the part of a round outside all stages. saved_ms:
    the milliseconds saved. draft_tp: the next best draft TP."""

    stage: Name
    saved_ms: float
    draft_tp: Count | None


class BestPair(Record):
    """The fastest pair of one batch size. target_tp: None if no pair was measured. significant,
    verdict, needed: as in `Best`, for the speed-up over the fastest plain decoding."""

    target_tp: Count | None
    draft_tp: Count | None
    k: Count | None
    tied: list[Degrees]
    reason: Name
    significant: bool = False
    verdict: Verdict | None = None
    needed: Needed | None = None
    decided_by: Decision | None = None
    decode_tokens_per_second: Figure = None
    speedup: Figure = None
    speedup_vs_equal_tp: Figure = None


class MemoryCost(Record):
    """The memory of a draft beside its target, on one rank. Weights are in bytes, and caches in
    bytes per token. longest_tokens: the maximum length of a sequence in the run. device_bytes: the
    GPU memory that the recipe lets the run use; None on a CPU. target_tp, draft_tp: the degrees,
    set in comparisons only, where `draft` is None."""

    draft: Name | None
    target_weight_bytes: Count
    draft_weight_bytes: Count
    target_token_bytes: float
    draft_token_bytes: float
    longest_tokens: Count
    device_bytes: Count | None = None
    target_tp: Count | None = None
    draft_tp: Count | None = None


class SpeedRatio(Record):
    """The figures of a `Comparison`, over all prompts or over those of one category.

    num_prompts: the number of prompts that all arms have. speed_ratio: the arm's decoding speed on
    these prompts, divided by the other arm's; None if one of them has no valid speed-up. tied:
    whether the interval contains 1; None without an interval.
    """

    num_prompts: Count
    speed_ratio: Figure
    speed_ratio_ci: Interval
    tied: bool | None

    @property
    def verdict(self) -> str:
        if self.speed_ratio is None:
            return "no valid ratio"
        if self.tied is None:
            return "too few prompts" if self.num_prompts < FEWEST else "no interval"
        return "tied" if self.tied else "differ"


class Comparison(SpeedRatio):
    """An entry of a sweep's `comparisons`: one arm against another, each at its fastest k.
    is_predicted: whether the speeds are predicted."""

    batch_size: Count
    arm: Arm
    against: Arm
    is_predicted: bool
    per_category: dict[Name, SpeedRatio] = Field(default_factory=dict)


class Diverging(Record):
    """A point at which some prompts' texts differ from those at an earlier point. first: the index
    of the first of these prompts."""

    target_tp: Count | None = None
    draft_tp: Count | None = None
    draft: Name | None = None
    batch_size: Slots
    request_rate: Rate | None = None
    k: Count
    num_prompts: Annotated[int, Field(ge=1)]
    num_diverging: Count
    first: Count


class Tokens(Record):
    """Whether all points generated the same texts. identical: None if nothing could be compared."""

    compared: bool
    must_be_identical: bool
    identical: bool | None
    diverging: list[Diverging]

    @property
    def is_broken(self) -> bool:
        """True if tokens differ although they must be identical."""
        return self.must_be_identical and self.identical is False

    @model_validator(mode="after")
    def _names_what_differs(self) -> Self:
        if self.identical is False and not self.diverging:
            raise impossible("it says that points differ but does not list them")
        return self


class CheckResult(Record):
    """The result of `--check-lossless`; see `docs/correctness.md`. diverging: each differing text
    with its point, its index, the position of the first difference, and the logit gap there."""

    dtype: Name
    must_be_identical: bool
    num_prompts: Count
    num_compared: Count
    num_diverging: Count
    num_near_ties: Count
    num_unexplained: Count
    largest_gap: Figure
    noise: Figure
    diverging: list[dict[str, Any]]
    passed: bool


def _notice(found: object) -> Notice:
    if isinstance(found, Notice):
        return found
    if not isinstance(found, Mapping) or not isinstance(found.get("message"), str):
        raise impossible("it has no message")
    return Notice.read(found)


class _DraftSection(Record):
    model: Name | None = None
    method: Name | None = None


class _SettingsRecipe(Record):
    drafts: list[_DraftSection | None] = Field(default_factory=list)


class _SweepSection(Record):
    recipe: _SettingsRecipe = Field(default_factory=_SettingsRecipe)


class Summary(Record):
    """The parts of summary.json that are read back. All kinds of runs share this record; missing
    parts are empty. recipe: the resolved recipe. best_by_request_rate: the recommendations, by the
    rate as text. best_by_target_tp: the best pairs, by target TP and then by batch size."""

    recipe: dict[str, Any] = Field(default_factory=dict)
    points: list[Point] = Field(default_factory=list)
    tokens: Tokens | None = None
    lossless_check: CheckResult | None = None
    memory: list[MemoryCost] = Field(default_factory=list)
    warnings: list[Annotated[InstanceOf[Notice], BeforeValidator(_notice)]] = Field(
        default_factory=list
    )
    sweep: _SweepSection = Field(default_factory=_SweepSection)
    best_by_request_rate: dict[Name, Best] = Field(default_factory=dict)
    crossover: Crossover | None = None
    comparisons: list[Comparison] = Field(default_factory=list)
    best_by_target_tp: dict[Name, dict[Name, BestPair]] = Field(default_factory=dict)

    def method_of(self, draft: str | None) -> str | None:
        """Return the method in a draft's own section of a sweep with several drafts; None in other
        runs."""
        found = (one for one in self.sweep.recipe.drafts if one is not None)
        return next((one.method for one in found if one.model == draft), None)


class SweepSummary(Summary):
    """summary.json of a sweep. best_by_batch_size: the recommendations, by the batch size as
    text."""

    best_by_batch_size: dict[Name, Best] = Field(default_factory=dict)


class ComparisonSummary(Summary):
    """summary.json of a comparison."""

    best_by_batch_size: dict[Name, BestPair] = Field(default_factory=dict)
