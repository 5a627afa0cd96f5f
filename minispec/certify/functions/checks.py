"""Examine any decoder as a black box: a function from a checkpoint and token ids to token ids."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from minispec.certify import examination
from minispec.certify.common import Result, Verdict, describe, drafting_result
from minispec.certify.conventions import Conventions, Order, warper
from minispec.certify.examination import Examination, Request, Row
from minispec.certify.functions import toy_checkpoints as toy
from minispec.certify.functions.decoder import FunctionDecoder, Implementation
from minispec.certify.functions.enumeration import DrawsNothing, Enumeration
from minispec.certify.functions.symbolic import CannotEnumerate
from minispec.certify.near_ties import compare_near_ties
from minispec.certify.requests import BATCH_SIZES, Place
from minispec.certify.scoring import Scores, Tokens, Warp
from minispec.certify.statistics import Distribution
from minispec.certify.stream import KINDS, drawn_rows
from minispec.checkpoints.load import load
from minispec.model import Transformer
from minispec.sampling import Sampling

FUNCTION_CHECKS = "exact", "greedy", "limits", "sampled", "statistical"
VOCAB = 4  # of the statistical checks
UNWARPED = Sampling(1.0)
FUNCTION_SAMPLINGS = (
    UNWARPED, Sampling(0.7, top_p=0.8), Sampling(1.0, top_p=0.8), Sampling(1.5, 3, 0.8),
)  # fmt: skip
GOOD_DRAFT, END_TOKEN, LONG_PROMPT = ", good draft", ", end token", ", long prompt"
WIDE = ", vocab 8"
DRAWN_WEIGHT, DRAWN_SEED = 14.0, 100
BINARY_PROMPT = [1, 0, 0, 1, 0]  # repetitive, so that prompt lookup finds drafts
REPETITIVE_PROMPT = [1, 2, 0, 1, 2]


@dataclass(frozen=True)
class Limits:
    """The time and the work that one examination may take."""

    seconds: float = 180.0  # approximately
    runs: int = examination.MAX_RUNS  # of one statistical row
    outcomes: int = 400  # of one enumeration
    length: int = 8  # tokens of the longest sequences that are enumerated
    requests: float = math.inf  # that are drawn


THOROUGH = Limits(seconds=900.0, outcomes=4000)


def check_implementation(
    impl: Implementation, only: str = "", checks: tuple[str, ...] = FUNCTION_CHECKS,
    limits: Limits = Limits(), baseline: Implementation | None = None, folder: Path | None = None,
) -> Iterator[Verdict]:  # fmt: skip
    """Yield verdicts on greedy identity, lengths and end tokens; and on samples: exactly, by the
    outcomes of the decoder's random numbers if they can be enumerated, and by χ².

    `only` selects rows by a part of "check: case". A `baseline` is the same decoder's plain
    decoding. The implementation must then equal the baseline instead of our model; a row reports
    where the baseline itself differs from ours. The checkpoints are kept if there is a `folder`."""
    decoder = FunctionDecoder(impl)
    plain = FunctionDecoder(baseline) if baseline else None
    with TemporaryDirectory() as temporary:
        cases = Cases(folder or Path(temporary), decoder, plain, limits)
        yield from examination.run_rows(cases.rows(only, checks), limits.seconds)
    if decoder.counts:
        drafted, accepted = map(sum, zip(*decoder.counts))
        yield Verdict("drafts", "accepted and rejected", *drafting_result(drafted, accepted))


@dataclass(frozen=True)
class Cases:
    """All rows for one function. Checkpoints are written to `root`."""

    root: Path
    decoder: FunctionDecoder
    baseline: FunctionDecoder | None
    limits: Limits
    conventions: Conventions = field(default_factory=Conventions)

    def exam(self, name: str, seed: int, vocab: int = 24, **options) -> Examination:
        """Write a checkpoint (see write_checkpoint) and return its examination."""
        folder, model = toy.write_checkpoint(self.root / name, seed, vocab, **options)
        baseline = self.baseline and self.baseline.at(folder)
        decoder = self.decoder.at(folder)
        return Examination(decoder, model, baseline, conventions=self.conventions, name=name)

    def rows(self, only: str, checks: tuple[str, ...]) -> list[Row]:
        """Return the rows of these checks that `only` selects."""
        check, colon, _ = only.partition(": ")
        chosen = tuple(name for name in checks if not colon or name.endswith(check))
        rows = list(self.exact_rows()) if "exact" in chosen else []
        rows += self.drawn_rows(only, chosen)
        rows += self.statistical_rows() if "statistical" in chosen else []
        rows += self.bits_rows() if "bits" in chosen else []
        return examination.select(rows, only)

    def drawn_rows(self, only: str, checks: tuple[str, ...]) -> list[Row]:
        sizes = BATCH_SIZES if hasattr(self.decoder.impl, "many") else (1,)
        kinds = {check: KINDS[check] for check in KINDS if check in checks}
        return drawn_rows(kinds, only, self.places, sizes, self.limits.requests, DRAWN_WEIGHT)

    def places(self) -> list[Place]:
        return [self.place(i) for i in range(len(toy.POOL))]

    def place(self, i: int) -> Place:
        """Write a checkpoint at which requests are drawn. Its end tokens are such that its own text
        has them."""
        vocab, context, flatness, noise, loops, count, where = toy.POOL[i]
        options = {"context": context, "noise": noise, "flatness": flatness, "loops": loops}
        exam = self.exam(f"drawn{i}", DRAWN_SEED + i, vocab, **options)
        quality = "often right" if noise < 0.03 else "often wrong"
        facts = {"vocabulary": f"{vocab} tokens", "drafts": quality}
        if count:
            own = sorted(set(Place(exam).text))
            ends = random.Random(i).sample(own, min(count, len(own)))
            eos = where, ends if len(ends) > 1 else ends[0]
            exam = self.exam(f"drawn{i}", DRAWN_SEED + i, vocab, eos=eos, **options)
            facts["end tokens"] = f"{len(ends)} in {where}"
        draft, _ = load(self.root / exam.name / "draft", "float64", "cpu")
        return Place(exam, draft, facts)

    def exact_rows(self) -> Iterator[Row]:
        def row(vocab, seed, sampling, more="", weight=1.0, copies=1, **options) -> Row:
            exam = self.exam(f"exact{vocab}-{seed}", seed, vocab, **options)
            case = f"vocab {vocab}, {describe(sampling)}{more}"
            arguments = Request(copies * BINARY_PROMPT, self.limits.length, sampling), self.limits
            return Row("exact", case, exam, is_exact, arguments, weight=weight)

        yield row(2, 23, UNWARPED)
        yield row(2, 25, UNWARPED, GOOD_DRAFT, 4.0, noise=toy.NEARLY_RIGHT)
        yield row(3, 31, UNWARPED, END_TOKEN, eos=("config.json", 2))
        yield row(3, 49, UNWARPED, LONG_PROMPT, copies=20)
        for sampling in Sampling(1.0, top_p=0.8), Sampling(0.7, 3, 0.9):  # which keep three tokens
            yield row(4, 31, sampling, flatness=toy.FLATNESS / 2)
        for sampling in Sampling(0.6), *FUNCTION_SAMPLINGS[1:], Sampling(1.5, 2), Sampling(2.0, 3):
            yield row(3, 21, sampling)

    def statistical_rows(self) -> Iterator[Row]:
        """Many answers to one prompt show a bias that depends on the context."""

        def row(name, sampling, more="", weight=1.0, seed=22, n=6, vocab=VOCAB, **options) -> Row:
            exam, case = self.exam(name, seed, vocab, **options), describe(sampling) + more
            arguments = Request(REPETITIVE_PROMPT, n, sampling), self.limits.runs
            return Row("statistical", case, exam, examination.samples_fit, arguments, weight=weight)

        yield row("sampled", UNWARPED, weight=2.0)
        yield row("sampled", Sampling(0.7, top_p=0.8), weight=2.0)
        yield row("sampled", Sampling(1.5, 3, 0.8), weight=2.0)
        wide = {"vocab": 8, "flatness": toy.FLATNESS / 2}
        yield row("wide", Sampling(1.0, top_p=0.8), WIDE, 2.0, **wide)
        yield row("well-drafted", UNWARPED, GOOD_DRAFT, 5.0, n=24, noise=toy.NEARLY_RIGHT)

    def bits_rows(self) -> Iterator[Row]:
        exam = self.exam("sensitive", 0, 12, context=256, noise=0.1, sensitive=True)
        for half in 4, 25, 60:  # answers cross the borders of blocks of 16 to 128 tokens
            case = f"prompts of {2 * half} tokens"
            yield Row("bits", case, exam, compare_near_ties, (half,), compared=False)


# ---- sampled -------------------------------------------------------------------------------------

FLOAT32_TV_TOLERANCE = 1e-5  # total variation due to float32 rounding
CONFIRM_SECONDS = 10  # at least, for a bias
MIN_COVERED = 0.5  # probability of the outcomes found, below which they prove little
ENTROPY_TOKENS = 4


def is_exact(exam: Examination, request: Request, limits: Limits) -> Result:
    """Check the distribution of its tokens over the outcomes of its own random numbers, for longer
    and longer sequences: of all outcomes, then of the likeliest ones while these are most. If it
    draws nothing for a single token, such tokens are tested by χ² instead."""
    prompt, longest, sampling, _ = request
    end = time.monotonic() + exam.seconds
    if problem := why_too_predictable(exam.model, warper(sampling), prompt):
        return None, problem
    exam.tokens(prompt, 2, sampling)  # loading may use random numbers
    details, proven, n = {}, 0, 1
    while n <= longest:
        left = max(0.1, end - time.monotonic())
        try:
            found = Enumerated(exam, request._replace(n=n), limits.outcomes, left)
            passed, detail = exam.conventions.resolve(sampling, found.test(), found.test)
        except CannotEnumerate as error:
            if n > 1 or not isinstance(error, DrawsNothing):
                return None, f"cannot be enumerated: {error}"
            passed, detail = examination.samples_fit(exam, request._replace(n=1), runs=400)
            if passed is False:
                return False, f"max_new_tokens 1: {detail}"
            n = 2
            continue
        if not passed:
            return passed, detail
        if found.covered < MIN_COVERED or (exam.baseline and not found.complete):
            break
        details[found.complete], proven = detail, n
        if time.monotonic() > end:
            break
        n += 1 if found.complete else 2
    if proven < min(3, longest) and time.monotonic() > end:  # the second may have had no draft
        seen = "; ".join(details.values()) or "nothing seen"
        return None, f"not enough time to enumerate three tokens (--thorough has more): {seen}"
    if proven < 2:  # the first token is generated before any draft
        return None, f"too many outcomes: {found.covered:.0%} found for sequences of {n} tokens"
    return True, "; ".join(details.values())


def why_too_predictable(model: Transformer, warp: Warp, prompt: list[int] = BINARY_PROMPT) -> str:
    """Return a reason if the first tokens are so predictable that equal samples prove little."""
    sequences = list(product(range(model.config.vocab_size), repeat=ENTROPY_TOKENS))
    exact = probabilities(model, prompt, warp, sequences).values()
    entropy = -sum(p * math.log2(p) for p in exact if p > 0) / ENTROPY_TOKENS
    return "" if entropy > examination.MIN_ENTROPY else examination.too_sharp(entropy)


class Enumerated(Enumeration):
    """The outcomes of a decoder for one request, to be compared with the probabilities that they
    should have, or with the outcomes of the baseline if there is one."""

    def __init__(self, exam: Examination, request: Request, outcomes: int, seconds: float):
        self.exam, self.request = exam, request
        super().__init__(sampler(exam.decoder, request), outcomes, seconds)
        self.plain = None
        if exam.baseline:
            self.plain = Enumeration(sampler(exam.baseline, request), seconds=seconds)
            if not self.plain.complete:
                raise CannotEnumerate("the baseline's outcomes took too long")
        expected = self.expected(warper(request.sampling))
        bias = excess(self.distribution, expected)
        seconds = max(CONFIRM_SECONDS, examination.PATIENCE * exam.seconds)
        self.confirm(expected, bias if bias > FLOAT32_TV_TOLERANCE else 0.0, seconds)
        exam.remember(request)

    def expected(self, warp: Warp) -> Distribution:
        """Return the baseline's distribution, or the probabilities by these warpers."""
        if self.plain:
            return self.plain.distribution
        (prompt, n, *_), config = self.request, self.exam.model.config
        known = [x for x in self.distribution if set(x) <= set(range(config.vocab_size))]
        sequences = [x for x in known if not examination.wrong_end([*x], n, config.eos_ids)]
        return Counter(probabilities(self.exam.model, prompt, warp, sequences))

    def test(self, order: Order | None = None) -> Result:
        """Compare with `expected`. A sequence that is too probable is always a bias."""
        expected = self.expected(warper(self.request.sampling, order))
        bias = excess(self.distribution, expected)
        tokens = f"{self.request.n} token{'s' * (self.request.n > 1)}"
        if bias > FLOAT32_TV_TOLERANCE:
            worst = max(self.distribution, key=lambda x: self.distribution[x] - expected[x])
            p, q = self.distribution[worst], expected[worst]
            digits = 2 - math.floor(math.log10(p - q))
            change = f"{p:.{digits}f} instead of {q:.{digits}f}"
            self.exam.evidence.setdefault("tokens", [*worst])  # those by our order of warpers
            return False, f"TV {bias:.1e} over {tokens}: {worst} has probability {change}"
        if self.complete:
            return True, f"TV {bias:.1e} over sequences of {tokens}"
        share = f"in the likeliest {self.covered:.0%} of {tokens}"
        return True, f"no bias found {share}; a TV of {1 - self.covered:.2g} could hide in the rest"


def excess(found: Distribution, exact: Distribution) -> float:
    """Return by how much the probabilities found exceed the exact ones: the total variation if all
    outcomes were found, otherwise at most that."""
    return sum(max(0.0, p - exact.get(x, 0.0)) for x, p in found.items())


def probabilities(
    model: Transformer, prompt: list[int], warp: Warp, sequences: list[Tokens]
) -> Distribution:
    intervals = Scores(model, prompt, warp).add(sequences).intervals
    return {sequence: math.prod(p for _, p in intervals[sequence]) for sequence in sequences}


def sampler(decoder: examination.Decoder, request: Request) -> Callable[[int], Tokens]:
    """Return the decoder's tokens for this request, as a function of the seed."""
    n = request.n  # no seed comes twice, also for other lengths
    return lambda seed: tuple(decoder.batch([request._replace(seed=seed + n)])[0][:n])
