"""The work that a recipe describes, for engines other than ours, and the rows that they print.

Reads recipes without specdec. Each engine pins its own libraries, in an environment without
specdec.
"""

import argparse
import contextlib
import fcntl
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

FEWEST = 8  # least real prompts of a measured time
_ROOT = Path(__file__).resolve().parents[2]
RECIPES, DEMO = _ROOT / "recipes", _ROOT / "specdec_cli" / "demo"


@dataclass(frozen=True)
class Work:
    """Models and settings of one measurement. draft: None without speculation.

    rates: the chance that the proposal at each position is accepted; empty if the weights decide.
    eos_ids: tokens that end a text, unless ignore_eos; empty if the target's config has none.
    is_counted: whether rounds are counted by prompt instead of timed. has_neighbours: whether other
    engines run on the same GPU, so that this engine takes memory for this work only.
    target_weights, draft_weights: "fp8" to quantise plain weights while loading; other values leave
    the file's form. tensor_parallel_size: the target's; engines split a draft as they see fit.
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
    eos_ids: tuple[int, ...] = ()
    is_counted: bool = False
    has_neighbours: bool = False
    target_weights: str | None = None
    draft_weights: str | None = None
    tensor_parallel_size: int = 1

    @property
    def tokens_a_round(self) -> float:
        """Mean tokens of a round at these rates, the target's own included."""
        return 1 + sum(self.rates[: self.k])


@dataclass(frozen=True)
class Decoded:
    """An engine's answer to a batch. rounds: of all its prompts together; 0 without speculation.

    apart: the number of tokens of each text that no round wrote. In most engines it is the first
    token, which the pass over the prompt decides.
    """

    seconds: float
    token_ids: list[list[int]]
    rounds: int
    apart: int = 1


@dataclass(frozen=True)
class Counted:
    """The rounds of one prompt. token_ids: those of the text, with the token that ended it.

    The first token comes from the pass over the prompt, so `rounds` wrote all but one. written: the
    tokens that each round wrote; the last round is cut at the text's end. histogram: the rounds
    that accepted 0, 1, .. proposals; the last round counts as if the text went on. Engines give one
    or the other.
    """

    token_ids: list[int]
    rounds: int
    written: list[int] | None = None
    histogram: list[int] | None = None


@dataclass(frozen=True)
class Started:
    """A running engine. Both functions decode prompts together, with a limit on the new tokens of
    each. stop: makes room for the engine of the next k, if that is another one.
    """

    decode: Callable[[list[list[int]], int], Decoded]
    count: Callable[[list[list[int]], int], list[Counted]]
    stop: Callable[[], None] = lambda: None


# Starts an engine, given the most prompts of a batch and the most tokens of a text.
Start = Callable[[Work, int, int], Started]


@dataclass(frozen=True)
class Row:
    """One repeat. Times are in ms; tokens_per_s excludes the first pass. rounds: those of all
    prompts. prompt_tokens: the mean number.
    """

    engine: str
    batch: int
    prompt_tokens: int
    k: int
    rounds: int
    tokens_a_round: float
    ms_a_round: float
    tokens_per_s: float
    first_token_ms: float


COLUMNS = [field.name for field in fields(Row)]


