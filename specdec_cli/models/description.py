"""Describe a target or draft on the meta device, before its weights are read."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from specdec_kernels.linear.stored import FP8
from transformers import AutoModelForCausalLM

from specdec_cli.core.kv_cache import KVCache, LayerShape, block_bytes
from specdec_cli.core.parallel import ALONE, Groups, TensorParallel
from specdec_cli.errors import SetupError
from specdec_cli.models.attention import ATTENTION_NAME
from specdec_cli.models.compiled import CompiledForward
from specdec_cli.models.config import dtype_of, eos_ids_of, max_len_of, read_config
from specdec_cli.models.draft import OnCompile, Passes, Reading
from specdec_cli.models.fused import busy_width, bytes_held_twice, fuse
from specdec_cli.models.fused_layer import family_of
from specdec_cli.models.gate import check_config, check_layers, probe, quantisation
from specdec_cli.models.gguf.blocks import KEPT
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tensors import kinds_of
from specdec_cli.models.held import borrowed_weights, held_bytes
from specdec_cli.models.kv_scales import cache_dtype, cache_note, read_scales
from specdec_cli.models.loader import Names, Unfilled, load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.pass_bytes import PassShapes, peak_bytes
from specdec_cli.models.refusals import Indivisible, Unsupported
from specdec_cli.models.resolve import place_of
from specdec_cli.models.rotary_tables import num_turns
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import choose_form, stored_parameters
from specdec_cli.models.tp import WHOLE, shard
from specdec_cli.models.weights import layers_held
from specdec_cli.recipe import SpeculationSection
from specdec_cli.stages import begin_stage
from specdec_cli.text import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Description(Unfilled):
    """A model that passed all checks and has no weights yet (its tensors are on meta).

    layers: the cache shape of each layer. With several ranks, `layers` and `module` have only this
        rank's part of the heads and matrices.
    device: the device on which to load the model.
    hidden_layers: the layers whose hidden states the run needs; see `PagedModel`.
    reach: the maximum number of tokens in a text; rotary tables have this length.
    shared, shared_bytes: see `models.draft.Draft`.
    drafts_at_once: whether the model, as a draft, proposes all tokens of a round in one pass over
        mask tokens.
    """

    layers: list[LayerShape]
    device: torch.device
    max_len: int
    eos_ids: frozenset[int]
    parallel: TensorParallel = ALONE
    hidden_layers: tuple[int, ...] = ()
    reach: int = 0
    shared: tuple[str, ...] = ()
    shared_bytes: int = 0
    drafts_at_once: bool = False

    feature_layers: ClassVar[tuple[int, ...]] = ()
    max_k: ClassVar[int | None] = None
    has_confidence: ClassVar[bool] = False
    target_tensors: ClassVar[re.Pattern[str] | None] = None
    can_compile: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)

    @property
    def has_experts(self) -> bool:
        return "grouped_mm" in self.module.get_experts_implementation().values()

    @property
    def notes(self) -> dict[str, str]:
        stored, some = quantisation(self.module.config), ""
        if is_gguf(self.place):
            kinds = kinds_of(read_model(self.place))
            stored = f"GGUF ({', '.join(kinds)})"
            some = f"{' and '.join(kind for kind in kinds if kind in KEPT)} "
        found = cache_note(self.spec, self.place)
        if stored is not None:
            is_kept = self.keeps_stored and self.spec.weights != FP8
            how = f"{stored}, {some}as stored" if is_kept else f"dequantised from {stored}"
            found["weights"] = f"{how}, quantised to fp8" if self.spec.weights == FP8 else how
        elif self.keeps_stored:
            found["weights"] = "quantised to fp8 while loading"
        return found

    @property
    def keeps_stored(self) -> bool:
        return bool(stored_parameters(self.module))

    def block_bytes(self, block_size: int) -> int:
        return block_bytes(self.layers, block_size, cache_dtype(self.spec, self.dtype))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on this rank's device. Tied parameters count once."""
        own = (p for n, p in self.module.named_parameters() if n not in self.shards.tied)
        return sum(map(held_bytes, own)) - self.shared_bytes

    def loaded_bytes(self, *, is_compiled: bool) -> int:
        """Return the bytes that the loaded model takes. If its layers are fused, this includes the
        rotary tables and, on a CPU, the second copies of weights kept both packed and unpacked."""
        found = self.weight_bytes
        if not is_compiled and family_of(self.module) is not None:
            turns = num_turns(self.module) * self.layers[0].key_dim
            found += 2 * self.reach * turns * self.dtype.itemsize
            if self.device.type == "cpu":
                is_view = bool(self.shards.tied) and not self.shared
                found += bytes_held_twice(self.module, splits_embedding=is_view)
        return found

    @property
    def needs_equal_degrees(self) -> bool:
        return "lm_head" in self.shared

    @property
    def captured_width(self) -> int:
        return busy_width(self.module) if family_of(self.module) is not None else 0

    def within(self, reach: int) -> "Description":
        return replace(self, reach=reach)

    def passes(self, k: int) -> Passes:
        return Passes(1, k + 1) if self.drafts_at_once else Passes(k)

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        ranks = self.parallel.size
        shapes = PassShapes(self.module, self.layers[0], self.dtype, ranks, self.device)
        how = {"gathers": gathers, "is_compiled": is_compiled}
        return self.hidden_bytes(tokens) + peak_bytes(shapes, tokens, logit_rows, **how)

    def hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states [T, L * H] that a pass returns."""
        width = len(self.hidden_layers) * int(self.module.config.hidden_size)
        return tokens * width * self.dtype.itemsize

    def readings(self) -> list[Reading]:
        return []

    def load(
        self, target: PagedModel, groups: Groups, block_size: int, on_compile: OnCompile = None
    ) -> PagedModel | None:
        if groups.draft is None:
            return None
        module = load(self, self.device, borrowed_weights(self.module, target.module, self.shared))
        return self.paged(module, block_size, on_compile, self.vocab_size < target.vocab_size)

    def paged(
        self,
        module: Any,
        block_size: int,
        on_compile: OnCompile = None,
        foreign_ids: bool = False,
    ) -> PagedModel:
        """Bind the loaded module to a cache of zero blocks, which `PagedModel.use` later replaces.
        A module that is not compiled is fused, if it has a fused form. foreign_ids: see
        `PagedModel`."""
        fused = None
        if on_compile is None:
            begin_stage(f"fusing the {self.spec.role}")
            fused = fuse(module, self.reach, self.parallel)
        kind, where = cache_dtype(self.spec, self.dtype), (self.parallel, self.device)
        scales = read_scales(self.spec, self.place, module.config, self.layers, *where)
        cache = KVCache(self.layers, 0, block_size, kind, self.device, scales)
        model = PagedModel(module, cache, foreign_ids, fused, self.hidden_layers)
        if on_compile is not None:
            model.compiled = CompiledForward(module, self.spec.role, on_compile=on_compile)
        return model


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The arguments that a method needs to describe its draft.

    spec, device, parallel: the draft's spec, device and ranks.
    target: the target's description, with its tensors on meta.
    max_model_len, speculation: settings from the recipe.
    share: the weights that `draft.share` names.
    """

    spec: ModelSpec
    device: torch.device
    parallel: TensorParallel
    target: Description
    max_model_len: int
    speculation: SpeculationSection
    share: tuple[str, ...] = ()


