"""A command with ranks and no models, for tests: `python -m tests.launch.worker loop ...`.

It has the stages of a run (load, draft, verify), and one rank may fail in one of them. The ranks
compute one all-reduce per round, like a run's verification.
"""

import os
import sys
import time
from pathlib import Path

import typer

from specdec_cli.app import app, main
from specdec_cli.launch.world import Place, join
from tests.launch.faults import fail


@app.command("loop", hidden=True)
def loop(
    ctx: typer.Context,
    ranks: int = 2,
    rounds: int = 5,
    seconds: float = 0.0,
    timeout: float = 8.0,
    fault: str = "",
    code: int = 0,
    device: str = "cpu",
    pids: Path | None = None,
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    """Run rounds. fault: MODE:STAGE:RANK. seconds: pause between rounds. pids: folder for ids."""
    place: Place = ctx.obj
    if place.must_start(ranks):
        raise typer.Exit(place.start(ranks, timeout_s=timeout, inputs="from the parent"))
    mode, stage, faulty = fault.split(":") if fault else ("", "", "-1")
    with join(place, ranks, device=device, timeout_s=timeout) as world:
        import torch
        import torch.distributed as dist

        if pids is not None:
            (pids / f"{world.rank}-{os.getpid()}").touch()

        def reach(name: str) -> None:
            if (stage, int(faulty)) == (name, world.rank):
                fail(mode)

        reach("load")
        said = world.inputs(lambda: f"from rank 0: {sys.stdin.read()}")
        world.ready()
        total = torch.ones(())
        for _ in range(rounds):
            reach("draft")
            dist.all_reduce(total)
            reach("verify")
            dist.all_reduce(total)
            world.beat()
            time.sleep(seconds)
        assert total == world.size ** (2 * rounds)
        typer.echo(f'{{"rank": {world.rank}, "of": {world.size}, "said": "{said}"}}')
    raise typer.Exit(code)


if __name__ == "__main__":
    sys.exit(main())
