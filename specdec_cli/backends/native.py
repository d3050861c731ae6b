"""Our own engine as a backend. The module itself implements the protocol
`backends.base.Backend`."""

import os
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import torch

from specdec_cli import __version__, plugin
from specdec_cli.acceptance.base import NoForecast
from specdec_cli.acceptance.registry import for_k
from specdec_cli.backends.base import Finished, OnRound, Prepared, Session
from specdec_cli.core.figures import Metrics
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.types import Arrivals, Emission, Permissions, Request, SamplingParams
from specdec_cli.core.types import Sequence as Seq
from specdec_cli.engine.build import build, build_beside
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.memory.measured import release
from specdec_cli.engine.plan import Plan
from specdec_cli.engine.plan import plan as checked
from specdec_cli.errors import UsageError
from specdec_cli.launch import spinning
from specdec_cli.models.fingerprint import fingerprint
from specdec_cli.models.generation_config import generation_config
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import Recipe

is_native = True
holds_caches = True
_REPORTED_PACKAGES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy")


@dataclass(slots=True, eq=False)
class NativeSession:
    """A session that answers requests with our own engine."""

    engine: Engine

    @property
    def batch_size(self) -> int:
        return self.engine.batch_size

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def reach(self) -> int:
        assert self.engine.proposer is not None, "proposing needs a proposer"
        return self.engine.proposer.max_len

    @property
    def weights(self) -> PagedModel:
        return self.engine.target

    def run(
        self, requests: Sequence[Request], k: int, params: SamplingParams, on_round: OnRound
    ) -> Metrics:
        def on_emit(emissions: list[Emission]) -> None:
            ended = [e.seq for e in emissions if e.seq.finish_reason is not None]
            on_round(emissions, [finished(seq) for seq in ended])

        return self.engine.run(requests, k, params, on_emit).metrics

    def arrive(
        self, arrivals: Arrivals, k: int, params: SamplingParams, on_sign: Callable[[], None]
    ) -> list[Finished]:
        def on_emit(emissions: list[Emission]) -> None:
            on_sign()
            for one in emissions:
                if one.seq.finish_reason is not None:
                    arrivals.answered(one.index, has_failed=one.seq.error is not None)

        found = self.engine.run((), k, params, on_emit, arrivals).seqs
        return [finished(seq) for seq in found if seq.finish_reason is not None]

    def resized(self, batch_size: int) -> "NativeSession":
        if batch_size == self.batch_size:
            return self
        return NativeSession(self.engine.with_batch_size(batch_size))

    def forget_rounds(self) -> None:
        self.engine.forget_rounds()

    def logits_after(
        self, tokens: list[int], width: int, start: int, params: SamplingParams
    ) -> np.ndarray:
        return self.engine.logits_after(tokens, width, start, params).cpu().numpy()

    def forecast(
        self, request: Request, output: list[int], k: int, params: SamplingParams
    ) -> Forecast | None:
        try:
            return self.engine.forecast(request, output, k, params)
        except NoForecast:
            return None


def finished(seq: Seq) -> Finished:
    """Convert a finished sequence to an answer."""
    assert seq.finish_reason is not None
    own: dict[str, Any] = {
        "prompt_token_ids": seq.tokens[: seq.num_prompt_tokens],
        "token_ids": seq.output_ids,
        "max_output_tokens": seq.max_tokens - seq.num_prompt_tokens,
        "served": None,
    }
    same = {f.name: getattr(seq, f.name) for f in fields(Finished) if f.name not in own}
    return Finished(**own, **same)


def for_engine(recipe: Recipe, largest: int, batch_size: int) -> Recipe:
    """Return the recipe with the largest k and the largest batch size of a run, so that the engine
    and its cache are large enough for the whole run."""
    recipe = recipe.model_copy(update={"speculation": for_k(recipe.speculation, largest)})
    recipe = recipe.changed("speculation", num_speculative_tokens=largest)
    return recipe.changed("run", batch_size=batch_size)


