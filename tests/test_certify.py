"""certify catches every mutant, tests black boxes, and explains the difference of two runs."""

import contextlib
import functools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT

from minispec import verify
from minispec.certify.__main__ import main
from minispec.certify.others import blackbox
from minispec.certify.ours import cases, mutants
from minispec.certify.ours.checks import CHECKS
from minispec.certify.ours.mutants import MUTANTS
from minispec.certify.statistics import (
    FALSE_ALARM,
    chi_square_p,
    detectable_bias,
    two_sample_p,
)
from minispec.checkpoints.load import load, save
from minispec.generate import decode
from minispec.methods import speculative
from minispec.sampling import Sampling, Seeded
from minispec.toys import Toy, first_tokens, small_model
from minispec.tree import Tree


@torch.no_grad()
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught_by_its_check(mutant):
    assert mutant.caught()


def test_a_surviving_mutant_is_reported():
    harmless = cases.ExactCase  # replaced by itself
    survivor = type(MUTANTS[0])("none", "cache", "prompt-lookup", ((cases, "ExactCase", harmless),))
    assert survivor.caught() is None


def test_the_adaptive_policies_of_the_cases_adapt_quickly():
    drafted = []
    for accepted in 0, 1, 2:
        (policy,) = cases.fresh_options({"k": cases.ADAPTIVE_K}).values()
        assert policy.choose() == 2
        policy.observe(drafted=2, accepted=accepted)
        drafted.append(policy.choose())
    assert drafted == [1, 1, 3]
    sure, unsure = [[0.9, 0.1]] * 4, [[0.1, 0.1]] * 4
    sizes = [len(cases.ADAPTIVE_TREE.choose(chances, free_rows=16)) for chances in (unsure, sure)]
    assert sizes[0] < sizes[1]


def test_the_toy_depends_on_position_and_token_of_its_whole_context():
    toy = Toy(0)
    cache = toy.new_cache()
    toy.prefill([2, 0], cache)
    tree = Tree([1, 2, 0], [-1, 0, 0])
    toy(tree.tokens, cache, tree.depth, tree.mask)
    prompt = ((0, 2), (1, 0))
    assert list(toy.logits_after) == [  # every context that was evaluated
        prompt[:1], prompt, (*prompt, (2, 1)), (*prompt, (2, 1), (3, 2)), (*prompt, (2, 1), (3, 0)),
    ]  # fmt: skip
    assert torch.equal(toy(torch.tensor([1, 2]), cache), toy([1, 2], cache))


def test_chi_square_of_fair_and_biased_counts():
    fair = {(i,): 0.25 for i in range(4)}
    assert chi_square_p(Counter({(i,): 100 for i in range(4)}), fair) == 1.0
    # G = 2 (127 ln 1.27 + 73 ln 0.73) = 14.76 at three degrees of freedom
    p = chi_square_p(Counter({(0,): 127, (1,): 100, (2,): 100, (3,): 73}), fair)
    assert abs(p - 0.00203) < 3e-5
    assert chi_square_p(Counter({(9,): 1}), fair) == 0.0


@pytest.mark.parametrize("expected", [0.01, 0.3, 1, 2, 5, 10, 40])
@pytest.mark.parametrize("runs", [100, 400])
def test_a_correct_decoder_with_a_sharp_distribution_rarely_fails(runs, expected):
    """The exact probability of a p-value below the limit, over all counts of a rare cell, is at
    most twice the limit."""
    rare = expected / runs
    sharp = {(0,): 1 - rare, (1,): rare}
    chances = (
        math.comb(runs, k) * rare**k * (1 - rare) ** (runs - k)
        for k in range(runs + 1)
        if chi_square_p(Counter({(0,): runs - k, (1,): k}), sharp) < FALSE_ALARM
    )
    assert sum(chances) < 2 * FALSE_ALARM


def test_two_samples_of_one_sharp_distribution_rarely_differ():
    """The exact probability, over all splits of a rare token's occurrences between the samples."""
    for total in 10, 20, 40, 80:
        chances = (
            math.comb(total, k) / 2**total
            for k in range(total + 1)
            if two_sample_p(
                Counter({0: 400 - k, 1: k}), Counter({0: 400 - total + k, 1: total - k})
            ) < FALSE_ALARM
        )  # fmt: skip
        assert sum(chances) < 3 * FALSE_ALARM


