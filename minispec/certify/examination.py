"""One examination for every decoder: greedy answers, lengths, ends and samples.

A decoder under examination is a function `tokens(prompt, n, sampling, seed)` of one checkpoint.
`functions/decoder.py` makes one of a Python function, `servers/context.py` of a server."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import NamedTuple, Protocol

from minispec.certify import common
from minispec.certify.common import GREEDY, Failed, NotSupported, Result, RowTimeOver, Verdict
from minispec.certify.compare import TIE, Reference, divergence
from minispec.certify.conventions import Conventions, Order, warper
from minispec.certify.scoring import Scores, Warp, deviation, normalise_end, smallest_p
from minispec.certify.statistics import ALARM
from minispec.model import Transformer
from minispec.remote.client import RequestError
from minispec.remote.identity import largest_gap
from minispec.sampling import Sampling

FIRST_RUNS, MAX_RUNS = 100, 51_200  # the runs are doubled from the one to the other
SUSPICIOUS, PATIENCE = 1e-3, 8  # with a smaller p-value, a row may take 8 times as long
ROW_SECONDS = 600  # a row may always take so long
TARGET_BIAS = 0.03  # more runs than are needed to detect this are not made
FRESH_SEEDS = 10**6  # of the samples that confirm a suspicion
MIN_ENTROPY = 0.25  # bits per token; samples from sharper distributions prove little


class Request(NamedTuple):
    """A request to a decoder."""

    prompt: list[int]
    n: int  # the maximum number of new tokens
    sampling: Sampling = GREEDY
    seed: int = 0

    def options(self) -> dict:
        """Return it under the names that functions and generate use."""
        return {"prompt": list(self.prompt), "max_new_tokens": self.n, **asdict(self.sampling),
                "seed": self.seed}  # fmt: skip


class Decoder(Protocol):
    """A decoder of one checkpoint under examination."""

    def batch(self, requests: list[Request]) -> list[list[int]]:
        """Return at most `n` new tokens for each request, including a final end token. Raise
        Failed, or NotSupported if it does not support a sampling."""


@dataclass
class Examination:
    """A decoder, its model, and what is known about it so far."""

    decoder: Decoder
    model: Transformer  # in float64
    baseline: Decoder | None = None  # the same decoder without drafts; must then be equalled
    tolerance: float = TIE  # rounding may hide a logit gap below this
    conventions: Conventions = field(default_factory=Conventions)
    name: str | None = None  # of the checkpoint
    evidence: dict = field(default_factory=dict)  # the last request and its tokens
    share: float = 1.0  # of what is left of the time and the requests, for the current row
    seconds: float = math.inf  # for the current row, roughly

    @property
    def decoders(self) -> list[Decoder]:
        return [decoder for decoder in (self.decoder, self.baseline) if decoder]

    def tokens(self, *request) -> list[int]:
        """Return the decoder's tokens for a request, and remember both."""
        request = Request(*request)
        self.remember(request)
        (self.evidence["tokens"],) = self.decoder.batch([request])
        return self.evidence["tokens"]

    def remember(self, request: Request, **more) -> None:
        self.evidence.clear()
        self.evidence.update({"checkpoint": self.name} | request.options() | more)

    def without_baseline(self) -> "Examination":
        return replace(self, decoder=self.baseline, baseline=None, conventions=Conventions())


class Row(NamedTuple):
    """One row of the table, to be judged by `function(exam, *arguments)`."""

    check: str
    case: str
    exam: Examination
    function: Callable[..., Result]
    arguments: tuple = ()
    compared: bool = True  # with the baseline, if there is one
    weight: float = 0.0  # the rows that have one share the time in proportion

    @property
    def name(self) -> str:
        return f"{self.check}: {self.case}"


def select(rows: Iterable[Row], only: str) -> list[Row]:
    """Return the row whose name is `only`, or all rows whose names contain this text."""
    rows = [row for row in rows if only in row.name]
    return [row for row in rows if row.name == only] or rows


