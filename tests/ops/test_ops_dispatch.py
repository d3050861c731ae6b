import os
import subprocess
import sys
from pathlib import Path

import torch
from ops_helpers import Shape, assert_close, make_problem, needs_cuda, starts_of
from specdec_kernels import ops
from specdec_kernels.attention.paged import paged_attention_reference
from test_rejection_sample import make_inputs

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
one = torch.ones(1, dtype=torch.int32)
merged, rejected = ops.merge_tokens(
    torch.tensor([7, 8]), start, one, torch.tensor([[9]]), one, start, 2
)
assert merged.tolist() == [7, 9] and not rejected.any()
tables = torch.tensor([[1]], dtype=torch.int32)
slots = ops.slot_mapping(tables, start, torch.tensor([0, 1]), rejected, 4, 4)
key_cache, value_cache = torch.zeros(2, 2, 4, 1, 8)
x = torch.randn(2, 1, 8)
ops.write_kv(x, x, key_cache, value_cache, slots)
context = torch.tensor([2], dtype=torch.int32)
out = ops.paged_attention(x, key_cache, value_cache, tables, start, context, 1.0, 2)
assert torch.equal(out[0], x[0])
p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
u = torch.zeros(1, 2)
tokens, accepted = ops.rejection_sample(torch.ones(1, 1).long(), one, p[:, :1], p, u[:, :1], u)
assert tokens.tolist() == [[1, 0]] and accepted.tolist() == [1]
assert ops.sample_categorical(p[0], u[0]).tolist() == [1, 0]
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


def test_attention_on_cpu():
    problem = make_problem(Shape((2, 1), (12, 7)), torch.float32, torch.device("cpu"))
    arguments = dict(vars(problem))
    out = ops.paged_attention(**arguments)
    del arguments["max_query_len"]
    assert_close("out", paged_attention_reference(**arguments), out, 1e-5)


@needs_cuda
def test_cuda_never_waits_for_the_host(device):
    """All ops, captured into one CUDA graph: a synchronisation would fail the capture."""
    problem = make_problem(Shape((2, 3), (40, 9), padding=1), torch.bfloat16, device)
    inputs = make_inputs([2, 1], 2, 5000, device)
    start = problem.query_start
    tokens = torch.arange(5, device=device)
    end = start[1:] - 1
    one = torch.ones(2, dtype=torch.int32, device=device)
    positions = torch.arange(6, device=device)
    key = problem.query[:, :2].contiguous()
    out_start = starts_of([3, 4], device)
    caches = (problem.key_cache.clone(), problem.value_cache.clone())

    def run() -> list[torch.Tensor]:
        merged = ops.merge_tokens(tokens, start, end, tokens[:2, None], one, out_start, 7)
        slots = ops.slot_mapping(problem.block_tables, start, positions, None, 8, 64)
        ops.write_kv(key, key, *caches, slots)
        drawn = ops.sample_categorical(inputs["target_probs"][:, 0], inputs["sample_noise"][:, 0])
        out = ops.paged_attention(**vars(problem))
        return [*merged, slots, drawn, out, *ops.rejection_sample(**inputs)]

    eager = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    for before, after in zip(eager, captured, strict=True):
        assert torch.equal(before, after)
