"""Lesson 10: a drafter that copies or runs a chain; for its other tasks, see pure_10.py."""

import statistics
from dataclasses import replace

import torch
from form import Question, Task
from own_engine import find_draft, ngrams

from minispec.methods import hybrid
from minispec.methods.adaptive import best_draft_size, curve_at
from minispec.tree import Tree
from solutions import engine
from solutions.lesson_05 import package_add as add
from solutions.lesson_05 import package_lookup as lookup
from solutions.lesson_06 import package_chain as chain
from solutions.lesson_06 import package_drafts
from solutions.pure_10 import BEST_METHOD, TOKENS_PER_SECOND

# ---- solution ------------------------------------------------------------------------------------


def draft_hybrid(model, text, probs, randomness):
    drafter, pool, waiting = find_draft(model, text), {}, []

    def propose(text, hidden, path):
        waiting.append(hidden[path])
        for gram in ngrams(text, len(path), n=6):
            add(pool, gram, 1)
        copied = lookup(pool, tuple(text[-3:]))
        if copied:
            return Tree.merged(text[-1], copied)
        pairs = torch.cat(waiting)
        waiting.clear()
        new = text[len(text) - len(pairs) :]
        return Tree.chain(text[-1], chain(drafter, pairs, new, 3) if new else [])

    return propose


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


def package_draft_hybrid(model, text, probs, randomness):
    draft, pool, kept = find_draft(model, text), {}, []

    def propose(text, hidden, path):
        kept.extend(hidden[path])
        pool.update((gram[0], [gram[1:]]) for gram in ngrams(text, len(path), n=6))
        if followed := pool.get(tuple(text[-3:])):
            return Tree.merged(text[-1], followed)
        states = torch.stack(kept) if kept else hidden[:0]
        kept.clear()
        return package_drafts(draft, text, states)

    return propose


# ---- draft_hybrid --------------------------------------------------------------------------------

REPEATED = (0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2, 1, 0, 0, 1, 1, 2, 0, 2)
DRAFTINGS = [
    engine.Drafting(head, text, ends)
    for head in (False, True)
    for text, ends in (
        ((1, 2, 0, 2), (3, 4)), ((1, 2), (1, 2)), (REPEATED, (11, 12, 13, 14)),
        (REPEATED, (12, 13, 17, 18, 20)),
    )
]  # fmt: skip


def right_mixture(case, text: list[int], randomness) -> Tree:
    ends = [end for end in range(3, len(text) - 5) if text[end - 3 : end] == text[-3:]]
    if ends:
        return Tree.chain(text[-1], text[ends[-1] : ends[-1] + 6])
    return Tree.chain(text[-1], engine.fresh_chain(case, text, 3) if len(text) > 1 else [])


DRAFT_MISTAKES = {
    "after a copied round, the drafter lacks the pairs of that round: keep them until it runs": (
        engine.altered(draft_hybrid, ("if copied:\n", "if copied:\n            waiting.clear()\n"))
    ),
    "it never copies": engine.altered(draft_hybrid, ("if copied:", "if False:")),
    "it only copies; where nothing can be copied, `chain` drafts": engine.altered(
        draft_hybrid, ("if copied:", "if True:")
    ),
    "it copies three tokens; ngrams has an argument n": engine.altered(
        draft_hybrid, (", n=6", "")
    ),
}  # fmt: skip

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
    Task(
        name="draft_hybrid",
        package=package_draft_hybrid,
        solution=draft_hybrid,
        judge=engine.drafters(
            DRAFTINGS, engine.exact_drafts(right_mixture), f"{len(DRAFTINGS)} texts"
        ),
        hints=(
            "for gram in ngrams(text, len(path), n=6): add(pool, gram, 1). Then "
            "lookup(pool, tuple(text[-3:])) is [] or a list with one list of six tokens.",
            "Append hidden[path] to a list in every round. Where the chain drafts, torch.cat of "
            "that list are the hidden states of all pairs that it has not read; clear the list.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(hybrid.CopiesFirst,),
    ),
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