def test_a_bias_of_the_detectable_size_is_detected():
    """About nine times in ten, for the shape that is hardest to detect."""
    n, rng = 400, random.Random(0)
    t = detectable_bias(3, n)
    fair = {(i,): 0.25 for i in range(4)}
    biased = [0.25 + t / 2, 0.25 + t / 2, 0.25 - t / 2, 0.25 - t / 2]
    detected = [
        chi_square_p(Counter((i,) for i in rng.choices(range(4), biased, k=n)), fair) < 1e-6
        for _ in range(300)
    ]
    assert 0.8 < sum(detected) / 300 < 0.99 and detectable_bias(3, 8 * n) < t / 2


# ---- black boxes ---------------------------------------------------------------------------------

loaded = functools.cache(lambda checkpoint: load(checkpoint, "float64", "cpu")[0])


def ours(checkpoint, prompt, **options):
    """A correct implementation: our prompt lookup with the signature of a black box."""
    return decode(loaded(checkpoint), None, prompt, "prompt-lookup", k=2, **options).tokens


def changed(**changes):
    """Our implementation with options replaced: by values, or by functions of the options."""

    def implementation(checkpoint, prompt, **options):
        made = {name: x(options) if callable(x) else x for name, x in changes.items()}
        return ours(checkpoint, prompt, **(options | made))

    return implementation


def numpy_ids(checkpoint, prompt, **options):
    return np.array(ours(checkpoint, prompt, **options), dtype=np.int64)


def wrong_on_long_prompts(checkpoint, prompt, **options):
    return ours(checkpoint, prompt[-32:], **options)


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = ours(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


def first_end_token_only(checkpoint, prompt, **options):
    model = load(checkpoint, "float64", "cpu")[0]
    model.config = replace(model.config, eos_ids=model.config.eos_ids[:1])
    return decode(model, None, prompt, **options).tokens


def fades(checkpoint, prompt, **options):
    tokens = ours(checkpoint, prompt, **options)
    return tokens[:3] + [0] * len(tokens[3:])


def raises_late(checkpoint, prompt, **options):
    yield 1
    raise ValueError("no such luck")


def when_sampled(other):
    """Our implementation if greedy, otherwise another one."""
    return lambda *args, **options: (other if options["temperature"] else ours)(*args, **options)


def test_a_correct_black_box_passes():
    verdicts = list(blackbox.check_implementation(ours, runs=30, outcomes=60))
    rows = {"greedy": 3, "limits": 4, "exact": 5, "statistical": 4}
    assert Counter(v.check for v in verdicts) == rows
    too_few = [v.check for v in verdicts if "only the first token" in v.detail]
    assert all(v.passed or "only the first token" in v.detail for v in verdicts), verdicts
    assert set(too_few) <= {"exact"} and len(too_few) < 3


@pytest.mark.parametrize(
    "function, right, wrong",
    [
        (numpy_ids, ["lengths", "1 end token"], []),
        (changed(temperature=1.0), ["lengths"], ["model 0", "1 end token"]),
        (wrong_on_long_prompts, ["lengths"], ["long prompts"]),
        (first_end_token_only, ["1 end token,"], ["2 end tokens", "3 end tokens"]),
        (runs_past_the_end, ["lengths"], ["1 end token"]),
        (when_sampled(runs_past_the_end), ["lengths"], ["1 end token"]),
        (when_sampled(fades), ["lengths"], ["model 0"]),
        (changed(max_new_tokens=lambda options: options["max_new_tokens"] + 1), ["model 0"],
         ["lengths"]),
    ],
)  # fmt: skip
def test_a_black_box_fails_exactly_the_checks_that_cover_its_mistake(function, right, wrong):
    for name in right + wrong:
        verdicts = list(blackbox.check_implementation(function, only=name))
        assert verdicts and all(v.passed == (name in right) for v in verdicts), verdicts


def test_an_exception_fails_only_its_own_check():
    verdicts = list(blackbox.check_implementation(when_sampled(raises_late), runs=1, outcomes=9))
    assert len(verdicts) == 16 and [v.case for v in verdicts if v.passed] == ["lengths"]
    message = "raised ValueError: no such luck ("
    assert sum(v.passed is False and message in v.detail for v in verdicts) == 15
    assert "prompt of 1 tokens, max_new_tokens 24, temperature 1.0, top_k 1" in verdicts[0].detail
    for function, snippet in (
        (lambda *_, **options: "hello", "must return token ids, not 'hello'"),
        (lambda *_, **options: sys.exit(0), "raised SystemExit: 0"),
        (raises_late, "raised ValueError: no such luck"),
    ):
        (verdict,) = check("lengths", function)
        assert not verdict.passed and snippet in verdict.detail


def check(only: str, function, **options) -> list:
    return list(blackbox.check_implementation(function, only=only, **options))


def test_unsupported_options_are_skipped():
    def greedy_only(checkpoint, prompt, **options):
        if options["temperature"]:
            raise NotImplementedError("no sampling")
        return ours(checkpoint, prompt, **options)

    verdicts = list(blackbox.check_implementation(greedy_only, runs=1, outcomes=9))
    assert {v.passed for v in verdicts if v.check in ("greedy", "limits")} == {True}
    assert {v.passed for v in verdicts if v.check in ("exact", "statistical")} == {None}
    assert {v.detail for v in verdicts if v.passed is None} == {"not supported: no sampling"}


def test_an_exception_fails_the_exact_check_too(tmp_path):
    def not_for_one_token(checkpoint, prompt, **options):
        if options["max_new_tokens"] == 1:
            raise ValueError("one is too few")
        return ours(checkpoint, prompt, **options)

    def draws_from_nothing(checkpoint, prompt, **options):
        return torch.multinomial(torch.full((3,), math.nan), 2, True).tolist()

    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab=3)
    for function, snippet in (not_for_one_token, "one is too few"), (draws_from_nothing, "probab"):
        with pytest.raises(blackbox.Raised, match=snippet):
            blackbox.is_exact(blackbox.FunctionDecoder(function), folder, model, Sampling(1.0), 30)


