"""The text of an output, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_cli.backends.base import Finished
from specdec_cli.core.types import FinishReason, SamplingParams
from specdec_cli.experiment.generation import baseline, output_of
from specdec_cli.prompts import Prompt
from specdec_cli.terminal.sinks import PlainText

WORDS = {0: "one", 1: "two", 2: "three"}


class SpaceDropping:
    """Decodes like sentencepiece: a space before every word but the first."""

    def finding(self, texts: tuple[str, ...]) -> "SpaceDropping":
        return self

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(WORDS[i] for i in token_ids)


def text_of(output: list[int], stop: tuple[str, ...], reason: FinishReason) -> str:
    job: Any = SimpleNamespace(
        plan=SimpleNamespace(tokenizer=SpaceDropping(), params=SimpleNamespace(stop=stop))
    )
    answer = Finished(0, [0], output, reason, max_output_tokens=8)
    return output_of(job, Prompt(0, "one"), answer, 1.0).text


@pytest.mark.parametrize(
    ("output", "stop", "want"),
    [
        ([1, 2], (" three",), "two"),
        ([2], (" three",), ""),  # decoding drops this space
        ([2], ("three",), ""),
        ([1, 2], ("wo th",), "t"),
    ],
)
def test_text_ends_before_its_stop_string(output: list[int], stop: tuple[str], want: str) -> None:
    assert text_of(output, stop, "stop") == want


def test_text_without_a_stop_is_whole() -> None:
    assert text_of([1, 2], (" four",), "length") == "two three"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_done_even_if_its_baseline_has_no_memory(ranks: int) -> None:
    def run(*_: object) -> None:
        raise torch.OutOfMemoryError

    plan = SimpleNamespace(
        params=SamplingParams(max_new_tokens=30),
        num_ranks=ranks,
        recipe=SimpleNamespace(run=SimpleNamespace(batch_size=1)),
    )
    job: Any = SimpleNamespace(plan=plan, token_ids=[(1, 2)])
    outputs: Any = [SimpleNamespace(index=0, error=None, token_ids=[1] * 30)]
    engine: Any = SimpleNamespace(run=run)
    if ranks == 1:
        assert baseline(engine, job, outputs) is None
    else:  # the other rank waits for this one
        with pytest.raises(torch.OutOfMemoryError):
            baseline(engine, job, outputs)


def test_texts_come_in_the_order_of_their_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    job: Any = SimpleNamespace(prompts=[Prompt(i, "x") for i in (0, 1)])
    sink = PlainText(job, None)
    for index in (1, 0):
        output: Any = SimpleNamespace(index=index, text=f"text {index}", error=None)
        sink.output(output)
    assert capsys.readouterr().out == ("==> prompt 0 <==\ntext 0\n==> prompt 1 <==\ntext 1\n")
