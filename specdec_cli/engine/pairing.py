"""Checks whether a draft fits its target, and finds out which of the target's weights the draft
borrows. Both happen before any weights are loaded."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.errors import SetupError, TooManyProposals, UsageError
from specdec_cli.lengths.registry import policy_of
from specdec_cli.methods.registry import method_of
from specdec_cli.models.config_file import config_file
from specdec_cli.models.conversion import converted
from specdec_cli.models.description import Description, DraftPlace
from specdec_cli.models.draft import Draft
from specdec_cli.models.gate import quantisation
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tensors import readers
from specdec_cli.models.held import StoredParameter, borrowed_weights, held_bytes, lendable
from specdec_cli.models.quantised import plain_names
from specdec_cli.models.refusals import ANOTHER_DRAFT
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tokenizer import (
    check_same_vocabulary,
    has_tokenizer,
    is_same_tokenizer,
    load_tokenizer,
)
from specdec_cli.models.weights import Read, tensor_names, unread
from specdec_cli.recipe import SpeculationSection
from specdec_cli.text import counted, one_line

# Unsupported kinds of draft whose config.json looks like an ordinary model's. Each kind is
# recognised by weight names that ordinary models do not have.
_OF_HEADS = (
    ("an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)", r"(model[.])?fc[.]weight"),
    ("a set of Hydra heads", r"(.*[.])?hydra_.*"),
    ("a set of Medusa heads", r"medusa_heads?[.].*|\d+[.]\d+([.]linear)?[.]weight"),
    ("an MLP speculator", r"(speculator[.])?(emb|proj)[.]\d+[.]weight"),
)

_SHOWN = 5

Describe = Callable[[ModelSpec, torch.device, TensorParallel], Description]


def describe_draft(place: DraftPlace, describe: Describe) -> Draft:
    """Describe the draft at `place`, and check that it fits the target. Its vocabulary is not
    checked here; see `check_vocabulary`.

    describe: describes a transformers model.

    Raises `SetupError` for a draft that cannot be found, read or run beside the target, and
    `UsageError` for recipe keys that do not fit the draft.
    """
    method = method_of(place.speculation)
    if method.describe is None:
        draft = describe(place.spec, place.device, place.parallel)
        _check_is_model(draft)
        if method.check is not None:
            draft = method.check(draft)
        names = tuple(dict.fromkeys(place.share)) or not_held(draft)
        saved = check_shared(place.target, draft, names, is_asked=bool(place.share))
        return replace(draft, reach=place.max_model_len, shared=names, shared_bytes=saved)
    if other := [name for name in place.share if name not in method.can_share]:
        raise UsageError(
            f"draft.share: {other[0]}: {place.spec.name} already borrows the weights that it lacks",
            "leave it out",
        )
    wanted = place.spec.weights
    if wanted in ("stored", "fp8") and place.spec.name != place.target.spec.name:
        raise UsageError(
            f"draft.weights: {wanted} does not suit {place.spec.name}: heads run on plain weights",
            "leave it out: a quantised checkpoint is then dequantised",
        )
    return method.describe(place)


def not_held(draft: Description) -> tuple[str, ...]:
    """Return those of `embeddings` and `lm_head` that the draft's checkpoint lacks, and that must
    be borrowed. Return an empty tuple if the names of its tensors are unknown."""
    if draft.spec.load_format == "dummy" or is_gguf(draft.place):
        return ()
    if not (held := tensor_names(draft.place)):
        return ()
    found = []
    module = draft.module
    names = {id(part): name for name, part in module.named_modules()}
    is_tied = bool(module.config.tie_word_embeddings)
    for what, part in lendable(module).items():
        # Compare only the end of each name, because a checkpoint that was saved without the LM head
        # lacks the usual prefix.
        tail = ".".join(f"{names[id(part)]}.weight".split(".")[-2:])
        if any(name == tail or name.endswith(f".{tail}") for name in held):
            if is_tied:
                return ()
        else:
            found.append(what)
    return tuple(found)


def check_shared(
    target: Description, draft: Description, share: tuple[str, ...], *, is_asked: bool = True
) -> int:
    """Check that the draft can borrow the weights in `share` from the target. Return how many bytes
    of draft weights therefore need not be loaded.

    Both models are on the meta device. is_asked: True if the recipe names the weights; False if
    they are borrowed because the draft's checkpoint lacks them. Raises `SetupError` if shapes or
    dtypes differ, if the target keeps such a weight quantised, or if the two models split `lm_head`
    over different numbers of ranks.
    """
    if "lm_head" in share and draft.parallel.size != target.parallel.size:
        why = (
            f"the target's is split over {target.parallel.size} ranks, but the draft runs on "
            f"{draft.parallel.size}"
        )
        hint = "give both the same tensor_parallel_size"
        if is_asked:
            hint += ", or remove lm_head from draft.share if the draft has its own"
        raise SetupError(_not_borrowed("lm_head", draft, why, is_asked=is_asked), hint)
    own = dict(draft.module.named_parameters(remove_duplicate=False))
    borrowed = borrowed_weights(draft.module, target.module, share)
    for what, (name, theirs) in zip(share, borrowed.items(), strict=True):
        ours = own.pop(name)
        if isinstance(theirs, StoredParameter):
            why = f"target {target.spec.name} keeps it quantised, as in its checkpoint"
            raise SetupError(
                _not_borrowed(what, draft, why, is_asked=is_asked),
                "set target.weights: dequantise",
            )
        if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
            continue
        if not is_asked and ours.shape != theirs.shape:
            raise SetupError(
                f"the draft {draft.spec.name} is for another target: it borrows its target's "
                f"{what} and needs {_sizes(ours)}, but target {target.spec.name} has "
                f"{_sizes(theirs)}",
                ANOTHER_DRAFT,
            )
        why = (
            f"its shape is {_shape(ours)} in draft {draft.spec.name} and {_shape(theirs)} in "
            f"target {target.spec.name}"
        )
        hint = f"shapes and dtypes must agree; a draft that has {what} needs no draft.share"
        hint = hint if is_asked else "give both models the same dtype"
        raise SetupError(_not_borrowed(what, draft, why, is_asked=is_asked), hint)
    # If one weight is tied, that is, used both as embedding and as LM head, borrowing only one of
    # the two does not save loading it. An LM head that is split over ranks is a view of the
    # embedding if the embedding is loaded, and a separate weight if not.
    tied = draft.shards.tied
    loaded: dict[int, int] = {
        id(p): held_bytes(p) for n, p in own.items() if tied.get(n) not in own
    }
    return draft.weight_bytes - sum(loaded.values())


def _not_borrowed(what: str, draft: Description, why: str, *, is_asked: bool) -> str:
    """Return the message of the error for a weight that the draft cannot borrow. why: the
    reason."""
    begin = f"draft.share: {what} cannot be borrowed"
    if not is_asked:
        begin = f"the draft {draft.spec.name} has no {what} and cannot borrow the target's"
    return f"{begin}; {why}"


def _sizes(weight: torch.Tensor) -> str:
    """Describe the sizes of an embedding or an LM head for an error message."""
    vocabulary, width = weight.shape
    return f"a vocabulary of {vocabulary} tokens and a hidden size of {width}"


def _shape(weight: torch.Tensor) -> str:
    return f"{list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"


def check_k(draft: Draft, speculation: SpeculationSection) -> None:
    """Raise `TooManyProposals` if k is more than the draft can propose."""
    k = speculation.num_speculative_tokens
    if draft.max_k is not None and k > draft.max_k:
        why = f" ({found})" if (found := draft.notes.get("block")) else ""
        limit = f"the draft {draft.spec.name} proposes at most {draft.max_k} tokens a round{why}"
        is_default = "num_speculative_tokens" not in speculation.model_fields_set
        raise TooManyProposals(k, draft.max_k, limit, is_default=is_default)


def check_policy(draft: Draft | None, speculation: SpeculationSection, k: int) -> None:
    """Raise `UsageError` if the length policy needs a confidence head and the draft has none, or
    has nothing to choose from at k, the largest of the run (0 if nothing proposes)."""
    policy = policy_of(speculation)
    if k and speculation.length.policy == "adaptive" and policy.lengths(k) == (k,):
        raise UsageError(
            f"speculation.length.choices: none of {list(speculation.length.choices)} is below "
            f"k = {k}, so adaptive has nothing to choose from",
            "name smaller ones, or leave speculation.length out",
        )
    if policy.doubt is not None and (draft is None or not draft.has_confidence):
        who = speculation.method if draft is None else f"the draft {draft.spec.name}"
        raise UsageError(
            f"speculation.length.policy is {speculation.length.policy}: {who} has no confidence "
            "head",
            "policy: confidence stops any draft by the probability of its tokens",
        )


def check_vocabulary(target: Description, draft: Draft, tokenizer: Tokenizer) -> None:
    """Raise `SetupError` unless the draft's token ids mean the same tokens as in the target's
    `tokenizer`. Drafts that read the target's hidden states always pass."""
    if draft.feature_layers:
        return
    # A dummy draft, or one that borrows embeddings, takes the target's tokenizer if its folder has
    # none.
    is_part = draft.spec.load_format == "dummy" or "embeddings" in draft.shared
    is_bare = is_part and not has_tokenizer(draft.place)
    own = tokenizer if is_bare or _have_one(target, draft) else tokenizer_of(draft)
    names, sizes = zip(*((m.spec.name, m.vocab_size) for m in (target, draft)), strict=True)
    check_same_vocabulary(tokenizer, own, names, sizes)


