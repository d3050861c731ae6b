"""From a recipe to an engine: the one place where models, caches and the loop are wired."""

import os
from dataclasses import dataclass, replace

import torch

from specdec_cli.engine.draft import DraftWorker
from specdec_cli.engine.kv_cache import BlockAllocator, KVCache, block_bytes
from specdec_cli.engine.loop import Engine, Request
from specdec_cli.engine.profile import CacheNeed, choose_num_blocks
from specdec_cli.engine.synthetic import SyntheticAcceptance
from specdec_cli.engine.target import TargetScorer
from specdec_cli.engine.types import SamplingParams
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.loader import Description, ModelSpec, describe, load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from specdec_cli.recipe import ModelSection, Recipe, SpeculationSection

# Models below this run on one thread of a CPU. Their products take microseconds: threads gain
# little and, where another process holds a core, wait for each other (measured: 80 times slower).
_ONE_THREAD_BYTES = 256 * 2**20
_WARM_UP_PROMPT = 33  # tokens: more than the widest pass that the decode kernels take


@dataclass(frozen=True, slots=True)
class Permissions:
    """What only the command line may allow, never a recipe."""

    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair that passed every check and has not loaded any weights yet.

    `draft` is None when nothing is to be proposed.
    """

    recipe: Recipe
    device: torch.device
    target: Description
    draft: Description | None
    tokenizer: Tokenizer
    max_model_len: int

    @property
    def k(self) -> int:
        return self.recipe.speculation.num_speculative_tokens if self.draft is not None else 0

    @property
    def execution(self) -> dict[str, str]:
        """How passes are run, and why, for the record of a run's environment."""
        how = {"compile": "off: not in this version", "cuda_graphs": "off: not in this version"}
        if self.k and self.recipe.speculation.acceptance == "synthetic":
            how["acceptance"] = "synthetic: the text is not the target's"
        return how

    @property
    def params(self) -> SamplingParams:
        s = self.recipe.sampling
        return SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            max_new_tokens=s.max_new_tokens,
            ignore_eos=s.ignore_eos,
            stop=tuple(s.stop),
            seed=self.recipe.run.seed,
        )


def plan(recipe: Recipe, permissions: Permissions = Permissions()) -> Plan:
    """Check a recipe against this machine and its models, reading configs and tokenizers only.

    Raises `UsageError` for what the recipe asks and this version does not do, `SetupError` for
    models or devices that are missing or do not fit together.
    """
    _refuse_unbuilt(recipe)
    device = resolve_device(recipe.run.device)
    target = describe(_spec("target", recipe.target, permissions), device)
    tokenizer = _tokenizer(target)
    draft = None
    wants_draft = recipe.speculation.method == "draft_model"
    if recipe.draft is not None and wants_draft and recipe.speculation.num_speculative_tokens:
        draft = describe(_spec("draft", recipe.draft, permissions), device)
        check_same_vocabulary(tokenizer, _tokenizer(draft), (target.spec.name, draft.spec.name))
    descriptions = [target] if draft is None else [target, draft]
    if device.type == "cpu" and sum(d.weight_bytes for d in descriptions) < _ONE_THREAD_BYTES:
        _use_one_thread()
    return Plan(
        recipe=recipe,
        device=device,
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        max_model_len=min(recipe.cache.max_model_len or target.max_len, target.max_len),
    )