def test_a_run_without_drafts_or_without_rejections_is_reported():
    for counts, passed, snippet in (
        ((0, 0), None, "no token was drafted"), ((5, 5), None, "no rejection"),
        ((5, 2), True, "2 of 5 drafts accepted"),
    ):  # fmt: skip
        verdicts = check("no such case", lambda *_: None)
        decoder = blackbox.FunctionDecoder(lambda *_, c=counts, **options: ([1], *c))
        assert verdicts == [] and decoder("", [1]) == [1]
        found, detail = blackbox.drafting_result(decoder.drafted, decoder.accepted)
        assert found is passed and snippet in detail


def test_an_engine_may_batch_requests(tmp_path):
    class Engine:
        def many(self, checkpoint, requests):
            sizes.append(len(requests))
            return [ours(checkpoint, **request) for request in requests]

    sizes: list[int] = []
    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab=4)
    decoder = blackbox.FunctionDecoder(Engine())
    passed, detail = blackbox.fits_distribution(decoder, folder, model, Sampling(1.0), 50)
    assert passed and sizes == [50], detail


@pytest.mark.parametrize(
    "function, harmless, revealing",
    [
        (changed(top_p=1.0), Sampling(1.5, 3), Sampling(0.7, top_p=0.8)),
        (changed(temperature=1.0), Sampling(1.0), Sampling(0.7, top_p=0.8)),
        # top-p is ignored if there is a top-k
        (changed(top_p=lambda options: 1.0 if options["top_k"] > 1 else options["top_p"]),
         Sampling(1.5, 2), Sampling(1.5, 3, 0.9)),
    ],
)  # fmt: skip
def test_a_missing_warper_is_detected_where_it_matters(function, harmless, revealing, tmp_path):
    decoder = blackbox.FunctionDecoder(function)
    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab=4)
    assert blackbox.fits_distribution(decoder, folder, model, harmless, 60)[0]
    assert not blackbox.fits_distribution(decoder, folder, model, revealing, 60)[0]
    folder, model = blackbox.write_checkpoint(tmp_path / "exact", 21, vocab=3)
    assert blackbox.is_exact(decoder, folder, model, harmless, 30)[0] is not False
    passed, detail = blackbox.is_exact(decoder, folder, model, revealing, 30)
    assert passed is False and "instead of" in detail


@pytest.mark.slow  # the same for servers is not
def test_with_a_baseline_a_deviating_convention_passes():
    """A decoder that ignores top-p in both plain and speculative decoding is lossless."""
    other = changed(top_p=1.0)
    options = dict(runs=30, outcomes=9, checks=("exact", "statistical"))
    rows = list(blackbox.check_implementation(other, baseline=other, **options))
    assert all(v.passed is not False for v in rows if v.check != "baseline")
    judged = [v for v in rows if v.check == "baseline" and "only the first token" not in v.detail]
    differ = [v.case for v in judged if not v.passed]
    assert len(differ) == 4 and all("top-p 0." in case for case in differ)
    rows = list(blackbox.check_implementation(ours, baseline=other, only="T=0.7", **options))
    assert [v.passed for v in rows if v.check == "exact"] == [False]


