"""The certifier catches every mutant, judges strangers, and explains two runs."""

import functools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT

from minispec.certify import blackbox, cases
from minispec.certify.__main__ import main
from minispec.certify.checks import CHECKS, chi_square_p
from minispec.certify.mutants import MUTANTS
from minispec.checkpoint import load, save
from minispec.generate import decode
from minispec.sampling import Sampling, Seeded
from minispec.toys import Toy, first_tokens, small_model
from minispec.tree import Tree


@torch.no_grad()
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught_where_it_is_said_to_be(mutant):
    assert mutant.caught()


def test_a_survivor_fails():
    harmless = cases.Proof  # replaced by itself
    survivor = type(MUTANTS[0])("none", "cache", "prompt-lookup", ((cases, "Proof", harmless),))
    assert survivor.caught() is None


def test_the_cases_policies_soon_change_their_minds():
    drafted = []
    for accepted in 0, 1, 2:
        (policy,) = cases.afresh({"k": cases.LENGTH}).values()
        assert policy.choose() == 2
        policy.observe(drafted=2, accepted=accepted)
        drafted.append(policy.choose())
    assert drafted == [1, 1, 3]
    sure, unsure = [[0.9, 0.1]] * 4, [[0.1, 0.1]] * 4
    sizes = [len(cases.BEST_TREE.choose(chances, room=16)) for chances in (unsure, sure)]
    assert sizes[0] < sizes[1]


def test_the_toy_knows_its_context_by_position_and_token():
    toy = Toy(0)
    cache = toy.new_cache()
    toy.prefill([2, 0], cache)
    tree = Tree([1, 2, 0], [-1, 0, 0])
    toy(tree.tokens, cache, tree.depth, tree.mask)
    prompt = ((0, 2), (1, 0))
    assert list(toy.memory) == [  # every context that it was asked for
        prompt[:1], prompt, (*prompt, (2, 1)), (*prompt, (2, 1), (3, 2)), (*prompt, (2, 1), (3, 0)),
    ]  # fmt: skip
    assert torch.equal(toy(torch.tensor([1, 2]), cache), toy([1, 2], cache))


def test_chi_square_on_fair_and_loaded_counts():
    fair = {(i,): 0.25 for i in range(4)}
    assert chi_square_p(Counter({(i,): 100 for i in range(4)}), fair) == 1.0
    # χ² = 14.58 at three degrees of freedom
    p = chi_square_p(Counter({(0,): 127, (1,): 100, (2,): 100, (3,): 73}), fair)
    assert abs(p - 0.0022) < 3e-4
    assert chi_square_p(Counter({(9,): 1}), fair) == 0.0


# ---- strangers -----------------------------------------------------------------------------------

loaded = functools.cache(lambda checkpoint: load(checkpoint, "float64", "cpu")[0])


def ours(checkpoint, prompt, **options):
    """A correct implementation: our prompt lookup behind the black-box signature."""
    return decode(loaded(checkpoint), None, prompt, "prompt-lookup", k=2, **options).tokens


def changed(**changes):
    """Our implementation with options of its own: values, or functions of the options given."""

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
    """Ours where greedy, else another one."""
    return lambda *given, **options: (other if options["temperature"] else ours)(*given, **options)


def test_a_correct_black_box_passes():
    verdicts = list(blackbox.check_implementation(ours, runs=30))
    assert [v.check for v in verdicts] == ["greedy"] * 3 + ["limits"] * 4 + ["statistical"] * 4
    assert all(v.passed for v in verdicts)


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
        (changed(max_new_tokens=lambda given: given["max_new_tokens"] + 1), [], ["lengths"]),
    ],
)
def test_a_black_box_fails_where_it_is_wrong_and_only_there(function, right, wrong):
    for name in right + wrong:
        verdicts = list(blackbox.check_implementation(function, only=name))
        assert verdicts and all(v.passed == (name in right) for v in verdicts), verdicts


def test_an_exception_fails_its_row_and_the_table_goes_on():
    verdicts = list(blackbox.check_implementation(when_sampled(raises_late), runs=1))
    assert len(verdicts) == 11 and [v.case for v in verdicts if v.passed] == ["lengths"]
    assert sum("raised ValueError: no such luck" in v.detail for v in verdicts) == 10
    for function, says in (
        (lambda *_, **options: "hello", "must return token ids, not 'hello'"),
        (lambda *_, **options: sys.exit(0), "raised SystemExit: 0"),
        (raises_late, "raised ValueError: no such luck"),
    ):
        (verdict,) = blackbox.check_implementation(function, only="lengths")
        assert not verdict.passed and says in verdict.detail


