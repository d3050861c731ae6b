"""Names that a new user tries, and the hints from them to existing names."""

import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.app import main
from specdec_cli.errors import Notice
from specdec_cli.experiment import duration, machine
from specdec_cli.experiment.sweep import sweep_plan

SHORT_PROMPTS = Path(__file__).parents[1] / "short_prompts.jsonl"


def test_methods_and_bundled_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    for name in ("draft_model", "eagle3", "ngram", "rejection", "adaptive", "demo:target"):
        assert f"  {name} " in shown
    assert main(["methods", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    drafts = {one["name"]: one for one in found["drafts"]}
    methods = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark", "peagle": "peagle"}
    for name, method in (methods | {"mtp": "mtp_module"}).items():
        assert drafts[f"demo:{name}"]["method"] == method
        assert drafts[f"demo:{name}"]["target"] == "demo:target"
    assert drafts["demo:draft"]["target"] == "demo:target"
    assert drafts["demo:smollm2-draft"]["method"] == "draft_model"
    assert drafts["demo:smollm2-draft"]["target"].endswith("SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "Why is the sky blue?"], "a prompt goes after --prompt"),
        (["sweep-k", "two words"], "a prompt goes after --prompt"),
        (["generate", "why", "is", "it"], "a prompt goes after --prompt"),
        (["generate", "demmo"], "did you mean demo?"),
        (["sweep-k", "--minutes", "1", "--resume", "-o", "x"], "leave --minutes out"),
        (["sweep-k", "--repeats", "0"], "--repeats: should be greater than or equal to 1"),
        (["sweep-k", "--limit", "ten"], '--limit: should be a whole number, not "ten"'),
        (["generate", "--k", "two"], '--k: should be a whole number, not "two"'),
        (["generate", "--max-tokens", "8"], "did you mean --max-new-tokens?"),
        (["sweep-k", "--prompts", "x"], "did you mean --prompt-file?"),
        (["generate", "--temp", "1"], "did you mean --temperature?"),
        (["sweep-k", "--max-new", "8"], "did you mean --max-new-tokens?"),
        (["generate", "--pro", "x"], "did you mean --prompt or --prompt-file?"),
        (["generate", "--block", "8"], "did you mean --block-size?"),
        (["generate", "--no-ch"], "did you mean --no-chat?"),
        (["sweep-k", "--warmup", "2"], "hint: --set run.warmup=… sets it; see"),
        (["sweep-k", "--stop", "x"], "hint: --set sampling.stop=… sets it; see"),
        (["merge", "--warmup", "2"], "hint: see `specdec merge --help`"),
        (["sweep"], "did you mean sweep-k?"),
        (["generate", "--column", "q"], "did you mean --dataset FILE::COLUMN?"),
        (["recipe", "check"], "did you mean validate? commands: ls, show, validate, schema;"),
        (["train"], "commands: generate, sweep-k,"),
        (["demo"], "demo is a recipe: specdec generate demo; commands: generate,"),
        (["generate", "owner/name"], "a model goes after --target"),
        (["generate", "--set", "target=x"], "a section of keys"),
        (["merge", "a", "-o", ""], "the name is empty"),
        (["generate", "--chat-template", ""], "the name is empty"),
        (["sweep-k", "--baseline-server", ""], "--baseline-server: expected an address"),
        (["merge", "nosuch", "-o", "x"], "nosuch: no such folder"),
        (["sweep-k", "--draft"], "hint: see `specdec sweep-k --help`"),
        (["merge", "-o"], "hint: see `specdec merge --help`"),
        (["generate", str(SHORT_PROMPTS)], "prompts go after --prompt-file"),
        (["sweep-k", str(SHORT_PROMPTS)], "prompts go after --prompt-file"),
    ],
)
def test_hints(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("head", "bundled are demo:dflash,"),
        ("eagle3", "did you mean demo:eagle3"),
        ("n-gram", "did you mean ngram?"),
        ("demo:eagel3", "did you mean demo:eagle3"),
        ("smollm2", "smollm2 is a bundled recipe"),
    ],
)
def test_a_bare_name_of_no_model_leads_to_the_bundled_ones(
    name: str, guess: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["sweep-k", "--draft", name, "--dry-run"]) == 5
    told = capsys.readouterr().err
    assert f"hint: {guess}" in told


