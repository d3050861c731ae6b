"""Makes a plan from a recipe, and checks everything that can be checked before loading weights."""

from dataclasses import dataclass, replace

import torch

from specdec_cli.acceptance.registry import rule_of
from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.core.parallel import (
    ALONE,
    ONE_RANK,
    Groups,
    TensorParallel,
    found_alike,
    make_groups,
)
from specdec_cli.core.types import Permissions, SamplingParams
from specdec_cli.engine.devices import check_world, resolve_device, use_few_threads
from specdec_cli.engine.memory.budget import CacheNeed
from specdec_cli.engine.pairing import (
    Describe,
    check_k,
    check_policy,
    check_vocabulary,
    describe_draft,
    tokenizer_of,
)
from specdec_cli.errors import Notice, UsageError
from specdec_cli.methods.registry import draft_tensors_of, method_of
from specdec_cli.models.description import Description, DraftPlace, describe
from specdec_cli.models.draft import Draft
from specdec_cli.models.draft_form import with_method
from specdec_cli.models.generation_config import with_sampling
from specdec_cli.models.spec import ModelSpec
from specdec_cli.recipe import ModelSection, Recipe
from specdec_cli.recipe.choices.registry import weights_from, without_draft
from specdec_cli.stages import begin_stage

_NONE = Permissions()
FP8_CAPABILITY = (8, 9)  # the lowest compute capability that can convert to and from fp8


@dataclass(frozen=True, slots=True)
class Plan:
    """A target and a draft that have passed all checks, before any weights are loaded.

    draft: the draft's description; None if no draft model proposes. It is set on every rank, also
        on ranks that hold no part of the draft, where `groups.draft` is None.
    groups: this rank's groups of ranks, for the target and for the draft.
    compiled: the roles (`target`, `draft`) of the models whose padded passes are compiled. A padded
        pass feeds the same number of tokens for every slot.
    few_threads: a notice that torch uses fewer threads than there are processors, because of other
        programs; None if there is nothing to report.
    """

    recipe: Recipe
    device: torch.device
    target: Description
    draft: Draft | None
    tokenizer: Tokenizer
    max_model_len: int
    groups: Groups = ONE_RANK
    compiled: tuple[str, ...] = ()
    few_threads: Notice | None = None

    @property
    def k(self) -> int:
        speculation = self.recipe.speculation
        proposes = self.draft is not None or without_draft(speculation.method)
        return speculation.num_speculative_tokens if proposes else 0

    @property
    def remark(self) -> str | None:
        """The acceptance rule's remark on how the rule changes the output, to be shown with the
        run's results. None if the rule has no remark, if nothing is proposed, or if decoding is
        greedy and the rule then keeps the target's text."""
        rule = rule_of(self.recipe.speculation)
        is_moot = self.params.is_greedy and rule.keeps_greedy
        return rule.remark if self.k and not is_moot else None

    @property
    def parallel(self) -> TensorParallel:
        """This rank's position in the group of ranks over which the target is split."""
        assert self.groups.target is not None, "every rank holds a part of the target"
        return self.groups.target

    @property
    def models(self) -> list[Draft]:
        return [m for m in (self.target, self.draft) if m is not None]

    @property
    def held(self) -> list[Draft]:
        """The models that this rank loads, in whole or in part."""
        return self.models if self.groups.draft is not None else [self.target]

    @property
    def no_cuda_graphs(self) -> str | None:
        """The reason why rounds are not captured as CUDA graphs; None if they are captured."""
        return "as asked" if self.recipe.run.cuda_graphs == "off" else self._no_graphs_here

    @property
    def captures_prompts(self) -> bool:
        """True if prefill passes of models with fused layers are captured as CUDA graphs,
        which requires a single rank."""
        return self.no_cuda_graphs is None and self.parallel.size == 1

    @property
    def _no_graphs_here(self) -> str | None:
        """The reason why this device or these models rule out CUDA graphs; None if they do not."""
        if self.device.type != "cuda":
            return "the device is a CPU"
        if self.k and method_of(self.recipe.speculation).runs_on_host:
            return "the method reads the device's data on the host"
        for model in self.models:
            # For other dtypes, torch's grouped matmul copies data to the host, which a CUDA graph
            # cannot contain.
            if model.has_experts and model.dtype != torch.bfloat16:
                return f"experts of the {model.spec.role} are not in bfloat16"
        return None

    @property
    def stages(self) -> list[str]:
        """The names of the start-up stages that `build` reports, in order. A model that is compiled
        for two shapes is listed twice."""
        found = [f"loading the {m.spec.role}" for m in self.held]
        if self.device.type == "cuda":
            found.append("compiling kernels and capturing rounds")
            # Passes over a single token are compiled separately from others. In plain decoding, a
            # pass over a batch has a single token only when one sequence of the batch is left.
            plain = self.k == 0 and self.recipe.run.batch_size > 1
            shapes = {"target": 1 + plain, "draft": 1 + (self.k > 1)}
            for role in self.compiled:
                found += [f"compiling the {role}"] * shapes[role]
        return found

    @property
    def no_compile(self) -> str | None:
        """The reason why no model can be compiled; None if models can be compiled. Compiling needs
        CUDA graphs, because only captured passes are compiled."""
        if self._no_graphs_here is not None:
            return self._no_graphs_here
        if self.no_cuda_graphs is not None:
            return "run.cuda_graphs is off"
        return "models are split over ranks" if self.parallel.size > 1 else None

    @property
    def execution(self) -> dict[str, str]:
        """The entries of the run's `environment` that explain how passes run: whether they are
        compiled and captured as CUDA graphs, with the reason if not, and which weights the draft
        borrows."""
        as_asked = "as asked" if self.recipe.run.compile == "off" else None
        how = {
            "compile": f"on: {', '.join(self.compiled)}"
            if self.compiled
            else f"off: {as_asked or self.no_compile or 'layers are fused instead'}",
            "cuda_graphs": "on: one graph a round"
            if self.no_cuda_graphs is None
            else f"off: {self.no_cuda_graphs}",
        }
        if self.remark is not None:
            how["acceptance"] = f"{self.recipe.speculation.acceptance}: {self.remark}"
        for model in self.models:
            how |= {f"{model.spec.role}_{word}": told for word, told in model.notes.items()}
        if self.draft is not None and self.draft.shared:
            saved = f"{self.draft.shared_bytes / 2**20:.1f} MiB not loaded for the draft"
            how["shared"] = f"{', '.join(self.draft.shared)}: {saved}"
        return how

    @property
    def params(self) -> SamplingParams:
        """The engine's sampling parameters, taken from the recipe's `sampling` section and
        `run.seed`."""
        asked = self.recipe.sampling.model_dump(exclude={"source"})
        return SamplingParams(**asked, seed=self.recipe.run.seed)


