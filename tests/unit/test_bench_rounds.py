"""The rows of scripts/bench/rounds.py, over an engine whose repeats have given times."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_cli.engine.build

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


class GivenTimes:
    """An engine whose rounds take the next of `times` in each run, and whose target takes half."""

    batch_size, target = 1, SimpleNamespace(vocab_size=97, mixtures=None)

    def __init__(self, times: list[float]) -> None:
        self.times = iter(times)

    def with_batch_size(self, batch_size: int) -> "GivenTimes":
        return self

    def run(self, *args: Any) -> Any:
        ms = next(self.times)
        found: dict[str, Any] = {"num_rounds": 8, "num_drafts": 8, "num_accepted_tokens": 8}
        found |= {"num_rounds_without_proposal": 0, "decode_tokens_per_second": 1000 / ms}
        found |= dict.fromkeys(("draft_ms", "sample_ms", "commit_ms"), 0.0)
        found |= {"verify_ms": ms / 2, "round_ms": ms, "distinct_experts": None, "as_dict": dict}
        return SimpleNamespace(metrics=SimpleNamespace(**found))

    def forget_rounds(self) -> None:
        pass


def test_a_row_has_the_stages_of_its_median_repeat_and_no_ratio_before_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each k runs twice before its three repeats: for the capture, and as a warm-up."""
    engine = GivenTimes([1, 1, 20, 30, 10, 1, 1, 40, 60, 80])
    monkeypatch.syspath_prepend(str(BENCH))
    rates = SimpleNamespace(measured_rates=lambda graph_times: (1.0, 1.0))
    stubs: dict[str, Any] = {"rates": rates, "graph_times": SimpleNamespace(graph_times=None)}
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(specdec_cli.engine.build, "build", lambda *args, **more: engine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(sys, "argv", ["rounds.py", "demo", "--k", "4,0", "--set", "run.device=cpu"])
    runpy.run_path(str(BENCH / "rounds.py"))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| 1 |" in line]
    told = [(row[1], row[5], row[8], row[10]) for row in rows]
    assert told == [
        ("4", "10.00", "20.00 (10.00 – 30.00)", "–"),
        ("0", "30.00", "60.00 (40.00 – 80.00)", "1.00"),
    ]
