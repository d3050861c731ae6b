"""Writes the recommended setting as a vLLM `speculative_config` and an SGLang command, with notes
on their limits.

The option names are those of vLLM 0.26 to 0.33 (`vllm/config/speculative.py`). This module only
writes commands; it does not run them.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from specdec_cli import demo
from specdec_cli.experiment.folders.records import Point
from specdec_cli.recipe.choices.base import fp8_flags, sglang_flags
from specdec_cli.recipe.choices.registry import METHODS, is_given, without_draft
from specdec_cli.report.findings import Finding, answer
from specdec_cli.report.folder import ReportedRun


@dataclass(frozen=True, slots=True)
class Deployment:
    """The commands and configs that deploy the recommended setting.

    speculative_config: the value of vLLM's option; None for no speculation.
    rehearsal: the same config with synthetic acceptance at the measured rates, so that vLLM itself
        can be timed; None if the rates are not known.
    command: the command that starts a vLLM server.
    notes: remarks for the user on the config and its limits.
    recommendation: the report's answer for each batch size, which names the recommended point, the
        fastest point and the points tied with it.
    sglang_command: the command that starts an SGLang server; None if SGLang lacks the method.
    places: the notes that tell the user to replace a model's name in the command, because a server
        cannot load a model by that name. `notes` contains them too.
    """

    speculative_config: dict[str, Any] | None
    rehearsal: dict[str, Any] | None
    command: str
    notes: list[str]
    recommendation: list[str] = field(default_factory=list)
    sglang_command: str | None = None
    places: list[str] = field(default_factory=list)


def _in_place_of(run: ReportedRun, bests: Sequence[Finding], command: str) -> list[str]:
    """Return a note for each model in `command` that a server cannot load under its name: a model
    in an installed package, a bundled model or a GGUF file. The note says what to put in its
    place."""
    drafts = [b.point.draft for b in bests if b.point is not None and not b.point.is_baseline]
    names = [run.setting("target", "model"), run.setting("draft", "model"), *drafts]
    notes = []
    for name in dict.fromkeys(map(str, filter(None, names))):
        if name not in command:
            continue
        writes = f"`python -m scripts.speculators.store {shlex.quote(name)} FOLDER --form plain`"
        if name.startswith("package:"):
            notes.append(
                f"{name} is in an installed package: replace it with the model's id on the hub, or "
                f"with a folder in bf16, which {writes} writes in a checkout of specdec."
            )
        elif name.startswith(demo.PREFIX):
            notes.append(
                f"{name} is bundled: replace it with its folder, which `specdec methods --json` "
                'shows as "path".'
            )
        elif name.endswith(".gguf"):
            notes.append(
                f"{name} is a GGUF file, and servers read few of them: replace it with the "
                f"original model's id, or with a folder in bf16, which {writes} writes in a "
                "checkout of specdec."
            )
    return notes


def deployment(run: ReportedRun, bests: Sequence[Finding]) -> Deployment | None:
    """Write the configs and commands for the best points. If the best k depends on the batch size,
    the vLLM config contains a schedule of k. Return None if there is neither a best point
    nor an inconclusive verdict at any batch size."""
    found = [b for b in bests if b.point is not None or b.is_open]
    if not found:
        return None
    recommendation = [answer(run, best) for best in found]

    def deployed(
        config: dict[str, Any] | None,
        point: Point | None,
        notes: list[str],
        rehearsal: dict[str, Any] | None = None,
        sglang: str | None = None,
    ) -> Deployment:
        parts = ["vllm", "serve", target, *_flags(run, point, "--tensor-parallel-size")]
        if config is not None:
            parts += ["--speculative-config", json.dumps(config)]
        command = shlex.join(parts)
        places = _in_place_of(run, bests, command)
        told = [*notes, *places], recommendation
        return Deployment(config, rehearsal, command, *told, sglang, places)

    decided = [b for b in found if not b.is_open]
    speculating = [b.point for b in decided if b.point is not None and not b.point.is_baseline]
    target = str(run.setting("target", "model") or "TARGET")
    undecided = [
        f"{f' {b.at.at_level}' if len(found) > 1 else ''}: {b.reason}." for b in found if b.is_open
    ]
    if not speculating:
        if not all(b.recorded is not None for b in decided):
            undecided.append(": the run is incomplete. Plain decoding is the fastest so far.")
        note = " ".join(f"No recommendation{told}" for told in undecided) or (
            "Nothing was faster than plain decoding beyond chance: start vLLM without a "
            "speculative config."
        )
        plain = next((b.point for b in decided), None)
        return deployed(None, plain, [note], sglang=_sglang(run, target, plain))
    # vLLM runs only one draft. Choose the one that is best at the smallest batch size, because
    # speculation pays most there.
    chosen = speculating[0]
    largest = max((p for p in speculating if p.draft == chosen.draft), key=lambda point: point.k)
    config, notes = _config(run, largest)
    if config is None:
        return deployed(None, None, notes)
    rehearsal = _rehearsal(config, largest)
    notes += [f"Not decided{told}" for told in undecided]
    if schedule := _schedule(found, chosen.draft):
        config["num_speculative_tokens_per_batch_size"] = schedule
        notes.append(
            "The best k changes with batch size: the schedule holds [first, last, k] for the sizes "
            "measured, each up to the next one; raise the last bound to --max-num-seqs. It needs a "
            "vLLM with dynamic speculation."
        )
        if undecided:
            notes[-1] += " The schedule has k = 0 for sizes with inconclusive verdicts."
    if largest.is_predicted:
        notes.append("This k was predicted and not measured: measure it before relying on it.")
    if not all(best.recorded is not None for best in decided):
        notes.append("The run is incomplete: this is the fastest point measured so far.")
    if len({p.draft for p in speculating}) > 1:
        notes.append(
            "Other drafts are best at other batch sizes, but vLLM runs only one. This is the best "
            "draft at the smallest batch size."
        )
    sglang = _sglang(run, target, largest)
    return deployed(config, largest, notes, rehearsal=rehearsal, sglang=sglang)


def _method(run: ReportedRun, point: Point) -> str:
    """Return the name of the speculation method that a point uses."""
    return str(point.draft if without_draft(point.draft) else run.method_of(point.draft))


def _config(run: ReportedRun, point: Point) -> tuple[dict[str, Any] | None, list[str]]:
    own = _method(run, point)
    choice = METHODS.get(own)
    if choice is None or choice.to_vllm is None:
        return None, [f"vLLM has no method {own}: this k cannot be put into its config."]
    model = None
    if choice.weights_from == "draft":
        model = point.draft or run.setting("draft", "model")
    found = choice.to_vllm(run.setting, model)
    config, notes = {**found.config, "num_speculative_tokens": point.k}, []
    if model is not None:
        if model == run.setting("draft", "model") and (r := run.setting("draft", "revision")):
            config["revision"] = r
        if run.setting("draft", "weights") == "fp8":
            config["quantization"] = "fp8"
        target_tp = point.target_tp or run.setting("target", "tensor_parallel_size") or 1
        draft_tp = point.draft_tp or run.setting("draft", "tensor_parallel_size") or 1
        config["draft_tensor_parallel_size"] = target_tp
        if draft_tp != target_tp and point.engine is None:
            notes.append(
                f"Measured with draft TP {draft_tp} under target TP {target_tp}. vLLM refuses a "
                "draft model whose degree differs from the target's, so the config says "
                f"{target_tp}: the draft's time, and so the best k, will differ from what was "
                "measured."
            )
    notes += found.notes
    if is_given(run.setting("speculation", "acceptance")):
        notes.append("Acceptance was given in this run: k is best only if a draft reaches it.")
    notes.append(_of_times(run, point))
    return config, notes


def _of_times(run: ReportedRun, point: Point) -> str:
    """Return the note on the engine that the times of a point come from."""
    if (engine := point.engine) is None:
        return (
            "Times are of specdec's own engine. vLLM's draft step may cost more, which lowers the "
            "best k: rehearse with the acceptance measured here before relying on a speed-up."
        )
    told = f"Times are those of {' '.join(filter(None, (engine.kind, engine.version)))}."
    if run.setting("engine", "kind") in (None, "native"):  # --server
        told += (
            " specdec did not start the servers, and the flags here are the recipe's: compare "
            "them with the flags of the server that was measured."
        )
    return told


def _schedule(bests: Sequence[Finding], draft: str | None) -> list[list[int]]:
    """Return the schedule of k: entries [first batch size, last batch size, k], sorted by batch
    size. An inconclusive size has k = 0, because nothing is advised there. The schedule is empty if
    k is the same at all batch sizes, or if any point was measured at a request rate instead of a
    batch size."""
    ks = []
    for best in bests:
        if best.is_open:
            ks.append((best.at.batch_size, 0))
        elif (point := best.point) is not None and (point.is_baseline or point.draft == draft):
            ks.append((point.batch_size, point.k))
    if any(best.at.request_rate is not None for best in bests):
        return []
    changes = [(size, k) for i, (size, k) in enumerate(ks) if i == 0 or k != ks[i - 1][1]]
    if len(changes) < 2:
        return []
    firsts = [1, *(size for size, _ in changes[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), ks[-1][0]]
    return [[first, last, k] for first, last, (_, k) in zip(firsts, lasts, changes, strict=True)]


def _rehearsal(config: dict[str, Any], point: Point) -> dict[str, Any] | None:
    """Return the config with synthetic acceptance, or None if the rates are not known.

    vLLM needs k marginal rates that never increase with the position, so each measured rate is
    capped at the lowest rate before it. A predicted point has no rates, so its mean acceptance
    length is used instead.
    """
    found = {**config, "rejection_sample_method": "synthetic"}
    if point.is_predicted:
        if point.prediction is None:
            return None
        length = round(point.prediction.mean_acceptance_length, 6)
        return found | {"synthetic_acceptance_length": length}
    rates = point.metrics.acceptance_rate_per_pos if point.metrics is not None else []
    if rates is None or len(rates) != point.k:
        return None
    falling = [round(min(rates[: i + 1]), 6) for i in range(len(rates))]
    return found | {"synthetic_acceptance_rates": falling}


def _flags(run: ReportedRun, point: Point | None, size: str) -> list[str]:
    """Return the server flags for tensor parallelism, fp8 weights and an fp8 cache.

    size: the name of the server's flag for the tensor-parallel size.
    """
    tp = (point.target_tp if point else None) or run.setting("target", "tensor_parallel_size")
    flags = [size, str(tp)] if isinstance(tp, int) and tp > 1 else []
    in_fp8 = fp8_flags(run.setting("target", "weights"), run.setting("cache", "dtype"))
    return [*flags, *chain.from_iterable(in_fp8)]


def _sglang(run: ReportedRun, target: str, point: Point | None) -> str | None:
    """Write the command that starts SGLang 0.5 with the method of `point`. Return None if SGLang
    lacks the method.

    The option names are those of SGLang's `server_args.py`.
    point: if it is None or plain decoding, the command starts SGLang without speculation.
    """
    parts = ["python", "-m", "sglang.launch_server", "--model-path", target]
    parts += _flags(run, point, "--tp-size")
    if point is None or point.is_baseline:
        return shlex.join(parts)
    choice = METHODS.get(_method(run, point))
    if choice is None or choice.to_sglang is None:
        return None
    draft = point.draft or run.setting("draft", "model")
    weights = run.setting("target", "weights"), run.setting("draft", "weights")
    parts += chain.from_iterable(sglang_flags(choice, point.k, draft, weights))
    return shlex.join(parts)