def describe(
    spec: ModelSpec, device: torch.device, parallel: TensorParallel = ALONE
) -> Description:
    """Check a model and build this rank's part of it on meta. Raises `SetupError` if the model
    cannot run."""
    place = place_of(spec)
    config = read_config(spec.name, place, trust_remote_code=spec.trust_remote_code)
    return describe_config(spec, place, config, device, parallel)


def describe_config(
    spec: ModelSpec,
    place: Path,
    config: Any,
    device: torch.device,
    parallel: TensorParallel,
    names: Names | None = None,
) -> Description:
    """Check the model in the folder or GGUF file `place` and describe it, given its transformers
    config. names: see `Unfilled`. Raises `SetupError` if the model cannot run."""
    try:
        check_config(config, spec.name)
        is_whole = spec.load_format != "dummy" and names is None
        if is_whole and (held := layers_held(place)) is not None:
            check_layers(config, spec.name, held)
        dtype = dtype_of(spec.dtype, config, device)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION_NAME,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
            )
        # Remove the padding id: gpt2 would search every input for it, which makes the host wait for
        # the device. Assign through `vars`, because the configs of some families accept only a
        # number.
        vars(module.config)["pad_token_id"] = None
        module.eval()
        layers, shards = probe(module, spec.name), WHOLE
        _check_experts(module, spec.name)
        if parallel.size > 1:
            shards, layers = shard(module, layers, parallel, spec.name)
            _check_experts(module, spec.name, parallel.size)
    except SetupError:
        raise
    except Exception as problem:
        # Families with their own attention classes look up a class by the name of the attention
        # function. They have none for our name, so they raise a KeyError.
        is_own = isinstance(problem, KeyError) and ATTENTION_NAME in problem.args
        reason = f"transformers cannot build it ({reason_of(problem)})"
        if is_own:
            reason = f"{config.model_type} has attention code of its own"
        raise Unsupported(spec.name, reason) from problem
    choose_form(module, spec, place, shards, device)
    return Description(
        spec=spec,
        place=place,
        module=module,
        layers=layers,
        dtype=dtype,
        max_len=max_len_of(config),
        eos_ids=eos_ids_of(config, place),
        parallel=parallel,
        shards=shards,
        device=device,
        names=names,
    )


def _check_experts(module: Any, name: str, size: int = 1) -> None:
    """Raise `Unsupported` if layers are not fused and torch's product of experts cannot read a
    matrix: its rows must be multiples of 16 bytes. size: the number of ranks that share it."""
    experts = [p for path, p in module.named_parameters() if ".experts." in path and p.dim() == 3]
    odd = [p for p in experts if p.shape[-1] * p.itemsize % 16]
    if not odd or family_of(module) is not None:
        return
    rows = f"{odd[0].shape[-1]} numbers in {str(odd[0].dtype).removeprefix('torch.')}"
    needs = "must be multiples of 16 bytes"
    if size > 1:
        what = f"experts, whose rows would be {rows} and {needs},"
        raise Indivisible(name, what, size)
    raise Unsupported(name, f"rows of its experts' matrices are {rows} and {needs}")
