"""Plots shared by several lessons (a round's tree, a mask, rows of tokens), and source listings."""

import inspect
import math
from collections.abc import Sequence

from IPython.display import Markdown
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate.palette import (
    ACCEPTED,
    CONTEXT,
    FRESH,
    HIDDEN,
    INK,
    LIGHT_INK,
    LINE,
    ORANGE,
    PALE,
    PURPLE,
    REJECTED,
    SKY,
)
from minispec.sampling import Sampling, warp
from minispec.tree import Step, Tree

plt.rcParams |= {
    "figure.dpi": 100,  # whatever the front end's default
    # no ground, for light and dark themes. If all tick labels were as dark, Jupyter would add one
    "figure.facecolor": "none", "axes.facecolor": "none", "ytick.color": LIGHT_INK,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"], INK),
}  # fmt: skip


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


def box(ax: Axes, x: float, y: float, text: str, fill: str, edge: str | None = None, size=9.0):
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
    ax: Axes, tree: Tree, labels: list[str], path: Sequence[int] | None = None
) -> None:
    """Draw a tree from left to right. Nodes on `path` are blue and the others vermilion."""
    accepted = set(path or [])
    positions = node_positions(tree)
    for node, (x, y) in enumerate(positions):
        line = {"color": ACCEPTED, "lw": 2} if node in accepted else {"color": LINE, "lw": 1}
        if node:
            px, py = positions[tree.parents[node]]
            ax.plot([px, x], [py, y], **line)
        colour = ACCEPTED if node in accepted else REJECTED
        box(ax, x, y, labels[node], CONTEXT if node == 0 or path is None else colour)
    deepest, lowest = max(x for x, _ in positions), min(y for _, y in positions)
    ax.set(xlim=(-0.4, deepest + 0.5), ylim=(lowest - 0.7, 0.7), yticks=[])
    ax.set_xticks(range(int(deepest) + 1), [f"depth {d}" for d in range(int(deepest) + 1)])
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)