def test_minutes_choose_a_size_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of known speeds: repeats go first, then tokens, then prompts."""
    speeds = duration.Speeds(bytes=2e9, operations=2e10)
    monkeypatch.setattr(duration, "speeds_of", lambda *_: speeds)
    sizes = []
    for minutes in (600, 60, 10, 1):
        asked = ["sweep-k", "--minutes", str(minutes), "--k", "0-4", "--dry-run", "--json"]
        assert main([*asked, "--repeats", "3"]) == 0
        shown = capsys.readouterr()
        plan = json.loads(shown.out)
        assert plan["seconds"] <= 60 * minutes
        assert f"chosen for {minutes} min: {plan['num_prompts']} prompts" in shown.err
        sampling, repeats = plan["recipe"]["sampling"], plan["recipe"]["run"]["repeats"]
        sizes.append((repeats, sampling["max_new_tokens"], plan["num_prompts"]))
        limit = plan["recipe"]["data"]["limit"]
        assert limit == plan["num_prompts"] or limit > 1000, "the recipe runs the same prompts"
    assert sizes[0][:2] == (3, 128) and sizes[0][2] > 100
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert sizes[-1][0] == 1 and 8 <= sizes[-1][2] < sizes[0][2]


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("command", "key", "given", "is_told"),
    [
        ("sweep-k", "speculation.num_speculative_tokens=3", [], True),
        ("sweep-k", "speculation.num_speculative_tokens=3", ["2"], False),
        ("sweep-k", "run.repeats=3", [], False),
        ("compare-tp", "draft.tensor_parallel_size=1", [], True),
        ("compare-tp", "speculation.num_speculative_tokens=3", [], False),
        ("profile-blocks", "run.repeats=3", [], True),
    ],
)
def test_keys_that_a_command_does_not_read(
    command: str, key: str, given: list[str], is_told: bool, capsys: Capture
) -> None:
    plan = "--estimate" if command == "profile-blocks" else "--dry-run"
    sets = [("--synthetic-acceptance-length", one) for one in given]
    asked = [command, "demo", "--set", key, plan, "-q", *(word for pair in sets for word in pair)]
    assert main([*asked, *(["--k", "0-3"] if command == "sweep-k" else [])]) == 0
    told = f"warning: {key.partition('=')[0]} has no effect in this command\n"
    assert (told in capsys.readouterr().err) == is_told


@pytest.mark.usefixtures("slow_machine")
def test_minutes_keep_the_fewest_tokens_that_the_recipe_asks_for(capsys: Capture) -> None:
    for least, few in ((0, 64), (70, 70)):
        asked = ("--set", f"sampling.min_new_tokens={least}", "--minutes", "1")
        assert planned(capsys, *asked)["recipe"]["sampling"]["max_new_tokens"] == few


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds at which some of the bundled prompts fit into a minute."""
    speeds = duration.Speeds(bytes=2e9, operations=2e10)
    monkeypatch.setattr(duration, "speeds_of", lambda *_: speeds)


