"""From a plan to an engine: the one place where models, caches and the loop are wired."""

from collections.abc import Callable
from dataclasses import replace

import torch

from specdec_cli.engine.draft import AbsentDraft, DraftWorker
from specdec_cli.engine.kv_cache import BlockAllocator, KVCache, block_bytes
from specdec_cli.engine.loop import Engine, Proposer, Request
from specdec_cli.engine.ngram import NgramProposer
from specdec_cli.engine.plan import Plan, borrowed_weights
from specdec_cli.engine.profile import CacheNeed, choose_num_blocks
from specdec_cli.engine.synthetic import SyntheticAcceptance
from specdec_cli.engine.target import TargetScorer
from specdec_cli.errors import SetupError
from specdec_cli.models.compiled import CompiledForward, CompileError, cannot_compile
from specdec_cli.models.fused import fuse
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import SpeculationSection

_WARM_UP_PROMPT = 33  # tokens: more than the widest pass that the decode kernels take


def build(
    plan: Plan,
    longest_prompt: int,
    on_stage: Callable[[str], None] = lambda _: None,
    loaded_target: PagedModel | None = None,
) -> Engine:
    """Load the models, size and allocate the caches, and wire the engine.

    longest_prompt: tokens of the longest prompt to come; with `max_new_tokens` it bounds the
    cache. on_stage: called with each of `plan.stages` as it begins. loaded_target: of an engine
    that is no longer used, whose weights serve again; its cache is given up.

    Raises `SetupError` for damaged checkpoints, for what cannot be compiled and when memory runs
    out.
    """
    recipe, device = plan.recipe, plan.device
    block_size = recipe.cache.block_size
    descriptions = plan.held
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton and NCCL launch on the current one
    try:
        on_stage("loading the target")
        if loaded_target is not None:
            loaded_target.cache.layers.clear()
        modules = [loaded_target.module if loaded_target else load(plan.target, device)]
        if plan.draft is not None and plan.draft in descriptions:
            borrowed = borrowed_weights(plan.draft.module, modules[0], plan.shared)
            on_stage("loading the draft")
            modules.append(load(plan.draft, device, borrowed))
        fused = [] if loaded_target is None else [loaded_target.fused]
        fused += [
            None if d.spec.role in plan.compiled else fuse(module, plan.max_model_len, d.parallel)
            for d, module in list(zip(descriptions, modules, strict=True))[len(fused) :]
        ]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what was larger before it was split or merged
        num_blocks = recipe.cache.num_blocks or choose_num_blocks(
            CacheNeed(
                batch_size=recipe.run.batch_size,
                longest=min(longest_prompt + recipe.sampling.max_new_tokens, plan.max_model_len),
                k=plan.k,
                block_size=block_size,
            ),
            sum(block_bytes(d.layers, block_size, d.dtype) for d in descriptions),
            device,
            gpu_memory_utilization=recipe.cache.gpu_memory_utilization,
            cpu_bytes=recipe.cache.cpu_bytes,
            parallel=plan.parallel,
        )
        caches = [KVCache(d.layers, num_blocks, block_size, d.dtype, device) for d in descriptions]
    except (torch.OutOfMemoryError, MemoryError) as problem:
        raise out_of_memory(plan) from problem
    target = TargetScorer(PagedModel(modules[0], caches[0], fused=fused[0]))
    proposer: Proposer | None = None
    if plan.draft is not None and plan.draft in descriptions:
        narrower = plan.draft.vocab_size < plan.target.vocab_size
        model = PagedModel(modules[1], caches[1], narrower, fused[1])
        proposer = DraftWorker(
            model, plan.target.vocab_size, plan.draft.max_len, plan.draft.parallel
        )
    elif plan.draft is not None:
        proposer = AbsentDraft(plan.target.vocab_size, plan.draft.max_len, device)
    elif plan.k:
        longest, shortest = recipe.speculation.ngram_max, recipe.speculation.ngram_min
        proposer = NgramProposer(longest, shortest, plan.target.vocab_size, device)
    models = {"target": target.model}
    if isinstance(proposer, DraftWorker):
        models["draft"] = proposer.model
    for role in plan.compiled:
        if role == "target" and loaded_target is not None and loaded_target.compiled is not None:
            target.model.compiled = loaded_target.compiled
            continue
        models[role].compiled = CompiledForward(models[role].module, role, on_compile=on_stage)
    engine = Engine(
        target,
        proposer,
        BlockAllocator(num_blocks, block_size),
        batch_size=recipe.run.batch_size,
        max_model_len=plan.max_model_len,
        prefill_chunk=recipe.run.prefill_chunk,
        eos_ids=plan.target.eos_ids,
        synthetic=_synthetic(recipe.speculation) if plan.k else None,
        pipelined=plan.no_cuda_graphs is None,
        parallel=plan.parallel,
    )
    if device.type == "cuda" and recipe.run.warmup:
        # Kernels are compiled at their first launch, and rounds captured, which would count as the
        # first prompt's time.
        params = replace(plan.params, max_new_tokens=2 * (plan.k + 1))
        on_stage("compiling kernels and capturing rounds")
        try:
            engine.run([Request(0, (0,) * _WARM_UP_PROMPT)], plan.k, params)
        except CompileError as problem:
            raise cannot_compile(problem) from problem
    return engine


def out_of_memory(plan: Plan) -> SetupError:
    """The error for running out of memory, with what was asked for."""
    weights = " + ".join(f"{d.spec.role} {d.weight_bytes / 2**20:,.0f} MiB" for d in plan.held)
    where = str(plan.device)
    if plan.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(plan.device)
        where += f" ({free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free)"
    return SetupError(
        f"out of memory on {where}; the weights alone are {weights}",
        "use smaller models, a smaller dtype or batch size, or set cache.num_blocks",
    )


def _synthetic(speculation: SpeculationSection) -> SyntheticAcceptance | None:
    if speculation.acceptance != "synthetic":
        return None
    if speculation.synthetic_acceptance_rates is not None:
        return SyntheticAcceptance.from_rates(speculation.synthetic_acceptance_rates)
    assert speculation.synthetic_acceptance_length is not None, "the recipe's schema saw to it"
    return SyntheticAcceptance.from_length(
        speculation.synthetic_acceptance_length, speculation.num_speculative_tokens
    )
