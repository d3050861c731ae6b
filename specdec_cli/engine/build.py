"""Builds an engine from a plan. Only this module connects models, caches and the main loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from specdec_cli.acceptance.registry import rule_of
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.parallel import found_alike, local_world_size
from specdec_cli.core.types import Request
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.memory.budget import (
    CacheNeed,
    RankMemory,
    Split,
    available_memory,
    mib,
    on_host,
    room_now,
    ulimit_hint,
)
from specdec_cli.engine.memory.estimate import estimate_passes
from specdec_cli.engine.memory.measured import (
    Models,
    measure_rank,
    rank_memory,
    release,
    weight_bytes,
)
from specdec_cli.engine.plan import Plan, block_bytes_of, cache_need
from specdec_cli.errors import SetupError
from specdec_cli.lengths.registry import policy_of
from specdec_cli.methods.base import MethodParts, Proposer
from specdec_cli.methods.registry import method_of
from specdec_cli.models.compiled import CompiledForward, CompileError, cannot_compile
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.prompt_passes import Captures, PromptGraphs, width_of
from specdec_cli.stages import begin_stage

_log = logging.getLogger("specdec")
_WARM_UP_PROMPT = 33  # tokens; too many for the decode kernels, so prefill kernels run
_FEWEST_POSITIONS = 1 << 17  # minimum positions in rotary tables, unless the model has fewer


def build(
    plan: Plan,
    longest_prompt: int,
    on_stage: Callable[[str], None] = lambda _: None,
    loaded_target: PagedModel | None = None,
) -> Engine:
    """Load the models, choose the size of the caches and allocate them, and build the engine.

    longest_prompt: the length of the longest prompt in tokens; with `max_new_tokens` it limits the
    size of the caches.
    on_stage: called with each of `plan.stages` as it begins.
    loaded_target: a target to reuse, from an engine that is no longer in use; its cache is freed.
    None to load the target.

    Raises `SetupError` if a checkpoint is damaged, a model cannot be compiled, or memory runs out.
    """
    recipe = plan.recipe
    need = _need_of(plan, longest_prompt)
    plan = _within_reach(plan, need.longest)
    is_open = recipe.cache.num_blocks is None and plan.device.type == "cuda"
    begin_stage("estimating memory")
    rough = sum(estimate_passes(plan, need)) if is_open else 0  # before weights are loaded
    if loaded_target is not None:
        loaded_target.cache.layers.clear()
    with setup_errors(plan):
        models = load_models(plan, on_stage, loaded_target)
        begin_stage("choosing the size of the caches")
        if (num_blocks := recipe.cache.num_blocks) is None:
            num_blocks = _choose_num_blocks(plan, models, need, rough, on_stage)
        elif plan.device.type != "cuda":
            _check_host_room(plan, num_blocks)
        _log.info("the caches have %d blocks of %d tokens", num_blocks, need.block_size)
        begin_stage("allocating the caches")
        engine = wire(plan, models, num_blocks)
    _warm_up(engine, plan, longest_prompt, on_stage)
    return engine


def build_beside(
    plan: Plan,
    longest_prompt: int,
    engine: Engine,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Engine | None:
    """Build an engine with a different proposer that shares the target and the target's cache with
    `engine`. Both engines stay usable.

    Return None, without loading anything, if memory is too small for both, or if a compiled target
    would have to return different hidden states. The other arguments are as for `build`.
    """
    need = _need_of(plan, longest_prompt)
    plan = _within_reach(plan, need.longest)
    target, num_blocks = engine.target, engine.target.cache.num_blocks
    if target.compiled is not None and target.hidden_layers != plan.target.hidden_layers:
        return None
    if not all(plan.parallel.gather_objects(_fits_beside(plan, need, num_blocks))):
        return None
    if engine.hidden_layers is None:
        engine.hidden_layers = target.hidden_layers
    with setup_errors(plan):
        models = load_models(plan, on_stage, target)
        beside = wire(plan, models, num_blocks, keeps_target_cache=True)
        beside.hidden_layers = target.hidden_layers
    _warm_up(beside, plan, longest_prompt, on_stage)
    return beside


def _need_of(plan: Plan, longest_prompt: int) -> CacheNeed:
    longest = longest_prompt + plan.recipe.sampling.max_new_tokens
    return cache_need(plan, min(longest, plan.max_model_len))


def _fits_beside(plan: Plan, need: CacheNeed, num_blocks: int) -> bool:
    """Return whether this rank has enough free memory for the plan's draft: for its weights, its
    cache and, on a GPU, the run's passes."""
    wanted = sum(d.weight_bytes for d in plan.held[1:]) + num_blocks * block_bytes_of(plan)[1]
    if plan.device.type != "cuda":
        return wanted < available_memory() // local_world_size()
    return wanted + 2 * sum(estimate_passes(plan, need)) < room_now(plan.device, plan.recipe.cache)


