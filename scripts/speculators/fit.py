"""A curve through a training's log, which estimates the gain of further minutes.

error(t) = floor + scale * t^-power, by least squares over a grid of powers, with no floor below 0.
A run's learning rate falls towards its end, so the curve is that of one run, and a longer run would
be somewhat better than it at every minute but the last. Knows no models.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_POWERS = np.linspace(0.05, 2.0, 79)
_FEWEST = 4  # points
_EARLY = 0.05  # largest share of a run that is warm-up


@dataclass(frozen=True)
class Curve:
    """error(t) = floor + scale * t^-power"""

    floor: float
    scale: float
    power: float
    residual: float

    def error(self, seconds: float) -> float:
        return float(self.floor + self.scale * seconds**-self.power)


def fitted(seconds: Sequence[float], errors: Sequence[float]) -> Curve | None:
    """The best curve; None for too few points."""
    t, y = np.asarray(seconds, float), np.asarray(errors, float)
    if len(t) < _FEWEST:
        return None
    best: Curve | None = None
    for power in _POWERS:
        x = np.stack((np.ones_like(t), t**-power), 1)
        floor, scale = np.linalg.lstsq(x, y, rcond=None)[0]
        if floor < 0:
            floor, scale = 0.0, float(x[:, 1] @ y / (x[:, 1] @ x[:, 1]))
        residual = float(np.sqrt(np.mean((floor + scale * x[:, 1] - y) ** 2)))
        if best is None or residual < best.residual:
            best = Curve(float(floor), float(scale), float(power), residual)
    return best


def read_log(path: Path) -> list[dict[str, object]]:
    """The records of a log. A torn last line is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def outlook(log: list[dict[str, object]], times: Sequence[float] = (2.0, 4.0)) -> list[str]:
    """A line for each link: its accuracy now, and by its curve after multiples of the time."""
    known = [r for r in log if float(str(r["done"])) > _EARLY]
    lines = []
    links = len(log[-1]["accuracy"]) if log else 0  # type: ignore[arg-type]
    for link in range(links):
        errors = [1 - r["accuracy"][link] for r in known]  # type: ignore[index]
        seconds = [float(str(r["seconds"])) for r in known]
        curve = fitted(seconds, errors)
        if curve is None:
            return ["too few points in the log for a curve"]
        later = ", ".join(f"{1 - curve.error(x * seconds[-1]):.3f} at x{x:g}" for x in times)
        lines.append(
            f"link {link + 1}: {1 - errors[-1]:.3f} after {seconds[-1]:.0f} s; by the curve "
            f"{later} (residual {curve.residual:.3f})"
        )
    return lines
