"""`specdec sweep-k`: finds the fastest proposal length on a dataset, and how much it gains.

Parses the command line and plans the sweep; `sweep_run` runs it and shows the results.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import specdec_cli.experiment.sweep
from specdec_cli.commands import options
from specdec_cli.commands.options import Asked, Prompts, option, shared
from specdec_cli.commands.resuming import (
    folder_of_servers,
    names_of_drafts,
    resumed,
    saying_what_is_kept,
    with_draft,
)
from specdec_cli.commands.starting import importing, joined
from specdec_cli.commands.status import waiting, warn
from specdec_cli.commands.sweep_parsing import (
    is_lone_task,
    listed_ks,
    parse_list,
    parse_slo,
    refuse_beside,
    shard_of,
)
from specdec_cli.commands.unused import warn_of_pairs, warn_of_unused
from specdec_cli.demo import PREFIX
from specdec_cli.errors import TooManyProposals, UsageError
from specdec_cli.text import say

_KS = "Proposal lengths, such as 0-8 (the default) or 1,2,4; 0 is added. Servers default to all."
Ks = Annotated[
    str | None, option("-k --k --num-speculative-tokens", "LIST", _KS, show_default=False)
]
Drafts = Annotated[
    list[str] | None,
    option(
        "--draft", "MODEL", "Draft model, method without one, or METHOD=MODEL; may be repeated."
    ),
]
_PREDICT = "Measure k = 0 and the largest k, and predict the others."
PredictOnly = Annotated[bool, option("--predict-only", None, _PREDICT)]
_RATES = "Accept proposals at these rates by position, such as 0.8,0.6,0.5."
Rates = Annotated[str | None, option("--synthetic-acceptance-rates", "LIST", _RATES)]
_LENGTH = "Accept proposals so that rounds at the recipe's k average L tokens."
Length = Annotated[float | None, option("--synthetic-acceptance-length", "L", _LENGTH)]
_SHARD = "Take prompts I, I + N, I + 2N ... (I from 0). Default in a Slurm array: by task."
Shard = Annotated[str | None, option("--shard", "I/N", _SHARD)]
DryRun = Annotated[bool, option("--dry-run", None, "Show what would be measured; load no weights.")]
_BASELINE_SERVER = "Measure k = 0 on this server."
BaselineServer = Annotated[str | None, option("--baseline-server", "URL", _BASELINE_SERVER)]
_BASELINE = "Take k = 0 from this run folder, measured on the same prompts."
Baseline = Annotated[Path | None, option("--baseline", "DIR", _BASELINE, parser=options.folder)]

_SERVE = "Start a vllm or sglang server for each k and draft, and measure it."
Serve = Annotated[str | None, option("--serve", "ENGINE", _SERVE)]
_SERVE_ARGS = "Further arguments for the servers that --serve starts."
ServeArgs = Annotated[str | None, option("--serve-args", "WORDS", _SERVE_ARGS)]

_LOAD = "Requests that arrive"
_RATE = "Requests a second, such as 1,4,16,inf, each measured; inf is all at once."
RequestRate = Annotated[str | None, option("--request-rate", "LIST", _RATE, _LOAD)]
_ARRIVALS = "poisson (the default), constant, gamma:SHAPE or a file of send times."
Arrivals = Annotated[str | None, option("--arrivals", "KIND", _ARRIVALS, _LOAD, show_default=False)]
_CONCURRENCY = "Maximum concurrent requests. Default: the batch size, or no limit for servers."
Concurrency = Annotated[
    int | None,
    option(
        *("--max-concurrency", "N", _CONCURRENCY, _LOAD),
        **{"min": 1, "max": 2**16, "show_default": False},
    ),
]
_DURATION = "Repeat prompts until arrivals cover S seconds."
Duration = Annotated[float | None, option("--duration", "S", _DURATION, _LOAD)]
_SLO = "Latency objective for ttft, tpot or e2el, such as ttft:500ms; may be repeated."
Slo = Annotated[list[str] | None, option("--slo", "NAME:VALUE", _SLO, _LOAD)]

_ENGINES = ("vllm", "sglang")
_MINUTES = "Choose prompts, tokens and repeats that fit into about M minutes."
Minutes = Annotated[float | None, option("--minutes", "M", _MINUTES, min=0.1)]
_PAIRS = "Compare arms by category of prompt too."
Pairs = Annotated[bool, option("--pairs", None, _PAIRS)]
_DEFAULT_KS = "0-8"
_ALL = 1024  # more than the number of prompts in the bundled file


@shared("num_speculative_tokens")
def sweep_k(
    asked: Asked,
    source: Prompts,
    ks: Ks = None,
    predict_only: PredictOnly = False,
    synthetic_acceptance_rates: Rates = None,
    synthetic_acceptance_length: Length = None,
    resume: options.Resume = False,
    shard: Shard = None,
    dry_run: DryRun = False,
    check_lossless: options.CheckLossless = False,
    repeats: options.Repeats = None,
    minutes: Minutes = None,
    pairs: Pairs = False,
    strict: options.Strict = False,
    draft: Drafts = None,
    batch_size: options.BatchSizes = None,
    server: options.Servers = None,
    serve: Serve = None,
    serve_args: ServeArgs = None,
    baseline_server: BaselineServer = None,
    baseline: Baseline = None,
    request_rate: RequestRate = None,
    arrivals: Arrivals = None,
    max_concurrency: Concurrency = None,
    duration: Duration = None,
    slo: Slo = None,
) -> None:
    """Find the fastest proposal length, and the best draft, on a dataset, with error bars.

    Every prompt is decoded at every k and with every draft, and compared with k = 0 on the same
    prompts. Without a recipe the bundled demo pair runs. With --server, servers decode.
    """
    from specdec_cli.commands.reading import fewer_prompts, find_prompts, recipe_options

    if resume and minutes is not None:
        told = "--minutes chooses settings for a new run, and --resume keeps those of an old one"
        raise UsageError(told, "leave --minutes out")
    kept: dict[str, Any] = {}
    if resume:
        from specdec_cli.experiment.sweep.sweep_records import SweepSettings

        asked, kept = resumed(asked, SweepSettings)
    lengths = (
        kept["ks"]
        if kept and ks is None
        else sorted({0, *listed_ks(_DEFAULT_KS if ks is None else ks)})
    )
    output = asked.output
    if serve is not None and serve not in _ENGINES:
        raise UsageError(f"--serve: expected {' or '.join(_ENGINES)}, got {serve!r}")
    named, earlier = None, None if serve is not None else folder_of_servers(asked, kept)
    if server or baseline_server is not None or baseline is not None or earlier is not None:
        from specdec_cli.commands import servers

        asked_ks = None if ks is None else listed_ks(ks)
        named = servers.named(server, baseline_server, baseline, asked_ks, earlier)
        refuse_beside(
            "--server",
            serve=serve,
            predict_only=predict_only,
            check_lossless=check_lossless,
            minutes=minutes,
            synthetic_acceptance_rates=synthetic_acceptance_rates,
            synthetic_acceptance_length=synthetic_acceptance_length,
        )
        if draft is not None and len(draft) > 1:
            raise UsageError("--draft: a server has only one draft", "run a sweep for each draft")
    part = _part(shard, kept, asked)
    if part is not None and minutes is not None:
        raise UsageError(
            "--minutes and --shard exclude each other: each shard would choose its own size, and "
            "shards of different sizes cannot be merged",
            "choose --limit, --max-new-tokens and --repeats for all shards; in a Slurm array "
            "--shard 0/1 takes all prompts",
        )
    own, sets = recipe_options(source) | {"repeats": repeats, "serve": serve}, list[str]()
    own |= {
        "request_rate": parse_list(request_rate, "--request-rate"),
        "arrivals": arrivals,
        "max_concurrency": max_concurrency,
        "duration": duration,
        "slo": parse_slo(slo),
    }
    if kept:
        predict_only = predict_only or kept["predict_only"]
    rates = parse_list(synthetic_acceptance_rates, "--synthetic-acceptance-rates")
    if rates is not None and synthetic_acceptance_length is not None:
        raise UsageError(
            "--synthetic-acceptance-rates and --synthetic-acceptance-length exclude each other",
            "leave one of them out",
        )
    if rates is not None or synthetic_acceptance_length is not None:
        sets.append("speculation.acceptance=synthetic")
        # Either option replaces both the rates and the length in the recipe.
        own["synthetic_acceptance_rates"] = rates
        own["synthetic_acceptance_length"] = synthetic_acceptance_length
        if rates is not None:  # the recipe needs one rate per position, so take the largest k
            own["num_speculative_tokens"] = max(lengths)
        other = "length" if rates is not None else "rates"
        sets.append(f"speculation.synthetic_acceptance_{other}=null")
    recipes = [
        with_draft(asked, kept, name).resolve(own | {"draft": name if draft else None}, sets)
        for name in draft or names_of_drafts(asked, kept)
    ]
    load = recipes[0].load
    sizes = options.parse_counts(batch_size, "--batch-size")
    sizes = sizes or kept.get("batch_sizes", [recipes[0].run.batch_size])
    if load.request_rate is not None:
        is_native = recipes[0].engine.kind == "native" and named is None
        if load.max_concurrency is not None:
            refuse_beside("--max-concurrency", batch_size=batch_size)
        if is_native and sizes[1:]:
            raise UsageError(
                "--batch-size: one number is possible at a request rate (--request-rate)",
                "run a sweep for each batch size",
            )
        refuse_beside(
            "--request-rate",
            batch_size=None if is_native else batch_size,
            predict_only=predict_only,
            check_lossless=check_lossless,
            minutes=minutes,
            baseline=named.baseline if named is not None else None,
        )
        sizes = sizes if is_native else [0]
        sizes = sizes if load.max_concurrency is None else [load.max_concurrency]
    serves = recipes[0].engine.kind != "native" and named is None
    has_length = recipes[0].speculation.synthetic_acceptance_length is not None
    warn_of_unused(
        asked,
        recipes,
        has_draft=bool(draft),
        # --k names the lengths, but a given mean length is one at the recipe's k.
        unread=() if has_length else ("speculation.num_speculative_tokens",),
        asks=named is not None,
        starts=serves,
    )
    if pairs:
        warn_of_pairs(asked, len(recipes))
    if serve_args is not None and not serves:
        raise UsageError("--serve-args needs --serve")
    if serves:
        from specdec_cli.commands import servers

        refuse_beside(
            "--serve", predict_only=predict_only, check_lossless=check_lossless, minutes=minutes
        )
        recipes = [servers.with_args(recipe, serve_args) for recipe in recipes]
    if minutes is not None and source.limit is None and _is_limit_bundled(asked, recipes[0]):
        source = replace(source, limit=_ALL)  # bundled recipes use only a few of their prompts

    flags = {"skip_bad": source.skip_bad, "check_lossless": check_lossless}
    flags |= {"strict": strict, "pairs": pairs}
    with (
        saying_what_is_kept(asked, "sweep-k", "sample", is_told=not dry_run, **flags),
        joined(
            asked.place,
            recipes,
            lambda: find_prompts(source, recipes[0], asked),
            computes=named is None and not serves,
        ) as (world, found),
        ExitStack() as open_until_end,
    ):
        with waiting("getting ready", quiet=asked.hides_progress):
            backend: specdec_cli.backends.base.Backend
            starter = None
            if named is not None or serves:
                from specdec_cli.backends.server.backend import ServerBackend

                backend = there = open_until_end.enter_context(ServerBackend())
            if serves:
                starter = there
                there.logs = servers.logs_in(output, open_until_end)
            if named is not None:
                of_data = recipes[0].model_copy(update={"data": found.data})
                lengths = servers.look_at_all(there, of_data, named)
            is_native = named is None and not serves
            with importing(world.device if is_native and not dry_run else "cpu"):
                if is_native:
                    from specdec_cli.backends import native

                    backend = native
                from specdec_cli.commands.sweep_run import Own, run
                from specdec_cli.experiment.sweep.sweep_plan import plan_sweep

            def planned() -> "specdec_cli.experiment.sweep.sweep_plan.SweepPlan":
                return plan_sweep(
                    backend,
                    [recipe.model_copy(update={"data": found.data}) for recipe in recipes],
                    found,
                    lengths,
                    sizes,
                    asked.permissions(),
                    predict_only=predict_only,
                    shard=part,
                    check_lossless=check_lossless,
                )

            plan = None
            while plan is None:
                try:
                    plan = planned()
                except TooManyProposals as refused:
                    if ks is not None or kept:
                        raise
                    # The default list ends where the proposals of a draft end.
                    lengths = [k for k in lengths if k <= refused.most]
                    if asked.is_heard and not asked.quiet:
                        say(f"k goes up to {refused.most} by default: {refused.limit}")
            if minutes is not None:
                from specdec_cli.experiment.sweep.budget import fitting, of_size, sweep_seconds

                fit = world.once(partial(fitting, plan, 60 * minutes))
                recipes = [of_size(one, fit) for one in recipes]
                if fit.prompts < plan.num_prompts:
                    everything = found
                    found = world.once(
                        lambda: fewer_prompts(everything, fit.prompts, source, recipes[0], asked)
                    )
                plan = planned()
        if minutes is not None and asked.is_heard:
            # Estimate the time again, because the new plan has other prompts.
            fit = replace(fit, seconds=sweep_seconds(plan))
            say(f"chosen for {minutes:g} min: {fit.text}")
        own_flags = Own(resume, dry_run, strict, pairs)
        code = run(world, plan, asked, own_flags, named, starter)
    raise typer.Exit(code)


def _is_limit_bundled(asked: Asked, resolved: "specdec_cli.recipe.Recipe") -> bool:
    """Return True if `data.limit` is that of a bundled recipe for the bundled prompts."""
    from specdec_cli.recipe import is_bundled

    sets, data = options.parse_sets(asked.sets or ()), resolved.data
    is_set = bool({"data", "data.limit"} & sets.keys())
    is_own = data is not None and str(data.path).startswith(PREFIX)
    return is_own and not is_set and is_bundled(asked.recipe)


def _part(shard: str | None, kept: Mapping[str, Any], asked: Asked) -> tuple[int, int] | None:
    """Return the shard's index and the number of shards; None if the sweep takes all prompts.

    A resumed sweep keeps the shard of its folder unless --shard is given, because a Slurm array may
    be submitted again with only some of its tasks.
    """
    if kept and shard is None:
        return tuple(kept["shard"]) if kept["shard"] else None
    part = shard_of(shard, os.environ)
    if shard is not None or not asked.is_heard:
        return part
    if part is not None and not asked.quiet:
        told = f"shard {part[0]}/{part[1]}, from the Slurm array's task"
        say(f"{told}; --shard 0/1 takes all prompts")
    if part is None and is_lone_task(os.environ):
        told = "this is the only task of its Slurm array, so it takes all prompts"
        warn([f"{told}: pass --shard I/N for one shard"])
    return part
