"""Record classes for the conclusions of a run, as found in summary.json and in the documents that
`--json` prints.

Does not import torch.
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
# misread new folders, or when new code would misread old ones.
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
    """The measurement that would settle an undecided verdict.

    prompts: how many prompts it needs.
    minutes: how long it takes; None if unknown.
    at_least: True if too few prompts were measured to estimate how many would settle the verdict.
        Then `prompts` is only how many are needed to make that estimate.
    """

    prompts: Count
    minutes: Figure = None
    at_least: bool = False


class Arm(Record):
    """One side of a comparison: a draft and its k. Plain decoding is the side with k = 0 and no
    draft."""

    k: Count
    draft: Name | None


class Fastest(Arm):
    """The fastest point. speedup: predicted in sweeps with predicted points, otherwise measured."""

    speedup: Figure = None


class Best(Record):
    """The recommended point for one batch size, or for the prompts of one category. Documents
    contain it as `best`.

    k: the recommended k; 0 for no speculation, None if nothing could be compared.
    draft: the recommended draft; None at k = 0.
    tied: each k at which this draft, or at k = 0 the fastest draft, is tied with the fastest point.
    by: the figure that decided, if requests arrive at a rate; otherwise None.
    tied_points: the tied points of every draft.
    significant: whether the point is faster than k = 0 by more than chance explains, in an
        undisturbed run.
    verdict: "use" if the point is significant; "none" if it was shown that no point is enough
        faster than k = 0 to be worth a draft; "inconclusive" if neither was shown, so that k is
        only a guess; None if requests arrive at a rate and every point is overloaded or failed.
    needed: the measurement that would settle an inconclusive verdict.
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
        """Make the record that says that no point can be recommended. It has the same keys as
        any other record, with null, empty or false values."""
        values: dict[str, Any] = {"k": None, "draft": None, "speedup": None, "fastest": None}
        values |= {"tied": [], "tied_points": [], "significant": False, "needed": None}
        return cls.model_validate({**values, "reason": reason, "verdict": None, **more})


class Crossover(Record):
    """The request rates between which the recommendation changes from speculation to plain
    decoding.

    below: the largest rate at which some k > 0 is recommended; None if there is none.
    above: the smallest rate at which k = 0 is recommended; None if there is none.
    """

    below: Rate | None
    above: Rate | None


class Degrees(Record):
    """The tensor-parallel degrees of the target and of the draft, for one pair of a comparison."""

    target_tp: Count
    draft_tp: Count | None


class Decision(Record):
    """The stage in which a round of the best pair saves the most time over a round with the next
    best draft TP.

    stage: the stage's name, or `host` for the part of a round outside all stages.
    saved_ms: the milliseconds saved per round.
    draft_tp: the next best draft TP.
    """

    stage: Name
    saved_ms: float
    draft_tp: Count | None


class BestPair(Record):
    """The fastest pair at one batch size.

    target_tp, draft_tp, k: None if no pair could be compared.
    tied: the pairs tied with it.
    significant, verdict, needed: as in `Best`, for the speed-up over the fastest plain decoding.
    decided_by: the stage that saves the most time over the next best draft TP; None if there is no
        such stage.
    speedup: the speed over k = 0 in the pair's own ranks.
    speedup_vs_plain: the speed over the fastest plain decoding of any target TP.
    """

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
    speedup_vs_plain: Figure = None
    speedup_vs_plain_ci: Interval = None


class MemoryCost(Record):
    """The memory that a target and its draft need on one rank.

    draft: the draft; None in comparisons.
    *_weight_bytes: the bytes of a model's weights.
    *_token_bytes: the cache bytes per token.
    longest_tokens: the maximum length of a sequence in the run.
    device_bytes: the GPU memory that the recipe lets the run use; None on a CPU.
    target_tp, draft_tp: the degrees; set only in comparisons.
    """

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
    """The speed of one arm (a draft at one k, or plain decoding) divided by that of another, over
    all prompts or those of one category.

    num_prompts: the number of prompts that were measured for all arms; only these are compared.
    speed_ratio: the ratio of the decoding speeds; None if the speed-up of either arm is not valid.
    tied: whether the 95 % interval contains 1; None without an interval.
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
    """An entry of a sweep's `comparisons`: it compares two arms, each at its fastest k.

    arm, against: the two arms. `speed_ratio` is the speed of `arm` divided by that of `against`.
    is_predicted: whether the speeds are predicted.
    """

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
    """The result of comparing the generated texts of all points. identical: whether they are the
    same at all points; None if nothing could be compared."""

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
    """The result of `--check-lossless`; see `docs/correctness.md`.

    diverging: one entry for each text that differs, with its point, the prompt's index, the
        position of the first difference, and the logit gap there.
    """

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
    """The fields of summary.json that specdec reads back. All kinds of runs share this class;
    fields that a kind does not write are empty.

    recipe: the resolved recipe.
    best_by_*: the recommendations or best pairs. The keys are batch sizes or request rates as
        strings, such as "2.5", or the target TP and then the batch size.
    """

    recipe: dict[str, Any] = Field(default_factory=dict)
    points: list[Point] = Field(default_factory=list)
    tokens: Tokens | None = None
    lossless_check: CheckResult | None = None
    memory: list[MemoryCost] = Field(default_factory=list)
    warnings: list[Annotated[InstanceOf[Notice], BeforeValidator(_notice)]] = Field(
        default_factory=list
    )
    sweep: _SweepSection = Field(default_factory=_SweepSection)
    best_by_batch_size: dict[Name, Best | BestPair] = Field(default_factory=dict)
    best_by_request_rate: dict[Name, Best] = Field(default_factory=dict)
    crossover: Crossover | None = None
    comparisons: list[Comparison] = Field(default_factory=list)
    best_by_target_tp: dict[Name, dict[Name, BestPair]] = Field(default_factory=dict)

    def method_of(self, draft: str | None) -> str | None:
        """Return the method that a sweep with several drafts sets for one of them, in that draft's
        own section of the recipe. Return None if there is no such section or method."""
        found = (one for one in self.sweep.recipe.drafts if one is not None)
        return next((one.method for one in found if one.model == draft), None)
