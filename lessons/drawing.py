"""Plots shared by several lessons (a round's tree, a mask, rows of tokens), and source listings.

Accepted is blue, rejected vermilion, new green; colour-blind readers can distinguish them.
"""

import inspect
from collections.abc import Sequence

from IPython.display import Markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.tree import Tree

ACCEPTED, REJECTED, FRESH, CONTEXT = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
LEGEND = {"accepted": ACCEPTED, "rejected": REJECTED, "fresh": FRESH}


def code(*things) -> Markdown:
    """Show the current source of functions or classes of the package."""
    return Markdown("```python\n" + "\n".join(map(inspect.getsource, things)) + "```")


def label(token: int, tokenizer: Tokenizer | None = None) -> str:
    """Return a token's text with visible spaces and line breaks, or its id if the font lacks glyphs
    for it or there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    if not text or any(ord(c) > 0x24F and c not in "‘’“”–—…" for c in text):
        return f"#{token}"
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("$", r"\$")


def box(ax: Axes, x: float, y: float, text: str, fill: str, edge: str | None = None, size=8.0):
    """Draw text in a rounded, filled box, or, with `edge`, in an outlined one."""
    ax.text(
        x, y, text, ha="center", va="center", fontsize=size, zorder=3,
        color="white" if edge is None else edge,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": edge or fill},
    )  # fmt: skip


def node_positions(tree: Tree) -> list[tuple[float, float]]:
    """Return each node's depth and a height at which no two boxes overlap, with the first leaf at
    the top."""
    height: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        heights = [place(child) for child in tree.children(node)]
        if not heights:
            heights, leaves = [-float(leaves)], leaves + 1
        height[node] = (heights[0] + heights[-1]) / 2
        return height[node]

    place(0)
    return [(depth, height[node]) for node, depth in enumerate(tree.depths)]


def draw_tree(
    ax: Axes, tree: Tree, path: Sequence[int] | None = None, tokenizer: Tokenizer | None = None,
    fresh: int | None = None, labels: list[str] | None = None, size: float = 8.0,
) -> None:  # fmt: skip
    """Draw a tree from left to right. Nodes on `path` are blue and the others vermilion; the
    round's `fresh` token is a green node at the end of `path`. `labels` replace token texts."""
    labels = labels or [label(token, tokenizer) for token in tree.tokens]
    accepted, n = set(path or []), len(tree)
    if fresh is not None:  # one more leaf
        tree = Tree([*tree.tokens, fresh], [*tree.parents, path[-1]])
        labels = [*labels, label(fresh, tokenizer)]
    positions = node_positions(tree)
    for node, (x, y) in enumerate(positions):
        line = {"color": ACCEPTED, "lw": 2} if node in accepted else {"color": "#BBBBBB", "lw": 1}
        if node == n:
            line = {"color": FRESH, "lw": 1.5, "ls": "--"}
        if node:
            px, py = positions[tree.parents[node]]
            ax.plot([px, x], [py, y], **line)
        colour = ACCEPTED if node in accepted else REJECTED
        colour = CONTEXT if node == 0 or path is None else colour
        box(ax, x, y, labels[node], *(["white", FRESH] if node == n else [colour]), size=size)
    deepest, lowest = max(x for x, _ in positions), min(y for _, y in positions)
    ax.set(xlim=(-0.4, deepest + 0.5), ylim=(lowest - 0.7, 0.7), yticks=[])
    ax.set_xticks(range(int(deepest) + 1), [f"depth {d}" for d in range(int(deepest) + 1)])
    ax.tick_params(length=0, labelcolor=CONTEXT, labelsize=8)
    ax.spines[:].set_visible(False)


def draw_legend(ax: Axes, names: Sequence[str] = tuple(LEGEND), **options) -> None:
    """Draw a legend for the colours."""
    handles = [Patch(color=LEGEND[name], label=name) for name in names]
    ax.legend(handles=handles, frameon=False, fontsize=8, **options)


