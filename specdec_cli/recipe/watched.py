"""The recipe's `speculation.options`: keys that only plugins know."""

from collections.abc import Callable
from typing import Any

from pydantic import GetCoreSchemaHandler, JsonValue
from pydantic_core import CoreSchema, core_schema

from specdec_cli.errors import UsageError
from specdec_cli.text import one_line


class WatchedOptions(dict[str, Any]):
    """A dict that records which keys are read. Copies share the record, so that a plugin may change
    the copy that it gets.

    asked: the keys that have been read.
    unmade: the arms of a sweep whose plugins have not been made yet.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(dict.items(options))
        self.asked: set[str] = getattr(options, "asked", set())
        self.unmade: set[str | None] = getattr(options, "unmade", set())

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        of_dict = handler.generate_schema(dict[str, JsonValue])
        return core_schema.no_info_after_validator_function(cls, of_dict)

    def refuse_unknown(self, made: str | None) -> None:
        """Raise `UsageError` for a key that no plugin has read, once all arms are made.

        made: the arm whose plugins have just been made.
        """
        self.unmade.discard(made)
        for key in () if self.unmade else dict.keys(self):
            if key not in self.asked:
                names = ", ".join(sorted(self.asked)) or "none"
                raise UsageError(
                    f"speculation.options.{one_line(key)}: no plugin reads this key",
                    f"keys that plugins read: {names}",
                )


def _recording(name: str) -> Callable[..., Any]:
    """Return a method of `dict` that also records the key that it is given, or all keys if it is
    given none."""
    plain = getattr(dict, name)

    def call(self: WatchedOptions, *given: Any) -> Any:
        self.asked.update(given[:1] or dict.keys(self))
        return plain(self, *given)

    return call


_OF_A_KEY = ("__getitem__", "__contains__", "get", "setdefault", "pop")
for _name in (*_OF_A_KEY, "__iter__", "keys", "values", "items"):
    setattr(WatchedOptions, _name, _recording(_name))
