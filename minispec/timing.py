"""Where a run's time goes: draft, target pass, accept, commit, and the host's own work; and what a
token took."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minispec.cache import KVCache
from minispec.generate import METHODS, Run
from minispec.methods import fastmtp, medusa, prompt_lookup, speculative
from minispec.model import Transformer

PARTS = "draft", "target", "accept", "commit", "host"
# what proposes, and what takes in the accepted tokens for the next proposal
DRAFTS = (
    (speculative, "propose"), (prompt_lookup, "lookup"), (medusa, "propose"),
    (fastmtp.Drafter, "chain"), (fastmtp.Drafter, "extend"),
)  # fmt: skip


class Clock:
    """Seconds by part; a timed call within another belongs to the outer one."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.busy = False

    def around(self, part: str, function: Callable) -> Callable:
        def timed(*arguments, **options):
            if self.busy:
                return function(*arguments, **options)
            self.busy, begin = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - begin
                self.busy = False

        return timed


@contextmanager
def timed_parts(method: str) -> Iterator[Clock]:
    """Within, the parts of `method`'s rounds are timed. On a GPU a part's work may end in the next
    one, as only `probs` waits for it."""
    clock, module = Clock(), sys.modules[METHODS[method].__module__]
    places = [(owner, name, "draft") for owner, name in DRAFTS]
    places += [(Transformer, "forward", "target"), (Transformer, "logits", "target")]
    places += [(module, "accept", "accept"), (KVCache, "commit", "commit")]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for (owner, name, part), (_, _, function) in zip(places, kept):
        setattr(owner, name, clock.around(part, function))
    try:
        yield clock
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def split(method: str, begin: Callable[[], Run]) -> tuple[Run, dict[str, float] | None]:
    """Run to the end what `begin` begins: the run, and the seconds per round in each of PARTS, None
    for a single round.

    The prefill and the first round, in which things are made that stay, are left out.
    """
    with timed_parts(method) as clock:
        run = begin()
        for chunk in run:
            if chunk.step is run.rounds[0]:
                clock.seconds.clear()
                first = run.decode_seconds
    rounds = len(run.rounds) - 1
    if rounds < 1:
        return run, None
    parts = {part: clock.seconds[part] / rounds for part in PARTS[:-1]}
    return run, parts | {"host": (run.decode_seconds - first) / rounds - sum(parts.values())}


def seconds_per_token(*runs: Run) -> float:
    """Of all runs together, without the prefills."""
    return sum(r.decode_seconds for r in runs) / sum(len(r.tokens) for r in runs)


def middle_of_turns(tasks: dict[str, Callable[[], Run]], repeat: int) -> dict[str, Run]:
    """Each task is run `repeat` times, in turn with the others: of each the run of the middle
    speed."""
    tries = [{name: task() for name, task in tasks.items()} for _ in range(repeat)]
    return {
        name: sorted((turn[name] for turn in tries), key=seconds_per_token)[(repeat - 1) // 2]
        for name in tasks
    }


def per_pass(runs: list[Run]) -> float | None:
    """Tokens per target pass, over all runs; None for another library's, which does not say."""
    passes = sum(len(r.rounds) for r in runs)
    return sum(len(r.tokens) for r in runs) / passes if passes else None
