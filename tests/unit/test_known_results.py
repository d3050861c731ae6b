"""Operators whose results are known by the shapes of their arguments."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_cli.models.known_results import KnownResults


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


INTS, FLOATS, HALVES = (on_meta(4, 4, dtype=d) for d in (torch.int64, torch.float32, torch.half))

# Each beside others that differ from it in one thing only.
CALLS: list[Callable[[], Tensor]] = [
    lambda: INTS + 1,
    lambda: INTS + 1.0,
    lambda: INTS + True,
    lambda: (INTS > 0) + True,
    lambda: (INTS > 0) + 1,
    lambda: FLOATS + 1,
    lambda: HALVES + 1,
    lambda: FLOATS.t() + 1,
    lambda: FLOATS[:2] + 1,
    lambda: FLOATS * HALVES,
    lambda: FLOATS * FLOATS,
    lambda: torch.cat([FLOATS, FLOATS]),
    lambda: torch.cat([FLOATS, FLOATS], -1),
    lambda: torch.cat([FLOATS, FLOATS, FLOATS]),
    lambda: torch.cat([FLOATS, HALVES]),
    lambda: FLOATS.sum(0),
    lambda: FLOATS.sum(0, keepdim=True),
    lambda: FLOATS.sum(0, dtype=torch.half),
    lambda: FLOATS.sum((0, 1)),
    lambda: FLOATS.topk(2).values,
    lambda: FLOATS.topk(3).values,
    lambda: FLOATS.view(2, 8),
    lambda: FLOATS.view(8, 2),
    lambda: FLOATS[0],
    lambda: FLOATS[0, None],
    lambda: FLOATS[INTS[0]],
    lambda: FLOATS[:, INTS[0, :2]],
    lambda: F.linear(FLOATS, on_meta(7, 4)),
    lambda: torch.zeros(3, device="meta"),
    lambda: torch.zeros(3, dtype=torch.int64, device="meta"),
    lambda: torch.zeros(3),
    lambda: torch.sparse_coo_tensor(size=(3, 3), check_invariants=False, device="meta"),
]


def properties(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.layout


@pytest.mark.parametrize("inference", [False, True])
def test_a_known_result_is_that_of_the_operator(inference: bool) -> None:
    with torch.inference_mode(inference):
        expected = [call() for call in CALLS]
        with KnownResults():
            found = [call() for _ in range(2) for call in CALLS]
    assert list(map(properties, found)) == 2 * list(map(properties, expected))


def test_equal_layers_run_their_operators_once() -> None:
    weight, x = on_meta(4, 4), on_meta(3, 4)
    with torch.inference_mode(), Counting() as counting, KnownResults():
        for _ in range(5):
            x = F.silu(F.linear(x, weight)) + x
    del counting.ran["empty_strided"]  # makes the results that are known
    assert counting.ran == {"linear": 1, "silu": 1, "add": 1}


def test_views_and_changes_are_those_of_their_tensors() -> None:
    with torch.inference_mode(), KnownResults():
        first = FLOATS + 1
        first.unsqueeze_(0)
        second = FLOATS + 1
        second.resize_(2, 3)
        third = FLOATS + 1
        changed = third.add_(1)
        view = third[0]
    assert [tuple(x.shape) for x in (first, second, third)] == [(1, 4, 4), (2, 3), (4, 4)]
    assert changed is third
    assert view.untyped_storage()._cdata == third.untyped_storage()._cdata


def test_values_are_computed_each_time() -> None:
    with torch.inference_mode(), KnownResults():
        assert [(torch.tensor(i) + 1).item() for i in range(3)] == [1, 2, 3]


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "to": lambda x: x.cpu(),
}


@pytest.mark.parametrize("how", READS)
def test_code_that_reads_values_fails_as_ever(how: str) -> None:
    """The gate tells from the kind of error why a model is refused."""
    with torch.inference_mode():
        with pytest.raises(RuntimeError) as expected:
            READS[how](FLOATS)
        with KnownResults():
            for _ in range(2):
                with pytest.raises(expected.type) as found:
                    READS[how](FLOATS)
                assert str(found.value) == str(expected.value)


def test_an_operator_of_higher_order_runs() -> None:
    class Applied(HigherOrderOperator):
        def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            result: Tensor = super().__call__(function, x)
            return result

    applied = Applied("applied")
    applied.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(x))
    with torch.inference_mode(), KnownResults():
        assert [applied(f, FLOATS).dim() for f in (torch.sum, torch.abs)] == [0, 2]
