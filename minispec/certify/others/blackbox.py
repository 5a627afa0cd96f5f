"""Test any decoder as a black box: a function from a checkpoint and token ids to token ids."""

import importlib
import importlib.util
import json
import operator
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from minispec.certify.common import (
    GREEDY,
    RUNS,
    Verdict,
    describe,
    drafting_result,
    first_difference,
)
from minispec.certify.compare import TIE, divergence
from minispec.certify.others.enumeration import (
    CannotEnumerate,
    Enumeration,
    TooManyOutcomes,
    find_constant_seed,
)
from minispec.certify.others.scoring import Tokens, score, smallest_p
from minispec.certify.statistics import FALSE_ALARM, Distribution
from minispec.checkpoints.load import load, save
from minispec.errors import UserError
from minispec.generate import METHODS
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded, probs
from minispec.toys import first_tokens, letter_tokenizer, small_model, total_variation


class Implementation(Protocol):
    """The signature of the function that --impl names."""

    def __call__(
        self, checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float,
        top_k: int, top_p: float, seed: int,
    ) -> list[int] | tuple[list[int], int, int]:  # fmt: skip
        """Return the new tokens after `prompt`, including a final EOS; or a tuple of these and the
        numbers of drafted and accepted tokens.

        The checkpoint is a Hugging Face directory: a small float32 llama with a tokenizer. Its
        folder `draft` holds a noisy copy that is right about half the time. Temperature 0 is
        greedy; top_k 0 and top_p 1 are off. Different seeds must give independent samples. Raise
        NotImplementedError for unsupported options. The function is called thousands of times, so
        keep the loaded model between calls.

        An engine that batches may have an attribute `many`: a function of (checkpoint, requests)
        that returns a list of such results. Each request is a dict of the other arguments."""


class Raised(Exception):
    """The implementation raised an exception or returned something other than token ids."""


def load_implementation(name: str, flag: str = "--impl") -> Implementation:
    """Import the function named `package.module:function` or `file.py:function`."""
    module_name, _, function = name.rpartition(":")
    sys.path.insert(0, "")
    try:
        if module_name.endswith(".py"):
            sys.path.insert(0, str(Path(module_name).parent))
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        found = getattr(module, function)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise UserError(
            f"{flag} {name}: cannot be imported ({error}); use package.module:function or "
            "file.py:function"
        ) from None
    if not callable(found):
        raise UserError(f"{flag} {name}: is not a function")
    return found


class FunctionDecoder:
    """Calls an implementation; `drafted` and `accepted` sum the counts that it returns."""

    def __init__(self, impl: Implementation):
        self.impl, self.drafted, self.accepted, self.reports_counts = impl, 0, 0, False

    def __call__(
        self, folder: str, prompt: list[int], seed: int = 0, n: int = 24,
        sampling: Sampling = GREEDY,
    ) -> list[int]:  # fmt: skip
        """Return its tokens as ints; raise Raised if they are not token ids."""
        return self.generate_all(folder, [(prompt, seed, n, sampling)])[0]

    def deterministic(
        self, folder: str, prompt: list[int], sampling: Sampling, n: int
    ) -> list[int]:
        """Return its tokens for a deterministic sampling, or greedy ones if that is unsupported."""
        try:
            return self(folder, prompt, 0, n, sampling)
        except NotImplementedError:
            if sampling == GREEDY:
                raise
            return self(folder, prompt, 0, n)

    def generate_all(self, folder: str, requests: list[tuple]) -> list[list[int]]:
        """Return the tokens of several requests, in one call if the implementation can batch."""
        options = [
            {"prompt": list(prompt), "max_new_tokens": n, "temperature": sampling.temperature,
             "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
            for prompt, seed, n, sampling in requests
        ]  # fmt: skip
        what = ""
        try:
            if hasattr(self.impl, "many"):
                return [self.token_ids(result) for result in self.impl.many(folder, options)]
            results = []
            for request in options:
                what = ", ".join(f"{k} {v}" for k, v in request.items() if k != "prompt")
                what = f" (prompt of {len(request['prompt'])} tokens, {what})"
                results.append(self.token_ids(self.impl(folder, **request)))
            return results
        except (NotImplementedError, Raised, CannotEnumerate):
            raise
        except (Exception, SystemExit) as error:
            message = (str(error).strip().splitlines() or ["no message"])[-1]
            raise Raised(f"raised {type(error).__name__}: {message}{what}") from error

    def token_ids(self, result) -> list[int]:
        """Convert a result to ints, also from numpy and torch; add up its counts."""
        if isinstance(result, tuple) and len(result) == 3 and not isinstance(result[0], int):
            result, drafted, accepted = result
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
            self.reports_counts = True
        tokens = list(result)  # runs the implementation if it is a generator
        try:
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise Raised(f"must return token ids, not {str(result)[:80]!r}") from None


FUNCTION_SAMPLINGS = (
    Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.5, top_k=2), Sampling(1.5, 3, 0.9),
)  # fmt: skip
TEMPERATURE_ONLY = Sampling(0.6)  # for decoders without top-k and top-p
TOP_K_1 = Sampling(1.0, top_k=1)  # sampling with a known outcome, that of greedy decoding
LONG_PROMPT_LENGTHS = 65, 130, 257  # just above common block sizes
VOCAB = 4  # of the statistical checks
REPETITIVE_PROMPT = [1, 2, 0, 1, 2]  # so that prompt lookup finds drafts
TWO_TOKEN_PROMPT = [1, 0, 0, 1, 0]  # the same, for a vocabulary of two or more tokens
FUNCTION_CHECKS = "greedy", "limits", "exact", "statistical"