def main(engine: str, start: Start) -> None:
    args = arguments(engine).parse_args()
    asked = token_ids(args.token_ids) if args.token_ids is not None else None
    found: list[dict[str, Any]] = []
    # The largest k comes first: an engine that takes k with each batch is built for the first.
    for k in sorted(args.k, reverse=True) if args.k is not None else [None]:
        what = replace(read(args.recipe, k), **chosen(args))
        about = {"engine": engine, "recipe": Path(args.recipe).stem, "k": what.k}
        about |= {"dtype": what.dtype, "new_tokens": what.new_tokens}
        if args.count:
            if asked is None:
                raise SystemExit("--count needs --token-ids")
            prompts = counts(what, start, asked, max(args.batch_size))
            found.append(about | {"prompts": [asdict(prompt) for prompt in prompts]})
            rounds = sum(prompt.rounds for prompt in prompts)
            tokens = sum(len(prompt.token_ids) - 1 for prompt in prompts)
            mean = tokens / max(1, rounds)
            print(f"{engine} k={what.k}: {len(prompts)} prompts, {mean:.3f} tokens a round")
        else:
            rows = timed(engine, what, start, args, asked)
            show(rows)
            found.append(about | {"rows": [[asdict(r) for r in repeats] for repeats in rows]})
        if args.json is not None:
            args.json.write_text(json.dumps(found))


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives instead of the recipe."""
    sets: dict[str, Any] = {"is_counted": args.count, "has_neighbours": args.neighbours}
    if args.dtype is not None:
        sets["dtype"] = args.dtype
    if args.new_tokens is not None:
        sets["new_tokens"] = args.new_tokens
    if args.ignore_eos:
        sets["ignore_eos"] = True
    return sets


def timed(
    engine: str, what: Work, start: Start, args: argparse.Namespace, asked: list[list[int]] | None
) -> list[list[Row]]:
    """Rows by batch size, length of made-up prompts and repeat, over the prompts `asked` or over
    one batch of made-up ones."""
    most = max(map(len, asked)) if asked else max(args.prompt_tokens)
    started = start(what, max(args.batch_size), most + what.new_tokens + 16)
    decode = started.decode
    print("started", flush=True)
    settings = [
        (batch, batches(asked, batch) if asked else [prompts(batch, length)])
        for batch in args.batch_size
        for length in ([0] if asked else args.prompt_tokens)
    ]
    rows = []
    with turn(args.lock):
        for batch, parts in settings:
            decode(parts[0], 32)
            repeats = []
            for _ in range(args.repeats):
                first = sum(decode(part, 1).seconds for part in parts)
                got = joined([decode(part, what.new_tokens) for part in parts])
                repeats.append(row(engine, what.k, batch, parts, got, first))
            rows.append(repeats)
    started.stop()
    return rows


def batches(asked: list[list[int]], batch: int) -> list[list[list[int]]]:
    """Batches of real prompts, drawn from all. Texts differ in acceptance, so there are several
    small batches, with at least `FEWEST` prompts together."""
    drawn = random.Random(0).sample(asked, len(asked))
    count = max(1, -(-min(FEWEST, len(drawn)) // batch))
    return [[drawn[(i * batch + j) % len(drawn)] for j in range(batch)] for i in range(count)]


def joined(parts: list[Decoded]) -> Decoded:
    """The answer to several batches, one after the other."""
    return Decoded(
        seconds=sum(part.seconds for part in parts),
        token_ids=[text for part in parts for text in part.token_ids],
        rounds=sum(part.rounds for part in parts),
        apart=parts[0].apart,
    )


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Holds a lock during the block, if there is one: engines that started together are timed one
    by one."""
    if lock is None:
        yield
        return
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def counts(what: Work, start: Start, asked: list[list[int]], batch: int) -> list[Counted]:
    """The text and the rounds of each prompt, `batch` prompts at a time."""
    started = start(what, batch, max(map(len, asked)) + what.new_tokens + 16)
    parts = [asked[i : i + batch] for i in range(0, len(asked), batch)]
    found = [counted for part in parts for counted in started.count(part, what.new_tokens)]
    started.stop()
    return found


def behind_first(
    asked: list[list[int]],
    first: list[int],
    what: Work,
    count: Callable[[list[list[int]]], list[Counted]],
) -> list[Counted]:
    """The `Counted` of an engine whose first round also writes the first token. It gets that token
    at the end of the prompt. count: takes prompts, and counts rounds over all tokens that it
    writes."""
    goes_on = [what.ignore_eos or token not in what.eos_ids for token in first]
    goes_on = [yes and what.new_tokens > 1 for yes in goes_on]
    longer = [[*p, t] for p, t, yes in zip(asked, first, goes_on, strict=True) if yes]
    rest = iter(count(longer) if longer else [])
    found = [next(rest) if yes else Counted([], 0, []) for yes in goes_on]
    return [replace(c, token_ids=[t, *c.token_ids]) for t, c in zip(first, found, strict=True)]


