"""Comparison of models between run folders, and drafts whose context ends early."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_cli.core.types import SamplingParams
from specdec_cli.demo import demo_path
from specdec_cli.errors import OtherSettings, SetupError
from specdec_cli.experiment.folders.settings_difference import (
    Difference,
    first_difference,
    settings_difference,
)
from specdec_cli.experiment.folders.settings_file import check_same
from specdec_cli.experiment.generation import draft_context_warning
from specdec_cli.models.fingerprint import fingerprint


def settings(target: str, weights: str | None, draft: str = "d") -> dict[str, Any]:
    section = {"model": target, "load_format": "auto"}
    found = {"target": section | ({"weights": weights} if weights else {})}
    return {
        "recipe": found | {"drafts": [{"model": draft, "weights": "of-draft"}]},
        "drafts": [draft],
    }


@pytest.mark.parametrize(
    ("there", "now", "expected"),
    [
        (settings("t", "1"), settings("/a/t", "1"), None),
        (settings("t", "1"), settings("t", "2"), Difference("target.model", "t", "t", True)),
        (settings("t", "1"), settings("u", "2"), Difference("target.model", "t", "u")),
        # Weights without a fingerprint only have names.
        (settings("t", None), settings("t", "1"), None),
        (settings("t", None), settings("u", "1"), Difference("target.model", "t", "u")),
        # Records are labelled with the draft's name.
        (
            settings("t", "1", "d"),
            settings("t", "1", "/a/d"),
            Difference("drafts", ["d"], ["/a/d"], same_model=True),
        ),
    ],
)
def test_settings_difference(
    there: dict[str, Any], now: dict[str, Any], expected: Difference | None
) -> None:
    before = copy.deepcopy((there, now))
    assert settings_difference(there, now) == expected
    assert (there, now) == before


def test_a_key_that_only_one_side_has_differs() -> None:
    one, both = {"a": {"x": 1}}, {"a": {"x": 1, "y": 2}}
    assert first_difference(one, both) == ("a.y", None, 2)
    assert first_difference(both, one) == ("a.y", 2, None)


def test_random_weights_are_told_by_the_setting_that_made_them() -> None:
    """Fingerprints differ too, although the folder has not changed."""
    there, now = settings("t", "1"), settings("t", "2")
    now["recipe"]["target"]["load_format"] = "dummy"
    expected = Difference("target.load_format", "auto", "dummy")
    assert settings_difference(there, now) == expected


def test_another_device_is_said_before_other_weights() -> None:
    """A server's models have fingerprints of their own."""
    there, now = settings("t", "1"), settings("t", "2")
    there["device"], now["device"] = "cpu", "vllm 0.25.1"
    assert settings_difference(there, now) == Difference("device", "cpu", "vllm 0.25.1")
    now["device"] = "cpu"
    weights = Difference("target.model", "t", "t", same_name=True)
    assert settings_difference(there, now) == weights


def test_a_comparison_names_its_draft_once() -> None:
    there, now = (
        {"recipe": {"draft": {"model": name, "weights": "1"}}, "draft": name} for name in "ab"
    )
    assert settings_difference(there, now) == Difference("draft", "a", "b", same_model=True)
    now["recipe"]["draft"] = {"model": "a", "weights": "2"}
    assert settings_difference(there, now) == Difference("draft.model", "a", "a", same_name=True)


def test_fingerprint(tmp_path: Path) -> None:
    original = demo_path("demo:draft")
    copied = shutil.copytree(original, tmp_path / "copy")
    same = fingerprint(original, "auto")
    assert fingerprint(copied, "auto") == same
    assert fingerprint(copied, "dummy") != same
    ends = copied / "generation_config.json"
    (kept := copied / "kept").write_bytes(ends.read_bytes() if ends.exists() else b"{}")
    ends.write_text('{"eos_token_id": 7}')  # other ids end a text
    assert fingerprint(copied, "auto") != same
    kept.replace(ends)
    random = fingerprint(copied, "dummy")
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in (-1, 9):  # the last weight, and the header
        content[place] ^= 1
        weights.write_bytes(content)
        assert fingerprint(copied, "auto") != same
        content[place] ^= 1
    weights.write_bytes(content[:5])  # the loader reports the damage
    assert fingerprint(copied, "auto") != same
    weights.unlink()
    weights.mkdir()  # no weights at all
    assert fingerprint(copied, "auto") == fingerprint(copied, "dummy") == random
    (copied / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SetupError, match="is not a weight index"):
        fingerprint(copied, "auto")
    (copied / "config.json").write_text("{}")
    assert fingerprint(copied, "dummy") != random


@pytest.mark.parametrize(
    ("holds", "lengths", "new", "past"),
    [
        (128, [10, 128, 0], 500, 0),  # a context like the target's; two prompts cannot run
        (126, [10], 500, 1),
        (127, [10], 500, 0),  # the last token is the target's own
        (40, [10, 20, 21], 20, 0),
        (40, [10, 21, 22, 23], 20, 2),
        (40, [50], 1, 0),  # nothing would be proposed
        (40, [50], 2, 1),
    ],
)
def test_a_draft_whose_context_ends_early(
    holds: int, lengths: list[int], new: int, past: int
) -> None:
    plan: Any = SimpleNamespace(
        draft_max_len=holds,
        max_model_len=128,
        params=SamplingParams(max_new_tokens=new),
    )
    found = draft_context_warning(plan, [(1,) * length for length in lengths])
    if past == 0:
        assert found is None
    else:
        assert found == (
            f"the draft's context holds {holds} tokens, beyond which it proposes nothing: "
            f"{past} of {len(lengths)} prompts may go past it"
        )
    plan.draft_max_len = None
    assert draft_context_warning(plan, [(1,) * length for length in lengths]) is None


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (set[str](), "the data, the target's tokenizer or its chat template has changed"),
        ({"output", "outputs", "resume", "max_new_tokens"}, "the data, the target's tokenizer"),
        ({"prompts", "limit"}, "--resume -o DIR alone uses"),
        ({"data.limit"}, "--resume -o DIR alone uses"),
        ({"recipe"}, "--resume -o DIR alone uses"),
    ],
)
@pytest.mark.parametrize("key", ["count", "sha256", "categories"])
def test_other_prompts_without_an_option_are_changed_data(
    typed: set[str], hint: str, key: str
) -> None:
    """The hint does not send a user to the command that was just tried."""
    there, now = ({"prompts": {key: value}} for value in (1, 2))
    with pytest.raises(OtherSettings) as found:
        check_same(Path("run"), "run", there, now)
    assert str(found.value.about(typed).hint).startswith(hint)
