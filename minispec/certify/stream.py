"""One stream of drawn requests, of which every answer is judged. Each row of the table is a view of
it: for one kind of strata, are greedy tokens the most probable ones, are lengths and ends right,
and are sampled tokens unbiased?"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import numpy as np

from minispec.certify import evidence
from minispec.certify.common import Failed, NotSupported, Result
from minispec.certify.conventions import Order
from minispec.certify.evidence import BINS, LIMIT, NOISE, ORDERS, REPEATS, WARPS, Evidence, Stratum
from minispec.certify.examination import (
    Examination,
    Row,
    baseline_tokens,
    difference,
    select,
    wrong_end,
)
from minispec.certify.requests import FIRST_TURN, LATER_TURNS, Asked, Place, conversation
from minispec.certify.statistics import ALARM
from minispec.remote.client import RequestError
from minispec.sampling import Sampling

KINDS = {  # of strata, by check
    "greedy": ("all", "filters", "prompts", "turns", "positions", "end of the context",
               "end tokens", "vocabulary", "batches"),
    "limits": ("all", "lengths", "turns", "end of the context", "end tokens", "batches"),
    "sampled": ("all", "temperature", "filters", "prompts", "turns", "positions",
                "end of the context", "end tokens", "vocabulary", "drafts", "batches"),
}  # fmt: skip
TARGETS = 0.3, 0.2, 0.12, 0.08, 0.06, 0.03, 0.02  # biases to look for, one after the other
EVERY_STRATUM = 0.06  # where the bias of one stratum need not be smaller
PAIRS = *NOISE, REPEATS[1]  # strata of pairs of tokens
CHOICES = 8  # conversations drawn at a time; only the most useful one is held
UNWANTED = 20  # if none was useful this many times in a row, all strata have what they need
LOOKS = 1 / 8, 1 / 4, 1 / 2, 1  # at the fresh tokens that confirm a suspicion
ANY_ORDER = Sampling(0.5, 2, 0.5)  # a setting for which the order of warpers matters


@dataclass
class Seen:
    """What one check has seen in a stratum."""

    answers: int = 0
    tokens: int = 0
    ties: int = 0
    problem: str = ""
    request: dict = field(default_factory=dict)  # with the problem, and its tokens


@dataclass
class Stream:
    """Drawn requests and what their answers show. `rows` are the pairs (check, kind of strata) that
    somebody wants to know about; other requests are not made."""

    places: list[Place]
    rows: set[tuple[str, str]]
    sizes: tuple[int, ...] = (1,)  # of batches
    most: float = float("inf")  # requests
    seed: int = 0
    goals: dict[Stratum, float] | None = None  # how many tokens are wanted, if not by TARGETS
    target: float = TARGETS[0]
    asked: int = 0
    started: bool = False
    evidence: Evidence = field(default_factory=Evidence)
    seen: dict[tuple[str, str, str], Seen] = field(default_factory=lambda: defaultdict(Seen))
    impossible: dict[tuple[Stratum, int], dict] = field(default_factory=dict)
    unsupported: dict[tuple, str] = field(default_factory=dict)  # kind of request -> reason
    incomplete: list[str] = field(default_factory=list)  # reasons of answers that were broken off
    # while a suspicion is confirmed: an answer with a token in the stratum, by order and bin
    examples: dict[tuple[Stratum, int, int], dict] = field(default_factory=dict)
    confirmed: dict[Stratum, tuple[str, dict]] = field(default_factory=dict)  # with an example
    unsure: dict[Stratum, str] = field(default_factory=dict)
    plain: "Stream | None" = None  # the same requests to the baseline

    def __post_init__(self):
        self.numbers, self.noise = count(), np.random.default_rng(self.seed)

    def of_baseline(self) -> "Stream | None":
        if not self.places[0].exam.baseline:
            return None
        places = [replace(place, exam=place.exam.without_baseline()) for place in self.places]
        return Stream(places, self.rows, self.sizes, self.most, self.seed)

    # ---- asking ----------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Make requests until all strata have what they need or the time is over."""
        if not self.started:
            self.started, begin = True, time.monotonic()
            for self.target in TARGETS:
                self.draw(begin + seconds)
            self.confirm(max(10.0, seconds / 2))

    def draw(self, end: float) -> None:
        """Hold the most useful of every few conversations until none of them is useful."""
        unwanted = 0
        while unwanted < UNWANTED and time.monotonic() < end and self.asked < self.most:
            talks = [self.conversation() for _ in range(CHOICES)]
            batch, talk = max(((next(talk), talk) for talk in talks), key=lambda x: self.rank(x[0]))
            unwanted = 0 if self.use(batch) else unwanted + 1
            with suppress(StopIteration):
                while self.use(batch):
                    batch = talk.send(self.ask(batch))

    def conversation(self) -> Iterator[list[Asked]]:
        rng = Random(f"{self.seed} {next(self.numbers)}")
        return conversation(rng, rng.choice(self.places), rng.choice(self.sizes))

    def rank(self, batch: list[Asked]) -> tuple[float, int]:
        """Return a key by which the most useful batch is the largest; of equals, the longest."""
        return self.use(batch), sum(asked.request.n for asked in batch)

    def use(self, batch: list[Asked]) -> float:
        """Return how useful a batch is: the largest bias that could still hide in one of its strata
        (see `lacks`), times the share of an answer's sampled tokens that are in this stratum."""
        use = 0.0
        for asked in batch:
            if features(asked) not in self.unsupported:
                for check, kind, name, first, end in self.strata(asked):
                    share = (end - first) / (asked.request.n or 1) if check == "sampled" else 1.0
                    use = max(use, share * self.lacks(check, kind, name))
        return use

    def strata(self, asked: Asked) -> Iterator[tuple[str, str, str, int, int]]:
        """Yield the strata of a request whose rows are wanted, with their checks."""
        found = list(asked.strata())
        if asked.turn == FIRST_TURN and asked.batch == 1:  # others may follow
            found += [("turns", turn, 0, asked.request.n) for turn in LATER_TURNS]
        noise = [("all", name, 0, asked.request.n) for name in PAIRS]
        checks = {"limits": found, "greedy": found} if asked.certain else {
            "limits": found, "sampled": found + noise}
        for check, found in checks.items():
            yield from ((check, *x) for x in found if (check, x[0]) in self.rows)

    def lacks(self, check: str, kind: str, name: str) -> float:
        """Return the bias that could still hide in a stratum, or 0 if it has seen enough."""
        if self.goals is not None:
            wanted = self.goals.get((kind, name), 0) if check == "sampled" else 0
            return float(self.evidence.tokens((kind, name)) < wanted)
        seen = self.seen[check, kind, name]
        if seen.problem:
            return 0.0
        if check == "sampled":
            hidden = evidence.detectable(self.evidence.tokens((kind, name)))
        else:
            hidden = 3 / max(3, seen.answers)  # rule of three
        target = self.target if name == "all tokens" else max(self.target, EVERY_STRATUM)
        return hidden if hidden > target else 0.0

    def ask(self, batch: list[Asked]) -> list[list[int]]:
        """Ask, judge each answer and return what of it can be continued."""
        exam = batch[0].place.exam
        self.asked += len(batch)
        try:
            answers = exam.decoder.batch([asked.request for asked in batch])
        except (NotSupported, Failed, RequestError) as error:
            return self.unanswered(batch, error)
        return [self.judge(asked, tokens) for asked, tokens in zip(batch, answers, strict=True)]

    def unanswered(self, batch: list[Asked], error: Exception) -> list[list[int]]:
        """Record why a batch has no answers. Only one request may be the reason."""
        if (kind := getattr(error, "kind", "")) == "lost":
            raise error
        failed = kind != "incomplete" and not isinstance(error, NotSupported)
        wrong = getattr(error, "request", None)  # a Failed names none
        if not failed and len(batch) > 1:
            return [self.ask([asked])[0] for asked in batch]
        for asked in batch:
            if failed and wrong not in (None, asked.request):
                continue  # it was answered, or might have been
            if failed:
                for check in "greedy" if asked.certain else "sampled", "limits":
                    self.record(check, asked, [], str(error))
            elif kind:
                self.incomplete.append(str(error))
            else:
                self.unsupported[features(asked)] = f"not supported: {error}"
        return [[] for _ in batch]

    # ---- judging ---------------------------------------------------------------------------------

    def judge(self, asked: Asked, tokens: list[int]) -> list[int]:
        config, (prompt, n, *_) = asked.place.model.config, asked.request
        self.record("limits", asked, tokens, wrong_end(tokens, n, config.eos_ids))
        ends = [i for i, token in enumerate(tokens[:n], 1) if token in config.eos_ids]
        kept = tokens[: ends[0] if ends else n]
        unknown = [i for i, token in enumerate(kept) if not 0 <= token < config.vocab_size]
        if unknown and not asked.certain:
            problem = f"sampled {kept[unknown[0]]}, which is not in the vocabulary"
            self.record("sampled", asked, tokens, problem, unknown[0])
        elif asked.certain:
            exam = asked.place.exam
            plain = baseline_tokens(exam, prompt, n)
            problem, ties, at = difference(exam, prompt, kept, plain)
            if n and not kept:
                problem = "an answer has no tokens"
            self.record("greedy", asked, tokens, problem, at, ties)
        elif kept:
            self.record("sampled", asked, tokens)
            self.weigh(asked, kept)
        return [] if unknown else kept

    def weigh(self, asked: Asked, tokens: list[int]) -> None:
        """Add sampled tokens to the evidence, and note those that are impossible."""
        scored = evidence.score(asked, tokens, self.noise)
        self.evidence.add(asked, scored)
        if self.goals:
            self.keep_examples(asked, tokens, (scored.u[0] * BINS).astype(int))
        for convention, at in enumerate(scored.impossible):
            if at is not None:
                where = f"token {at + 1} of an answer is {tokens[at]}, which has probability 0"
                found = self.describe(asked, tokens) | {"problem": where}
                for kind, name, first, end in asked.strata():
                    if first <= at < end:
                        self.impossible.setdefault(((kind, name), convention), found)

    def keep_examples(self, asked: Asked, tokens: list[int], bins: np.ndarray) -> None:
        """Keep an answer for each stratum, order and bin of its tokens; `bins` are (orders, n)."""
        found = self.describe(asked, tokens)
        for kind, name, first, end in asked.strata():
            for order, row in enumerate(bins[:, first:end]):
                for bin in set(row.tolist()):
                    self.examples.setdefault(((kind, name), order, bin), found)

    def record(self, check: str, asked: Asked, tokens: list[int], problem: str = "",
               at: int | None = None, ties: int = 0) -> None:  # fmt: skip
        """Count an answer in its strata; a problem only in those that hold its token `at`."""
        for its_check, kind, name, first, end in self.strata(asked):
            later = kind == "turns" and name != asked.turn
            if its_check == check and name not in PAIRS and not later:
                seen = self.seen[check, kind, name]
                seen.answers, seen.ties = seen.answers + 1, seen.ties + ties
                seen.tokens += len(tokens[first:end])
                if problem and not seen.problem and (at is None or first <= at < end):
                    seen.problem, seen.request = problem, self.describe(asked, tokens)

    def describe(self, asked: Asked, tokens: list[int]) -> dict:
        return {"checkpoint": asked.place.exam.name, **asked.request.options(), "tokens": tokens}

    def fails(self, stratum: Stratum, convention: int) -> bool:
        """Return whether sampled tokens are impossible or biased, by this order of warpers."""
        if (stratum, convention) in self.impossible:
            return True
        return self.evidence.p(stratum, convention)[0] < LIMIT

    def confirm(self, seconds: float) -> None:
        """Ask for fresh answers in the strata that look biased, whatever the order of warpers."""
        suspects = [x for x in [*self.evidence.counts, REPEATS] if ("sampled", x[0]) in self.rows
                    and all(self.fails(x, i) for i in range(len(WARPS)))
                    and (x, 0) not in self.impossible]  # fmt: skip
        suspects = list({x[0]: x for x in sorted(suspects, key=lambda x: -self.evidence.p(x)[0])}
                        .values())  # the most suspicious one of each kind
        if not suspects:
            return
        limit, end = ALARM / len(LOOKS) / len(suspects), time.monotonic() + seconds
        rows = {("sampled", kind) for kind, _ in suspects}
        fresh = Stream(self.places, rows, self.sizes, seed=self.seed + 1, goals={})
        for share in LOOKS:
            for x in suspects:
                if x not in self.confirmed:
                    fresh.goals[x] = share * self.evidence.tokens(x)
            fresh.draw(end)
            for x in suspects:
                order = self.evidence.p(x)[1]
                p = fresh.evidence.p_values(x)[order]
                text = f"p = {p:.1e} (limit {limit:.0e}) of {fresh.evidence.tokens(x)} fresh tokens"
                if p < limit:
                    bin, example = fresh.fullest_bin(x, order)
                    self.confirmed.setdefault(x, (text + bin, example))
                    fresh.goals.pop(x, None)
                elif fresh.evidence.tokens(x) < fresh.goals[x]:
                    self.unsure[x] = text
                else:
                    self.unsure.pop(x, None)

    def fullest_bin(self, stratum: Stratum, order: int) -> tuple[str, dict]:
        """Describe the bin that holds most tokens; return an answer that has one of them, too."""
        if stratum == REPEATS:
            return "", {}
        counts = self.evidence.counts[stratum][0, order].tolist()
        most, expected = max(counts), sum(counts) / BINS
        bin = counts.index(most)
        text = f"; bin {bin + 1} of {BINS} {most} times instead of {expected:.0f}"
        return text, self.examples.get((stratum, order, bin), {}) | {"bins": counts}


