"""`specdec generate` over ranks gives the tokens, document and errors of one rank."""

import json
import shutil
from pathlib import Path

import pytest

from specdec_cli.app import main
from specdec_cli.demo import demo_path
from specdec_cli.errors import SetupError
from specdec_cli.models.ahead import check_ahead
from specdec_cli.models.refusals import Indivisible
from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import generate
from tests.launch.forks import over_forks
from tests.launch.helpers import living, marked, start

pytestmark = pytest.mark.dist

ASKED = ("--max-new-tokens", "24", "--json", "--prompt", "def add(a, b):", "-q")


def test_two_ranks_write_what_one_writes(capsys: pytest.CaptureFixture[str]) -> None:
    environ = marked()
    program = ["-m", "specdec_cli", "generate", "--device", "cpu", "--target-tp", "2", *ASKED]
    out, _ = start(program, environ).communicate(timeout=180)
    alone = generate(capsys, *ASKED)
    assert json.loads(out)["outputs"][0]["token_ids"] == alone.outputs[0]["token_ids"]
    assert json.loads(out)["recipe"]["target"]["tensor_parallel_size"] == 2
    assert living(environ) == []


def test_what_all_ranks_find_is_told_of_none(tmp_path: Path) -> None:
    copy = shutil.copytree(demo_path("demo:target"), tmp_path / "m")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    options = ["--target", str(copy), "--draft", str(copy), "--target-tp", "2", "--device", "cpu"]
    result = over_forks("generate", *options, *ASKED)
    assert result.code == 5
    assert result.document["error"]["message"].startswith("cannot read the weights")


@pytest.mark.parametrize(
    ("command", "options", "code", "message"),
    [
        ("generate", ["--prompt", "x", "--target-tp", "3"], 2, "its 8 attention heads cannot be"),
        ("sweep-k", ["--target-tp", "64"], 2, "among 64 ranks"),
        ("profile-blocks", ["--target-tp", "2", "--draft", "/no/such"], 5, "no such model folder"),
        ("generate", ["--prompt", "", "--target-tp", "3"], 2, "--prompt: empty prompt"),
    ],
)
def test_what_a_folder_tells_is_told_before_ranks_start(
    command: str,
    options: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("specdec_cli.launch.ranks.run_ranks", never)
    assert main([command, *options, "--device", "cpu", "-q"]) == code
    assert message in capsys.readouterr().err


def test_what_a_folder_does_not_tell_is_left_to_the_ranks(tmp_path: Path) -> None:
    """The parent cannot check a hub id, an unused draft, or a config without a number of heads."""
    keys = {"target.tensor_parallel_size": 3, "target.model": str(tmp_path)}
    k0 = {"speculation.num_speculative_tokens": 0, "draft.model": "/no/such"}
    for text in ('{"n_head": 4}', '{"num_attention_heads": null}'):
        (tmp_path / "config.json").write_text(text)
        check_ahead(load_recipe(None, keys | k0))
    check_ahead(load_recipe(None, keys | k0 | {"target.model": "owner/name"}))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SetupError, match=r"cannot read config\.json of "):
            check_ahead(load_recipe(None, keys | k0))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(Indivisible, match="its 4 attention heads cannot be divided among 3 ranks"):
        check_ahead(load_recipe(None, keys | k0))


def test_an_error_on_one_rank_is_told_once_with_its_code() -> None:
    options = ["--device", "cpu", "--target-tp", "2", *ASKED]
    result = over_forks("generate", *options, PLANTED_FAULT="setup:verify:1")
    assert result.code == 5
    document = {"code": 5, "message": "rank 1: no such thing", "hint": "look elsewhere"}
    assert result.document == {"error": document}
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: rank 1: no such thing"]
