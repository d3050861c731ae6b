"""The ranks of a command: started by this process, or joined by it. Imports nothing heavy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import typer

import specdec_cli
from specdec_cli.launch.world import Place, World, join

T = TypeVar("T")


@contextmanager
def joined(
    place: Place, recipes: "Sequence[specdec_cli.recipe.Recipe]", read: Callable[[], T]
) -> Iterator[tuple[World, T]]:
    """The world of the recipes' ranks and the inputs that `read` finds, during the block.

    A process that has to start the ranks instead checks the recipes, waits for the ranks and leaves
    the command with their exit code. recipes: alike in their number of ranks.
    """
    from specdec_cli.models.ahead import check_ahead

    num_ranks, run = recipes[0].target.tensor_parallel_size, recipes[0].run
    if place.must_start(num_ranks):
        inputs = read()
        for recipe in recipes:
            check_ahead(recipe)
        raise typer.Exit(place.start(num_ranks, timeout_s=run.timeout_s, inputs=inputs))
    with join(place, num_ranks, device=run.device, timeout_s=run.timeout_s) as world:
        yield world, world.inputs(read)
