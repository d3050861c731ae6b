"""Settings of prompts that change nothing are told."""

from typing import Any

import pytest

from specdec_cli.app import main
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["data.limit=1"], "data.limit has no effect on prompts of --prompt or a pipe"),
        (["data.column=x", "data.split=y"], "data.column, data.split have no effect on"),
        (["data.chat=off"], None),
        (["sampling.top_k=0"], None),
    ],
)
def test_keys_of_a_file_beside_prompts_of_the_command_line(
    given: list[str], told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [word for one in given for word in ("--set", one)]
    assert main(["generate", "demo", "--target", "/no/such/model", "--prompt", "a", *sets]) != 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert len(warnings) == (told is not None)
    assert told is None or warnings[0].startswith(f"warning: {told}")
