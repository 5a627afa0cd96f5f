"""Pictures that several lessons share: a round's tree, a mask, rows of tokens; and source as text.

Blue is accepted, vermilion rejected, green new: told apart by colour-blind readers too.
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
    """The source of functions or classes of the package, as it is now."""
    return Markdown("```python\n" + "\n".join(map(inspect.getsource, things)) + "```")


def label(token: int, tokenizer: Tokenizer | None = None) -> str:
    """A token's text, its spaces and line ends visible; its id where the font has no glyphs for it,
    or there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    if not text or any(ord(c) > 0x24F and c not in "‘’“”–—…" for c in text):
        return f"#{token}"
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("$", r"\$")


def box(ax: Axes, x: float, y: float, text: str, fill: str, edge: str | None = None, size=8.0):
    """A word in a rounded box; an `edge` other than the fill is for what is not filled."""
    ax.text(
        x, y, text, ha="center", va="center", fontsize=size, zorder=3,
        color="white" if edge is None else edge,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": edge or fill},
    )  # fmt: skip


def places(tree: Tree) -> list[tuple[float, float]]:
    """Of each node: its depth, and a height at which no two boxes meet; the first leaf on top."""
    height: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(child) for child in tree.children(node)]
        if not below:
            below, leaves = [-float(leaves)], leaves + 1
        height[node] = (below[0] + below[-1]) / 2
        return height[node]

    place(0)
    return [(depth, height[node]) for node, depth in enumerate(tree.depths)]


def draw_tree(
    ax: Axes, tree: Tree, path: Sequence[int] | None = None, tokenizer: Tokenizer | None = None,
    fresh: int | None = None, labels: list[str] | None = None, size: float = 8.0,
) -> None:  # fmt: skip
    """A tree from left to right. With a `path` its nodes are blue and the others vermilion, and the
    round's `fresh` token hangs, green, at the path's end. `labels` replace the tokens' text."""
    labels = labels or [label(token, tokenizer) for token in tree.tokens]
    kept, n = set(path or []), len(tree)
    if fresh is not None:  # one more leaf
        tree = Tree([*tree.tokens, fresh], [*tree.parents, path[-1]])
        labels = [*labels, label(fresh, tokenizer)]
    at = places(tree)
    for node, (x, y) in enumerate(at):
        line = {"color": ACCEPTED, "lw": 2} if node in kept else {"color": "#BBBBBB", "lw": 1}
        if node == n:
            line = {"color": FRESH, "lw": 1.5, "ls": "--"}
        if node:
            px, py = at[tree.parents[node]]
            ax.plot([px, x], [py, y], **line)
        colour = CONTEXT if node == 0 or path is None else ACCEPTED if node in kept else REJECTED
        box(ax, x, y, labels[node], *(["white", FRESH] if node == n else [colour]), size=size)
    deepest, low = max(x for x, _ in at), min(y for _, y in at)
    ax.set(xlim=(-0.4, deepest + 0.5), ylim=(low - 0.7, 0.7), yticks=[])
    ax.set_xticks(range(int(deepest) + 1), [f"depth {d}" for d in range(int(deepest) + 1)])
    ax.tick_params(length=0, labelcolor=CONTEXT, labelsize=8)
    ax.spines[:].set_visible(False)


def draw_legend(ax: Axes, names: Sequence[str] = tuple(LEGEND), **options) -> None:
    """What the colours mean."""
    handles = [Patch(color=LEGEND[name], label=name) for name in names]
    ax.legend(handles=handles, frameon=False, fontsize=8, **options)


def draw_mask(ax: Axes, mask: Tensor, labels: list[str], colours: list[str] | None = None) -> None:
    """Which columns each row sees: filled squares, of the row's colour."""
    n = len(labels)
    for i in range(n):
        for j in range(n):
            fill = (colours[i] if colours else ACCEPTED) if mask[i, j] else "#F2F2F2"
            ax.add_patch(Rectangle((j, i), 0.92, 0.92, color=fill))
    ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    middle = [i + 0.46 for i in range(n)]
    ax.set_xticks(middle, labels, rotation=90, fontsize=8)
    ax.set_yticks(middle, labels, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_rows(
    ax: Axes, rows: list[list[str]], colours: list[list[str]], names: list[str], size: float = 8.0
) -> None:
    """Rows of words in coloured cells, the first on top; an empty word leaves its cell out."""
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
    """One head run on its own output: a column for each step, with what it reads and drafts."""
    arrow = {"arrowstyle": "->", "color": CONTEXT, "shrinkA": 12, "shrinkB": 14}
    for x, (hidden, token, draft) in enumerate(zip(hiddens, tokens, drafts)):
        x *= 2
        box(ax, x - 0.4, 0, hidden, ACCEPTED if x == 0 else "#56B4E9", size=9)
        box(ax, x + 0.4, 0, token, CONTEXT if x == 0 else REJECTED, size=9)
        box(ax, x, 1, head, "white", "black", 9)
        box(ax, x, 2, draft, REJECTED, size=9)
        for begin, end in (((x - 0.4, 0), (x, 1)), ((x + 0.4, 0), (x, 1)), ((x, 1), (x, 2))):
            ax.annotate("", end, begin, arrowprops=arrow)
        if x // 2 + 1 < len(hiddens):
            ax.annotate("", (x + 1.6, 0), (x, 1), arrowprops=arrow | {"color": "#56B4E9"})
            ax.annotate("", (x + 2.4, 0), (x, 2), arrowprops=arrow | {"color": REJECTED})
    ax.set(xlim=(-1, 2 * len(hiddens) - 1), ylim=(-0.4, 2.4))
    ax.set_axis_off()