def draw_mask(ax: Axes, mask: Tensor, labels: list[str], colours: list[str] | None = None) -> None:
    """Draw a mask: a square in the row's colour for each column that the row can attend to."""
    n = len(labels)
    for i in range(n):
        for j in range(n):
            fill = (colours[i] if colours else ACCEPTED) if mask[i, j] else HIDDEN
            ax.add_patch(Rectangle((j, i), 0.92, 0.92, color=fill))
    ax.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
    centres = [i + 0.46 for i in range(n)]
    ax.set_xticks(centres, labels, rotation=90, fontsize=9)
    ax.set_yticks(centres, labels, fontsize=9)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_rows(ax: Axes, rows: list[list[str]], colours: list[list[str]], names: list[str]) -> None:
    """Draw rows of texts in coloured cells, the first at the top; an empty text has no cell."""
    for y, (row, fills) in enumerate(zip(rows, colours)):
        for x, (text, fill) in enumerate(zip(row, fills)):
            if text:
                ax.add_patch(Rectangle((x, y), 0.94, 0.88, color=fill))
                ax.text(x + 0.47, y + 0.44, text, ha="center", va="center", color="white",
                        fontsize=9)  # fmt: skip
    ax.set(xlim=(0, max(map(len, rows))), ylim=(len(rows), 0), xticks=[])
    ax.set_yticks([y + 0.44 for y in range(len(rows))], names, fontsize=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# ---- pictures of single lessons ------------------------------------------------------------------

WORDS = "a", "small", "bird", "who", "sang", "a"  # a context of two tokens, and four drafts
CHOICES = "bird", "who", "could", "a", "bird"  # the model's choices after "small", "bird", …


def cells(ax: Axes, y: float, texts: Sequence[str], fills: Sequence[str], x: float = 0.0) -> None:
    """Draw a row of texts in cells; a `fill` that starts with ! is an outline in that colour."""
    for i, (text, fill) in enumerate(zip(texts, fills)):
        outline, colour = fill.startswith("!"), fill.removeprefix("!")
        ax.add_patch(Rectangle((x + i, y), 0.92, 0.8, facecolor="none" if outline else colour,
                               edgecolor=colour, ls="--" if outline else "-"))  # fmt: skip
        ink = colour if outline else "black" if colour == PALE else "white"
        ax.text(x + i + 0.46, y + 0.4, text, ha="center", va="center", color=ink, fontsize=9)


def draw_verbs() -> None:
    """Draw one round in five verbs. Pale: what the cache has at the start."""
    old, newest = PALE, CONTEXT
    rows = {  # the column of the first cell, texts, fills, a note
        "propose": (0, WORDS, [old, newest, *[f"!{CONTEXT}"] * 4], "somebody guesses four tokens"),
        "score": (1, WORDS[1:], [newest, *[f"!{CONTEXT}"] * 4], "one pass over five tokens:"),
        "": (2, CHOICES, [FRESH] * 5, "the model’s choice after each of them"),
        "accept": (2, WORDS[2:], [ACCEPTED, ACCEPTED, REJECTED, f"!{CONTEXT}"],
                   "equal, equal, different: stop"),
        "commit": (0, WORDS[:4], [old, newest, ACCEPTED, ACCEPTED],
                   "keep the cache’s rows of these tokens"),
        "yield": (2, WORDS[2:4] + CHOICES[2:3], [ACCEPTED, ACCEPTED, FRESH],
                  "three tokens from one pass"),
    }  # fmt: skip
    draw_steps(rows, (9, 3.5), (-1.6, 7.3, 11.6))


def draw_steps(rows: dict[str, tuple], size: tuple, columns: tuple[float, float, float]) -> None:
    """Draw the steps of a round. `rows` maps a step's name to the column of its first cell, texts,
    fills and a note; `columns` are where the picture begins, the notes begin and it ends."""
    left, notes, right = columns
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    for y, (name, (x, texts, fills, note)) in enumerate(rows.items()):
        ax.text(-0.3, y + 0.4, name, ha="right", va="center", fontsize=10, weight="bold")
        ax.text(notes, y + 0.4, note, va="center", fontsize=10)
        cells(ax, y, texts, fills, x)
    finish(ax, (left, right), (len(rows), -0.1))


def draw_guess(guess: list[str], choices: list[str], accepted: int) -> None:
    """Draw guessed tokens over the model's own choices, of which there is one more. Dashed: what
    follows a wrong guess."""
    useless = [f"!{CONTEXT}"] * (len(choices) - accepted - 1)
    equal = [ACCEPTED] * accepted
    figure, ax = plt.subplots(figsize=(min(10, 3 + 0.9 * len(choices)), 1.4), layout="constrained")
    cells(ax, 0, guess, [*equal, REJECTED, *useless])
    cells(ax, 1, choices, [*equal, FRESH, *useless])
    for y, name in enumerate(["your guess", "the model’s choice"]):
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
    draw_shares(left, p.tolist(), q.tolist())
    draw_one_rejection(right)
    plt.show()


def draw_shares(ax: Axes, p: Sequence[float], q: Sequence[float]) -> None:
    """Draw p and q next to each other, split into what they share and what only one has."""
    shared = [min(a, b) for a, b in zip(p, q)]
    x = range(len(p))
    for offset, probs, fill in ((-0.2, p, FRESH), (0.2, q, REJECTED)):
        at = [i + offset for i in x]
        ax.bar(at, shared, 0.38, color=ACCEPTED)
        ax.bar(at, [a - b for a, b in zip(probs, shared)], 0.38, shared, color=fill)
    ax.set_xticks([i + o for i in x for o in (-0.2, 0.2)], ["p", "q"] * len(p), fontsize=9)
    ax.tick_params(axis="x", length=0)
    for i in x:
        ax.text(i, -0.09, f"token {i}", ha="center", va="top", fontsize=9,
                transform=ax.get_xaxis_transform())  # fmt: skip
    names = {ACCEPTED: "min(p, q)", FRESH: "p − min(p, q)", REJECTED: "q − min(p, q)"}
    ax.legend([Patch(color=c) for c in names], names.values(), frameon=False, fontsize=9)
    ax.set(ylabel="probability")
    ax.spines[["top", "right"]].set_visible(False)


def draw_overlap(p: Sequence[float], q: Sequence[float]) -> None:
    """Draw p and q with what they share, next to the residual."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.2), width_ratios=[3, 2], layout="constrained"
    )
    draw_shares(left, p, q)
    missing = [max(0.0, a - b) for a, b in zip(p, q)]
    distance, x = sum(missing), range(len(p))
    right.bar(x, [m / max(distance, 1e-9) for m in missing], 0.6, color=FRESH)
    right.set_xticks(x, [f"token {i}" for i in x], fontsize=9)
    right.tick_params(axis="x", length=0)
    right.spines[["top", "right"]].set_visible(False)
    titles = (f"Σ min(p, q) = {1 - distance:.2f} accepted, TV(p, q) = {distance:.2f}",
              f"the residual, after {distance:.0%} of the drafts")  # fmt: skip
    for ax, title in zip((left, right), titles):
        ax.set(ylim=(0, 1.05))
        ax.set_title(title, fontsize=10)
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
    """Draw how β = Σ min(p, q) is distributed over the tokens of texts of several kinds."""
    figure, axes = plt.subplots(
        1, len(overlaps), figsize=(8, 2.6), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (name, values) in zip(axes, overlaps.items()):
        share = [1 / len(values)] * len(values)
        ax.hist(values.tolist(), 10, (0, 1), weights=share, color=ACCEPTED, edgecolor="white")
        mean = float(values.mean())
        ax.axvline(mean, color=INK, ls="--", lw=1)
        ax.set(xlabel="β = Σ min(p, q)", title=f"{name}: α = {mean:.2f}")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="share of the tokens")
    plt.show()


def finish(ax: Axes, xlim: tuple, ylim: tuple, show: bool = True) -> None:
    """Set the limits of a drawing without axes, and show it."""
    ax.set(xlim=xlim, ylim=ylim)
    ax.set_axis_off()
    if show:
        plt.show()


# ---- lesson 01 -----------------------------------------------------------------------------------


def draw_tree_round(
    tree: Tree, path: Sequence[int], labels: list[str], prefix: list[str], length: int
) -> None:
    """Draw a tree, its mask, and the rows of the cache before and after the path is committed.
    `prefix` labels the last of `length` committed rows."""
    columns = max(4, 1 + max(tree.depths))  # of the tree
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(6.9 + 0.9 * columns, 0.36 * (len(tree) + len(prefix)) + 0.9),
        width_ratios=[columns, 3.9, 3.9], layout="constrained",
    )  # fmt: skip
    numbered = [f"{node}: {text}" for node, text in enumerate(labels)]
    draw_tree(left, tree, numbered, path)
    left.set_title("the tree", fontsize=10)
    fills = [CONTEXT, *(ACCEPTED if i in path else REJECTED for i in range(1, len(tree)))]
    draw_tree_mask(middle, tree, fills, numbered, prefix)
    draw_moving_rows(right, path, fills, numbered, prefix, length - len(prefix))
    plt.show()


def draw_tree_mask(
    ax: Axes, tree: Tree, fills: list[str], labels: list[str], prefix: list[str]
) -> None:
    """Draw which columns, the committed rows and the nodes, each node sees."""
    n, start = len(tree), len(prefix)
    seen = [[True] * start + row for row in tree.mask.tolist()]
    for i in range(n):
        for j in range(start + n):
            ax.add_patch(Rectangle((j, i), 0.9, 0.9, color=fills[i] if seen[i][j] else HIDDEN))
    ax.set_xticks([j + 0.45 for j in range(start + n)], [*prefix, *map(str, range(n))], fontsize=9)
    for tick in ax.get_xticklabels()[:start]:
        tick.set_rotation(90)
    ax.set_yticks([i + 0.45 for i in range(n)], labels, fontsize=9)
    ax.set(xlim=(-0.1, start + n), ylim=(n, -0.1), aspect="equal")
    ax.set_title("the mask: what each node sees", fontsize=10)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_moving_rows(
    ax: Axes, path: Sequence[int], fills: list[str], labels: list[str], prefix: list[str],
    first: int,
) -> None:  # fmt: skip
    """Draw the rows of the cache, from row `first` on, before and after a commit."""
    start, n = len(prefix), len(fills)
    before = [*zip(prefix, [PALE] * start), *zip(labels, fills)]
    after = before[:start] + [before[start + node] for node in path]
    after += [("", "")] * (start + n - len(after))
    for x, rows in ((0, before), (3.4, after)):
        for y, (text, fill) in enumerate(rows):
            ax.add_patch(Rectangle((x, y), 2, 0.88, facecolor=fill or "none",
                                   edgecolor=fill or PALE, ls="-" if fill else "--"))  # fmt: skip
            ink = "black" if fill == PALE else "white"
            ax.text(x + 1, y + 0.44, text, ha="center", va="center", color=ink, fontsize=9)
    for i, node in enumerate(path):
        arrow = {"arrowstyle": "->", "color": fills[node], "lw": 1.2}
        ax.annotate("", (3.4, start + i + 0.44), (2, start + node + 0.44), arrowprops=arrow)
    for y in range(start + n):
        ax.text(-0.15, y + 0.44, str(first + y), ha="right", va="center", fontsize=9)
    end = start + len(path)
    ax.plot([3.3, 5.9], [end - 0.06] * 2, color=INK, lw=1.2)
    ax.text(5.5, end - 0.1, "length", ha="left", va="bottom", fontsize=9)
    ax.text(1, -0.2, "after the pass", ha="center", va="bottom", fontsize=9)
    ax.text(4.4, -0.2, "after commit", ha="center", va="bottom", fontsize=9)
    ax.set_title("rows of the cache", fontsize=10)
    finish(ax, (-0.8, 6.4), (start + n, -0.9), show=False)


# ---- lesson 02 -----------------------------------------------------------------------------------


def draw_warping(tokens: list[str], logits: Tensor, sampling: Sampling, uniform: float) -> None:
    """Draw how logits become a token: the distribution after each warper, and the draw by a
    uniform number. What a step removes is pale."""
    t, k, p = sampling.temperature, sampling.top_k, sampling.top_p
    steps = {
        f"temperature {t:g}": Sampling(t), f"top-k {k}": Sampling(t, k),
        f"top-p {p:g}": Sampling(t, k, p),
    }  # fmt: skip
    figure, axes = plt.subplots(
        1, 5, figsize=(10, 2.9), sharey=True, width_ratios=[3, 3, 3, 3, 2], layout="constrained"
    )
    rows, last = range(len(tokens)), None
    axes[0].barh(rows, logits.tolist(), color=CONTEXT)
    axes[0].set_title("logits", fontsize=10)
    for ax, (title, settings) in zip(axes[1:], steps.items()):
        probs = warp(logits[None], settings)[0].tolist()
        ax.barh(rows, probs, color=ACCEPTED)
        if last:
            gone = [x if not kept else 0.0 for x, kept in zip(last, probs)]
            ax.barh(rows, gone, color=PALE)
        ax.set(xlim=(0, 0.62))
        ax.set_title(title, fontsize=10)
        last = probs
    draw_uniform(axes[4], last, uniform)
    axes[0].set_yticks(rows, tokens, fontsize=10)
    axes[0].invert_yaxis()
    for ax in axes:
        ax.tick_params(labelsize=9, axis="x")
        ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_uniform(ax: Axes, probs: list[float], uniform: float) -> None:
    """Draw the probabilities as pieces of the line from 0 to 1, which runs downwards over the rows
    of the picture, and the uniform number that falls into one of them."""
    height, start = len(probs), 0.0
    for token, p in enumerate(probs):
        chosen = start <= uniform < start + p
        top, size = start * height - 0.5, p * height
        ax.add_patch(Rectangle((0, top), 0.5, size, ec="white", fc=FRESH if chosen else ACCEPTED))
        if p > 0.05:
            ax.text(0.25, top + size / 2, str(token), ha="center", va="center", color="white",
                    fontsize=9)  # fmt: skip
        start += p
    ax.annotate(f"u = {uniform:g}", (0.5, uniform * height - 0.5), (0.72, uniform * height - 0.5),
                va="center", fontsize=10, arrowprops={"arrowstyle": "->"})  # fmt: skip
    ax.set(xlim=(0, 1.4), xticks=[])
    ax.set_title("draw", fontsize=10)
    ax.spines[["bottom", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


# ---- lesson 04 -----------------------------------------------------------------------------------

STATES = {"accepted": ACCEPTED, "rejected": REJECTED, "not reached": PALE, "fresh": FRESH}
CHAIN = "bird was sad because it could not fly to the nest of its".split()
BUSH = "bird was sad lost who sang could not fly sing only lived in".split()
BUSH_PARENTS = [-1, 0, 1, 1, 0, 4, 4, 6, 7, 7, 6, 4, 0]


def node_states(tree: Tree, path: Sequence[int]) -> list[str]:
    """Each node's state: on the `path`, tried in vain, or never looked at."""
    accepted = dict(zip(path, path[1:]))  # node -> its accepted child
    tried = [
        parent in path and node < accepted.get(parent, len(tree))
        for node, parent in enumerate(tree.parents)
    ]
    return [
        "accepted" if node in path else "rejected" if tried[node] else "not reached"
        for node in range(len(tree))
    ]


def draw_walk(ax: Axes, tree: Tree, path: Sequence[int], labels: list[str], fresh: str) -> None:
    """Draw a tree from left to right, coloured by the state of its nodes, with the `fresh` token at
    the end of `path`."""
    states = [*node_states(tree, path), "fresh"]
    tree, labels = Tree([*tree.tokens, 0], [*tree.parents, path[-1]]), [*labels, fresh]
    positions = node_positions(tree)
    for node, (x, y) in enumerate(positions):
        if node:
            colour = STATES[states[node]]
            px, py = positions[tree.parents[node]]
            # level on the last stretch, so that no edge runs behind the label of a sibling
            ax.plot([px, x - 0.3, x], [py, y, y], color=LINE if colour == PALE else colour,
                    lw=2 if states[node] == "accepted" else 1)  # fmt: skip
        fill = STATES[states[node]] if node else CONTEXT
        ax.text(
            x, y, labels[node], ha="center", va="center", fontsize=9, zorder=3,
            color="black" if fill == PALE else "white",
            bbox={"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": fill},
        )  # fmt: skip
    deepest, lowest = max(x for x, _ in positions), min(y for _, y in positions)
    finish(ax, (-0.45, deepest + 0.55), (lowest - 0.6, 0.6), show=False)


def draw_states_legend(ax: Axes, **options) -> None:
    handles = [Patch(color=colour, label=name) for name, colour in STATES.items()]
    ax.legend(handles=handles, frameon=False, fontsize=9, **options)


def draw_two_bets() -> None:
    """Draw twelve drafts as a chain and as a tree, in a round whose likeliest draft is wrong."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10, 4.8), height_ratios=[2, 8], layout="constrained"
    )
    draw_walk(top, Tree.chain(0, [0] * 12), [0], CHAIN, "who")
    draw_walk(bottom, Tree([0] * 13, BUSH_PARENTS), [0, 4, 6, 7], BUSH, "swim")
    for ax, kind, emitted in ((top, "chain", "1 token"), (bottom, "tree", "4 tokens")):
        ax.set_title(f"12 drafts as a {kind}: {emitted} from one pass", fontsize=10, loc="left")
    draw_states_legend(bottom, loc="lower right")
    plt.show()


def draw_ranks(paths: Sequence[Sequence[int]], gains: Sequence[float]) -> None:
    """Draw a tree of rank paths. Each node shows its rank and its gain."""
    order = sorted(range(len(paths)), key=lambda i: tuple(paths[i]))
    index = {tuple(paths[i]): n for n, i in enumerate(order, start=1)}
    tree = Tree([0] * (len(paths) + 1),
                [-1, *(index.get(tuple(paths[i][:-1]), 0) for i in order)])  # fmt: skip
    labels = ["root", *(f"rank {paths[i][-1]}: {gains[i]:.3f}" for i in order)]
    leaves = sum(not tree.children(node) for node in range(len(tree)))
    deepest = max(tree.depths)
    figure, ax = plt.subplots(figsize=(2 + 3 * deepest, 0.7 + 0.33 * leaves), layout="constrained")
    draw_tree(ax, tree, labels)
    ax.set_xticks(range(deepest + 1), ["", *(f"head {k}" for k in range(deepest))], fontsize=9)
    plt.show()


def draw_sizes(
    expected: dict[int, float], tokens: dict[str, float], speed: dict[str, float]
) -> None:
    """Draw tokens per pass, and speed relative to plain decoding, against the nodes of the tree.
    `expected` has these sizes; `tokens` and `speed` also have the chain of 4."""
    sizes = list(expected)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(sizes, expected.values(), "s--", color=CONTEXT, label="tree, expected")
    for ax, measured in (left, tokens), (right, speed):
        of_trees = [measured[f"tree of {n}"] for n in sizes]
        ax.plot(sizes, of_trees, "o-", color=ACCEPTED, label="tree, measured")
        ax.plot(4, measured["chain of 4"], "D", color=ORANGE, label="chain of 4, measured")
    right.axhline(1, color=CONTEXT, ls="--", label="plain decoding")
    left.set(ylabel="tokens per pass")
    right.set(ylabel="times plain decoding")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.set(xlabel="nodes below the root")
        ax.legend(frameon=False, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_round(tree: Tree, path: Sequence[int], fresh: int, tokenizer: Tokenizer) -> None:
    """Draw a real round: its tree, coloured, and the fresh token."""
    leaves = 1 + sum(not tree.children(node) for node in range(len(tree)))
    figure, ax = plt.subplots(
        figsize=(2 + 1.7 * max(tree.depths), 0.5 + 0.33 * leaves), layout="constrained"
    )
    labels = [label(token, tokenizer) for token in tree.tokens]
    draw_walk(ax, tree, path, labels, label(fresh, tokenizer))
    draw_states_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    plt.show()


def draw_lively_round(rounds: Sequence[Step], tokenizer: Tokenizer) -> None:
    """Draw a round with several accepted drafts and several rejected ones."""

    def interest(step: Step) -> tuple[int, int]:
        accepted, rejected = len(step.path) - 1, node_states(step.tree, step.path).count("rejected")
        return min(accepted, rejected), accepted

    step = max(rounds, key=interest)
    draw_round(step.tree, step.path, step.tokens[-1], tokenizer)


# ---- lesson 05: Jacobi and lookahead decoding ----------------------------------------------------

BLOCK = "bird", "sat", "on", "the", "mat"  # a guess at what follows "a small"
BLOCK_CHOICES = "bird", "who", "on", "a", "branch", "."  # the model's, after each of these words


def draw_jacobi_round() -> None:
    """Draw a round of Jacobi decoding, whose choices become the next guess."""
    context = [PALE] * 2
    words = ["a", "small"]
    rest = [*BLOCK_CHOICES[2:], BLOCK[-1]]
    rows = {  # the column of the first cell, texts, fills, a note
        "guess": (0, [*words, *BLOCK], [*context, *[CONTEXT] * 5], "any five tokens"),
        "score": (2, BLOCK_CHOICES, [FRESH] * 6, "one pass: the model's choice at each place"),
        "accept": (0, [*words, *BLOCK], [*context, ACCEPTED, REJECTED, *[PALE] * 3],
                   "equal, different: stop"),
        "yield": (2, BLOCK_CHOICES[:2], [ACCEPTED, FRESH], "two tokens from one pass"),
        "next guess": (4, rest, [CONTEXT] * 4 + [f"!{CONTEXT}"], "the choices that are left"),
    }  # fmt: skip
    draw_steps(rows, (10, 2.8), (-2.0, 9.3, 14.4))


def draw_jacobi(rows: list[list[int]], tokenizer: Tokenizer) -> None:
    """Draw guesses, pass by pass, the last of which is right. Dashed: two or more tokens in a row
    that the final text has elsewhere."""
    final = rows[-1]
    pairs = set(zip(final, final[1:]))
    figure, ax = plt.subplots(
        figsize=(10.5, 0.6 + 0.27 * len(rows)), layout="constrained"
    )  # fmt: skip
    for y, row in enumerate(rows):
        texts = [label(token, tokenizer) for token in row]
        texts = [text if len(text) <= 9 else f"{text[:8]}…" for text in texts]
        fills = [REJECTED] * len(row)
        for i, pair in enumerate(zip(row, row[1:])):
            if pair in pairs:
                fills[i] = fills[i + 1] = f"!{REJECTED}"
        for i in range(len(row)):
            if row[: i + 1] == final[: i + 1]:
                fills[i] = ACCEPTED
        cells(ax, y, texts, fills)
        name = f"pass {y}" if y else "guess"
        ax.text(-0.2, y + 0.4, name, ha="right", va="center", fontsize=9)
    handles = [
        Patch(color=ACCEPTED, label="settled"),
        Patch(color=REJECTED, label="not settled"),
        Patch(facecolor="none", edgecolor=REJECTED, ls="--", label="elsewhere in the text"),
    ]
    ax.legend(handles=handles, frameon=False, fontsize=9, ncols=3, loc="lower center",
              bbox_to_anchor=(0.5, 1))  # fmt: skip
    finish(ax, (-1.1, len(final)), (len(rows), -0.1))


def draw_window(tree: Tree, mask: Tensor) -> None:
    """Draw a window with W = 4 and N = 3, by position, and the mask of a pass over a tree (named by
    the letters of the alphabet) and this window."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 4.6), width_ratios=[5, 4], layout="constrained"
    )
    fills = [FRESH, ORANGE, f"!{CONTEXT}"]
    for r, name in enumerate(["row 0", "row 1", "the pass"]):
        for i in range(4):
            text = f"{r},{i}" if r < 2 else f"new {i}"
            cells(left, r, ["now" if r == i == 0 else text],
                  [CONTEXT if r == i == 0 else fills[r]], r + i)  # fmt: skip
        left.text(-0.2, r + 0.4, name, ha="right", va="center", fontsize=10)
    left.plot([2.46, 3.46, 4.46], [0.4, 1.4, 2.4], color=INK, lw=1.5, zorder=0)
    for i in range(6):
        left.text(i + 0.46, -0.15, f"t + {i}" if i else "t", ha="center", fontsize=10)
    left.text(2.6, 3.35, "a column, here 2, is an n-gram", ha="center", fontsize=10)
    finish(left, (-1.4, 6), (3.6, -0.6), show=False)
    left.set_aspect("equal")
    letters = [chr(ord("a") + i) for i in range(len(tree) - 1)]
    entries = [(r, i) for r in range(2) for i in range(r == 0, 4)]
    names = ["now", *letters, *(f"{r},{i}" for r, i in entries)]
    colours = [CONTEXT, *[ACCEPTED] * len(letters), *(fills[r] for r, _ in entries)]
    draw_mask(right, mask, names, colours)
    plt.show()


