"""Methods in files of somebody's own: generated with, certified and benched without the package."""

import json

import pytest
import torch
from conftest import ROOT, TOKENIZER, last_error_line, random_model

from minispec import UserError
from minispec.certify import __main__ as certify
from minispec.certify.methods.checks import check_exact, check_planted
from minispec.checkpoints.load import save
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.methods import find_method

OWN = sorted((ROOT / "lessons" / "methods").glob("*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and the method that the map shows."""
    folder = tmp_path_factory.mktemp("own")
    save(random_model(5, vocab_size=300), TOKENIZER, folder / "model")
    text = (ROOT / "minispec" / "README.md").read_text(encoding="utf-8")
    (folder / "repeat.py").write_text(text.split("```python\n")[1].split("```")[0])
    return folder


def out(capsys, main, *arguments) -> str:
    main(list(map(str, arguments)))
    return capsys.readouterr().out


def test_the_map_s_method_generates_plain_decoding_s_text(folder, capsys):
    options = ["ab ab ab", "--model", folder / "model", "--max-new-tokens", "20", "--device", "cpu"]
    options += ["--dtype", "float64", "--json"]
    plain = json.loads(out(capsys, generate.main, *options))
    for more in [], ["--k", "2"], ["--option", "k=auto"]:
        own = ["--method", f"{folder / 'repeat.py'}:repeat"]
        if "--k" in more:  # a flag only if a method of the package has it
            more = ["--option", "k=2"]
        run = json.loads(out(capsys, generate.main, *options, *own, *more))
        assert run["method"] == "repeat" and run["tokens"] == plain["tokens"]


def test_the_map_s_method_is_proven_and_its_planted_mistakes_are_caught(folder, capsys):
    with pytest.raises(SystemExit) as end:
        certify.main(["--method", f"{folder / 'repeat.py'}:repeat"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and lines[-1] == "no loss found"
    assert any(line.startswith("pass  planted") and "caught by exact" in line for line in lines)
    assert {line[6:20].strip() for line in lines[:-2]} == {
        "exact", "greedy", "cache", "bits", "statistical", "limits", "planted"
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("file", OWN, ids=lambda file: file.stem)
def test_the_lessons_own_methods_are_lossless(file):
    method = find_method(f"{file}:{file.stem}")
    for check in check_exact, check_planted:
        assert all(v.passed for v in check(methods=[method])), file


WRONG = """
from minispec.methods.autoregressive import autoregressive
from minispec.tree import Step


def returns_a_list(model, prompt, sampling, randomness, *, cache=None):
    return [Step()]


def ends(model, prompt, sampling, randomness, *, cache=None):
    yield Step()


def yields_tokens(model, prompt, sampling, randomness, *, cache=None):
    yield 1


def emits_twice(*arguments, **options):
    for step in autoregressive(*arguments, **options):
        yield Step(2 * step.tokens, step.tree, step.path)


def commits_too_much(model, prompt, sampling, randomness, *, cache=None):
    for step in autoregressive(model, prompt, sampling, randomness, cache=cache):
        cache.length += bool(step.tokens)
        yield step


def takes_a_prompt(prompt):
    yield Step()
"""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("returns_a_list", "returns_a_list returns a list; a method is a generator"),
        ("ends", "ends: it ended; a method yields a Step for each round"),
        ("yields_tokens", "yields_tokens: it yields an object of type int; a method yields"),
        ("emits_twice", "emits_twice: the tokens of a Step are those of its path"),
        ("commits_too_much", "commits_too_much: the cache holds 4 tokens after a round instead"),
        ("takes_a_prompt", "takes_a_prompt is not a method"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_function_that_is_no_method_is_one_line(folder, capsys, function, why):
    (folder / "wrong.py").write_text(WRONG)
    name = f"{folder / 'wrong.py'}:{function}"
    with pytest.raises(UserError, match=why.partition(":")[0]):
        decode(random_model(5), None, [1, 2, 3], name, max_new_tokens=9)
    options = ["--prompt-ids", "1,2,3", "--model", str(folder / "model"), "--method", name]
    assert why in last_error_line(capsys, lambda: generate.main(options))


def test_an_option_that_a_method_lacks_is_one_line(folder, capsys):
    options = ["ab", "--model", str(folder / "model"), "--method", "prompt-lookup", "--option"]
    for wrong, why in (("kk=3", "no such option; did you mean k"), ("k", "no such option"),
                       ("k=x", "must be auto or a whole number"), ("ngram=0", "at least 1")):
        assert why in last_error_line(capsys, lambda: generate.main([*options, wrong]))


def test_a_method_is_a_function_too():
    model, method = random_model(5), find_method(f"{OWN[1]}:{OWN[1].stem}")
    plain = decode(model, None, [1, 2, 3], max_new_tokens=30)
    run = decode(model, None, [1, 2, 3], method.function, nodes=5, max_new_tokens=30)
    assert run.tokens == plain.tokens and run.method == method.name
    with pytest.raises(UserError, match="must be at least 1"):
        decode(model, None, [1, 2, 3], method.function, nodes=0)
