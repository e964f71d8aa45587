"""Charts as SVG files."""

from __future__ import annotations

from prepcli.commands.pages.charts import CHART_STYLE, WIDE

GAP = 10


def svg_file(*charts: str) -> str:
    """Return the text of an SVG file with charts of equal size, one below another."""
    width, height = WIDE
    text = (
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
        f' width="{width}" height="{len(charts) * (height + GAP)}">\n<style>{CHART_STYLE}</style>\n'
    )
    for number, chart in enumerate(charts):
        y = number * (height + GAP)
        text += f'<svg y="{y}"{chart.removeprefix("<svg")}\n'
    return text + "</svg>\n"
