"""`specdec generate` over ranks: the tokens, the document and the error of one rank."""

import json
import shutil
from pathlib import Path

import pytest

from specdec_cli.demo import demo_path
from tests.cli.generate_helpers import generate
from tests.launch.helpers import ROOT, living, marked, start

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "/no/such", "--device", "cpu"), "no such model folder: /no/such"),
        (
            ("--target", "DAMAGED", "--draft", "DAMAGED", "--device", "cpu"),
            "cannot read the weights",
        ),
    ],
    ids=["missing", "damaged"],
)
def test_what_all_ranks_find_is_told_of_none(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(demo_path("demo:target"), tmp_path / "m")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    words = [str(copy) if word == "DAMAGED" else word for word in options]
    program = ["-m", "specdec_cli", "generate", "--target-tp", "2", *words, *ASKED]
    parent = start(program, marked())
    out, _ = parent.communicate(timeout=180)
    assert parent.returncode == 5
    assert json.loads(out)["error"]["message"].startswith(message)


def test_an_error_on_one_rank_is_told_once_with_its_code() -> None:
    paths = f"{ROOT / 'tests' / 'launch' / 'site'}:{ROOT}:{ROOT / 'kernels'}"
    environ = marked(PYTHONPATH=paths, PLANTED_FAULT="setup:verify:1")
    program = ["-m", "specdec_cli", "generate", "--device", "cpu", "--target-tp", "2", *ASKED]
    parent = start(program, environ)
    out, err = parent.communicate(timeout=180)
    assert parent.returncode == 5
    document = {"code": 5, "message": "rank 1: no such thing", "hint": "look elsewhere"}
    assert json.loads(out) == {"error": document}
    assert err.count("error: ") == err.count("error: rank 1: no such thing\n") == 1
    assert living(environ) == []
