"""Lesson 10: see pure_10.py for its tasks."""

import statistics
from dataclasses import replace

from form import Question

from minispec.methods.adaptive import best_draft_size, curve_at
from solutions.pure_10 import BEST_METHOD, TOKENS_PER_SECOND

# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_tokens_per_second(tau, rows, drafting, curve, seconds):
    """τ tokens in the time of a round, which drafts and runs one pass of the target."""
    passes = [curve_at(curve, n) for n in rows]
    cost = drafting + statistics.mean(passes)
    return tau / cost / seconds


def package_best_method(methods, curve, batch):
    """The method with the most tokens per cost. Plain decoding is one with τ = 1."""
    plain_cost = curve_at(curve, batch)
    worth = {}
    for name, (tau, rows, drafting) in {"autoregressive": (1.0, [1], 0.0), **methods}.items():
        passes = statistics.mean(curve_at(curve, batch * n) for n in rows)
        worth[name] = tau * plain_cost / (passes + drafting * plain_cost)
    return max(worth, key=worth.__getitem__)


# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "best_speed_chat": (0.5, 5), "best_speed_code": (0.5, 5), "speed_lookahead": (0.1, 5),
    "batch_limit": (1, 64),
}  # fmt: skip
TASKS = [
    replace(
        TOKENS_PER_SECOND,
        package=package_tokens_per_second,
        shows=(package_tokens_per_second,),
    ),
    replace(BEST_METHOD, package=package_best_method, shows=(best_draft_size,)),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "A yields 1.6 tokens per pass, and its rounds cost 2.0. B yields 1.3, and its rounds cost "
        "1.1. Which decodes fastest?",
        "b",
        "tokens per cost are 0.80 for A, 1.18 for B and 1 for plain decoding.",
        ("A", "B", "plain decoding"),
    ),
    Question(
        "Passes over 1, 4 and 7 rows cost 1, 1.1 and 2. Half of a method's passes have 1 row, the "
        "others 7. What does a pass cost on average?",
        1.5,
        "the costs are averaged and not the rows, whose mean of 4 would cost 1.1.",
    ),
    Question(
        "A server decodes 8 texts together, each with K = 3 drafts. How many rows has a pass?",
        32,
        "each text has three drafts and its newest token, which has not been read yet.",
    ),
    Question(
        "A server decodes more and more texts together. How many drafts per text pay then?",
        "b",
        "the texts themselves use up the cheap rows, so the row of a draft costs more.",
        ("more than before", "fewer than before", "as many as before"),
    ),
    Question(
        'k="auto" chooses K before each round from earlier rounds and measured costs. Is sampling '
        "still lossless?",
        True,
        "a round is lossless for every K, and K is chosen before anything of the round is drawn.",
    ),
]