def build(plan: Plan, longest_prompt: int) -> Engine:
    """Load the models, size and allocate the caches, and wire the engine.

    longest_prompt: tokens of the longest prompt to come; with `max_new_tokens` it bounds the
    cache. Raises `SetupError` for damaged checkpoints and when memory runs out.
    """
    recipe, device = plan.recipe, plan.device
    block_size = recipe.cache.block_size
    descriptions = [d for d in (plan.target, plan.draft) if d is not None]
    try:
        modules = [load(d, device) for d in descriptions]
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
        )
        caches = [KVCache(d.layers, num_blocks, block_size, d.dtype, device) for d in descriptions]
    except (torch.OutOfMemoryError, MemoryError) as problem:
        raise out_of_memory(plan) from problem
    target = TargetScorer(PagedModel(modules[0], caches[0]))
    draft = None
    if plan.draft is not None:
        narrower = plan.draft.vocab_size < plan.target.vocab_size
        model = PagedModel(modules[1], caches[1], foreign_ids=narrower)
        draft = DraftWorker(model, plan.target.vocab_size, plan.draft.max_len)
    engine = Engine(
        target,
        draft,
        BlockAllocator(num_blocks, block_size),
        batch_size=recipe.run.batch_size,
        max_model_len=plan.max_model_len,
        prefill_chunk=recipe.run.prefill_chunk,
        eos_ids=plan.target.eos_ids,
        synthetic=_synthetic(recipe.speculation) if plan.k else None,
    )
    if device.type == "cuda" and recipe.run.warmup:
        # Kernels are compiled at their first launch, which would count as the first prompt's time.
        params = replace(plan.params, ignore_eos=True, max_new_tokens=2 * (plan.k + 1))
        engine.run([Request(0, (0,) * _WARM_UP_PROMPT)], plan.k, params)
    return engine


def resolve_device(wanted: str) -> torch.device:
    """`auto` is the first GPU where there is one. Raises `SetupError` for a device that is not."""
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"no CUDA device for run.device: {wanted}", "use --device cpu or auto")
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise SetupError(
                f"no device {wanted}: this machine has {torch.cuda.device_count()} GPUs"
            )
        return torch.device("cuda", index)
    return device


def out_of_memory(plan: Plan) -> SetupError:
    """The error for running out of memory, with what was asked for."""
    weights = " + ".join(
        f"{d.spec.role} {d.weight_bytes / 2**20:,.0f} MiB"
        for d in (plan.target, plan.draft)
        if d is not None
    )
    where = str(plan.device)
    if plan.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(plan.device)
        where += f" ({free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free)"
    return SetupError(
        f"out of memory on {where}; the weights alone are {weights}",
        "use smaller models, a smaller dtype or batch size, or set cache.num_blocks",
    )


def _spec(role: str, section: ModelSection, permissions: Permissions) -> ModelSpec:
    return ModelSpec(
        role=role,
        name=section.model,
        revision=section.revision,
        dtype=section.dtype,
        load_format=section.load_format,
        trust_remote_code=permissions.trust_remote_code,
        allow_pickle=permissions.allow_pickle,
    )


def _tokenizer(model: Description) -> Tokenizer:
    is_dummy = model.spec.load_format == "dummy"
    return load_tokenizer(
        model.folder, model.spec.name, model.vocab_size, is_dummy, model.spec.trust_remote_code
    )


def _use_one_thread() -> None:
    """Unless the user has chosen a number of threads."""
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(1)


def _synthetic(speculation: SpeculationSection) -> SyntheticAcceptance | None:
    if speculation.acceptance != "synthetic":
        return None
    if speculation.synthetic_acceptance_rates is not None:
        return SyntheticAcceptance.from_rates(speculation.synthetic_acceptance_rates)
    assert speculation.synthetic_acceptance_length is not None, "the recipe's schema saw to it"
    return SyntheticAcceptance.from_length(
        speculation.synthetic_acceptance_length, speculation.num_speculative_tokens
    )


def _refuse_unbuilt(recipe: Recipe) -> None:
    """Say clearly what the recipe format has and this version does not run yet."""
    asked = {
        f"speculation.method: {recipe.speculation.method}": recipe.speculation.method == "ngram",
        "target.tensor_parallel_size > 1": recipe.target.tensor_parallel_size > 1,
        "draft.share": recipe.draft is not None and bool(recipe.draft.share),
        "run.compile: on": recipe.run.compile == "on",
        "run.cuda_graphs: on": recipe.run.cuda_graphs == "on",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UsageError(f"{what} is not available in this version")
