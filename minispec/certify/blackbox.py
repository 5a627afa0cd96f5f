"""Anyone's decoder, by what it returns: a function over token ids and small checkpoints."""

import importlib
import importlib.util
import json
import operator
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from minispec.certify.cases import GREEDY, bound
from minispec.certify.checks import (
    FALSE_ALARM,
    JOINT,
    RUNS,
    Verdict,
    chi_square_p,
    first_difference,
)
from minispec.certify.compare import TIE, divergence
from minispec.checkpoint import load, save
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.toys import exact_distribution, first_tokens, small_model


class Implementation(Protocol):
    """What --impl names: a function over token ids."""

    def __call__(
        self, checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float,
        top_k: int, top_p: float, seed: int,
    ) -> list[int]:  # fmt: skip
        """The new tokens, an EOS that ends them included, after `prompt` (ids of the checkpoint, a
        Hugging Face directory of a small llama in float32). temperature 0 is greedy; top_k 0 and
        top_p 1 are off; equal seeds may give equal, different seeds must give independent draws.
        Called thousands of times: keep the loaded model between calls."""


class Raised(Exception):
    """What an implementation did instead of returning tokens."""


def load_implementation(name: str) -> Implementation:
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
            f"--impl {name}: cannot be imported ({error}): give package.module:function or "
            "file.py:function"
        ) from None
    if not callable(found):
        raise UserError(f"--impl {name}: is not a function")
    return found


def call(impl: Implementation, folder: str, prompt: list[int], seed: int = 0, n: int = 24,
         sampling: Sampling = GREEDY) -> list[int]:  # fmt: skip
    """The implementation's tokens, as ints; Raised where they are not token ids."""
    try:
        given = impl(
            folder, list(prompt), max_new_tokens=n, temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, seed=seed,
        )  # fmt: skip
        tokens = list(given)
    except (Exception, SystemExit) as error:
        said = (str(error).strip().splitlines() or ["no message"])[-1]
        raise Raised(f"raised {type(error).__name__}: {said}") from error
    try:
        return [operator.index(token) for token in tokens]  # numpy's and torch's too
    except TypeError:
        raise Raised(f"must return token ids, not {str(given)[:80]!r}") from None


SAMPLED = Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.5, top_k=3), Sampling(1.5, 4, 0.9)
SURE = Sampling(1.0, top_k=1)  # sampled, and yet of a known outcome: greedy decoding's
LONG = 65, 130, 257  # tokens of prompts: just past usual sizes of a block


def check_implementation(
    impl: Implementation, only: str = "", runs: int = RUNS
) -> Iterator[Verdict]:
    """Greedy identity, lengths, end tokens, repeated calls, and χ² of sampled runs."""
    with tempfile.TemporaryDirectory() as temporary:
        for check, case, examine, *given in rows(Path(temporary), runs):
            if only in case:
                try:
                    yield Verdict(check, case, *examine(impl, *given))
                except Raised as error:  # fails this row only
                    yield Verdict(check, case, False, str(error))


def rows(root: Path, runs: int) -> Iterator[tuple]:
    """(check, case, function, its arguments after the implementation), their checkpoints under
    `root`."""
    for seed in range(2):
        prompts = [random.Random(i).choices(range(24), k=1 + 5 * i) for i in range(6)]
        checkpoint = write_checkpoint(root / str(seed), seed, vocab=24)
        yield "greedy", f"model {seed}", is_greedy, *checkpoint, prompts
    checkpoint = write_checkpoint(root / "long", 3, vocab=24, context=512)
    prompts = [random.Random(n).choices(range(24), k=n) for n in LONG]
    yield "greedy", "long prompts", is_greedy, *checkpoint, prompts
    yield "limits", "lengths", keeps_lengths, checkpoint[0]
    for count, where in (1, "config.json"), (2, GENERATION), (3, GENERATION):
        case = f"{count} end token{'s' * (count > 1)}, {where}"
        yield "limits", case, ends, root / f"eos{count}", count, where
    checkpoint = write_checkpoint(root / "sampled", 21, vocab=6)
    for sampling in SAMPLED:
        name = f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g}"
        yield "statistical", name, is_drawn, *checkpoint, sampling, runs


def write_checkpoint(
    path: Path, seed: int, vocab: int, context: int = 128
) -> tuple[str, Transformer]:
    """A small random llama's folder, and what it holds, read in float64."""
    save(small_model(seed, vocab, context), None, path, torch.float32)
    return str(path), load(path, "float64", "cpu")[0]


def is_greedy(
    impl: Implementation, folder: str, model: Transformer, prompts: list[list[int]]
) -> tuple[bool, str]:
    """The tokens of plain decoding, but for ties; called twice, and at top-k 1."""
    ties = 0
    for prompt in prompts:
        expected = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 24)
        for sampling in GREEDY, GREEDY, SURE:
            tokens = call(impl, folder, prompt, sampling=sampling)
            at, gap = divergence(model, prompt, tokens, list(expected))
            ties += at is not None and gap < TIE
            if at is not None and gap >= TIE:
                where = first_difference(tokens, expected)
                return False, f"{len(prompt)} tokens of prompt: {where}, top-2 gap {gap:.3f}"
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    return True, f"prompts of {lengths} tokens, twice, and at top-k 1; {ties} ties"


def keeps_lengths(impl: Implementation, folder: str) -> tuple[bool, str]:
    wrong = [n for n in range(12) if len(call(impl, folder, [1, 2, 3], n=n)) != n]
    detail = f"max_new_tokens {wrong[:4]} not kept" if wrong else "max_new_tokens 0 to 11 kept"
    return not wrong, detail


GENERATION = "generation_config.json"


def ends(impl: Implementation, path: Path, count: int, where: str) -> tuple[bool, str]:
    """Four tokens of a greedy run in turn are the last of `count` end tokens, named in one file;
    the others never come."""
    model, prompt = small_model(2), [3, 1, 4]
    tokens = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 12)
    others = [token for token in range(24) if token not in tokens][: count - 1]
    places = list(dict.fromkeys(tokens))[:4]
    for end in places:
        folder, _ = write_checkpoint(path / str(end), 2, vocab=24)
        name_end_tokens(path / str(end), where, [*others, end] if others else end)
        expected = list(tokens[: tokens.index(end) + 1])
        for sampling in GREEDY, SURE:
            given = call(impl, folder, prompt, n=12, sampling=sampling)
            if given != expected:
                return False, f"end tokens {[*others, end]}: {given} instead of {expected}"
    return True, f"at {len(places)} offsets, greedy and at top-k 1"


def name_end_tokens(folder: Path, where: str, tokens: int | list[int]) -> None:
    """Write eos_token_id into this file of a checkpoint alone. A generation_config.json without one
    would say that there is none, as transformers reads it: so it is deleted first."""
    (folder / GENERATION).unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(values))
    named = (values if where == "config.json" else {}) | {"eos_token_id": tokens}
    (folder / where).write_text(json.dumps(named))


def is_drawn(
    impl: Implementation, folder: str, model: Transformer, sampling: Sampling, runs: int
) -> tuple[bool, str]:
    """χ² of the first tokens, all together, over differently seeded runs."""
    prompt = [1, 2, 3, 1, 2]
    exact = exact_distribution(bound("autoregressive"), model, prompt, sampling, JOINT)
    counts = Counter(
        tuple(call(impl, folder, prompt, seed, JOINT, sampling)) for seed in range(runs)
    )
    p = chi_square_p(counts, exact)
    return p > FALSE_ALARM, f"p = {p:.2g}, {runs} runs of {JOINT} tokens"