def check_kind(recipe: Recipe) -> None:
    """Raise `UsageError` if the recipe asks for another engine, which only sweep-k starts."""
    if (kind := recipe.engine.kind) != "native":
        told = f"engine.kind: {kind} is only for sweep-k, which starts servers"
        raise UsageError(told, "pass --set engine.kind=native")


def prepare(
    recipe: Recipe, permissions: Permissions, largest: tuple[int, int] | None = None
) -> Prepared:
    check_kind(recipe)
    wanted = recipe if largest is None else for_engine(recipe, *largest)
    return prepared(checked(wanted, permissions))


def prepared(plan: Plan) -> Prepared:
    """Convert the engine's plan to the form that measurements use."""
    target, draft, device = plan.target, plan.draft, plan.device

    def fingerprint_of(role: str) -> str | None:
        model = target if role == "target" else draft
        return None if model is None else fingerprint(model.place, model.spec.load_format)

    is_here = device.type == "cuda" and torch.cuda.is_available()
    return Prepared(
        recipe=plan.recipe,
        k=plan.k,
        proposer=plan.recipe.proposer,
        tokenizer=plan.tokenizer,
        vocab_size=target.vocab_size,
        max_model_len=plan.max_model_len,
        device=device,
        device_name=torch.cuda.get_device_name(device) if is_here else device.type,
        dtype_name=str(target.dtype).removeprefix("torch."),
        generation_config=generation_config(target.place),
        eos_ids=target.eos_ids,
        draft_max_len=None if draft is None else draft.max_len,
        ahead=0 if draft is None else draft.passes(plan.k).ahead,
        num_ranks=plan.parallel.size,
        random_roles=frozenset(m.spec.role for m in plan.models if m.spec.load_format == "dummy"),
        has_experts=target.has_experts,
        reads_hidden=bool(target.hidden_layers),
        remark=plan.remark,
        readings=[] if draft is None else draft.readings(),
        stages=plan.stages,
        fingerprint=fingerprint_of,
        plugins=plugin.digests(),
        own=plan,
        few_threads=plan.few_threads,
    )


def open_session(
    plan: Prepared,
    longest_prompt: int,
    on_stage: Callable[[str], None] = lambda _: None,
    weights: object = None,
) -> NativeSession:
    assert isinstance(weights, PagedModel | None)
    return NativeSession(build(plan.own, longest_prompt, on_stage, weights))


def open_beside(
    plan: Prepared, longest_prompt: int, session: Session, on_stage: Callable[[str], None]
) -> NativeSession | None:
    assert isinstance(session, NativeSession)
    found = build_beside(plan.own, longest_prompt, session.engine, on_stage)
    return None if found is None else NativeSession(found)


def environment(plan: Prepared, device: torch.device | None = None) -> dict[str, Any]:
    """Return the facts of the environment to save with the results.

    Only a fixed list of facts is recorded, never environment variables. The entries from
    `plan.own.execution` say which parts of the models were compiled or captured as CUDA graphs, and
    why others were not.

    device: the device to record; None for the plan's device.
    """
    device = device or plan.device
    found: dict[str, Any] = {
        "specdec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: v for p in _REPORTED_PACKAGES if (v := _version(p)) is not None},
        "device": str(device),
        "dtype": plan.dtype_name,
        "torch_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        **plan.own.execution,
    }
    if device.type == "cpu":
        found["thread_spins"] = spinning.told(torch.get_num_threads())
    if plan.plugins:
        found["plugins"] = dict(plan.plugins)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


@cache  # each call searches the installed packages
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def peak_memory(plan: Prepared) -> int:
    """Return the peak memory use so far, in bytes. On a GPU, this is the memory that torch
    reserved; on a CPU, it is the resident memory of this process."""
    if plan.device.type == "cuda":
        return torch.cuda.max_memory_reserved(plan.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory(plan: Prepared) -> None:
    release(plan.device)
