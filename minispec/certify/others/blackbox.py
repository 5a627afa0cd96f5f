"""Anyone's decoder, by what it returns: a function over token ids and small checkpoints."""

import importlib
import importlib.util
import json
import operator
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import torch

from minispec.certify.compare import TIE, divergence
from minispec.certify.others.scoring import Sequence, least_p, scored
from minispec.certify.others.statistics import FALSE_ALARM, Sequences
from minispec.certify.others.takeover import NotTaken, TooMany, enumerate_outcomes
from minispec.certify.ours.cases import GREEDY, bound
from minispec.certify.ours.checks import RUNS, Verdict, first_difference
from minispec.checkpoints.load import load, save
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded, probs
from minispec.toys import first_tokens, letters, small_model, total_variation


class Implementation(Protocol):
    """What --impl names: a function over token ids."""

    def __call__(
        self, checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float,
        top_k: int, top_p: float, seed: int,
    ) -> list[int] | tuple[list[int], int, int]:  # fmt: skip
        """The new tokens, an EOS that ends them included, after `prompt` (ids of the checkpoint, a
        Hugging Face directory of a small llama in float32, with a tokenizer, and a disturbed copy
        in its folder `draft` that is right about half the time); or these and how many tokens were
        drafted and accepted. temperature 0 is greedy; top_k 0 and top_p 1 are off. Equal seeds may
        give equal, different seeds must give independent draws. Raise NotImplementedError for what
        you do not offer. Called thousands of times: keep the loaded model between calls.

        An engine that batches may have an attribute `many`: a function over (checkpoint, requests),
        each a dict of the other arguments, that returns a list of such results."""


class Raised(Exception):
    """What an implementation did instead of returning tokens."""


def load_implementation(name: str, flag: str = "--impl") -> Implementation:
    """The function called `package.module:function` or `file.py:function`."""
    place, _, function = name.rpartition(":")
    sys.path.insert(0, "")
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(Path(place).parent))
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, function)
    except (Exception, SystemExit) as error:  # whatever importing a stranger's module raises
        raise UserError(
            f"{flag} {name}: cannot be imported ({error}): give package.module:function or "
            "file.py:function"
        ) from None
    if not callable(found):
        raise UserError(f"{flag} {name}: is not a function")
    return found


class FunctionDecoder:
    """An implementation as the certifier calls it; `drafted` and `accepted` add up its counts."""

    def __init__(self, impl: Implementation):
        self.impl, self.drafted, self.accepted, self.counts = impl, 0, 0, False

    def __call__(
        self, folder: str, prompt: list[int], seed: int = 0, n: int = 24,
        sampling: Sampling = GREEDY,
    ) -> list[int]:  # fmt: skip
        """Its tokens, as ints; Raised where they are not token ids."""
        return self.all(folder, [(prompt, seed, n, sampling)])[0]

    def sure(self, folder: str, prompt: list[int], sampling: Sampling, n: int) -> list[int]:
        """Its tokens where only one outcome is possible: greedy ones, where it has no top-k."""
        try:
            return self(folder, prompt, 0, n, sampling)
        except NotImplementedError:
            if sampling == GREEDY:
                raise
            return self(folder, prompt, 0, n)

    def all(self, folder: str, requests: list[tuple]) -> list[list[int]]:
        """The tokens of several requests, at once where the implementation can."""
        asked = [
            {"prompt": list(prompt), "max_new_tokens": n, "temperature": sampling.temperature,
             "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
            for prompt, seed, n, sampling in requests
        ]  # fmt: skip
        what = ""
        try:
            if hasattr(self.impl, "many"):
                return [self.tokens(each) for each in self.impl.many(folder, asked)]
            results = []
            for each in asked:
                what = ", ".join(f"{k} {v}" for k, v in each.items() if k != "prompt")
                what = f" ({len(each['prompt'])} tokens of prompt, {what})"
                results.append(self.tokens(self.impl(folder, **each)))
            return results
        except (NotImplementedError, Raised, NotTaken):
            raise
        except (Exception, SystemExit) as error:
            said = (str(error).strip().splitlines() or ["no message"])[-1]
            raise Raised(f"raised {type(error).__name__}: {said}{what}") from error

    def tokens(self, result) -> list[int]:
        """Token ids of numpy and torch are ints too."""
        if isinstance(result, tuple) and len(result) == 3 and not isinstance(result[0], int):
            result, drafted, accepted = result
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
            self.counts = True
        tokens = list(result)  # which may run it: a generator
        try:
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise Raised(f"must return token ids, not {str(result)[:80]!r}") from None


SAMPLED = Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.5, top_k=2), Sampling(1.5, 3, 0.9)
WARM = Sampling(0.6)  # for who has temperatures alone
SURE = Sampling(1.0, top_k=1)  # sampled, and yet of a known outcome: greedy decoding's
LONG = 65, 130, 257  # tokens of prompts: just past usual sizes of a block
VOCAB = 4  # of the statistical rows
SPEAKS, TWO_WORDS = [1, 2, 0, 1, 2], [1, 0, 0, 1, 0]  # prompts that drafts may be copied from
CHECKS = "greedy", "limits", "exact", "statistical"