@pytest.mark.parametrize(
    "function, missed, seen",
    [
        (changed(top_p=1.0), Sampling(1.5, 3), Sampling(0.7, top_p=0.8)),
        (changed(temperature=1.0), Sampling(1.0), Sampling(0.7, top_p=0.8)),
        # top-p ignored beside a top-k
        (changed(top_p=lambda given: 1.0 if given["top_k"] > 1 else given["top_p"]),
         Sampling(1.5, 3), Sampling(1.5, 4, 0.9)),
    ],
)  # fmt: skip
def test_a_warper_left_out_is_seen_where_it_matters(function, missed, seen, tmp_path):
    folder, model = blackbox.write_checkpoint(tmp_path, 21, vocab=6)
    assert blackbox.is_drawn(function, folder, model, missed, 100)[0]
    assert not blackbox.is_drawn(function, folder, model, seen, 100)[0]


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
        (["--impl", "a:b", "--checks", "greedy"], "give one of them"),
        (["--compare", "a", "b", "--impl", "a:b"], "give one of them"),
        (["--model", "x"], "--model is for --compare"),
        (["--checks", "nonsense"], "unknown check 'nonsense'"),
        (["--checks", "exact,magic"], "unknown check 'magic'"),
        (["--checks", ""], "unknown check ''"),
        (["--impl", "no.such.module:f"], "cannot be imported"),
        (["--impl", "no/such/file.py:f"], "cannot be imported"),
        (["--impl", "json:nothing"], "cannot be imported"),
        (["--impl", "json"], "cannot be imported"),
        (["--impl", ""], "cannot be imported"),
        (["--impl", "json:__name__"], "is not a function"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, message, capsys):
    err = run(*arguments, code=2, capsys=capsys)
    assert message in err and err.count("\n") == 1


def test_a_function_in_a_file_is_found(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside\n"
        "@dataclass\nclass State:\n    tokens: list\n\n"
        "def decode(*given, **options):\n    return State(beside.nothing).tokens\n"
    )
    (tmp_path / "beside.py").write_text("nothing = []\n")
    assert blackbox.load_implementation(f"{file}:decode")() == []


@pytest.mark.slow
def test_the_command_itself_passes_and_catches_every_mutant():
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
    """The tokens with one changed."""
    token = (TOKENS[at] + 1) % 24 if token is None else token
    return [*TOKENS[:at], token, *TOKENS[at + 1 :]]


def lines(*runs: dict) -> str:
    return "".join(json.dumps(LINE | run) + "\n" for run in runs)


@pytest.mark.parametrize(
    "text, code, says",
    [
        (lines({}), 0, "9 tokens, the same"),
        (lines({"tokens": other(4)}), 1, "differs at token 4"),
        (lines({"tokens": other(4)}), 1, "a bug"),
        (lines({"tokens": other(3, -1)}), 1, "top-2 gap inf"),
        (lines({"tokens": TOKENS[:6], "finish_reason": "length"}), 0, "the same 6 tokens, where"),
        (lines({"tokens": TOKENS[:6], "finish_reason": "eos"}), 1, "a bug"),
        (lines({"tokens": [], "finish_reason": "length"}), 0, "the same 0 tokens, where one"),
        (lines({"stats": {"temperature": 0.7}}), 2, "line 1: sampled at temperature 0.7"),
        (lines({"stats": {"temperature": 0.7, "top_k": 1}}), 0, "the same"),
        (lines({"stats": 3}), 0, "the same"),
        (lines({"prompt_ids": []}), 2, "line 1: prompt_ids must not be empty"),
        (lines({"prompt_ids": [2, 1]}), 2, "the prompts of"),
        (lines({}, {}), 2, "b.jsonl has 2"),
        ("{oops\n", 2, "b.jsonl line 1"),
        ("[" * 100_000 + "\n", 2, "b.jsonl line 1"),
    ],
)
def test_two_runs_are_compared_token_by_token(text, code, says, tmp_path, capsys):
    save(MODEL, None, tmp_path / "model")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(lines({}))
    b.write_text(text)
    model = str(tmp_path / "model")
    out = run("--compare", str(a), str(b), "--model", model, code=code, capsys=capsys)
    assert says in out