def check_implementation(
    impl: Implementation, only: str = "", runs: int = RUNS,
    checks: tuple[str, ...] = FUNCTION_CHECKS, outcomes: int = 400,
    baseline: Implementation | None = None,
) -> Iterator[Verdict]:  # fmt: skip
    """Yield verdicts on greedy identity, repeated calls, lengths and end tokens; and on samples:
    exactly, by up to `outcomes` outcomes per case if they can be enumerated, and by χ² of `runs`.

    A `baseline` is the same decoder's plain decoding. The implementation must then equal the
    baseline instead of our model; a row reports where the baseline itself differs from ours."""
    decoder, plain = FunctionDecoder(impl), FunctionDecoder(baseline) if baseline else None
    with tempfile.TemporaryDirectory() as temporary:
        for check, case, function, *arguments in rows(Path(temporary), runs, outcomes):
            if only not in case or check not in checks:
                continue
            if plain and check != "limits":
                passed, detail = evaluate(function, plain, *arguments)
                yield Verdict("baseline", f"{check}, {case}", passed or None, detail)
                arguments.append(plain)
            yield Verdict(check, case, *evaluate(function, decoder, *arguments))
    if decoder.reports_counts:
        found = drafting_result(decoder.drafted, decoder.accepted)
        yield Verdict("drafts", "accepted and rejected", *found)


def evaluate(function: Callable, decoder: FunctionDecoder, *arguments) -> tuple[bool | None, str]:
    """Run one check; an exception fails only this check."""
    try:
        return function(decoder, *arguments)
    except NotImplementedError as error:
        return None, f"not supported: {error}"
    except Raised as error:
        return False, str(error)


def rows(root: Path, runs: int, outcomes: int) -> Iterator[tuple]:
    """Yield (check, case, function, arguments after the decoder); write checkpoints to `root`."""
    for seed in range(2):
        prompts = [random.Random(i).choices(range(24), k=1 + 5 * i) for i in range(6)]
        checkpoint = write_checkpoint(root / str(seed), seed, vocab=24)
        yield "greedy", f"model {seed}", is_greedy, *checkpoint, prompts
    checkpoint = write_checkpoint(root / "long", 3, vocab=24, context=512)
    prompts = [random.Random(n).choices(range(24), k=n) for n in LONG_PROMPT_LENGTHS]
    yield "greedy", "long prompts", is_greedy, *checkpoint, prompts
    yield "limits", "lengths", keeps_lengths, checkpoint[0]
    for eos_count, where in (1, "config.json"), (2, GENERATION_CONFIG), (3, GENERATION_CONFIG):
        case = f"{eos_count} end token{'s' * (eos_count > 1)}, {where}"
        yield "limits", case, ends_at_eos, root / f"eos{eos_count}", eos_count, where
    # two tokens allow longer sequences to be enumerated, ideally longer than a draft
    smallest = [(2, FUNCTION_SAMPLINGS[0]), (3, TEMPERATURE_ONLY)]
    for vocab, sampling in *smallest, *((3, sampling) for sampling in FUNCTION_SAMPLINGS[1:]):
        checkpoint = write_checkpoint(root / f"vocab{vocab}", 21, vocab)
        case = f"vocab {vocab}, {describe(sampling)}"
        yield "exact", case, is_exact, *checkpoint, sampling, outcomes
    checkpoint = write_checkpoint(root / "sampled", 21, VOCAB)
    for sampling in FUNCTION_SAMPLINGS:
        yield "statistical", describe(sampling), fits_distribution, *checkpoint, sampling, runs


