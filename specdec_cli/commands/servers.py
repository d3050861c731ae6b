"""Parses the servers that a command line names, and finds the proposal lengths to measure on them.

Other modules import this one inside functions, because it imports the server backend and pydantic.
"""

import os
import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path

from specdec_cli.backends.server.backend import ServerBackend
from specdec_cli.backends.server.detect import address
from specdec_cli.backends.server.dialects import ServerFacts
from specdec_cli.core.figures import Count, Record
from specdec_cli.errors import UsageError
from specdec_cli.experiment.folders.record_lines import checked, to_json
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.settings_file import read_json
from specdec_cli.recipe import Recipe
from specdec_cli.text import say

_FILE = "servers.json"  # in a run folder


class Named(Record):
    """The servers that a command line names.

    urls: addresses of the servers to measure.
    plain_url: address of a server without speculation; None if none is named.
    baseline: path of a run folder whose k = 0 samples are the baseline; None if none is named.
    ks: the proposal lengths from `--k`; None to measure those of all servers.
    """

    urls: list[str]
    plain_url: str | None
    baseline: str | None
    ks: list[Count] | None


def named(
    urls: list[str] | None,
    plain_url: str | None,
    baseline: Path | None,
    ks: list[int] | None,
    earlier: Path | None,
) -> Named:
    """Return the servers that the options name.

    earlier: the folder of a resumed run, which supplies the servers that the options leave out;
    None for a new run.
    Raises `UsageError` for text that is not an address, or an option that needs --server.
    """
    servers = Named(
        urls=[address(url, "--server") for url in urls or ()],
        plain_url=None if plain_url is None else address(plain_url, "--baseline-server"),
        baseline=None if baseline is None else os.path.abspath(baseline),
        ks=ks,
    )
    if earlier is not None:
        servers = _as_before(servers, earlier)
    needing = {"--baseline-server": servers.plain_url, "--baseline": servers.baseline}
    if not servers.urls and (found := next((n for n, value in needing.items() if value), None)):
        raise UsageError(f"{found} needs --server", "name each server to measure with --server URL")
    return servers


def keep(folder: RunFolder, servers: Named) -> None:
    """Write the servers into the run folder, for a command that resumes the run."""
    folder.write(_FILE, to_json(servers) + "\n")


def _as_before(servers: Named, folder: Path) -> Named:
    """Return `servers`, completed with the values in the resumed run's folder that the command line
    leaves out.

    The baseline is taken from the folder only if the command line has neither `--baseline-server`
    nor `--baseline`. Raises `UsageError` if neither the command line nor the folder names a server.
    """
    kept = checked(read_json(folder / _FILE), Named)
    if isinstance(kept, Named):
        for url in [*kept.urls, *([] if kept.plain_url is None else [kept.plain_url])]:
            address(url, str(folder / _FILE))  # the file may have been edited
        if not servers.urls:  # show where prompts and the API key will be sent
            say(f"servers from {folder}: {', '.join(kept.urls)}")
        urls, ks = servers.urls or kept.urls, kept.ks if servers.ks is None else servers.ks
        of_plain = kept if servers.plain_url is None and servers.baseline is None else servers
        plain_url, baseline = of_plain.plain_url, of_plain.baseline
        servers = Named(urls=urls, plain_url=plain_url, baseline=baseline, ks=ks)
    if not servers.urls:
        raise UsageError(f"the samples in {folder} come from servers", "name them with --server")
    return servers


def look_at_all(backend: ServerBackend, recipe: Recipe, servers: Named) -> list[int]:
    """Ask every server for its k, and register it with `backend` under that k.

    Returns the ks to measure, in ascending order. Raises `UsageError` if two servers have the same
    k, or if no server has a requested k.
    """
    asked, brings_plain = servers.ks, servers.baseline is not None
    if (plain := servers.plain_url) is not None:
        facts = backend.look(plain, recipe)
        if facts.k:
            raise UsageError(f"--baseline-server: {plain} speculates: it has k = {facts.k}")
        backend.servers[0] = facts
    for url in servers.urls:
        _enter(backend, backend.look(url, recipe), asked)
    there = {*backend.servers, *([0] if brings_plain else [])}
    if brings_plain and 0 in backend.servers:
        other = backend.servers[0].url
        raise UsageError(f"--baseline and the server at {other} both have k = 0", "leave one out")
    missing = sorted(set(asked or ()) - there)
    if missing:
        told = ", ".join(f"{f.url} has k = {k}" for k, f in sorted(backend.servers.items()))
        raise UsageError(f"--k {missing[0]}: no server has it; {told}")
    chosen = there if asked is None else {*asked, *({0} & there)}
    backend.servers = {k: facts for k, facts in sorted(backend.servers.items()) if k in chosen}
    return sorted(chosen)


def _enter(backend: ServerBackend, facts: ServerFacts, asked: list[int] | None) -> None:
    k = facts.k
    if k is None:
        if asked is None or len(asked) != 1:
            raise UsageError(
                f"the server at {facts.url} does not report its k",
                "pass its k, such as --k 3, or --k 0 without speculation",
            )
        k = asked[0]
    if (other := backend.servers.get(k)) is not None:
        raise UsageError(f"two servers have k = {k}: {other.url} and {facts.url}")
    backend.servers[k] = facts


def with_args(recipe: Recipe, words: str | None) -> Recipe:
    """Return the recipe with additional command-line arguments for its servers."""
    try:
        args = tuple(shlex.split(words or ""))
    except ValueError as problem:
        raise UsageError(f"--serve-args: {problem}") from None
    there = recipe.engine.args
    if there[len(there) - len(args) :] == args:  # a resumed run's recipe has them already
        return recipe
    return recipe.changed("engine", args=(*there, *args))


def logs_in(output: Path | None, until_end: ExitStack) -> Path:
    """Return the folder for the servers' logs: in the run folder, or a temporary one that the
    command deletes when it ends."""
    if output is not None:
        return output / "servers"
    return Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="specdec-servers-")))
