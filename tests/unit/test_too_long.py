"""Prompts that cannot run are told before a sweep begins, in a dry run too."""

from types import SimpleNamespace
from typing import Any

import pytest

from specdec_cli.experiment.preparing import too_long

CONTEXT, NEW = 64, 8


def job(lengths: list[int], blocks: int | None, *, is_native: bool = True, ahead: int = 0) -> Any:
    cache = SimpleNamespace(num_blocks=blocks, block_size=4)
    plan = SimpleNamespace(
        max_model_len=CONTEXT,
        ahead=ahead,
        draft_max_len=50,
        params=SimpleNamespace(max_new_tokens=NEW),
        recipe=SimpleNamespace(cache=cache),
    )
    backend = SimpleNamespace(is_native=is_native)
    return SimpleNamespace(backend=backend, plan=plan, token_ids=[(1,) * n for n in lengths])


@pytest.mark.parametrize(
    ("lengths", "blocks", "told"),
    [
        ([1, 63], None, None),
        ([1, 64], None, "1 of 2 prompts cannot run: the longest has 64 tokens, and the context"),
        ([65], None, "1 of 1 prompt cannot run: the longest has 65 tokens, and the context has 64"),
        ([1, 13], 6, None),  # 20 tokens in five blocks: the last new token needs no room
        ([1, 14], 6, "1 of 2 prompts cannot run: the longest has 14 tokens, and with up to 8 new"),
        ([14, 70, 1], 6, "2 of 3 prompts cannot run: the longest has 70 tokens, and the context"),
        ([63], 17, None),  # the context cuts the text
    ],
)
def test_prompts_too_long(lengths: list[int], blocks: int | None, told: str | None) -> None:
    found = too_long([job(lengths, blocks)])
    assert [one.code for one in found] == ([] if told is None else ["prompts_too_long"])
    assert told is None or found[0].message.startswith(told)


def test_only_prompts_that_run_count_and_only_caches_of_our_own() -> None:
    assert not too_long([job([1, 70], None)], count=1)
    assert not too_long([job([14], 6, is_native=False)])


@pytest.mark.parametrize(
    ("length", "ahead", "blocks", "fits"),
    [
        (13, 1, 6, True),  # the last round with proposals has 19 tokens and writes one more
        (13, 2, 6, False),
        (10, 4, 6, True),
        (11, 4, 6, False),
        (44, 9, 14, True),  # the draft's context ends before the text
        (60, 9, None, True),
    ],
)
def test_a_draft_that_writes_past_the_text_needs_blocks_there(
    length: int, ahead: int, blocks: int | None, fits: bool
) -> None:
    found = too_long([job([length], blocks), job([length], blocks, ahead=ahead)])
    assert not found if fits else "new ones and a draft's block they exceed" in found[0].message
