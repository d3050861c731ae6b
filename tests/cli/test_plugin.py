"""Plugins: the page's own code through the commands, and the messages for bad ones."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specdec_kernels import ops
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_cli import plugged, plugin
from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, TokenDist, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.state import BatchState, Texts
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.plan import plan
from specdec_cli.errors import UsageError
from specdec_cli.models.description import DraftPlace
from specdec_cli.plugged import PluggedMethod, PluggedPolicy, PluggedRule, built
from specdec_cli.recipe import SpeculationSection, load_recipe
from specdec_cli.recipe.choices.registry import METHODS, POLICIES, RULES
from specdec_cli.recipe.watched import WatchedOptions
from specdec_cli.text import digest
from tests.cli.generate_helpers import ROOT, Result
from tests.cli.sweep_helpers import specdec
from tests.fixtures import NEEDS_CUDA

pytestmark = pytest.mark.usefixtures("small_demo", "no_pixels")

PAGE = (ROOT / "docs" / "methods.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
SHORT = ("--prompt", "def add(a, b):\n", "--max-new-tokens", "24", "--ignore-eos", "--json")
SAMPLED = (*SHORT, "--temperature", "1")
REGISTRIES = (METHODS, RULES, POLICIES)


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Registries as they were, after the test."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    plugin.LOADED.clear()
    for registry, held in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(held)  # type: ignore[arg-type]


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Path]:
    """The files of the page, by their names."""
    made = {name: tmp_path / f"{name}.py" for name in FILES}
    for name, code in FILES.items():
        made[name].write_text(code)
    return made


def written(tmp_path: Path, code: str) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(code)
    return file


def tokens(result: Result) -> list[int]:
    assert result.code == 0, result.err
    found: list[int] = result.outputs[0]["token_ids"]
    return found


def test_the_page_has_one_of_each_in_60_lines() -> None:
    assert set(FILES) == {"echo", "block", "cascade", "layers", "likely", "heuristic"}
    assert all(code.count("\n") <= 60 for code in FILES.values())


@pytest.mark.parametrize("code", ["state.texts.tokens", "state.texts[0]", "draft.none.x", "1 / 0"])
def test_a_method_that_asked_for_no_texts_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str
) -> None:
    for needs in (False, True):
        file = written(
            tmp_path,
            "from specdec_cli.plugin import method\n"
            f"@method('mine{needs}')\nclass Mine:\n    needs_text = {needs}\n"
            f"    def __init__(self, parts): pass\n    def propose(self, state, draft): {code}\n",
        )
        plugin.LOADED.clear()
        found = specdec(
            capsys, "generate", "demo", *SHORT, "--plugin", file, "--draft", f"mine{needs}"
        )
        assert found.code == 2
        hint = found.document["error"]["hint"] or ""
        assert ("needs_text = True" in hint) == (not needs and "texts" in code)


@pytest.mark.parametrize("text", ["1 / 0\n", "x = 1\n"], ids=["fails", "registers nothing"])
def test_a_plugin_that_failed_fails_again_in_the_next_run(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = written(tmp_path, text)
    first, second = (specdec(capsys, "methods", "--plugin", file, "--json") for _ in range(2))
    assert (first.code, first.document) == (second.code, second.document)
    assert first.code == 2


def test_plugins_are_listed_and_their_recipes_are_checked(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], tmp_path: Path
) -> None:
    told = FILES["echo"].replace(
        "class Echo:\n", 'class Echo:\n    """Says it again.\n\n    More."""\n'
    )
    page["echo"].write_text(told)
    given = [word for file in page.values() for word in ("--plugin", file)]
    shown = specdec(capsys, "methods", *given)
    assert shown.code == 0
    lists = {part.partition("\n")[0]: part for part in shown.out.split("\n\n")}
    for title, name, words in (
        ("methods", "echo", "Says it again. (echo.py)"),
        ("methods", "block_of_text", "from the plugin block.py"),
        ("acceptance rules", "likely", "from the plugin likely.py"),
        ("length policies", "heuristic", "from the plugin heuristic.py"),
    ):
        part = next(text for head, text in lists.items() if head.startswith(title))
        assert re.search(rf"^  {name} +{re.escape(words)}$", part, re.MULTILINE)
    recipe = tmp_path / "own.yaml"
    recipe.write_text("target: {model: demo:target}\nspeculation: {method: echo}\n")
    for command in (("validate",), ("show", "--resolved")):
        asked = ("recipe", *command, recipe)
        assert specdec(capsys, *asked, "--plugin", page["echo"]).code == 0
    METHODS.pop("echo")
    refused = specdec(capsys, "recipe", "validate", recipe)
    assert refused.code == 2 and "a plugin's needs --plugin" in refused.err
    absent = specdec(capsys, "methods", "--plugin", "no.py", "--json")
    assert (absent.code, absent.document["error"]["code"]) == (2, 2)


def test_the_pages_method_writes_the_targets_text(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    plain = specdec(capsys, "generate", "demo", *SHORT, "-k", "0")
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", page["echo"], "--draft", "echo")
    assert tokens(found) == tokens(plain)
    metrics = found.document["metrics"]
    assert metrics["num_accepted_tokens"] > 0
    sha256 = hashlib.sha256(FILES["echo"].encode()).hexdigest()
    assert found.document["environment"]["plugins"] == {"echo.py": sha256}
    assert found.document["recipe"]["speculation"]["method"] == "echo"


def test_the_pages_block_writes_the_targets_text(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    plain = specdec(capsys, "generate", "demo", *SHORT, "-k", "0")
    chosen = ("--plugin", page["block"], "--draft", "block_of_text", "-k", "3")
    found = specdec(capsys, "generate", "demo", *SHORT, *chosen)
    assert tokens(found) == tokens(plain)
    drawn = specdec(capsys, "generate", "demo", *SAMPLED, *chosen)
    assert drawn.code == 0 and drawn.document["metrics"]["num_draft_tokens"] > 30
    assert drawn.document["metrics"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("skipped", ["[]", "[1]"])
def test_the_pages_layers_write_the_targets_text(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], skipped: str
) -> None:
    plain = specdec(capsys, "generate", "demo", *SHORT, "-k", "0")
    chosen = ("--plugin", page["layers"], "--draft", "some_layers", "-k", "3")
    options = ("--set", f"speculation.options.skipped={skipped}")
    found = specdec(capsys, "generate", "demo", *SHORT, *chosen, *options)
    assert tokens(found) == tokens(plain)
    metrics = found.document["metrics"]
    is_whole = metrics["num_accepted_tokens"] == metrics["num_draft_tokens"]
    assert is_whole == (skipped == "[]"), "the whole target proposes its own text"


@pytest.mark.gpu
@NEEDS_CUDA
def test_the_pages_method_is_captured(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    where = ("--device", "cuda", "--dtype", "float32")
    plain = specdec(capsys, "generate", "demo", *SHORT, *where, "-k", "0")
    chosen = ("--plugin", page["echo"], "--draft", "echo", "--set", "run.cuda_graphs=on")
    found = specdec(capsys, "generate", "demo", *SHORT, *where, *chosen)
    assert tokens(found) == tokens(plain)
    assert found.document["environment"]["cuda_graphs"] == "on: one graph a round"
    assert found.document["metrics"]["num_accepted_tokens"] > 0


def test_options_of_a_recipe_reach_the_plugin(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    options = ("--draft", "echo", "--set", "speculation.options.most=1")
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", page["echo"], *options)
    plain = tokens(specdec(capsys, "generate", "demo", *SHORT, "-k", "0"))
    assert tokens(found) == plain
    metrics = found.document["metrics"]
    assert metrics["num_draft_tokens"] == metrics["num_drafts"] > 0


@pytest.mark.parametrize("key", ["mots", "count"])
def test_options_that_no_plugin_reads_are_refused(
    key: str, capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    """A rule beside the method may read further keys; all others stay refused."""
    options = ("--draft", "echo", "--set", f"speculation.options.{key}=1")
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", page["echo"], *options)
    error = json.loads(found.out)["error"]
    assert found.code == 2
    assert error["message"] == f"speculation.options.{key}: no plugin reads this key"
    assert error["hint"] == "keys that plugins read: most"
    both = ("--plugin", page["likely"], "--set", "speculation.acceptance=likely")
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", page["echo"], *options, *both)
    assert found.code == (0 if key == "count" else 2)


READS: dict[str, Callable[[Any], object]] = {
    "items": lambda options: [*options.items()],
    "values": lambda options: [*options.values()],
    "keys": lambda options: [*options.keys()],
    "setdefault": lambda options: options.setdefault("most", 8),
    "copy": lambda options: options.copy(),
    "or": lambda options: {"count": 3} | options,
    "or it": lambda options: options | {"count": 3},
    "stars": lambda options: {**options},
    "pop": lambda options: options.pop("most"),
}


@pytest.mark.parametrize("name", READS)
def test_options_are_read_in_every_way_that_a_dict_has(name: str) -> None:
    options = WatchedOptions({"most": 1})
    with pytest.raises(UsageError, match=r"options\.most: no plugin reads this key"):
        options.refuse_unknown(None)
    found = READS[name](options)
    options.refuse_unknown(None)
    assert found in ([("most", 1)], [1], ["most"], 1, {"most": 1}, {"count": 3, "most": 1})


def test_a_default_that_a_plugin_sets_is_no_key_of_the_recipe() -> None:
    options = WatchedOptions({"most": 1})
    assert (options.setdefault("count"), options.setdefault("least", 2)) == (None, 2)
    with pytest.raises(UsageError, match=r"options\.most: no plugin") as caught:
        options.refuse_unknown(None)
    assert caught.value.hint == "keys that plugins read: count, least"


def test_an_option_may_be_read_by_any_arm_of_a_sweep() -> None:
    options = WatchedOptions({"most": 1, "least": 0})
    options.unmade.update(("a", "b"))
    WatchedOptions(options).get("most")
    options.refuse_unknown("a")  # the other one may read it
    with pytest.raises(UsageError, match=r"options\.least: no plugin reads this key"):
        WatchedOptions(options).refuse_unknown("b")


def test_options_that_no_arm_of_a_sweep_reads_are_refused(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    arms = ("--draft", "echo", "--draft", "ngram", "--k", "0,1", "--limit", "1", "--json")
    sweep = ("sweep-k", "demo", "--plugin", page["echo"], *arms, "--max-new-tokens", "2")
    found = specdec(capsys, *sweep, "--set", "speculation.options.mots=2")
    assert found.code == 2
    assert "speculation.options.mots: no plugin reads this key" in found.err


def test_options_that_describe_does_not_read_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = (
        f"from specdec_cli.models.description import describe\n{HEAD}"
        "@method('own', weights_from='draft')\nclass Own:\n    @staticmethod\n"
        "    def describe(place):\n        place.speculation.options.pop('most')\n"
        "        own = describe(place.spec, place.device, place.parallel)\n"
        "        return own.within(place.max_model_len)\n"
        "    def propose(self, state, draft): return draft.candidates()\n"
    )
    chosen = ("--plugin", written(tmp_path, code), "--set", "speculation.method=own")
    chosen += ("--set", "speculation.options.most=1", *SHORT, "--max-new-tokens", "2")
    found = specdec(capsys, "generate", "demo", *chosen)
    assert found.code == 0, found.err
    assert found.document["recipe"]["speculation"]["options"] == {"most": 1}
    METHODS.pop("own")
    plugin.LOADED.clear()
    found = specdec(capsys, "generate", "demo", *chosen, "--set", "speculation.options.mots=1")
    assert found.code == 2 and "options.mots: no plugin reads this key" in found.err


def test_options_without_a_plugin_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, "generate", "demo", *SHORT, "--set", "speculation.options.most=1")
    assert found.code == 2 and "are for plugins" in json.loads(found.out)["error"]["message"]


def test_the_pages_rule_is_labelled(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    chosen = ("--plugin", page["likely"], "--set", "speculation.acceptance=likely")
    lossless = specdec(capsys, "generate", "demo", *SAMPLED)
    count = ("--set", "speculation.options.count=100")
    found = specdec(capsys, "generate", "demo", *SAMPLED, *chosen, *count)
    assert len(tokens(found)) == len(tokens(lossless))
    more = found.document["metrics"]["mean_acceptance_length"]
    assert more > lossless.document["metrics"]["mean_acceptance_length"]
    assert "any of the target's likeliest tokens stands" in json.dumps(found.document)


def test_the_pages_rule_of_one_token_is_greedy_verification(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    chosen = ("--plugin", page["likely"], "--set", "speculation.acceptance=likely")
    one = specdec(
        capsys, "generate", "demo", *SHORT, *chosen, "--set", "speculation.options.count=1"
    )
    assert tokens(one) == tokens(specdec(capsys, "generate", "demo", *SHORT))


def test_the_pages_policy_follows_its_schedule(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path]
) -> None:
    chosen = ("--plugin", page["heuristic"], "--set", "speculation.length.policy=heuristic")
    chosen += ("-k", "6")
    fixed = specdec(capsys, "generate", "demo", *SHORT, "-k", "6")
    found = specdec(capsys, "generate", "demo", *SHORT, *chosen)
    assert tokens(found) == tokens(fixed)
    assert (
        found.document["metrics"]["num_draft_tokens"]
        != fixed.document["metrics"]["num_draft_tokens"]
    )


@pytest.mark.usefixtures("no_pictures")
def test_the_page_through_sweep_and_report(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    plugins = [part for name in FILES for part in ("--plugin", page[name])]
    found = specdec(
        capsys,
        *("sweep-k", "demo", *plugins, "--draft", "ngram", "--draft", "echo"),
        *("--draft", "demo:draft", "--draft", "block_of_text", "--draft", "cascade=demo:draft"),
        *("--set", "speculation.length.policy=heuristic", "--set", "speculation.options.most=2"),
        *("--k", "0,2", "--limit", "2", "--max-new-tokens", "8", "--json", "-o", folder),
        *("--set", "run.repeats=1"),
    )
    assert found.code == 0, found.err
    points = {(p["draft"], p["k"]) for p in found.document["points"]}
    arms = ("echo", "demo:draft", "ngram", "block_of_text", "cascade=demo:draft")
    assert points == {(None, 0), *((arm, 2) for arm in arms)}
    assert all(p["status"] == "ok" for p in found.document["points"])
    drafted = {p["draft"]: p["metrics"]["num_draft_tokens"] for p in found.document["points"]}
    assert drafted["cascade=demo:draft"] != drafted["demo:draft"], "each arm has its own method"
    reported = specdec(capsys, "report", folder)
    assert reported.code == 0, reported.err
    page_text = (folder / "report.html").read_text()
    assert "echo" in page_text and "ngram" in page_text and "cascade=demo:draft" in page_text
    again = specdec(capsys, "sweep-k", *plugins, "--resume", "-o", folder, "--json")
    assert again.code == 0 and len(again.document["points"]) == 1 + len(arms), again.err


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("draft_model", "--draft: demo:draft is given twice"),  # the points would share a name
        ("pard", "speculation.method is pard, but the draft demo:draft is no PARD draft"),
    ],
)
def test_one_draft_of_two_built_in_methods_is_refused(
    other: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ("--draft", "demo:draft", "--draft", f"{other}=demo:draft")
    found = specdec(capsys, "sweep-k", "demo", *drafts, "--k", "2", "--limit", "2", "--json")
    assert found.code == 2
    assert found.document["error"]["message"] == told


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_resumes_only_with_the_plugin_that_it_began_with(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], tmp_path: Path
) -> None:
    folder, short = tmp_path / "run", ("--limit", "1", "--max-new-tokens", "4", "--k", "0,1")
    first = ("--draft", "echo", "--plugin", page["echo"], *short, "--set", "run.repeats=1")
    assert specdec(capsys, "sweep-k", "demo", *first, "-o", folder).code == 0

    def resumed() -> Result:
        plugin.LOADED.clear()
        METHODS.pop("echo")
        words = ("sweep-k", "--resume", "-o", folder, "--plugin", page["echo"], "--json")
        return specdec(capsys, *words)

    assert resumed().code == 0
    page["echo"].write_text(FILES["echo"] + "# edited\n")
    found = resumed()
    assert found.code == 2
    error = found.document["error"]
    assert error["message"].endswith("settings: --plugin echo.py has changed since the run began")
    assert error["hint"].startswith(
        "resume with the plugins that the run began with, or name anoth"
    )
    # Folders of earlier versions do not say which plugins they were measured with.
    kept = json.loads((folder / "settings.json").read_text())
    del kept["settings"]["recipe"]["plugins"]
    kept["hash"] = digest(kept["settings"])
    (folder / "settings.json").write_text(json.dumps(kept))
    assert resumed().code == 0


@pytest.mark.usefixtures("no_pictures")
def test_shards_of_a_plugins_method_are_merged(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], tmp_path: Path
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    chosen = ("sweep-k", "demo", "--draft", "echo", "--plugin", page["echo"], "--k", "0,2")
    short = ("--limit", "2", "--max-new-tokens", "8", "--set", "run.repeats=1")
    for i, folder in enumerate(folders):
        assert specdec(capsys, *chosen, *short, "--shard", f"{i}/2", "-o", folder).code == 0
    plugin.LOADED.clear()
    METHODS.pop("echo")
    refused = specdec(capsys, "merge", *folders, "-o", tmp_path / "refused", "--json")
    assert refused.code == 2 and "a plugin's needs --plugin" in refused.err
    merge = ("merge", *folders, "--plugin", page["echo"], "-o", tmp_path / "whole", "--json")
    found = specdec(capsys, *merge)
    assert found.code == 0, found.err
    assert [(p["draft"], p["k"], p["status"]) for p in found.document["points"]] == [
        (None, 0, "ok"),
        ("echo", 2, "ok"),
    ]
    assert found.document["recipe"]["speculation"]["method"] == "echo"


@pytest.mark.usefixtures("no_pictures")
def test_the_pages_rule_through_sweep_and_report_stays_labelled(
    capsys: pytest.CaptureFixture[str], page: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found = specdec(
        capsys,
        *("sweep-k", "demo", "--draft", "block_of_text", "--plugin", page["likely"]),
        *("--plugin", page["block"]),
        *("--set", "speculation.acceptance=likely", "--set", "run.repeats=1"),
        *("--set", "speculation.options.count=4000"),  # every token stands
        *("--k", "0,2", "--limit", "2", "--max-new-tokens", "8", "--json", "-o", folder),
    )
    assert found.code == 0, found.err
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    texts = {one["k"]: one["token_ids"] for one in samples}
    assert texts[0] != texts[2]
    assert not found.document["tokens"]["compared"]
    said = "speculation.acceptance is likely: any of the target's likeliest tokens stands"
    assert said in [one["message"] for one in found.document["warnings"]]
    assert specdec(capsys, "report", folder).code == 0
    assert "likeliest tokens stands" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_arms_after_one_without_a_forecast_are_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Proposals with probabilities of their own are not replayed, so such an arm has none."""
    code = (
        f"{HEAD}@method('dense')\nclass Dense:\n    def propose(self, state, draft):\n"
        "        ids = state.tail[:, -1:].long().expand(-1, draft.k).contiguous()\n"
        "        q = torch.nn.functional.one_hot(ids, draft.vocab_size).float()\n"
        "        return Candidates(ids, draft.caps, TokenDist(q.log(), None))\n"
    )
    found = specdec(
        capsys,
        *("sweep-k", "demo", "--plugin", written(tmp_path, code), "--draft", "dense"),
        *("--draft", "demo:draft", "--k", "0-2", "--limit", "4", "--max-new-tokens", "8"),
        *("--set", "run.repeats=1", "--predict-only", "--json"),
    )
    assert found.code == 0, found.err
    predicted = {(p["draft"], p["k"]): p["predicted_speedup"] for p in found.document["points"]}
    assert predicted[None, 0] == 1.0 and predicted["demo:draft", 1] > 0
    assert predicted["dense", 1] is None
    assert next(iter(predicted)) == (None, 0)
    assert found.document["best"]["k"] is not None


