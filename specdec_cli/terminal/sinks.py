"""Sinks, which receive a run's outputs: the terminal, plain text, a progress bar and a run folder.

All sinks have the same methods.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby

from rich.segment import Segment, Segments

from specdec_cli.backends.base import Finished, OnRound, Written
from specdec_cli.core.detokenize import TextStream
from specdec_cli.experiment.folders.generate_folder import SAMPLES, key_of
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.generation import Job, Output, output_of
from specdec_cli.experiment.measure import sample_of
from specdec_cli.terminal.progress import Ticker, can_redraw
from specdec_cli.terminal.render import (
    ACCEPTED,
    HEADING,
    PROMPT,
    console,
    progress_bar,
)
from specdec_cli.text import inert


class Sink:
    """Receives tokens as they are generated. When a prompt is finished, it receives the answer as
    the engine returned it, and then the `Output` made from the answer.

    Subclasses override only the methods they need.
    """

    def tokens(self, written: Written, *, is_last: bool) -> None:
        """Receive new tokens of one prompt; `written` has no tokens if the prompt could not run."""

    def answer(self, answer: Finished) -> None: ...

    def output(self, output: Output) -> None: ...

    def close(self) -> None: ...


class LiveText(Sink):
    """Prints each prompt, dimmed, and its completion while it is generated; accepted draft tokens
    are tinted. It works only on a terminal and with one sequence at a time. Lines are not
    wrapped, and tabs are kept."""

    def __init__(self, job: Job) -> None:
        self._tokenizer = job.plan.tokenizer
        self._several = len(job.prompts) > 1
        # Characters to hold back, because they may be the start of a stop string.
        self._hold = max((len(s) for s in job.plan.params.stop), default=1) - 1
        self._console = console(sys.stdout)
        self._pending: list[tuple[str, bool]] = []  # (character, whether from an accepted token)
        self._streams: dict[int, TextStream] = {}
        self._written: dict[int, str] = {}
        self._is_open = False  # whether a completion is in progress
        self._prompts = {
            p.index: (p.text, ids) for p, ids in zip(job.prompts, job.token_ids, strict=True)
        }

    def tokens(self, written: Written, *, is_last: bool) -> None:
        index = written.index
        if not written.token_ids:
            return
        stream = self._streams.get(index)
        if stream is None:
            shown, prompt_ids = self._prompts[index]
            stream = self._streams[index] = TextStream(self._tokenizer, prompt_ids)
            self._written[index] = ""
            self._is_open = True
            if self._several:
                gap = "\n" if len(self._streams) > 1 else ""
                self._write([Segment(f"{gap}── prompt {index} ──\n", HEADING)])
            text = self._tokenizer.decode(prompt_ids) if shown is None else shown
            self._write([Segment(inert(text), PROMPT)])
        for place, token in enumerate(written.token_ids):
            piece = stream.feed(token)
            self._written[index] += piece
            self._pending += ((character, place < written.num_accepted) for character in piece)
        if not is_last:
            # `output` prints the last tokens, because it first cuts the text at a stop string.
            self._flush(len(self._pending) - self._hold)

    def output(self, output: Output) -> None:
        if output.error is not None or output.index not in self._written:
            return  # nothing was printed: there is no text, or an earlier run wrote it
        whole = self._tokenizer.decode(output.token_ids)
        if whole.startswith(written := self._written[output.index]):
            # The stream held back bytes of an incomplete character; `whole` decodes them too.
            self._pending += ((character, False) for character in whole[len(written) :])
        self._end(num_cut=len(whole) - len(output.text))

    def close(self) -> None:
        if self._is_open:  # interrupted: end the line, so that the next message starts on a new one
            self._end(num_cut=0)

    def _end(self, num_cut: int) -> None:
        """Finish a completion without its last `num_cut` characters."""
        self._flush(len(self._pending) - num_cut)
        self._pending.clear()
        self._console.print()
        self._is_open = False

    def _flush(self, count: int) -> None:
        ready = self._pending[: max(0, count)]
        del self._pending[: len(ready)]
        self._write(
            Segment(inert("".join(c for c, _ in run)), ACCEPTED if accepted else None)
            for accepted, run in groupby(ready, key=lambda item: item[1])
        )

    def _write(self, segments: Iterable[Segment]) -> None:
        # Use segments, because rich turns tabs in a `Text` into spaces.
        self._console.print(Segments(segments), end="")


class PlainText(Sink):
    """Prints completions in prompt order, with headings if there are several.

    bar: the progress bar to hide while text is written to its terminal; None if there is no bar.
    """

    def __init__(self, job: Job, bar: "PromptProgress | None") -> None:
        self._bar = bar if sys.stdout.isatty() else None
        self._waiting = [p.index for p in reversed(job.prompts)]
        self._several = len(job.prompts) > 1
        self._finished: dict[int, Output] = {}

    def output(self, output: Output) -> None:
        self._finished[output.index] = output
        while self._waiting and self._waiting[-1] in self._finished:
            ready = self._finished.pop(self._waiting.pop())
            heading = f"==> prompt {ready.index} <==\n" if self._several else ""
            if ready.error is not None and not self._several:
                continue
            with self._bar.hidden() if self._bar is not None else nullcontext():
                sys.stdout.write(f"{heading}{inert(ready.text)}\n")
                sys.stdout.flush()


class PromptProgress(Sink):
    """A progress bar over prompts on stderr, if that is a terminal that can redraw."""

    def __init__(self, job: Job) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task("prompts", total=len(job.prompts))

    def tokens(self, written: Written, *, is_last: bool) -> None:
        # Starting the bar hides the cursor, so start it only now: from here on, `close` is certain
        # to be called, and it restores the cursor.
        self._bar.start()

    def output(self, output: Output) -> None:
        self._bar.advance(self._task)

    def close(self) -> None:
        self._bar.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while something else is written."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


class PromptLines(Sink):
    """Prints a run's progress on stderr after every half minute without output. It replaces the
    progress bar if stderr is not a terminal that can redraw."""

    def __init__(self, job: Job) -> None:
        self._total, self._done, self._tokens = len(job.prompts), 0, 0
        self._ticker = Ticker(self._line)

    def _line(self) -> str:
        return f"{self._done} of {self._total} prompts, {self._tokens} tokens"

    def tokens(self, written: Written, *, is_last: bool) -> None:
        self._tokens += len(written.token_ids)

    def output(self, output: Output) -> None:
        self._done += 1

    def close(self) -> None:
        self._ticker.close()


class SampleFile(Sink):
    """Writes samples.jsonl: each finished prompt is written to disk before the next round."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._key = key_of(job)
        self._categories = {p.index: p.category for p in job.prompts}
        self._limit = job.plan.params.max_new_tokens
        self._job = job
        self._folder = folder

    def answer(self, answer: Finished) -> None:
        category = self._categories[answer.index]
        peak = self._job.backend.peak_memory(self._job.plan)
        self._folder.append(SAMPLES, sample_of(self._key, category, [answer], self._limit, peak))

    def close(self) -> None:
        self._folder.close()


