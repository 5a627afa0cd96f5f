"""Every method in every way of running it, several ways at once: the text is plain decoding's.

Methods come from METHODS and ways from the parser and from `stream`, so that a new one must be
joined to all others: a flag or argument without a value here fails a test. For each method, every
two ways that can be combined occur together in a run.
"""

import contextlib
import copy
import inspect
import io
import json
import re
import subprocess
import sys
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from conftest import ROOT, TOKENIZER, VOCAB, last_error_line, random_model, torchrun

from minispec import Sampling, optimize
from minispec.certify.toys import random_eagle3_head, random_medusa_heads, random_mtp_head
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.heads import (
    load_vocabulary,
    save_medusa,
    save_mtp,
    save_vocabulary,
)
from minispec.checkpoints.load import load, save
from minispec.generate import METHODS, decode, stream
from minispec.generate import __main__ as generate
from minispec.generate.drafters import load_drafter
from minispec.methods.vocabulary import Language
from minispec.sampling import Seeded

PROMPT, TURNS = "Once upon a time", "and then?\n\n"
RUN_SIZE = 8  # ways in one run
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
STRUCK_OUT = re.compile(r"\x1b\[[\d;]*;9m.*?\x1b\[0m")

# for each flag, what to run it with: its value and the flags that it needs. Sampling is limited to
# the most likely token, so that its text is known
VALUES = {
    "prompt": ["Hi"], "--prompt-ids": ["79,110,256,99"], "--prompt-file": ["prompt.txt"],
    "--draft": ["given/draft"], "--draft-temperature": ["0.7"], "--k": ["2", "auto"],
    "--heads": ["given/HEADS"], "--tree": ["3", "auto", "tree.json"],
    "--vocabulary": ["words.json"], "--vocabulary-size": ["40 --vocabulary words.json"],
    "--block": ["5"], "--window": ["4"], "--ngram": ["3"], "--guesses": ["2"],
    "--pool-from-prompt": [""], "--chat": [""], "--system": ["Kindly --chat"],
    "--max-new-tokens": ["11"], "--seed": ["7"], "--ignore-eos": [""], "--stop": ["e --stop a"],
    "--temperature": ["1 --top-k 1"], "--top-k": ["5"], "--top-p": ["1e-9 --temperature 0.9"],
    "--device": ["cpu"], "--dtype": ["float64"], "--quantize": ["int8"], "--compile": [""],
    "--stats": [""], "--json": [""], "--color": [""], "--color=full": [""], "--html": ["page.html"],
}  # fmt: skip
SLOW = "--compile"
REFUSED = [
    ("--chat", "--prompt-ids"), ("--chat", "--prompt-file"), ("--prompt-ids", "--prompt-file"),
    ("--prompt-ids", "prompt"), ("--prompt-file", "prompt"), ("--color", "--json"),
    ("--color=full", "--json"), ("--draft", "--heads"), ("--draft", "--vocabulary"),
    ("--draft", "--tree"), ("--k", "--tree"), ("--draft-temperature", "--tree"),
]  # fmt: skip
OF_METHODS = {generate.flag_name(name): row[0] for name, row in generate.METHOD_FLAGS.items()}
GIVEN = object()  # see `given`
NODES = "fastmtp", "hybrid", "eagle3"  # methods whose tree is a number of nodes
NO_TREE = {"tree", "draft"}, {"tree", "draft_cache"}
# for each argument of `stream` and of the methods, what to pass
ARGUMENTS = {
    "prompt": [np.array([79, 110, 99])], "max_new_tokens": [np.int64(5)], "top_k": [np.int64(1)],
    "temperature": [np.float32(1e-9)], "top_p": [1e-9], "seed": [np.int64(3)],
    "randomness": [Seeded(2)], "stop": [("e", "a")], "ignore_eos": [True], "cache": [GIVEN],
    "draft_cache": [GIVEN], "draft": [GIVEN], "heads": [GIVEN], "head": [GIVEN],
    "head_cache": [GIVEN], "vocabulary": [GIVEN], "draft_sampling": [Sampling(0.7)],
    "k": [np.int64(2), "auto"], "lookup_k": [3, "auto"],
    "tree": ["auto", np.array([[0, 1], [1, 0]])], "block": [4], "window": [3],
    "ngram": [2], "guesses": [3], "pool_from_prompt": [True], "epsilon": [0.2], "delta": [0.1],
}  # fmt: skip


