"""Examine any decoder as a black box: a function from a checkpoint and token ids to token ids."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from minispec.certify import examination
from minispec.certify.common import GREEDY, Result, Verdict, describe, drafting_result
from minispec.certify.conventions import Conventions, warper
from minispec.certify.examination import Examination, Request, Row, is_greedy, keeps_lengths
from minispec.certify.functions import toy_checkpoints as toy
from minispec.certify.functions.decoder import FunctionDecoder, Implementation
from minispec.certify.functions.enumeration import DrawsNothing, Enumeration
from minispec.certify.functions.symbolic import CannotEnumerate
from minispec.certify.scoring import Scores, Tokens, Warp
from minispec.certify.statistics import Distribution
from minispec.generate import decode
from minispec.model import Transformer
from minispec.sampling import Sampling

FUNCTION_CHECKS = "greedy", "limits", "exact", "statistical"
VOCAB = 4  # of the statistical checks
UNWARPED = Sampling(1.0)
FUNCTION_SAMPLINGS = (
    UNWARPED, Sampling(0.7, top_p=0.8), Sampling(1.0, top_p=0.8), Sampling(1.5, top_k=2),
    Sampling(1.5, 3, 0.8), Sampling(0.2),
)  # fmt: skip
HOT = Sampling(2.0, top_k=VOCAB)  # some reject a top-k of the whole vocabulary
GOOD_DRAFT, END_TOKEN, LONG_PROMPT = ", good draft", ", end token", ", long prompt"
LENGTHS_AROUND_BLOCKS = [n for size in (16, 32, 64, 128, 256) for n in (size, size + 1)]
BINARY_PROMPT = [1, 0, 0, 1, 0]  # repetitive, so that prompt lookup finds drafts
REPETITIVE_PROMPT = [1, 2, 0, 1, 2]


@dataclass(frozen=True)
class Limits:
    """The time and the work that one examination may take."""

    seconds: float = 180.0  # approximately
    runs: int = examination.MAX_RUNS  # of one statistical row
    outcomes: int = 400  # of one enumeration
    length: int = 8  # tokens of the longest sequences that are enumerated


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
        groups = {"greedy": self.greedy_rows, "limits": self.limit_rows, "exact": self.exact_rows,
                  "statistical": self.statistical_rows}  # fmt: skip
        check, colon, _ = only.partition(": ")
        chosen = [name for name in checks if not colon or name.endswith(check)]
        rows = (row for name in groups if name in chosen for row in groups[name]())
        return examination.select(rows, only)

    def greedy_rows(self) -> Iterator[Row]:
        exams = [self.exam(f"model{seed}", seed) for seed in range(2)]
        prompts = [random.Random(i).choices(range(24), k=1 + 5 * i) for i in range(6)]
        for seed, exam in enumerate(exams):
            yield Row("greedy", f"model {seed}", exam, is_greedy, (prompts, 24))
        yield Row("greedy", "two models in turn", exams[0], is_greedy_in_turn, (exams[1], prompts))
        exam = self.exam("long", 3, context=512)
        prompts = [random.Random(n).choices(range(24), k=n) for n in LENGTHS_AROUND_BLOCKS]
        yield Row("greedy", "prompts around block sizes", exam, is_greedy, (prompts, 24))
        yield Row("greedy", "100 tokens", exams[1], is_greedy, ([[5, 6, 7], [3] * 20], 100))
        exam = self.exam("loops", 0, loops=True)
        yield Row("greedy", "text in loops", exam, is_greedy, ([[5, 6, 7], [2, 2, 2]], 60))

    def limit_rows(self) -> Iterator[Row]:
        exam = self.exam("model0", 0)
        yield Row("limits", "lengths", exam, keeps_lengths, ([1, 2, 3], [*range(12)]), False)
        arguments = [1, 2, 3, 1, 2], [8, 3, 24, 1, 8]
        yield Row("limits", "the same prompt again", exam, keeps_lengths, arguments, False)
        yield Row("limits", "last rows of the context", exam, fills_context, (), False)
        config, generation = "config.json", toy.GENERATION_CONFIG
        for count, where in (1, config), (2, generation), (3, generation):
            case = f"{count} end token{'s' * (count > 1)}, {where}"
            yield Row("limits", case, exam, ends_everywhere, (self, count, where), False)
        for seed in 0, 13:
            model = self.exam(f"loops{seed}", seed, loops=True).model
            tokens = decode(model, None, [1], max_new_tokens=60).tokens[30:]
            loop = tokens[: tokens.index(tokens[0], 1)]  # repeated forever
            eos = "config.json", loop[2]
            exam = self.exam(f"loops{seed}", seed, loops=True, eos=eos)
            prompts = [loop * 3 + loop[:i] for i in range(len(loop))]
            case = f"end token in a loop of {len(loop)}"
            yield Row("limits", case, exam, examination.ends_correctly, (prompts, 24), False)

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
        for sampling in Sampling(0.6), *FUNCTION_SAMPLINGS[1:5], Sampling(2.0, 3):
            yield row(3, 21, sampling)

    def statistical_rows(self) -> Iterator[Row]:
        def row(name, sampling, more="", weight=1.0, seed=22, copies=1, n=12, **options) -> Row:
            exam, case = self.exam(name, seed, VOCAB, **options), describe(sampling) + more
            arguments = Request(copies * REPETITIVE_PROMPT, n, sampling), self.limits.runs
            return Row("statistical", case, exam, examination.samples_fit, arguments, weight=weight)

        yield row("sampled", UNWARPED, weight=6.0)
        yield from (row("sampled", sampling) for sampling in FUNCTION_SAMPLINGS[1:])
        yield row("long-prompt", UNWARPED, LONG_PROMPT, seed=33, copies=20)
        yield row("sharp", HOT, flatness=2 * toy.FLATNESS)
        yield row("ending", UNWARPED, END_TOKEN, seed=57, eos=("config.json", VOCAB - 1))
        yield row("well-drafted", UNWARPED, GOOD_DRAFT, 6.0, n=24, noise=toy.NEARLY_RIGHT)


# ---- greedy and limits ---------------------------------------------------------------------------


def is_greedy_in_turn(exam: Examination, other: Examination, prompts: list[list[int]]) -> Result:
    """Check greedy answers of two checkpoints that are asked alternately."""
    if other.baseline and not exam.baseline:  # it is the baseline that is judged
        other = other.without_baseline()
    for prompt, one in product(prompts, (exam, replace(other, evidence=exam.evidence))):
        passed, detail = is_greedy(one, [prompt], 12, (GREEDY,))
        if not passed:
            return passed, detail
    return True, f"{len(prompts)} prompts each"


def fills_context(exam: Examination) -> Result:
    """Check answers that end with the last row of the context."""
    context = exam.model.config.context
    for n in 1, 2, 5, 8:
        prompt = random.Random(n).choices(range(exam.model.config.vocab_size), k=context - n)
        passed, detail = keeps_lengths(exam, prompt, [n])
        if not passed:
            return False, f"prompt of {len(prompt)} tokens in a context of {context}: {detail}"
    return True, f"prompts of up to {context - 1} tokens in a context of {context}"


def ends_everywhere(exam: Examination, cases: Cases, count: int, where: str) -> Result:
    """Check that an end token stops generation, for up to four tokens of a greedy run in turn. It
    is the last of `count` end tokens in the file `where`; the others never occur."""
    prompt = [3, 1, 4]
    tokens = decode(cases.exam("plain", 2).model, None, prompt, max_new_tokens=12).tokens
    others = [token for token in range(24) if token not in tokens][: count - 1]
    ends = list(dict.fromkeys(tokens))[:4]
    for end in ends:
        eos = where, [*others, end] if others else end
        one = replace(cases.exam(f"eos{count}-{end}", 2, eos=eos), evidence=exam.evidence)
        passed, detail = examination.ends_correctly(one, [prompt], 12)
        if not passed:  # None: the baseline has another model
            return passed, f"end tokens {[*others, end]}: {detail}"
    return True, f"at {len(ends)} offsets, greedily and with top-k 1 if supported"


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
            ours = found.test(warper(sampling))
            passed, detail = exam.conventions.resolve(sampling, ours, found.test)
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

    def test(self, warp: Warp) -> Result:
        """Compare with `expected`. A sequence that is too probable is always a bias."""
        expected = self.expected(warp)
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
        return True, f"no bias found {share}; a TV of {1 - self.covered:.2f} could hide in the rest"


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