MEMORY = """
@method('memory')
class Memory:
    runs_on_host = True

    def __init__(self, parts):
        self.written = {}

    def propose(self, state, draft):
        ids, lens = torch.zeros(len(draft.caps), draft.k, dtype=torch.int64), draft.caps * 0
        for b, (index, n) in enumerate(zip(state.index.tolist(), state.length.tolist())):
            while lens[b] < draft.caps[b] and (index, n + int(lens[b])) in self.written:
                ids[b, lens[b]] = self.written[index, n + int(lens[b])]
                lens[b] += 1
        return Candidates(ids, lens)

    def commit(self, state, verdict, target):
        for b, (index, n) in enumerate(zip(state.index.tolist(), state.length.tolist())):
            for i in range(int(verdict.num_accepted[b]) + 1):
                self.written[index, n + i] = int(verdict.token_ids[b, i])
"""


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("forgets", [True, False])
def test_a_method_that_remembers_the_texts_of_earlier_repeats_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, forgets: bool
) -> None:
    """A sweep writes each text several times, so such a method would propose the text itself."""
    code = HEAD + MEMORY + "    def begin(self): self.written.clear()\n" * forgets
    found = specdec(
        capsys,
        *("sweep-k", "demo", "--plugin", written(tmp_path, code), "--draft", "memory"),
        *("--k", "0,3", "--limit", "4", "--max-new-tokens", "6", "--set", "run.repeats=2"),
        *("--set", "run.warmup=0", "--json"),
    )
    assert found.code == 0, found.err
    codes = {one["code"] for one in found.document["warnings"]}
    told = {"method_remembers", "repeats_propose_differently"}
    assert codes & told == (set() if forgets else told)
    metrics = found.document["points"][1]["metrics"]
    assert (metrics["num_accepted_tokens"] == 0) == forgets
    assert found.document["points"][1]["prediction"]["mean_acceptance_length"] == 1.0


