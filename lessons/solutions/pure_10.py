"""Lesson 10: the speed of a method, predicted from a cost curve, and the choice of a method."""

import random
from dataclasses import dataclass
from fractions import Fraction

from form import Oracle, Task, Wrong

from solutions.pure import call, differ

# ---- solutions -----------------------------------------------------------------------------------


def tokens_per_second(tau, rows, drafting, curve, seconds):
    target_pass = sum(curve[n] for n in rows) / len(rows)
    round_cost = drafting + target_pass
    return tau / (round_cost * seconds)


def best_method(methods, curve, batch):
    speed = {"autoregressive": 1 / curve[batch]}
    for name, (tau, rows, drafting) in methods.items():
        wider = [batch * n for n in rows]
        speed[name] = tokens_per_second(tau, wider, drafting * curve[batch], curve, 1.0)
    return max(speed, key=speed.get)


# ---- cases ---------------------------------------------------------------------------------------


def random_curve(rng: random.Random, rows: int) -> list[float]:
    """curve[n] for n up to `rows`: after n = 1 a jump, then almost flat, then steeper."""
    free, slope = rng.choice([1, 2, 4, rows // 2, rows]), rng.choice([0.1, 0.3, 1.0])
    jump, step = rng.choice([0.0, 0.2, 0.8]), rng.choice([0.0, 0.05])
    return [0.0, 1.0] + [
        round(1.0 + jump + step * (n - 1) + slope * max(0, n - free), 3) for n in range(2, rows + 1)
    ]


def short(numbers) -> str:
    return "[" + ", ".join(f"{x:.4g}" for x in numbers) + "]"


# ---- tokens_per_second ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """A run of a method: the new tokens and the rows of each round."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    drafting: float
    curve: tuple[float, ...]
    seconds: float

    @property
    def arguments(self) -> dict:
        tau = sum(self.tokens) / len(self.tokens)
        return dict(
            tau=tau, rows=list(self.rows), drafting=self.drafting, curve=list(self.curve),
            seconds=self.seconds,
        )  # fmt: skip


def random_rounds(seed: int) -> Rounds:
    rng = random.Random(seed)
    rows = tuple(rng.choice([1, 2, 4, 7, 12]) for _ in range((3, 1, 2, 5)[seed % 4]))
    tokens = tuple(rng.randint(1, n) for n in rows)
    drafting = (0.25, 0.0, 0.4, 0.08)[seed // 4 % 4]
    return Rounds(tokens, rows, drafting, tuple(random_curve(rng, 13)), rng.choice([0.05, 0.02]))


RUNS = [
    Rounds((3, 2), (4, 4), 0.25, (0.0, 1.0, 1.1, 1.2, 1.25, 1.3), 0.05),
    Rounds((1, 4), (1, 5), 0.0, (0.0, 1.0, 1.0, 1.1, 1.3, 2.0), 0.05),
    *map(random_rounds, range(24)),
]


def run_tokens_per_second(function, case: Rounds) -> float:
    answer = call(function, **case.arguments)
    try:
        return float(answer)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"it must return a number, not {type(answer).__name__}") from None


def exact_tokens_per_second(case: Rounds) -> float:
    """With a clock that runs through the rounds, in exact arithmetic."""
    clock = Fraction(0)
    for n in case.rows:
        clock += Fraction(case.drafting) * Fraction(case.seconds)
        clock += Fraction(case.curve[n]) * Fraction(case.seconds)
    return float(sum(case.tokens) / clock)


def show_arguments(case: Rounds) -> str:
    tau, rows, drafting, curve, seconds = case.arguments.values()
    return (
        f"tau = {tau:.4g}, rows = {rows}, drafting = {drafting}, curve = {short(curve)}, "
        f"seconds = {seconds}"
    )


def show_tokens_per_second(case: Rounds, got: float, expected: float) -> str:
    total = sum(case.tokens)
    return (
        f"{show_arguments(case)}: it returns {got:.4g}. The {len(case.rows)} rounds yield {total} "
        f"tokens in {total / expected:.4g} seconds, so {expected:.4g} is right"
    )


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


SPEED_MISTAKES = {
    "it leaves out drafting; a round costs drafting plus a pass": (
        lambda tau, rows, drafting, curve, seconds: tau / (mean(curve[n] for n in rows) * seconds)
    ),
    "it takes the cost of a pass over the mean number of rows; take the mean of the costs": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + curve[round(mean(rows))]) * seconds)
        ),
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + curve[int(mean(rows))]) * seconds)
        ),
    ),
    "it takes the most expensive pass for all; take the mean of the costs": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + max(curve[n] for n in rows)) * seconds)
        )
    ),
    "it takes the first round's pass for all; take the mean of the costs": (
        lambda tau, rows, drafting, curve, seconds: tau / ((drafting + curve[rows[0]]) * seconds)
    ),
    "it adds a token to tau, but tau counts all tokens of a round": (
        lambda tau, rows, drafting, curve, seconds: (
            (tau + 1) / ((drafting + mean(curve[n] for n in rows)) * seconds)
        )
    ),
    "it multiplies the pass by 1 + drafting; drafting is added, in passes over one row": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((1 + drafting) * mean(curve[n] for n in rows) * seconds)
        )
    ),
    "it interpolates the cost of a pass over the mean number of rows; take the mean of the costs": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + interpolated(curve, mean(rows))) * seconds)
        )
    ),
    "it averages the speeds of the rounds. Expensive rounds take more of the time, so average the "
    "costs and then divide": lambda tau, rows, drafting, curve, seconds: mean(
        tau / ((drafting + curve[n]) * seconds) for n in rows
    ),
    "every pass costs 1, as in the paper's formula; a pass over n rows costs curve[n]": (
        lambda tau, rows, drafting, curve, seconds: tau / ((drafting + 1) * seconds)
    ),
    "a pass over n rows costs n; read its cost from the curve": (
        lambda tau, rows, drafting, curve, seconds: tau / ((drafting + mean(rows)) * seconds)
    ),
    "it reads curve[n - 1]; curve[0] is 0, and a pass over n rows costs curve[n]": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + mean(curve[n - 1] for n in rows)) * seconds)
        )
    ),
    "it divides by the cost of all rounds together, but tau is the yield of one": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / ((drafting + sum(curve[n] for n in rows)) * seconds)
        )
    ),
    "it pays for drafting once for every row; `drafting` is the cost of a round": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / (mean(n * drafting + curve[n] for n in rows) * seconds)
        )
    ),
    "it adds drafting as seconds; its unit is a pass over one token": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / (drafting + mean(curve[n] for n in rows) * seconds)
        )
    ),
    "it returns the speed relative to plain decoding; divide by `seconds`, too": (
        lambda tau, rows, drafting, curve, seconds: tau / (drafting + mean(curve[n] for n in rows))
    ),
    "it multiplies by `seconds` instead of dividing": (
        lambda tau, rows, drafting, curve, seconds: (
            tau / (drafting + mean(curve[n] for n in rows)) * seconds
        )
    ),
    "it returns seconds per token; turn it upside down": (
        lambda tau, rows, drafting, curve, seconds: (
            (drafting + mean(curve[n] for n in rows)) * seconds / tau
        )
    ),
    "it returns rounds per second; each yields tau tokens": (
        lambda tau, rows, drafting, curve, seconds: (
            1 / ((drafting + mean(curve[n] for n in rows)) * seconds)
        )
    ),
}


