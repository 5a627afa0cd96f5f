"""The certifier passes on our methods, catches every mutant, and judges strangers."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from minispec import certify, generate
from minispec.certify import CHECKS, Counter, Toy, chi_square_p, first_tokens
from minispec.checkpoint import load, save
from minispec.mutants import MUTANTS
from minispec.sampling import Sampling, Seeded
from minispec.tree import Tree


@pytest.mark.parametrize("name", CHECKS)
def test_our_methods_pass(name):
    verdicts = list(CHECKS[name](quick=True))
    assert verdicts and [v for v in verdicts if not v.passed] == []


def mutants():
    """All; but of those that change one place and are caught by one check, one is enough here."""
    seen = set()
    for mutant in MUTANTS:
        place = mutant.caught_by, mutant.patches[0][0]
        marks = [pytest.mark.slow] if place in seen else []
        seen.add(place)
        yield pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", list(mutants()))
def test_every_mutant_is_caught_where_it_is_said_to_be(mutant):
    with mutant.apply():
        assert certify.first_failure(CHECKS[mutant.caught_by])


@pytest.mark.parametrize("check", ["cache", "proposals"])
def test_nothing_is_left_of_the_mutants(check):
    """Not even in the layouts that runs share."""
    assert certify.first_failure(CHECKS[check]) is None


def test_the_cases_policies_soon_change_their_minds():
    drafted = []
    for accepted in 0, 1, 2:
        (policy,) = certify.afresh({"k": certify.LENGTH}).values()
        assert policy.choose() == 2
        policy.observe(drafted=2, accepted=accepted)
        drafted.append(policy.choose())
    assert drafted == [1, 1, 3]
    sure, unsure = [[0.9, 0.1]] * 4, [[0.1, 0.1]] * 4
    sizes = [len(certify.BEST_TREE.choose(chances, room=16)) for chances in (unsure, sure)]
    assert sizes[0] < sizes[1]


def test_the_toy_knows_its_context_by_position_and_token():
    class Listening(Toy):
        def after(self, context):
            heard.append(context)
            return super().after(context)

    heard: list[tuple] = []
    toy = Listening(0)
    cache = toy.new_cache()
    toy.prefill([2, 0], cache)
    tree = Tree([1, 2, 0], [-1, 0, 0])
    toy(tree.tokens, cache, tree.depth, tree.mask)
    prompt = ((0, 2), (1, 0))
    assert heard == [
        prompt[:1], prompt, (*prompt, (2, 1)), (*prompt, (2, 1), (3, 2)), (*prompt, (2, 1), (3, 0)),
    ]  # fmt: skip
    assert all(type(number) is int for context in heard for pair in context for number in pair)
    assert torch.equal(toy(torch.tensor([1, 2]), cache), toy([1, 2], cache))


def test_chi_square_on_fair_and_loaded_counts():
    fair = {(i,): 0.25 for i in range(4)}
    assert chi_square_p(Counter({(i,): 100 for i in range(4)}), fair) == 1.0
    # χ² = 7.815 at three degrees of freedom: the 5 % quantile of every table
    p = chi_square_p(Counter({(0,): 127, (1,): 100, (2,): 100, (3,): 73}), fair)
    assert abs(p - 0.0022) < 3e-4  # χ² = 14.58
    assert chi_square_p(Counter({(9,): 1}), fair) == 0.0


MODELS: dict = {}


def ours(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """A correct implementation: our own speculative decoding behind the black-box signature."""
    if checkpoint not in MODELS:
        MODELS[checkpoint] = load(checkpoint, "float64", "cpu")[0]
    model = MODELS[checkpoint]
    run = generate.decode(
        model, None, prompt, "speculative", draft=model, k=2, max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
    )  # fmt: skip
    return run.tokens


def never_greedy(checkpoint, prompt, **options):
    return ours(checkpoint, prompt, **(options | {"temperature": 1.0}))


def no_top_p(checkpoint, prompt, **options):
    return ours(checkpoint, prompt, **(options | {"top_p": 1.0}))


def too_long(checkpoint, prompt, **options):
    return ours(checkpoint, prompt, **(options | {"max_new_tokens": options["max_new_tokens"] + 1}))


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = ours(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


def no_temperature(checkpoint, prompt, **options):
    return ours(
        checkpoint, prompt, **(options | {"temperature": float(options["temperature"] > 0)})
    )


def one_warper(checkpoint, prompt, **options):
    return ours(checkpoint, prompt, **(options | ({"top_p": 1.0} if options["top_k"] > 1 else {})))


def ends_only_greedily(checkpoint, prompt, **options):
    function = runs_past_the_end if options["temperature"] else ours
    return function(checkpoint, prompt, **options)


def fades_when_sampled(checkpoint, prompt, **options):
    tokens = ours(checkpoint, prompt, **options)
    return tokens[:3] + [0] * len(tokens[3:]) if options["temperature"] else tokens


def fails(function, check: str) -> bool:
    verdicts = certify.check_implementation(function)
    return any(v.check == check and not v.passed for v in verdicts)


def test_a_correct_black_box_passes_and_wrong_ones_fail_where_they_are_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(certify, "RUNS", 100)
    verdicts = list(certify.check_implementation(ours))
    assert {v.check for v in verdicts} == {"greedy", "limits", "statistical"}
    assert all(v.passed for v in verdicts)
    assert fails(never_greedy, "greedy")
    folder, model = certify.write_checkpoint(tmp_path, 21, vocab=6)
    for function, missed, seen in (
        (no_top_p, certify.SAMPLED[2], certify.SAMPLED[1]), (one_warper, *certify.SAMPLED[2:]),
        (no_temperature, certify.SAMPLED[0], certify.SAMPLED[1]),
    ):  # fmt: skip
        assert certify.impl_distribution(function, folder, model, missed).passed
        assert not certify.impl_distribution(function, folder, model, seen).passed
    assert fails(ends_only_greedily, "limits")
    assert fails(fades_when_sampled, "greedy")
    assert fails(too_long, "limits")
    assert fails(runs_past_the_end, "limits")


def run(*arguments: str, code: int, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        certify.main(list(arguments))
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    return err if code == 2 else out


def test_json_and_exit_codes(capsys, monkeypatch):
    out = json.loads(run("--checks", "cache", "--json", code=0, capsys=capsys))
    assert out["passed"] and {v["check"] for v in out["verdicts"]} == {"cache"}
    bad = next(m for m in MUTANTS if m.caught_by == "cache")
    with bad.apply():
        assert "FAIL" in run("--checks", "cache", code=1, capsys=capsys)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--impl", "a:b", "--checks", "greedy"], "give one of them"),
        (["--compare", "a", "b", "--impl", "a:b"], "give one of them"),
        (["--model", "x"], "--model is for --compare"),
        (["--checks", "nonsense"], "unknown check 'nonsense'"),
    ],
)
def test_flags_that_would_go_unheard(arguments, message, capsys):
    assert message in run(*arguments, code=2, capsys=capsys)


@pytest.mark.slow
def test_the_command_itself_passes_and_catches_every_mutant():
    """With the cases that quick runs leave out; and `python -m` must not check one copy of the
    module while the mutants patch another."""
    arguments = [sys.executable, "-m", "minispec.certify"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def returns_text(checkpoint, prompt, **options):
    return "hello"


def raises(checkpoint, prompt, **options):
    raise ValueError("no such luck")


def leaves(checkpoint, prompt, **options):
    sys.exit(0)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--impl", "no.such.module:f"], "cannot be imported"),
        (["--impl", "json:nothing"], "cannot be imported"),
        (["--impl", "json"], "cannot be imported"),
        (["--impl", "json:__name__"], "is not a function"),
        (["--impl", "test_certify:returns_text"], "must return a list of int"),
        (["--impl", "test_certify:raises"], "raised ValueError: no such luck"),
        (["--impl", "test_certify:leaves"], "raised SystemExit: 0"),
        (["--checks", "exact,magic"], "unknown check 'magic'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, match, capsys):
    err = run(*arguments, code=2, capsys=capsys)
    assert match in err and err.count("\n") == 1


def test_two_runs_are_compared_token_by_token(tmp_path, capsys):
    model = certify.small_model(0)
    save(model, None, tmp_path / "model")
    tokens = list(
        first_tokens(certify.bound("autoregressive"), model, [1, 2], Sampling(), Seeded(), 9)
    )
    wrong = tokens[:4] + [(tokens[4] + 1) % 24] + tokens[5:]
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    line = {"prompt_ids": [1, 2], "tokens": tokens}
    a.write_text((json.dumps(line) + "\n") * 2)
    b.write_text(json.dumps(line) + "\n" + json.dumps(line | {"tokens": wrong}) + "\n")
    options = ["--model", str(tmp_path / "model")]
    out = run("--compare", str(a), str(b), *options, code=1, capsys=capsys)
    assert "line 1" in out and "9 tokens, the same" in out
    assert "differs at token 4" in out and "top-2 gap" in out and "a bug" in out
    run("--compare", str(a), str(a), *options, code=0, capsys=capsys)
    short = line | {"tokens": tokens[:6]}
    for ended, code, says in ("length", 0, "the same 6 tokens, where one"), ("eos", 1, "a bug"):
        b.write_text((json.dumps(short | {"finish_reason": ended}) + "\n") * 2)
        assert says in run("--compare", str(a), str(b), *options, code=code, capsys=capsys)
    b.write_text((json.dumps(line | {"tokens": [], "finish_reason": "length"}) + "\n") * 2)
    assert "a bug" in run("--compare", str(a), str(b), *options, code=1, capsys=capsys)
    negative = tokens[:3] + [-1] + tokens[4:]
    b.write_text((json.dumps(line | {"tokens": negative}) + "\n") * 2)
    assert "top-2 gap inf" in run("--compare", str(a), str(b), *options, code=1, capsys=capsys)
    drawn = json.dumps(line | {"stats": {"temperature": 0.7}})
    b.write_text(json.dumps(line) + "\n" + drawn)
    err = run("--compare", str(a), str(b), *options, code=2, capsys=capsys)
    assert "line 2: drawn at temperature 0.7" in err
    for stats in None, 3, {"temperature": 0.7, "top_k": 1}:
        b.write_text((json.dumps(line | {"stats": stats}) + "\n") * 2)
        run("--compare", str(a), str(b), *options, code=0, capsys=capsys)
    b.write_text('{"prompt_ids": [], "tokens": [1]}\n' * 2)
    err = run("--compare", str(a), str(b), *options, code=2, capsys=capsys)
    assert "b.jsonl line 1: prompt_ids must not be empty" in err
    b.write_text(json.dumps(line) + "\n{oops\n")
    err = run("--compare", str(a), str(b), *options, code=2, capsys=capsys)
    assert "b.jsonl line 2" in err
    b.write_text(json.dumps(line))
    err = run("--compare", str(a), str(b), *options, code=2, capsys=capsys)
    assert "2 runs" in err and str(ROOT) not in err
