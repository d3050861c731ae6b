"""Times the start of `specdec generate` by stage, from the process's start to its first token.

Each repeat is a fresh process that logs its stages (-v). A stage begins when its line arrives;
stages of one name are added up. A first process, which is not counted, compiles kernels and fills
the page cache. Prints a Markdown row per stage: the median and the range of its seconds. With
--profile it also writes the times of one more process: imports by package, and functions by their
own time and by the time with all their calls.

    python scripts/bench/start.py bench-8b-1b-dummy --repeats 5
    python scripts/bench/start.py smollm2-offline --arguments="-k 0 --chat"
"""

import argparse
import io
import json
import pstats
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from recipe_arguments import recipe_arguments

from specdec_cli.stages import FIRST_TOKEN

_FIRST = "starting Python"
_END = "the process's end"
_STAGE = re.compile(r"debug: [0-9.]+ s: (.+)")
_IMPORT = re.compile(r"import time: +([0-9]+) \| +[0-9]+ \| *([A-Za-z0-9_.]+)")
_PROFILED = (
    "import cProfile, sys; from specdec_cli.app import main; p = cProfile.Profile(); "
    "code = p.runcall(main, sys.argv[2:]); p.dump_stats(sys.argv[1]); sys.exit(code)"
)

Times = dict[str, float]


def arguments() -> argparse.Namespace:
    parser = recipe_arguments(__doc__.splitlines()[0], repeats=5)
    parser.add_argument("--prompt", default="Write a short story about a lighthouse keeper.")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument(
        "--arguments", type=shlex.split, default=[], help="further arguments of `specdec generate`"
    )
    return parser.parse_args()


def command_line(args: argparse.Namespace) -> list[str]:
    sets = [part for pair in args.set for part in ("--set", pair)]
    count = str(args.max_new_tokens)
    asked = [args.recipe, "--prompt", args.prompt, "--max-new-tokens", count, "-v"]
    return ["generate", *asked, *sets, *args.arguments]


def timed(command: list[str]) -> Times:
    """The seconds of each stage of a process, in order. Ends this process if that one fails."""
    lines = list[str]()
    with subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        found = stages_of(process.stderr, lines)
    if process.returncode:
        sys.exit("".join(lines))
    return found


def stages_of(log: Iterable[str], lines: list[str]) -> Times:
    """The seconds of each stage of a log whose lines come as they are written; they are added to
    `lines`. Ends this process if the log names no first token."""
    found = Times()
    stage, begun = _FIRST, time.perf_counter()
    for line in log:
        lines.append(line)
        if (told := _STAGE.match(line)) is not None:
            now = time.perf_counter()
            found[stage] = found.get(stage, 0.0) + now - begun
            stage, begun = told[1], now
    found[stage] = found.get(stage, 0.0) + time.perf_counter() - begun
    if FIRST_TOKEN not in found:
        sys.exit("".join([*lines, f"error: the log names no stage {FIRST_TOKEN!r}"]))
    return found


def to_first_token(times: Times) -> float:
    return sum(seconds for stage, seconds in times.items() if stage != FIRST_TOKEN)


def imports(command: list[str]) -> str:
    """Seconds of imports by package."""
    told = _stderr_of(["-X", "importtime", "-m", "specdec_cli", *command])
    by_package = Times()
    for microseconds, module in _IMPORT.findall(told):
        package = ".".join(module.split(".")[:2])
        for name in {package, module.split(".")[0]}:
            by_package[name] = by_package.get(name, 0.0) + int(microseconds) / 1e6
    rows = sorted(by_package.items(), key=lambda pair: -pair[1])[:60]
    return "".join(f"{seconds:8.3f} s  {package}\n" for package, seconds in rows)


def profile(command: list[str]) -> str:
    """Tables of one process by function."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile")
        _stderr_of(["-c", _PROFILED, str(file), *command])
        table = io.StringIO()
        stats = pstats.Stats(str(file), stream=table)
    stats.sort_stats("cumulative").print_stats(150).sort_stats("tottime").print_stats(60)
    return table.getvalue()


def _stderr_of(arguments: list[str]) -> str:
    """The stderr of a Python process. Ends this process if that one fails."""
    ended = subprocess.run(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(ended.stderr)
    return ended.stderr


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} | {min(values):.2f} – {max(values):.2f}"


def main() -> None:
    args = arguments()
    command = command_line(args)
    first = timed(command)
    print(f"first process: {to_first_token(first):.1f} s to the first token", flush=True)
    found = [timed(command) for _ in range(args.repeats)]
    print("| stage | seconds | range |\n|---|---|---|")
    for stage in dict.fromkeys(stage for times in found for stage in times):
        if stage != FIRST_TOKEN:
            print(f"| {stage} | {spread([times.get(stage, 0.0) for times in found])} |")
    print(f"| **to the first token** | {spread([to_first_token(times) for times in found])} |")
    rest = [times.get(FIRST_TOKEN, 0.0) for times in found]
    print(f"| from there to {_END} | {spread(rest)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"first": first, "repeats": found}, indent=1))
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
        (args.profile / "start-imports.txt").write_text(imports(command))
        (args.profile / "start-functions.txt").write_text(profile(command))


if __name__ == "__main__":
    main()
