"""Chooses some of the prompts: the first ones, or a random sample with a seed.

The chosen prompts keep their order.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from specdec_cli.errors import Notice, UsageError
from specdec_cli.prompts.types import Prompt
from specdec_cli.text import one_line

STRATIFIED = "stratified"
_NO_CATEGORY = "(none)"
_FAR_OFF = 0.25  # warn if more than this share of prompts is in the wrong category
_MAX_NAMED = 6


def check_size(sample: str | None, limit: int | None) -> None:
    """Raise `UsageError` for a sample without a limit."""
    if sample is not None and limit is None:
        raise UsageError(f"a {sample} sample needs a size", "pass --limit N, or set data.limit")


def sampled(prompts: Sequence[Prompt], limit: int | None, sample: str, seed: int) -> list[Prompt]:
    """Draw a sample of `prompts`, in their order. With the same seed, a larger one contains every
    smaller one. Raises `UsageError` for a stratified sample of prompts without a category."""
    order = sorted(range(len(prompts)), key=lambda place: _draw(seed, place))
    if sample == STRATIFIED:
        order = _in_turn(order, [prompt.category for prompt in prompts])
    return [prompts[place] for place in sorted(order[:limit])]


def _draw(seed: int, place: int) -> bytes:
    """Return the key that sorts prompts into a random order: a hash that is the same in all
    versions of Python."""
    return hashlib.sha256(f"{seed} {place}".encode()).digest()


def _in_turn(order: Sequence[int], categories: Sequence[str | None]) -> list[int]:
    """Reorder `order` so that it takes one prompt from each category in turn. The categories then
    have shares as equal as possible."""
    if not any(category is not None for category in categories):
        raise UsageError(
            "a stratified sample needs categories, but no prompt has one",
            "pass --sample random, or give the data a category column",
        )
    seen: Counter[str | None] = Counter()
    first = {category: place for place, category in reversed(list(enumerate(categories)))}
    turns = []
    for place in order:
        category = categories[place]
        turns.append((seen[category], first[category], place))
        seen[category] += 1
    return [place for _, _, place in sorted(turns)]


def uneven(
    taken: Sequence[Prompt], further: Mapping[str | None, int], *, is_whole: bool
) -> list[Notice]:
    """Return a notice if the first prompts of the data lack some of its categories, or have them in
    very different proportions. Otherwise, return an empty list.

    taken: the first prompts, which the run uses.
    further: how many of the prompts after `taken` belong to each category.
    is_whole: whether `further` counts all prompts after `taken`; if False, it counts only the next
        ones.
    """
    first = Counter(prompt.category for prompt in taken)
    data = first + Counter(further)
    if not any(category is not None for category in first) or len(data) < 2:
        return []
    size, total = first.total(), data.total()
    changed = sum(max(0.0, first[c] / size - data[c] / total) for c in data)
    if len(first) == len(data) and changed <= _FAR_OFF:
        return []
    where = "the data" if is_whole else f"the first {total} rows"
    if len(first) < len(data):
        named = _listed(first)
        which = f"first {size} prompts are" if size > 1 else "first prompt is"
        told = f"the {which} from {len(first)} of {len(data)} categories ({named})"
    else:
        most = max(data, key=lambda c: first[c] / size - data[c] / total)
        told = (
            f"the first {size} prompts are distributed over categories differently from {where}: "
            f"{_named(most)} is {first[most] / size:.0%} of them and {data[most] / total:.0%} there"
        )
    evidence = {
        "limit": size,
        "rows": total,
        "is_whole": is_whole,
        "categories": {_named(c): {"taken": first[c], "data": data[c]} for c in data},
    }
    return [Notice("limit_by_category", f"{told}: pass --sample stratified", evidence)]


def _named(category: str | None) -> str:
    return _NO_CATEGORY if category is None else one_line(category)


def _listed(categories: Iterable[str | None]) -> str:
    names = list(map(_named, categories))
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
