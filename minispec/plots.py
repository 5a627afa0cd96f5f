"""The benchmark's pictures: speedups, the cost curve, predicted against measured."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minispec.bench import Machine, Row

PICTURES = "speedup.png", "cost_curve.png", "predicted.png"


def save_plots(folder: Path, rows: list["Row"], machine: "Machine") -> None:
    """PICTURES in `folder`, which is there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for name, draw in zip(PICTURES, (speedups, cost, predictions)):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        draw(axes, rows, machine)
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)


def speedups(axes, rows: list["Row"], machine: "Machine") -> None:
    """A group of bars per method, a bar per kind and temperature, with the spread over prompts."""
    groups = list(dict.fromkeys((r.kind, r.temperature) for r in rows))
    methods = list(dict.fromkeys(r.method for r in rows if r.method != "autoregressive"))
    at = {(r.kind, r.temperature, r.method): r for r in rows}
    width = 0.8 / len(groups)
    for g, (kind, temperature) in enumerate(groups):
        places, heights, spread = [], [], [[], []]
        for m, method in enumerate(methods):
            row = at.get((kind, temperature, method))
            if row:
                places.append(m + (g - (len(groups) - 1) / 2) * width)
                heights.append(row.speedup)
                spread[0].append(row.speedup - row.least)
                spread[1].append(row.most - row.speedup)
        axes.bar(places, heights, width, label=f"{kind}, T = {temperature:g}")
        axes.errorbar(places, heights, spread, fmt="none", ecolor="0.4", elinewidth=0.8)
    axes.axhline(1, color="0.3", linewidth=1)
    axes.set_xticks(range(len(methods)), methods, rotation=35, ha="right", fontsize=8)
    axes.set_ylabel("speed over plain decoding")
    axes.legend(fontsize=7, ncols=2)


def cost(axes, rows: list["Row"], machine: "Machine") -> None:
    """The measured curve, and what no code could go below on this machine."""
    counts = range(1, len(machine.curve))
    axes.plot(counts, machine.curve[1:], label="measured")
    axes.axhline(1, color="0.5", linestyle="--", label="free rows")
    floor = machine.floor / machine.pass_seconds
    axes.axhline(floor, color="0.3", linestyle=":", label="each weight read once")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows n of a pass")
    axes.set_ylabel("pass(n) / pass(1)")
    axes.legend()


def predictions(axes, rows: list["Row"], machine: "Machine") -> None:
    """From tokens a pass and the time split of one prompt; where the paper's formula has a value,
    it is a filled point."""
    plain = {(r.kind, r.temperature): r for r in rows if r.method == "autoregressive" and r.split}
    known = [r for r in rows if r.split and r.method != "autoregressive"]
    known = [r for r in known if (r.kind, r.temperature) in plain]
    bound = []
    for r in known:
        base = plain[r.kind, r.temperature].split
        bound.append(r.tokens_per_pass * sum(base.values()) / sum(r.split.values()))
    axes.scatter(bound, [r.overall for r in known], marker="o", facecolors="none",
                 edgecolors="tab:blue", label="by tokens a pass and the time split")  # fmt: skip
    formula = [r for r in known if r.predicted_speedup]
    axes.scatter([r.predicted_speedup for r in formula], [r.overall for r in formula],
                 color="tab:orange", label="by the paper's formula")  # fmt: skip
    most = max([1.0, *bound, *(r.overall for r in known)]) * 1.05
    axes.plot([0, most], [0, most], color="0.5", linestyle="--")
    axes.set_xlabel("predicted speedup")
    axes.set_ylabel("measured speedup, all prompts together")
    axes.legend(fontsize=8)