def interpolated(curve: list[float], n: float) -> float:
    low = int(n)
    high = min(low + 1, len(curve) - 1)
    return curve[low] + (n - low) * (curve[high] - curve[low])


# ---- best_method ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Methods to choose from: a name, and then the arguments of tokens_per_second."""

    methods: tuple[tuple[str, float, tuple[int, ...], float], ...]
    curve: tuple[float, ...]
    batch: int

    @property
    def arguments(self) -> dict:
        methods = {name: (tau, list(rows), drafting) for name, tau, rows, drafting in self.methods}
        return dict(methods=methods, curve=list(self.curve), batch=self.batch)


def worths(case: Choice) -> dict[str, Fraction]:
    """Tokens of a text per unit of cost, from a clock in exact arithmetic."""
    found = {"autoregressive": 1 / Fraction(case.curve[case.batch])}
    for name, tau, rows, drafting in case.methods:
        clock = Fraction(0)
        for n in rows:
            clock += Fraction(drafting) * Fraction(case.curve[case.batch])
            clock += Fraction(case.curve[case.batch * n])
        found[name] = Fraction(tau) * len(rows) / clock
    return found


def random_choice(seed: int) -> Choice:
    """A case in which the best method is at least 1% faster than the next."""
    rng = random.Random(seed)
    while True:
        methods = tuple(
            (name, round(1 + rng.random() * 2, 2), tuple(rng.choices(sizes, k=3)), drafting)
            for name, sizes, drafting in (
                ("prompt-lookup", [1, 4, 7], 0.0),
                ("medusa", [3, 5], rng.choice([0.1, 0.4])),
                ("fastmtp", [4], rng.choice([0.2, 0.5, 1.0])),
                ("lookahead", [12, 16], 0.0),
            )
        )
        batch = (1, 2, 4)[seed % 3]
        case = Choice(methods, tuple(random_curve(rng, 16 * batch)), batch)
        first, second, *_ = sorted(worths(case).values(), reverse=True)
        if first > 1.01 * second:
            return case


