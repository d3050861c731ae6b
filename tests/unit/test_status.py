"""The bar over the work before a command starts."""

from specdec_cli.commands.status import Stages, waiting


def test_stages_count_up() -> None:
    shown: list[tuple[str, int, int]] = []
    stages = Stages(lambda *values: shown.append(values))
    stages.expect(2)
    stages.begin("loading")
    stages.begin("compiling")
    assert shown == [("loading", 0, 2), ("compiling", 1, 2)]


def test_a_short_preparation_is_not_shown_without_a_terminal(capsys: object) -> None:
    with waiting("getting ready", quiet=False) as stages:
        stages.expect(3)
        stages.begin("loading")
    captured = capsys.readouterr()  # type: ignore[attr-defined]
    assert captured.out == captured.err == ""
