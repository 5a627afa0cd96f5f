"""Lesson 06: a chain of drafts from one head, and the choice of K."""

import random
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import prod
from operator import mul

import torch
from form import Oracle, Task, Wrong
from torch import Tensor

from minispec.certify.toys import random_mtp_head, small_model
from minispec.methods import fastmtp
from minispec.methods.adaptive import AdaptiveK, best_draft_size
from minispec.methods.fastmtp import MTPHead
from minispec.methods.vocabulary import FullVocabulary
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from solutions.common import call, fastest, random_costs, speed, speed_distance

# ---- solutions -----------------------------------------------------------------------------------


def chain(drafter, hidden, tokens, k):
    output = drafter.run(hidden, tokens)[-1:]
    drafter.cache.commit(list(range(len(tokens))))
    length = drafter.cache.length
    drafts = [int(drafter.model.logits(output).argmax())]
    while len(drafts) < k:
        output = drafter.run(output, drafts[-1:])
        drafter.cache.commit([0])
        drafts.append(int(drafter.model.logits(output).argmax()))
    drafter.cache.truncate(length)
    return drafts


def best_k(rates, cost, draft_cost):
    best, speed = 0, 1 / cost[1]
    tokens = reached = 1.0
    for k in range(1, len(rates) + 1):
        reached *= rates[k - 1]
        tokens += reached
        if tokens / (cost[k + 1] + k * draft_cost) > speed:
            best, speed = k, tokens / (cost[k + 1] + k * draft_cost)
    return best


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_chain(drafter, hidden, tokens, k):
    fastmtp.Drafter.extend(drafter, hidden, tokens)
    vocabulary = FullVocabulary(drafter.model)
    return fastmtp.Drafter.chain(drafter, k, Sampling(), Seeded(), vocabulary)[0].tolist()


def package_best_k(rates, cost, draft_cost):
    return AdaptiveK(cost, draft_cost, max_k=len(rates), acceptance=rates).best()


# ---- chain: cases --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text and its rounds: K, and how many tokens of the text are known in that round."""

    seed: int
    tokens: tuple[int, ...]
    rounds: tuple[tuple[int, int], ...]


def random_text(seed: int) -> Text:
    rng = random.Random(seed)
    rounds, end = [], rng.randint(2, 5)
    for i in range(3):
        rounds.append(((seed + i) % 4 + 1, end))
        end += rng.randint(1, 3)
    return Text(seed, tuple(rng.choices(range(24), k=end)), tuple(rounds))


TOLERANCE = 1e-9  # one pass over n rows and n passes over one round differently
TEXTS = [random_text(seed) for seed in range(16)]


@cache
def target_and_head(seed: int) -> tuple[Transformer, MTPHead]:
    target = small_model(seed)
    return target, random_mtp_head(target, seed + 100)


class Drafter(fastmtp.Drafter):
    """A drafter without what the reader writes. It counts the rows that the head runs on."""

    rows, calls = 0, 0

    def run(self, hidden, tokens) -> Tensor:
        shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        if not isinstance(hidden, Tensor) or hidden.dim() != 2:
            raise Wrong(f"`run` gets hidden states of shape {shape}; it takes (n, d): output[-1:] "
                        "keeps both dimensions")  # fmt: skip
        n = len(tokens) if hasattr(tokens, "__len__") else None
        if n is None or isinstance(tokens, Tensor) and tokens.dim() != 1:
            raise Wrong("`run` gets a single token; it takes a list: [draft]")
        if n != len(hidden):
            raise Wrong(f"`run` gets {len(hidden)} hidden states and {n} tokens; they are pairs")
        self.rows, self.calls = self.rows + n, self.calls + 1
        if self.calls > 50:
            raise Wrong("it keeps running the head; K drafts need K calls of `run`")
        return super().run(hidden, tokens)

    def extend(self, *_):
        raise Wrong("this is what you write: use drafter.run, drafter.cache and drafter.model")

    chain = receive = catch_up = extend