def _within_reach(plan: Plan, longest: int) -> Plan:
    """Return the plan with its context length limited to `longest` tokens or to 131,072, whichever
    is larger. Rotary tables grow with the context length, and some configs give such a large
    context length that the tables would waste memory."""
    reach = max(longest, _FEWEST_POSITIONS)
    if reach >= plan.max_model_len:
        return plan
    draft = None if plan.draft is None else plan.draft.within(reach)
    return replace(plan, max_model_len=reach, target=plan.target.within(reach), draft=draft)


def load_models(
    plan: Plan,
    on_stage: Callable[[str], None] = lambda _: None,
    loaded_target: PagedModel | None = None,
) -> Models:
    """Load the parts of the models that this rank holds, without allocating caches. The arguments
    are the same as for `build`."""
    device, draft = plan.device, plan.draft
    if device.type == "cuda":
        begin_stage("starting CUDA")
        torch.cuda.set_device(device)  # Triton and NCCL use the current device
        torch.cuda.synchronize(device)
    on_compile = {role: on_stage for role in plan.compiled}
    on_stage("loading the target")
    target, block_size = loaded_target, plan.recipe.cache.block_size
    if target is None:
        with found_alike():
            module = load(plan.target, device)
        target = plan.target.paged(module, block_size, on_compile.get("target"))
    if target.hidden_layers != plan.target.hidden_layers:
        target.hidden_layers = plan.target.hidden_layers
        if target.compiled is not None:  # recompile for different hidden states
            target.compiled = CompiledForward(target.module, "target", on_compile=on_stage)
    models = Models(target)
    if draft is not None:
        if draft in plan.held:
            on_stage("loading the draft")
        with found_alike():
            held = draft.load(target, plan.groups, block_size, on_compile.get("draft"))
        models = Models(target, held)
    begin_stage("freeing memory that loading no longer needs")
    release(device)  # frees the originals of weights that were split or merged
    return models


def wire(
    plan: Plan, models: Models, num_blocks: int, *, keeps_target_cache: bool = False
) -> Engine:
    """Build an engine from loaded models. Each cache gets `num_blocks` blocks, except that
    `keeps_target_cache` leaves the target's cache unchanged."""
    recipe, device = plan.recipe, plan.device
    changed = models.held[1:] if keeps_target_cache else models.held
    for model in changed:
        model.cache.layers.clear()
    for model in changed:
        model.use(model.cache.resized(num_blocks))
    prompts = None
    if plan.captures_prompts:
        prompts = _prompt_graphs(plan, num_blocks)
        for model in changed:
            if isinstance(model, Captures):
                model.capture_prompts(prompts)
    proposer: Proposer | None = None
    if plan.k:
        draft_len = plan.draft.max_len if plan.draft is not None else 0
        parts = MethodParts(recipe.speculation, models.target, models.draft, draft_len, plan.draft)
        proposer = method_of(recipe.speculation).make(parts)
        # The plan could not know which layers a plugin reads.
        if models.target.hidden_layers != proposer.feature_layers:
            models.target.hidden_layers = proposer.feature_layers
    rule, policy = rule_of(recipe.speculation), policy_of(recipe.speculation)
    if proposer is not None:
        recipe.speculation.options.refuse_unknown(recipe.proposer)
    return Engine(
        target=models.target,
        proposer=proposer,
        allocator=BlockAllocator(num_blocks, recipe.cache.block_size),
        batch_size=recipe.run.batch_size,
        max_model_len=plan.max_model_len,
        prefill_chunk=recipe.run.prefill_chunk,
        eos_ids=plan.target.eos_ids,
        rule=rule,
        policy=policy,
        is_captured=plan.no_cuda_graphs is None,
        runs_ahead=device.type == "cuda",
        parallel=plan.parallel,
        prompts=prompts,
        max_k=plan.k,
    )


