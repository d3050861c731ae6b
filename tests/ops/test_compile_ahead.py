"""Compiling kernels ahead: what runs meanwhile, and what it finds in memory."""

import shutil
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_helpers import needs_cuda
from specdec_kernels import ops
from specdec_kernels.compile_ahead import (
    _launchers_of_own_names,
    _launches_that_compile,
    _ZerosForEmpty,
    compile_ahead,
)
from torch import Tensor

LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


def test_nothing_runs_on_a_cpu():
    ran = []
    compile_ahead(lambda: ran.append(1), torch.device("cpu"), 2)
    assert not ran


def test_launches_become_warm_ups():
    class Kernel:
        def run(self, *args, grid, warmup, **options):
            return self, args, grid, warmup, options

    kernel = Kernel()
    with _launches_that_compile(Kernel):
        assert kernel.run(1, grid=(2,), warmup=False, num_warps=4) == (
            *(kernel, (1,), (2,), True),
            {"num_warps": 4},
        )
    assert kernel.run(grid=(2,), warmup=False) == (kernel, (), (2,), False, {})


@pytest.mark.parametrize("has_own_names", [False, True])
def test_a_launcher_that_is_loaded_again_changes_no_other(has_own_names, tmp_path, monkeypatch):
    """Python gives the functions of an extension that it loads again to the last of that name."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    for value in (1, 2):
        source = tmp_path / f"{value}.c"
        source.write_text(LAUNCHER.replace("VALUE", str(value)))
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-shared", "-fPIC", include, str(source), "-o", f"{tmp_path}/{value}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs Python's headers")

    def load(src: str, name: str) -> Any:
        loader = ExtensionFileLoader(name, f"{tmp_path}/{src}")
        module = module_from_spec(ModuleSpec(name, loader, origin=f"{tmp_path}/{src}"))
        loader.exec_module(module)
        return module

    driver = SimpleNamespace(compile_module_from_src=load)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    with _launchers_of_own_names() if has_own_names else nullcontext():
        driver.compile_module_from_src(src="1", name="launcher")
        second = driver.compile_module_from_src(src="2", name="launcher")
        driver.compile_module_from_src(src="1", name="launcher")
    assert second.launch() == (2 if has_own_names else 1)
    assert driver.compile_module_from_src is load


def test_uninitialised_tensors_are_zeros(monkeypatch):
    monkeypatch.undo()  # what fills them with NaN or absurd integers in these tests

    def made() -> list[Tensor]:
        like = torch.full((1 << 12,), 7)
        del like
        like = torch.full((1 << 12,), 7)
        return [torch.empty(1 << 12), torch.empty_like(like), like.new_empty(1 << 12), like]

    with _ZerosForEmpty():
        assert [int(tensor.count_nonzero()) for tensor in made()] == [0, 0, 0, 1 << 12]


@needs_cuda
def test_kernels_are_compiled_and_do_not_run(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # An odd shape, which no other test has compiled.
    x, weight = torch.randn(3, 136, device=device), torch.randn(88, 136, device=device)
    out = torch.full((3, 88), 7.0, device=device)
    compile_ahead(lambda: ops.linear(x, weight, into=out), device, 2)
    assert (out == 7.0).all()
    binaries = set(tmp_path.glob("*/*.cubin"))
    assert binaries
    ops.linear(x, weight, into=out)
    assert set(tmp_path.glob("*/*.cubin")) == binaries
    assert torch.allclose(out, x @ weight.T, atol=1e-3)
