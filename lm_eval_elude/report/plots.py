"""Every plot of the pages and the tables' figures, drawn by matplotlib as SVG.

The same input gives the same bytes. A run has one colour in all plots of a page, which names it once. Texts stay
texts, so that a page can be searched; a name of a run is never markup.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm_eval_elude.report.frame import plain_cell
from lm_eval_elude.scoring.estimates import Estimate

COLORS = ("#6b7280", "#c4461b", "#0b7a5f", "#2f62c0", "#9a3f9e", "#a87400", "#0f7f9c", "#b4305f")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "lm-eval-elude", "text.parse_math": False, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6, "font.size": 9,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "font.family": "sans-serif",
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


def color(place: int) -> str:
    """The colour of a run, the same in all plots."""
    return COLORS[place % len(COLORS)]


class Line(NamedTuple):
    """A curve or histogram of the run at a place: points (x, y), or the share of the samples in each bin."""

    place: int
    values: Sequence[Any]
    dashed: bool = False

    @property
    def style(self) -> dict[str, Any]:
        return {"color": color(self.place), "linestyle": "--" if self.dashed else "-"}


class Point(NamedTuple):
    """A run, what it forgot and what it kept, and the share of its answers that are gibberish (0 for a few)."""

    place: int
    name: str
    forgotten: Estimate
    kept: Estimate
    gibberish: float
    reference: bool  # whether it is the model that never knew


def quality(points: Sequence[Point], forgotten: str, kept: str) -> str:
    """What runs forgot against what they kept, with 95 % intervals; lines mark the reference, a cross gibberish.

    ``forgotten`` and ``kept`` stand at the axes.
    """
    with _figure(4.6, 3.8) as (out, axes):
        for point in points:
            x, y = (100 * estimate.value for estimate in (point.forgotten, point.kept))
            x_error, y_error = map(_errors, (point.forgotten, point.kept))
            shade = color(point.place)
            name = _name(point.name) + (f" ({point.gibberish:.0%} gibberish)" if point.gibberish else "")
            axes.errorbar(
                x, y, xerr=x_error, yerr=y_error, fmt="X" if point.gibberish else "o", color=shade,
                label=name, mfc="white" if point.reference else shade, ms=9 if point.gibberish else 6,
            )  # fmt: skip
            if point.reference:
                _cross(axes, x, y, shade)
        axes.set(xlim=(-2, 102), ylim=(-2, 102), xlabel=forgotten, ylabel=kept)
        _legend(axes)
    return out.getvalue()


def plane(marks: Mapping[str, tuple[float, float]], reference: str) -> str:
    """The plane of forget against retain quality with some models in it, and an empty group of class ``dots``.

    The group's units are per cent of each axis: who shows the plane draws further models into it. ``marks`` are FQ and
    RQ by name; those of ``reference``, the model that never knew, are lines.
    """
    with _figure(4.0, 3.85) as (out, axes):  # so that an inch of both axes is as many per cent
        axes.set(xlim=(-2, 102), ylim=(-2, 102), xlabel="forget quality (FQ), %", ylabel="retain quality (RQ), %")
        for name, values in marks.items():
            x, y = (100 * value for value in values)
            axes.plot(x, y, "D", color="#333", mfc="white", markersize=5)
            place, side = ((-6, 5), "right") if x > 60 else ((6, 5), "left")
            axes.annotate(_name(name), (x, y), place, textcoords="offset points", fontsize=8, ha=side)
            if name == reference:
                _cross(axes, x, y, "#333")
        points = 72 / axes.figure.dpi
        (left, bottom), (right, top) = points * axes.transData.transform([(0, 0), (100, 100)])
        height = points * axes.figure.bbox.height
    matrix = f"{(right - left) / 100:.4f} 0 0 {(bottom - top) / 100:.4f} {left:.2f} {height - bottom:.2f}"
    return out.getvalue().replace("</svg>", f'<g class="dots" transform="matrix({matrix})"/></svg>')


def bars(title: str, groups: Sequence[str], series: Mapping[str, Sequence[Estimate | None]]) -> str:
    """Grouped bars from 0 to 100 % with 95 % intervals, by name one for each group; a missing value is a dash."""
    with _figure(2 + 0.16 * len(groups) * max(2, len(series)), 3.6 + 0.17 * len(series), title) as (out, axes):
        width = 0.8 / max(1, len(series))
        for place, (name, values) in enumerate(series.items()):
            at = np.arange(len(groups)) + width * (place - (len(series) - 1) / 2)
            shown = [(x, v) for x, v in zip(at, values, strict=True) if v is not None and not math.isnan(v.value)]
            errors = np.array([_errors(v) for _, v in shown]).reshape(-1, 2).T
            heights = [100 * v.value for _, v in shown]
            style: dict[str, Any] = {"color": color(place), "label": _name(name)}
            if shown:
                axes.bar(
                    [x for x, _ in shown], heights, 0.9 * width, yerr=errors, error_kw={"elinewidth": 0.8}, **style
                )
            else:  # in the legend alone
                axes.plot([], [], linewidth=6, **style)
            for x in set(at) - {x for x, _ in shown}:
                axes.text(x, 1, "–", ha="center")
        axes.set(ylim=(0, 100), ylabel="%")
        axes.set_xticks(range(len(groups)), groups, rotation=35, ha="right")
        axes.grid(axis="x", visible=False)
        if series:
            _legend(axes)
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    return out.getvalue()


def roc(curves: Sequence[Line]) -> str:
    """ROC curves; a point is the share of false alarms and that of members found."""
    with _figure(3.6, 3.2) as (out, axes):
        axes.plot((0, 100), (0, 100), color="#888", linestyle=":", linewidth=1)
        for curve in curves:
            axes.plot(*100 * np.transpose(curve.values), linewidth=1.3, **curve.style)
        axes.set(xlabel="false alarms, %", ylabel="members found, %")
    return out.getvalue()


def histograms(shares: Sequence[Line], top: float, label: str) -> str:
    """Outlines of histograms of equal bins from 0 to ``top``."""
    with _figure(3.6, 2.4) as (out, axes):
        for of_run in shares:
            edges = np.linspace(0, top, len(of_run.values) + 1)
            axes.stairs(100 * np.array(of_run.values), edges, **of_run.style)
        axes.set(xlabel=label, ylabel="share, %", xlim=(0, top))
    return out.getvalue()


def curves(lines: Sequence[Line], label: str) -> str:
    """Lines over steps, epochs or layers."""
    with _figure(3.2, 2.0) as (out, axes):
        for line in lines:
            axes.plot(*np.transpose(line.values), linewidth=1.3, **line.style)
        axes.set(xlabel=label)
    return out.getvalue()


# ---- how all of them are drawn
@contextmanager
def _figure(width: float, height: float, title: str = "") -> Iterator[tuple[io.StringIO, Axes]]:
    """One pair of axes to draw on, of a size in inches, and what holds the SVG once the block has ended."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font for measuring lacks
        figure = Figure((width, height))
        axes = figure.add_axes((0.55 / width, 0.45 / height, 1 - 0.7 / width, 1 - 0.55 / height), title=title)
        axes.set_axisbelow(True)
        yield out, axes
        about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        tight = {"bbox_inches": "tight", "pad_inches": 0.05} if axes.get_legend() or title else {}
        figure.savefig(out, format="svg", transparent=True, metadata=about, **tight)


def _cross(axes: Axes, x: float, y: float, shade: str) -> None:
    """The lines of the model that never knew."""
    axes.axvline(x, color=shade, linestyle=":", linewidth=1)
    axes.axhline(y, color=shade, linestyle=":", linewidth=1)


def _errors(estimate: Estimate) -> list[list[float]]:
    """How far the 95 % interval reaches below and above a value, in per cent."""
    low, high = (estimate.value,) * 2 if math.isnan(estimate.stderr) else estimate.interval
    return [[100 * max(0.0, estimate.value - low)], [100 * max(0.0, high - estimate.value)]]


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _name(name: str) -> str:
    """The name of a run as a legend has it; one that begins with an underscore would be left out."""
    shown = plain_cell(name)[:40]
    return f" {shown}" if shown.startswith("_") else shown
