"""Settings of chat templates that no prompt goes through are told."""

from typing import Any

import pytest

from specdec_cli.prompts import Prompt, unused_template

TEXT = Prompt(0, "a")
MESSAGES = Prompt(1, None, messages=({"role": "user", "content": "a"},))


@pytest.mark.parametrize(
    ("prompts", "chat", "of_chat", "names"),
    [
        ([TEXT], "auto", {"template": {"x": 1}, "chat_template": None}, "data.template has"),
        ([TEXT], "auto", {"template": {}, "chat_template": "t"}, "data.chat_template has"),
        ([TEXT, TEXT], "auto", {"template": {"x": 1}, "chat_template": "t"}, "data.template and"),
        ([TEXT, MESSAGES], "auto", {"template": {"x": 1}, "chat_template": "t"}, None),
        ([TEXT], "off", {"template": {"x": 1}, "chat_template": "t"}, None),
        ([TEXT], "auto", {"template": {}, "chat_template": None}, None),
    ],
)
def test_a_template_that_no_prompt_goes_through(
    prompts: list[Prompt], chat: str, of_chat: dict[str, Any], names: str | None
) -> None:
    found = unused_template(prompts, chat, of_chat)
    assert [one.code for one in found] == ([] if names is None else ["unread_by_template"])
    assert names is None or found[0].message.startswith(names)
