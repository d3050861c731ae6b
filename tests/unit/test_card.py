"""The card that a report opens with, its sections, and what it advises to start."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.experiment.folders.conclusions import Needed
from specdec_cli.experiment.statistics.evidence import needed_in_words
from specdec_cli.report.card import card
from specdec_cli.report.content import Content
from specdec_cli.report.findings import best_by_batch_size
from specdec_cli.report.folder import read_folder
from specdec_cli.report.page import page
from tests.report_helpers import (
    DRAFT,
    RECIPE,
    comparison_point,
    metrics,
    sweep_points,
    write_folder,
)

NEEDED = {"prompts": 240, "minutes": 12.4}
COST = {
    "draft": DRAFT, "target_weight_bytes": 16 << 30, "draft_weight_bytes": 2 << 30,
    "target_token_bytes": 131072.0, "draft_token_bytes": 32768.0, "longest_tokens": 1024,
}  # fmt: skip


def content_of(
    folder: Path, verdict: str, k: int = 3, recipe: dict[str, Any] = RECIPE, **more: Any
) -> Content:
    """A sweep of one batch size that ended with this verdict."""
    points = [p for p in sweep_points((0, 1, 3), (1,)) if p["draft"] in (None, DRAFT)]
    best = {
        "k": k, "draft": DRAFT if k else None, "tied": [k], "verdict": verdict,
        "significant": verdict == "use", "reason": "the run's own words",
        "needed": NEEDED if verdict == "inconclusive" else None,
    }  # fmt: skip
    file = write_folder(folder, points, recipe=recipe) / "summary.json"
    changed = {"best_by_batch_size": {"1": best}, **more}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return Content(read_folder(folder))


def test_a_card_of_what_pays(tmp_path: Path) -> None:
    content = content_of(tmp_path, "use", memory=[COST])
    card = dict(content.card)
    assert card["Verdict"].startswith("use it")
    assert card["Recommended"] == "k = 3 with draft-1b, batch size 1"
    assert card["Gain"].startswith("1.") and "95 % interval" in card["Gain"]
    told = "2,048 MiB of weights (12 % of the target's), and 25 % more cache for each token"
    assert (
        card["Memory"] == f"{told}; its weights take as much memory as 16 sequences of 1,024 tokens"
    )
    assert card["vLLM"].startswith("vllm serve org/target-8b --speculative-config")
    sglang = shlex.split(card["SGLang"])
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"
    assert sglang[sglang.index("--speculative-num-steps") + 1] == "3"
    assert sglang[-2:] == ["--speculative-draft-model-path", DRAFT]
    assert (
        "of proposals accepted" in card["Would change it"]
        or "batch size" in card["Would change it"]
    )


def test_sequences_that_no_longer_fit_on_a_device(tmp_path: Path) -> None:
    content = content_of(tmp_path, "use", memory=[COST | {"device_bytes": 24 << 30}])
    told = dict(content.card)["Memory"]
    assert told.endswith("64 sequences of 1,024 tokens fit without it, and 38 beside it")


def test_few_prompts_ask_for_more_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDED, "at_least", True)
    told = dict(content_of(tmp_path, "inconclusive").card)["Would change it"]
    assert told.startswith("more evidence: at least 240 prompts like these")


@pytest.mark.parametrize(("prompts", "told"), [(97, "97"), (116, "120"), (4321, "4,400")])
def test_the_card_rounds_as_the_verdict_does(
    prompts: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDED, "prompts", prompts)
    shown = dict(content_of(tmp_path, "inconclusive").card)["Would change it"]
    needed = Needed(prompts=prompts, minutes=1.0, at_least=False)
    for text in (shown, needed_in_words(needed, 20, is_disturbed=True)):
        assert f"about {told} prompts like these" in text


def test_inconclusive_runs_advise_nothing(tmp_path: Path) -> None:
    content = content_of(tmp_path, "inconclusive")
    card = dict(content.card)
    assert content.headline == "Inconclusive at batch size 1: the run's own words."
    assert card["Verdict"].startswith("inconclusive") and "Recommended" not in card
    assert "vLLM" not in card and "SGLang" not in card
    results = content.tables["results"]
    assert results is not None and not results.strong, "no row is marked as recommended"
    assert content_of(tmp_path / "use", "use").tables["results"].strong
    assert content.reasons == [], "the headline has it"
    assert card["Would change it"] == (
        "more evidence: about 240 prompts like these, about 13 quiet minutes"
    )
    found = content.deployment
    assert found is not None and found.speculative_config is None is found.rehearsal
    assert found.notes[0].startswith("No recommendation: ")
    assert found.recommendation == [content.headline]


@pytest.mark.parametrize(
    ("verdicts", "schedule"),
    [
        ({1: "use", 8: "inconclusive"}, [[1, 7, 3], [8, 8, 0]]),
        ({1: "inconclusive", 8: "use", 32: "use"}, [[1, 7, 0], [8, 32, 3]]),
        ({1: "use", 8: "inconclusive", 32: "none"}, [[1, 7, 3], [8, 32, 0]]),
        ({1: "use", 8: "inconclusive", 32: "use"}, [[1, 7, 3], [8, 31, 0], [32, 32, 3]]),
    ],
)
def test_a_schedule_advises_no_k_where_nothing_was_decided(
    verdicts: dict[int, str], schedule: list[list[int]], tmp_path: Path
) -> None:
    points = [p for p in sweep_points((0, 1, 3), [*verdicts]) if p["draft"] in (None, DRAFT)]
    file = write_folder(tmp_path, points) / "summary.json"
    bests = {
        str(size): {
            "k": 0 if verdict == "none" else 3, "draft": None if verdict == "none" else DRAFT,
            "tied": [3], "verdict": verdict, "significant": verdict == "use", "reason": "its words",
        }
        for size, verdict in verdicts.items()
    }  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text()) | {"best_by_batch_size": bests}))
    found = Content(read_folder(tmp_path)).deployment
    assert found is not None and found.speculative_config is not None
    assert found.speculative_config["num_speculative_tokens_per_batch_size"] == schedule
    (size,) = (size for size, verdict in verdicts.items() if verdict == "inconclusive")
    assert f"Not decided at batch size {size}: its words." in found.notes
    assert any("has k = 0 for sizes with inconclusive verdicts" in one for one in found.notes)


def test_what_is_not_decided_names_its_batch_size(tmp_path: Path) -> None:
    points = [p for p in sweep_points((0, 3), (1, 8)) if p["draft"] in (None, DRAFT)]
    file = write_folder(tmp_path, points) / "summary.json"
    best = {"k": 3, "draft": DRAFT, "tied": [3], "verdict": "inconclusive"}
    bests = {size: best | {"reason": f"the words of {size}"} for size in ("1", "8")}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"best_by_batch_size": bests}))
    found = Content(read_folder(tmp_path)).deployment
    assert found is not None and found.notes == [
        "No recommendation at batch size 1: the words of 1. "
        "No recommendation at batch size 8: the words of 8."
    ]


def test_no_speculation_has_a_card_too(tmp_path: Path) -> None:
    card = dict(content_of(tmp_path, "none", k=0).card)
    assert card["Verdict"].startswith("no speculation") and card["vLLM"].endswith("org/target-8b")
    assert card["SGLang"].endswith("--model-path org/target-8b")
    assert "Fastest with proposals" in card and "Recommended" not in card


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("package:llm-small", "scripts.speculators.store package:llm-small FOLDER --form plain"),
        ("a b/small-q8.gguf", "scripts.speculators.store 'a b/small-q8.gguf' FOLDER --form plain"),
        ("demo:target", "is bundled"),
        ("org/target-8b", None),
    ],
)
def test_what_to_put_in_place_of_a_model(target: str, told: str | None, tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    recipe["target"]["model"] = target
    recipe["draft"]["model"] = "demo:nobody-runs-it"
    content = content_of(tmp_path, "use", recipe=recipe)
    assert content.deployment is not None
    told_of = (f"{target} ", "demo:nobody")
    said = [note for note in content.deployment.notes if note.startswith(told_of)]
    assert [told in note for note in said] == ([True] if told else [])
    assert [told for title, told in content.card if title == "For servers"] == said


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (0.0, None),
        (0.004, None),
        (0.05, "prompts or a draft with fewer than 5 % of proposals accepted"),
        (0.97, "prompts or a draft with more than 97 % of proposals accepted"),
        (None, "a cheaper round: no acceptance rate would make up for its cost here"),
    ],
)
def test_the_acceptance_that_would_change_a_verdict(
    needs: float | None, told: str | None, tmp_path: Path
) -> None:
    content = content_of(tmp_path, "use")
    points = list(content.run.points)
    place = next(i for i, p in enumerate(points) if p.k == 3)
    even = points[place].break_even
    assert even is not None
    even = even.model_copy(update={"draft_acceptance_rate": needs})
    points[place] = points[place].model_copy(update={"break_even": even})
    run = replace(content.run, points=tuple(points))
    found = card(run, best_by_batch_size(run), None)
    said = [text for title, text in found if title == "Would change it"]
    assert said[-1].startswith("a different batch size than 1")
    assert [text.startswith(told or "?") for text in said[:-1]] == ([True] if told else [])


SGLANG = {
    "ngram": {"algorithm": "NGRAM", "ngram-max-bfs-breadth": "1"},
    "eagle3": {"algorithm": "EAGLE3", "num-steps": "3", "eagle-topk": "1"},
    "mtp": {"algorithm": "NEXTN", "num-steps": "3", "eagle-topk": "1"},
    "dflash": {"algorithm": "DFLASH"},
    "dspark": {"algorithm": "DSPARK", "dspark-block-size": "3"},
}


@pytest.mark.parametrize("method", SGLANG)
def test_methods_of_sglang(method: str, tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    recipe["speculation"]["method"] = method
    found = content_of(tmp_path, "use", recipe=recipe).deployment
    assert found is not None and found.sglang_command is not None
    parts = shlex.split(found.sglang_command)
    told = {a: b for a, b in pairwise(parts) if a.startswith("--speculative-")}
    told.pop("--speculative-draft-model-path", None)
    expected = SGLANG[method] | {"num-draft-tokens": "4"}
    assert told == {f"--speculative-{name}": value for name, value in expected.items()}


@pytest.mark.parametrize("method", ["peagle", "pard"])
def test_methods_that_sglang_lacks(method: str, tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    recipe["speculation"]["method"] = method
    found = content_of(tmp_path, "use", recipe=recipe).deployment
    assert found is not None and found.sglang_command is None


def test_sections_begin_with_their_conclusion_and_long_tables_are_folded(tmp_path: Path) -> None:
    points = sweep_points()
    content = Content(read_folder(write_folder(tmp_path, points)))
    text = page(content, [])
    assert text.index('<dl class="card">') < text.index("<section") if content.card else True
    speed = text[text.index("<h2>Speed</h2>") :]
    assert speed.startswith(f"<h2>Speed</h2><p>{content.headline[:20]}")
    folded, shown = text.index("<details><summary>Every point: "), text.index("table-results")
    assert folded < shown and f"{len(points)} rows" in text[folded:shown]
    plotless = text[text.index("<h2>Latency</h2>") :]
    assert "with draft-1b the first token takes" in plotless.partition("<details>")[0].lower()
    few = page(content_of(tmp_path / "few", "use"), [])
    assert "<details><summary>Every point" not in few and "table-results" in few


def test_a_comparison_s_memory_is_that_of_its_pair(tmp_path: Path) -> None:
    folder = tmp_path / "compare"
    shutil.copytree(Path(__file__).parents[1] / "runs" / "compare", folder)
    summary = json.loads((folder / "summary.json").read_text())
    pair = {"draft": None, "target_tp": 1, "draft_tp": 1}
    other = COST | pair | {"draft_tp": 2, "draft_weight_bytes": 0}
    for costs, told in (
        ([other, COST | pair], "on a rank with a part of the draft, 2,048 MiB"),
        ([other], ""),
    ):
        (folder / "summary.json").write_text(json.dumps(summary | {"memory": costs}))
        assert dict(Content(read_folder(folder)).card).get("Memory", "").startswith(told)
        assert told or "Memory" not in dict(Content(read_folder(folder)).card)


def compared(
    folder: Path, verdict: str, gains: dict[tuple[int, int], float], **extra: Any
) -> Content:
    """A comparison that ended with this verdict. gains: the speed-up of each pair over k = 0 at its
    own target TP; target TP 1 decodes fastest. extra: further fields of the best pair."""
    speeds = {1: 200.0, 2: 50.0}
    fastest = max(gains, key=lambda pair: gains[pair] * speeds[pair[0]])
    points = []
    for target_tp, speed in speeds.items():
        own = {tp: gain for (of, tp), gain in gains.items() if of == target_tp}
        for draft_tp, gain in {None: 1.0, **own}.items():
            figures = metrics(5 if draft_tp else 0, 1, 0.5, 1.0, 10.0)
            figures["decode_tokens_per_second"] = gain * speed
            found = comparison_point(target_tp, draft_tp, 1, figures, figures)
            points.append(found | {"speedup": gain})
    best = {
        "target_tp": fastest[0], "draft_tp": fastest[1], "k": 5, "tied": [], "reason": "its words",
        "verdict": verdict, "significant": verdict == "use", **extra,
    }  # fmt: skip
    file = write_folder(folder, points) / "summary.json"
    changed = {"best": best, "best_by_batch_size": {"1": best}}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return Content(read_folder(folder))


@pytest.mark.parametrize("verdict", ["none", None])
def test_a_pair_slower_than_plain_decoding_is_not_advised(verdict: str, tmp_path: Path) -> None:
    content = compared(tmp_path, verdict, {(1, 1): 0.5, (2, 1): 1.4, (2, 2): 0.3})
    assert content.headline == (
        "No speculation at batch size 1: plain decoding is fastest, on target TP 1. The best with "
        "proposals, target TP 1 with draft TP 1, is 0.50×."
    )
    card = dict(content.card)
    assert card["Verdict"].startswith("no speculation") and card["Gain"] == "0.50×"
    assert card["Fastest with proposals"] == "target TP 1 with draft TP 1, batch size 1"
    found = content.deployment
    assert found is not None and found.speculative_config is None
    assert card["vLLM"] == "vllm serve org/target-8b" and "speculative" not in card["SGLang"]


def test_a_pair_that_gains_too_little_is_not_advised(tmp_path: Path) -> None:
    content = compared(tmp_path, "none", {(1, 1): 1.01, (2, 1): 1.4})
    assert content.headline.startswith(
        "No speculation at batch size 1: nothing is faster than plain decoding beyond chance. "
        "The best with proposals, target TP 1 with draft TP 1, is 1.01×"
    )
    assert "speculative" not in dict(content.card)["vLLM"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"speedup_vs_plain": 1.19, "speedup_vs_plain_ci": [1.1, 1.3]}, "1.19×{} (95 % interval"),
        ({}, "1.20×{}"),  # an earlier version recorded no gain
    ],
)
def test_the_gain_is_over_the_fastest_plain_decoding_of_any_target_tp(
    extra: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Not over the slow plain decoding of the pair's own target TP."""
    content = compared(tmp_path, "use", {(1, 1): 0.3, (2, 1): 4.8}, **extra)
    assert dict(content.card)["Gain"].startswith(told.format(""))
    words = told.format(" the speed of plain decoding")
    start = "Best at batch size 1: target TP 2 with draft TP 1, "
    assert content.headline.startswith(start + words)
    (tmp_path / "summary.json").unlink()  # the comparison was interrupted
    unfinished = Content(read_folder(tmp_path)).headline
    assert "target TP 2 with draft TP 1, 1.20× the speed of plain decoding." in unfinished


