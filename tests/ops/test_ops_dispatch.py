import inspect
import os
import subprocess
import sys
from pathlib import Path

import torch
from ops_helpers import (
    Shape,
    assert_close,
    make_problem,
    needs_cuda,
    paged_attention_reference,
)
from specdec_kernels import dispatch, ops
from specdec_kernels.dispatch import Kernel

KERNELS = Path(__file__).parents[2] / "kernels"

LIGHT = """
import sys
import specdec_kernels
assert not {"torch", "triton"} & set(sys.modules)
"""

# A module that is None in sys.modules cannot be imported.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from specdec_kernels import ops

start = torch.tensor([0, 2], dtype=torch.int32)
tables = torch.tensor([[1]], dtype=torch.int32)
slots = ops.slot_mapping(tables, start, torch.tensor([0, 1]), 4)
cache = ops.LayerCache(*torch.zeros(2, 2, 4, 1, 8))
x = torch.randn(2, 1, 8)
ops.write_kv(x, x, cache, slots)
context = torch.tensor([2], dtype=torch.int32)
call = ops.AttentionCall(1.0)
out = ops.paged_attention(x, cache, tables, start, context, 2, call)
assert torch.equal(out[0], x[0])
x = torch.tensor([[[-9.0, 9.0], [9.0, -9.0]]])
u = torch.zeros(1, 2)
drafts, lens = torch.ones(1, 1).long(), torch.ones(1).long()
filters = (1e-3, 0, 1.0)
rounds = ops.Verification(drafts, lens, x[:, :1], None, x, None, *filters, u[:, :1], u)
tokens, accepted = ops.reject_logits(rounds)
assert tokens.tolist() == [[1, 0]] and accepted.tolist() == [1]
assert ops.sample_logits(x[0], None, *filters, u[0]).tolist() == [1, 0]
"""


def run_python(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_light():
    run_python(LIGHT)


def test_cpu_use_needs_no_triton():
    run_python(WITHOUT_TRITON)


def test_the_first_tensor_decides_whatever_its_place(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch, "HAS_CUDA", True)
    kernel = Kernel(lambda *_, **__: "torch", "no_module:no_function")
    kernel.on_cuda = lambda *_, **__: "triton"
    here, there = torch.zeros(1), torch.zeros(1).as_subclass(OnDevice)
    assert kernel(there, here) == kernel(2, there) == kernel(2, x=there) == "triton"
    assert kernel(here, there) == kernel(2, x=here) == kernel() == "torch"
    stored = object()  # a weight that is no tensor
    normed = [ops.Normed(x, x, None, 0.0) for x in (here, there)]
    assert [kernel(x, stored) for x in normed] == ["torch", "triton"]


def test_attention_on_cpu():
    problem = make_problem(Shape((2, 1), (12, 7)), torch.float32, torch.device("cpu"))
    arguments = dict(vars(problem))
    out = ops.paged_attention(**arguments)
    del arguments["max_query_len"]
    assert_close("out", paged_attention_reference(**arguments), out, 1e-5)


@needs_cuda
def test_cuda_never_waits_for_the_host(device):
    """All ops are captured into one CUDA graph; a synchronisation would fail the capture."""
    problem = make_problem(Shape((2, 3), (40, 9), padding=1), torch.bfloat16, device)
    logits = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    drafts, lens = logits[:, :2].argmax(2), torch.tensor([2, 1], device=device)
    noise, filters = torch.full((2, 3), 0.3, device=device), (0.8, 0, 1.0)
    start = problem.query_start
    positions = torch.arange(6, device=device)
    key = problem.query[:, :2].contiguous()
    cache = ops.LayerCache(problem.cache.keys.clone(), problem.cache.values.clone())

    def run() -> list[torch.Tensor]:
        slots = ops.slot_mapping(problem.block_tables, start, positions, 8)
        ops.write_kv(key, key, cache, slots)
        rows = ops.logit_rows(logits.flatten(0, 1), *filters)
        drawn = ops.sample_logits(logits.flatten(0, 1), rows, *filters, noise.flatten())
        out = ops.paged_attention(**vars(problem))
        rounds = [drafts, lens, logits[:, :2], rows.rows.view(2, 3, 4)[:, :2].contiguous()]
        rounds += [logits, rows, *filters, noise[:, :2], noise]
        decided = ops.reject_logits(ops.Verification(*rounds))
        return [slots, drawn, out, *decided]

    eager = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    for before, after in zip(eager, captured, strict=True):
        assert torch.equal(before, after)


def test_triton_functions_take_what_the_public_ones_take():
    """Names, order and defaults are the same; launch settings with defaults may follow."""
    kernels = [value for value in vars(ops).values() if isinstance(value, Kernel)]
    assert len(kernels) > 20
    for kernel in kernels:
        ours, theirs = (
            list(inspect.signature(f).parameters.values())
            for f in (kernel.reference, kernel.on_cuda)
        )
        taken = [(p.name, p.default) for p in theirs]
        assert taken[: len(ours)] == [(p.name, p.default) for p in ours], kernel.path
        assert all(p.default is not p.empty for p in theirs[len(ours) :]), kernel.path