def arguments(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Times a recipe's models in {engine}.")
    add = parser.add_argument
    add("recipe", help="recipe file, or name of a bundled recipe")
    add("--k", type=numbers, metavar="LIST", help="proposal lengths; 0 is plain decoding")
    add("--batch-size", type=numbers, default=[1], metavar="LIST")
    add("--prompt-tokens", type=numbers, default=[128], metavar="LIST", help="of made-up prompts")
    add("--new-tokens", type=int, metavar="N", help="default: the recipe's")
    add("--dtype", choices=["float32", "bfloat16"], help="default: the recipe's")
    add("--ignore-eos", action="store_true", help="texts end at --new-tokens only")
    add("--repeats", type=int, default=3, metavar="N")
    add(
        "--token-ids",
        type=Path,
        metavar="FILE",
        help='prompts in place of made-up ones, JSON lines of {"token_ids": [...]}',
    )
    add("--count", action="store_true", help="rounds of each prompt of --token-ids, not times")
    add("--neighbours", action="store_true", help="leave memory for other engines on this GPU")
    add("--lock", type=Path, metavar="FILE", help="time while holding this file's lock")
    add("--json", type=Path, metavar="FILE", help="write rows or counts here")
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
        eos_ids=eos_ids(Path(_model(keys["target"], path))),
        target_weights=keys["target"].get("weights"),
        draft_weights=draft.get("weights") if draft else None,
        tensor_parallel_size=keys["target"].get("tensor_parallel_size", 1),
    )


def eos_ids(target: Path) -> tuple[int, ...]:
    """The tokens that end a text, from the files of a folder; none for a hub id."""
    for name in ("generation_config.json", "config.json"):
        if (target / name).is_file():
            found = json.loads((target / name).read_text()).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    return ()


def prompts(batch: int, tokens: int) -> list[list[int]]:
    """Made-up ids: every prompt differs, none repeats itself within 100,000 ids."""
    return [[(7 * i + j) % 100_000 + 10 for j in range(tokens)] for i in range(batch)]


def token_ids(path: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines() if line]


def row(
    engine: str, k: int, batch: int, parts: list[list[list[int]]], got: Decoded, first: float
) -> Row:
    """A repeat over batches `parts`. first: the separately measured seconds until each prompt had
    its first token."""
    lengths = [len(prompt) for part in parts for prompt in part]
    texts, tokens = len(got.token_ids), sum(map(len, got.token_ids))
    rounds = got.rounds or tokens - texts
    by_rounds = tokens - texts * (got.apart if got.rounds else 1)
    # The round that writes a text's first token lies inside `first`, so it is not among the timed.
    is_first_round = got.rounds > 0 and got.apart == 0
    return Row(
        engine=engine,
        batch=batch,
        prompt_tokens=round(statistics.mean(lengths)),
        k=k,
        rounds=rounds,
        tokens_a_round=by_rounds / rounds,
        ms_a_round=1e3 * (got.seconds - first) * batch / (rounds - texts * is_first_round),
        tokens_per_s=(tokens - texts) / (got.seconds - first),
        first_token_ms=1e3 * first * batch / texts,
    )


def median(rows: list[Row]) -> Row:
    """The repeat in the middle by ms a round; of two in the middle, the faster."""
    return sorted(rows, key=lambda r: r.ms_a_round)[(len(rows) - 1) // 2]


def show(rows: list[list[Row]]) -> None:
    """Prints a Markdown row for each setting, with the range of its repeats."""
    print("| " + " | ".join(c.replace("_", " ") for c in COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for repeats in rows:
        told: dict[str, Any] = asdict(median(repeats))
        for name, times in (
            ("ms_a_round", [r.ms_a_round for r in repeats]),
            ("first_token_ms", [r.first_token_ms for r in repeats]),
        ):
            told[name] = f"{statistics.median_low(times):.2f} ({min(times):.2f} – {max(times):.2f})"
        for name in ("tokens_a_round", "tokens_per_s"):
            told[name] = f"{told[name]:.{2 if name == 'tokens_a_round' else 1}f}"
        print("| " + " | ".join(str(told[c]) for c in COLUMNS) + " |")


def _model(section: dict[str, Any], recipe: Path) -> str:
    """A model's folder, or its hub id."""
    name = str(section["model"])
    place = DEMO / name.removeprefix("demo:") if name.startswith("demo:") else recipe.parent / name
    return str(place) if place.is_dir() else name