def plan(recipe: Recipe, permissions: Permissions = _NONE) -> Plan:
    """Check that a recipe's models exist and that they can run on this machine, and return the
    plan. Only configs and tokenizers are read, no weights.

    Raises `UsageError` for unsupported settings, and `SetupError` for models or devices that do not
    fit.
    """
    check_world(recipe)
    with found_alike():
        begin_stage("finding the device")
        device = resolve_device(recipe.run.device)
        groups = make_groups(recipe.target.tensor_parallel_size, draft_degree(recipe), device)
        return _plan_on(recipe, permissions, device, groups, describe)


def plan_all_ranks(
    recipe: Recipe, permissions: Permissions, device: torch.device, describe: Describe = describe
) -> list[Plan]:
    """Return one plan per rank, without starting the ranks. The plans serve only for estimates:
    their ranks cannot communicate, so models cannot be loaded from these plans.
    """
    size, draft_size = recipe.target.tensor_parallel_size, draft_degree(recipe)
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
        target = _as_target(describe(first.target.spec, device, groups.target), first)
        found.append(replace(first, target=target, draft=draft, groups=groups))
    return found


def _plan_on(
    recipe: Recipe,
    permissions: Permissions,
    device: torch.device,
    groups: Groups,
    describe: Describe,
) -> Plan:
    """Make the plan of the rank with these `groups`. Raises the errors of `plan`."""
    if recipe.cache.dtype == "fp8" and device.type == "cuda" and torch.cuda.is_available():
        if (found_here := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
            needed, has = (".".join(map(str, c)) for c in (FP8_CAPABILITY, found_here))
            raise UsageError(
                f"cache.dtype: fp8 needs a GPU of compute capability {needed}, and this one has "
                f"{has}",
                "leave it at auto",
            )
    recipe = with_sampling(with_method(recipe))
    k = recipe.speculation.num_speculative_tokens
    begin_stage("describing the target")
    spec = _spec("target", recipe.target, recipe.cache.dtype, permissions)
    target = describe(spec, device, groups.target or ALONE)
    if (asked := recipe.cache.max_model_len) is not None and asked > target.max_len:
        raise UsageError(
            f"cache.max_model_len: {asked} exceeds the target's context length of "
            f"{target.max_len} tokens",
            "leave it out, or correct the number of positions in the target's config.json",
        )
    if outside := [i for i in recipe.sampling.suppress_tokens if i >= target.vocab_size]:
        raise UsageError(
            f"sampling.suppress_tokens: {outside[0]} is not a token id of the target, whose "
            f"vocabulary has {target.vocab_size} ids"
        )
    begin_stage("reading the tokenizer")
    found = Plan(
        recipe=recipe,
        device=device,
        target=target,
        draft=None,
        tokenizer=tokenizer_of(target),
        max_model_len=recipe.cache.max_model_len or target.max_len,
        groups=groups,
    )
    if k and (of_draft := _draft_spec(recipe, target.spec, permissions)) is not None:
        # Also check the draft on ranks that hold no part of it, so that all ranks raise the same
        # error if it is refused.
        part = groups.draft or TensorParallel(size=draft_degree(recipe))
        begin_stage("describing the draft")
        draft = _draft_of(found, of_draft, part, describe)
        check_k(draft, recipe.speculation)
        check_vocabulary(target, draft, found.tokenizer)
        found = replace(found, draft=draft)
    if k:
        check_policy(found.draft, recipe.speculation, found.k)
    found = replace(found, target=_as_target(target, found))
    few_threads = use_few_threads(device, sum(m.weight_bytes for m in found.models))
    found = replace(found, few_threads=few_threads)
    for key, wanted, reason in (
        ("cuda_graphs", recipe.run.cuda_graphs, found.no_cuda_graphs),
        ("compile", recipe.run.compile, found.no_compile),
    ):
        if wanted == "on" and reason is not None:
            raise UsageError(f"run.{key}: on is impossible: {reason}")
    return replace(found, compiled=compiled_roles(found))


def _as_target(target: Description, plan: Plan) -> Description:
    """Return a copy of the target's description that also states the plan's context length, and
    which hidden states the plan's draft reads and which tensors are a draft's."""
    layers = plan.draft.feature_layers if plan.draft is not None else ()
    tensors = plan.draft.target_tensors if plan.draft is not None else None
    tensors = tensors or draft_tensors_of(target)
    return replace(target, reach=plan.max_model_len, hidden_layers=layers, draft_tensors=tensors)


def draft_at(plan: Plan, parallel: TensorParallel, describe: Describe = describe) -> Draft:
    """Describe the plan's draft as the rank `parallel` would hold it. The number of ranks that
    share the draft may differ from the plan's draft degree. Raises the errors of `plan`."""
    assert plan.draft is not None
    return _draft_of(plan, plan.draft.spec, parallel, describe)


def _draft_of(plan: Plan, spec: ModelSpec, parallel: TensorParallel, describe: Describe) -> Draft:
    share = plan.recipe.draft.share if plan.recipe.draft is not None else ()
    where = spec, plan.device, parallel, plan.target, plan.max_model_len
    return describe_draft(DraftPlace(*where, plan.recipe.speculation, share), describe)


def _draft_spec(recipe: Recipe, target: ModelSpec, permissions: Permissions) -> ModelSpec | None:
    """Return a `ModelSpec` for the checkpoint that contains the draft's weights: the recipe's draft
    or the target's checkpoint. Return None if there is no draft model."""
    match weights_from(recipe.speculation.method):
        case "draft" if recipe.draft is not None:
            return _spec("draft", recipe.draft, recipe.cache.dtype, permissions)
        case "target":
            return replace(target, role="draft")
    return None


def draft_degree(recipe: Recipe) -> int:
    """Return the number of ranks over which the draft is split. A draft in the target's checkpoint
    is split over all of the target's ranks."""
    if weights_from(recipe.speculation.method) == "target":
        return recipe.target.tensor_parallel_size
    return recipe.draft.tensor_parallel_size if recipe.draft is not None else 1


def compiled_roles(plan: Plan) -> tuple[str, ...]:
    """Return the roles of the models to compile. If the recipe sets run.compile to on, these are
    all models that can be compiled. By default, they are those whose layers have no fused kernels.
    Raises `UsageError` if the recipe asks to compile a model with quantised weights."""
    wanted = plan.recipe.run.compile
    if wanted == "off" or plan.no_compile is not None:
        return ()
    able = [m for m in plan.models if m.can_compile]
    for model in able if wanted == "on" else ():
        if model.keeps_stored:
            raise UsageError(
                f"{model.spec.role}.weights: {model.spec.weights} does not suit run.compile: on, "
                "since compiled passes read plain weights",
                f"set {model.spec.role}.weights: dequantise",
            )
    return tuple(m.spec.role for m in able if wanted == "on" or not m.captured_width)


def block_bytes_of(plan: Plan) -> tuple[int, int]:
    """Return the bytes of one block in the target's cache and in the draft's, on this rank."""
    size = plan.recipe.cache.block_size
    found = [held.block_bytes(size) for held in plan.held]
    return found[0], sum(found[1:])


def cache_need(plan: Plan, longest: int) -> CacheNeed:
    """Return the sizes that determine how many cache blocks the run needs. longest: the length of
    the longest sequence, in tokens."""
    recipe = plan.recipe
    rows = plan.draft.passes(plan.k).rows if plan.draft is not None else 0
    k = max(plan.k, rows - 1)  # a pass may feed more than k + 1 tokens per slot
    return CacheNeed(recipe.run.batch_size, longest, k, recipe.cache.block_size)


def _spec(role: str, section: ModelSection, cache: str, permissions: Permissions) -> ModelSpec:
    kept = ("revision", "file", "dtype", "load_format", "weights")
    return ModelSpec(
        **{key: getattr(section, key) for key in kept},
        role=role,
        name=section.model,
        cache=cache,
        trust_remote_code=permissions.trust_remote_code,
        allow_pickle=permissions.allow_pickle,
    )
