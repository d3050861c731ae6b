"""`specdec generate`: what does this pair write, how fast, how much of the draft was accepted?

Parses, prepares, runs and shows; the work is done elsewhere.
"""

import sys
from typing import Annotated

import typer

from specdec_cli.commands import inputs, options
from specdec_cli.commands.status import waiting
from specdec_cli.errors import ExitCode, UsageError

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated."),
]
PromptFile = Annotated[
    str | None,
    typer.Option("--prompt-file", metavar="FILE", help="Prompts: .txt, a line each, or .jsonl."),
]


def generate(
    recipe: options.RecipeArgument = None,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    chat: inputs.Chat = None,
    system: inputs.System = None,
    target: options.Target = None,
    draft: options.Draft = None,
    target_tp: options.TargetTP = None,
    draft_tp: options.DraftTP = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    max_new_tokens: options.MaxNewTokens = None,
    ignore_eos: options.IgnoreEos = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = None,
    num_blocks: options.NumBlocks = None,
    block_size: options.BlockSize = None,
    sets: options.Set = None,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pickle: options.AllowPickle = False,
    as_json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write text with a draft and a target model, and say what was accepted.

    Prompts come from --prompt, --prompt-file, standard input when it is piped, or the recipe's
    data. `-k 0` decodes without a draft. Without a recipe the bundled demo pair runs.
    """
    chosen = {
        "target": target,
        "draft": draft,
        "target_tp": target_tp,
        "draft_tp": draft_tp,
        "num_speculative_tokens": num_speculative_tokens,
        "dtype": dtype,
        "device": device,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "batch_size": batch_size,
        "seed": seed,
        "num_blocks": num_blocks,
        "block_size": block_size,
    }
    resolved = options.resolve(recipe, sets, chosen)
    prompts, resolved = inputs.from_command_line(resolved, prompt or [], prompt_file, chat, system)
    options.set_up_logging(quiet=quiet, verbose=verbose)

    is_single = bool(prompt) and len(prompts) == 1
    with waiting("getting ready", quiet=quiet) as stages:
        from specdec_cli.engine.build import build
        from specdec_cli.engine.plan import Permissions
        from specdec_cli.generation import baseline, prepare, requests
        from specdec_cli.render import has_colour, print_failures, print_summary
        from specdec_cli.reporting import collector, shows_live_text, sinks_for
        from specdec_cli.results import RunFolder, environment, generate_document, to_json

        job = prepare(resolved, prompts, Permissions(trust_remote_code, allow_pickle))
        if is_single and (problem := job.too_long(0)):
            raise UsageError(problem, "shorten the prompt")
        where = environment(job.plan.device, job.plan.target.dtype, job.plan.execution)
        folder = RunFolder.create(output, resolved, where) if output is not None else None
        stages.expect(len(job.plan.stages))
        engine = build(job.plan, job.longest_prompt, stages.begin)
    sinks = sinks_for(job, folder, as_json=as_json, quiet=quiet)
    on_emit, finish = collector(job, sinks)
    try:
        result = engine.run(requests(job), job.plan.k, job.plan.params, on_emit)
        outputs = finish()
    finally:
        for sink in sinks:
            sink.close()
    if is_single and outputs[0].error is not None:
        raise UsageError(f"the prompt cannot run: {outputs[0].error}")
    document = generate_document(resolved, where, outputs, result.metrics)
    if folder is not None:
        folder.write("summary.json", to_json(document) + "\n")
    if as_json:
        typer.echo(to_json(document))
    failures = {o.index: o.error for o in outputs if o.error is not None}
    print_failures(failures)
    if not quiet:
        compared = job.plan.k > 0 and sys.stderr.isatty()
        is_tinted = not as_json and shows_live_text(job) and has_colour(sys.stdout)
        print_summary(
            result.metrics,
            baseline(engine, job, outputs) if compared else None,
            tinted=is_tinted,
            synthetic=job.plan.is_synthetic,
        )
    raise typer.Exit(ExitCode.PARTIAL if failures else ExitCode.OK)
