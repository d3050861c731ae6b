"""`--check-lossless`: compares greedy texts with those of the target alone at k = 0, token for
token.

At the first token where two texts differ, the target's own logits tell whether the two tokens were
nearly tied. Passes over different numbers of tokens round differently, which in bfloat16 and
float16 is enough to reverse near-ties. All ranks call these functions in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specdec_cli.backends.base import Finished, Prepared, Session
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import Notice, UsageError
from specdec_cli.experiment.folders.conclusions import CheckResult
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.generation import Job, requests
from specdec_cli.experiment.statistics.promise import check_line
from specdec_cli.launch.world import World

PROMPTS = 4  # prompts to decode for the check if the run's own texts cannot be compared
_MOST_LOOKED_AT = 16  # maximum differences to examine per point; each costs two passes over a text
_WIDEST = 256  # maximum tokens in a pass over a prompt; it holds a row of logits for each token
_NEAR = 2.0  # largest gap of a near-tie, as a multiple of `_noise`; see docs/correctness.md


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt's tokens, its output tokens with speculation, and those of the target alone."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    plain: Sequence[int]

    @property
    def parted_at(self) -> int | None:
        """The index of the first differing output token; None for equal texts."""
        pairs = enumerate(zip(self.tokens, self.plain, strict=False))
        shorter = min(len(self.tokens), len(self.plain))
        at = next((place for place, (a, b) in pairs if a != b), shorter)
        return None if at == shorter and len(self.tokens) == len(self.plain) else at


@dataclass(slots=True)
class LosslessCheck:
    """Compares texts and collects where they differ.

    dtype: the target's dtype.
    params: the sampling parameters of the texts.
    _num_cut: the number of texts that are the beginning of the other text, or continue it.
    _noise: the largest difference found between the logits of a narrow and a wide pass.
    """

    dtype: str
    params: SamplingParams = field(default_factory=SamplingParams)
    _prompts: set[int] = field(default_factory=set)
    _compared: int = 0
    _parted: list[dict[str, Any]] = field(default_factory=list)
    _num_cut: int = 0
    _noise: float = 0.0

    def compare(self, session: Session, key: Key, texts: Mapping[int, TextPair]) -> None:
        """Compare the texts of a point and collect their differences. The session must be idle.

        texts: the pair of texts of each prompt, by the prompt's index.
        """
        width, looked_at = max(2, key.k + 1, key.batch_size), 0
        self._prompts |= texts.keys()
        self._compared += len(texts)
        for index, text in sorted(texts.items()):
            if (at := text.parted_at) is None:
                continue
            gap = None
            if at == min(len(text.tokens), len(text.plain)):
                # Both texts end by the same rules, so rounding cannot explain that only one goes on
                # after the same tokens.
                self._num_cut += 1
            elif looked_at < _MOST_LOOKED_AT:
                looked_at += 1
                tokens = [*text.prompt, *text.plain[:at]]
                # The first token comes from the pass over the whole prompt, so compare with a pass
                # of that width. Later tokens come from passes of at most `width` tokens.
                most = width if at else max(width, min(len(tokens), _WIDEST))
                where = len(text.prompt), self.params
                alone, wide = (session.logits_after(tokens, w, *where) for w in (1, most))
                can_follow = np.isfinite(alone)
                rounding = abs(alone[can_follow] - wide[can_follow])
                self._noise = max(self._noise, float(rounding.max()))
                lower = min(float(alone[text.tokens[at]]), float(alone[text.plain[at]]))
                gap = float(alone.max()) - lower
            self._parted.append(key.as_dict() | {"index": index, "position": at, "gap": gap})

    @property
    def result(self) -> CheckResult:
        """The result, as reported in the field `lossless_check` of the JSON document."""
        gaps = [one["gap"] for one in self._parted if one["gap"] is not None]
        near = [gap <= _NEAR * self._noise for gap in gaps]
        is_exact = self.dtype == "float32"
        num_unexplained = len(near) - sum(near) + self._num_cut
        passed = not self._parted if is_exact else not num_unexplained
        return CheckResult(
            dtype=self.dtype,
            must_be_identical=is_exact,
            num_prompts=len(self._prompts),
            num_compared=self._compared,
            num_diverging=len(self._parted),
            num_near_ties=sum(near),
            num_unexplained=num_unexplained,
            largest_gap=max(gaps, default=None),
            noise=self._noise if gaps else None,
            diverging=self._parted,
            passed=bool(self._compared) and passed,
        )


def refuse_unfit(plan: Prepared, ks: Sequence[int]) -> None:
    """Raise `UsageError` if no k exceeds 0, or if the acceptance rule changes the text."""
    if not any(ks):
        raise UsageError("--check-lossless: k is 0, so there is nothing to compare with k = 0")
    if plan.remark is not None:
        rule = plan.recipe.speculation.acceptance
        raise UsageError(
            f"--check-lossless: speculation.acceptance is {rule}: {plan.remark}",
            "leave the option out, or use --set speculation.acceptance=rejection",
        )


def greedy_texts(session: Session, job: Job, k: int, world: World) -> dict[int, list[int]]:
    """Decode the job greedily at proposal length `k`. Return the outputs by prompt, without prompts
    that cannot run."""
    params: SamplingParams = replace(job.plan.params, temperature=0.0)
    found: list[Finished] = []

    def on_round(_: object, finished: list[Finished]) -> None:
        world.beat()
        found.extend(finished)

    session.run(requests(job), k, params, on_round)
    return {one.index: one.token_ids for one in found if one.finish_reason != "error"}


def texts_of(
    job: Job, written: Mapping[int, Sequence[int]], plain: Mapping[int, Sequence[int]]
) -> dict[int, TextPair]:
    """Return the pair of texts of each prompt that is in both `written` and `plain`."""
    ids = {prompt.index: ids for prompt, ids in zip(job.prompts, job.token_ids, strict=True)}
    return {i: TextPair(ids[i], written[i], plain[i]) for i in ids if i in written and i in plain}


def failed_check(check: CheckResult | None) -> list[Notice]:
    """Return a warning if a check was made and failed."""
    if check is None or check.passed:
        return []
    told = (
        f"{check_line(check)}. The text is not the target's, so do not use figures of these "
        "points. `lossless_check` in the --json document lists the differences; "
    )
    if check.must_be_identical:
        told += "report it with this list, or fix the plugin in use"
    else:
        told += "try --dtype float32: it removes rounding errors, but not faults"
    return [Notice("lossless_check", told, {"diverging": check.diverging})]