def draw_break_even(
    points: dict[str, tuple[float, float]], free: dict[str, float],
    curve: tuple[Sequence[float], Sequence[float]],
) -> None:  # fmt: skip
    """Draw settings as points (rows of a pass, tokens per pass), and what a pass costs: for each
    machine a line that is flat up to its free rows, and one measured curve (rows, cost)."""
    figure, ax = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    rows = [2 ** (i / 8) for i in range(8 * 9 + 1)]
    for (name, n), colour in zip(free.items(), (CONTEXT, FRESH)):
        ax.plot(rows, [max(1, r / n) for r in rows], color=colour, label=f"{name}: {n:.0f} free")
    ax.plot(*curve, "o:", color=REJECTED, ms=4, label="here, measured passes")
    for name, (x, y) in points.items():
        ax.plot(x, y, "o", color=ACCEPTED)
        ax.annotate(name, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    top = max(y for _, y in points.values())
    ax.set(xlabel="rows of a pass", ylabel="tokens per pass, cost of a pass", ylim=(0.8, top + 0.8))
    ax.legend(frameon=False, fontsize=9, loc="upper right")
    ax.spines[["top", "right"]].set_visible(False)
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
        box(ax, x + 0.46, 1.5, "head", "none", INK)
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
        2.7: ("hidden state", "blue: from the target\norange: the head’s own output"),
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


def draw_speeds_by_k(speeds: dict[str, dict[str, tuple[list[float], list[float]]]]) -> None:
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


# ---- lesson 07 -----------------------------------------------------------------------------------

DOCUMENT = "Why", "purr", "?", "Cats", "purr", "to", "rest", "."  # a prompt of three, an answer


def draw_labels(weights: Sequence[float]) -> None:
    """Draw a document and, for each step of a head with the step's weight in the loss, the label of
    every row that has one: blue if the target wrote it, pale in the prompt."""
    n = len(DOCUMENT)
    fills = [PALE] * 3 + [CONTEXT] * (n - 3)
    rows = {
        "token": (0, DOCUMENT, fills, "a prompt, and the target's answer"),
        "row": (0, [f"i = {i}" for i in range(n - 2)], [f"!{CONTEXT}"] * (n - 2), ""),
    }
    for k, weight in enumerate(weights, start=1):
        reads = f"output {k - 1}" if k > 1 else "h"
        note = f"reads {reads}, token i + {k}; predicts i + {k + 1}; weight {weight:.2f}"
        fills = [PALE if i < 3 else ACCEPTED for i in range(k + 1, n)]
        rows[f"step {k}"] = 0, DOCUMENT[k + 1 :], fills, note
    draw_steps(rows, (10, 3), (-1.3, 8.3, 14.4))


def draw_training(curve: dict[int, float], rates: dict[str, list[float]], best: float) -> None:
    """Draw tokens per pass during training, next to those of a finished head, `best`; and how often
    each step of several heads is right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(curve.keys(), curve.values(), "o-", color=ACCEPTED)
    left.axhline(best, color=CONTEXT, ls="--")
    left.annotate("the shipped head", (0, best), (0, -12), textcoords="offset points", fontsize=9)
    left.set(xlabel="updates", ylabel="tokens per pass", ylim=(0.9, None), xticks=list(curve))
    for (name, shares), style in zip(rates.items(), ("o-", "s-", "--")):
        colour = {"o-": ACCEPTED, "s-": REJECTED, "--": CONTEXT}[style]
        right.plot(range(1, len(shares) + 1), shares, style, color=colour, label=name)
    right.set(xlabel="step", ylabel="share of tokens right", ylim=(0, 1), xticks=[1, 2, 3])
    right.legend(frameon=False, fontsize=9)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    plt.show()


# ---- lesson 08 -----------------------------------------------------------------------------------


def draw_runs(methods: list[str], seconds: list[float], drift: list[float]) -> None:
    """Draw the seconds of each run of a benchmark, in the order of the runs, with the time that an
    undisturbed run of the slower method would take at that moment."""
    figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
    top = 1.35 * max(drift)
    for method, colour in zip(dict.fromkeys(methods), (CONTEXT, ACCEPTED)):
        at = [i for i, each in enumerate(methods) if each == method]
        ax.plot(at, [min(seconds[i], top) for i in at], "o", ms=5, color=colour,
                label=f"a run of {method}")  # fmt: skip
    paused = [i for i, s in enumerate(seconds) if s >= top]
    for i in paused:
        ax.annotate(f"{seconds[i]:.1f}", (i, top), (0, 5), textcoords="offset points",
                    ha="center", fontsize=9)  # fmt: skip
    ax.plot(drift, "--", color=REJECTED, lw=1, label="A, undisturbed")
    ax.set(xlabel="runs, in order", ylabel="seconds per unit of work", ylim=(0, 1.12 * top))
    ax.legend(frameon=False, fontsize=9, loc="lower right", ncol=3)
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_reports(reports: dict[str, list[float]], truth: float) -> None:
    """Draw what several benchmarks report, each run on many machines with the same truth."""
    figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
    edges = [truth * (0.4 + 0.02 * i) for i in range(46)]
    for (name, values), colour in zip(reports.items(), (REJECTED, ACCEPTED)):
        inside = [min(max(value, edges[0]), edges[-1]) for value in values]  # at the margins
        ax.hist(inside, edges, color=colour, alpha=0.75, label=name)
    ax.axvline(truth, color=INK, ls=":", label="the truth")
    ax.set(xlabel="speedup reported", ylabel="benchmarks")
    ax.legend(frameon=False, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_formula(alpha: float, gamma: int, c: float) -> None:
    """Draw the expected tokens per pass and the speed for any number of drafts, and mark `gamma`. A
    pass costs 1, whatever its rows, and a draft costs `c`."""
    counts = range(11)
    tokens = [sum(alpha**i for i in range(n + 1)) for n in counts]
    speed = [t / (1 + n * c) for n, t in zip(counts, tokens)]
    best = max(counts, key=speed.__getitem__)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    titles = (f"γ = {gamma}: {tokens[gamma]:.2f} tokens per pass",
              f"γ = {gamma}: speed {speed[gamma]:.2f}; best γ = {best}: {speed[best]:.2f}")
    for ax, values, colour, title in zip(axes, (tokens, speed), (FRESH, ACCEPTED), titles):
        ax.plot(counts, values, "o-", color=colour, ms=4)
        ax.plot(gamma, values[gamma], "o", color=INK, ms=9, mfc="none")
        ax.axhline(1, color=CONTEXT, lw=1, ls=":")
        ax.set(xlabel="drafts per round γ", xticks=counts, ylim=(0, max(4, 1.1 * tokens[-1])))
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].plot(best, speed[best], "*", color=REJECTED, ms=12)
    axes[0].set(ylabel="plain decoding = 1")
    plt.show()


# ---- lesson 09 -----------------------------------------------------------------------------------


def draw_decisions(p: Tensor, q: Tensor) -> None:
    """Draw every sequence of random decisions in a round with one draft, up to its first token,
    with its probability and its choices. Options are numbered from 0; a single one is no choice."""
    figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
    rest = (p - q).clamp(min=0)
    rest = (rest / rest.sum()).tolist()
    y = 0  # of the next leaf
    for x, (target, draft) in enumerate(zip(p.tolist(), q.tolist())):
        coin, top = min(1.0, target / draft), y
        ways = [] if coin == 1 else [(t, share) for t, share in enumerate(rest) if share > 0]
        centre = top + len(ways) / 2
        draw_branch(ax, (0, 2), (1, centre), f"{draft:.2f}")
        rejected = top + (len(ways) - 1) / 2
        if ways:
            draw_branch(ax, (1, centre), (2, rejected), f"{1 - coin:.2f}")
        for option, (t, share) in enumerate(ways):
            choices = [x, 0, option] if len(ways) > 1 else [x, 0]
            draw_branch(ax, (2, rejected), (3, y), f"{share:.2f}")
            draw_leaf(ax, y, t, FRESH, draft * (1 - coin) * share, choices)
            y += 1
        draw_branch(ax, (1, centre), (2, y), f"{coin:.2f}")
        draw_branch(ax, (2, y), (3, y), "")
        draw_leaf(ax, y, x, ACCEPTED, draft * coin, [x] if coin == 1 else [x, 1])
        box(ax, 1, centre, f"draft {x}", CONTEXT, size=10)
        if ways:
            box(ax, 2, rejected, "rejected", REJECTED, size=10)
        box(ax, 2, y, "accepted", ACCEPTED, size=10)
        y += 1
    box(ax, 0, 2, "the text", CONTEXT, size=10)
    titles = "draw x from q", "flip the coin", "draw from the residual", "probability", "choices"
    for x, title in zip((0.5, 1.5, 2.5, 3.5, 4.0), titles):
        ax.text(x, -0.9, title, ha="center", va="center", fontsize=10)
    finish(ax, (-0.3, 4.4), (y - 0.4, -1.2))


def draw_branch(ax: Axes, start: tuple, end: tuple, text: str) -> None:
    """Draw a line with a gap for its text."""
    for part in (0, 0.47), (0.73, 1):
        x, y = ([a + share * (b - a) for share in part] for a, b in zip(start, end))
        ax.plot(x, y, color=LINE, lw=1, zorder=1)
    ax.text(*((2 * a + 3 * b) / 5 for a, b in zip(start, end)), text, ha="center", va="center",
            fontsize=9, zorder=2)  # fmt: skip


def draw_leaf(ax: Axes, y: float, token: int, fill: str, probability: float, choices: list) -> None:
    box(ax, 3, y, f"token {token}", fill, size=10)
    ax.text(3.5, y, f"{probability:.2f}", ha="center", va="center", fontsize=10)
    ax.text(4.0, y, str(choices), ha="center", va="center", fontsize=10)


def draw_mistakes(found: list[tuple[float, str, bool]]) -> None:
    """Draw mistakes by distance: (distance, name, whether greedy tokens change as well)."""
    figure, ax = plt.subplots(figsize=(9, 0.24 * len(found) + 0.8), layout="constrained")
    distances, names, seen = zip(*sorted(found))
    bars = ax.barh(names, distances, color=[ACCEPTED if greedy else REJECTED for greedy in seen])
    ax.bar_label(bars, [f"{distance:.2g}" for distance in distances], padding=3, fontsize=9)
    handles = [Patch(color=REJECTED), Patch(color=ACCEPTED)]
    names = "greedy tokens stay the same", "greedy tokens change, too"
    ax.legend(handles, names, frameon=False, fontsize=10, loc="lower right")
    ax.tick_params(labelsize=9)
    ax.set(xlabel="distance from plain decoding (total variation)", ylim=(-0.6, len(found) - 0.4))
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_gaps(gaps: list[float], reach: dict[str, float]) -> None:
    """Draw the gaps between the two best logits, in order, and how large a gap rounding can
    reverse in each type."""
    figure, ax = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    ax.plot(sorted(gaps), "o", color=ACCEPTED, markersize=3)
    for (name, height), style in zip(reach.items(), ("--", ":")):
        ax.axhline(height, color=REJECTED, ls=style, label=f"{name} can reverse")
    ax.set_yscale("log")
    ax.set(xlabel="tokens of the answers, the closest decision first",
           ylabel="gap of the two\nbest logits")  # fmt: skip
    ax.legend(frameon=False, fontsize=10, loc="upper left")
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


# ---- lesson 10 -----------------------------------------------------------------------------------

METHOD_COLOURS = {
    "jacobi": SKY, "lookahead": ORANGE, "prompt-lookup": FRESH, "medusa": PURPLE,
    "fastmtp": ACCEPTED, "hybrid": REJECTED,
}  # fmt: skip
KIND_MARKERS = "os^D"


def draw_budgets(methods: dict[str, tuple], curve: Sequence[float]) -> None:
    """Draw what a round of each method costs, drafting and then the pass, and what it yields.
    `methods` maps a name to tokens per pass, the rows of each round, and the cost of drafting."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 2.7), width_ratios=[5, 3], sharey=True, layout="constrained"
    )
    for y, (tau, rows, drafting) in enumerate(methods.values()):
        cost = sum(curve[n] for n in rows) / len(rows)
        left.barh(y, drafting, 0.6, color=CONTEXT)
        left.barh(y, cost, 0.6, drafting, color=ACCEPTED)
        spread = f"{min(rows)} or {max(rows)}" if min(rows) < max(rows) else str(rows[0])
        left.text(drafting + 0.06, y, f"{spread} row" + "s" * (max(rows) > 1), va="center",
                  color="white", fontsize=9)  # fmt: skip
        for i in range(math.ceil(tau)):
            right.barh(y, min(1, tau - i), 0.6, i, color=FRESH, edgecolor="white", lw=2)
        right.text(tau + 0.08, y, f"{tau:.2f}", va="center", fontsize=9)
    left.set_yticks(range(len(methods)), methods, fontsize=10)
    left.invert_yaxis()
    left.set(xlabel="cost of a round, in passes over one token")
    right.set(xlabel="tokens per round, on average", xlim=(0, 3), xticks=range(4))
    right.tick_params(axis="y", length=0)
    left.legend([Patch(color=CONTEXT), Patch(color=ACCEPTED)], ["drafting", "pass of the target"],
                frameon=False, fontsize=9, loc="center right")  # fmt: skip
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def draw_speeds(points: dict[str, dict[str, tuple[float, float]]]) -> None:
    """Draw speed against tokens per pass. `points[kind][method]` is (tokens per pass, speed
    relative to plain decoding). Methods have colours, kinds have shapes, and each dashed line
    through the origin is a cost of a round."""
    figure, ax = plt.subplots(figsize=(8, 4.8), layout="constrained")
    pairs = [pair for methods in points.values() for pair in methods.values()]
    right, top = (1.08 * max(1.2, *values) for values in zip(*pairs))
    low = 0.92 * min(1.0, *(speed for _, speed in pairs))
    for cost in (1, 1.25, 1.5, 2, 3):
        ax.plot([0, 2 * right], [0, 2 * right / cost], "--", color=PALE, lw=1, zorder=0)
        x, y = (right, right / cost) if right / cost < top else (top * cost, top)
        if y > low:
            ax.annotate(f"{cost:g}", (x, y), (3, 2), textcoords="offset points", fontsize=9,
                        color=CONTEXT, annotation_clip=False)  # fmt: skip
    ax.axhline(1, color=INK, lw=1, ls=":")
    for marker, methods in zip(KIND_MARKERS, points.values()):
        for method, (tau, speed) in methods.items():
            ax.plot(tau, speed, marker, color=METHOD_COLOURS[method], ms=9, mec="white")
    ax.plot(1, 1, "*", color=INK, ms=12)
    names = {name: name for methods in points.values() for name in methods}
    handles = [Patch(color=METHOD_COLOURS[name]) for name in names]
    handles += [Line2D([], [], ls="", marker=m, color=CONTEXT) for m in KIND_MARKERS[: len(points)]]
    handles += [Line2D([], [], ls="", marker="*", color=INK, ms=11),
                Line2D([], [], ls="--", color=CONTEXT, lw=1)]  # fmt: skip
    ax.legend(handles, [*names, *points, "plain decoding", "equal cost of a round"],
              frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.06, 0.5))  # fmt: skip
    ax.set(xlim=(0.9, right), ylim=(low, top), xlabel="tokens per pass",
           ylabel="speed, relative to plain decoding")  # fmt: skip
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