# ---- sampling mistakes ---------------------------------------------------------------------------


def speculating(**patches):
    """Our speculative decoding with the checkpoint's draft and k = 2, and with names of its module
    replaced."""
    pair = functools.cache(lambda folder: (loaded(folder), loaded(f"{folder}/draft")))

    def implementation(checkpoint, prompt, **options):
        model, draft = pair(checkpoint)
        with contextlib.ExitStack() as stack:
            for name, mistake in patches.items():
                stack.enter_context(mock.patch.object(speculative, name, mistake))
            run = decode(model, None, prompt, "speculative", draft=draft, k=2, **options)
        return run.tokens, run.stats["drafted"], run.stats["accepted"]

    return implementation


class MoreLenient:
    """Raise every acceptance probability by a factor of 1.5."""

    def __init__(self, randomness):
        self.categorical, self.original = randomness.categorical, randomness

    def bernoulli(self, p: float) -> bool:
        return self.original.bernoulli(min(1.0, 1.5 * p))


def lenient(target, tree, randomness):
    return verify.accept(target, tree, MoreLenient(randomness))


def typical(target, tree, randomness):
    """Accept every token that is probable enough."""
    path = [0]
    while children := tree.children(path[-1]):
        if target[path[-1]][tree.tokens[children[0]]] < 0.3:
            break
        path.append(children[0])
    return path, randomness.categorical(target[path[-1]])


def flat_bonus(target, tree, randomness):
    """Draw the bonus token from the square root of its distribution."""
    flat = [p if tree.children(node) else p**0.5 / (p**0.5).sum() for node, p in enumerate(target)]
    return verify.accept(flat, tree, randomness)


MISTAKES = {
    "lenient": ("accept", lenient), "typical": ("accept", typical),
    "flat bonus": ("accept", flat_bonus), "best bonus": ("accept", mutants.argmax_bonus),
    "best root": ("accept", mutants.argmax_root),
    "confident": ("propose", mutants.confident_prefix),
    "reduced": ("propose", mutants.reduced_vocabulary),
}  # fmt: skip


SLOW = "flat bonus", "best root"  # both take as long as "best bonus"
CASES = [pytest.param(m, marks=pytest.mark.slow if m in SLOW else ()) for m in MISTAKES]


@pytest.mark.parametrize("mistake", ["none", *CASES])
def test_a_sampling_mistake_has_its_exact_bias(mistake, tmp_path):
    """With the signature of a black box, over sequences of a few tokens of a vocabulary of two."""
    correct = mistake == "none"
    patches = {} if correct else dict([MISTAKES[mistake]])
    decoder = blackbox.FunctionDecoder(speculating(**patches))
    vocab = 3 if mistake == "reduced" else 2  # a reduced vocabulary has two of three tokens
    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab)
    # visible only after all drafts
    late = mistake in ("none", "flat bonus", "best bonus", "best root")
    found, detail = blackbox.is_exact(decoder, folder, model, Sampling(1.0), 200 if late else 60)
    assert found is correct, detail
    if correct:
        assert int(detail.split("sequences of ")[1][0]) > 2  # longer than a draft
        assert 0 < decoder.accepted < decoder.drafted


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["lenient", "typical", "flat bonus"])
def test_a_sampling_mistake_is_detected_in_samples(mistake, tmp_path):
    decoder = blackbox.FunctionDecoder(speculating(**dict([MISTAKES[mistake]])))
    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab=4)
    found, detail = blackbox.fits_distribution(decoder, folder, model, Sampling(1.0), 4000)
    assert found is False, detail


# ---- the command ---------------------------------------------------------------------------------