CHOICES = [
    # the most tokens per pass, but too many rows
    Choice(
        (("fastmtp", 2.0, (4, 4), 0.25), ("lookahead", 2.2, (16, 16), 0.0)),
        (0.0, *(1 + 0.1 * n for n in range(16))), 1,
    ),
    # nothing pays
    Choice(
        (("fastmtp", 1.2, (4, 4), 0.25), ("lookahead", 1.4, (16, 16), 0.0)),
        (0.0, *(1 + 0.1 * n for n in range(16))), 1,
    ),
    *map(random_choice, range(120)),
    Choice((), (0.0, 1.0, 1.5), 1),  # only plain decoding
    Choice((("fastmtp", 2.0, (4, 4), 0.5),), (0.0, 1.0, 1.25, 1.5, 1.5), 1),  # as fast as plain
]  # fmt: skip


def run_best_method(function, case: Choice) -> str:
    answer = call(function, **case.arguments)
    if isinstance(answer, tuple | list):
        raise Wrong("it must return only the name of the method")
    if not isinstance(answer, str):
        raise Wrong(f"it must return the name of a method, not {answer!r}")
    if answer not in ("autoregressive", *(name for name, *_ in case.methods)):
        raise Wrong(f"it returns {answer!r}, which is none of the methods")
    return answer


def exact_best_method(case: Choice) -> str:
    found = worths(case)
    return max(found, key=found.get)


def show_choice(case: Choice) -> str:
    methods, curve, batch = case.arguments.values()
    used = {batch, *(batch * n for _, rows, _ in methods.values() for n in rows)}
    costs = ", ".join(f"curve[{n}] = {curve[n]:.4g}" for n in sorted(used))
    return f"methods = {methods}, batch = {batch}, {costs}"


def show_best_method(case: Choice, got: str, expected: str) -> str:
    found = worths(case)
    speed = {name: float(worth / found["autoregressive"]) for name, worth in found.items()}
    return (
        f"{show_choice(case)}: it returns {got!r}, whose speed relative to plain decoding is "
        f"{speed[got]:.2f}, but {expected!r} has {speed[expected]:.2f}"
    )


NEVER_PLAIN = "it never returns 'autoregressive', but plain decoding may be the fastest"


def diagnose(results: list[tuple[Choice, str, str]]) -> str | None:
    """What is wrong if no known mistake gives these answers."""
    if all(got != "autoregressive" for case, got, _ in results if case.methods):
        return NEVER_PLAIN
    if all(got == expected for case, got, expected in results if case.batch == 1):
        return (
            "it is right for a batch of 1. For a larger one, a round is a pass over batch * n "
            "rows, plain decoding one over `batch` rows, and tokens are those of one text"
        )
    return None


def chooser(value):
    """A best_method that prefers by `value(tau, rows, drafting, curve, batch)`."""

    def best_method(methods, curve, batch):
        all_methods = {"autoregressive": (1.0, [1], 0.0), **methods}
        return max(all_methods, key=lambda name: value(*all_methods[name], curve, batch))

    return best_method


def without_plain(methods, curve, batch):
    if not methods:
        return "autoregressive"
    return max(methods, key=lambda name: right_value(*methods[name], curve, batch))


def right_value(tau, rows, drafting, curve, batch):
    return tau / (drafting * curve[batch] + mean(curve[batch * n] for n in rows))