HEAD = """
import torch
from specdec_cli.core.candidates import Candidates, TokenDist, Verdict
from specdec_cli.plugin import method, policy, rule
"""


def refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, body: str, *options: str
) -> str:
    """The message for a class `mine` of this kind, which ends the command with exit code 2."""
    code = f"{HEAD}@{kind}('mine')\nclass Mine:\n    def __init__(self, parts): pass\n    {body}\n"
    plugged = ("--plugin", written(tmp_path, code), *options)
    found = specdec(capsys, "generate", "demo", *SHORT, *plugged)
    assert found.code == 2
    message: str = json.loads(found.out)["error"]["message"]
    return message


BAD_METHODS = {
    "return Candidates(draft.caps.new_full((1, draft.k), 10**6), draft.caps)": (
        r"method mine: \d+ proposed ids are outside the vocabulary of \d+"
    ),
    "return Candidates(torch.zeros(1, 1, dtype=torch.int64), draft.caps)": (
        r"method mine: token_ids should be \[1, 4\] int64, but is \[1, 1\] int64"
    ),
    "return Candidates(torch.zeros(1, draft.k), draft.caps)": (
        r"method mine: token_ids should be \[1, 4\] int64, but is \[1, 4\] float32"
    ),
    "return Candidates(torch.zeros(1, draft.k, dtype=torch.int64), [1])": (
        r"method mine: lens should be \[1\] int64, but is list"
    ),
    "return Candidates(torch.zeros(1, draft.k, dtype=torch.int64), draft.caps + 1)": (
        r"method mine: \d+ of the lens that propose returned are outside 0..caps"
    ),
    "return Candidates(torch.zeros(1, draft.k, dtype=torch.int64), draft.caps * 0 - 1)": (
        r"method mine: \d+ of the lens that propose returned are outside 0..caps"
    ),
    "return [1, 2]": r"method mine: propose should return Candidates, not \[1, 2\]",
    "assert False": "method mine: propose raised AssertionError",
    "raise SystemExit(0)": "method mine: propose raised SystemExit: 0",
    "raise KeyError('lost\\nit')": r"method mine: propose raised KeyError: 'lost\\nit'",
}