def planned(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    """The document of a planned sweep that `--minutes` makes smaller."""
    capsys.readouterr()
    asked = ["sweep-k", *map(str, arguments), "--k", "0,4", "--dry-run", "--json"]
    assert main(asked) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("slow_machine")
def test_minutes_lift_no_limit_that_somebody_has_set(capsys: Capture, tmp_path: Path) -> None:
    """The limit of a bundled recipe is there to run in seconds, so it goes."""
    few = ("--set", "data.limit=6")
    data = "{path: demo:prompts, limit: 6}"
    own = tmp_path / "r.yaml"
    own.write_text(f"target: {{model: demo:target}}\ndraft: {{model: demo:draft}}\ndata: {data}\n")
    for asked in (few, ("demo", *few), ("--set", f"data={data}"), (own,)):
        assert planned(capsys, *asked, "--minutes", "1")["num_prompts"] == 6
    for bare in ((), ("demo",), (Path("recipes/demo.yaml").resolve(),)):
        assert planned(capsys, *bare, "--minutes", "1")["num_prompts"] > 6
    option = planned(capsys, *few, "--limit", "7", "--minutes", "1")
    assert option["num_prompts"] == 7


@pytest.mark.usefixtures("slow_machine")
def test_minutes_draw_as_the_recipe_says(capsys: Capture, tmp_path: Path) -> None:
    """The prompts have categories, so without a word a stratified sample is drawn."""
    own = tmp_path / "r.yaml"
    data = "{path: demo:prompts, limit: 99, sample: random}"
    own.write_text(f"target: {{model: demo:target}}\ndraft: {{model: demo:draft}}\ndata: {data}\n")
    for asked, how in (
        ((), "stratified"),
        (("--set", "data.sample=random"), "random"),
        (("--set", "data.sample=null"), None),
        ((own,), "random"),
        ((own, "--set", "data.sample=stratified"), "stratified"),
        ((own, "--sample", "stratified"), "stratified"),
    ):
        plan = planned(capsys, *asked, "--minutes", "1")
        found = plan["recipe"]["data"]
        assert (found["sample"], found["limit"]) == (how, plan["num_prompts"])
        assert plan["num_prompts"] < 99


@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("kinds", [0, 3])
def test_minutes_take_some_of_what_standard_input_had(
    kinds: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read only once."""
    rows = [{"prompt": "x " * 30 + str(n)} for n in range(90)]
    for n, row in enumerate(rows if kinds else []):
        row["category"] = str(n * kinds // len(rows))  # one after the other
    read, _find = list[Any](), sweep_plan.plan_sweep

    def watched(backend: Any, recipes: Any, found: Any, *rest: Any, **more: Any) -> Any:
        read.append(found.prompts)
        return _find(backend, recipes, found, *rest, **more)

    monkeypatch.setattr(sweep_plan, "plan_sweep", watched)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    unused = ("--set", "data.template={a: 1}")
    plan = planned(capsys, "--prompt-file", "-", "--minutes", "1", *unused)
    assert "unread_by_template" in [one["code"] for one in plan["warnings"]]
    whole, few = read
    assert len(whole) == 90 and len(few) == plan["num_prompts"] < 80
    assert [prompt.index for prompt in few] == list(range(len(few)))
    places = [int(prompt.text.split()[-1]) for prompt in few]
    counts = Counter(prompt.category for prompt in few)
    if kinds:
        assert places == sorted(set(places)) and len(counts) == kinds
        assert max(counts.values()) - min(counts.values()) <= 1
    else:
        assert places == list(range(len(few)))


@pytest.mark.usefixtures("slow_machine")
def test_minutes_choose_no_size_for_a_shard(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of different sizes could not be merged."""
    asked = ["sweep-k", "--minutes", "1", "--dry-run"]
    told = "--minutes and --shard exclude each other"
    assert main([*asked, "--shard", "0/2"]) == 2 and told in capsys.readouterr().err
    for name, value in (("ID", "1"), ("COUNT", "2"), ("MIN", "0"), ("STEP", "1")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert main(asked) == 2
    assert told in (shown := capsys.readouterr().err) and "--shard 0/1 takes all" in shown
    assert main([*asked, "--shard", "0/1"]) == 0


def test_a_dry_run_has_one_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose measured speed is never the same twice, with prompts of many lengths of
    which some are drawn."""
    times = iter(range(1, 100))
    monkeypatch.setattr(duration, "_fastest", lambda *_: next(times) * 1e-2)
    duration.speeds_of.cache_clear()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "{"x " * (1 + 9 * n)}", "category": "{n % 2}"}}\n' for n in range(40))
    )
    asked = ["sweep-k", "--minutes", "2", "--k", "0-4", "--dry-run", "--prompt-file", str(rows)]
    assert main(asked) == 0
    duration.speeds_of.cache_clear()
    shown = capsys.readouterr()
    (chosen,) = re.findall(r"about (.*)", shown.err)
    (planned,) = re.findall(r"time: about (.*?),", shown.out)
    assert chosen == planned and "40 prompts" not in shown.err


@pytest.mark.parametrize("batch_size", [1, 24])
def test_minutes_too_few_for_anything(
    batch_size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has minutes that suffice for the smallest sweep, whose batches are full."""
    speeds = duration.Speeds(bytes=2e9, operations=2e10)
    monkeypatch.setattr(duration, "speeds_of", lambda *_: speeds)
    asked = ["sweep-k", "--k", "0,20", "--batch-size", str(batch_size), "--dry-run", "--json"]
    assert main([*asked, "--minutes", "0.1"]) == 2
    told = capsys.readouterr().err
    assert "--minutes 0.1: the smallest sweep of these points is " in told
    (enough,) = re.findall(r"which needs --minutes ([0-9.]+)", told)
    assert main([*asked, "--minutes", enough]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_prompts"] == max(8, batch_size)
    assert plan["recipe"]["sampling"]["max_new_tokens"] == 16
    assert plan["seconds"] <= 60 * float(enough)


def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    before = torch.get_num_threads()
    try:
        arguments = ["generate", "--threads", "3", "--max-new-tokens", "2", "--prompt", "x"]
        assert main(arguments) == 0
        assert torch.get_num_threads() == 3 and os.environ["OMP_NUM_THREADS"] == "3"
    finally:
        torch.set_num_threads(before)


NOISE = Notice("cpu_load", "9.0 processes were ready to run")
LITTLE = ("--max-new-tokens", "2", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("generate", "demo", "--prompt-file", "ROWS", *LITTLE),
            ["image (1 of 2 rows)", "9.0 proc"],
        ),
        (
            ("sweep-k", "demo", "--k", "1", "--limit", "2", "--repeats", "1", *LITTLE),
            ["--sample stratified", "too few for intervals", "9.0 proc"],
        ),
        (("sweep-k", "demo", "--prompt-file", "ROWS", "--dry-run"), ["image (1 of 2 rows)"]),
        (("compare-tp", "demo", "--prompt-file", "ROWS", "--dry-run"), ["image (1 of 2 rows)"]),
    ],
)
def test_quiet_hides_progress_and_no_warning(
    arguments: tuple[str, ...],
    told: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "image": "a.png"}\n{"prompt": "y"}\n')
    monkeypatch.setattr(machine.MachineWatch, "notices", lambda _: [NOISE])
    given = [str(rows) if one == "ROWS" else one for one in arguments]
    assert main([*given, "-q"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("warning: ") for line in lines)
    assert all(any(part in line for line in lines) for part in told)
    assert main(given) == 0
    louder = capsys.readouterr().err.splitlines()
    assert "--dry-run" in given or len(louder) > len(lines)


def test_keys_that_need_a_rate_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sweep-k", "--k", "1", "--dry-run", "--duration", "4", "--request-rate"]
    assert main([*asked, "inf"]) == 0
    assert "come at once, and load.duration_s has no effect" in capsys.readouterr().err
    assert main([*asked, "9,inf"]) == 0
    assert "has no effect" not in capsys.readouterr().err


def test_due_times_of_another_rate_than_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "due.txt"
    file.write_text("0\n0.5\n1.0\n")
    asked = ["sweep-k", "--request-rate", "9", "--arrivals", str(file), "--k", "1", "--dry-run"]
    assert main(asked) == 0
    assert "come at 2 a second, not 9" in (told := capsys.readouterr().err)
    assert "pass --request-rate 2, or another file" in told
