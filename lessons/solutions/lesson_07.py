"""Lesson 07: the loss of a head that runs on its own output, and a chain of frequent words."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from form import Oracle, Question, Task, Wrong
from own_engine import find_draft, find_words
from torch import Tensor

from minispec.distill import Documents, MTPLoss
from minispec.distill.documents import cross_entropy
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.tree import Tree
from solutions import engine
from solutions.lesson_06 import package_chain as chain
from solutions.lesson_06 import package_drafts

# ---- solution ------------------------------------------------------------------------------------


def mtp_loss(logits, tokens, learn, beta):
    total = weights = 0.0
    for k, of_step in enumerate(logits, start=1):
        label, real = tokens[:, k + 1 :], learn[:, k + 1 :]
        rows = of_step[:, : label.shape[1]]
        ce = F.cross_entropy(rows[real], label[real], reduction="sum")
        total = total + beta ** (k - 1) * ce / max(1, int(real.sum()))
        weights += beta ** (k - 1)
    return total / weights


def draft_frequent(model, text, probs, randomness):
    drafter, words = find_draft(model, text), find_words(model, text)
    rows = drafter.model.lm_head.weight[words]

    def logits(hidden):
        full = hidden.new_full((len(hidden), model.config.vocab_size), -torch.inf)
        full[:, words] = hidden @ rows.T
        return full

    drafter = SimpleNamespace(run=drafter.run, cache=drafter.cache)
    drafter.model = SimpleNamespace(logits=logits)

    def propose(text, hidden, path):
        new = text[len(text) - len(path) :]
        return Tree.chain(text[-1], chain(drafter, hidden[path], new, 3) if new else [])

    return propose


# ---- the package's functions, with the lesson's arguments ----------------------------------------


class LossOfLogits(MTPLoss):
    """The package's loss, for a head that has run already."""

    given: list[Tensor]

    def outputs(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        return self.given


def package_mtp_loss(logits, tokens, learn, beta):
    rows = tokens.where(learn, -100).tolist()
    documents = Documents(rows, prompts=[0] * len(rows), states=[torch.zeros(1, 1)] * len(rows))
    target = SimpleNamespace(logits=lambda logits: logits, device=tokens.device)
    loss = LossOfLogits(None, target, documents, len(logits), beta, aligned=True)
    loss.given = logits
    return loss(torch.arange(len(rows)))


def package_draft_frequent(model, text, probs, randomness):
    draft, ids = find_draft(model, text), find_words(model, text).tolist()
    subset = Subset(draft.model.lm_head.weight, ids)

    def logits(hidden):
        some = subset.logits(hidden)
        return some.new_full((len(some), subset.size), -torch.inf).index_copy(1, subset.ids, some)

    parts = {"run": draft.run, "cache": draft.cache, "model": SimpleNamespace(logits=logits)}
    frequent = SimpleNamespace(**parts)
    return lambda text, hidden, path: package_drafts(frequent, text, hidden[path])


# ---- cases ---------------------------------------------------------------------------------------

V = 5
TOLERANCE = 1e-5  # the package computes logits in float32


@dataclass(frozen=True)
class Batch:
    """Documents: `lengths` of prompt and document, padded to the longest. Some tokens of an answer
    are not learnt, like those that a vocabulary lacks."""

    seed: int
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    steps: int
    beta: float


def random_batch(seed: int) -> Batch:
    rng = random.Random(seed)
    prompts = tuple(rng.randint(1, 3) for _ in range(seed % 3 + 1))
    lengths = tuple(max(3, prompt + rng.randint(1, 6)) for prompt in prompts)
    return Batch(seed, prompts, lengths, seed % 4 + 1, rng.choice([0.0, 0.3, 0.6, 1.0]))


BATCHES = [
    Batch(0, (1,), (5,), 1, 0.6),
    Batch(1, (2,), (6,), 2, 0.5),
    Batch(2, (2,), (4,), 3, 0.6),  # no token is left for step 3
    *map(random_batch, range(3, 30)),
]


@cache
def arguments(case: Batch) -> tuple[list[Tensor], Tensor, Tensor]:
    """Random logits, tokens, and which of them are to be learnt."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    longest = max(case.lengths)
    shape = len(case.lengths), longest - 2, V
    logits = [
        2 * torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(case.steps)
    ]
    tokens = torch.randint(V, (len(case.lengths), longest), generator=generator)
    learn = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt, length in zip(learn, case.prompts, case.lengths):
        row[prompt:length] = True
        if length - prompt > 4:
            row[rng.randrange(prompt, length)] = False
    return logits, tokens, learn


def run_loss(function: Callable, case: Batch) -> float:
    logits, tokens, learn = arguments(case)
    given = [of_step.clone().requires_grad_() for of_step in logits]
    before = tokens.clone(), learn.clone()
    with torch.enable_grad():
        value = function(list(given), *before, case.beta)
    if not torch.equal(before[0], tokens) or not torch.equal(before[1], learn):
        raise Wrong("it changes `tokens` or `learn`, which belong to the caller")
    if not isinstance(value, Tensor):
        raise Wrong(f"it returns a {type(value).__name__}. It needs a gradient, which "
                    "only a Tensor has: no float() and no .item()")  # fmt: skip
    if value.numel() != 1:
        raise Wrong(f"it returns a tensor of shape {tuple(value.shape)}; the loss is one number")
    if not value.requires_grad:
        raise Wrong("its result has no gradient; do not detach the logits or copy their numbers")
    if not value.isfinite():
        raise Wrong("it is NaN or infinite: a step without labels divides 0 by 0. Let it add 0")
    return float(value.detach())


def exact_loss(case: Batch) -> float:
    """The definition, one label at a time."""
    logits, tokens, learn = (x if isinstance(x, list) else x.tolist() for x in arguments(case))
    powers, total = [case.beta**k for k in range(case.steps)], 0.0
    for k, of_step in enumerate(logits, start=1):
        terms = []
        for rows, document, counts in zip(of_step.tolist(), tokens, learn):
            for i, row in enumerate(rows):
                if i + k + 1 < len(document) and counts[i + k + 1]:
                    exponentials = [math.exp(x) for x in row]
                    terms.append(-math.log(exponentials[document[i + k + 1]] / sum(exponentials)))
        total += powers[k - 1] / sum(powers) * sum(terms) / max(1, len(terms))
    return total


def show_arguments(case: Batch) -> str:
    rows = ["".join(".x"[learnt] for learnt in row) for row in arguments(case)[2].tolist()]
    return f"K = {case.steps}, β = {case.beta:g}, learn = {', '.join(rows)} (x: True)"


def show_loss(case: Batch, got: float, expected: float) -> str:
    return f"{show_arguments(case)}: it returns {got:.4f} instead of {expected:.4f}"


# ---- mistakes ------------------------------------------------------------------------------------


def columns(x: Tensor, first: int, n: int) -> Tensor:
    """Columns first … first + n - 1 of x (B, T), with zeros past the end."""
    return F.pad(x, (0, first + n))[:, first : first + n]


def mean_of_labels(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    return F.cross_entropy(rows[real], label[real], reduction="sum") / max(1, int(real.sum()))


def mean_of_rows(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    return mean_of_labels(rows, label, real) * real.sum() / real.numel()


def mean_of_documents(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    return sum(map(mean_of_labels, rows, label, real)) / len(rows)


def sum_of_labels(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    return mean_of_labels(rows, label, real) * real.sum()


def without_softmax(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    return F.nll_loss(rows[real], label[real], reduction="sum") / max(1, int(real.sum()))


def probability(rows: Tensor, label: Tensor, real: Tensor) -> Tensor:
    p = rows.softmax(-1).gather(-1, label[..., None])[..., 0]
    return -(p * real).sum() / max(1, int(real.sum()))


def geometric(beta: float, steps: int) -> list[float]:
    powers = [beta**k for k in range(steps)]
    return [power / sum(powers) for power in powers]


def faulty(
    weights: Callable = geometric, first: Callable = lambda k: k + 1,
    learnt_from: Callable = lambda first: first, ce: Callable = mean_of_labels,
    everything: bool = False,
) -> Callable:  # fmt: skip
    """A loss with another weighting, first label of step k, first column of `learn` for it, or
    cross-entropy; `everything` ignores `learn`."""

    def mtp_loss(logits, tokens, learn, beta):
        n, total = logits[0].shape[1], 0.0
        learn = torch.ones_like(learn) if everything else learn
        for k, (weight, rows) in enumerate(zip(weights(beta, len(logits)), logits), start=1):
            start = first(k)
            inside = columns(torch.ones_like(learn), start, n)
            real = inside & columns(learn, learnt_from(start), n)
            total = total + weight * ce(rows, columns(tokens, start, n), real)
        return total

    return mtp_loss


MISTAKES = {
    "the labels are one token too early. Row i of step k has read token i + k and predicts the one "
    "after it": faulty(first=lambda k: k),
    "the labels are one token too late. Row i of step k predicts token i + k + 1": faulty(
        first=lambda k: k + 2
    ),
    "every step has the labels of step 1; step 2 predicts one token later": faulty(
        first=lambda k: 2
    ),
    "it counts labels that nobody drafts, such as those in the prompt and in the padding; use "
    "`learn`": faulty(everything=True),
    "`learn` is about tokens, so it must be shifted exactly like the labels": faulty(
        learnt_from=lambda first: 0
    ),
    "all steps have the same weight, 1 / K; α_k falls with k": faulty(
        weights=lambda beta, steps: [1 / steps] * steps
    ),
    "the weights are β^(k - 1), but their sum is not 1: divide by it": faulty(
        weights=lambda beta, steps: [beta**k for k in range(steps)]
    ),
    "the weights are β^k, which neither start at 1 nor sum to 1": faulty(
        weights=lambda beta, steps: [beta**k for k in range(1, steps + 1)]
    ),
    "the weights are in the wrong order: step 1 has the largest": faulty(
        weights=lambda beta, steps: geometric(beta, steps)[::-1]
    ),
    "it is the loss of step 1 only": faulty(
        weights=lambda beta, steps: [1.0] + [0.0] * (steps - 1)
    ),
    "it adds up the labels' terms; CE_k is their mean, so that long texts do not count for more": (
        faulty(ce=sum_of_labels)
    ),
    "it divides by the number of all rows; CE_k is the mean over rows that have a label": faulty(
        ce=mean_of_rows
    ),
    "it takes a mean of each document first; CE_k is one mean over all labels of step k": faulty(
        ce=mean_of_documents
    ),
    "it takes logits for logarithms of probabilities; log_softmax, which F.cross_entropy includes, "
    "turns one into the other": faulty(ce=without_softmax),
    "it takes probabilities; the cross-entropy is their negative logarithm": faulty(ce=probability),
}  # fmt: skip

# ---- draft_frequent ------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(head, text, ends)
    for head in (False, True)
    for text, ends in (((1, 2, 0, 2, 1), (3, 5)), ((2, 0, 0, 1), (2, 4)), ((1, 2), (1, 2)))
]


def run_frequent(function: Callable, case: engine.Drafting):
    """The outcomes of a drafter that must not compute the logits of all tokens."""

    def refuse(*_):
        raise Wrong("it computes the logits of all tokens; a draft needs only those of `words`: "
                    "hidden @ rows.T")  # fmt: skip

    with mock.patch.object(Transformer, "logits", refuse):
        return engine.run_drafts(function, case)


def right_words(case: engine.Drafting, text: list[int], randomness) -> Tree:
    words = [*range(0, engine.V, 2)]  # `find_words`, where there is no list
    return Tree.chain(text[-1], engine.fresh_chain(case, text, 3, words) if len(text) > 1 else [])


DRAFT_MISTAKES = {
    "the drafts are indices into `words`; token words[i] is meant, which the head reads next": (
        engine.altered(draft_frequent, ("full[:, words] = ", "full = "))
    ),
    "tokens that are not among the words have logit 0; it must be -inf, so that they never win": (
        engine.altered(draft_frequent, ("-torch.inf", "0.0"))
    ),
}

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {"tau_trained": (1, 4), "second_step": (0, 1), "covered": (0, 1), "tau_chinese": (1, 4)}
TASKS = [
    Task(
        name="mtp_loss",
        package=package_mtp_loss,
        solution=mtp_loss,
        judge=Oracle(
            BATCHES, run_loss, exact_loss, lambda a, b: abs(a - b), show_loss,
            f"{len(BATCHES)} batches of random logits", tolerance=TOLERANCE,
            arguments=show_arguments,
        ),
        hints=(
            "The labels of step k are tokens[:, k + 1:]. There may be fewer of them than rows; the "
            "last rows then have none. Cut `learn` in the same way as the labels.",
            "A boolean mask picks the rows that count: rows[real] is (N, V), label[real] is (N,). "
            'F.cross_entropy(…, reduction="sum") needs to be divided by N, or by 1 if N is 0.',
        ),
        mistakes=MISTAKES,
        shows=(MTPLoss.__call__, cross_entropy),
    ),
    Task(
        name="draft_frequent",
        package=package_draft_frequent,
        solution=draft_frequent,
        judge=replace(
            engine.drafters(
                DRAFTINGS, engine.exact_drafts(right_words), f"{len(DRAFTINGS)} texts"
            ),
            run=run_frequent,
        ),
        hints=(
            "It is `draft_chain` with another drafter: an object with drafter's `run` and `cache`, "
            "and with a `model` whose logits(hidden) you write, from the rows of the words.",
            "rows = drafter.model.lm_head.weight[words], once. logits(hidden) fills (n, V) with "
            "-inf and puts hidden @ rows.T into the columns `words`.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(Subset,),
    ),
]  # fmt: skip

# ---- proofs --------------------------------------------------------------------------------------

PROOFS = {
    "lossless_subset": """
**A draft that knows only some tokens is lossless.** Let S be the tokens of the list and q a
distribution on S, so q(t) = 0 for any other token. Let m(t) = min(p(t), q(t)) and β = Σ m.

*The distribution.* Lesson 03's proof never divides by q(t), except for a draft that q has proposed:

- t in S is accepted with probability m(t); another t has m(t) = 0, and is never proposed.
- A draft is rejected with probability 1 − β, and then t is drawn with (p(t) − m(t)) / (1 − β).

So t has the probability m(t) + p(t) − m(t) = p(t), in S or not. Outside S, all of p(t) comes from
rejections. This needs the *target's* p over the whole vocabulary. If p were cut to S as well, rare
tokens would never appear, and the others too often.

*The price.* β = Σ min(p, q) over S, and this is at most p(S), the target's probability of the whole
list. The bound is reached by q(t) = p(t) / p(S), since then q ≥ p on S. So no draft from the list
is accepted more often than with probability p(S), whoever drafts. Greedy decoding is the case in
which p is one-hot: a draft is right only if the target's best token is in S.

*The gain.* A draft reads |S| rows of `lm_head` instead of all. FR-Spec and FastMTP choose S as the
most frequent tokens, for which p(S) stays near 1 although S is small.
"""
}

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "On which answers should a draft head be trained?",
        "c",
        "a draft is accepted if the target would say it, and the target's own text shows that.",
        (
            "correct ones, written by people",
            "those of a larger and better model",
            "the target's own, with its mistakes",
        ),
    ),
    Question(
        "The head may draft only 1,024 of 49,152 tokens. Can the text contain the others?",
        True,
        "the target draws from all tokens when it corrects a draft or adds a bonus token.",
    ),
    Question(
        "In training, step 2 reads the output of step 1 and a token. Which token?",
        "b",
        "draft 2 counts only if draft 1 was accepted, and then draft 1 is the text's own token.",
        (
            "the token that step 1 predicts",
            "the true token, whatever step 1 predicts",
            "either, by the flip of a coin",
        ),
    ),
    Question(
        "What is the weight of step 1 for K = 2 and β = 0.6?",
        0.625,
        "the weights are 1 and 0.6, divided by their sum of 1.6.",
    ),
    Question(
        "88 % of a text's tokens are in a list. At what share of the text's positions can a draft "
        "from the list be right, at most?",
        0.88,
        "where the text has another token, no draft from the list is right.",
    ),
]