@pytest.mark.parametrize("body", BAD_METHODS)
def test_bad_methods_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str
) -> None:
    body_of = f"def propose(self, state, draft):\n        {body}"
    message = refusal(capsys, tmp_path, "method", body_of, "--draft", "mine")
    assert re.fullmatch(BAD_METHODS[body], message), message


def test_a_method_without_propose_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = refusal(capsys, tmp_path, "method", "needs_text = True", "--draft", "mine")
    assert message == "method mine: its class has no propose(self, state, draft)"


def made_method(**members: Any) -> PluggedMethod:
    """A plugin's method with these members, for a target of 8 tokens and 2 layers."""
    module = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    parts: Any = SimpleNamespace(target=SimpleNamespace(vocab_size=8, module=module))
    return PluggedMethod("mine", type("Mine", (), members), parts)


def one_slot() -> BatchState:
    """The state of a sequence that decodes, with texts and the token ids that were seen."""
    cpu = torch.device("cpu")
    texts = Texts.empty(1, 4, cpu)
    texts.mark(8)
    state = BatchState(1, 2, cpu, texts)
    state.active.fill_(True)
    return state


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"tail": 0}, "tail should be an integer of at least 1, but is 0"),
        ({"max_len": 20.0}, "max_len should be an integer of at least 0, but is 20.0"),
        ({"max_lag": None}, "max_lag should be an integer of at least 0, but is None"),
        ({"feature_layers": ("a",)}, r"feature_layers should be integers in 0..2, but are \['a'\]"),
        (
            {"feature_layers": (0, 3)},
            r"feature_layers should be integers in 0..2, but are \[0, 3\]",
        ),
        ({"ahead": lambda _, k: k + 0.5}, "ahead should be an integer of at least 0, but is 2.5"),
        ({"kv_after": lambda *_: None}, "kv_after should be an integer of at least 0, but is None"),
        ({"tail_for": lambda *_: True}, "tail_for should be an integer of at least 1, but is True"),
        ({"up_to": lambda *_: None}, "up_to should return self or a copy of it, not None"),
        ({"up_to": lambda *_: 1 / 0}, "up_to raised ZeroDivisionError: division by zero"),
    ],
)
def test_members_of_a_bad_method_get_one_line(members: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"^method mine: {told}$"):
        found = made_method(**members)
        (found.ahead(2), found.kv_after(5, 2, 1), found.tail_for(2), found.up_to(2))


