"""`specdec profile-blocks` through the command line, on a CPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specdec_cli.app import main
from specdec_cli.experiment import memory
from specdec_cli.models import description
from specdec_cli.text import parse_bytes
from tests.cli.generate_helpers import Result, on_terminal
from tests.launch.forks import over_forks
from tests.launch.helpers import living, marked, start, torchrun_alone
from tests.support import tiny_config

# The names that scripts may rely on.
RANK_KEYS = (
    "rank device total_bytes target_weight_bytes draft_weight_bytes activation_bytes graph_bytes "
    "other_bytes kv_budget_bytes target_block_bytes draft_block_bytes num_blocks stranded_bytes"
).split()
KEYS = "ranks num_blocks block_size max_tokens max_sequences limiting_rank".split()
SHORT = ("--set", "cache.max_model_len=256", "--device", "cpu")
SMALL = ("--set", "cache.cpu_bytes=4000000", *SHORT)
HOSTILE = "[red]\x1b[31m\x1b]0;x\x07\u202eevil"


def profile(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    capsys.readouterr()
    code = main(["profile-blocks", *map(str, arguments)])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def check_contract(document: dict[str, Any]) -> None:
    assert {*KEYS, "schema", "recipe", "environment"} <= document.keys()
    for place, rank in enumerate(document["ranks"]):
        assert rank.keys() >= set(RANK_KEYS) and rank["rank"] == place
        block = rank["target_block_bytes"] + rank["draft_block_bytes"]
        assert rank["num_blocks"] == rank["kv_budget_bytes"] // block
        assert rank["stranded_bytes"] == rank["kv_budget_bytes"] - document["num_blocks"] * block
    least = min(document["ranks"], key=lambda rank: rank["num_blocks"])
    assert document["num_blocks"] == least["num_blocks"]
    assert document["limiting_rank"] == least["rank"]
    assert document["max_tokens"] == (document["num_blocks"] - 1) * document["block_size"]


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    result = profile(capsys, "demo", *SMALL, "--json", "--context", "100", "--batch-size", "2")
    assert (result.code, result.err) == (0, "")
    document = result.document
    check_contract(document)
    (rank,) = document["ranks"]
    # Heads, widths and layers of the demo pair's configs, fp32, blocks of 16 tokens.
    assert rank["kv_budget_bytes"] == 4_000_000
    by_hand = []
    for model in ("target", "draft"):
        config = json.loads(
            (Path(__file__).parents[2] / "specdec_cli/demo" / model / "config.json").read_text()
        )
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = config["num_key_value_heads"]
        by_hand.append(config["num_hidden_layers"] * heads * 2 * width * 16 * 4)
    assert [rank["target_block_bytes"], rank["draft_block_bytes"]] == by_hand
    k = document["recipe"]["speculation"]["num_speculative_tokens"]
    per_sequence = -(-(100 + 2 * (k + 1)) // 16)
    assert document["max_sequences"] == (document["num_blocks"] - 1) // per_sequence
    assert document["fit"]["fits"] and document["fit"]["needed_blocks"] == 2 * per_sequence + 1
    alone = document["draft_cost"]["target_alone"]["num_blocks"]
    assert alone == 4_000_000 // by_hand[0] > document["num_blocks"]


@pytest.mark.dist
def test_two_ranks_with_the_draft_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--target-tp", "2", "--draft-tp", "1", *SMALL, "--json")
    result = over_forks("profile-blocks", "demo", *options)
    assert (result.code, result.err) == (0, "")
    document = result.document
    check_contract(document)
    first, idle = document["ranks"]
    assert first["kv_budget_bytes"] == idle["kv_budget_bytes"] == 2_000_000
    assert idle["draft_weight_bytes"] == idle["draft_block_bytes"] == 0 < first["draft_block_bytes"]
    assert document["limiting_rank"] == 0
    assert idle["stranded_bytes"] > first["draft_block_bytes"] * (document["num_blocks"] - 1)
    by_tp = {row["draft_tp"]: row["num_blocks"] for row in document["draft_cost"]["by_draft_tp"]}
    estimate = profile(capsys, "demo", "--estimate", *options)
    assert estimate.document["num_blocks"] == document["num_blocks"] == by_tp[1] < by_tp[2]
    for measured, guess in zip(document["ranks"], estimate.document["ranks"], strict=True):
        # On a CPU a rank's shard of a tied head is a copy. Inverse frequencies are not counted.
        for name in ("target_weight_bytes", "draft_weight_bytes"):
            assert guess[name] == pytest.approx(measured[name], abs=256)


def test_an_estimate_over_lists(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ("--draft-tp", "1,2,3", "-k", "0,5", "--block-size", "16,32")
    recipe = ("bench-8b-1b-dummy", "--target-tp", "2", "--context", "4096")
    result = profile(capsys, *recipe, "--estimate", "--device-memory", "24GiB", *lists, "--json")
    assert result.code == 0
    document = result.document
    check_contract(document)
    rows = {(p["draft_tp"], p["k"], p["block_size"]): p for p in document["points"]}
    assert len(rows) == len(document["points"]) == 12
    assert rows[3, 5, 16]["status"] == "skipped" and "should divide" in rows[3, 5, 16]["reason"]
    assert rows[1, 0, 16]["num_blocks"] == document["num_blocks"], "the first values are shown"
    for block_size in (16, 32):
        by_tp = [rows[tp, 5, block_size]["num_blocks"] for tp in (1, 2)]
        assert by_tp[0] < by_tp[1] < rows[1, 0, block_size]["num_blocks"]
    assert rows[2, 5, 16]["num_blocks"] // 2 == rows[2, 5, 32]["num_blocks"]
    # 8 heads over 2 ranks, bf16: 32 layers x 4 x 256 x 16 x 2 bytes, and 16 x 4 x 128 x 16 x 2.
    rank = rows[2, 5, 16]["ranks"][0]
    assert (rank["target_block_bytes"], rank["draft_block_bytes"]) == (2**20, 2**18)
    assert [r["draft_block_bytes"] for r in rows[1, 5, 16]["ranks"]] == [2**19, 0]


@pytest.mark.parametrize("sizes", ["24GiB,80GiB", "80GiB,24GiB,80GiB"])
def test_an_estimate_over_devices(
    sizes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[tuple[Any, ...]] = []

    def describe(*what: Any) -> Any:
        described.append(what)
        return description.describe(*what)

    monkeypatch.setattr(memory, "describe", describe)
    asked = ("bench-8b-1b-dummy", "--estimate", "--context", "2048", "-k", "4,0")
    found = profile(capsys, *asked, "--device-memory", sizes, "--json").document
    rows = {(p["device_memory_bytes"] >> 30, p["k"]): p["num_blocks"] for p in found["points"]}
    assert list(rows) == [(int(s[:2]), k) for s in dict.fromkeys(sizes.split(",")) for k in (4, 0)]
    assert rows[24, 4] < rows[24, 0] < rows[80, 4] < rows[80, 0]
    assert len(described) == len(set(described)) == 2, "each model once for all points"
    assert found["num_blocks"] == rows[int(sizes[:2]), 4], "the first size and k are shown whole"
    shown = profile(capsys, *asked, "--device-memory", sizes).out
    assert "24.00 GiB" in shown and "80.00 GiB" in shown


def test_a_model_out_of_reach_leads_to_bundled_shapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = profile(capsys, "--target", "nobody/none-8b", "--estimate", "--json")
    assert found.code == 5 and "bench-8b-1b-dummy" in found.document["error"]["hint"]


def test_a_degree_over_which_the_draft_cannot_be_split_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, heads in (("target", 8), ("draft", 2)):
        config = tiny_config("llama", num_attention_heads=heads, num_key_value_heads=2, head_dim=8)
        config.save_pretrained(tmp_path / name)
    pair = ("--target", tmp_path / "target", "--draft", tmp_path / "draft", "--target-tp", "4")
    dummy = ("--set", "target.load_format=dummy", "--set", "draft.load_format=dummy")
    asked = (*pair, *dummy, *SMALL, "--estimate", "--json")
    found = profile(capsys, *asked, "--draft-tp", "4,1,3,2")
    assert found.code == 0, found.err
    rows = {p["draft_tp"]: p for p in found.document["points"]}
    assert [rows[tp]["status"] for tp in (1, 2, 3, 4)] == ["ok", "ok", "skipped", "skipped"]
    assert "2 attention heads cannot be divided among 4 ranks" in rows[4]["reason"]
    assert rows[4].keys() == rows[3].keys()
    assert found.document["num_blocks"] == rows[1]["num_blocks"]
    alone = profile(capsys, *asked, "--draft-tp", "4")
    assert alone.code == 2 and "cannot be divided" in alone.document["error"]["message"]


@pytest.mark.parametrize("draft", ["demo:mtp", "demo:target --set draft.share=[lm_head]"])
def test_a_degree_at_which_the_draft_cannot_use_the_targets_head_is_a_row(
    draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("demo", *SMALL, "--draft", *draft.split(), "--target-tp", "2", "--estimate", "--json")
    found = profile(capsys, *asked, "--draft-tp", "1,2")
    assert found.code == 0, found.err
    skipped, fitting = found.document["points"]
    assert (skipped["status"], fitting["status"]) == ("skipped", "ok")
    assert "split over 2 ranks" in skipped["reason"] and skipped["k"] == fitting["k"]
    found = profile(capsys, *asked, "--draft-tp", "1,2", "--block-size", "16,0")
    assert found.code == 2 and "block_size" in found.err, "no degree would do"


@pytest.mark.parametrize("share", ["[]", "[embeddings]"])
def test_a_draft_with_a_tied_head_over_ranks(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shard of a tied head is a view of the embedding, unless the embedding is borrowed."""
    options = ("--target-tp", "2", "--estimate", "--device-memory", "24GiB", "--json")
    options += ("--set", "target.model=shapes/llama-1b", "--set", f"draft.share={share}")
    # 16 layers of 4096 query and output, 1024 key and value and 24576 further columns.
    embedding, layers = 128256 * 2048, 16 * (4096 + 1024 + 24576) * 2048
    rest = 33 * 2048 + 2 * 8192 * 64  # norms, and the table of rotary embeddings
    by_hand = {1: 2 * (embedding + layers + rest), 2: 2 * (embedding + layers // 2 + rest)}
    if share != "[]":
        by_hand[2] -= embedding  # its half of the head is then a copy
    found = {}
    for degree in (1, 2):
        result = profile(capsys, "bench-8b-1b-dummy", *options, "--draft-tp", str(degree))
        found[degree] = result.document
        assert found[degree]["ranks"][0]["draft_weight_bytes"] == by_hand[degree]
    for document in found.values():
        for row in document["draft_cost"]["by_draft_tp"]:
            assert row["num_blocks"] == found[row["draft_tp"]]["num_blocks"]


def test_no_machine_is_filled_with_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("specdec_cli.launch.ranks.run_ranks")
    result = profile(capsys, "demo", *SMALL, "--target-tp", "1024")
    assert (result.code, result.out) == (2, "")
    assert "tensor_parallel_size is 1024; specdec starts at most 64 ranks" in result.err


@pytest.mark.dist
@pytest.mark.slow  # each process imports for itself; test_report_command.py has torchrun's, too
def test_one_of_torchruns_processes_writes_an_estimate(tmp_path: Path) -> None:
    environ, folder = marked(), tmp_path / "run"
    asked = ["-m", "specdec_cli", "profile-blocks", "demo", "--target-tp", "2", *SMALL]
    program = [*torchrun_alone(2), *asked, "--estimate", "--json", "-o", str(folder)]
    parent = start(program, environ)
    out, err = parent.communicate(timeout=300)
    assert parent.returncode == 0, err
    assert json.loads(out) == json.loads((folder / "summary.json").read_text())
    assert living(environ) == []


@pytest.mark.parametrize("mode", [(), ("--estimate",)], ids=["measured", "estimated"])
def test_nothing_fits(mode: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    tight = ("demo", *mode, *SHORT, "--set", "cache.cpu_bytes=100000")
    result = profile(capsys, *tight)
    assert (result.code, result.out) == (5, "")
    words = r"no room for a KV cache on cpu: 0\.1 MiB are left, but one block of 16 tokens"
    assert re.match(rf"error: {words} takes 0\.2 MiB\nhint: ", result.err)
    error = profile(capsys, *tight, "--json").document["error"]
    assert error["code"] == 5 and re.match(words, error["message"])


def test_weights_that_do_not_fit_a_gpu_one_does_not_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--estimate", "--device-memory", "16GiB", "--json")
    error = profile(capsys, "bench-8b-1b-dummy", *options).document["error"]
    assert error["code"] == 5
    assert "of 16,384.0 MiB, weights take 15,3" in error["message"]


def test_what_would_make_a_batch_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("demo", *SMALL, "--context", "200", "--estimate", "--json")
    fit = profile(capsys, *asked, "--batch-size", "50").document["fit"]
    assert not fit["fits"]
    advised = next(line for line in fit["advice"] if line.startswith("--batch-size"))
    size = advised.split()[1].rstrip(":")
    assert profile(capsys, *asked, "--batch-size", size).document["fit"]["fits"]
    assert not profile(capsys, *asked, "--batch-size", str(int(size) + 1)).document["fit"]["fits"]
    bytes_wanted = next(line for line in fit["advice"] if "cpu_bytes" in line).split()[1]
    more = ("--batch-size", "50", "--set", bytes_wanted.rstrip(","))
    assert profile(capsys, *asked, *more).document["fit"]["fits"]


def test_the_longest_context_is_the_longest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """23 blocks for three sequences: the remainder of the division by three is unused."""
    asked = ("demo", *SMALL, "--estimate", "--json", "--batch-size", "3")
    document = profile(capsys, *asked, "--context", "1").document
    longest = document["fit"]["longest_context"]
    k = document["recipe"]["speculation"]["num_speculative_tokens"]
    assert longest == (document["num_blocks"] - 1) // 3 * 16 - 2 * (k + 1)
    for context, fits in ((longest, True), (longest + 1, False)):
        fit = profile(capsys, *asked, "--context", str(context)).document["fit"]
        assert (fit["fits"], fit["longest_context"]) == (fits, longest)
    # Without prompts in options or recipe sequences are as long as the models can hold.
    alone = profile(capsys, "demo", "--estimate", "--json", "--set", "data.path=null").document
    assert alone["context"] == alone["fit"]["longest_context"] == 2048


@pytest.mark.parametrize("blocks", ["10", "1000000"])
def test_a_recipe_with_another_number_of_blocks_than_fits(
    blocks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("demo", *SMALL, "--context", "200", "--estimate", "--json", "--num-blocks", blocks)
    document = profile(capsys, *asked).document
    fit = document["fit"]
    assert document["num_blocks"] == 24 and fit["recipe_blocks"] == int(blocks)
    # 200 tokens and two rounds of 5.
    assert not fit["fits"] and fit["needed_blocks"] == 15
    (advised,) = fit["advice"]
    count = advised.partition(":")[0].split()
    assert profile(capsys, *asked, *count).document["fit"]["fits"]
    more = profile(capsys, *asked, "--batch-size", "3").document["fit"]
    advised = next(line for line in more["advice"] if line.startswith("--set cache.max_model_len"))
    assert advised.endswith("; leave out --num-blocks")
    options = ("--batch-size", "3", *advised.partition(":")[0].split())
    shorter = [a for a in asked if a not in ("--context", "200", "--num-blocks", blocks)]
    assert profile(capsys, *shorter, *options).document["fit"]["fits"]


def test_a_terminal_gets_a_table_bars_and_answers(tmp_path: Path) -> None:
    result = on_terminal("profile-blocks", "demo", "--set", "cache.cpu_bytes=4000000", "--estimate")
    assert result.code == 0
    for words in ("left for KV", "blocks that fit", "rank 0 ", "█", "fits: it needs", "alone"):
        assert words in result.out
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", result.out).splitlines())) <= 110


def test_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    result = profile(capsys, "demo", "--estimate", *SMALL, "-o", tmp_path / "run")
    assert result.code == 0
    assert (tmp_path / "run/memory.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "run/summary.json").read_text())
    check_contract(kept)
    again = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert again["cache"]["cpu_bytes"] == 4_000_000


def test_a_profile_that_fails_leaves_no_result_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(capsys, "demo", "--estimate", *SMALL, "-o", tmp_path).code == 0
    (tmp_path / "memory.png").touch()  # also where matplotlib is not installed
    (tmp_path / "notes.txt").touch()
    failed = profile(capsys, "demo", *SHORT, "--set", "cache.cpu_bytes=100000", "-o", tmp_path)
    assert failed.code == 5
    kept = {file.name for file in tmp_path.iterdir()}
    assert kept == {"recipe.yaml", "environment.json", "notes.txt"}


def test_a_folder_that_cannot_be_had_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "points.jsonl").write_text("{}\n")
    monkeypatch.delattr("specdec_cli.experiment.memory.load_models")
    result = profile(capsys, "demo", *SMALL, "-o", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "holds the results of an earlier run (points.jsonl)" in result.err


def test_hostile_names_are_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / HOSTILE
    tiny_config("llama", num_key_value_heads=4).save_pretrained(folder)
    dummy = ("--set", "target.load_format=dummy", "-o", tmp_path / f"{HOSTILE}run")
    result = profile(capsys, "--target", folder, *dummy, *SMALL)
    assert result.code == 0
    missing = profile(capsys, "--target", f"{folder}x", "--estimate", *SMALL)
    assert missing.code == 5
    for text in (result.out, result.err, missing.err):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft-tp", "1,2"), "--draft-tp: several values need --estimate"),
        (("-k", "1,x", "--estimate"), "-k: expected numbers such as 1,2,4, got '1,x'"),
        (("--device-memory", "80GiB"), "--device-memory needs --estimate"),
        (("--estimate", "--device-memory", "24"), "did you mean 24GiB?"),
        (("--device-memory", "lots", "--estimate"), "expected a size such as 80GiB"),
        (("--device-memory", "8G", "--estimate", "--device", "cpu"), "run.device is cpu"),
        (("--memory", "8GiB"), "--memory needs --estimate"),
        (("--memory", "8GiB", "--device-memory", "8GiB", "--estimate"), "exclude each other"),
        (("--set", "cache.cpu_bytes=much"), "cache.cpu_bytes: expected a size such as 80GiB"),
        (("--draft-tp", "3", "--estimate"), "(3) should divide target.tensor_parallel_size (1)"),
        (("--context", "1000000", "--estimate"), "--context: 1000000 tokens exceed"),
        (("--block-size", "0", "--estimate"), "--block-size"),
        (("--gpu-memory-utilization", "1.5", "--estimate"), "--gpu-memory-utilization"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else "",
)
def test_bad_options(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = profile(capsys, "demo", *options)
    assert (result.code, result.out) == (2, "")
    assert words in result.err and result.err.startswith("error: ")


def test_a_list_of_too_many_values(capsys: pytest.CaptureFixture[str]) -> None:
    many = ",".join(map(str, range(1, 1002)))
    result = profile(capsys, "demo", "--block-size", many, "--estimate", "--context", "8")
    assert result.code == 2 and "the lists make 1001 combinations" in result.err


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 2**30), ("141GB", 141 * 10**9), ("1.5g", 3 * 2**29), ("4096", 4096)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_the_memory_of_a_host_holds_all(capsys: pytest.CaptureFixture[str]) -> None:
    """`--memory` covers weights, passes and caches of all ranks together."""
    cpu = ("demo", "--estimate", "--device", "cpu", "--memory", "300MiB", "--json")
    (rank,) = profile(capsys, *cpu).document["ranks"]
    held = rank["target_weight_bytes"] + rank["draft_weight_bytes"] + rank["activation_bytes"]
    assert rank["device"] == "cpu" and rank["total_bytes"] == 300 * 2**20
    assert rank["other_bytes"] == 0 and rank["kv_budget_bytes"] == 300 * 2**20 - held
    # Lists, and a limit of the caches' own, which options spell as people do.
    document = profile(capsys, *cpu, "-k", "1,3", "--set", "cache.cpu_bytes=64MiB").document
    assert [point["k"] for point in document["points"]] == [1, 3]
    assert {p["ranks"][0]["kv_budget_bytes"] for p in document["points"]} == {64 * 2**20}
    assert document["recipe"]["cache"]["cpu_bytes"] == 64 * 2**20
    # Without a GPU a recipe for any device is answered for the CPU.
    if not torch.cuda.is_available():
        anywhere = profile(capsys, "demo", "--estimate", "--memory", "300MiB", "--json")
        assert anywhere.document["ranks"][0]["device"] == "cpu"
    asked = ("--prompt", "x = 1", "--prompt", "y", "--max-new-tokens", "7")
    assert 8 < profile(capsys, *cpu, *asked).document["context"] < 14
    small = profile(capsys, *cpu[:4], "--memory", "20MiB")
    assert small.code == 5 and "no room for a KV cache on cpu" in small.err
    told = r"of 20\.0 MiB, weights take [\d.]+ \(target\) and [\d.]+ \(draft\), activations [\d.]+"
    assert re.search(told, small.err)


def asked_with_24_mib_for_caches(capsys: pytest.CaptureFixture[str]) -> tuple[str, ...]:
    """Weights take more bytes on processors for which they are packed, so memory is what models
    take, and 24 MiB: enough for 7 sequences without a draft, and too little with it."""
    asked = ("demo", "--estimate", "--device", "cpu", "--context", "400")
    (rank,) = profile(capsys, *asked, "--memory", "300MiB", "--json").document["ranks"]
    taken = rank["total_bytes"] - rank["kv_budget_bytes"]
    return (*asked, "--memory", str(taken + 24 * 2**20))


def test_a_target_alone_has_the_blocks_of_plain_decoding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = asked_with_24_mib_for_caches(capsys)
    document = profile(capsys, *asked, "-k", "4,0", "--batch-size", "7", "--json").document
    with_draft, alone = (point["num_blocks"] for point in document["points"])
    (row,) = document["draft_cost"]["by_draft_tp"]
    assert document["draft_cost"]["target_alone"]["num_blocks"] == alone
    assert row["lost_share"] == pytest.approx(1 - with_draft / alone)
    assert not document["fit"]["fits"]
    assert "-k 0: it fits without the draft" in document["fit"]["advice"]


def test_more_bytes_for_caches_are_advised_only_where_the_host_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = asked_with_24_mib_for_caches(capsys)

    def advice(*more: str) -> list[str]:
        return profile(capsys, *asked, *more, "--json").document["fit"]["advice"]

    assert not any("cpu_bytes" in line for line in advice("--batch-size", "7"))
    few = ("--set", "cache.cpu_bytes=4000000", "--batch-size")
    assert not any("cpu_bytes" in line for line in advice(*few, "7"))
    wanted = next(line for line in advice(*few, "3") if "cpu_bytes" in line).split()[1]
    more = ("--set", wanted.rstrip(","), "--batch-size", "3", "--json")
    assert profile(capsys, *asked, *more).document["fit"]["fits"]


@pytest.mark.parametrize("way", [["--estimate"], []], ids=["estimated", "measured"])
def test_a_draft_that_the_method_does_not_use_is_told(
    way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("demo-ngram", "--draft", "demo:draft", "--method", "ngram")
    result = profile(capsys, *asked, *SMALL, "-q", *way)
    said = "warning: --draft has no effect: speculation.method is ngram\n"
    assert (result.code, result.err) == (0, said)
    asked = ("demo-ngram", "--draft-tp", "2", "--draft", "ngram")
    said = "warning: --draft-tp has no effect: speculation.method is ngram\n"
    assert profile(capsys, *asked, *SMALL, "-q", *way).err == said
    asked = ("demo", "--method", "none", "-k", "3")
    said = "warning: -k 3 has no effect: speculation.method is none\n"
    assert profile(capsys, *asked, *SMALL, "-q", *way).err == said


def test_a_recipe_of_ones_own_is_not_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`-o` names the recipe's folder; only files of an earlier run are written again."""
    own = tmp_path / "recipe.yaml"
    text = "# mine\ntarget: {model: demo:target}\ndraft: {model: demo:draft}\n"
    own.write_text(text)
    refused = profile(
        capsys, str(own), "--estimate", "--device-memory", "24GiB", "-o", str(tmp_path)
    )
    assert refused.code == 2 and "would be overwritten" in refused.err
    assert own.read_text() == text and not (tmp_path / "summary.json").exists()
    kept = tmp_path / "run"
    for length in ("2", "3"):
        asked = ("--estimate", "--device-memory", "24GiB", "-k", length, "-o", str(kept))
        assert profile(capsys, str(own), *asked).code == 0
        assert f"num_speculative_tokens: {length}" in (kept / "recipe.yaml").read_text()