def features(asked: Asked) -> tuple:
    """Return the kind of request, which a decoder may not support."""
    _, n, sampling, _ = asked.request
    temperature = sampling.temperature if sampling.temperature in (0, 1) else 2
    return temperature, min(sampling.top_k, 2), sampling.top_p < 1, n > 0


# ---- rows ----------------------------------------------------------------------------------------


def drawn_rows(
    kinds: dict[str, tuple[str, ...]], only: str, places: Callable[[], list[Place]],
    sizes: tuple[int, ...], most: float, weight: float,
) -> list[Row]:  # fmt: skip
    """Return the rows about drawn requests that `only` selects, of the `kinds` of strata for each
    check. The first to be judged takes the time of all."""
    rows = [Row(check, kind, None, judge_row, compared=check != "limits")
            for check in kinds for kind in kinds[check]
            if kind != "batches" or len(sizes) > 1]  # fmt: skip
    rows = select(rows, only)
    if not rows:
        return []
    stream = Stream(places(), {(row.check, row.case) for row in rows}, sizes, most)
    stream.plain = stream.of_baseline()
    return [row._replace(exam=stream.places[0].exam, arguments=(stream, row.check, row.case),
                         weight=weight * (i == 0)) for i, row in enumerate(rows)]


def judge_row(exam: Examination, stream: Stream, check: str, kind: str) -> Result:
    """Judge one kind of strata by what the stream has shown. Sampled tokens are compared with our
    model also if there is a baseline, as far as the baseline itself agrees with it."""
    if stream.plain and exam.baseline is None:
        return judge_row(exam, stream.plain, check, kind)
    stream.run(exam.seconds)
    result = judge_strata(exam, stream, check, kind)
    if check == "sampled" and stream.plain and result[0] is False:
        if judge_strata(exam.without_baseline(), stream.plain, check, kind)[0] is not True:
            return None, f"the baseline differs from our model here, too; {result[1]}"
    return result