def _prompt_graphs(plan: Plan, num_blocks: int) -> PromptGraphs:
    """Prepare to capture prefill passes of up to the plan's chunk size as CUDA graphs. Block tables
    in these graphs are wide enough for the longest sequence that the caches can hold."""
    run, block_size = plan.recipe.run, plan.recipe.cache.block_size
    num_tokens = min(run.prefill_chunk, run.batch_size * plan.max_model_len)
    num_columns = min(-(-plan.max_model_len // block_size), num_blocks - 1)
    return PromptGraphs(num_tokens, run.batch_size, num_columns, plan.device)


def measured(plan: Plan, models: Models, need: CacheNeed) -> RankMemory:
    """Run the largest passes that `need` allows, and return this rank's memory use, broken down by
    purpose. All ranks must call this. Raises `SetupError` if memory runs out or a model cannot be
    compiled."""
    with setup_errors(plan):
        found = measure_rank(plan, models, need, partial(wire, plan, models))
    release(plan.device)
    return found


def _choose_num_blocks(
    plan: Plan,
    models: Models,
    need: CacheNeed,
    rough: int,
    on_stage: Callable[[str], None],
) -> int:
    """Return the number of blocks to allocate: as many as a run can use, but no more than fit on
    the rank with the least memory.

    rough: an estimate of the bytes that passes take; used on CUDA only. If memory is clearly
    sufficient by this estimate, nothing is measured; otherwise the passes are run and measured.
    """
    if plan.device.type != "cuda":
        mine = rank_memory(plan, models, on_host(0, sum(weight_bytes(models))))
    else:
        wanted = need.num_blocks * sum(block_bytes_of(plan)) + 2 * rough
        is_plenty = wanted < room_now(plan.device, plan.recipe.cache)
        if all(plan.parallel.gather_objects(is_plenty)):
            return need.num_blocks
        on_stage("measuring memory")
        mine = measured(plan, models, need)
    split = Split(tuple(plan.parallel.gather_objects(mine)))
    split.check(need.block_size)
    return min(split.num_blocks, need.num_blocks)


def _check_host_room(plan: Plan, num_blocks: int) -> None:
    """Raise `SetupError` on all ranks if the caches of any rank do not fit in host memory.
    Allocating them would succeed even then, but the system would kill the process once it fills
    them."""
    wanted, free = num_blocks * sum(block_bytes_of(plan)), available_memory() // local_world_size()
    short = (wanted, free) if wanted > free else None
    for found in plan.parallel.gather_objects(short):
        if found is not None:
            raise SetupError(
                f"out of memory: {num_blocks} blocks of the caches take {mib(found[0])} MiB, and "
                f"{mib(found[1])} MiB are free",
                "pass a smaller --num-blocks (cache.num_blocks), or leave it out to use all that "
                f"fit{ulimit_hint()}",
            )


def _warm_up(
    engine: Engine, plan: Plan, longest_prompt: int, on_stage: Callable[[str], None]
) -> None:
    """On CUDA, run a few prompts to compile the kernels and capture rounds, so that the times of
    the first real prompts do not include this work."""
    if plan.device.type != "cuda":
        return
    on_stage("compiling kernels and capturing rounds")
    params = replace(plan.params, max_new_tokens=2 * (plan.k + 1))
    lengths = warm_up_lengths(plan, longest_prompt)
    with setup_errors(plan):
        engine.compile_ahead(lengths, plan.k, params)
        for length in lengths:
            begin_stage("running prompts to warm up")
            engine.run([Request(0, (0,) * length)], plan.k, params)


def warm_up_lengths(plan: Plan, longest_prompt: int) -> list[int]:
    """Return the lengths of the warm-up prompts: a short and a long one, because passes over few
    and over many tokens use different kernels. If both would be padded to the same width, return
    only the longer one."""
    longest = min(longest_prompt, plan.recipe.run.prefill_chunk + 1)
    lengths = sorted({_WARM_UP_PROMPT, max(1, longest)})
    is_padded = plan.captures_prompts and all(model.captured_width for model in plan.models)
    unfed = 1 if plan.k else 0
    is_one = is_padded and len({width_of(length - unfed) for length in lengths}) == 1
    return lengths[-1:] if is_one else lengths


@contextmanager
def setup_errors(plan: Plan) -> Iterator[None]:
    """Raise `SetupError` if memory runs out or a model cannot be compiled. For memory, it states
    the sizes of the weights and the free memory."""
    try:
        yield
    except CompileError as problem:
        raise cannot_compile(problem) from problem
    except (torch.OutOfMemoryError, MemoryError) as problem:
        weights = " + ".join(f"{d.spec.role} {d.weight_bytes / 2**20:,.0f} MiB" for d in plan.held)
        where = str(plan.device)
        if plan.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(plan.device)
            where += f" ({free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free)"
        raise SetupError(
            f"out of memory on {where}; the weights alone are {weights}",
            "use smaller models, a smaller dtype or batch size, or set cache.num_blocks",
        ) from problem
