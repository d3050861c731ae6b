"""Shows the progress of a sweep or a comparison on the terminal, as lines or as a live table."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group
from rich.table import Table

from specdec_cli.core.figures import stages_in
from specdec_cli.experiment.folders.records import Key, Pair, Point, Sample
from specdec_cli.experiment.folders.samples import without_errors
from specdec_cli.experiment.measure import Watcher
from specdec_cli.experiment.points import Failure, is_impossible, most_speedup
from specdec_cli.experiment.statistics.stats import among_rounds, measured_speed, speedup
from specdec_cli.report import cells as cell
from specdec_cli.terminal import render
from specdec_cli.terminal.progress import Ticker, can_redraw
from specdec_cli.text import one_line, say

NO_DRAFT = "–"
_LINE_EVERY = 0.1  # share of the samples after which the time left is printed again


class _Progress(Watcher):
    """Prints a line for each finished point.

    unseen: a function that returns the samples that other processes have written since it was last
        called.
    """

    def __init__(self, total: int, unseen: Callable[[], Iterable[Sample]] = tuple) -> None:
        self._total = total
        self._unseen = unseen

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            self.told(point_line(point))

    def failed(self, pair: Pair, batch_size: int, failure: Failure) -> None:
        self.told(f"{pair}, batch size {batch_size}: {failure.status}: {failure.reason}")


class SweepLines(_Progress):
    """Prints progress on stderr: a line for each finished point, the time left after each tenth of
    the samples, and the number of samples after half a minute without output."""

    def __init__(self, total: int, unseen: Callable[[], Iterable[Sample]] = tuple) -> None:
        super().__init__(total, unseen)
        self._done = 0
        self._said = 0
        self._began: float | None = None
        self._stage = "getting ready"
        self._ticker = Ticker(self._line)

    def told(self, line: str) -> None:
        self._ticker.say(line)

    def close(self) -> None:
        self._ticker.close()

    def _line(self) -> str:
        self._done += sum(1 for _ in self._unseen())
        return f"{self._stage}: {self._done} of {self._total} samples"

    def begin(self, what: object) -> None:
        self._stage = str(what)
        if what == "measuring" and self._began is None:
            self._began = time.monotonic()

    def sample(self, key: Key, sample: Sample) -> None:
        self._done += 1
        step = max(1, math.ceil(self._total * _LINE_EVERY))
        if self._done // step > self._said and self._began is not None:
            self._said = self._done // step
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            minutes, rest = divmod(round(left), 60)
            done = f"{self._done} of {self._total} samples"
            self.told(f"{self._stage}: {done}, {minutes}:{rest:02d} left")


class SweepTable(_Progress):
    """Shows a live table and a progress bar with the time left; needs a terminal."""

    def __init__(self, total: int, unseen: Callable[[], Iterable[Sample]] = tuple) -> None:
        super().__init__(total, unseen)
        self._progress = render.progress_bar()
        self._task = self._progress.add_task("getting ready", total=total)
        self._samples: dict[Key, dict[int, Sample]] = defaultdict(dict)
        self._latest: Key | None = None  # the key of the latest sample; its batch size is shown
        self._live = render.live_view(self._render)

    def begin(self, what: object) -> None:
        self._live.start()
        self._progress.update(self._task, description=str(what))

    def sample(self, key: Key, sample: Sample) -> None:
        self._latest = key
        self._samples[key][sample.place] = sample
        self._progress.advance(self._task)

    def told(self, line: str) -> None:
        say(line)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        for sample in self._unseen():
            self.sample(Key.of(sample), sample)
        shown = {
            key: dict(of)
            for key, of in list(self._samples.items())  # a copy: another thread adds samples
            if self._latest is not None and key.batch_size == self._latest.batch_size
        }
        plain = {Pair.of(key): without_errors(of) for key, of in shown.items() if key.k == 0}
        has_degrees = any(key.target_tp is not None for key in shown)
        names = ("target TP", "draft TP") if has_degrees else ("draft",)
        rows = []
        keys = sorted(shown, key=lambda key: (Pair.of(key), key.draft or "", key.k))
        for key in keys:
            own = without_errors(shown[key])
            draft = one_line(key.draft or NO_DRAFT)
            drafts, accepted = (
                sum(getattr(s, name) for s in own.values())
                for name in ("num_drafts", "num_accepted")
            )
            # The speed-up so far covers only prompts that were also decoded at k = 0.
            gain = speedup(own, plain.get(Pair.of(key), {}))
            ratio = gain.value if gain is not None else math.nan
            is_result = math.isfinite(ratio) and not is_impossible(ratio, most_speedup(own))
            rows.append(
                (
                    *((str(key.target_tp), str(key.draft_tp)) if has_degrees else (draft,)),
                    *(str(key.batch_size), str(key.k), str(len(shown[key]))),
                    f"{1 + accepted / max(1, drafts):.2f}",
                    f"{measured_speed(own.values()).value:.1f}",
                    f"{ratio:.2f}" if is_result else "",
                )
            )
        headings = (*names, "batch", "k", "prompts", "tokens a round", "tokens/s", "x k = 0")
        latest = keys.index(self._latest) if self._latest in keys else -1
        return Group(self._progress, self._fitting_table(headings, rows, latest))

    def _fitting_table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], latest: int
    ) -> Table:
        """Return a table of all rows or, if it is too high for the terminal, of row `latest` and as
        many others as fit. rich would leave out the last rows."""

        def table_of(some: Sequence[Sequence[str]]) -> Table:
            columns = {heading: [row[i] for row in some] for i, heading in enumerate(headings)}
            spare = ["batch", "prompts", "tokens a round"]
            return render.table_within(screen.width, columns, spare=spare, names=["draft"])

        screen = self._progress.console
        above, height = (len(screen.render_lines(table_of(some))) for some in ([], rows))
        room = screen.height - 1 - above  # the progress bar takes one line
        if (height := height - above) <= room:
            return table_of(rows)
        fits = max(1, room * len(rows) // height)  # long names take several lines
        last = max(fits, latest + 1)
        return table_of(rows[last - fits : last])


def watcher(total: int, unseen: Callable[[], Iterable[Sample]] = tuple, *, quiet: bool) -> Watcher:
    """Choose how to show progress: as a live table if stderr is a terminal that can redraw, as
    lines if it is not, and not at all if `quiet`.

    unseen: as for `_Progress`.
    """
    if quiet:
        return Watcher()
    return (SweepTable if can_redraw() else SweepLines)(total, unseen)


def point_line(point: Point) -> str:
    """Describe a point in one line for logs."""
    at = f"batch {point.batch_size}" if point.request_rate is None else point.level_in_words
    name = f"{point.draft or 'no draft'}, {at}, k={point.k}"
    if point.target_tp is not None:
        of = f"draft TP {point.draft_tp}" if point.k else "k = 0"
        name = f"target TP {point.target_tp}, {of}, batch size {point.batch_size}"
    metrics = point.metrics
    if metrics is None:
        predicted = point.predicted_speedup
        about = f", predicted {predicted:.2f}x" if predicted is not None else ""
        return f"{name}: {point.status}: {point.reason or ''}{about}"
    line = f"{name}: {metrics.decode_tokens_per_second:.1f} tokens/s"
    if point.load is not None and point.load.overloaded:
        line += f", overloaded at {point.load.achieved_rate or 0:.2f} answers/s"
    if point.impossible_speedup is not None:
        line += ", an impossible speed-up"
    elif point.speedup is not None:
        line += f", {point.speedup:.2f}x{cell.span_after(point.speedup_ci)}"
    if metrics.mean_acceptance_length is None:
        return f"{line}, acceptance not known"
    among = among_rounds(metrics)
    line += f", {metrics.mean_acceptance_length:.2f} tokens a round{among}"
    if point.target_tp is None:
        return line
    stages = ", ".join(f"{stage} {metrics.stage_ms(stage):.2f}" for stage in stages_in([metrics]))
    return f"{line}, round {metrics.round_ms:.2f} ms ({stages})"