def check_implementation(
    impl: Implementation, only: str = "", runs: int = RUNS, checks: tuple[str, ...] = CHECKS,
    outcomes: int = 400, baseline: Implementation | None = None,
) -> Iterator[Verdict]:  # fmt: skip
    """Greedy identity, lengths, end tokens and repeated calls; and the distribution of what is
    sampled: exactly, where its randomness can be taken over, by up to so many `outcomes` a row, and
    by χ² of `runs` runs. With a `baseline`, the same decoder's plain decoding, that is what it must
    equal; where that differs from ours, a row says so."""
    box, plain = FunctionDecoder(impl), FunctionDecoder(baseline) if baseline else None
    with tempfile.TemporaryDirectory() as temporary:
        for check, case, examine, *given in rows(Path(temporary), runs, outcomes):
            if only not in case or check not in checks:
                continue
            if plain and check != "limits":
                passed, detail = examined(examine, plain, *given)
                yield Verdict("baseline", f"{check}, {case}", passed or None, detail)
                given.append(plain)
            yield Verdict(check, case, *examined(examine, box, *given))
    if box.counts:
        found = drafts_something(box.drafted, box.accepted)
        yield Verdict("drafts", "accepted and rejected", *found)


def examined(examine: Callable, box: FunctionDecoder, *given) -> tuple[bool | None, str]:
    """One row's verdict: what is raised fails this row only."""
    try:
        return examine(box, *given)
    except NotImplementedError as error:
        return None, f"not offered: {error}"
    except Raised as error:
        return False, str(error)


def rows(root: Path, runs: int, outcomes: int) -> Iterator[tuple]:
    """(check, case, function, its arguments after the box), their checkpoints under `root`."""
    for seed in range(2):
        prompts = [random.Random(i).choices(range(24), k=1 + 5 * i) for i in range(6)]
        checkpoint = write_checkpoint(root / str(seed), seed, vocab=24)
        yield "greedy", f"model {seed}", is_greedy, *checkpoint, prompts
    checkpoint = write_checkpoint(root / "long", 3, vocab=24, context=512)
    prompts = [random.Random(n).choices(range(24), k=n) for n in LONG]
    yield "greedy", "long prompts", is_greedy, *checkpoint, prompts
    yield "limits", "lengths", keeps_lengths, checkpoint[0]
    for many, where in (1, "config.json"), (2, GENERATION), (3, GENERATION):
        case = f"{many} end token{'s' * (many > 1)}, {where}"
        yield "limits", case, ends, root / f"eos{many}", many, where
    # of two words more tokens can be followed: they should be more than are drafted
    for vocab, sampling in (2, SAMPLED[0]), (3, WARM), *((3, each) for each in SAMPLED[1:]):
        checkpoint = write_checkpoint(root / f"words{vocab}", 21, vocab)
        case = f"{vocab} words, {short(sampling)}"
        yield "exact", case, is_exact, *checkpoint, sampling, outcomes
    checkpoint = write_checkpoint(root / "sampled", 21, VOCAB)
    for sampling in SAMPLED:
        yield "statistical", short(sampling), is_drawn, *checkpoint, sampling, runs


