"""The servers that a command line names, and the points that they have. Imported by functions."""

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from specdec_cli.backends.server.backend import ServerBackend
from specdec_cli.backends.server.detect import address
from specdec_cli.backends.server.dialects import ServerFacts
from specdec_cli.errors import UsageError
from specdec_cli.recipe import Recipe


def refuse_unfit(servers: Sequence[str] | None, needing: Mapping[str, object]) -> None:
    """Raise `UsageError` for options, by name with their values, that count only beside servers."""
    if not servers and (found := next((n for n, value in needing.items() if value), None)):
        raise UsageError(f"{found} needs --server", "name the servers to measure with --server URL")


def look_at_all(
    backend: ServerBackend,
    recipe: Recipe,
    urls: Sequence[str],
    baseline: str | None,
    asked: Sequence[int] | None,
    folder: Path | None,
) -> list[int]:
    """Enter the servers into `backend`, by k; return the ks to measure, in order.

    baseline: the address of a server without speculation. asked: by `--k`, without the 0 that is
    always there; None for all that there are. folder: of a run that brings k = 0.
    """
    named = [address(url, "--server") for url in urls]
    plain = None if baseline is None else address(baseline, "--baseline-server")
    if plain is not None:
        facts = backend.look(plain, recipe)
        if facts.k:
            raise UsageError(f"--baseline-server: {plain} speculates: its k is {facts.k}")
        backend.servers[0] = facts
    for url in named:
        _enter(backend, backend.look(url, recipe), asked)
    there = {*backend.servers, *([0] if folder is not None else [])}
    if folder is not None and 0 in backend.servers:
        other = backend.servers[0].url
        raise UsageError(f"--baseline and the server at {other} both have k = 0", "leave one out")
    missing = sorted(set(asked or ()) - there)
    if missing:
        told = ", ".join(f"{f.url} has k = {k}" for k, f in sorted(backend.servers.items()))
        raise UsageError(f"--k {missing[0]}: no server has it; {told}")
    chosen = there if asked is None else {*asked, *({0} & there)}
    backend.servers = {k: facts for k, facts in sorted(backend.servers.items()) if k in chosen}
    return sorted(chosen)


def _enter(backend: ServerBackend, facts: ServerFacts, asked: Sequence[int] | None) -> None:
    k = facts.k
    if k is None:
        if asked is None or len(asked) != 1:
            raise UsageError(
                f"the server at {facts.url} does not say its k",
                "say it with --k, such as --k 3, or --k 0 for one without speculation",
            )
        k = asked[0]
    if (other := backend.servers.get(k)) is not None:
        raise UsageError(f"two servers have k = {k}: {other.url} and {facts.url}")
    backend.servers[k] = facts


def with_args(recipe: Recipe, words: str | None) -> Recipe:
    """The recipe with further words for its servers."""
    try:
        args = tuple(shlex.split(words or ""))
    except ValueError as problem:
        raise UsageError(f"--serve-args: {problem}") from None
    there = recipe.engine.args
    if there[len(there) - len(args) :] == args:  # of a run that goes on with its folder's recipe
        return recipe
    return recipe.changed("engine", args=(*there, *args))


def logs_in(output: Path | None, until_end: ExitStack) -> Path:
    """The folder for servers' logs: the run folder's, or one that goes with the command."""
    if output is not None:
        return output / "servers"
    return Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="specdec-servers-")))
