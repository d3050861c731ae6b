"""Describe MTP modules before their weights are read; see `models.draft.Draft`."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from specdec_kernels import ops
from torch import nn

from specdec_cli.core.kv_cache import KVCache, LayerShape
from specdec_cli.core.parallel import Groups, TensorParallel
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.conversion import converted
from specdec_cli.models.description import Description, DraftPlace, describe_config
from specdec_cli.models.draft import OnCompile, Passes, Reading
from specdec_cli.models.fused_layer import family_of
from specdec_cli.models.gate import quantisation
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.heads.mtp.chain import MtpChain
from specdec_cli.models.heads.mtp.config import (
    EXTRACTED,
    NORMS,
    PROJECTION,
    MtpConfig,
    layer_config,
    read_module_config,
    read_mtp_config,
)
from specdec_cli.models.heads.mtp.head import MtpHead
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.models.held import StoredParameter, borrowed_weights, held_bytes
from specdec_cli.models.hidden import check_hidden_layers
from specdec_cli.models.kv_scales import cache_dtype, cache_note
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.resolve import place_of
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.weights import tensor_names, unread

_BORROWED = re.compile("^(lm_head|model.embed_tokens)[.]")
_SHARED = ("embeddings", "lm_head")


@dataclass(frozen=True, slots=True)
class MtpDraft:
    """The MTP modules of a target, before their weights are loaded.

    bodies: for each module, a description of its decoder layer as a model of one layer.
    num_layers: the number of layers of the target.
    """

    spec: ModelSpec
    config: MtpConfig
    bodies: tuple[Description, ...]
    num_layers: int

    shared: ClassVar[tuple[str, ...]] = ()
    shared_bytes: ClassVar[int] = 0
    needs_equal_degrees: ClassVar[bool] = True
    can_compile: ClassVar[bool] = False
    keeps_stored: ClassVar[bool] = False

    @property
    def body(self) -> Description:
        """The first module's layer; the others have the same sizes."""
        return self.bodies[0]

    @property
    def place(self) -> Path:
        return self.body.place

    @property
    def layers(self) -> list[LayerShape]:
        return [layer for body in self.bodies for layer in body.layers]

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    @property
    def parallel(self) -> TensorParallel:
        return self.body.parallel

    @property
    def max_len(self) -> int:
        return self.body.reach

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The index of the only hidden state that the modules read: the target's last, which is
        taken after the final norm."""
        return (self.num_layers,)

    has_confidence: ClassVar[bool] = False
    target_tensors: ClassVar[re.Pattern[str] | None] = None

    @property
    def has_experts(self) -> bool:
        return self.body.has_experts

    @property
    def max_k(self) -> int | None:
        return self.config.max_k

    @property
    def captured_width(self) -> int:
        return self.body.captured_width

    @property
    def weight_bytes(self) -> int:
        return sum(body.weight_bytes for body in self.bodies)

    def loaded_bytes(self, *, is_compiled: bool) -> int:
        held = self.body.loaded_bytes(is_compiled=False)
        if self.body.device.type == "cpu":
            held += self._numbers_again * self.dtype.itemsize
        return held * len(self.bodies)

    @property
    def _numbers_again(self) -> int:
        """The number of values per module that a CPU stores a second time, in another layout. These
        are the values of the projection and, if the layer is not fused, of the output matrix, of
        which such a module keeps only copies."""
        projection, head = 2 * self.config.hidden_size**2, self.body.module.lm_head.weight.numel()
        found = projection if all(ops.forms_of(projection, self.dtype)) else 0
        if family_of(self.body.module) is None:
            copies = sum(ops.forms_of(head, self.dtype))
            found += head * (copies if "lm_head" in self.body.shared else copies - 1)
        return found

    @property
    def notes(self) -> dict[str, str]:
        keys, borrowed = self.config.keys, ", ".join(self.body.shared)
        fed = "of the target" if self.config.reads_target else f"fed back {keys.mtp_fed_back}"
        told = f"hidden states {fed}; first embedding "
        told += f"{keys.mtp_first_embedding}; own embedding and head {keys.mtp_copies}"
        found = {"features": f"hidden state {self.num_layers} of the target", "conventions": told}
        found |= cache_note(self.spec) | ({"borrows": borrowed} if borrowed else {})
        if self.max_k is not None:
            found["block"] = f"a chain of {self.max_k} modules, a token from each"
        weights = self.body.notes.get("weights")
        return found | ({"weights": weights} if weights else {})

    def within(self, reach: int) -> "MtpDraft":
        return replace(self, bodies=tuple(body.within(reach) for body in self.bodies))

    def passes(self, k: int) -> Passes:
        """Return the passes in a run with k proposals per round, which uses at most k modules. Each
        of them runs once over the accepted tokens, and each proposal after the first needs one more
        pass."""
        used = min(k, len(self.bodies))
        return Passes(k - 1 + used, in_prompt=used, parts=len(self.bodies))

    def block_bytes(self, block_size: int) -> int:
        carried = self.config.output_size * self.dtype.itemsize
        return (self.body.block_bytes(block_size) + carried) * len(self.bodies)

    def pass_bytes(
        self, tokens: int, logit_rows: int, *, gathers: bool, is_compiled: bool = False
    ) -> int:
        """See `models.draft.Draft`. Logits are computed outside the passes."""
        inside = self.body.pass_bytes(tokens, 0, gathers=gathers)
        joined = 2 * tokens * self.config.hidden_size * self.dtype.itemsize
        return inside + joined

    def readings(self) -> list[Reading]:
        """Return a variant of this draft for each setting on which SGLang and vLLM differ.

        They treat the embedding of the first row differently, and for glm4_moe they also feed back
        different hidden states. vLLM runs only the first of MiMo's modules, repeatedly. No setting
        can express this for a chain, so the list is empty for MiMo.
        """
        if self.config.form.reads_target:
            return []
        choices = {"mtp_first_embedding": ("used", "zeroed"), "mtp_fed_back": ("normed", "raw")}
        if self.body.module.config.model_type != "glm4_moe":
            del choices["mtp_fed_back"]
        found = []
        for key, (ours, theirs) in choices.items():
            held = getattr(self.config.keys, key)
            update = {key: theirs if held == ours else ours}
            config = replace(self.config, keys=self.config.keys.model_copy(update=update))
            told = f"speculation.{key}: {held} (SGLang: {ours}, vLLM: {theirs})"
            found.append(Reading(told, replace(self, config=config)))
        return found

    def load(
        self, target: PagedModel, groups: Groups, block_size: int, on_compile: OnCompile = None
    ) -> PagedHead | MtpChain:
        assert groups.draft is not None, "every rank of the target holds a part"
        device, heads = self.body.device, list[PagedHead]()
        kind = cache_dtype(self.spec, self.dtype)
        cache = KVCache(self.layers, 0, block_size, kind, device)
        for index, body in enumerate(self.bodies):
            module = load(body, device, borrowed_weights(body.module, target.module, body.shared))
            fused = body.paged(module, block_size).fused
            config = replace(self.config, index=index)
            head = MtpHead(config, module, fused, groups.draft)
            heads.append(PagedHead(head, cache, self.captured_width))
        return heads[0] if len(heads) == 1 else MtpChain(heads)


def describe_mtp(place: DraftPlace) -> MtpDraft:
    """Describe the MTP modules of a target: those in its own files, or one module in a folder of
    its own.

    Raises a `SetupError` that names the key or the tensor if there are no modules or one does not
    fit. Raises `UsageError` for recipe settings that these modules do not support, such as a number
    of ranks that differs from the target's.
    """
    spec, target, speculation = place.spec, place.target, place.speculation
    settings, is_dummy = target.module.config, spec.load_format == "dummy"
    if spec.name == target.spec.name:
        if is_gguf(folder := target.place):
            raise SetupError(f"{spec.name} is a GGUF file, from which MTP modules cannot be read")
        names = () if is_dummy else tensor_names(folder)
        config = read_mtp_config(spec.name, folder, settings, names, speculation)
        if config.reads_target and speculation.mtp_fed_back == "raw":
            raise UsageError(
                f"speculation.mtp_fed_back: raw does not suit {spec.name}: all its MTP modules "
                "read the target's hidden states"
            )
    else:
        folder = place_of(spec)
        names = () if is_dummy else tensor_names(folder)
        config = read_module_config(spec.name, folder, settings, speculation)
    if place.parallel.size != target.parallel.size:
        raise UsageError(
            f"draft.tensor_parallel_size is {place.parallel.size}: an MTP module uses the target's "
            f"head, which is split over {target.parallel.size} ranks",
            f"set draft.tensor_parallel_size to {target.parallel.size}",
        )
    num_layers = int(settings.num_hidden_layers)
    check_hidden_layers(target.module, (num_layers,))
    # Do not load more modules than a round has proposals: the others would not be used.
    count = min(config.count, speculation.num_speculative_tokens)
    bodies = tuple(_body(place, folder, names, config, index) for index in range(count))
    return MtpDraft(spec, config, bodies, num_layers)


def _body(
    place: DraftPlace, folder: Path, names: Collection[str], config: MtpConfig, index: int
) -> Description:
    """Describe the decoder layer of module `index`. folder: where the module's weights are. names:
    the names of all tensors there; empty if unknown."""
    spec, target = place.spec, place.target
    settings, form = layer_config(target.module.config, index, config.form), config.form.of(index)
    if config.form is EXTRACTED:  # its quantisation may differ from the target's
        settings.quantization_config = config.quantisation
    own_spec = replace(spec, weights="dequantise", name=f"{spec.name} (MTP module {index})")
    body = describe_config(own_spec, folder, settings, target.device, place.parallel, form)
    with torch.device("meta"):
        width, dtype = config.hidden_size, body.dtype
        body.module.eh_proj = nn.Linear(2 * width, width, bias=False, dtype=dtype)
        body.module.enorm, body.module.hnorm = (nn.RMSNorm(width, dtype=dtype) for _ in NORMS)
    own = {own for name in names if (own := form.own(name)) is not None}
    if names:
        missing = {PROJECTION, *NORMS, "model.norm.weight"} - own
        if quantisation(settings) is None:
            held, _ = converted(body.module, dict.fromkeys(own, unread))
            lent = set(borrowed_weights(body.module, target.module, _SHARED))
            missing |= set(body.module.state_dict()) - held.keys() - lent
        if missing:
            raise config.lacks(index, missing)
    shared: tuple[str, ...] = _SHARED
    if config.keys.mtp_copies == "used":
        copies = {"embeddings": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
        shared = tuple(what for what in _SHARED if copies[what] not in own)
    if any(
        isinstance(w, StoredParameter) for w in target.module.get_output_embeddings().parameters()
    ):
        raise UsageError(
            f"target.weights: stored does not suit {spec.name}: its MTP modules need an "
            "unquantised output matrix"
        )
    weights = borrowed_weights(body.module, body.module, shared)
    # A tied head that is split over ranks is not among the weights that the description counts.
    spared = {id(w): w for name, w in weights.items() if name not in body.shards.tied}
    saved = sum(map(held_bytes, spared.values()))
    found = replace(body, shared=shared, shared_bytes=saved, draft_tensors=_BORROWED)
    return found.within(place.max_model_len)
