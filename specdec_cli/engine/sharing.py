"""Weights that a draft borrows from the target, as the recipe says or its checkpoint lacks them."""

import torch

from specdec_cli.errors import SetupError
from specdec_cli.models.description import Description
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.held import StoredParameter, borrowed_weights, held_bytes, lendable
from specdec_cli.models.weights import tensor_names


def not_held(draft: Description) -> tuple[str, ...]:
    """The names among `embeddings` and `lm_head` that the draft's checkpoint holds no tensor of, if
    the names of its tensors are known."""
    if draft.spec.load_format == "dummy" or is_gguf(draft.place):
        return ()
    if not (held := tensor_names(draft.place)):
        return ()
    found = []
    module = draft.module
    names = {id(part): name for name, part in module.named_modules()}
    is_tied = bool(module.config.tie_word_embeddings)
    for what, part in lendable(module).items():
        # Checkpoints of a bare model leave the prefix of its names out.
        tail = ".".join(f"{names[id(part)]}.weight".split(".")[-2:])
        if any(name == tail or name.endswith(f".{tail}") for name in held):
            if is_tied:
                return ()
        else:
            found.append(what)
    return tuple(found)


def check_shared(target: Description, draft: Description, share: tuple[str, ...]) -> int:
    """Bytes of the draft's weights that need not be loaded when it borrows the target's.

    Both are on meta. Raises `SetupError` if shapes, dtypes or, for the head, degrees differ.
    """
    if "lm_head" in share and draft.parallel.size != target.parallel.size:
        raise SetupError(
            f"draft.share: lm_head cannot be borrowed; the target's is split over "
            f"{target.parallel.size} ranks, and the draft runs on {draft.parallel.size}",
            "give both the same tensor_parallel_size, or take lm_head out of draft.share if the "
            "draft has a head of its own",
        )
    own = dict(draft.module.named_parameters(remove_duplicate=False))
    borrowed = borrowed_weights(draft.module, target.module, share)
    for what, (name, theirs) in zip(share, borrowed.items(), strict=True):
        ours = own.pop(name)
        if isinstance(theirs, StoredParameter):
            raise SetupError(
                f"draft.share: {what} cannot be borrowed; target {target.spec.name} holds it as "
                "its checkpoint stores it",
                "target.weights: dequantise makes it plain",
            )
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise SetupError(
                f"draft.share: {what} cannot be borrowed; its shape is {_shape(ours)} in draft "
                f"{draft.spec.name} and {_shape(theirs)} in target {target.spec.name}",
                f"shapes and dtypes must agree; a draft that has {what} needs no draft.share",
            )
    # A tied weight is still loaded if only one of its two uses is borrowed. A split head is a view
    # of the embedding if that is loaded, and a separate weight if the embedding is borrowed.
    tied = draft.shards.tied
    loaded: dict[int, int] = {
        id(p): held_bytes(p) for n, p in own.items() if tied.get(n) not in own
    }
    return draft.weight_bytes - sum(loaded.values())


def _shape(weight: torch.Tensor) -> str:
    return f"{list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"
