import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aot_compile
import pytest
from specdec_kernels.launch_triton import launch_options

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
SHARED_MEMORY = 227 * 1024  # bytes for one block on sm_90

# These cases take a third of the time, and other cases cover nearly the same code.
# `pytest tests/ops/test_aot_compile.py` compiles all.
SLOW = {
    *("rope_attention-fp32-D128", "rope_attention-verify-long", "rope_attention-verify-D64"),
    *("rope_attention-batch-32", "attention-fp32-D256", "linear-fp32-many", "batch-16-sm_89"),
    *("rope_attention-decode", "rope_attention-batch-16", "attention-prefill-D256"),
    *("block_verify-other-dtype", "reject_logits-other-dtype", "linear-add-48-sm_80", "down-fp32"),
    *("rope_attention-D256", "linear-add-2-sm_80", "linear-add-48-sm_89", "linear-add-wide"),
    *("route-8", "route-fp32", "gate_up-8", "gate_up-fp32", "down-8", "group-4"),
    *(f"grouped_gate_up-{kind}" for kind in ("17", "512", "fp32", "512-sm_80")),
    *(f"grouped_down-{kind}" for kind in ("17", "512", "fp32", "512-sm_80", "512-sm_89")),
}


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in names]


@pytest.fixture(scope="module")
def sizes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, int]]:
    """Sizes of the kernels in the selected tests."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    here = [item for item in items if item.path == Path(__file__) and "sizes" in item.fixturenames]
    names = dict.fromkeys(str(item.callspec.params["case"]) for item in here)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(KERNELS), os.getenv("PYTHONPATH")])
    )
    command = [sys.executable, str(HERE / "aot_compile.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, dict[str, int]] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("case", marked(aot_compile.CASES))
def test_kernel_compiles_for_sm_90(case, sizes):
    assert sizes[case]["cubin"] > 0
    assert sizes[case]["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("case", marked(aot_compile.SMALLER))
def test_kernel_fits_gpus_with_less_shared_memory(case, sizes):
    arch, _ = aot_compile.SMALLER[case]
    assert sizes[case]["cubin"] > 0
    assert sizes[case]["shared"] <= aot_compile.ROOMS[arch]


@pytest.mark.parametrize("case", marked(c for c in aot_compile.CASES if c.startswith("rope_att")))
def test_attention_begins_to_wait_soon(case, sizes):
    """Transposing keys in pieces before the wait, with barriers between, took 2 us a layer."""
    assert sizes[case]["early_barriers"] <= 4 < sizes[case]["late_barriers"]


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
    cases = {name: case for name, case in aot_compile.CASES.items() if name not in SLOW}
    assert defined == {kernel for _, kernel, *_ in cases.values()}
    assert set(aot_compile.CASES) | set(aot_compile.SMALLER) > SLOW