def test_a_method_s_own_proposer_for_few_proposals_is_checked_too() -> None:
    def up_to(whole: Any, k: int) -> Any:
        part = copy(whole)
        part.tail = part.k = k
        return part

    outside = Candidates(torch.tensor([[9]]), torch.tensor([1]))
    assert (whole := made_method()).up_to(1) is whole
    whole = made_method(up_to=up_to, k=3, propose=lambda *_: outside)
    part = whole.up_to(2)
    assert isinstance(part, PluggedMethod) and (whole.k, part.k, part.tail) == (3, 2, 2)
    with pytest.raises(UsageError, match="tail should be an integer of at least 1"):
        whole.up_to(0)
    state = one_slot()
    part.propose(state, Drafting(1, SamplingParams(), torch.tensor([1]), 8))
    with pytest.raises(UsageError, match="1 proposed ids are outside the vocabulary of 8"):
        whole.check()


PLACE = (1, 2)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (((*PLACE, 4), None), "q should be a TokenDist, but is tuple"),
        (TokenDist(torch.zeros(1, 1, 4), None), r"q.logits should be \[1, 2, 4\] float32, but is"),
        (
            TokenDist(torch.zeros(*PLACE, 9), None),
            r"q.logits should be \[1, 2, 8\] float32, but is",
        ),
        (TokenDist(torch.zeros(*PLACE, 4).long(), None), r"q.logits .* but is \[1, 2, 4\] int64"),
        (TokenDist(torch.zeros(4), torch.zeros(1)), r"q.logits should be \[1, 2, 4\] float32"),
        (
            TokenDist(torch.zeros(*PLACE, 4), torch.zeros(1)),
            r"q.stats should be \[1, 2, 4\] float32",
        ),
        ("ids", r"token_ids should be \[1, 2\] int64, but is \[1, 2\] int64 on meta"),
        ("lens", r"lens should be \[1\] int64, but is \[1\] int64 on meta"),
    ],
)
def test_proposals_of_a_bad_method_get_one_line(result: Any, told: str) -> None:
    at = {name: "meta" if result == name else "cpu" for name in ("ids", "lens")}
    ids = torch.zeros(PLACE, dtype=torch.int64, device=at["ids"])
    lens = torch.tensor([2], device=at["lens"])
    q = None if isinstance(result, str) else result
    found = made_method(propose=lambda *_: Candidates(ids, lens, q))
    state = one_slot()
    with pytest.raises(UsageError, match=f"^method mine: {told}"):
        found.propose(state, Drafting(2, SamplingParams(), torch.tensor([2]), 8))


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "aten::view" not in func.name() and "reshape" not in func.name()
        return func(*args, **(kwargs or {}))


def test_a_plugin_s_round_takes_few_operations_more_than_a_built_in_one() -> None:
    """They are part of `draft_ms`. 56 made prompt lookup a quarter slower as a plugin, on a CPU."""
    state, ids = one_slot(), torch.zeros(PLACE, dtype=torch.int64)
    given = Candidates(ids, torch.tensor([2]))
    method, draft = (
        made_method(propose=lambda *_: given),
        Drafting(2, SamplingParams(), given.lens, 8),
    )
    with Counting() as counting:
        method.propose(state, draft)
    assert counting.count <= 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((1, 5), ""),
        ((2, 8), "1 sequences and at most 2 more positions, but are [2, 1, 8]"),
        ((1, 3, 8), "1 sequences and at most 2 more positions, but are [1, 3, 8]"),
        ((8,), "1 sequences and at most 2 more positions, but are [8, 1]"),
    ],
)
def test_logits_that_nothing_is_drawn_from_get_one_line(
    temperature: float, shape: tuple[int, ...], told: str
) -> None:
    def propose(_: object, state: Any, draft: Drafting) -> Candidates:
        draw = draft.draw_all if len(shape) == 3 else draft.draw
        draw(torch.zeros(shape))
        return draft.candidates()

    noise = torch.zeros(PLACE) if temperature else None
    draft = Drafting(2, SamplingParams(temperature), torch.tensor([2]), 8, noise)
    method = made_method(propose=propose)
    if shape == (1, 5):
        method.propose(one_slot(), draft)  # ids from 5 on have no probability
        return
    with pytest.raises(UsageError, match=re.escape(told)) as found:
        method.propose(one_slot(), draft)
    assert found.value.message.startswith("method mine: propose raised ValueError: logits to draw")


LENT = {
    "neither": lambda state: state.length.clone(),
    "numbers": lambda state: state.length,
    "active": lambda state: state.active,
    "block_tables": lambda state: state.block_tables,
    "seed": lambda state: state.seed,
    "texts": lambda state: state.texts.tokens,
    "seen": lambda state: state.texts.seen,
}


@pytest.mark.parametrize("name", ["caps", *LENT])
def test_a_method_that_writes_to_what_it_is_given_is_named(name: str) -> None:
    """The text is the target's whatever is proposed, so the state is put back first."""
    state, draft = one_slot(), Drafting(2, SamplingParams(), torch.tensor([1]), 8)

    def propose(_: object, state: Any, draft: Drafting) -> Candidates:
        given = draft.caps if name == "caps" else LENT[name](state)
        given.copy_(given == 0)
        return Candidates(torch.zeros(PLACE, dtype=torch.int64), torch.tensor([1]))

    found = made_method(propose=propose)
    for is_active in (False, True):
        state.active.fill_(is_active)
        assert found.propose(state, draft).lens.tolist() == [1]
        assert draft.caps.tolist() == [1]
        assert not any(one.any() for one in state.tensors if one is not state.active)
        assert bool(state.active) == is_active
    if name != "neither":
        with pytest.raises(UsageError, match=r"^method mine: propose changed .* in 1 rounds$"):
            found.check()
    found.check()


@pytest.mark.parametrize("name", ["token_ids", "num_accepted", *LENT])
def test_a_commit_that_writes_to_what_it_is_given_is_named(name: str) -> None:
    state = one_slot()
    verdict = Verdict(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([2]))

    def commit(_: object, state: BatchState, verdict: Verdict, __: object) -> None:
        given = LENT[name](state) if name in LENT else getattr(verdict, name)
        given.copy_(given == 0)

    found = made_method(commit=commit)
    for is_active in (False, True):
        state.active.fill_(is_active)
        found.commit(state, verdict, TargetOutput(torch.zeros(1, 3, 8)))
        assert verdict.token_ids.tolist() == [[0, 0, 0]] and verdict.num_accepted.tolist() == [2]
        assert state.length.tolist() == [0] and bool(state.active) == is_active
    if name != "neither":
        with pytest.raises(UsageError, match=r"^method mine: commit changed .* in 1 rounds$"):
            found.check()
    found.check()