def judge_strata(exam: Examination, stream: Stream, check: str, kind: str) -> Result:
    names = [name for of, its_kind, name in stream.seen if (of, its_kind) == (check, kind)]
    seen = {name: stream.seen[check, kind, name] for name in names}
    seen = {name: x for name, x in seen.items() if x.answers}
    for name, x in seen.items():
        if x.problem:
            exam.evidence.update(x.request)
            return False, f"{name}: {x.problem}"
    reasons = [*stream.unsupported.values(), *stream.incomplete]
    if not seen:
        return None, next(iter(reasons), "not enough time: no such request")
    if check == "sampled":
        return judge_samples(exam, stream, [(kind, name) for name in seen])
    listed = ", ".join(f"{name} {x.answers}" for name, x in seen.items())
    ties, tokens = (max(getattr(x, name) for x in seen.values()) for name in ("ties", "tokens"))
    listed += f"; {ties} ties in {tokens} tokens" * (check == "greedy")
    if stream.incomplete:
        listed += f"; not judged: {len(stream.incomplete)} ({stream.incomplete[0]})"
    return True, f"answers: {listed}"


def judge_samples(exam: Examination, stream: Stream, strata: list[Stratum]) -> Result:
    if strata[0][0] == "all":
        strata = strata + [("all", name) for name in PAIRS]

    def test(order: Order | None) -> Result:
        convention = WARPS.index(order)
        return not any(stream.fails(x, convention) for x in strata), ""

    found = {x: stream.evidence.tokens(x) for x in strata}
    biases = {x: evidence.detectable(n) for x, n in found.items()}
    worst = min(strata, key=lambda x: stream.evidence.p(x)[0])
    p, order = stream.evidence.p(worst)
    listed = ", ".join(f"{x[1]} {found[x]} ({biases[x]:.2f})" for x in strata if x != REPEATS)
    by = f"after {order + 1}" if worst == REPEATS else ORDERS[order]
    where = f"p = {p:.1e} (limit {LIMIT:.0e}) at {worst[1]}, {by}"
    detail = f"{where}; tokens (and the bias that they would show): {listed}"
    exam.evidence["detectable_tv"] = max(biases.values())
    passed, problems = True, [x for x in strata if stream.fails(x, 0)]
    for x in problems:
        if (x, 0) in stream.impossible:
            request = stream.impossible[x, 0]
            exam.evidence.update(request)
            passed, detail = False, f"{x[1]}: {request['problem']}"
            break
        if x in stream.confirmed:
            text, example = stream.confirmed[x]
            exam.evidence.update(example)
            passed, detail = False, f"biased: {where}, and {text}"
    explained = exam.conventions.resolve(ANY_ORDER, (passed and not problems, detail), test)
    if problems and explained[0] is False and passed:
        return (None if any(x in stream.unsure for x in problems) else True), detail
    return explained
