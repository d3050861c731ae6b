"""Reports opened in a real headless browser: no message of an error, and nothing cut.

    python scripts/proofs/browser.py REPORT.html... [--browser CHROMIUM] [--shots DIR]

Needs the package playwright and a Chromium: `playwright install chromium`, or any other's path.
Each page is opened wide (1200 px), with every table unfolded, narrow (390 px), dark, and as print
(A4), which folds nothing. The wide page has two plots in a row. The script fails if the console has
a message, if the page is wider than its window, if text or a plot exceeds its box, if two labels of
a plot overlap, or if the page makes a request over the network. Tables and code may scroll in a
narrow window, nowhere else. Prints a line a view; exits with 1 if one fails.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """A view of a page. width: that of the window, in CSS pixels. may_scroll: whether tables may
    scroll. unfolded: whether to open folded parts. in_a_row: the number of plots that the first row
    must have."""

    name: str
    width: int
    colours: str = "light"
    media: str = "screen"
    may_scroll: bool = False
    unfolded: bool = False
    in_a_row: int = 1


VIEWS = (
    View("wide", 1200, in_a_row=2),
    View("unfolded", 1200, unfolded=True),
    View("narrow", 390, may_scroll=True),
    View("dark", 1200, colours="dark"),
    View(
        "print", 718, media="print", unfolded=True
    ),  # A4 less the usual margins, at 96 dots an inch
)
# Returns in words each element that exceeds its box or overlaps.
_LOOK = """
(mayScroll) => {
  const found = [], slack = 1.5;
  const name = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
    " " + JSON.stringify((e.textContent || "").trim().slice(0, 40));
  const page = document.documentElement;
  if (page.scrollWidth > window.innerWidth + slack)
    found.push(`the page is ${page.scrollWidth} px wide in a window of ${window.innerWidth}`);
  for (const e of document.body.querySelectorAll("*")) {
    if (e.closest("svg") || e.closest("details:not([open])")) continue;
    const scrolls = e.matches(".wide, pre");
    if (e.clientWidth && e.scrollWidth > e.clientWidth + slack && !(mayScroll && scrolls))
      found.push(`cut: ${name(e)}: ${e.scrollWidth} of ${e.clientWidth} px`);
  }
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((t) => [t, t.getBoundingClientRect()]);
    for (const [t, r] of texts)
      if (r.width && (r.left < box.left - slack || r.right > box.right + slack ||
          r.top < box.top - slack || r.bottom > box.bottom + slack))
        found.push(`out of its plot: ${name(t)}`);
    for (let i = 0; i < texts.length; i++)
      for (let j = 0; j < i; j++) {
        const [a, b] = [texts[i][1], texts[j][1]];
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (x > slack && y > 0.3 * Math.min(a.height, b.height))
          found.push(`labels overlap: ${name(texts[i][0])} and ${name(texts[j][0])}`);
      }
  }
  return found;
}
"""


# Two scripts: tables without height, and the largest number of plots at one height.
_FOLDED = """
() => [...document.querySelectorAll("details table")]
  .filter((t) => t.getBoundingClientRect().height < 1).map((t) => t.id)
"""
_ROW = """
() => {
  const tops = [...document.querySelectorAll("figure")]
    .map((f) => Math.round((f.closest("section") || f).getBoundingClientRect().top));
  return tops.length < 2 ? 99 : Math.max(...tops.map((y) => tops.filter((z) => z === y).length));
}
"""


def problems(browser: Any, page_file: Path, view: View, shots: Path | None) -> Iterator[str]:
    """Faults of a page in one view, a line each."""
    size = {"width": view.width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=view.colours)
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on(
        "request",
        lambda r: None if r.url.startswith("file:") else said.append(f"asks for {r.url[:80]}"),
    )
    page.goto(page_file.resolve().as_uri())
    page.emulate_media(media=view.media, color_scheme=view.colours)
    if view.unfolded and view.media == "screen":
        page.evaluate(
            "() => document.querySelectorAll('details').forEach((d) => { d.open = true; })"
        )
    if view.unfolded:
        said += [f"folded: {one}" for one in page.evaluate(_FOLDED)]
    if (most := page.evaluate(_ROW)) < view.in_a_row:
        said.append(f"{most} plots in a row")
    # No script of the page's own may run, but the browser's evaluation is not the page's.
    found: list[str] = page.evaluate(_LOOK, view.may_scroll)
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
        folder = page_file.resolve().parent.name
        picture = shots / f"{folder}-{page_file.stem}-{view.name}.png"
        page.screenshot(path=str(picture), full_page=True)
    page.close()
    yield from (*said, *found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--browser", help="path of a Chromium, if playwright installed none")
    parser.add_argument("--shots", type=Path, help="folder for a picture of each view")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    bad = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=asked.browser, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        print(f"Chromium {browser.version}")
        for report in asked.reports:
            for view in VIEWS:
                found = list(problems(browser, report, view, asked.shots))
                bad += len(found)
                print(f"{report}, {view.name} ({view.width} px): {len(found) or 'no'} problems")
                for told in found[:20]:
                    print(f"  {told}")
        browser.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