@pytest.mark.parametrize("name", LENT)
def test_a_policy_that_writes_to_the_state_is_named(name: str) -> None:
    def caps(state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        given = LENT[name](state)
        given.copy_(given == 0)
        return caps

    state, policy = one_slot(), PluggedPolicy("mine", SimpleNamespace(caps=caps))
    for is_active in (False, True):
        state.active.fill_(is_active)
        assert policy.caps(state, torch.tensor([3])).tolist() == [3]
        assert state.length.tolist() == [0] and bool(state.active) == is_active
    if name != "neither":
        with pytest.raises(UsageError, match=r"^length policy mine: caps changed .* in 1 rounds$"):
            policy.check()
    policy.check()


@pytest.mark.parametrize("name", ["token_ids", "lens"])
def test_a_rule_that_writes_to_the_proposals_is_named(name: str) -> None:
    class Mine:
        def decide(self, candidates: Candidates, *_: object) -> Verdict:
            getattr(candidates, name).add_(1)
            return Verdict(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([2]))

    candidates = Candidates(torch.tensor([[3, 4]]), torch.tensor([1]))
    rule = PluggedRule("mine", Mine())
    output = TargetOutput(torch.zeros(1, 3, 8))
    assert rule.decide(candidates, output, SamplingParams(), None).num_accepted.tolist() == [1]
    assert candidates.token_ids.tolist() == [[3, 4]] and candidates.lens.tolist() == [1]
    with pytest.raises(UsageError, match=r"^acceptance mine: decide changed .* in 1 rounds$"):
        rule.check()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_distributions_of_a_plugin_get_what_verification_on_cuda_reads(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Without it, proposals would count as certain there."""
    monkeypatch.setattr(plugged, "softmax_stats", lambda x, p: ops.logit_rows(x, *p.filters))
    params, logits = SamplingParams(temperature, top_k=5), torch.randn(8).expand(*PLACE, 8)
    given = Candidates(torch.zeros(PLACE).long(), torch.tensor([2]), TokenDist(logits, None))
    method = made_method(propose=lambda *_: given)
    found = method.propose(one_slot(), Drafting(2, params, torch.tensor([2]), 8)).q
    assert found is not None and torch.equal(found.logits, logits)
    if temperature == 0.0:
        assert found.stats is None
        return
    assert found.logits.is_contiguous() and found.stats is not None
    assert torch.equal(found.stats[0, 1], ops.logit_rows(logits[0, :1], *params.filters).rows[0])


def test_only_a_drawn_token_marks_logits_that_are_not_finite() -> None:
    ids = torch.tensor([[1, -1]])
    found = made_method(propose=lambda *_: Candidates(ids, torch.tensor([2])))
    state = one_slot()
    draft = Drafting(2, SamplingParams(), torch.tensor([2]), 8)
    assert found.propose(state, draft).lens.tolist() == [1]
    with pytest.raises(
        UsageError, match=r"^method mine: 1 proposed ids are outside the vocabulary"
    ):
        found.check()
    draft.draw_all(torch.full((*PLACE, 8), float("nan")))
    assert found.propose(state, draft).token_ids.tolist() == ids.tolist()
    found.check()


def test_all_of_a_method_runs_in_inference_mode() -> None:
    seen = []

    def note(*_: object) -> None:
        seen.append(torch.is_inference_mode_enabled())

    found = made_method(prefill=note, commit=note)
    found.prefill([], None)
    output = TargetOutput(torch.zeros(1, 1, 8))
    found.commit(one_slot(), Verdict(torch.zeros(1, 1), torch.zeros(1)), output)
    assert seen == [True, True]


@pytest.mark.parametrize("value", ["no", "False", 0, None, [False]])
def test_flags_of_plugins_are_true_or_false(value: object) -> None:
    """Text counts as True in Python: a rule that is_lossless = "no" would be called lossless."""
    told = re.escape(f"should be True or False, but is {value!r}")
    for name in ("needs_text", "is_paged", "depends_on_k"):
        with pytest.raises(UsageError, match=f"^method mine: {name} {told}$"):
            made_method(**{name: value})
    for name in ("is_lossless", "looks_ahead", "draws_when_greedy"):
        with pytest.raises(UsageError, match=f"^acceptance mine: {name} {told}$"):
            PluggedRule("mine", SimpleNamespace(**{name: value}))
    with pytest.raises(UsageError, match=f"^method mine: runs_on_host {told}$"):
        plugin.method("mine")(type("Mine", (), {"runs_on_host": value}))
    assert "mine" not in METHODS


def test_a_member_that_raises_is_named() -> None:
    for name in ("tail", "needs_text", "feature_layers"):
        with pytest.raises(UsageError, match=r"^method mine: making it raised Zero.*: "):
            made_method(**{name: property(lambda _: 1 // 0)})


def test_a_bad_describe_gets_one_line() -> None:
    place: Any = DraftPlace(*[None] * 5, SpeculationSection())  # type: ignore[arg-type]
    for body, told in (
        (lambda place: 1 / 0, "describe raised ZeroDivisionError: division by zero"),
        (lambda place: None, "describe should return a Draft, not None"),
    ):
        METHODS.pop("own", None)
        plugin.method("own")(type("Own", (), {"describe": staticmethod(body)}))
        with pytest.raises(UsageError, match=f"^method own: {told}$"):
            METHODS["own"].code.describe(place)


def test_classes_that_need_nothing_have_no_constructor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = (
        f"{HEAD}@method('last')\nclass Last:\n    def propose(self, state, draft):\n"
        "        ids = state.tail[:, -1:].expand(-1, draft.k)\n"
        "        return Candidates(ids, draft.caps)\n"
        "@policy('two')\nclass Two:\n    def lengths(self, k): return [2]\n"
        "    def next_k(self, *a): return 2\n"
        "@rule('none')\nclass Nothing:\n    def decide(self, candidates, target, params, noise):\n"
        "        best = target.logits.argmax(-1)\n"
        "        return Verdict(best, torch.zeros_like(candidates.lens))\n"
    )
    plugged = ("--plugin", written(tmp_path, code), "--draft", "last")
    more = ("--set", "speculation.length.policy=two", "--set", "speculation.acceptance=none")
    found = specdec(capsys, "generate", "demo", *SHORT, *plugged, *more)
    plain = specdec(capsys, "generate", "demo", "-k", "0", *SHORT)
    assert tokens(found) == tokens(plain)
    assert found.document["metrics"]["num_draft_tokens"] >= 2


def test_classes_that_inherit_and_need_nothing_have_no_constructor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Python gives protocols a constructor. A command makes a rule and a policy several times."""
    code = (
        "from specdec_cli.acceptance.base import AcceptanceRule\n"
        "from specdec_cli.lengths.base import LengthPolicy\n"
        f"{HEAD}@policy('whole')\nclass Whole(LengthPolicy): pass\n"
        "@rule('none')\nclass Nothing(AcceptanceRule):\n"
        "    def decide(self, candidates, target, params, noise):\n"
        "        best = target.logits.argmax(-1)\n"
        "        return Verdict(best, torch.zeros_like(candidates.lens))\n"
    )
    plugged = ("--plugin", written(tmp_path, code), "--set", "speculation.length.policy=whole")
    found = specdec(
        capsys, "generate", "demo", *SHORT, *plugged, "--set", "speculation.acceptance=none"
    )
    assert tokens(found) == tokens(specdec(capsys, "generate", "demo", "-k", "0", *SHORT))
    assert found.document["metrics"]["num_accepted_tokens"] == 0


def test_a_constructor_behind_a_protocol_is_called() -> None:
    class Given:
        def __init__(self, given: str) -> None:
            self.given = given

    class Mine(AcceptanceRule, Given):
        pass

    class Bare(AcceptanceRule):
        pass

    for _ in range(2):
        assert built(Mine, "this").given == "this"
        assert isinstance(built(Bare, "this"), Bare)


BAD_RULES = {
    "return None": "acceptance mine: decide should return a Verdict, not None",
    "return Verdict(candidates.token_ids, candidates.lens)": (
        "acceptance mine: token_ids should be [1, 5] int64, but is [1, 4] int64"
    ),
    "1 / 0": "acceptance mine: decide raised ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("body", BAD_RULES)
def test_bad_rules_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str
) -> None:
    body_of = f"def decide(self, candidates, target, params, noise):\n        {body}"
    chosen = ("--set", "speculation.acceptance=mine")
    assert refusal(capsys, tmp_path, "rule", body_of, *chosen) == BAD_RULES[body]


@pytest.mark.parametrize("accepted", ["candidates.lens + 1", "lens * 0 + 5", "lens * 0 - 3"])
@pytest.mark.parametrize("more", [(), ("-k", "1"), ("--temperature", "1")])
def test_a_rule_that_accepts_more_than_was_proposed_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, accepted: str, more: tuple[str, ...]
) -> None:
    """The text before is written with what could be accepted, and then the run ends."""
    body = (
        "def decide(self, candidates, target, params, noise):\n        lens = candidates.lens\n"
        f"        return Verdict(target.logits.argmax(-1), {accepted})"
    )
    chosen = ("--set", "speculation.acceptance=mine", *more)
    message = refusal(capsys, tmp_path, "rule", body, *chosen)
    told = r"acceptance mine: decide returned [1-9]\d* values? of num_accepted outside 0..lens"
    assert re.fullmatch(told, message), message


@pytest.mark.parametrize("draws", [True, False])
def test_a_rule_without_noise_is_told_why(draws: bool) -> None:
    class Mine:
        draws_when_greedy = draws

        def decide(self, candidates: Any, target: Any, params: Any, noise: Any) -> Verdict:
            return Verdict(noise.sample, 1 / 0)  # type: ignore[arg-type]

    given = Candidates(torch.zeros(PLACE, dtype=torch.int64), torch.tensor([2]))
    noise = Noise(*torch.zeros(3, *PLACE).unbind()) if draws else None
    with pytest.raises(UsageError) as found:
        target = TargetOutput(torch.zeros(1, 3, 8))
        PluggedRule("mine", Mine()).decide(given, target, SamplingParams(), noise)
    assert ("draws_when_greedy = True" in (found.value.hint or "")) == (not draws)


def test_decisions_are_clamped_until_the_run_ends() -> None:
    """-1 and -2 say whose logits are not finite, where that is true, and nothing else."""

    class Mine:
        def decide(self, *_: object) -> Verdict:
            return verdict

    drafted, logits = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 4, 8)
    logits[2, 1, 0], drafted[3, 1] = float("nan"), -1
    candidates = Candidates(drafted, torch.tensor([2, 1, 3, 3, 3, 3]))
    rule = PluggedRule("mine", Mine())
    rule.check()
    ids = torch.zeros(6, 4, dtype=torch.int64)
    for accepted, want, bad in (
        ([2, 3, -1, -2, -3, 0], [2, 1, -1, -2, 0, 0], 2),
        ([-1, -2, -2, -1, -1, -2], [0, 0, 0, 0, 0, 0], 6),
    ):
        verdict = Verdict(ids, torch.tensor(accepted))
        for times in (1, 2):
            for _ in range(times):
                found = rule.decide(candidates, TargetOutput(logits), SamplingParams(), None)
                assert found.num_accepted.tolist() == want
            told = f"^acceptance mine: decide returned {bad * times} values of num_accepted outside"
            with pytest.raises(UsageError, match=told):
                rule.check()
            rule.check()
    # The last row that has a meaning is that of the token after the accepted ones.
    ids[0] = torch.tensor([7, -1, 8, 9])
    ids[2, 1] = -1  # drawn from logits that are not finite
    ids[4:, 2:] = 99
    verdict = Verdict(ids, torch.tensor([2, 0, 1, -2, 1, 2]))
    found = rule.decide(candidates, TargetOutput(logits), SamplingParams(), None)
    assert found.num_accepted.tolist() == [2, 0, -1, -2, 1, 2]
    assert found.token_ids[0].tolist() == [7, 0, 7, 7] and int(found.token_ids.max()) == 7
    with pytest.raises(UsageError, match=r"^acceptance mine: decide returned 3 token ids outside"):
        rule.check()