def run_rows(rows: list[Row], seconds: float) -> Iterator[Verdict]:
    """Yield the verdict on each row, after that on the baseline if there is one. A server that
    cannot be reached raises RequestError after its verdict, because every other row would fail."""
    end, judged = time.monotonic() + seconds, []
    for row in rows:
        if row.compared and row.exam.baseline:
            judged.append((row, row.exam.without_baseline()))
        judged.append((row, row.exam))
    weights = [row.weight * len(exam.decoders) for row, exam in judged]
    for i, (row, exam) in enumerate(judged):
        exam.share = weights[i] / (sum(weights[i:]) or 1.0)
        left = max(0.0, end - time.monotonic())
        exam.seconds = exam.share * left
        try:
            passed, detail = evaluate(row, exam, max(ROW_SECONDS, PATIENCE * exam.seconds, left))
        except RequestError as error:
            yield Verdict(row.check, row.case, False, str(error))
            raise
        tv = exam.evidence.pop("detectable_tv", None)
        if exam is row.exam:
            evidence = dict(exam.evidence) if passed is False else {}
            yield Verdict(row.check, row.case, passed, detail, evidence, tv)
        else:
            yield Verdict("baseline", f"{row.check}, {row.case}", passed or None, detail)


def evaluate(row: Row, exam: Examination, seconds: float) -> Result:
    """Judge one row; an exception fails only this row, and so many seconds skip it."""
    exam.evidence.clear()
    try:
        with common.time_limit(seconds, RowTimeOver):
            return row.function(exam, *row.arguments)
    except RowTimeOver as error:
        return None, f"not enough time: the row {error}"
    except NotSupported as error:
        return None, f"not supported: {error}"
    except RequestError as error:
        if error.kind == "lost":
            raise
        return (None if error.kind == "incomplete" else False), str(error)
    except Failed as error:
        return False, str(error)
    except Exception as error:
        return None, f"cannot be judged: {type(error).__name__}: {error}"


# ---- greedy --------------------------------------------------------------------------------------


def baseline_tokens(exam: Examination, prompt: list[int], n: int) -> list[int] | None:
    return exam.baseline.batch([Request(prompt, n)])[0][:n] if exam.baseline else None


def difference(
    exam: Examination, prompt: list[int], tokens: list[int], plain: list[int] | None
) -> tuple[str, int, int | None]:
    """Describe where greedy tokens are too far below the best logit for a tie, or return ""; count
    those that differ; and return the index of the worst. Given `plain` tokens, only the first
    difference from them counts."""
    if plain is None:
        gap, at, differing = largest_gap(exam.model, prompt, tokens)
        where = f"token {at} is {tokens[at : at + 1]}, {gap:.3g} below the best"
    else:
        n = min(len(plain), len(tokens))
        at, gap = divergence(Reference(exam.model), prompt, tokens[:n], plain[:n])
        differing = at is not None
        where = f"{common.first_difference(tokens, plain)}, top-2 gap {gap:.3g}"
    where = f"{where}: not a tie (tolerance {exam.tolerance:.2g})"
    return where if gap >= exam.tolerance else "", int(differing), at


def wrong_end(tokens: list[int], n: int, eos_ids: tuple[int, ...]) -> str:
    """Describe what is wrong with the length of an answer, or return ""."""
    for i, token in enumerate(tokens[:-1]):
        if token in eos_ids:
            return f"continues after the end token {token} at {i}: {tokens[i : i + 4]}"
    if len(tokens) > n or (len(tokens) < n and not (tokens and tokens[-1] in eos_ids)):
        return f"{len(tokens)} tokens instead of {n}"
    return ""


# ---- samples -------------------------------------------------------------------------------------


