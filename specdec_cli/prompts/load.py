"""Loads prompts from options, files, pipes and datasets, and reports bad rows.

Tokenizers and chat templates are applied elsewhere.
"""

import contextlib
import io
import json
import logging
import os
import re
import select
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TextIO

from specdec_cli import demo
from specdec_cli.errors import Notice, UsageError
from specdec_cli.prompts.choose import check_size, sampled, uneven
from specdec_cli.prompts.dataset import sliced
from specdec_cli.prompts.files import EXTENSIONS, GZIP_MAGIC, ONE_OBJECT, file_source
from specdec_cli.prompts.hub import hub_source
from specdec_cli.prompts.lines import BOM, Rows, json_rows, jsonl_rows, text_rows
from specdec_cli.prompts.records import (
    MEDIA_KEYS,
    PROMPT_KEYS,
    category_of,
    checked,
    columns_in_words,
    prompt_of,
)
from specdec_cli.prompts.turns import NoSuchTurn, subtask
from specdec_cli.prompts.types import BadRow, Prompt, PromptSet, Source
from specdec_cli.recipe import DataSection
from specdec_cli.text import counted, in_lines, of_many, one_line

_MAX_AHEAD = 20_000  # how many rows after the chosen ones to read for their categories
_PATIENCE_S = 1.0  # seconds to wait for a pipe's first bytes
_SKIPPING = "--skip-bad leaves such lines out"
_log = logging.getLogger("specdec")


def load_prompts(
    data: DataSection, *, skip_bad: bool = False, is_file: bool = False, seed: int = 0
) -> PromptSet:
    """Load the prompts that a recipe's `data` section names, with warnings about their choice.

    `data.path` is a file (`EXTENSIONS`), `demo:prompts`, or the folder or id of a Hugging Face
    dataset. Without `data.sample`, the first `data.limit` prompts are taken, and later rows are
    read only for warnings. With it, the sample is drawn from all rows.

    skip_bad: if True, leave out bad rows and log a warning with their number. If False, raise a
        `UsageError` that names the file and the lines of the bad rows.
    is_file: whether `data.path` must be a file.
    seed: the seed with which a sample is drawn.

    Raises `UsageError` for an unknown split, subset or column, and `SetupError` for a dataset that
    is not available.
    """
    check_size(data.sample, data.limit)
    path = data.path or ""
    if path.startswith(demo.PREFIX) and not is_file:
        path = str(demo.demo_path(path))
        if not Path(path).is_file():
            raise UsageError(f"no bundled prompts {data.path}", "bundled are demo:prompts")
    is_folder, opened = os.path.isdir(path), ExitStack()
    if not is_file and (is_folder or not _is_file_name(path)):
        source = hub_source(path, data.subset, data.split, data.column, is_folder=is_folder)
    elif data.subset is not None:
        raise UsageError(f"{path}: a file has no subsets", "leave data.subset out")
    else:
        source = opened.enter_context(file_source(path, data.column))
        source = replace(source, rows=sliced(iter(source.rows), data.split, path))
    with opened:
        rows = iter(source.rows)
        limit = None if data.sample else data.limit
        found = _prompts_of(
            source, rows, data.column, limit, data.split, skip_bad=skip_bad, turn=data.turn
        )
        named = subtask if data.categories == "spec_bench" else lambda category: category
        found = [replace(prompt, category=named(prompt.category)) for prompt in found]
        if data.sample is not None:
            return PromptSet(_numbered(sampled(found, data.limit, data.sample, seed)))
        notices = _unevenness(found, rows, named) if len(found) == limit else []
    return PromptSet(_numbered(found), notices=notices)


def _unevenness(
    found: list[Prompt], rows: Rows, named: Callable[[str | None], str | None]
) -> list[Notice]:
    """Compare the categories of the chosen prompts with those of the rows after them. Returns
    warnings."""
    if all(prompt.category is None for prompt in found):
        return []
    further: Counter[str | None] = Counter()
    is_whole = False
    with contextlib.suppress(UsageError):  # ignore the rest of a damaged file
        for _, row in islice(rows, _MAX_AHEAD):
            with contextlib.suppress(BadRow):
                further[named(category_of(row))] += 1
        is_whole = next(rows, None) is None
    return uneven(found, further, is_whole=is_whole)