@dataclass
class Drafted:
    """What a round leaves: the drafts, the head's rows in its cache, and the rows it ran on."""

    drafts: list[int]
    cached: Tensor  # (2, length, heads, head_dim), keys and values
    rows: int

    @property
    def length(self) -> int:
        return self.cached.shape[1]


def cached_rows(drafter: fastmtp.Drafter, length: int) -> Tensor:
    return drafter.cache.kv[:, 0, 0, :length].clone()


def run_chain(function, case: Text) -> list[Drafted]:
    target, head = target_and_head(case.seed)
    drafter, outcomes, seen = Drafter(head, target, head.new_cache(64), offset=0), [], 0
    for k, end in case.rounds:
        states = target(list(case.tokens[: end - 1]))[0]  # of all tokens but the newest
        drafter.rows = drafter.calls = 0
        drafts = call(
            partial(function, drafter), k,
            hidden=states[seen:], tokens=list(case.tokens[seen + 1 : end]),
        )  # fmt: skip
        if not isinstance(drafts, list):
            raise Wrong(f"it returns a {type(drafts).__name__}; drafts must be a list")
        if any(type(draft) is not int for draft in drafts):
            raise Wrong("a draft is a Tensor; drafts must be of type int: int(logits.argmax())")
        outcomes.append(Drafted(drafts, cached_rows(drafter, drafter.cache.length), drafter.rows))
        seen = end - 1
    return outcomes


@cache
def fresh_chain(case: Text) -> list[Drafted]:
    """Without a cache: every draft takes a pass of the head over all of the text."""
    target, head = target_and_head(case.seed)
    outcomes, seen = [], 0
    for k, end in case.rounds:
        hidden, tokens = target(list(case.tokens[: end - 1]))[0], list(case.tokens[1:end])
        drafter = fastmtp.Drafter(head, target, head.new_cache(64), offset=0)
        drafter.run(hidden, tokens)
        cached = cached_rows(drafter, end - 1)
        drafts: list[int] = []
        for _ in range(k):
            embedded = target.model.embed_tokens(torch.tensor(tokens + drafts))
            output = head(hidden[None], embedded[None])[0, -1:]
            drafts.append(int(target.logits(output).argmax()))
            hidden = torch.cat([hidden, output])
        outcomes.append(Drafted(drafts, cached, end - 1 - seen + k - 1))
        seen = end - 1
    return outcomes


def round_distance(a: Drafted, b: Drafted) -> float:
    if a.drafts != b.drafts or a.length != b.length or a.rows != b.rows:
        return 1.0
    return float((a.cached - b.cached).abs().max()) if a.length else 0.0


def chain_distance(a: list[Drafted], b: list[Drafted]) -> float:
    return max(map(round_distance, a, b))


def show_rounds(case: Text) -> str:
    ends = [1, *(end for _, end in case.rounds)]
    new = ", ".join(f"{b - a}" for a, b in zip(ends, ends[1:]))
    ks = ", ".join(str(k) for k, _ in case.rounds)
    return f"K = {ks} in rounds with {new} new pairs"


def show_chain(case: Text, got: list[Drafted], expected: list[Drafted]) -> str:
    """Describe the first round that is wrong."""
    pairs = enumerate(zip(got, expected))
    i = next(i for i, (a, b) in pairs if not round_distance(a, b) <= TOLERANCE)
    a, b = got[i], expected[i]
    if a.drafts != b.drafts:
        what = f"the drafts are {a.drafts} instead of {b.drafts}"
    elif a.length != b.length:
        what = f"the drafts are right, but the cache's rows are {a.length} instead of {b.length}"
    elif a.rows != b.rows:
        what = f"the head ran on {a.rows} rows; {b.rows} are enough"
    else:
        what = "the cache has rows that a fresh pass over the text does not give"
    return f"{show_rounds(case)}: in round {i + 1} {what}"


