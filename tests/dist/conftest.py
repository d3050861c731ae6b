"""One world for all tests of this folder, because starting it takes longer than most tests."""

from collections.abc import Iterator

import pytest

from tests.dist.world import World

WORLD_SIZE = 4


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(WORLD_SIZE, tmp_path_factory.mktemp("world"), "memory")
    yield world
    world.close()
