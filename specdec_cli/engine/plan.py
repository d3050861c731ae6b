"""From a recipe to a plan: everything that can be checked before any weight is read."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specdec_cli.acceptance.registry import rule_of
from specdec_cli.core.parallel import (
    ALONE,
    ONE_RANK,
    Groups,
    TensorParallel,
    found_alike,
    local_rank,
    make_groups,
    world_size,
)
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.memory.budget import Allowance
from specdec_cli.engine.sharing import check_shared, not_held
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.methods.base import Draft, DraftPlace
from specdec_cli.methods.registry import method_of
from specdec_cli.models.draft_form import with_method
from specdec_cli.models.fused import is_fusable
from specdec_cli.models.loader import Description, ModelSpec, describe
from specdec_cli.models.tokenizer import (
    Tokenizer,
    check_same_vocabulary,
    has_tokenizer,
    is_same_tokenizer,
    load_tokenizer,
)
from specdec_cli.recipe import ModelSection, Recipe
from specdec_cli.recipe.choices.registry import needs_draft, without_draft
from specdec_cli.stages import begin_stage

# Models smaller than this run on one CPU thread. Their products take microseconds, so threads gain
# little. If another process holds a core, they wait for each other (measured: 80 times slower).
_ONE_THREAD_BYTES = 256 * 2**20


Describe = Callable[[ModelSpec, torch.device, TensorParallel], Description]


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions that only the command line may give, never a recipe.

    plugins: files that were run, to be run again in processes that are started later.
    """

    trust_remote_code: bool = False
    allow_pickle: bool = False
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair that passed every check and has not loaded any weights yet.

    draft: None if no draft model proposes. groups: this rank's place among those that share each
    model. On a rank that holds no part of the draft, `draft` still describes it and `groups.draft`
    is None. shared: what a standalone draft borrows of the target, because the recipe says so or
    its checkpoint lacks it. shared_bytes: of the weights that it so need not load. compiled: roles
    of the models whose padded passes are compiled.
    """

    recipe: Recipe
    device: torch.device
    target: Description
    draft: Draft | None
    tokenizer: Tokenizer
    max_model_len: int
    groups: Groups = ONE_RANK
    shared: tuple[str, ...] = ()
    shared_bytes: int = 0
    compiled: tuple[str, ...] = ()

    @property
    def k(self) -> int:
        speculation = self.recipe.speculation
        proposes = self.draft is not None or without_draft(speculation.method)
        return speculation.num_speculative_tokens if proposes else 0

    @property
    def proposer(self) -> str | None:
        """Name of the recipe's proposer, whatever k: the draft's, the method's, or None."""
        method = self.recipe.speculation.method
        if needs_draft(method) and self.recipe.draft is not None:
            return self.recipe.draft.model
        return method if without_draft(method) else None

    @property
    def remark(self) -> str | None:
        """The acceptance rule's remark, shown beside the run's numbers; None when not needed."""
        rule = rule_of(self.recipe.speculation)
        is_moot = self.params.is_greedy and not rule.draws_when_greedy
        return rule.remark if self.k and not is_moot else None

    @property
    def draft_remarks(self) -> tuple[str, ...]:
        """Conventions of the draft's checkpoint that tools read differently."""
        if self.draft is None or isinstance(self.draft, Description):
            return ()
        return self.draft.remarks

    @property
    def parallel(self) -> TensorParallel:
        """This rank among those of the target."""
        assert self.groups.target is not None, "every rank holds a part of the target"
        return self.groups.target

    @property
    def models(self) -> list[Draft]:
        return [m for m in (self.target, self.draft) if m is not None]

    @property
    def modules(self) -> list[Description]:
        """The models that are transformers' own."""
        return [m for m in self.models if isinstance(m, Description)]

    @property
    def held(self) -> list[Draft]:
        """The models that this rank holds a part of."""
        return self.models if self.groups.draft is not None else [self.target]

    @property
    def no_cuda_graphs(self) -> str | None:
        """The reason why rounds are not replayed as CUDA graphs, or None when they are."""
        return "as asked" if self.recipe.run.cuda_graphs == "off" else self._no_graphs_here

    @property
    def captures_prompts(self) -> bool:
        """Whether prefill passes are captured, of models that have a fused form: on one rank."""
        return self.no_cuda_graphs is None and self.parallel.size == 1

    @property
    def _no_graphs_here(self) -> str | None:
        """The reason why this device or these models rule out CUDA graphs, or None."""
        if self.device.type != "cuda":
            return "the device is a CPU"
        if self.k and method_of(self.recipe.speculation).runs_on_host:
            return "the method reads the device's data on the host"
        for model in self.modules:
            # torch's grouped product of other dtypes copies to the host.
            if model.has_experts and model.dtype != torch.bfloat16:
                return f"experts of the {model.spec.role} are not in bfloat16"
        return None

    @property
    def stages(self) -> list[str]:
        """The stages of `build` in order, in the words it reports."""
        found = [f"loading the {m.spec.role}" for m in self.held]
        if self.device.type == "cuda":
            found.append("compiling kernels and capturing rounds")
            # One graph for passes of one token, another for all others; a batch ends with few.
            plain = self.k == 0 and self.recipe.run.batch_size > 1
            shapes = {"target": 1 + plain, "draft": 1 + (self.k > 1)}
            for role in self.compiled:
                found += [f"compiling the {role}"] * shapes[role]
        return found

    @property
    def no_compile(self) -> str | None:
        """The reason why no model can be compiled, or None. Only passes inside captured rounds are
        compiled, each as one piece."""
        if self._no_graphs_here is not None:
            return self._no_graphs_here
        if self.no_cuda_graphs is not None:
            return "run.cuda_graphs is off"
        return "models are split over ranks" if self.parallel.size > 1 else None

    @property
    def execution(self) -> dict[str, str]:
        """The way that passes run, with reasons, for the record of a run's environment."""
        how = {
            "compile": f"on: {', '.join(self.compiled)}"
            if self.compiled
            else f"off: {self._why_not_compiled}",
            "cuda_graphs": "on: one graph a round"
            if self.no_cuda_graphs is None
            else f"off: {self.no_cuda_graphs}",
        }
        if self.remark is not None:
            how["acceptance"] = f"{self.recipe.speculation.acceptance}: {self.remark}"
        for model in self.models:
            how |= {f"{model.spec.role}_{word}": told for word, told in model.notes.items()}
        if self.shared:
            saved = f"{self.shared_bytes / 2**20:.1f} MiB not loaded for the draft"
            how["shared"] = f"{', '.join(self.shared)}: {saved}"
        return how

    @property
    def _why_not_compiled(self) -> str:
        if self.recipe.run.compile == "off":
            return "as asked"
        return self.no_compile or "layers are fused instead"

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

    Raises `UsageError` if the recipe asks for something unsupported, `SetupError` for models or
    devices that are missing or do not fit together.

    With several ranks, each of them calls this in a world that is already running.
    """
    _check_world(recipe)
    with found_alike():
        begin_stage("finding the device")
        device = resolve_device(recipe.run.device)
        return _plan_on(recipe, permissions, device, _groups(recipe, device), describe)


def plan_all_ranks(
    recipe: Recipe, permissions: Permissions, device: torch.device, describe: Describe = describe
) -> list[Plan]:
    """The plans of every rank of a world. Neither the world nor its devices need to exist.

    describe: `models.loader.describe`, or one that remembers. Raises as `plan` does. Models cannot
    be loaded from these plans, since they have no process groups.
    """
    size = recipe.target.tensor_parallel_size
    draft_size = recipe.draft.tensor_parallel_size if recipe.draft is not None else 1
    places = [
        Groups(
            TensorParallel(rank, size, None, device),
            TensorParallel(rank, draft_size, None, device) if rank < draft_size else None,
        )
        for rank in range(size)
    ]
    first = _plan_on(recipe, permissions, device, places[0], describe)
    found = [first]
    for groups in places[1:]:
        assert groups.target is not None
        draft = first.draft
        if draft is not None and groups.draft is not None:
            draft = draft_at(first, groups.draft, describe)
        target = describe(first.target.spec, device, groups.target)
        target = replace(target, hidden_layers=first.target.hidden_layers)
        found.append(replace(first, target=target, draft=draft, groups=groups))
    return found


def _plan_on(
    recipe: Recipe,
    permissions: Permissions,
    device: torch.device,
    groups: Groups,
    describe: Describe,
) -> Plan:
    """`plan` for a rank at its place."""
    recipe = with_method(recipe)
    begin_stage("describing the target")
    target = describe(_spec("target", recipe.target, permissions), device, groups.target or ALONE)
    begin_stage("reading the tokenizer")
    tokenizer = _tokenizer(target)
    found = Plan(
        recipe=recipe,
        device=device,
        target=target,
        draft=None,
        tokenizer=tokenizer,
        max_model_len=min(recipe.cache.max_model_len or target.max_len, target.max_len),
        groups=groups,
    )
    wants_draft = needs_draft(recipe.speculation.method)
    if recipe.draft is not None and wants_draft and recipe.speculation.num_speculative_tokens:
        # Ranks that hold no part of the draft check it too, so that all of them refuse it, or none.
        part = groups.draft or TensorParallel(size=recipe.draft.tensor_parallel_size)
        begin_stage("describing the draft")
        spec = _spec("draft", recipe.draft, permissions)
        found = _with_draft(found, _draft_of(found, spec, part, describe))
    if device.type == "cpu" and sum(m.weight_bytes for m in found.models) < _ONE_THREAD_BYTES:
        _use_one_thread()
    for key, wanted, reason in (
        ("cuda_graphs", recipe.run.cuda_graphs, found.no_cuda_graphs),
        ("compile", recipe.run.compile, found.no_compile),
    ):
        if wanted == "on" and reason is not None:
            raise UsageError(f"run.{key}: on cannot be had: {reason}")
    return replace(found, compiled=compiled_roles(found))


def draft_at(plan: Plan, parallel: TensorParallel, describe: Describe = describe) -> Draft:
    """The planned draft as one of other ranks would hold it. Raises as `plan` does."""
    assert plan.draft is not None
    return _draft_of(plan, plan.draft.spec, parallel, describe)


def _draft_of(plan: Plan, spec: ModelSpec, parallel: TensorParallel, describe: Describe) -> Draft:
    own = method_of(plan.recipe.speculation).describe
    if own is None:
        return describe(spec, plan.device, parallel)
    speculation = plan.recipe.speculation
    place = DraftPlace(spec, plan.device, parallel, plan.target, plan.max_model_len, speculation)
    return own(place)


def _with_draft(plan: Plan, draft: Draft) -> Plan:
    """The plan with a draft that was checked against the target."""
    target, section = plan.target, plan.recipe.draft
    assert section is not None
    share: tuple[str, ...] = tuple(dict.fromkeys(section.share))
    if isinstance(draft, Description):
        share = share or not_held(draft)
        names = (target.spec.name, draft.spec.name)
        sizes = (target.vocab_size, draft.vocab_size)
        # A folder of a config alone, or without embeddings, takes the target's tokenizer.
        is_part = draft.spec.load_format == "dummy" or "embeddings" in share
        is_bare = is_part and not has_tokenizer(draft.place)
        own = plan.tokenizer if is_bare or _have_one(target, draft) else _tokenizer(draft)
        check_same_vocabulary(plan.tokenizer, own, names, sizes)
        saved = check_shared(target, draft, share)
        return replace(plan, draft=draft, shared=share, shared_bytes=saved)
    if share:
        raise UsageError(
            f"draft.share: {draft.spec.name} borrows what it lacks by itself",
            "leave draft.share out",
        )
    return replace(plan, draft=draft, target=replace(target, hidden_layers=draft.feature_layers))


def _check_world(recipe: Recipe) -> None:
    """Raise `UsageError` unless there is one process for each of the target's ranks, and each can
    have a device to itself."""
    wanted, found = recipe.target.tensor_parallel_size, world_size()
    if wanted != found:
        raise UsageError(
            f"target.tensor_parallel_size is {wanted}, and {found} "
            f"{'process runs' if found == 1 else 'processes run'}",
            "start specdec by itself, which starts its ranks, or under torchrun "
            f"--nproc-per-node {wanted}",
        )
    if wanted > 1 and ":" in recipe.run.device:
        raise UsageError(
            f"run.device: {recipe.run.device} is one device, and {wanted} ranks need their own",
            "use run.device: cuda",
        )


def _groups(recipe: Recipe, device: torch.device) -> Groups:
    draft_tp = recipe.draft.tensor_parallel_size if recipe.draft is not None else 1
    return make_groups(recipe.target.tensor_parallel_size, draft_tp, device)


def resolve_device(wanted: str) -> torch.device:
    """The device of this process. `auto` is a GPU if there is one, else the CPU.

    Each process of a host takes another GPU. Raises `SetupError` for a device that is missing.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"no CUDA device for run.device: {wanted}", "use --device cpu or auto")
        index = local_rank() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise SetupError(
                f"no device cuda:{index}: this machine has {torch.cuda.device_count()} GPUs"
            )
        return torch.device("cuda", index)
    return device


