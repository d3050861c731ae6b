"""The start of a command's work: imports of heavy packages, and ranks, which this process starts or
joins. Imports nothing heavy itself."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import typer

import specdec_cli
from specdec_cli.launch.world import Place, World, join

T = TypeVar("T")


@contextmanager
def importing() -> Iterator[None]:
    """Wraps imports of the engine, which load torch and transformers.

    These create a million objects that live to the end. The garbage collector would traverse them
    again and again during the imports, and later with every collection of a run.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


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
