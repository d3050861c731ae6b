"""Tool calls whose arguments are JSON text, rendered by templates of all kinds."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specdec_cli.errors import UsageError
from specdec_cli.experiment.rendering import filled
from specdec_cli.prompts.types import Message


class Jinja:
    """A tokenizer that has a chat template, and nothing else."""

    def __init__(self, template: str) -> None:
        body = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        body += "{% set c = c.function or c %}" + template + "{% endfor %}{% endfor %}"
        self.template = body

    def render(self, messages: tuple[Message, ...], template: Mapping[str, object]) -> str:
        try:
            conversation: Any = [list(messages)]
            (text,), _ = render_jinja_template(conversation, chat_template=self.template)
        except Exception as problem:
            raise UsageError(str(problem)) from problem
        return str(text)


def tokenizer(template: str) -> Any:
    return Jinja(template)


def conversation(arguments: object, *, is_flat: bool = False) -> tuple[Message, ...]:
    call: dict[str, object] = {"name": "f", "arguments": arguments}
    calls = [call if is_flat else {"type": "function", "function": call}]
    ask = {"role": "user", "content": [{"type": "text", "text": "Q"}]}
    return ask, {"role": "assistant", "content": None, "tool_calls": calls}


ITEMS = "{% for key, value in c.arguments|items %}<{{ key }}={{ value }}>{% endfor %}"
JOINED = "{{ '[' + c.arguments + ']' }}"
EITHER = "{{ c.arguments if c.arguments is string else c.arguments | tojson }}"
GIVEN = '{"a":1, "b": "ü"}'


@pytest.mark.parametrize(
    ("template", "arguments", "want"),
    [
        ("{{ c.arguments | tojson }}", GIVEN, '{"a": 1, "b": "ü"}'),  # Qwen2.5, Llama 3
        (ITEMS, GIVEN, "<a=1><b=ü>"),  # Qwen3-Coder
        (JOINED, GIVEN, f"[{GIVEN}]"),  # DeepSeek-R1
        ("{{ c.arguments }}", GIVEN, GIVEN),
        (EITHER, GIVEN, '{"a": 1, "b": "ü"}'),
        ("{{ c.arguments | tojson }}", json.loads(GIVEN), '{"a": 1, "b": "ü"}'),
        (ITEMS, "", ""),
        ("{{ c.arguments | tojson }}", "{}", "{}"),
        ("{{ c.arguments }}", "no JSON", "no JSON"),
        ("{{ c.arguments | tojson }}", "[1]", '"[1]"'),
        ("{{ c.name }}", GIVEN, "f"),
    ],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_arguments_of_tool_calls(
    template: str, arguments: object, want: str, is_flat: bool
) -> None:
    """Templates that need objects get them; those that join or print texts get the text."""
    found = filled(tokenizer(template), conversation(arguments, is_flat=is_flat), {})
    assert found == "Q" + want


def test_a_template_that_refuses_every_form_is_an_error() -> None:
    with pytest.raises(UsageError, match="never"):
        filled(tokenizer("{{ raise_exception('never') }}"), conversation(GIVEN), {})
