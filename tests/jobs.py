"""Runs tests in forks of the process that has collected them: imports and collection happen once.

`pytest --jobs N`: N workers share the files, and one more runs the tests marked `dist`, which wait
for other processes most of the time.
"""

import os
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

_LOOK_S = 2.0  # a process that a worker left may hold its end of a pipe, so that no end is seen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=0, help="workers that share the files")


def pytest_runtestloop(session: Any) -> bool | None:
    """Run the collected tests in workers; left to pytest without --jobs, and after an error."""
    jobs = session.config.getoption("jobs")
    if not jobs or session.config.getoption("collectonly") or session.testsfailed:
        return None
    waits = [item for item in session.items if "dist" in item.keywords]
    computes = [item for item in session.items if "dist" not in item.keywords]
    queues = [_queue(computes)] * jobs + [_queue(waits)]
    workers: dict[Connection, Any] = {}
    for number, taken in enumerate(queues):
        ours, theirs = get_context("fork").Pipe(duplex=False)
        place = session.config._tmp_path_factory.mktemp(f"worker{number}", numbered=False)
        given = session.config, taken, theirs, [*workers, ours], place
        workers[ours] = get_context("fork").Process(target=_work, args=given)
        workers[ours].start()
        theirs.close()
    _relay(session.config, workers)
    return True


def _queue(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests of files that no other worker took; each worker goes through a fork of it."""
    files = [list(of_one) for _, of_one in groupby(items, key=lambda item: item.path)]
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(2) for number in range(len(files))))
    os.close(writing)

    def taken() -> Iterator[pytest.Item]:
        while number := os.read(reading, 2):
            yield from files[int.from_bytes(number)]

    return taken()


class _Teller:
    """In a worker: sends on what pytest's hooks tell of tests."""

    def __init__(self, end: Connection, config: pytest.Config) -> None:
        self.end = end
        self.config = config

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.end.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.end.send(("logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_plain = self.config.hook.pytest_report_to_serializable
        self.end.send(("logreport", to_plain(config=self.config, report=report)))


def _work(
    config: Any,
    taken: Iterator[pytest.Item],
    end: Connection,
    others: list[Connection],
    place: Path,
) -> None:
    """Run tests in a worker. place: its folder for temporary files."""
    for other in others:
        other.close()
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # forks would read each other's output from one file
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Teller(end, config))
    config._tmp_path_factory._basetemp = place
    following = next(taken, None)
    while (item := following) is not None:
        following = next(taken, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _relay(config: pytest.Config, workers: dict[Connection, Any]) -> None:
    """Tell pytest what workers tell, until all have ended; a test in which one ends has failed."""
    running: dict[Connection, dict[str, Any]] = {}
    hook = config.hook
    while workers:
        ready = wait(list(workers), _LOOK_S)
        quiet = [] if ready else [end for end, worker in workers.items() if not worker.is_alive()]
        ended = [end for end in quiet if not end.poll()]
        for end in ready:
            try:
                what, told = end.recv()
            except EOFError:
                ended.append(end)
                continue
            if what == "logstart":
                running[end] = told
            elif what == "logfinish":
                del running[end]
            else:
                told = {"report": hook.pytest_report_from_serializable(config=config, data=told)}
            getattr(hook, f"pytest_runtest_{what}")(**told)
        for end in ended:
            worker = workers.pop(end)
            worker.join()
            if end in running or worker.exitcode:
                test = running.get(end, {"nodeid": "a worker", "location": ("", None, "")})
                test |= {"keywords": {}, "outcome": "failed", "when": "call"}
                why = f"its worker ended with exit code {worker.exitcode}"
                hook.pytest_runtest_logreport(report=pytest.TestReport(**test, longrepr=why))