def test_plain_decoding_is_advised_at_its_degree(tmp_path: Path) -> None:
    found = compared(tmp_path, "use", {(1, 1): 0.2, (2, 1): 1.9}).deployment
    assert found is not None and "--tensor-parallel-size 2" in found.command
    found = compared(tmp_path, "none", {(2, 1): 0.9}).deployment
    assert found is not None and "--tensor-parallel-size" not in found.command


def test_an_open_comparison_shows_the_pair_that_its_words_name(tmp_path: Path) -> None:
    """Not the pair of the largest speed-up, which has another baseline."""
    card = dict(compared(tmp_path, "inconclusive", {(1, 1): 0.9, (2, 1): 1.4}).card)
    assert card["Fastest with proposals"].startswith("target TP 1 with draft TP 1")
    assert card["Gain"].startswith("0.90×")


def test_servers_do_not_tell_their_memory(tmp_path: Path) -> None:
    folder = content_of(tmp_path, "use").run.path
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe + "\nengine: {kind: vllm}\n")
    assert dict(Content(read_folder(folder)).card)["Memory"].startswith("not reported by")


def test_a_sweep_that_compared_nothing_is_no_verdict_against_speculation(tmp_path: Path) -> None:
    why = "nothing was compared with k = 0: k = 0 has no round"
    best = {"k": None, "draft": None, "tied": [], "reason": why, "verdict": "inconclusive"}
    content = content_of(tmp_path, "inconclusive", best_by_batch_size={"1": best})
    assert content.headline == f"Inconclusive at batch size 1: {why}."
    found = content.deployment
    assert found is not None and found.speculative_config is None
    assert found.notes == [f"No recommendation: {why}."]
    assert why in page(content, [])


def test_every_media_query_is_one_that_browsers_take(tmp_path: Path) -> None:
    """A browser drops the whole block of a query that it cannot read, such as `(not print)`."""
    queries = re.findall(r"@media ([^{]+) {", page(content_of(tmp_path, "use"), []))
    one = r"(screen|print|\([a-z-]+: [a-z0-9]+\))"
    assert len(queries) >= 4
    assert all(re.fullmatch(f"{one}( and {one})*", query) for query in queries)