def flags_in(way: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[\w=-]+", way)) or {way.split()[0]}


def ways_of(method: str) -> list[str]:
    """Each flag of the method with each of its values, as on the command line."""
    flags = [flag for flag in VALUES if method in OF_METHODS.get(flag, METHODS)]
    only_medusa = {"tree.json"} if method in NODES else set()
    return [f"{flag} {value}".strip() for flag in flags for value in VALUES[flag]
            if value not in only_medusa]  # fmt: skip


def can_be_combined(a: str, b: str) -> bool:
    refused = [set(pair) for pair in REFUSED]
    pairs = ({x, y} for x in flags_in(a) for y in flags_in(b))
    return all(len(pair) == 2 and pair not in refused for pair in pairs)


def covering(ways: list, combine) -> list[tuple]:
    """Sets of at most RUN_SIZE ways in which every two that can be combined occur together."""
    pairs = combinations(range(len(ways)), 2)
    allowed = {frozenset(pair) for pair in pairs if combine(*(ways[i] for i in pair))}
    left, runs = set(allowed), []
    while left:
        run = min(map(sorted, left))
        while len(run) < RUN_SIZE:
            free = [i for i in range(len(ways)) if all({i, j} in allowed for j in run)]
            gains = {i: sum({i, j} in left for j in run) for i in free}
            if not any(gains.values()):
                break
            run.append(max(gains, key=gains.get))
        left -= set(map(frozenset, combinations(run, 2)))
        runs.append(tuple(ways[i] for i in sorted(run)))
    return runs


COMMANDS = [
    pytest.param(method, run, id=f"{method} {' '.join(run)}",
                 marks=[pytest.mark.slow] if SLOW in run else [])
    for method in METHODS for run in covering(ways_of(method), can_be_combined)
]  # fmt: skip


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """The folder with a target, a draft and heads next to it, and others to be given. The drafts
    are the target, slightly changed, and so are often right."""
    folder, config = tmp_path_factory.mktemp("shelf"), {"vocab_size": VOCAB, "eos_ids": (256,)}
    target = random_model(5, layers=1, bos_id=256, **config)
    save(target, TOKENIZER, folder / "target")
    for seed, place in enumerate((folder, folder / "given")):
        draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
        for p in draft.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        save(draft, TOKENIZER, place / "draft")
        heads = random_medusa_heads(target, seed, shared=True)
        heads.accuracy = torch.rand(4, 10, generator=generator).sort(descending=True).values
        save_medusa(heads, place / "medusa", "target", TOKENIZER, torch.float64)
        head = random_mtp_head(target, seed)
        save_mtp(head, place / "mtp", "target", TOKENIZER, torch.float64, [1.0])
        head = random_eagle3_head(target, seed)
        save_eagle3(head, place / "eagle3", "target", TOKENIZER, torch.float64, seed == 1)
    halves = {name: tuple(range(i, 260, 2)) for i, name in enumerate(("even", "odd"))}
    languages = {name: Language(ids, (1,) * len(ids)) for name, ids in halves.items()}
    save_vocabulary(languages, TOKENIZER, folder / "words.json")
    (folder / "page.html").touch()
    (folder / "tree.json").write_text("[[0], [1], [0, 0], [0, 1, 0]]")
    (folder / "prompt.txt").write_text("There was an é\n", encoding="utf-8")
    return folder


def arguments_of(method: str, ways: tuple[str, ...]) -> list[str]:
    """The command line for a run."""
    folders = {"medusa": "medusa", "medusa-typical": "medusa", "eagle3": "eagle3"}
    heads = folders.get(method, "mtp")
    line = " ".join(ways).replace("HEADS", heads).replace("prompt Hi", "Hi").split()
    flags = set().union(*map(flags_in, ways))
    if not flags & {"prompt", "--prompt-ids", "--prompt-file"}:
        line.insert(0, PROMPT)
    base = {"--dtype": "float64", "--device": "cpu", "--max-new-tokens": "7"}
    line += [part for flag in base.keys() - flags for part in (flag, base[flag])]
    return [*line, "--method", method, "--model", "target"]


def outcome(folder, method: str, ways: tuple[str, ...]) -> object:
    """What a run prints, without statistics and styles, and what its page shows."""
    output = io.StringIO()
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(TURNS))
        patch.setattr(sys, "stdout", output)
        generate.main(arguments_of(method, ways))
    page = (folder / "page.html").read_text(encoding="utf-8")
    return printed(output.getvalue(), ways, page)


def printed(text: str, ways: tuple[str, ...], page: str) -> object:
    """The part of a run's output, and of its page, that is the same for every method."""
    text, objects = ESCAPE.sub("", STRUCK_OUT.sub("", text)), []
    if "--json" in ways:
        text, objects = "", list(map(json.loads, text.splitlines()))
    if "--html page.html" in ways:
        objects.append(json.loads(re.search(r'/json">(.*?)</script>', page, re.S)[1]))
    keys = "prompt_ids", "tokens", "text", "finish_reason"
    return text, [[run[key] for key in keys] for run in objects]


@cache
def plain_outcome(folder, ways: tuple[str, ...]) -> object:
    return outcome(folder, "autoregressive", ways)


def expected(folder, ways: tuple[str, ...]) -> object:
    """The outcome of plain decoding, which has none of the methods' own flags."""
    return plain_outcome(folder, tuple(way for way in ways if way.split()[0] not in OF_METHODS))