def diagnose_chain(results: list[tuple[Text, list[Drafted], list[Drafted]]]) -> str | None:
    """Name what is wrong in the first wrong round of each case; later ones may follow from it."""
    pairs = [
        next(pair for pair in zip(got, expected) if not round_distance(*pair) <= TOLERANCE)
        for _, got, expected in results
        if not chain_distance(got, expected) <= TOLERANCE
    ]
    if any(len(a.drafts) != len(b.drafts) for a, b in pairs):
        return "it must return K drafts"
    if any(a.drafts != b.drafts for a, b in pairs):
        return None
    if any(a.length != b.length for a, b in pairs):
        return "the drafts are right, but the cache has more or fewer rows than the text has pairs"
    if any(a.rows > b.rows for a, b in pairs):
        return "all is right, but the head runs on more rows than necessary"
    return None


# ---- chain: mistakes -----------------------------------------------------------------------------


def faulty(wrong: str):
    """A chain with one mistake."""

    def chain(drafter, hidden, tokens, k):
        model, kv, start = drafter.model, drafter.cache, drafter.cache.length
        if wrong == "only the newest pair":
            hidden, tokens = hidden[-1:], tokens[-1:]
        outputs = drafter.run(hidden, tokens)
        output = outputs[:1] if wrong == "first output" else outputs[-1:]
        if wrong == "starts with the text's token":
            k -= 1
        if wrong != "commits nothing":
            kv.commit([0] if wrong == "commits one pair" else list(range(len(tokens))))
        length, drafts = kv.length, [int(model.logits(output).argmax())]
        while len(drafts) < k + (wrong == "one run too many"):
            state = hidden[-1:] if wrong == "the target's hidden state" else output
            newest = tokens[-1:] if wrong == "the text's token" else drafts[-1:]
            if wrong == "the draft before":
                newest = [*tokens[-1:], *drafts][-2:-1]
            output = drafter.run(state, newest)
            if wrong not in ("commits no draft", "commits nothing"):
                kv.commit([len(drafts) - 1 if wrong == "commits row i" else 0])
            drafts.append(int(model.logits(output).argmax()))
        lengths = {
            "keeps the drafts' rows": kv.length, "drops all rows": start,
            "counts k rows": kv.length - k, "the number of pairs": len(tokens),
        }  # fmt: skip
        kv.truncate(lengths.get(wrong, length))
        first = tokens[-1:] if wrong == "starts with the text's token" else []
        return first + drafts[:k]

    return chain


CHAIN_MISTAKES = {
    "the drafts' rows stay in the cache. They were made from the head's own outputs; truncate the "
    "cache to the rows of the pairs": faulty("keeps the drafts' rows"),
    "the rows of the pairs are dropped together with those of the drafts; the next round needs "
    "them": faulty("drops all rows"),
    "it does not commit a draft's row, so the next draft overwrites it and does not see it": faulty(
        "commits no draft"
    ),
    "it commits nothing, so every call of `run` starts at the same row": faulty("commits nothing"),
    "it commits one row of the new pairs; all of them stay": faulty("commits one pair"),
    "each draft reads the target's hidden state again; from the second draft on, the head must "
    "read its own output": faulty("the target's hidden state"),
    "each draft reads the last token of the text again; from the second draft on, the head must "
    "read the draft before": faulty("the text's token"),
    "the token is one draft too old: with the output that gave draft i goes draft i itself": faulty(
        "the draft before"
    ),
    "the first draft comes from the output of the first new pair; it must be the last one, "
    "output[-1:]": faulty("first output"),
    "commit counts the rows of the last call of `run` from 0, so a draft's row is [0]": faulty(
        "commits row i"
    ),
    "it removes K rows at the end, but K drafts have only K - 1: the last one was not run": faulty(
        "counts k rows"
    ),
    "it truncates to the number of new pairs; a length counts the rows of earlier rounds, too": (
        faulty("the number of pairs")
    ),
    "its first draft is the last token of the text; drafts come after it": faulty(
        "starts with the text's token"
    ),
    "it runs the head on the newest pair only, so the rows of the other new pairs are missing": (
        faulty("only the newest pair")
    ),
    "it runs the head once more after the last draft; nobody reads that output": faulty(
        "one run too many"
    ),
}  # fmt: skip