def short(sampling: Sampling) -> str:
    return f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g}"


# ---- checkpoints ---------------------------------------------------------------------------------

SHAPE = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 64}
NOISE = 0.06  # on the draft's weights: it is right about half the time


def write_checkpoint(
    path: Path, seed: int, vocab: int, context: int = 128
) -> tuple[str, Transformer]:
    """A small random llama's folder, of a shape that engines take, with a draft beside it; and what
    it holds, read in float64."""
    model = small_model(seed, vocab, context, **SHAPE)
    model.model.norm.weight.mul_(0.4)  # not too sure of itself
    save(model, letters(vocab), path, torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(NOISE * noise)
    save(model, letters(vocab), path / "draft", torch.float32)
    return str(path), load(path, "float64", "cpu")[0]


GENERATION = "generation_config.json"


def name_end_tokens(folder: Path, where: str, tokens: int | list[int]) -> None:
    """Write eos_token_id into this file of a checkpoint alone. A generation_config.json without one
    would say that there is none, as transformers reads it: so it is deleted first."""
    (folder / GENERATION).unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(values))
    named = (values if where == "config.json" else {}) | {"eos_token_id": tokens}
    (folder / where).write_text(json.dumps(named))


# ---- greedy, and where it ends -------------------------------------------------------------------


def is_greedy(
    box: FunctionDecoder, folder: str, model: Transformer, prompts: list[list[int]],
    baseline: FunctionDecoder | None = None,
) -> tuple[bool, str]:  # fmt: skip
    """The tokens of plain decoding, as many as there are, but for ties; called twice, and at top-k
    1 if it has that. How many there must be is judged elsewhere."""
    ties = 0
    for prompt in prompts:
        if baseline:
            expected = baseline(folder, prompt)
        else:
            expected = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 24)
        for sampling in GREEDY, GREEDY, SURE:
            tokens = box.sure(folder, prompt, sampling, 24)[: len(expected)]
            at, gap = divergence(model, prompt, tokens, list(expected[: len(tokens)]))
            ties += at is not None and gap < TIE
            if not tokens or (at is not None and gap >= TIE):
                where = first_difference(tokens, expected) + f", top-2 gap {gap:.3f}"
                where = where if tokens else "no tokens"
                return False, f"{len(prompt)} tokens of prompt, {short(sampling)}: {where}"
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    return True, f"prompts of {lengths} tokens, twice, and at top-k 1 if it has that; {ties} ties"


def keeps_lengths(box: FunctionDecoder, folder: str) -> tuple[bool, str]:
    wrong = [n for n in range(12) if len(box(folder, [1, 2, 3], n=n)) != n]
    detail = f"max_new_tokens {wrong[:4]} not kept" if wrong else "max_new_tokens 0 to 11 kept"
    return not wrong, detail


def ends(box: FunctionDecoder, path: Path, many: int, where: str) -> tuple[bool, str]:
    """Four tokens of a greedy run in turn are the last of `many` end tokens, named in one file;
    the others never come."""
    _, model = write_checkpoint(path / "plain", 2, vocab=24)
    prompt = [3, 1, 4]
    tokens = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 12)
    others = [token for token in range(24) if token not in tokens][: many - 1]
    places = list(dict.fromkeys(tokens))[:4]
    for end in places:
        folder, _ = write_checkpoint(path / str(end), 2, vocab=24)
        for each in path / str(end), path / str(end) / "draft":
            name_end_tokens(each, where, [*others, end] if others else end)
        expected = list(tokens[: tokens.index(end) + 1])
        for sampling in GREEDY, SURE:
            given = box.sure(folder, prompt, sampling, 12)
            if given != expected:
                return False, f"end tokens {[*others, end]}: {given} instead of {expected}"
    return True, f"at {len(places)} offsets, greedy and at top-k 1 if it has that"


# ---- sampled -------------------------------------------------------------------------------------

SAME = 1e-5  # total variation that float32 may make


