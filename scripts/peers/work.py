"""The work that a recipe describes, for engines other than ours, and the rows that they print.

Reads recipes without specdec, because each engine pins libraries of its own and lives in an
environment where specdec is not installed.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
COLUMNS = "engine batch k rounds tokens_a_round ms_a_round tokens_per_s first_token_ms".split()


@dataclass(frozen=True)
class Work:
    """Models and settings of one measurement. draft: None without speculation.

    rates: chance that the proposal at each position is accepted; empty where the weights decide.
    """

    target: str
    draft: str | None
    method: str
    k: int
    rates: list[float]
    dtype: str
    is_dummy: bool
    new_tokens: int
    ignore_eos: bool

    @property
    def tokens_a_round(self) -> float:
        """Mean tokens of a round at these rates, the target's own included."""
        return 1 + sum(self.rates[: self.k])


@dataclass(frozen=True)
class Decoded:
    """An engine's answer to a batch. rounds, accepted: of all its prompts together; 0 without
    speculation."""

    seconds: float
    token_ids: list[list[int]]
    rounds: int
    accepted: int


# Decodes prompts together, at most this many new tokens each.
Decode = Callable[[list[list[int]], int], Decoded]
# Starts an engine for batches of at most so many prompts and texts of at most so many tokens.
Start = Callable[[Work, int, int], Decode]


@dataclass(frozen=True)
class Row:
    """One repeat. Times in ms; tokens_per_s without the first pass. rounds: of all prompts."""

    engine: str
    batch: int
    k: int
    rounds: int
    tokens_a_round: float
    ms_a_round: float
    tokens_per_s: float
    first_token_ms: float


def main(engine: str, start: Start) -> None:
    args = arguments(engine).parse_args()
    what = read(args.recipe, args.k)
    if args.token_ids is None:
        rows = timed(engine, what, start, args)
        show(rows)
        found: Any = [[asdict(r) for r in repeats] for repeats in rows]
    else:
        found = counts(what, start, token_ids(args.token_ids))
        rounds, accepted = (sum(f[name] for f in found) for name in ("rounds", "accepted"))
        print(f"{len(found)} prompts, {1 + accepted / max(1, rounds):.3f} tokens a round")
    if args.json is not None:
        args.json.write_text(json.dumps(found))


def timed(engine: str, what: Work, start: Start, args: argparse.Namespace) -> list[list[Row]]:
    """Rows by batch size and repeat, over made-up prompts."""
    longest = args.prompt_tokens + what.new_tokens + 16
    decode = start(what, max(args.batch_size), longest)
    rows = []
    for batch in args.batch_size:
        ids = prompts(batch, args.prompt_tokens)
        decode(ids, 32)
        repeats = []
        for _ in range(args.repeats):
            first = decode(ids, 1).seconds
            repeats.append(row(engine, what.k, decode(ids, what.new_tokens), first))
        rows.append(repeats)
    return rows


def counts(what: Work, start: Start, asked: list[list[int]]) -> list[dict[str, Any]]:
    """Text, rounds and accepted tokens of each prompt, decoded alone."""
    decode = start(what, 1, max(map(len, asked)) + what.new_tokens + 16)
    found = []
    for prompt in asked:
        got = decode([prompt], what.new_tokens)
        found.append(
            {"token_ids": got.token_ids[0], "rounds": got.rounds, "accepted": got.accepted}
        )
    return found


def arguments(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Times a recipe's models in {engine}.")
    parser.add_argument("recipe", help="recipe file, or name of a bundled recipe")
    parser.add_argument("--k", type=int, help="proposal length; 0 is plain decoding")
    parser.add_argument("--batch-size", type=numbers, default=[1], metavar="LIST")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--token-ids",
        type=Path,
        metavar="FILE",
        help='decode these prompts, JSON lines of {"token_ids": [...]}, one at a time, and count',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows or counts here")
    return parser


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def read(name: str, k: int | None) -> Work:
    """The work of a recipe at proposal length k, None: the recipe's."""
    path = Path(name) if Path(name).is_file() else RECIPES / f"{name}.yaml"
    keys = yaml.safe_load(path.read_text())
    speculation, sampling = keys.get("speculation", {}), keys.get("sampling", {})
    k = speculation.get("num_speculative_tokens", 4) if k is None else k
    draft = keys.get("draft") if k else None
    return Work(
        target=_model(keys["target"], path),
        draft=_model(draft, path) if draft else None,
        method=speculation.get("method", "draft_model"),
        k=k,
        rates=list(speculation.get("synthetic_acceptance_rates") or [])[:k],
        dtype=keys["target"].get("dtype", "auto"),
        is_dummy=keys["target"].get("load_format") == "dummy",
        new_tokens=sampling.get("max_new_tokens", 128),
        ignore_eos=bool(sampling.get("ignore_eos", False)),
    )


def prompts(batch: int, tokens: int) -> list[list[int]]:
    """Made-up ids: every prompt differs, none repeats itself within 100,000 ids."""
    return [[(7 * i + j) % 100_000 + 10 for j in range(tokens)] for i in range(batch)]


def token_ids(path: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines() if line]


def row(engine: str, k: int, got: Decoded, first: float) -> Row:
    """A repeat. first: seconds until each prompt had its first token, measured by itself."""
    batch = len(got.token_ids)
    after = sum(map(len, got.token_ids)) - batch
    rounds = got.rounds or after
    return Row(
        engine=engine,
        batch=batch,
        k=k,
        rounds=rounds,
        tokens_a_round=after / rounds,
        ms_a_round=1e3 * (got.seconds - first) * batch / rounds,
        tokens_per_s=after / (got.seconds - first),
        first_token_ms=1e3 * first,
    )


def median(rows: list[Row]) -> Row:
    """The repeat in the middle by ms a round."""
    return sorted(rows, key=lambda r: r.ms_a_round)[(len(rows) - 1) // 2]


def show(rows: list[list[Row]]) -> None:
    """Prints a Markdown row for each setting, with the range of its repeats."""
    print("| " + " | ".join(c.replace("_", " ") for c in COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for repeats in rows:
        told: dict[str, Any] = asdict(median(repeats))
        times = [r.ms_a_round for r in repeats]
        told["ms_a_round"] = f"{statistics.median(times):.2f} ({min(times):.2f} – {max(times):.2f})"
        for name in ("tokens_a_round", "tokens_per_s", "first_token_ms"):
            told[name] = f"{told[name]:.{2 if name == 'tokens_a_round' else 1}f}"
        print("| " + " | ".join(str(told[c]) for c in COLUMNS) + " |")


def _model(section: dict[str, Any], recipe: Path) -> str:
    beside = recipe.parent / section["model"]
    return str(beside) if beside.is_dir() else str(section["model"])
