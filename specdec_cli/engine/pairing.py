"""A target and its draft, neither of them loaded: whether they fit together."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec_cli.core.detokenize import Tokenizer
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.engine.sharing import check_shared, not_held
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.methods.base import DraftPlace
from specdec_cli.methods.registry import method_of
from specdec_cli.models.config_file import config_file
from specdec_cli.models.description import Description
from specdec_cli.models.draft import Draft
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tokenizer import (
    check_same_vocabulary,
    has_tokenizer,
    is_same_tokenizer,
    load_tokenizer,
)
from specdec_cli.models.weights import tensor_names

_OF_HEADS = re.compile(r"(model[.])?fc[.]weight")

Describe = Callable[[ModelSpec, torch.device, TensorParallel], Description]


def describe_draft(place: DraftPlace, share: Sequence[str], describe: Describe) -> Draft:
    """The draft at its place, checked against its target but for the vocabulary.

    share: the recipe's `draft.share`. describe: for models of transformers'. Raises `SetupError`
    for a draft that cannot be found, read or run beside the target, and `UsageError` for keys of
    the recipe that do not fit it.
    """
    own = method_of(place.speculation).describe
    if own is None:
        draft = describe(place.spec, place.device, place.parallel)
        _check_is_model(draft)
        names = tuple(dict.fromkeys(share)) or not_held(draft)
        saved = check_shared(place.target, draft, names)
        return replace(draft, reach=place.max_model_len, shared=names, shared_bytes=saved)
    if share:
        raise UsageError(
            f"draft.share: {place.spec.name} borrows what it lacks by itself",
            "leave draft.share out",
        )
    if place.spec.weights == "stored" and place.spec.name != place.target.spec.name:
        raise UsageError(
            f"draft.weights: stored does not suit {place.spec.name}: heads have plain weights"
        )
    return own(place)


def check_k(draft: Draft, k: int) -> None:
    """Raise `UsageError` for more proposals a round than the draft can make."""
    if draft.max_k is not None and k > draft.max_k:
        why = f" ({found})" if (found := draft.notes.get("block")) else ""
        raise UsageError(
            f"-k {k} (speculation.num_speculative_tokens): the draft {draft.spec.name} proposes at "
            f"most {draft.max_k} tokens a round{why}",
            f"pass -k {draft.max_k} or less",
        )


def check_vocabulary(target: Description, draft: Draft, tokenizer: Tokenizer) -> None:
    """Raise `SetupError` unless a draft that stands alone has the ids of the target's `tokenizer`.

    A draft that reads the target's hidden states has none of its own.
    """
    if draft.feature_layers:
        return
    # A folder of a config alone, or without embeddings, takes the target's tokenizer.
    is_part = draft.spec.load_format == "dummy" or "embeddings" in draft.shared
    is_bare = is_part and not has_tokenizer(draft.place)
    own = tokenizer if is_bare or _have_one(target, draft) else tokenizer_of(draft)
    names, sizes = zip(*((m.spec.name, m.vocab_size) for m in (target, draft)), strict=True)
    check_same_vocabulary(tokenizer, own, names, sizes)


def _check_is_model(draft: Description) -> None:
    """Raise `SetupError` for a head whose config.json is that of an ordinary model of one layer."""
    names = tensor_names(draft.place)
    if (found := next(filter(_OF_HEADS.fullmatch, names), None)) is not None:
        raise SetupError(
            f"{draft.spec.name} reads the target's hidden states ({found} is among its weights), "
            "and its config.json names no kind of head",
            "heads of EAGLE-1, EAGLE-2 and HASS are not built yet",
        )


def tokenizer_of(model: Draft) -> Tokenizer:
    is_dummy = model.spec.load_format == "dummy"
    return load_tokenizer(
        model.place, model.spec.name, model.vocab_size, is_dummy, model.spec.trust_remote_code
    )


def _have_one(target: Description, draft: Draft) -> bool:
    """Whether both models have one tokenizer, without code of its own."""
    if target.spec.trust_remote_code or draft.spec.trust_remote_code:
        return False
    kinds = [config_file(m.spec.name, m.place).get("model_type") for m in (target, draft)]
    return kinds[0] == kinds[1] and is_same_tokenizer(target.place, draft.place)