# ---- best_k: cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Arguments of best_k."""

    rates: list[float]
    cost: list[float]
    draft_cost: float

    @property
    def gains(self) -> list[float]:
        """The probability that draft 1, 2, … is accepted."""
        return list(accumulate(self.rates, mul))

    @property
    def costs(self) -> list[float]:
        """The costs of rounds with K = 0, 1, …"""
        return [cost + k * self.draft_cost for k, cost in enumerate(self.cost[1:])]

    def speed(self, k: int) -> float:
        """Expected tokens per cost, relative to plain decoding."""
        return speed(self.gains, self.costs, k)


def random_rates(seed: int) -> Rates:
    rng, n = random.Random(seed), seed % 6 + 1
    rates = [round(rng.uniform(0.2, 1), 2) for _ in range(n)]
    return Rates(rates, [0.0, *random_costs(rng, n)], round(rng.uniform(0, 0.4), 2))


RATES = [
    Rates([0.5], [0.0, 1.0, 1.1], 0.1),
    Rates([0.3], [0.0, 1.0, 1.3], 0.2),  # no draft pays
    Rates([0.9, 0.9, 0.9, 0.9], [0.0, 1.0, 1.05, 1.95, 2.0, 2.05], 0.05),  # K = 1 beats 2, not 4
    *map(random_rates, range(200)),
]


def run_best_k(function, case: Rates) -> tuple[int, float]:
    k = call(function, case.draft_cost, rates=case.rates, cost=case.cost)
    if type(k) is not int:
        raise Wrong(f"it returns {k!r}; K must be of type int")
    if not 0 <= k <= len(case.rates):
        raise Wrong(f"it returns {k}; K must be from 0 to the number of rates")
    return k, case.speed(k)


def show_rates(case: Rates) -> str:
    return f"rates = {case.rates}, cost = {case.cost}, draft_cost = {case.draft_cost}"


def show_best_k(case: Rates, got: tuple[int, float], expected: tuple[int, float]) -> str:
    return f"{show_rates(case)}: it returns K = {got[0]}, which is {got[1]:.3f} times as fast as " \
           f"plain decoding; K = {expected[0]} is {expected[1]:.3f}"  # fmt: skip


# ---- best_k: mistakes ----------------------------------------------------------------------------


def chooser(tokens, seconds, start=0):
    """A choice of K by wrong `tokens(rates, k)` or a wrong cost of a round,
    `seconds(cost, draft_cost, k)`."""

    def best_k(rates, cost, draft_cost):
        values = [tokens(rates, k) / seconds(cost, draft_cost, k) for k in range(len(rates) + 1)]
        return max(range(start, len(values)), key=values.__getitem__)

    return best_k


def expected(rates, k):
    return 1 + sum(prod(rates[:i]) for i in range(1, k + 1))


def round_cost(cost, draft_cost, k):
    return cost[k + 1] + k * draft_cost


def stops_at_the_first_decline(rates, cost, draft_cost):
    case, k = Rates(rates, cost, draft_cost), 0
    while k < len(rates) and case.speed(k + 1) > case.speed(k):
        k += 1
    return k


