"""Parses latency objectives, such as `ttft: 500ms`."""

UNITS = {"ms": 1.0, "s": 1000.0}
OBJECTIVES = ("ttft", "tpot", "e2el")


def objective(name: str, text: str) -> float:
    """Convert an objective such as `500ms` to milliseconds. Raises ValueError for an unknown name
    or an invalid time."""
    if name not in OBJECTIVES:
        raise ValueError(f"expected one of {', '.join(OBJECTIVES)}; got {name!r}")
    number, unit = text.strip(), ""
    for unit in UNITS:
        if number.endswith(unit):
            number = number[: -len(unit)].strip()
            break
    else:
        hint = f" (did you mean {text.strip()}ms?)" if number.replace(".", "", 1).isdigit() else ""
        raise ValueError(f"expected a time with its unit, ms or s, got {text!r}{hint}")
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise ValueError(f"expected a time above 0 and below 1000000s, in ms or s, got {text!r}")
    return value