@pytest.mark.parametrize(("method", "ways"), COMMANDS)
def test_commands(shelf, method, ways):
    assert outcome(shelf, method, ways) == expected(shelf, ways)


@pytest.mark.slow
def test_commands_in_two_processes(shelf):
    runs = [case.values for case in COMMANDS if SLOW not in case.values[1]]
    (shelf / "runs.json").write_text(json.dumps([arguments_of(*run) for run in runs]))
    (shelf / "ranks.py").write_text(
        "import io, json, os, sys\n"
        "sys.stdout = open(os.dup(1), 'w', encoding='utf-8')\n"  # --json redirects the original
        "from minispec.generate.__main__ import main\n"
        "for arguments in json.load(open('runs.json')):\n"
        f"    sys.stdin = io.StringIO({TURNS!r})\n"
        "    main(arguments)\n"
        "    print('\\1', open('page.html').read(), '\\0', sep='', end='', flush=True)\n"
    )
    process = torchrun(2, "ranks.py", cwd=shelf)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    for (method, ways), text in zip(runs, out.split("\0")[:-1], strict=True):
        text, _, page = text.partition("\1")
        assert printed(text, ways, page) == expected(shelf, ways), (method, ways)


@pytest.mark.slow
def test_all_this_under_python_o():
    """Python -O removes the package's asserts; pytest keeps those of tests."""
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-n0", "-knot slow", __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_every_flag_has_a_value_and_only_known_pairs_are_refused(shelf, capsys, monkeypatch):
    parser = generate.parser()
    flags = {action.option_strings[0] if action.option_strings else action.dest
             for action in parser._actions}  # fmt: skip
    assert flags - {"-h", "--method", "--model"} == set(VALUES)
    monkeypatch.chdir(shelf)
    for pair in REFUSED:
        methods = [m for m in METHODS if all(m in OF_METHODS.get(flag, METHODS) for flag in pair)]
        ways = [f"{flag} {VALUES[flag][0]}" for flag in pair]
        for method in methods:
            last_error_line(capsys, lambda: generate.main(arguments_of(method, tuple(ways))))


# ---- Python --------------------------------------------------------------------------------------


def arguments_in_python(method: str) -> list[str]:
    own, shared = (inspect.signature(f).parameters for f in (METHODS[method], stream))
    names = [name for name, p in own.items() if p.kind is p.KEYWORD_ONLY]
    skipped = {"model", "tokenizer", "method", "options"}
    return names + [name for name in shared if name not in skipped and name not in names]


def given(shelf, method: str, name: str, model, tokenizer) -> object:
    """What the argument is given: a cache, or what `load` does not find next to the target."""
    if name == "head_cache":
        return given(shelf, method, "head", model, tokenizer).new_cache(model.config.context)
    if name.endswith("cache"):
        return model.new_cache()
    if name == "vocabulary":
        return load_vocabulary(shelf / "words.json", model, tokenizer)
    head = ("eagle3", "eagle3") if method == "eagle3" else ("fastmtp", "mtp")
    drafter, folder = {"draft": ("speculative", "draft"), "heads": ("medusa", "medusa"),
                       "head": head}[name]  # fmt: skip
    return load_drafter(drafter, model, tokenizer, str(shelf / "given" / folder))[name]


@pytest.mark.parametrize("int8", [None, False, True], ids=["plain", "optimised", "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_arguments(shelf, method, int8):
    """Each run is followed by another, which begins with its tokens and keeps its caches."""
    model, tokenizer = load(shelf / "target", "float64", "cpu")
    if int8 is not None:
        optimize(model, int8)
    arguments = ARGUMENTS | ({"tree": [np.int64(5), "auto"]} if method in NODES else {})
    ways = [(name, value) for name in arguments_in_python(method) for value in arguments[name]]
    for run in covering(ways, lambda a, b: a[0] != b[0] and {a[0], b[0]} not in NO_TREE):
        options = {n: given(shelf, method, n, model, tokenizer) if v is GIVEN else v
                   for n, v in run}  # fmt: skip
        for name in "draft", "head":
            if f"{name}_cache" in options:
                options.setdefault(name, given(shelf, method, name, model, tokenizer))
        shared = inspect.signature(stream).parameters.keys() - {"cache"}
        plain = {name: value for name, value in options.items() if name in shared}
        prompt = options.pop("prompt", plain.pop("prompt", PROMPT))
        for _ in range(2):
            got = decode(model, tokenizer, prompt, method, **{"max_new_tokens": 7} | options)
            expected = decode(model, tokenizer, prompt, **{"max_new_tokens": 7} | plain)
            assert (got.tokens, got.text) == (expected.tokens, expected.text), run
            assert json.loads(json.dumps(got.as_json("m")))["stats"]["lossless"] in (True, False)
            prompt = [*got.prompt, *got.tokens, 7]
