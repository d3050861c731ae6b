"""The measured window of one point at a rate, from the times of all its requests."""

from collections.abc import Mapping

from specdec_cli.experiment.folders.records import Key, Stretch
from specdec_cli.experiment.load.overload import in_flight, is_overloaded


def stretch_of(
    key: Key, num_measured: int, due: Mapping[int, float], done: Mapping[int, float]
) -> Stretch:
    """due, done: by number, in seconds on one clock; the measured ones have the first numbers. What
    is due once these are answered was not sent."""
    measured = [due[number] for number in range(num_measured)]
    begin, span = measured[0], measured[-1] - measured[0]
    end = max(done[number] for number in range(num_measured))
    window = span * num_measured / (num_measured - 1) if num_measured > 1 else 0.0
    if not window:
        window = end - begin
    due = {number: at for number, at in due.items() if at <= max(end, measured[-1])}
    num_answered = sum(begin <= at <= begin + window for at in done.values())
    arrived = [due[number] for number in sorted(due, key=due.__getitem__)]
    ends = [done.get(number, float("inf")) for number in due]
    under_way = in_flight(arrived, ends, measured)
    return Stretch(
        **key.as_dict(),
        window_seconds=window,
        num_requests=num_measured,
        num_answered=num_answered,
        num_unmeasured=len(due) - num_measured,
        max_in_flight=max(in_flight(arrived, ends, arrived)),
        overloaded=key.request_rate != "inf" and is_overloaded(under_way, num_answered),
    )
