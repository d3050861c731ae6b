"""Run folders made by hand by the contract, with figures that can be checked."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdec_cli.experiment.folders.conclusions import VERSION
from specdec_cli.experiment.folders.records import Point

Record = dict[str, Any]
DRAFT, OTHER = "org/draft-1b", "org/draft-300m"


def acceptance(k: int, rate: float, drafts: int = 1000) -> Record:
    """Counts of `drafts` rounds in which each proposal is accepted with probability `rate`."""
    per_pos = [round(drafts * rate**i) for i in range(1, k + 1)]
    reached = [drafts, *per_pos]
    histogram = [a - b for a, b in zip(reached, [*per_pos, 0], strict=True)]
    accepted = sum(per_pos)
    return {
        "num_drafts": drafts if k else 0,
        "num_rounds_without_proposal": 0 if k else drafts,
        "num_draft_tokens": drafts * k,
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": per_pos,
        "mean_acceptance_length": 1 + accepted / drafts if k else 1.0,
        "draft_acceptance_rate": accepted / (drafts * k) if k else None,
        "acceptance_rate_per_pos": [n / drafts for n in per_pos],
        "conditional_acceptance_rate_per_pos": [
            n / r if r else None for n, r in zip(per_pos, reached, strict=False)
        ],
        "acceptance_histogram": histogram,
    }


def spread(mean: float) -> Record:
    return {"mean": mean, "p50": 0.97 * mean, "p90": 1.2 * mean, "p99": 1.45 * mean}


def metrics(k: int, batch_size: int, rate: float, draft_ms: float, target_ms: float) -> Record:
    counts = acceptance(k, rate)
    verify = target_ms * (1 + 0.012 * k * batch_size)
    sample = 0.09 + 0.01 * k
    draft = draft_ms * k
    round_ms = draft + verify + sample + 0.11
    speed = batch_size * 1000 * counts["mean_acceptance_length"] / round_ms
    return {
        "k": k,
        "batch_size": batch_size,
        "num_prompts": 80,
        "num_output_tokens": 80 * 64,
        "num_rounds": 1000,
        "num_preemptions": 0,
        "draft_ms": draft,
        "broadcast_ms": 0.0,
        "verify_ms": verify,
        "sample_ms": sample,
        "round_ms": round_ms,
        "prefill_ms": 11.5,
        "prefill_seconds": 0.92,
        "decode_seconds": 80 * 64 / speed,
        "output_tokens_per_second": 0.93 * speed,
        "decode_tokens_per_second": speed,
        "ttft_ms": spread(19.0),
        "tpot_ms": spread(1000 * batch_size / speed),
        "tokens_per_round": counts["mean_acceptance_length"],
        **counts,
    }


def sweep_points(
    ks: Iterable[int] = range(9),
    batch_sizes: Sequence[int] = (1, 8, 32),
    drafts: Sequence[tuple[str, float, float]] = ((DRAFT, 0.78, 0.95), (OTHER, 0.6, 0.5)),
    target_ms: float = 4.2,
) -> list[Record]:
    """Points of a sweep. drafts: name, chance that a proposal is accepted, ms a proposal."""
    points: list[Record] = []
    for batch_size in batch_sizes:
        plain = metrics(0, batch_size, 0.0, 0.0, target_ms)
        points.append(
            {
                "k": 0,
                "batch_size": batch_size,
                "draft": None,
                "status": "ok",
                "metrics": plain,
                "speedup": 1.0,
                "speedup_ci": [1.0, 1.0],
                "predicted_speedup": 1.0,
                "mean_acceptance_length_ci": [1.0, 1.0],
                "per_category": {},
            }
        )
        for draft, rate, draft_ms in drafts:
            for k in ks:
                if k:
                    point = sweep_point(draft, k, batch_size, rate, draft_ms, target_ms)
                    speed = point["metrics"]["decode_tokens_per_second"]
                    gain = speed / plain["decode_tokens_per_second"]
                    point["speedup"] = gain
                    point["speedup_ci"] = [gain - 0.02 - 0.012 * k, gain + 0.03 + 0.012 * k]
                    point["predicted_speedup"] = gain * (1 + 0.012 * (k - 4) / 2)
                    length = point["metrics"]["tokens_per_round"]
                    point["break_even"] = {
                        "tokens_per_round": length / gain,
                        "tokens_per_round_ci": [0.98 * length / gain, 1.02 * length / gain],
                        "draft_acceptance_rate": 0.25 if k < 8 else None,
                        "alpha": 0.5 if k < 8 else None,
                        "is_predicted": False,
                    }
                    for part in point["per_category"].values():
                        part["speedup"] = part["mean_acceptance_length"] / length * gain
                        part["speedup_ci"] = [part["speedup"] - 0.02, part["speedup"] + 0.02]
                    points.append(point)
    return points


def sweep_point(
    draft: str, k: int, batch_size: int, rate: float, draft_ms: float, target_ms: float
) -> Record:
    figures = metrics(k, batch_size, rate, draft_ms, target_ms)
    length = figures["mean_acceptance_length"]
    names = {"writing": -0.18, "math": 0.1, "coding": 0.14, "qa": 0.0, "rag": 0.05}
    per_category = {}
    for name, shift in names.items():
        counts = acceptance(k, min(0.95, rate + shift), 200)
        per_category[name] = {
            "num_prompts": 16,
            "num_output_tokens": 16 * 64,
            "mean_acceptance_length": counts["mean_acceptance_length"],
            "draft_acceptance_rate": counts["draft_acceptance_rate"],
            "acceptance_rate_per_pos": counts["acceptance_rate_per_pos"],
            "decode_tokens_per_second": 100.0,
            "speedup": None,
            "speedup_ci": None,
        }
    return {
        "k": k,
        "batch_size": batch_size,
        "draft": draft,
        "status": "ok",
        "metrics": figures,
        "speedup": None,
        "speedup_ci": None,
        "predicted_speedup": None,
        "mean_acceptance_length_ci": [length - 0.08, length + 0.08],
        "per_category": per_category,
    }


def comparison_points(
    target_tps: Sequence[int] = (2, 4), batch_sizes: Sequence[int] = (1, 32)
) -> list[Record]:
    """Points of compare-tp at k = 5, and k = 0 at each target TP."""
    points: list[Record] = []
    for target_tp in target_tps:
        for batch_size in batch_sizes:
            plain = metrics(0, batch_size, 0.0, 0.0, 16 / target_tp)
            points.append(comparison_point(target_tp, None, batch_size, plain, plain))
            for draft_tp in (1, 2, 4):
                if target_tp % draft_tp:
                    continue
                cost = 0.9 / draft_tp + 0.16 * draft_tp
                figures = metrics(5, batch_size, 0.75, cost, 16 / target_tp)
                points.append(comparison_point(target_tp, draft_tp, batch_size, figures, plain))
    return points


def comparison_point(
    target_tp: int, draft_tp: int | None, batch_size: int, figures: Record, plain: Record
) -> Record:
    gain = figures["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
    figures["broadcast_ms"] = 0.0 if draft_tp is None else 0.04 * target_tp
    return {
        "target_tp": target_tp,
        "draft_tp": draft_tp,
        "k": figures["k"],
        "batch_size": batch_size,
        "status": "ok",
        "metrics": figures,
        "broadcast_ms": figures["broadcast_ms"],
        "num_blocks": 4000 + 10 * target_tp,
        "blocks_per_rank": [4000 + 10 * target_tp] * target_tp,
        "speedup": gain,
        "speedup_vs_equal_tp": 1.0 if draft_tp == target_tp else 1.04,
    }


def as_points(records: Iterable[Record]) -> list[Point]:
    return [Point.model_validate(record) for record in records]


def sample_record(**fields: Any) -> Record:
    """A line of samples.jsonl for 12 tokens, each from a separate round."""
    found = {
        "draft": DRAFT,
        "k": 0,
        "batch_size": 1,
        "index": 0,
        "category": None,
        "prompt_token_ids": [1],
        "token_ids": [1] * 12,
        "finish_reason": "length",
        "accepted_per_round": [],
        "seconds": [1.0],
        "proposed_per_round": [fields.get("k", 0)] * len(fields.get("accepted_per_round", ())),
        "rounds_without_proposal": 0,
        "num_preemptions": 0,
        "decode_seconds": [1.0],
        "round_share": [3.0],
        "stage_ms": {},
        "ttft_ms": [1.0],
        "tpot_ms": [1.0],
        "peak_memory_bytes": 1,
    }
    return found | fields


RECIPE: Record = {
    "target": {"model": "org/target-8b", "tensor_parallel_size": 1, "load_format": "auto"},
    "draft": {"model": DRAFT, "revision": None, "tensor_parallel_size": 1, "load_format": "auto"},
    "speculation": {"method": "draft_model", "acceptance": "rejection", "ngram_max": 4},
    "sampling": {"temperature": 0.0, "max_new_tokens": 64},
    "data": {"path": "question.jsonl"},
}
ENVIRONMENT: Record = {
    "specdec": "0.1.0",
    "packages": {"torch": "2.13.0"},
    "device": "cuda:0",
    "gpu": "NVIDIA H200",
    "dtype": "bfloat16",
}


def best_of(points: Iterable[Record], batch_size: int) -> Record:
    ok = [p for p in points if p["batch_size"] == batch_size and p["status"] == "ok"]
    best = max(ok, key=lambda p: p["metrics"]["decode_tokens_per_second"])
    if "target_tp" in best:
        named = {key: best[key] for key in ("target_tp", "draft_tp", "k")}
        return named | {"tied": [], "reason": "fastest"}
    return {
        "k": best["k"],
        "draft": best["draft"],
        "tied": [best["k"] + 1],
        "reason": "the smallest k that is tied with the fastest",
    }


def comparisons_of(points: Iterable[Record]) -> list[Record]:
    """One draft against another at batch size 1, and one category in which they are tied."""
    fastest: dict[str, Record] = {}
    for p in points:
        known = p.get("batch_size") == 1 and p.get("draft") and p.get("speedup")
        if known and p["k"] and p["speedup"] >= fastest.get(p["draft"], p)["speedup"]:
            fastest[p["draft"]] = p
    if len(fastest) < 2:
        return []
    arm, against = sorted(fastest.values(), key=lambda p: -p["speedup"])[:2]
    ratio = arm["speedup"] / against["speedup"]
    found = {"speed_ratio": ratio, "speed_ratio_ci": [ratio - 0.05, ratio + 0.06], "tied": False}
    tied = {"speed_ratio": 1.01, "speed_ratio_ci": [0.97, 1.04], "tied": True}
    sides = {
        name: {"k": p["k"], "draft": p["draft"]} for name, p in (("arm", arm), ("against", against))
    }
    return [
        {"batch_size": 1, **sides, "is_predicted": False, "num_prompts": 80, **found}
        | {"per_category": {"writing": {"num_prompts": 16, **tied}}}
    ]


def write_folder(
    folder: Path,
    points: Sequence[Record],
    *,
    finished: bool = True,
    recipe: Record = RECIPE,
    samples: Iterable[Record] = (),
    torn: str = "",
) -> Path:
    """Write a run folder. finished: with a summary. torn: a cut line at the end of points.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "settings.json").write_text(json.dumps({"version": VERSION}))
    lines = "".join(f"{json.dumps(point)}\n" for point in points)
    (folder / "points.jsonl").write_text(lines + torn)
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in samples))
    if finished:
        kind = "compare-tp" if any("target_tp" in p for p in points) else "sweep-k"
        sizes = sorted({p["batch_size"] for p in points})
        bests = {str(size): best_of(points, size) for size in sizes}
        summary = {
            "schema": f"specdec.{kind}/1",
            "version": VERSION,
            "recipe": recipe,
            "environment": ENVIRONMENT,
            "points": list(points),
            "best": bests[str(sizes[0])] if sizes else None,
            "best_by_batch_size": bests,
        }
        if kind == "sweep-k":
            summary["comparisons"] = comparisons_of(points)
        else:
            decided = {"stage": "draft", "saved_ms": 0.31, "draft_tp": 1}
            best = {"target_tp": 4, "draft_tp": 2, "k": 4, "decode_tokens_per_second": 250.0}
            best |= {"reason": "fastest"} | {
                "tied": [{"target_tp": 4, "draft_tp": 4}],
                "decided_by": decided,
            }
            summary["best_by_target_tp"] = {"4": {"1": best}}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