# ---- checkpoints ---------------------------------------------------------------------------------

MODEL_SHAPE = {
    "hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 64,
}  # fmt: skip
DRAFT_NOISE = 0.06  # added to the draft's weights, so that it is right about half the time


def write_checkpoint(
    path: Path, seed: int, vocab: int, context: int = 128
) -> tuple[str, Transformer]:
    """Write a small random llama, of a shape that engines support, with a draft in its folder.
    Return the path and the model as loaded in float64."""
    model = small_model(seed, vocab, context, **MODEL_SHAPE)
    model.model.norm.weight.mul_(0.4)  # flatter distributions
    save(model, letter_tokenizer(vocab), path, torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(DRAFT_NOISE * noise)
    save(model, letter_tokenizer(vocab), path / "draft", torch.float32)
    return str(path), load(path, "float64", "cpu")[0]


GENERATION_CONFIG = "generation_config.json"


def write_eos_tokens(folder: Path, where: str, tokens: int | list[int]) -> None:
    """Write eos_token_id to one file of a checkpoint only. generation_config.json is deleted first,
    because transformers reads one without eos_token_id as "no end token"."""
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(values))
    updated = (values if where == "config.json" else {}) | {"eos_token_id": tokens}
    (folder / where).write_text(json.dumps(updated))


# ---- greedy and limits ---------------------------------------------------------------------------


def is_greedy(
    decoder: FunctionDecoder, folder: str, model: Transformer, prompts: list[list[int]],
    baseline: FunctionDecoder | None = None,
) -> tuple[bool, str]:  # fmt: skip
    """Check that the tokens equal those of plain decoding, up to ties: twice greedily, and with
    top-k 1 if supported. The number of tokens is checked elsewhere."""
    ties = 0
    for prompt in prompts:
        if baseline:
            expected = baseline(folder, prompt)
        else:
            expected = first_tokens(METHODS["autoregressive"], model, prompt, GREEDY, Seeded(), 24)
        for sampling in GREEDY, GREEDY, TOP_K_1:
            tokens = decoder.deterministic(folder, prompt, sampling, 24)[: len(expected)]
            at, gap = divergence(model, prompt, tokens, list(expected[: len(tokens)]))
            ties += at is not None and gap < TIE
            if not tokens or (at is not None and gap >= TIE):
                where = first_difference(tokens, expected) + f", top-2 gap {gap:.3f}"
                where = where if tokens else "no tokens"
                return False, f"prompt of {len(prompt)} tokens, {describe(sampling)}: {where}"
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    return True, f"prompts of {lengths} tokens, twice, and with top-k 1 if supported; {ties} ties"


def keeps_lengths(decoder: FunctionDecoder, folder: str) -> tuple[bool, str]:
    wrong = [n for n in range(12) if len(decoder(folder, [1, 2, 3], n=n)) != n]
    if wrong:
        return False, f"max_new_tokens {wrong[:4]} not respected"
    return True, "max_new_tokens 0 to 11 respected"


def ends_at_eos(
    decoder: FunctionDecoder, path: Path, eos_count: int, where: str
) -> tuple[bool, str]:
    """Check that an end token stops generation, for up to four tokens of a greedy run in turn. It
    is the last of `eos_count` end tokens in the file `where`; the others never occur."""
    _, model = write_checkpoint(path / "plain", 2, vocab=24)
    prompt = [3, 1, 4]
    tokens = first_tokens(METHODS["autoregressive"], model, prompt, GREEDY, Seeded(), 12)
    others = [token for token in range(24) if token not in tokens][: eos_count - 1]
    ends = list(dict.fromkeys(tokens))[:4]
    for end in ends:
        folder, _ = write_checkpoint(path / str(end), 2, vocab=24)
        for checkpoint in path / str(end), path / str(end) / "draft":
            write_eos_tokens(checkpoint, where, [*others, end] if others else end)
        expected = list(tokens[: tokens.index(end) + 1])
        for sampling in GREEDY, TOP_K_1:
            found = decoder.deterministic(folder, prompt, sampling, 12)
            if found != expected:
                return False, f"end tokens {[*others, end]}: {found} instead of {expected}"
    return True, f"at {len(ends)} offsets, greedily and with top-k 1 if supported"


# ---- sampled -------------------------------------------------------------------------------------

FLOAT32_TV_TOLERANCE = 1e-5  # total variation due to float32 rounding


