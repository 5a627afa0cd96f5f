"""Lesson 08: see pure_08.py for its task."""

from dataclasses import replace
from types import SimpleNamespace

from form import Question

from minispec.bench.measure import measure, timing
from solutions.pure_08 import MEASURE_SPEEDUP

# ---- the package's function, with the lesson's arguments -----------------------------------------


def package_measure_speedup(run, prompts):
    def decoded(method: str, prompt) -> SimpleNamespace:
        return SimpleNamespace(decode_seconds=run(method, prompt), tokens=[0])

    plain, runs = zip(*[(decoded("A", prompt), decoded("B", prompt)) for prompt in prompts])
    return timing([plain], [runs])["speedup"]


# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "pass_over_floor": (0.1, 100), "operators_per_layer": (1, 1000),
    "reported_in_sequence": (0.1, 10),
}  # fmt: skip
TASKS = [replace(MEASURE_SPEEDUP, package=package_measure_speedup, shows=(measure, timing))]

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "A benchmark runs all prompts with A and then all with B, while the machine slows down "
        "steadily. Does an error remain in the mean of a thousand such benchmarks?",
        True,
        "B is always measured on the slower half, so every repetition makes the same error.",
    ),
    Question(
        "The same pass is timed several times, while other programs run. Which time is closest to "
        "that of the undisturbed machine?",
        "a",
        "the work is always the same, so a disturbance can only add to its time.",
        ("the shortest", "the mean", "the median"),
    ),
    Question(
        "Memory delivers 20 GB/s. How many milliseconds does a pass over one token take at least, "
        "if the weights are 500 MB?",
        25,
        "500 MB / (20 GB/s) = 25 ms, however fast the processor calculates.",
    ),
    Question(
        "A pass on a GPU is timed without waiting for its result. What is wrong with the time?",
        "b",
        "the call returns as soon as the work is queued.",
        ("it is too long", "it is too short", "nothing, because a call returns with its result"),
    ),
    Question(
        "A pass costs 1, whatever its rows, and a draft costs c = 0.5. Each draft is accepted with "
        "α = 0.4. Is any number of drafts γ ≥ 1 faster than plain decoding?",
        False,
        "each draft adds at most 0.4 tokens to a round, and 0.5 to its cost.",
    ),
]