def plain_at_one(methods, curve, batch):
    speed = {name: right_value(*method, curve, batch) for name, method in methods.items()}
    return max({"autoregressive": 1.0, **speed}.items(), key=lambda item: item[1])[0]


def prefers_drafts(methods, curve, batch):
    speed = {name: right_value(*method, curve, batch) for name, method in methods.items()}
    return max({**speed, "autoregressive": 1 / curve[batch]}.items(), key=lambda item: item[1])[0]


CHOICE_MISTAKES = {
    "it prefers a method that is only as fast as plain decoding; then it must return "
    "'autoregressive'": prefers_drafts,
    "it chooses the most tokens per pass, whatever a round costs": chooser(
        lambda tau, rows, drafting, curve, batch: tau
    ),
    "it ignores the batch: a round with n rows is a pass over batch * n rows": chooser(
        lambda tau, rows, drafting, curve, batch: tau / (drafting + mean(curve[n] for n in rows))
    ),
    "it widens the pass but not drafting, which also runs for all texts: drafting * curve[batch]": (
        chooser(
            lambda tau, rows, drafting, curve, batch: (
                tau / (drafting + mean(curve[batch * n] for n in rows))
            )
        )
    ),
    "it multiplies the cost of a pass by the batch; a pass over batch * n rows costs "
    "curve[batch * n]": chooser(
        lambda tau, rows, drafting, curve, batch: (
            tau / (drafting * curve[batch] + batch * mean(curve[n] for n in rows))
            if rows != [1] or drafting else 1 / curve[batch]
        )
    ),
    "it pays for drafting once per text; one run of a head over the batch costs "
    "drafting * curve[batch]": chooser(
        lambda tau, rows, drafting, curve, batch: (
            tau / (drafting * batch + mean(curve[batch * n] for n in rows))
        )
    ),
    "it takes the cost of a pass over the mean number of rows; take the mean of the costs": chooser(
        lambda tau, rows, drafting, curve, batch: (
            tau / (drafting * curve[batch] + curve[round(batch * mean(rows))])
        )
    ),
    "it adds up the passes of all rounds, but tau is the yield of one": chooser(
        lambda tau, rows, drafting, curve, batch: (
            tau / (drafting * curve[batch] + sum(curve[batch * n] for n in rows))
        )
    ),
    "it leaves out drafting": chooser(
        lambda tau, rows, drafting, curve, batch: tau / mean(curve[batch * n] for n in rows)
    ),
    NEVER_PLAIN: without_plain,
    "its plain decoding costs 1; a plain step of the batch is a pass over `batch` rows, "
    "curve[batch]": plain_at_one,
    "it chooses the cheapest round, whatever it yields; that is always plain decoding's": chooser(
        lambda tau, rows, drafting, curve, batch: right_value(1.0, rows, drafting, curve, batch)
    ),
    "it chooses the slowest method": chooser(
        lambda tau, rows, drafting, curve, batch: -right_value(tau, rows, drafting, curve, batch)
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

TOKENS_PER_SECOND = Task(
    name="tokens_per_second",
    solution=tokens_per_second,
    judge=Oracle(
        RUNS, run_tokens_per_second, exact_tokens_per_second,
        lambda a, b: abs(a - b) / abs(b), show_tokens_per_second,
        f"the clock of {len(RUNS)} runs", arguments=show_arguments,
    ),
    hints=(
        "The cost of a pass is the mean of curve[n] over `rows`. What else does a round cost?",
        "cost * seconds is the time of a round, and a round yields tau tokens.",
    ),
    mistakes=SPEED_MISTAKES,
)  # fmt: skip
BEST_METHOD = Task(
    name="best_method",
    solution=best_method,
    judge=Oracle(
        CHOICES, run_best_method, exact_best_method,
        differ, show_best_method,
        f"{len(CHOICES)} choices, with batches of 1, 2 and 4", arguments=show_choice,
        diagnose=diagnose,
    ),
    hints=(
        "tokens_per_second can do the arithmetic, with other rows and another cost of "
        "drafting. `seconds` is the same for all methods, so it may be 1.",
        "Begin a dict of speeds with plain decoding: 1 token for curve[batch]. "
        "max(speed, key=speed.get) is the name with the largest value.",
    ),
    mistakes=CHOICE_MISTAKES,
)  # fmt: skip
TASKS = [TOKENS_PER_SECOND, BEST_METHOD]
