import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aot_compile
import pytest
from specdec_kernels.launch_triton import launch_options

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
SHARED_MEMORY = 227 * 1024  # bytes for one block on sm_90


@pytest.fixture(scope="module")
def sizes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, int]]:
    """Sizes of the kernels in the selected tests. Kernels that the record lacks are compiled."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    here = [item for item in items if item.path == Path(__file__) and "sizes" in item.fixturenames]
    return compiled(tmp_path_factory, {str(item.callspec.params["case"]): None for item in here})


def compiled(folders: pytest.TempPathFactory, arguments: Iterable[str]) -> dict[str, Any]:
    """The output of aot_compile.py."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folders.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(KERNELS), os.getenv("PYTHONPATH")])
    )
    command = [sys.executable, str(HERE / "aot_compile.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if anew := done.stderr.split():
        warnings.warn(
            f"{len(anew)} kernels were compiled: python {command[1]} --write", stacklevel=2
        )
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.slow
def test_the_record_is_what_compiling_gives(tmp_path_factory):
    record = json.loads(aot_compile.RECORD.read_text())
    anew = compiled(tmp_path_factory, ["--anew"])
    assert anew == {name: sizes for name, (_, sizes) in record.items()}


def test_a_case_that_the_record_has_of_other_code_is_compiled(tmp_path_factory, tmp_path):
    """A record with the digest of other code, whose sizes must not be used."""
    record = {"advance": ["0" * 32, {"cubin": 1}]}
    (tmp_path / "other.json").write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="1 kernels were compiled"):
        found = compiled(tmp_path_factory, ["--record-of", str(tmp_path / "other.json"), "advance"])
    assert found["advance"]["cubin"] > 1000


def test_words_about_code_are_no_part_of_it():
    bare = "def f(x):\n    return x + 1"
    told = 'def f(x):\n    """A number."""\n    # a reason\n    return x + 1  # after x'
    assert aot_compile.code_of(told) == aot_compile.code_of(bare)
    assert aot_compile.code_of(told) != aot_compile.code_of(told.replace("x + 1", "x + 2"))
    assert aot_compile.code_of('def f():\n    """Nothing."""') == "def f():\n    pass"


@pytest.mark.parametrize("case", aot_compile.CASES)
def test_kernel_compiles_for_sm_90(case, sizes):
    assert sizes[case]["cubin"] > 0
    assert sizes[case]["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("case", aot_compile.SMALLER)
def test_kernel_fits_gpus_with_less_shared_memory(case, sizes):
    arch, _ = aot_compile.SMALLER[case]
    assert sizes[case]["cubin"] > 0
    assert sizes[case]["shared"] <= aot_compile.ROOMS[arch]


@pytest.mark.parametrize("case", [c for c in aot_compile.CASES if c.startswith("rope_att")])
def test_attention_begins_to_wait_soon(case, sizes):
    """Transposing keys in pieces before the wait, with barriers between, took 2 us a layer."""
    assert sizes[case]["early_barriers"] <= 4 < sizes[case]["late_barriers"]


@pytest.mark.parametrize("case", [c for c in aot_compile.CASES if c.startswith("reduce_add_norm")])
def test_a_sum_of_sent_parts_waits_for_the_matmul_at_its_end(case, sizes):
    """Other sums begin with that wait. Threads meet at barriers to sum, before or after it."""
    at_end = sizes[case]["late_barriers"] == 0 < sizes[case]["early_barriers"]
    assert at_end == case.endswith("-sent")


@pytest.mark.parametrize("case", [c for c in aot_compile.CASES if "linear-narrow" in c])
def test_threads_of_one_row_exchange_nothing_but_sums(case, sizes):
    """Numbers that moved to the threads of x had a barrier for each chunk and twice the code."""
    assert sizes[case]["late_barriers"] <= 5


@pytest.mark.parametrize("case", [c for c in aot_compile.CASES if "stored-narrow" in c])
def test_no_load_of_a_held_share_waits_for_another(case, sizes):
    """An exchange behind each load has a barrier, and is before the wait as the loads are."""
    assert sizes[case]["early_barriers"] == 0


def test_every_launch_asks_the_same_of_triton():
    """Launches use `launch_options`; kernels over logits use `dependence`, which includes them."""
    said = {
        ast.unparse(call.func.value): [ast.unparse(k.value) for k in call.keywords if not k.arg]
        for path in KERNELS.glob("specdec_kernels/**/*_triton.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    }
    assert len(said) >= 25
    for kernel, options in said.items():
        assert re.search(r"\b(launch_options|dependence|constants)\b", " ".join(options)), kernel
    assert launch_options(True) == {"enable_fp_fusion": True, "launch_pdl": True}


def test_every_kernel_is_compiled():
    defined = {
        line.split("def ")[1].split("(")[0]
        for path in KERNELS.glob("specdec_kernels/**/*_triton.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.endswith("_kernel(")
    }
    assert defined == {kernel for _, kernel, *_ in aot_compile.CASES.values()}