def is_exact(
    box: FunctionDecoder, folder: str, model: Transformer, sampling: Sampling, outcomes: int,
    baseline: FunctionDecoder | None = None,
) -> tuple[bool | None, str]:  # fmt: skip
    """The distribution of its first tokens over every outcome of its own random numbers: of one
    token more as long as there are hardly more than `outcomes`."""
    reached, detail, calls = 0, "", count(1)
    box(folder, TWO_WORDS, 0, 2, sampling)  # what is loaded once, and may draw
    for n in range(1, 9):

        def one(seed: int, box: FunctionDecoder = box, n: int = n) -> tuple[int, ...]:
            next(calls)
            return tuple(box(folder, TWO_WORDS, seed, n, sampling)[:n])

        try:
            given = enumerate_outcomes(one, outcomes)
            if baseline:
                exact = enumerate_outcomes(partial(one, box=baseline))
            else:
                exact = distribution(model, TWO_WORDS, sampling, n)
        except (NotTaken, Raised) as error:
            if isinstance(error, TooMany) and reached:
                break
            if isinstance(error, Raised):
                box(folder, TWO_WORDS, 0, n, sampling)  # which fails the row if it raises as well
            return None, f"not exactly: {error}"
        distance = total_variation(given, exact)
        reached, detail = n, f"TV {distance:.1e} over the sequences of {n} tokens"
        if distance > SAME:
            return False, f"{detail}: {largest(given, exact)}"
        if next(calls) > outcomes / 2:  # those of one more token would be too many
            break
    if reached == 1:  # a token that comes before any draft
        return None, f"only the first token could be followed, TV {distance:.1e}"
    return True, detail


def largest(given: Sequences, exact: Sequences) -> str:
    """Where the two differ most, in words."""
    worst = max(given.keys() | exact.keys(), key=lambda t: abs(given.get(t, 0) - exact.get(t, 0)))
    return f"{worst} with {given.get(worst, 0.0):.3f} instead of {exact.get(worst, 0.0):.3f}"


def distribution(model: Transformer, prompt: list[int], sampling: Sampling, n: int) -> Sequences:
    """The probability of every sequence of the first `n` tokens, by the chain rule, all prefixes of
    one length in a batch."""
    found: Sequences = {(): 1.0}
    for _ in range(n):
        hidden = model(torch.tensor([[*prompt, *prefix] for prefix in found]))[:, -1]
        rows = probs(model.logits(hidden), sampling).tolist()
        found = {
            (*prefix, token): weight * p
            for (prefix, weight), row in zip(found.items(), rows)
            for token, p in enumerate(row)
            if p > 0
        }
    return found


def is_drawn(
    box: FunctionDecoder, folder: str, model: Transformer, sampling: Sampling, runs: int,
    baseline: FunctionDecoder | None = None, n: int = 6,
) -> tuple[bool, str]:  # fmt: skip
    """χ² of its first tokens over differently seeded runs; eight times as many where the first
    leave a doubt."""
    drawn: list[Sequence] = []
    plain: list[Sequence] = []
    for seeds in range(runs), range(runs, 8 * runs):
        requests = [(SPEAKS, seed, n, sampling) for seed in seeds]
        drawn += [tuple(tokens[:n]) for tokens in box.all(folder, requests)]
        if baseline:
            plain += [tuple(tokens[:n]) for tokens in baseline.all(folder, requests)]
        if any(len(tokens) < n for tokens in drawn + plain):
            return False, f"fewer than {n} tokens, without an end token"
        if unknown := {t for tokens in drawn + plain for t in tokens} - set(range(VOCAB)):
            return False, f"drew {min(unknown)}, which is no token"
        found = scored(model, SPEAKS, drawn + plain, sampling)
        if not baseline and found.never:
            return False, f"drew {found.never}, which has probability 0"
        p, detail = least_p(found, drawn, plain if baseline else None)
        if p > 0.01 or p < FALSE_ALARM:
            break
    return p > FALSE_ALARM, f"{n} tokens: {detail}"


def drafts_something(drafted: int, accepted: int) -> tuple[bool | None, str]:
    """Whether what was tested is speculation at all."""
    if drafted == 0:
        return None, "it never drafted a token: what passed is plain decoding"
    if accepted == drafted:
        return None, f"all {drafted} drafts were accepted: no rejection was tested"
    return True, f"{accepted} of {drafted} drafts accepted"