def _check_is_model(draft: Description) -> None:
    """Raise `SetupError` if the draft is not the ordinary model that its config.json describes: if
    it has weights of a kind in `_OF_HEADS`, or weights that the model would not use. Such a draft
    would run, but its acceptance would be meaningless."""
    if draft.spec.load_format == "dummy":
        return
    name = draft.spec.name
    names = () if is_gguf(draft.place) else tensor_names(draft.place)
    for noun, pattern in _OF_HEADS:
        if (found := next(filter(re.compile(pattern).fullmatch, names), None)) is not None:
            raise SetupError(
                f"{name} has the weights of {noun} ({one_line(found)}), which is not supported "
                "yet, although its config.json describes an ordinary model",
                "models of transformers' families work as drafts",
            )
    if not names and any(draft.place.glob("*.bin")) and not has_tokenizer(draft.place):
        raise SetupError(
            f"{name} has no tokenizer and only pickled weights, so it is not a complete model; the "
            "first kinds of EAGLE heads are stored like this, and are not supported yet",
            "a model needs its tokenizer's files in the same folder",
        )
    if unused := _without_use(draft, names):
        raise SetupError(
            f"{counted(len(unused), 'tensor')} in the weights of the draft {name} would not be "
            f"used: {one_line(', '.join(unused[:_SHOWN]))}{', …' if len(unused) > _SHOWN else ''}; "
            "the model that its config describes has no such tensors",
            "is it an unsupported kind of draft? If the tensors are not needed, remove them",
        )


