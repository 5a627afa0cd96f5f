"""Draw the README's pictures: one real round of each method, run on the shipped model.

    python lessons/pictures.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lessons")]

import matplotlib  # noqa: E402

matplotlib.use("Agg")
from drawing import CONTEXT, draw_rows, draw_states_legend, draw_walk, label  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

from minispec import load  # noqa: E402
from minispec.checkpoints.weights import atomic_write  # noqa: E402
from minispec.generate import decode  # noqa: E402
from minispec.tree import Step  # noqa: E402

STORY_PROMPT = "Once upon a time, there was a little girl named Lily."
COUNTING_PROMPT = "one two three four one two three four one two five four one two"
EXAMPLES = {  # method -> prompt and options
    "speculative": (STORY_PROMPT, {"k": 5}),
    "prompt-lookup": (COUNTING_PROMPT, {"k": 6}),
    "medusa": (STORY_PROMPT, {}),
    "jacobi": (STORY_PROMPT, {"block": 6}),
    "lookahead": (STORY_PROMPT, {"window": 5, "ngram": 4, "guesses": 4}),
    "fastmtp": (STORY_PROMPT, {"k": 4}),
}


def interest(step: Step) -> tuple:
    """A sort key: prefer rounds with accepted and rejected drafts, then long accepted paths."""
    accepted, drafted = len(step.path) - 1, len(step.tree) - 1
    return accepted > 0 and drafted > accepted, accepted, drafted


def draw(method: str, model, tokenizer, file: Path) -> None:
    """Draw the most interesting round: its tree and, for lookahead, the window below it."""
    prompt, options = EXAMPLES[method]
    run = decode(model, tokenizer, prompt, method, max_new_tokens=80, **options)
    step = max(run.rounds[1:], key=interest)
    leaves = sum(not step.tree.children(node) for node in range(len(step.tree))) + 1
    rows = len(step.window)
    figure, axes = plt.subplots(
        1 + bool(rows), figsize=(8.5, 0.5 + 0.4 * leaves + 0.3 * rows), layout="constrained",
        squeeze=False, height_ratios=[leaves, 0.7 * rows][: 1 + bool(rows)],
    )  # fmt: skip
    *labels, fresh = (label(token, tokenizer) for token in [*step.tree.tokens, step.tokens[-1]])
    draw_walk(axes[0, 0], step.tree, step.path, labels, fresh)
    draw_states_legend(axes[0, 0], ncol=4, loc="lower left", bbox_to_anchor=(0, 1))
    if rows:
        texts = [[label(token, tokenizer) for token in row] for row in step.window]
        colours = [[CONTEXT] * len(row) for row in texts]
        draw_rows(axes[1, 0], texts, colours, [f"window, row {i + 1}" for i in range(rows)])
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=100, format="png")
    plt.close(figure)


if __name__ == "__main__":
    model, tokenizer = load(ROOT / "weights" / "target")
    for method in EXAMPLES:
        draw(method, model, tokenizer, ROOT / "lessons" / "images" / f"{method}.png")
