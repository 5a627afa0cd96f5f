"""Plots shared by several lessons (a round's tree, a mask, rows of tokens), and source listings.

Accepted is blue, rejected vermilion, new green; colour-blind readers can distinguish them.
"""

import inspect
from collections.abc import Sequence

from IPython.display import Markdown
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


def draw_recursion(
    ax: Axes, hiddens: list[str], tokens: list[str], drafts: list[str], head: str = "head"
) -> None:
    """Draw a head that runs on its own output: a column per step, with its inputs and its draft."""
    arrow = {"arrowstyle": "->", "color": CONTEXT, "shrinkA": 12, "shrinkB": 14}
    for x, (hidden, token, draft) in enumerate(zip(hiddens, tokens, drafts)):
        x *= 2
        box(ax, x - 0.4, 0, hidden, ACCEPTED if x == 0 else "#56B4E9", size=9)
        box(ax, x + 0.4, 0, token, CONTEXT if x == 0 else REJECTED, size=9)
        box(ax, x, 1, head, "white", "black", 9)
        box(ax, x, 2, draft, REJECTED, size=9)
        for start, end in (((x - 0.4, 0), (x, 1)), ((x + 0.4, 0), (x, 1)), ((x, 1), (x, 2))):
            ax.annotate("", end, start, arrowprops=arrow)
        if x // 2 + 1 < len(hiddens):
            ax.annotate("", (x + 1.6, 0), (x, 1), arrowprops=arrow | {"color": "#56B4E9"})
            ax.annotate("", (x + 2.4, 0), (x, 2), arrowprops=arrow | {"color": REJECTED})
    ax.set(xlim=(-1, 2 * len(hiddens) - 1), ylim=(-0.4, 2.4))
    ax.set_axis_off()