def read_prompts(
    prompts: Sequence[str],
    prompt_file: str | None,
    stdin: TextIO | BinaryIO | None,
    *,
    limit: int | None = None,
    sample: str | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> list[Prompt]:
    """Read the prompts given as options, then the prompts of the file, at most `limit` in all.

    `stdin` is read if there are neither options nor a file, or if the file is `-`. It is not read
    if it is a terminal. Returns an empty list if there is no prompt.

    limit: the number of prompts to take; None takes all.
    sample: None takes the first prompts, `random` draws them at random with `seed`, and
        `stratified` draws as evenly as possible from all categories.
    skip_bad: if True, leave out bad lines and log a warning with their number. If False, raise a
        `UsageError` with the file, the lines and the reasons.
    """
    check_size(sample, limit)
    if sample is not None:
        found = read_prompts(prompts, prompt_file, stdin, skip_bad=skip_bad)
        return _numbered(sampled(found, limit, sample, seed)) if found else []
    found = [_from_option(text) for text in prompts][:limit]
    if limit is not None:
        limit -= len(found)
        if not limit:
            return _numbered(found)
    if prompt_file is not None and prompt_file != "-":
        with file_source(prompt_file, None) as source:
            found += _prompts_of(source, iter(source.rows), None, limit, skip_bad=skip_bad)
    elif prompt_file == "-" or not prompts:
        piped = _read_stdin(stdin, limit, skip_bad=skip_bad)
        if prompt_file == "-" and not piped:
            raise UsageError("standard input: no prompts in it", "pipe prompts in, or use --prompt")
        found += piped
    return _numbered(found)


def _numbered(prompts: list[Prompt]) -> list[Prompt]:
    return [replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def _from_option(text: str) -> Prompt:
    try:
        return Prompt(0, checked(text), where="--prompt")
    except BadRow as bad:
        raise UsageError(f"--prompt: {bad}") from None


def _read_stdin(
    stream: TextIO | BinaryIO | None, limit: int | None, *, skip_bad: bool
) -> list[Prompt]:
    """Read prompts from standard input. It is read like a .jsonl file if it starts with an object,
    like a .json file if it is a list of objects or texts, and otherwise like a .txt file."""
    if stream is None or stream.closed or stream.isatty():
        return []
    _say_if_it_waits(stream)
    try:
        raw = getattr(stream, "buffer", stream).read()
    except OSError:  # the job runs in the background, or a test has replaced stdin
        return []
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogateescape")
    if not raw:  # stdin is empty, as with </dev/null in a batch job
        return []
    name = "standard input"
    if raw.startswith(GZIP_MAGIC):
        raise UsageError(f"{name}: is compressed with gzip", "unpack it first: gunzip -c")
    file = io.BytesIO(raw)
    if raw.removeprefix(BOM).lstrip().startswith(b"{"):
        source = Source(name, jsonl_rows(file, name), hint=ONE_OBJECT)
    elif _is_json_list(raw):
        source = Source(name, json_rows(file, name))
    else:
        source = Source(name, text_rows(file, name))
    return _prompts_of(source, iter(source.rows), None, limit, skip_bad=skip_bad)


def _is_json_list(raw: bytes) -> bool:
    """Return True if the bytes begin a list of objects, or are a list of texts. A text such as
    `[INST] ...` is not a list."""
    if re.match(rb"\s*\[\s*\{", raw := raw.removeprefix(BOM)):
        return True
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and bool(found) and isinstance(found[0], str)


def _say_if_it_waits(stream: TextIO | BinaryIO) -> None:
    """Warn if standard input has no data yet. It may have been connected by accident, and then
    reading it would wait forever."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        if not select.select([stream.fileno()], [], [], _PATIENCE_S)[0]:
            _log.warning(
                "waiting for prompts on standard input (pass --prompt, --prompt-file or </dev/null "
                "if it has none)"
            )


def _is_file_name(path: str) -> bool:
    """Return True if a name refers to a file, even a missing one; False if it is a dataset's id."""
    try:
        if Path(path).exists():
            return True
    except (OSError, ValueError):
        return True
    # An id is NAME or OWNER/NAME.
    is_path = path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path or ":" in path
    return is_path or Path(path).suffix.lower() in EXTENSIONS


def _prompts_of(
    source: Source,
    rows: Rows,
    column: str | None,
    limit: int | None,
    split: str | None = None,
    *,
    skip_bad: bool,
    turn: int = 1,
) -> list[Prompt]:
    """Read the first `limit` prompts of a source; all of them if `limit` is None.

    rows: an iterator over the source's rows. Afterwards it continues with the first unread row.
    column, turn: as for `prompt_of`. Conversations with fewer turns are left out.
    split: the name of the split that the rows are from, for messages; None if it was not given.
    skip_bad: if True, leave out bad rows and log a warning with their number. If False, raise a
        `UsageError`.
    """
    name = source.name
    _check_columns(source, column)
    found: list[Prompt] = []
    bad: list[str] = []
    short = 0
    unread = tuple(key for key in MEDIA_KEYS if key in (source.columns or ()))
    while (limit is None or len(found) < limit) and (item := next(rows, None)) is not None:
        where, row = item
        try:
            if isinstance(row, BadRow):
                raise row
            one = prompt_of(row, column, turn)
            more = (key for key in unread if key not in row) if isinstance(row, Mapping) else ()
            found.append(replace(one, where=where, unused=(*more, *one.unused)))
        except NoSuchTurn:
            short += 1
        except BadRow as reason:
            bad.append(f"{where}: {reason}")
    if bad and not skip_bad:
        remedies = source.hint, _SKIPPING if found else None
        raise UsageError(in_lines(bad, "line", name), "; ".join(filter(None, remedies)) or None)
    if not found and not bad and split is not None:
        raise UsageError(f"{name}: no prompts in {one_line(split)}", "name another data.split")
    if not found and short and not bad:
        raise UsageError(f"{name}: no conversation has {turn} turns", "set a smaller data.turn")
    if not found:
        all_bad = f": all {len(bad)} lines are bad; {bad[0]}" if bad else ""
        start = f"{name}:1" if source.columns is None and source.is_file else name
        hint = source.hint if bad else "put a prompt into it, or name another file"
        raise UsageError(f"{start}: no prompts in it{all_bad}", hint)
    if bad:
        _log.warning("skipped %s", of_many(bad, "line"))
    if short:
        lacks = "no turn of the user" if turn == 1 else f"fewer than {turn} turns of the user"
        _log.warning("%s: left out %s with %s", name, counted(short, "conversation"), lacks)
    return found


def _check_columns(source: Source, column: str | None) -> None:
    """Raise `UsageError` once for a missing column, since all rows of a table have the same
    columns."""
    if source.columns is None:
        return
    listed = columns_in_words(source.columns)
    if column is not None and column not in source.columns:
        raise UsageError(f"{source.name}: no column {one_line(column)!r}: {listed}")
    has_prompts = source.has_bodies or any(key in source.columns for key in PROMPT_KEYS)
    if column is None and not has_prompts:
        raise UsageError(
            f"{source.name}: none of the columns {', '.join(PROMPT_KEYS)}: {listed}",
            "name the one that holds the prompts with --dataset FILE::COLUMN (data.column)",
        )
