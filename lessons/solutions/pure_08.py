"""Lesson 08: a benchmark of two methods on a machine that drifts and pauses."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean, mean, median

from form import Oracle, Task, Wrong

# ---- a simulated machine -------------------------------------------------------------------------


class Machine:
    """A machine on which method B is exactly `speedup` times as fast as A. During the first two
    runs per prompt, an undisturbed run becomes slower or faster, from a factor of drift[0] to
    drift[1]. Each run is off by a few percent, and one in ten is paused, which makes it up to four
    times as long."""

    def __init__(
        self, seed: int, speedup: float = 1.5, drift: tuple[float, float] = (1.0, 2.0),
        prompts: int = 40,
    ):  # fmt: skip
        self.random, self.speedup, self.drift = random.Random(seed), speedup, drift
        self.prompts = list(range(prompts))
        self.work = [self.random.uniform(0.5, 2.0) for _ in self.prompts]  # seconds of A
        self.runs: list[tuple[str, int, float]] = []  # method, prompt, seconds

    @property
    def slowness(self) -> float:
        """The factor at this moment."""
        start, end = self.drift
        return start + (end - start) * min(1.0, len(self.runs) / (2 * len(self.prompts)))

    def run(self, method: str, prompt: int) -> float:
        """Decode a prompt with method "A" or "B". Returns the seconds."""
        seconds = self.work[prompt] * self.slowness * self.random.gauss(1.0, 0.03)
        if self.random.random() < 0.1:
            seconds *= self.random.uniform(1.0, 4.0)
        seconds /= self.speedup if method == "B" else 1.0
        self.runs.append((method, prompt, seconds))
        return seconds


# ---- solution ------------------------------------------------------------------------------------


def measure_speedup(run, prompts):
    ratios = []
    for prompt in prompts:
        seconds = run("A", prompt)
        ratios.append(seconds / run("B", prompt))
    return median(ratios)


# ---- cases ---------------------------------------------------------------------------------------

TOLERANCE = 0.05
MOST_RUNS = 6  # per prompt


@dataclass(frozen=True)
class Settings:
    """A simulated machine."""

    seed: int
    speedup: float
    drift: tuple[float, float]


MACHINES = [
    Settings(seed, speedup, drift)
    for seed, (speedup, drift) in enumerate(
        [(speedup, drift) for speedup in (1.5, 1.0, 0.8, 2.5) for drift in ((1, 2), (2, 1))] * 4
    )
]


@dataclass(frozen=True)
class Report:
    """The speedup that a benchmark reports, and its runs: method, prompt, seconds."""

    speedup: float
    runs: tuple[tuple[str, int, float], ...] = ()

    def seconds(self, method: str) -> dict[int, float]:
        """The seconds of each prompt; of several runs, the last."""
        return {prompt: seconds for name, prompt, seconds in self.runs if name == method}


def run_benchmark(function, case: Settings) -> Report:
    machine = Machine(case.seed, case.speedup, case.drift)

    def run(method, prompt) -> float:
        if method not in ("A", "B") or prompt not in machine.prompts:
            raise Wrong(f'it calls run({method!r}, {prompt!r}); run takes "A" or "B", and a prompt')
        if len(machine.runs) == MOST_RUNS * len(machine.prompts):
            raise Wrong(f"it runs more than {MOST_RUNS} times per prompt")
        return machine.run(method, prompt)

    answer = function(run, list(machine.prompts))
    try:
        return Report(float(answer), tuple(machine.runs))
    except (TypeError, ValueError):
        raise Wrong(f"it must return a number, not {type(answer).__name__}") from None


def exact_report(case: Settings) -> Report:
    return Report(case.speedup)


def show_machine(case: Settings) -> str:
    kind = "slows down" if case.drift[0] < case.drift[1] else "speeds up"
    return f"a machine that {kind}"


def show_report(case: Settings, got: Report, expected: Report) -> str:
    return f"{show_machine(case)}: it reports a speedup of {got.speedup:.2f}; the truth is " \
           f"{expected.speedup:.2f}"  # fmt: skip


# ---- its mistakes --------------------------------------------------------------------------------


def ratios(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b)]


# what is computed from the seconds of A and of B, per prompt
ESTIMATES: dict[str, Callable[[list[float], list[float]], float]] = {
    "it divides the total or mean seconds; a single long pause changes them. Use a ratio per "
    "prompt": lambda a, b: sum(a) / sum(b),
    "it takes the mean of the ratios. A pause changes one ratio by a factor of up to 4, and the "
    "mean with it": lambda a, b: mean(ratios(a, b)),
    "it takes the geometric mean of the ratios, which depends on the length of a pause, too": (
        lambda a, b: geometric_mean(ratios(a, b))
    ),
    "it reports the largest ratio, which is that of the longest pause of A": lambda a, b: max(
        ratios(a, b)
    ),
    "it divides the shortest times. Each is one run, at another moment or even on another prompt": (
        lambda a, b: min(a) / min(b)
    ),
    "it divides the median of A by the median of B, which are runs of different prompts": (
        lambda a, b: median(a) / median(b)
    ),
    "it is upside down: if B takes half as long, it is 2 times as fast": (
        lambda a, b: median(ratios(b, a))
    ),
    "it returns the share of time that B saves; return seconds of A / seconds of B": (
        lambda a, b: 1 - median(ratios(b, a))
    ),
}
SEPARATE = "its runs of A and of B are at different times, and the machine has changed in between"
ONE_PROMPT = "it measures one prompt only, and any of its runs may have been paused"


def in_turn(estimate: Callable) -> Callable:
    def wrong(run, prompts):
        pairs = [(run("A", prompt), run("B", prompt)) for prompt in prompts]
        return estimate(*map(list, zip(*pairs)))

    return wrong


def separately(run, prompts):
    seconds = {method: [run(method, prompt) for prompt in prompts] for method in "AB"}
    return median(ratios(seconds["A"], seconds["B"]))


def one_prompt(run, prompts):
    return run("A", prompts[0]) / run("B", prompts[0])


def diagnose(results: list[tuple[Settings, Report, Report]]) -> str | None:
    """Name the order of the runs or the estimate, from a report of any benchmark."""
    reports = [got for _, got, _ in results]
    for method in "AB":
        if not all(report.seconds(method) for report in reports):
            return f"it never runs {method}"
    first = reports[0]
    if len(first.seconds("A")) == 1:
        return ONE_PROMPT
    at = {m: mean(i for i, r in enumerate(first.runs) if r[0] == m) for m in "AB"}
    if abs(at["A"] - at["B"]) > len(first.runs) / 8:
        return SEPARATE
    for message, estimate in ESTIMATES.items():
        if all(abs(estimate(*paired(report)) - report.speedup) < 1e-9 for report in reports):
            return message
    return None


def paired(report: Report) -> tuple[list[float], list[float]]:
    """The seconds of A and of B on the prompts that both decoded."""
    a, b = report.seconds("A"), report.seconds("B")
    shared = [prompt for prompt in a if prompt in b]
    return [a[prompt] for prompt in shared], [b[prompt] for prompt in shared]


# ---- tasks ---------------------------------------------------------------------------------------

MEASURE_SPEEDUP = Task(
    name="measure_speedup",
    solution=measure_speedup,
    judge=Oracle(
        MACHINES, run_benchmark, exact_report,
        lambda a, b: abs(a.speedup / b.speedup - 1), show_report,
        f"within {TOLERANCE:.0%} of the truth on {len(MACHINES)} machines",
        tolerance=TOLERANCE, arguments=show_machine, diagnose=diagnose,
    ),
    hints=(
        "The drift hardly changes anything between two runs in a row. So which two runs should "
        "be next to each other?",
        "Every prompt gives a ratio, seconds of A / seconds of B. A pause spoils one of them, "
        "by any factor. The median does not depend on how far off it is.",
    ),
    mistakes={
        **{message: in_turn(estimate) for message, estimate in ESTIMATES.items()},
        SEPARATE: separately,
        ONE_PROMPT: one_prompt,
    },
)  # fmt: skip
TASKS = [MEASURE_SPEEDUP]