def draw_mask(ax: Axes, mask: Tensor, labels: list[str], colours: list[str] | None = None) -> None:
    """Draw a mask: a square in the row's colour for each column that the row can attend to."""
    n = len(labels)
    for i in range(n):
        for j in range(n):
            fill = (colours[i] if colours else ACCEPTED) if mask[i, j] else "#F2F2F2"
            ax.add_patch(Rectangle((j, i), 0.92, 0.92, color=fill))
    ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    centres = [i + 0.46 for i in range(n)]
    ax.set_xticks(centres, labels, rotation=90, fontsize=8)
    ax.set_yticks(centres, labels, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_rows(
    ax: Axes, rows: list[list[str]], colours: list[list[str]], names: list[str], size: float = 8.0
) -> None:
    """Draw rows of texts in coloured cells, the first at the top; an empty text has no cell."""
    for y, (row, fills) in enumerate(zip(rows, colours)):
        for x, (text, fill) in enumerate(zip(row, fills)):
            if text:
                ax.add_patch(Rectangle((x, y), 0.94, 0.88, color=fill))
                ax.text(x + 0.47, y + 0.44, text, ha="center", va="center", color="white",
                        fontsize=size)  # fmt: skip
    ax.set(xlim=(0, max(map(len, rows))), ylim=(len(rows), 0), xticks=[])
    ax.set_yticks([y + 0.44 for y in range(len(rows))], names, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# ---- pictures of single lessons ------------------------------------------------------------------

PALE = "#DDDDDD"  # context, or a draft that was never looked at
WORDS = "a", "small", "bird", "who", "sang", "a"  # a context of two tokens, and four drafts
CHOICES = "bird", "who", "could", "a", "bird"  # the model's choices after "small", "bird", …


def cells(ax: Axes, y: float, texts: Sequence[str], fills: Sequence[str], x: float = 0.0) -> None:
    """Draw a row of texts in cells; a `fill` that starts with ! is an outline in that colour."""
    for i, (text, fill) in enumerate(zip(texts, fills)):
        outline, colour = fill.startswith("!"), fill.removeprefix("!")
        ax.add_patch(Rectangle((x + i, y), 0.92, 0.8, facecolor="white" if outline else colour,
                               edgecolor=colour, ls="--" if outline else "-"))  # fmt: skip
        ink = colour if outline else "black" if colour == PALE else "white"
        ax.text(x + i + 0.46, y + 0.4, text, ha="center", va="center", color=ink, fontsize=9)


def draw_verbs() -> None:
    """Draw one round in five verbs."""
    context = [PALE] * 2
    rows = {  # the column of the first cell, texts, fills, a note
        "propose": (0, WORDS, [*context, *[CONTEXT] * 4], "somebody guesses four tokens"),
        "score": (2, CHOICES, [FRESH] * 5, "one pass: the model's choice at each place"),
        "accept": (0, WORDS, [*context, ACCEPTED, ACCEPTED, REJECTED, PALE],
                   "equal, equal, different: stop"),
        "commit": (0, WORDS, [*context, ACCEPTED, ACCEPTED, f"!{CONTEXT}", f"!{CONTEXT}"],
                   "keep the cache rows of accepted tokens"),
        "yield": (2, WORDS[2:4] + CHOICES[2:3], [ACCEPTED, ACCEPTED, FRESH],
                  "three tokens from one pass"),
    }  # fmt: skip
    figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
    for y, (verb, (x, texts, fills, note)) in enumerate(rows.items()):
        ax.text(-0.3, y + 0.4, verb, ha="right", va="center", fontsize=10, weight="bold")
        ax.text(7.3, y + 0.4, note, va="center", fontsize=10)
        cells(ax, y, texts, fills, x)
    finish(ax, (-1.6, 11.6), (5, -0.1))


def draw_guess(guess: list[str], choices: list[str], accepted: int) -> None:
    """Draw guessed tokens over the model's own choices, of which there is one more."""
    fills = [ACCEPTED] * accepted + [REJECTED] * (accepted < len(guess))
    figure, ax = plt.subplots(figsize=(min(10, 2 + 0.9 * len(choices)), 1.4), layout="constrained")
    cells(ax, 0, guess, fills + [PALE] * (len(guess) - len(fills)))
    cells(ax, 1, choices, [PALE] * accepted + [FRESH] + [PALE] * (len(choices) - accepted - 1))
    for y, name in enumerate(["your guess", "the model's"]):
        ax.text(-0.2, y + 0.4, name, ha="right", va="center", fontsize=10)
    finish(ax, (-2.2, len(choices)), (2, -0.1))


def draw_cost(rows: Sequence[int], cost: Sequence[float]) -> None:
    """Draw the cost of a pass over n tokens, in passes over one."""
    figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
    ax.plot(rows, rows, "--", color=CONTEXT, label="n passes over one token")
    ax.plot(rows, cost, "o-", color=ACCEPTED, label="one pass over n tokens")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(rows, [str(n) for n in rows])
    ax.set_yticks(rows, [str(n) for n in rows])
    ax.set(xlabel="tokens n", ylabel="passes over one token")
    ax.legend(frameon=False, fontsize=10)
    plt.show()


def draw_sampled_round(p: Tensor, q: Tensor) -> None:
    """Draw p and q, split into what they share and what only one of them has, next to a round whose
    second draft is rejected."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.2), width_ratios=[3, 4], layout="constrained"
    )
    shared = [min(a, b) for a, b in zip(p.tolist(), q.tolist())]
    x = range(len(p))
    for offset, probs, fill in ((-0.2, p, FRESH), (0.2, q, REJECTED)):
        at = [i + offset for i in x]
        left.bar(at, shared, 0.38, color=ACCEPTED)
        left.bar(at, [a - b for a, b in zip(probs.tolist(), shared)], 0.38, shared, color=fill)
    left.set_xticks([i + o for i in x for o in (-0.2, 0.2)], ["p", "q"] * len(p), fontsize=9)
    left.tick_params(axis="x", length=0)
    for i in x:
        left.text(i, -0.09, f"token {i}", ha="center", va="top", fontsize=9,
                  transform=left.get_xaxis_transform())  # fmt: skip
    names = {ACCEPTED: "min(p, q)", FRESH: "p − min(p, q)", REJECTED: "q − min(p, q)"}
    left.legend([Patch(color=c) for c in names], names.values(), frameon=False, fontsize=9)
    draw_one_rejection(right)
    left.set(ylabel="probability")
    left.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_one_rejection(ax: Axes) -> None:
    """Draw a round of three drafts, of which the second is rejected."""
    cells(ax, 0, ["x₁", "x₂", "x₃"], [CONTEXT] * 3)
    cells(ax, 1, ["p₁", "p₂", "p₃", "p₄"], [FRESH] * 4)
    cells(ax, 2, ["x₁", "x₂", "x₃"], [ACCEPTED, REJECTED, PALE])
    cells(ax, 3, ["x₁", "t"], [ACCEPTED, FRESH])
    notes = ["drawn from q₁, q₂, q₃", "from one pass", "x₁: the coin accepts; x₂: it rejects",
             "t is drawn instead of x₂: from what?"]  # fmt: skip
    for y, (verb, note) in enumerate(zip(["propose", "score", "accept", "yield"], notes)):
        ax.text(-0.25, y + 0.4, verb, ha="right", va="center", fontsize=10, weight="bold")
        ax.text(4.2, y + 0.4, note, va="center", fontsize=10)
    finish(ax, (-1.9, 9.6), (4, -0.1), show=False)


def draw_overlaps(overlaps: dict[str, Tensor]) -> None:
    """Draw how Σ min(p, q) is distributed over the tokens of texts of several kinds."""
    figure, axes = plt.subplots(
        1, len(overlaps), figsize=(8, 2.6), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (name, values) in zip(axes, overlaps.items()):
        share = [1 / len(values)] * len(values)
        ax.hist(values.tolist(), 10, (0, 1), weights=share, color=ACCEPTED, edgecolor="white")
        mean = float(values.mean())
        ax.axvline(mean, color="black", ls="--", lw=1)
        ax.set(xlabel="Σ min(p, q)", title=f"{name}: α = {mean:.2f}")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="share of the tokens")
    plt.show()


def finish(ax: Axes, xlim: tuple, ylim: tuple, show: bool = True) -> None:
    """Set the limits of a drawing without axes, and show it."""
    ax.set(xlim=xlim, ylim=ylim)
    ax.set_axis_off()
    if show:
        plt.show()


# ---- lesson 06 -----------------------------------------------------------------------------------

TEXT = "a", "small", "bird", "who"  # the target has read all but the newest token
SELF_DRAFTS = "sang", "all", "day"


def draw_self_chain() -> None:
    """Draw a head that runs on its own output: its inputs and outputs, a column per row, and the
    rows of its cache after drafting, after the target's pass and in the next round."""
    states = [*(f"h({word})" for word in TEXT[:3]), "h′", "h″"]
    tokens = [*TEXT[1:], *SELF_DRAFTS[:2]]
    own = [ACCEPTED] * 3 + [REJECTED] * 2
    figure, ax = plt.subplots(figsize=(10, 4.7), layout="constrained")
    arrow = {"arrowstyle": "->", "color": CONTEXT}
    for x in range(5):
        box(ax, x + 0.46, 1.5, "head", "white", "black", 9)
        ax.annotate("", (x + 0.46, 1.75), (x + 0.46, 2.3), arrowprops=arrow)
        if x >= 2:
            ax.annotate("", (x + 0.46, 0.8), (x + 0.46, 1.25), arrowprops=arrow)
    for x in (2, 3):  # output and draft are the next inputs
        ax.annotate("", (x + 1.0, 2.7), (x + 0.68, 1.6), arrowprops=arrow | {"color": REJECTED})
        ax.plot([x + 0.92, x + 0.96, x + 0.96], [0.4, 0.4, 3.6], color=REJECTED, lw=1)
        ax.annotate("", (x + 1.04, 3.6), (x + 0.94, 3.6), arrowprops=arrow | {"color": REJECTED})
    cells(ax, 0, SELF_DRAFTS, [CONTEXT] * 3, 2)
    cells(ax, 2.3, states, own)
    cells(ax, 3.2, tokens, own)
    pairs = [f"{state}, {token}" for state, token in zip(states, tokens)]
    cells(ax, 4.6, pairs, own)
    cells(ax, 5.6, pairs, [ACCEPTED] * 3 + [f"!{CONTEXT}"] * 2)
    cells(ax, 6.6, [*pairs[:3], "h(who), sang", "h(sang), to"], [ACCEPTED] * 5)
    rows = {
        0.4: ("drafts", "the text goes on: who sang all day?"),
        2.7: ("hidden state", "blue: from the target\nred: the head’s own output"),
        3.6: ("token after it", ""),
        5.0: ("cache with drafts", ""),
        6.0: ("after the pass", "“sang” accepted, “all” rejected,\nfresh token “to”"),
        7.0: ("next round", "two new pairs"),
    }
    for y, (name, note) in rows.items():
        ax.text(-0.12, y, name, ha="right", va="center", fontsize=10, weight="bold")
        ax.text(5.1, y, note, va="center", fontsize=10)
    finish(ax, (-1.35, 7.2), (7.5, -0.1))


def draw_acceptance(shares: dict[str, tuple[list[float], list[float]]]) -> None:
    """Draw how often each draft is accepted, of all rounds and of those that reach it, for several
    kinds of text."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    titles = "of all rounds", "of the rounds that accepted the draft before"
    for i, (ax, title) in enumerate(zip(axes, titles)):
        for (kind, both), colour in zip(shares.items(), (ACCEPTED, FRESH, REJECTED)):
            ax.plot(range(1, len(both[i]) + 1), both[i], "o-", color=colour, label=kind)
        ax.set(ylim=(0, 1), xlabel="draft", xticks=range(1, len(both[i]) + 1))
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="share accepted")
    axes[0].legend(frameon=False, fontsize=9)
    plt.show()


def draw_speeds(speeds: dict[str, dict[str, tuple[list[float], list[float]]]]) -> None:
    """Draw the speed relative to plain decoding for K = 1, 2, …: kind of text -> vocabulary ->
    (predicted, measured)."""
    figure, axes = plt.subplots(
        1, len(speeds), figsize=(8, 3), sharey=True, layout="constrained", squeeze=False
    )
    for ax, (kind, by_vocabulary) in zip(axes[0], speeds.items()):
        for (name, both), colour in zip(by_vocabulary.items(), (REJECTED, ACCEPTED)):
            for values, style, what in zip(both, ("--", "o-"), ("predicted", "measured")):
                k = range(1, len(values) + 1)
                ax.plot(k, values, style, color=colour, label=f"{name}, {what}")
        ax.axhline(1, color=CONTEXT, lw=1)
        ax.set(xlabel="K", xticks=k)
        ax.set_title(kind, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set(ylabel="speed, plain decoding = 1")
    axes[0, -1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    plt.show()