class Samples:
    """Samples of a decoder and its baseline for one request with different seeds."""

    def __init__(self, exam: Examination, request: Request, first: int = 0):
        self.exam, self.request, self.n, self.first = exam, request, request.n, first
        self.samples: list[list[tuple[int, ...]]] = [[] for _ in exam.decoders]
        self.scores: dict[Warp, Scores] = {}
        self.p = self.bias = 1.0  # of the last test
        self.example = 0  # seed of an answer in the cell that deviates most

    def draw(self, runs: int) -> str:
        """Draw samples until there are `runs`; describe the first invalid one, or return ""."""
        model = self.exam.model
        for decoder, samples in zip(self.exam.decoders, self.samples):
            seeds = range(self.first + len(samples), self.first + runs)
            requests = [self.request._replace(seed=seed) for seed in seeds]
            for request, tokens in zip(requests, decoder.batch(requests), strict=True):
                self.exam.remember(request, tokens=tokens)
                tokens = tokens[: self.n]  # too many are reported elsewhere
                if problem := wrong_end(tokens, self.n, model.config.eos_ids):
                    return problem
                if unknown := set(tokens) - set(range(model.config.vocab_size)):
                    return f"sampled {min(unknown)}, which is not in the vocabulary"
                samples.append(normalise_end(tokens, model.config.eos_ids))
        return ""

    def test(self, warp: Warp, alarm: float) -> Result:
        """Test the samples by χ²: against a distribution, or against those of the baseline."""
        scores = Scores(self.exam.model, self.request.prompt, warp, max(1e-3, self.exam.tolerance))
        scores = self.scores.setdefault(warp, scores).add(chain(*self.samples))
        samples, *others = self.samples
        if scores.impossible and not others:
            self.p = 0.0
            return False, f"sampled {scores.impossible}, which has probability 0"
        entropy = scores.entropy(samples)
        if entropy < MIN_ENTROPY:
            return None, too_sharp(entropy)
        if (share := scores.uncertain(5 / len(samples))) > 0.01:
            return None, f"rounding may decide which tokens are kept in {share:.0%} of the answers"
        self.p, where, self.bias = smallest_p(scores, samples, *(others or [None]), alarm)
        if self.p <= alarm:
            cell, self.example = deviation(scores, samples, *(others or [None]), where)
            where = f"{where} ({cell})"
        everywhere = f", of {self.bias / self.n**0.5:.2f} at all" if not others else ""
        runs, p = f"{len(samples)} runs of {self.n} tokens", f"{self.p:.2g} (limit {alarm:.0e})"
        detail = f"p = {p} at {where}, {runs}; a TV of {self.bias:.2f} at one token{everywhere}"
        return self.p > alarm, f"{detail} would be detected"


def too_sharp(entropy: float) -> str:
    return f"proves little: the distributions have an entropy of {entropy:.2f} bits per token"


def samples_fit(exam: Examination, request: Request, runs: int) -> Result:
    """Test samples by χ². The runs are doubled until a bias of TARGET_BIAS would be detected, there
    are `runs` of them, or the next doubling would take too long."""
    samples, begin, count = Samples(exam, request), time.monotonic(), FIRST_RUNS
    alarm = ALARM / math.log2(MAX_RUNS / FIRST_RUNS)  # for each test
    while True:
        if problem := samples.draw(min(count, runs)):
            return False, problem
        result = samples.test(warper(request.sampling), alarm)
        allowed = exam.seconds * (PATIENCE if samples.p < SUSPICIOUS else 1)
        late = 2 * (time.monotonic() - begin) > allowed
        if not result[0] or samples.bias <= TARGET_BIAS or count >= runs or late:
            break
        count *= 2
    if result[0] is False:
        result = confirmed(exam, samples, min(count, runs), result)
    tokens, seeds = [*samples.samples[0][samples.example]], [0, min(count, runs) - 1]
    exam.remember(request._replace(seed=samples.example), tokens=tokens, seeds=seeds,
                  detectable_tv=samples.bias)  # fmt: skip

    def other(order: Order) -> Result:
        return samples.test(warper(request.sampling, order), alarm)

    return exam.conventions.resolve(request.sampling, result, other)


def confirmed(exam: Examination, samples: Samples, runs: int, result: Result) -> Result:
    """Return a failure only if fresh samples fail as well, or no luck explains it."""
    if len(set(samples.samples[0])) == 1:
        return False, "the same tokens for every seed"
    if samples.p == 0:
        return result
    fresh = Samples(exam, samples.request, FRESH_SEEDS)
    if problem := fresh.draw(2 * runs):
        return False, problem
    passed, detail = fresh.test(warper(samples.request.sampling), ALARM)
    return passed, f"{result[1]}; of fresh samples: {detail}"
