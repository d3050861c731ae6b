"""Measuring one point at a rate: its requests arrive, and the measured ones become samples."""

from collections.abc import Callable, Sequence

from specdec_cli.backends.base import Finished, Session
from specdec_cli.experiment.folders.records import Key, Sample, Stretch, given
from specdec_cli.experiment.generation import Job, requests
from specdec_cli.experiment.load.arrivals import Offered, process_of
from specdec_cli.experiment.load.stream import Stream
from specdec_cli.experiment.load.window import stretch_of
from specdec_cli.experiment.measure import sample_of


def measure_at_rate(
    key: Key,
    job: Job,
    offered: Offered,
    session: Session,
    peak_memory: Callable[[], int],
    on_sign: Callable[[], None],
) -> tuple[list[Sample], Stretch, float]:
    """Have requests arrive at the key's rate. Every rank calls this.

    Returns the samples of the point, whole with the record of its window, and the seconds of rounds
    and prefill passes, those of requests that are not measured too.
    """
    assert key.request_rate is not None
    repeats, params = job.plan.recipe.run.repeats, job.plan.params
    stream = Stream(
        prompts=requests(job),
        process=process_of(offered.arrivals),
        rate=key.request_rate,
        num_measured=offered.num_measured(len(job.prompts), repeats, key.request_rate),
        seed=offered.seed,
    )
    found = {one.index: one for one in session.arrive(stream, key.k, params, on_sign)}
    start = found[0].arrived_at - stream.due[0]
    due = {number: start + at for number, at in stream.due.items()}
    samples = []
    for number in range(stream.num_measured):
        prompt = job.prompts[number % len(job.prompts)]
        own = found[number]
        made = sample_of(key, prompt.category, [own], params.max_new_tokens, peak_memory())
        update: dict[str, object] = {"index": prompt.index, "request": number}
        update |= {"due": own.arrived_at - due[0], **_from_due(own)}
        if made.counted is not None:
            update["counted"] = None
        samples.append(made.model_copy(update=update))
    last = next((n for n in reversed(range(len(samples))) if samples[n].could_run), None)
    if last is not None:
        samples[last] = _with_common(samples[last], list(found.values()))
    stretch = stretch_of(key, stream.num_measured, due, stream.done)
    return samples, stretch, sum(one.seconds for one in found.values())


def _with_common(sample: Sample, found: Sequence[Finished]) -> Sample:
    """The sample with what a server told of all requests together, which stood with any of them.

    Counts are of the others too, and needed only where the rounds of requests are not known.
    """
    served = [one.served for one in found if one.served is not None]
    remarks = sorted({code for one in served for code in one.remarks} - {*sample.remarks})
    counted = next((one.counted for one in served if one.counted is not None), None)
    if sample.engine is None or sample.engine.acceptance_source != "counters":
        counted = None
    every = [*sample.remarks, *remarks] or None
    return sample.model_copy(update=given(counted=counted, remarks=every))


def _from_due(own: Finished) -> dict[str, object]:
    """Latencies from the time at which a request was due, its wait for a slot included."""
    lag = own.served.send_lag_ms if own.served is not None else None
    first, last = (
        [] if at is None or own.error is not None else [(at - own.arrived_at) * 1e3]
        for at in (own.first_token_at, own.finished_at)
    )
    return {"ttft_ms": first, "e2el_ms": last, **given(send_lag_ms=lag)}