def _without_use(draft: Description, names: Collection[str]) -> list[str]:
    """Return the names of the tensors in the draft's checkpoint that its model does not read.
    names: the names of all tensors in the checkpoint; unused if it is a GGUF file."""
    module = draft.module
    if is_gguf(draft.place):
        return readers(module, read_model(draft.place), draft.dtype)[1]
    is_plain = quantisation(module.config) is None
    if not is_plain:
        names = plain_names(names, module.config.quantization_config, draft.spec.name)
    tensors: dict[str, Read] = dict.fromkeys(names, unread)
    unused = converted(module, tensors)[1]
    if is_plain:
        return unused
    # Leave out scales. Scales of activations and of the cache are unused by design, and other code
    # reports a weight's scale that does not fit.
    return [name for name in unused if "scale" not in name.rpartition(".")[2]]


def tokenizer_of(model: Draft) -> Tokenizer:
    is_dummy = model.spec.load_format == "dummy"
    return load_tokenizer(
        model.place, model.spec.name, model.vocab_size, is_dummy, model.spec.trust_remote_code
    )


def _have_one(target: Description, draft: Draft) -> bool:
    """Return True if both models certainly have the same tokenizer. Return False if either model
    may run its own code, because equal files then do not prove that the tokenizers are equal."""
    if target.spec.trust_remote_code or draft.spec.trust_remote_code:
        return False
    kinds = [config_file(m.spec.name, m.place).get("model_type") for m in (target, draft)]
    return kinds[0] == kinds[1] and is_same_tokenizer(target.place, draft.place)