def compiled_roles(plan: Plan) -> tuple[str, ...]:
    """Roles of the models to compile: those whose layers have no fused form, or all when asked."""
    wanted = plan.recipe.run.compile
    if wanted == "off" or plan.no_compile is not None:
        return ()
    return tuple(m.spec.role for m in plan.modules if wanted == "on" or not is_fusable(m.module))


def block_bytes_of(plan: Plan) -> tuple[int, int]:
    """Bytes of one block in the target's cache and in the draft's, on this rank."""
    size = plan.recipe.cache.block_size
    found = [held.block_bytes(size) for held in plan.held]
    return found[0], sum(found[1:])


def allowance_of(plan: Plan) -> Allowance:
    """The memory that the recipe lets a run use."""
    cache = plan.recipe.cache
    return Allowance(cache.gpu_memory_utilization, cache.cpu_bytes)


def _spec(role: str, section: ModelSection, permissions: Permissions) -> ModelSpec:
    return ModelSpec(
        role=role,
        name=section.model,
        revision=section.revision,
        file=section.file,
        dtype=section.dtype,
        load_format=section.load_format,
        weights=section.weights,
        trust_remote_code=permissions.trust_remote_code,
        allow_pickle=permissions.allow_pickle,
    )


def _tokenizer(model: Description) -> Tokenizer:
    is_dummy = model.spec.load_format == "dummy"
    return load_tokenizer(
        model.place, model.spec.name, model.vocab_size, is_dummy, model.spec.trust_remote_code
    )


def _have_one(target: Description, draft: Description) -> bool:
    """Whether both models have one tokenizer, without code of its own."""
    kinds = {model.module.config.model_type for model in (target, draft)}
    has_code = target.spec.trust_remote_code or draft.spec.trust_remote_code
    return len(kinds) == 1 and not has_code and is_same_tokenizer(target.place, draft.place)


def _use_one_thread() -> None:
    """Run torch on one thread, unless the user has chosen a number of threads."""
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(1)