def is_exact(
    decoder: FunctionDecoder, folder: str, model: Transformer, sampling: Sampling, outcomes: int,
    baseline: FunctionDecoder | None = None,
) -> tuple[bool | None, str]:  # fmt: skip
    """Check the distribution of its first tokens over all outcomes of its own random numbers, for
    sequences as long as about `outcomes` outcomes allow."""
    reached, detail, enumerated = 0, "", 0
    decoder(folder, TWO_TOKEN_PROMPT, 0, 2, sampling)  # loading may use random numbers
    for n in range(1, 9):

        def sample(seed: int, decoder: FunctionDecoder = decoder, n: int = n) -> tuple[int, ...]:
            return tuple(decoder(folder, TWO_TOKEN_PROMPT, seed, n, sampling)[:n])

        try:
            found = Enumeration(sample, outcomes)
            plain = Enumeration(partial(sample, decoder=baseline)) if baseline else None
            exact = distribution(model, TWO_TOKEN_PROMPT, sampling, n)
            exact = plain.distribution if plain else exact
            distance = total_variation(found.distribution, exact)
            passed = distance <= FLOAT32_TV_TOLERANCE
            found.confirm(exact, 0.0 if passed else distance)
            if plain:
                plain.confirm(found.distribution, 0.0 if passed else distance)
        except CannotEnumerate as error:
            if isinstance(error, TooManyOutcomes) and reached:
                break
            return None, f"cannot be enumerated: {error}"
        reached, detail = n, f"TV {distance:.1e} over sequences of {n} tokens"
        if not passed:
            return False, f"{detail}: {largest_difference(found.distribution, exact)}"
        enumerated += len(found.outcomes)
        if enumerated > outcomes / 2:  # one more token would exceed the limit
            break
    if reached == 1:  # it is generated before any draft
        return None, f"only the first token could be enumerated, TV {distance:.1e}"
    return True, detail


def largest_difference(found: Distribution, exact: Distribution) -> str:
    """Describe where two distributions differ most."""
    worst = max(found.keys() | exact.keys(), key=lambda t: abs(found.get(t, 0) - exact.get(t, 0)))
    p, expected = found.get(worst, 0.0), exact.get(worst, 0.0)
    return f"{worst} has probability {p:.3f} instead of {expected:.3f}"


def distribution(model: Transformer, prompt: list[int], sampling: Sampling, n: int) -> Distribution:
    """Return the probability of every sequence of `n` tokens, by the chain rule; prefixes of one
    length form a batch."""
    sequences: Distribution = {(): 1.0}
    for _ in range(n):
        hidden = model(torch.tensor([[*prompt, *prefix] for prefix in sequences]))[:, -1]
        rows = probs(model.logits(hidden), sampling).tolist()
        sequences = {
            (*prefix, token): prob * p
            for (prefix, prob), row in zip(sequences.items(), rows)
            for token, p in enumerate(row)
            if p > 0
        }
    return sequences


def fits_distribution(
    decoder: FunctionDecoder, folder: str, model: Transformer, sampling: Sampling, runs: int,
    baseline: FunctionDecoder | None = None, n: int = 6,
) -> tuple[bool, str]:  # fmt: skip
    """Test its first tokens over runs with different seeds with χ²; if the result is unclear, use
    eight times as many runs."""
    samples: list[Tokens] = []
    plain: list[Tokens] = []
    for seeds in range(runs), range(runs, 8 * runs):
        requests = [(REPETITIVE_PROMPT, seed, n, sampling) for seed in seeds]
        samples += [tuple(tokens[:n]) for tokens in decoder.generate_all(folder, requests)]
        if baseline:
            plain += [tuple(tokens[:n]) for tokens in baseline.generate_all(folder, requests)]
        if any(len(tokens) < n for tokens in samples + plain):
            return False, f"fewer than {n} tokens, although there is no end token"
        if unknown := {t for tokens in samples + plain for t in tokens} - set(range(VOCAB)):
            return False, f"sampled {min(unknown)}, which is not in the vocabulary"
        scores = score(model, REPETITIVE_PROMPT, samples + plain, sampling)
        if not baseline and scores.impossible:
            return False, f"sampled {scores.impossible}, which has probability 0"
        p, detail = smallest_p(scores, samples, plain if baseline else None)
        if p > 0.01 or p < FALSE_ALARM:
            break
    if p <= FALSE_ALARM:
        reason = find_constant_seed(
            lambda seed: decoder(folder, REPETITIVE_PROMPT, seed, n, sampling)
        )
        if reason or len(set(samples)) == 1:
            return (None, reason) if reason else (False, "the same tokens for every seed")
    return p > FALSE_ALARM, f"{n} tokens: {detail}"