# ---- lesson 11 -----------------------------------------------------------------------------------


def draw_three_states() -> None:
    """Draw the layers of a target with the three states that a head reads, and two of the head's
    drafts; and the rows of three steps of its training, filled if row 2 of step 3 sees them."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 4.2), width_ratios=[6, 5], layout="constrained"
    )
    arrow = {"arrowstyle": "->", "color": CONTEXT}
    stack = "bird", "layers 0, 1", "2 … 14", "15 … 26", "27 … 29", "norm, lm_head", "who"
    for y, text in enumerate(stack):
        is_token = y in (0, len(stack) - 1)
        fill, edge = (CONTEXT, None) if is_token else ("none", INK)
        box(left, 0.8, y, text, fill, edge, size=10)
        if y:
            left.annotate("", (0.8, y - 0.27), (0.8, y - 0.73), arrowprops=arrow)
    for y in (1.5, 2.5, 3.5):
        left.plot(0.8, y, "o", color=ACCEPTED, ms=7, zorder=4)
        left.annotate("", (2.35, 2.5), (0.8, y), arrowprops=arrow | {"color": ACCEPTED})
    box(left, 2.6, 2.5, "fc", ACCEPTED, size=10)
    for x, token, draft, state in (4.1, "who", "sang", ""), (5.8, "sang", "all", "h′"):
        colour = REJECTED if state else ACCEPTED
        box(left, x, 2.5, "head", "none", INK, size=10)
        box(left, x, 1.2, token, REJECTED if state else CONTEXT, size=10)
        box(left, x, 3.8, draft, REJECTED, size=10)
        left.annotate("", (x, 2.25), (x, 1.5), arrowprops=arrow)
        left.annotate("", (x, 3.5), (x, 2.75), arrowprops=arrow)
        start = x - (1.25 if state else 1.2)
        left.annotate("", (x - 0.4, 2.5), (start, 2.5), arrowprops=arrow | {"color": colour})
        left.text(x - 0.8, 2.62, state, ha="center", fontsize=10, color=colour)
    left.text(4.95, 0.6, "its tokens", ha="center", va="center", fontsize=10)
    left.text(4.95, 4.4, "drafts", ha="center", va="center", fontsize=10)
    finish(left, (-0.3, 6.4), (-0.4, 6.4), show=False)
    for k in range(3):
        fills = [ACCEPTED if k == 0 and i <= 2 else REJECTED if k and i == 2 else f"!{CONTEXT}"
                 for i in range(4)]  # fmt: skip
        cells(right, k, [f"token {i + k + 1}" for i in range(4)], fills)
        right.text(-0.15, k + 0.4, f"step {k + 1}", ha="right", va="center", fontsize=10)
    for i in range(4):
        right.text(i + 0.46, -0.2, f"row {i}", ha="center", fontsize=10)
    right.text(1.96, 3.3, "filled: what row 2 of step 3 sees.\nBlue reads the target’s states, "
               "orange the head’s own", ha="center", va="center", fontsize=10)  # fmt: skip
    finish(right, (-0.9, 4), (3.7, -0.6))