def run(*arguments: str, code: int, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    return err if code == 2 else out


def test_json_and_exit_codes(tmp_path, capsys):
    save(MODEL, None, tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(lines({}, {}))
    (tmp_path / "b.jsonl").write_text(lines({}, {"tokens": other(4)}))
    files = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    asked = "--compare", *files, "--model", str(tmp_path / "model"), "--json"
    out = json.loads(run(*asked, code=1, capsys=capsys))
    assert not out["passed"] and out["seconds"] > 0
    assert [v["passed"] for v in out["verdicts"]] == [True, False]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--impl", "a:b", "--checks", "cache"], "unknown check 'cache'; choose from greedy"),
        (["--compare", "a", "b", "--impl", "a:b"], "are different tests; choose one"),
        (["--compare", "a", "b", "--checks", "greedy"], "--checks only works with --impl or"),
        (["--baseline", "a:b"], "--baseline only works with --impl or --server"),
        (["--runs", "500"], "--runs only works with --impl"),
        (["--impl", "json:loads", "--baseline", "json:nothing"], "--baseline json:nothing: cannot"),
        (["--model", "x"], "--model only works with --server or --compare"),
        (["--server", "x", "--precision", "nan"], "nan: use float32, float16, bfloat16, or a gap"),
        (["--server", "x", "--precision", "float8"], "float8: use float32, float16"),
        (["--server", "x", "--impl", "a:b"], "--impl and --server are different tests"),
        (["--requests", "500"], "--requests only works with --server"),
        (["--server", "x", "--checks", "exact"], "unknown check 'exact'; choose from greedy, lim"),
        (["--checks", "nonsense"], "unknown check 'nonsense'"),
        (["--checks", "exact,magic"], "unknown check 'magic'"),
        (["--checks", ""], "has an empty name before or after a comma"),
        (["--impl", "no.such.module:f"], "cannot be imported"),
        (["--impl", "no/such/file.py:f"], "cannot be imported"),
        (["--impl", "json:nothing"], "cannot be imported"),
        (["--impl", "json"], "cannot be imported"),
        (["--impl", ""], "cannot be imported"),
        (["--impl", "json:__name__"], "is not a function"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(arguments, message, capsys):
    err = run(*arguments, code=2, capsys=capsys)
    assert message in err and err.count("\n") == 1


def test_a_function_is_imported_from_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport helper\n"
        "@dataclass\nclass State:\n    tokens: list\n\n"
        "def decode(*args, **options):\n    return State(helper.nothing).tokens\n"
    )
    (tmp_path / "helper.py").write_text("nothing = []\n")
    assert blackbox.load_implementation(f"{file}:decode")() == []


@pytest.mark.slow
def test_the_command_passes_and_catches_every_mutant():
    arguments = [sys.executable, "-m", "minispec.certify"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert all(f"  {check} " in done.stdout for check in (*CHECKS, "mutants"))


# ---- two runs ------------------------------------------------------------------------------------

PLAIN = cases.bound("autoregressive")
MODEL, PROMPT = small_model(0), [1, 2]
TOKENS = list(first_tokens(PLAIN, MODEL, PROMPT, Sampling(), Seeded(), 9))
LINE = {"prompt_ids": PROMPT, "tokens": TOKENS}


def other(at: int, token: int | None = None) -> list[int]:
    """Return the tokens with one changed."""
    token = (TOKENS[at] + 1) % 24 if token is None else token
    return [*TOKENS[:at], token, *TOKENS[at + 1 :]]


def lines(*runs: dict) -> str:
    return "".join(json.dumps(LINE | run) + "\n" for run in runs)


@pytest.mark.parametrize(
    "text, code, snippet",
    [
        (lines({}), 0, "all 9 tokens are identical"),
        (lines({"tokens": other(4)}), 1, "differs at token 4"),
        (lines({"tokens": other(4)}), 1, "a bug"),
        (lines({"tokens": other(3, -1)}), 1, "top-2 gap inf"),
        (lines({"tokens": TOKENS[:6], "finish_reason": "length"}), 0, "identical for 6 tokens, t"),
        (lines({"tokens": TOKENS[:6], "finish_reason": "eos"}), 1, "a bug"),
        (lines({"tokens": [], "finish_reason": "length"}), 0, "identical for 0 tokens, then one"),
        (lines({"stats": {"temperature": 0.7}}), 2, "line 1: sampled at temperature 0.7"),
        (lines({"stats": {"temperature": 0.7, "top_k": 1}}), 0, "identical"),
        (lines({"stats": 3}), 0, "identical"),
        (lines({"prompt_ids": []}), 2, "line 1: prompt_ids must not be empty"),
        (lines({"prompt_ids": [2, 1]}), 2, "the prompts of"),
        (lines({}, {}), 2, "b.jsonl has 2"),
        ("{oops\n", 2, "b.jsonl line 1"),
        ("[" * 100_000 + "\n", 2, "b.jsonl line 1"),
    ],
)
def test_two_runs_are_compared_token_by_token(text, code, snippet, tmp_path, capsys):
    save(MODEL, None, tmp_path / "model")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(lines({}))
    b.write_text(text)
    model = str(tmp_path / "model")
    out = run("--compare", str(a), str(b), "--model", model, code=code, capsys=capsys)
    assert snippet in out