def shows_live_text(job: Job) -> bool:
    """Return whether completions are printed while they are generated."""
    return sys.stdout.isatty() and job.plan.recipe.run.batch_size == 1


def sinks_for(job: Job, folder: RunFolder | None, *, as_json: bool, quiet: bool) -> list[Sink]:
    """Make the sinks for one run."""
    sinks: list[Sink] = []
    is_live = not as_json and shows_live_text(job)
    bar = PromptProgress(job) if len(job.prompts) > 1 and not quiet and not is_live else None
    if folder is not None:  # first, so that outputs reach the disk even if a pipe is closed
        sinks.append(SampleFile(job, folder))
    if not as_json:
        sinks.append(LiveText(job) if is_live else PlainText(job, bar))
    if bar is not None:
        sinks.append(bar)
    if not quiet and not can_redraw():
        sinks.append(PromptLines(job))
    return sinks


def collector(
    job: Job, sinks: list[Sink], earlier: Sequence[Output] = ()
) -> tuple[OnRound, Callable[[], list[Output]]]:
    """Return a callback for `Session.run`, and a function that returns all outputs after the run,
    in prompt order.

    The callback passes new tokens to the sinks, and each answer as soon as it is finished.
    earlier: outputs of an earlier run of the same job, which the sinks receive at once.
    """
    prompts = {p.index: p for p in job.prompts}
    outputs: dict[int, Output] = {}
    for output in earlier:
        outputs[output.index] = output
        for sink in sinks:
            sink.output(output)

    def on_round(written: Sequence[Written], finished: list[Finished]) -> None:
        ended = {one.index: one for one in finished}
        for some in written:
            answer = ended.get(some.index)
            for sink in sinks:
                sink.tokens(some, is_last=answer is not None)
            if answer is None:
                continue
            output = output_of(job, prompts[some.index], answer, answer.seconds)
            outputs[some.index] = output
            for sink in sinks:
                sink.answer(answer)
                sink.output(output)

    def finish() -> list[Output]:
        return [outputs[p.index] for p in job.prompts]

    return on_round, finish
