"""Acceptance by position in the proposal."""

from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.canvas import add_legend, label_axes, make_axes, safe, style_of
from specdec_cli.report.findings import longest_proposals
from specdec_cli.report.folder import ReportedRun


def draw_acceptance(figure: Any, run: ReportedRun) -> bool:
    """Draw acceptance at the largest k of each draft, at the smallest batch size that has it."""
    longest = longest_proposals(run)
    if not longest:
        return False
    (axis,) = make_axes(figure, 1, 3.2)
    most = 1
    for index, (name, point) in enumerate(longest.items()):
        style = style_of(index)
        prefix = f"{safe(name)}, " if len(longest) > 1 else ""
        for key, word, dash in [
            ("acceptance_rate_per_pos", "marginal", "-"),
            ("conditional_acceptance_rate_per_pos", "conditional", "--"),
        ]:
            known = [
                (i, 100 * r) for i, r in enumerate(getattr(point.metrics, key), 1) if r is not None
            ]
            if known:
                xs, ys = zip(*known, strict=True)
                most = max(most, *xs)
                intervals = dict(enumerate(getattr(point, f"{key}_ci"), 1))
                ends = [intervals.get(x) for x in xs]
                is_hollow = {"mfc": "none"} if dash == "--" else {}
                shift = canvas.dodged(2 * index + (dash == "--"), 2 * len(longest))
                canvas.plot_with_intervals(
                    axis, [x + shift for x in xs], ys,
                    [[100 * end for end in e] if e else None for e in ends],
                    linestyle=dash, label=prefix + word, **style, **is_hollow,
                )  # fmt: skip
    axis.set_ylim(0, 103)
    axis.set_xticks(range(1, most + 1, -(-most // 16)))
    label_axes([axis], "position in the draft (1 is proposed first)", "accepted (%)")
    add_legend(figure, [axis])
    return True