LOSSY = {
    "it inherits": "class Mine(AcceptanceRule): pass",
    "it draws nothing": "class Mine: draws_when_greedy = False",
    "it has no remark": "class Mine: remark = None",
    "it says so": "class Mine: is_lossless, draws_when_greedy = False, False",
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_is_lossy_unless_it_says_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, temperature: float
) -> None:
    """Greedy decoding keeps the label too, and losslessness cannot be checked."""
    inherits = "from specdec_cli.acceptance.base import AcceptanceRule\n"
    file = written(tmp_path, f"{inherits}{HEAD}@rule('mine')\n{LOSSY[name]}\n")
    plugin.load(str(file))
    sets = {"speculation.acceptance": "mine", "sampling.temperature": temperature}
    said = "the text may not follow the target's distribution"
    assert plan(load_recipe("demo", sets)).remark == said
    chosen = ("--plugin", file, "--set", "speculation.acceptance=mine", "--check-lossless")
    found = specdec(capsys, "generate", "demo", *SHORT, *chosen, "--temperature", str(temperature))
    assert found.code == 2
    message = json.loads(found.out)["error"]["message"]
    assert message == f"--check-lossless: speculation.acceptance is mine: {said}"


def test_a_rule_that_says_that_it_is_lossless_has_no_label(tmp_path: Path) -> None:
    plugin.load(str(written(tmp_path, f"{HEAD}@rule('mine')\nclass Mine: is_lossless = True\n")))
    assert plan(load_recipe("demo", {"speculation.acceptance": "mine"})).remark is None


