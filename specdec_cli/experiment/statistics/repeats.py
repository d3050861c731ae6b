"""The repeats of one prompt at one point, and which of them something disturbed."""

from collections.abc import Sequence

from specdec_cli.experiment.folders.records import Sample

OUTLYING = 1.5  # times the fastest repeat


def usual_repeats(seconds: Sequence[float]) -> list[int]:
    """The places of the repeats that did not take far longer than the fastest.

    Repeats do the same work, and a disturbance only adds time. So the fastest is the one to be
    believed, even where most repeats were disturbed.
    """
    fastest = min(seconds, default=0.0)
    return [place for place, value in enumerate(seconds) if value <= OUTLYING * fastest]


def usual_mean(sample: Sample, values: Sequence[float]) -> float:
    """The mean of a prompt's values, one a repeat, without repeats whose time is an outlier."""
    if len(values) == len(sample.decode_seconds):
        values = [values[place] for place in usual_repeats(sample.decode_seconds)]
    return sum(values) / len(values) if values else 0.0


def decode_seconds(sample: Sample) -> float:
    """A prompt's share of the time of its rounds, averaged over repeats that are no outliers."""
    return usual_mean(sample, sample.decode_seconds)


def decoded_tokens(sample: Sample) -> int:
    """A prompt's output tokens that rounds decided, the tokens of `decode_seconds`."""
    return len(sample.token_ids) - sample.num_tokens_from_prefill


def rounds_of(sample: Sample) -> int:
    """A prompt's rounds, with and without proposals; those of `decode_seconds`."""
    without = sample.rounds_without_proposal - sample.num_tokens_from_prefill
    return len(sample.accepted_per_round) + without