BEST_K_MISTAKES = {
    "it adds the rates, but they are conditional: draft 2 counts only if draft 1 was accepted, so "
    "multiply them": chooser(lambda rates, k: 1 + sum(rates[:k]), round_cost),
    "it never returns 0, but without drafts a round costs only 1; sometimes no draft pays": chooser(
        expected, round_cost, start=1
    ),
    "it forgets what the drafts cost: add k * draft_cost": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1]
    ),
    "it counts draft_cost once per round; each of the k drafts costs that much": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1] + (draft_cost if k else 0)
    ),
    "the target's pass has k + 1 rows: the newest token of the text and k drafts": chooser(
        expected, lambda cost, draft_cost, k: cost[max(1, k)] + k * draft_cost
    ),
    "it forgets the token that each round yields without a draft: start at 1": chooser(
        lambda rates, k: sum(prod(rates[:i]) for i in range(1, k + 1)), round_cost
    ),
    "it counts only rounds in which all k drafts are accepted; the others yield tokens too": (
        chooser(lambda rates, k: 1 + k * prod(rates[:k]), round_cost)
    ),
    "it uses the first rate for all drafts": chooser(
        lambda rates, k: sum(rates[0] ** i for i in range(k + 1)), round_cost
    ),
    "it maximises tokens per pass, whatever the round costs": (
        lambda rates, cost, draft_cost: len(rates)
    ),
    "it counts draft_cost k + 1 times; k drafts cost k times as much": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1] + (k + 1) * draft_cost
    ),
    "its products are one too short: draft k is accepted with r₁ · … · rₖ": chooser(
        lambda rates, k: 1 + sum(prod(rates[: i - 1]) for i in range(1, k + 1)), round_cost
    ),
    "it subtracts the cost of the round; the speed is tokens divided by cost": (
        lambda rates, cost, draft_cost: max(
            range(len(rates) + 1),
            key=lambda k: expected(rates, k) - round_cost(cost, draft_cost, k),
        )
    ),
    "it adds up the costs of all passes; the round has one, over k + 1 tokens": chooser(
        expected, lambda cost, draft_cost, k: sum(cost[: k + 2]) + k * draft_cost
    ),
    "it never considers the largest K, len(rates)": lambda rates, cost, draft_cost: best_k(
        rates[:-1], cost, draft_cost
    ),
    "it returns an index that is one less than K": lambda rates, cost, draft_cost: max(
        0, best_k(rates, cost, draft_cost) - 1
    ),
    "it stops at the first K that is slower than the one before. Costs can jump, so try every K": (
        stops_at_the_first_decline
    ),
}

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "second_given_first": (0, 1), "draft_cost_full": (0, 2), "best_k_full": (0, 5),
    "best_k_8192": (0, 5),
}  # fmt: skip
TASKS = [
    Task(
        name="chain",
        package=package_chain,
        solution=chain,
        judge=Oracle(
            TEXTS, run_chain, fresh_chain, chain_distance, show_chain,
            f"{3 * len(TEXTS)} rounds give the drafts and the cache of passes over the whole text",
            tolerance=TOLERANCE, arguments=show_rounds, diagnose=diagnose_chain,
        ),
        hints=(
            "Run the head on all new pairs and commit their rows. The last output gives the first "
            "draft. That output and that draft are the next pair, a row of its own.",
            "A call of `run` sees only committed rows, so commit([0]) after each draft's row. Note "
            "the length of the cache before that, and truncate to it at the end.",
        ),
        mistakes=CHAIN_MISTAKES,
        shows=(fastmtp.Drafter.extend, fastmtp.Drafter.chain),
    ),
    Task(
        name="best_k",
        package=package_best_k,
        solution=best_k,
        judge=Oracle(
            RATES, run_best_k, lambda case: fastest(case.gains, case.costs), speed_distance,
            show_best_k, f"{len(RATES)} random rates and costs", arguments=show_rates,
        ),
        hints=(
            "Go through K = 0, 1, 2, … with a running product: the probability that all drafts so "
            "far are accepted. The tokens of a round are 1 plus the sum of these products.",
            "A round with K drafts costs cost[K + 1] + K * draft_cost. With K = 0 it yields 1 "
            "token for cost[1].",
        ),
        mistakes=BEST_K_MISTAKES,
        shows=(best_draft_size, AdaptiveK.accept_probs),
    ),
]  # fmt: skip