BAD_POLICIES = {
    "def lengths(self, k): return [k + 1]": "length policy mine: lengths should be integers in "
    "0..4, but are [5]",
    "def lengths(self, k): return [0, k]\n    def next_k(self, *a): return 3": (
        "length policy mine: next_k should be one of [0, 4], but is 3"
    ),
    "def lengths(self, k): return [0, k]": "length policy mine: next_k raised AttributeError: "
    "'Mine' object has no attribute 'next_k'",
    "def caps(self, state, caps): return caps.float()": (
        "length policy mine: caps should be [1] int64, but is [1] float32"
    ),
    "def caps(self, state, caps): return caps.to('meta')": (
        "length policy mine: caps should be [1] int64, but is [1] int64 on meta"
    ),
}


BAD_POLICIES |= {
    f"def stop(self, token, logits): {code}": f"length policy mine: stop {told}"
    for code, told in {
        "raise ValueError('boom')": "raised ValueError: boom",
        "return None": "should be [1] bool, but is NoneType",
        "return token": "should be [1] bool, but is [1] int64",
        "return logits[:, :2] > 0": "should be [1] bool, but is [1, 2] bool",
    }.items()
}


@pytest.mark.parametrize("value", [2.0, True, torch.tensor(2)])
def test_the_next_k_of_a_policy_is_a_plain_integer(value: object) -> None:
    policy = PluggedPolicy("mine", SimpleNamespace(next_k=lambda *_: value))
    given: Any = None
    with pytest.raises(
        UsageError, match=r"^length policy mine: next_k should be one of \[1, 2\], "
    ):
        policy.next_k((1, 2), given, given, 1)


def test_a_policy_cannot_raise_the_caps_in_place() -> None:
    policy, caps = PluggedPolicy("mine", SimpleNamespace(caps=lambda _, c: c.add_(9))), [1, 3]
    assert policy.caps(one_slot(), torch.tensor(caps)).tolist() == caps


def test_doubts_of_a_bad_policy_get_one_line() -> None:
    class Mine:
        def doubt(self, confidence: torch.Tensor) -> torch.Tensor:
            return confidence[:1] < 1 / (len(confidence) - 3)

    doubt = PluggedPolicy("mine", Mine()).doubt
    assert doubt is not None and doubt(torch.zeros(1)).tolist() == [False]
    with pytest.raises(UsageError, match=r"^length policy mine: doubt should be \[2\] bool, but"):
        doubt(torch.zeros(2))
    with pytest.raises(UsageError, match=r"^length policy mine: doubt raised ZeroDivisionError: "):
        doubt(torch.zeros(3))
    assert PluggedPolicy("mine", object()).stop is None


@pytest.mark.parametrize("body", BAD_POLICIES)
def test_bad_policies_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str
) -> None:
    chosen = ("--set", "speculation.length.policy=mine")
    assert refusal(capsys, tmp_path, "policy", body, *chosen) == BAD_POLICIES[body]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", ": registers nothing"),
        ("def (", ":1: SyntaxError: invalid syntax"),
        ("x = 1\nraise ValueError('no\\nway')", ":2: ValueError: no way"),
        ("import nothing_of_this_name", ":1: ModuleNotFoundError: No module named"),
        (f"{HEAD}@method('ngram')\nclass Mine: pass", ":5: ValueError: 'ngram' is registered alr"),
        (f"{HEAD}@rule('block')\nclass Mine: pass", ":5: ValueError: 'block' is registered alr"),
        (f"{HEAD}@policy('fixed')\nclass Mine: pass", ":5: ValueError: 'fixed' is registered alr"),
        (
            f"{HEAD}@method('a')\nclass A: pass\n@method('a')\nclass B: pass",
            ":7: ValueError: 'a' is registered already",
        ),
        ("raise SystemExit(0)", ":1: SystemExit: 0"),
        (f"{HEAD}@method(5)\nclass Mine: pass", ":5: ValueError: 5 is no name: use letters"),
        (f"{HEAD}@rule('a b')\nclass Mine: pass", ":5: ValueError: 'a b' is no name: use"),
        (f"{HEAD}@policy('')\nclass Mine: pass", ":5: ValueError: '' is no name: use letters"),
        (f"{HEAD}@method('a')\ndef a(): pass", ":5: ValueError: 'a' should be a class, but is a"),
    ],
)
def test_bad_files_get_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, told: str
) -> None:
    file = written(tmp_path, code)
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", file)
    assert found.code == 2
    message = json.loads(found.out)["error"]["message"]
    assert message.startswith(f"--plugin {file}{told}"), message
    assert "\n" not in message


def test_where_a_method_s_weights_are() -> None:
    plugin.method("bare")(object)
    plugin.method("drafted", weights_from="draft")(object)
    assert [METHODS[name].weights_from for name in ("bare", "drafted")] == ["none", "draft"]
    with pytest.raises(
        ValueError, match="takes weights from the target's files, so it needs a describe"
    ):
        plugin.method("lost", weights_from="target")(object)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gone.py", "No such file or directory"),
        ("pipe.py", "it is not a regular file"),
        ("loop.py", "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, told: str
) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    found = specdec(capsys, "generate", "demo", *SHORT, "--plugin", tmp_path / name)
    assert found.code == 2
    assert json.loads(found.out)["error"]["message"].endswith(f"{name}: cannot be read: {told}")


def test_a_recipe_cannot_name_what_no_plugin_added(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, "generate", "demo", *SHORT, "--set", "speculation.method=echo")
    assert found.code == 2
    told = json.loads(found.out)["error"]["message"]
    *names, last = METHODS
    assert f"should be {', '.join(names)} or {last}" in told


@pytest.mark.parametrize("reads", [False, True])
def test_a_method_that_reads_the_device_is_not_captured(tmp_path: Path, reads: bool) -> None:
    body = f"runs_on_host = {reads}\n    def __init__(self, parts): pass\n"
    plugin.load(str(written(tmp_path, f"{HEAD}@method('mine')\nclass Mine:\n    {body}")))
    found = plan(load_recipe("demo", {"draft": None, "speculation.method": "mine"}))
    on_cuda = replace(found, device=torch.device("cuda", 0))
    reason = "the method reads the device's data on the host" if reads else None
    assert on_cuda.no_cuda_graphs == reason


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    made = {"x/mine.py": "a", "y/mine.py": "b", "y/other.py": "c", "z/x/mine.py": "d"}
    for place, name in made.items():
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{HEAD}@rule('{name}')\nclass Mine: pass")
        plugin.load(str(file))
    one, *others = plugin.digests()
    assert one == f"{tmp_path.name}/x/mine.py"
    assert others == ["y/mine.py", "other.py", "z/x/mine.py"]


def test_a_plugin_is_run_once_however_often_it_is_named(tmp_path: Path) -> None:
    body = "def __init__(self, parts): pass\n"
    file = str(written(tmp_path, f"{HEAD}@method('mine')\nclass Mine:\n    {body}"))
    plugin.load(file)
    plugin.load(file)
    assert "mine" in METHODS and len(plugin.LOADED) == 1
