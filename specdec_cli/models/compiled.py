"""Compiled forward passes that never silently fall back to eager mode.

If Dynamo has compiled the same code object too often, it silently runs it in eager mode. So every
compiled function has a code object of its own and is compiled only once, as one whole graph. Each
model has two such functions, because a graph with a dynamic length does not cover length 1: one
for passes of a single token, and one for passes of more tokens.
"""

import os
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from specdec_cli.errors import SetupError
from specdec_cli.models.hidden import HiddenStates
from specdec_cli.text import reason_of

CompileError = torch._dynamo.exc.TorchDynamoException
Outputs = tuple[torch.Tensor, torch.Tensor | None]
Forward = Callable[[torch.Tensor, torch.Tensor, HiddenStates | None], Outputs]


class CompiledForward:
    """The compiled forward pass of `module` over packed tokens.

    name: identifies this model's callables in logs and errors. on_compile: called before each
    compilation, which takes up to a minute without a cache.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        backend: str = "inductor",
        on_compile: Callable[[str], None] = lambda _: None,
    ) -> None:
        # Keep compiled code for the next run, in the user's cache folder.
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(root) / "specdec" / "inductor"))
        self._name = name
        self._on_compile = on_compile
        self._one = _compiled(module, f"{name}_one_token", backend)
        self._many = _compiled(module, f"{name}_tokens", backend)
        self._called: set[bool] = set()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor | None = None,
        states: HiddenStates | None = None,
    ) -> Outputs:
        """Run a pass. Return its logits [T, V], or [M, V] for the rows `logit_rows`, and the hidden
        states [T, L * H] that `states` recorded, or None.

        token_ids, positions: int64 [T].
        logit_rows: int64 [M]; None for all rows.
        states: records the module's hidden states; None to record none. All calls must pass the
            same value.

        The first call with one token compiles, and so does the first call with more. Raises
        Dynamo's exceptions if a pass breaks the graph or would be recompiled.
        """
        one = len(token_ids) == 1
        ids, places = token_ids[None], positions[None]
        if one not in self._called:
            self._on_compile(f"compiling the {self._name}")
            self._called.add(one)
        # Mark the length as dynamic in every call, not only in the first, because the first calls
        # may run eagerly (`compile_ahead`).
        for tensor in () if one else (ids, places):
            torch._dynamo.mark_dynamic(tensor, 1)
        with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
            # Inductor advises to use TF32, which fp32 runs avoid on purpose.
            warnings.filterwarnings("ignore", "TensorFloat32")
            logits, hidden = (self._one if one else self._many)(ids, places, states)
        return logits if logit_rows is None else logits[logit_rows], hidden


def cannot_compile(problem: CompileError) -> SetupError:
    """Return the error for a model that cannot be compiled as one graph. Running it in eager mode
    instead would give misleading timings."""
    reason = reason_of(problem)
    return SetupError(
        f"a model cannot be compiled: {reason}",
        "--set run.compile=off runs it without compiling; -v shows the whole error",
    )


def _compiled(module: Any, name: str, backend: str) -> Forward:
    def forward(
        token_ids: torch.Tensor, positions: torch.Tensor, states: HiddenStates | None
    ) -> Outputs:
        out = module(input_ids=token_ids, position_ids=positions, use_cache=False)
        return out.logits[0], None if states is None else states.take()

    own = types.FunctionType(
        forward.__code__.replace(co_name=name), globals(), name, None, forward.__closure__
    )
    compiled: Forward = torch.compile(own, fullgraph=True, backend=backend)
    return compiled
