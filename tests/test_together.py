"""Every method in every way of running it, several ways at once: the text is plain decoding's.

Methods, their flags and their arguments come from the declarations, and the other ways from the
parser and from `stream`, so that a new one is joined to all others: a flag or argument without a
value here fails a test. For each method, every two ways that can be combined occur together in a
run. The texts repeat themselves and the drafters are half right, so that in each method's runs some
drafts are accepted and some rejected.
"""

import contextlib
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from conftest import ROOT, TOKENIZER, VOCAB, last_error_line, torchrun
from half_right import half_right, repeating_model

from minispec import Sampling, optimize
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.heads import load_vocabulary, save_medusa, save_mtp, save_vocabulary
from minispec.checkpoints.load import load, save
from minispec.generate import METHODS, decode, stream
from minispec.generate import __main__ as generate
from minispec.generate.drafters import load_drafter
from minispec.generate.run import Run
from minispec.methods import find_method
from minispec.methods.declaration import Option
from minispec.methods.vocabulary import Language
from minispec.sampling import Seeded
from minispec.verify import RULES

PROMPT, TURNS = "abcdabcd", "abcdabcd\n\n"  # a circle of the target's text
RUN_SIZE = 8  # ways in one run
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
STRUCK_OUT = re.compile(r"\x1b\[[\d;]*;9m.*?\x1b\[0m")
FILES = [ROOT / "tests" / "own_methods.py", *(ROOT / "lessons" / "methods").glob("*.py")]
OWN = ["own_methods.py:copying", "own_methods.py:twigs",
       *(f"{path.name}:{path.stem}" for path in FILES[1:])]  # fmt: skip
DECLARED = {name: find_method(name) for name in METHODS}
for name in OWN:
    path = next(path for path in FILES if path.name == name.partition(":")[0])
    DECLARED[name] = find_method(f"{path}:{name.partition(':')[2]}")

# for each flag that no method declares, what to run it with: its value and the flags that it needs.
# Sampling is limited to the most likely token, so that its text is known
VALUES = {
    "prompt": ["Hi"], "--prompt-ids": ["79,110,256,99"], "--prompt-file": ["prompt.txt"],
    "--chat": [""], "--system": ["Kindly --chat"], "--max-new-tokens": ["11"], "--seed": ["7"],
    "--ignore-eos": [""], "--stop": ["f --stop g"], "--temperature": ["1 --top-k 1"],
    "--top-k": ["5"], "--top-p": ["1e-9 --temperature 0.9"], "--device": ["cpu"],
    "--dtype": ["float64"], "--quantize": ["int8"], "--compile": [""],
    "--bitwise": [""], "--stats": [""],
    "--json": [""], "--color": [""], "--color=full": [""], "--html": ["page.html"],
}  # fmt: skip
SLOW = {"--compile", "--bitwise"}  # also impossible in two processes
REFUSED = [
    ("--chat", "--prompt-ids"), ("--chat", "--prompt-file"), ("--prompt-ids", "--prompt-file"),
    ("--prompt-ids", "prompt"), ("--prompt-file", "prompt"), ("--color", "--json"),
    ("--color=full", "--json"), ("--draft", "--heads"), ("--draft", "--vocabulary"),
    ("--draft", "--tree"), ("--k", "--tree"),
    ("--verify block", "--tree"), ("--bitwise", "--compile"),
]  # fmt: skip
NO_TREE = {"tree", "draft"}, {"tree", "draft_cache"}  # arguments that are refused together
GIVEN = object()  # see `given`
# for each argument of `stream`, what to pass
ARGUMENTS = {
    "prompt": [np.array([64, 65, 66])], "max_new_tokens": [np.int64(5)], "top_k": [np.int64(1)],
    "temperature": [np.float32(1e-9)], "top_p": [1e-9], "seed": [np.int64(3)],
    "randomness": [Seeded(2)], "stop": [("f", "g")], "ignore_eos": [True], "cache": [GIVEN],
}  # fmt: skip


# ---- ways to run a method ------------------------------------------------------------------------


def number(option: Option, default: object) -> int | float:
    """A number that is not the default, if possible."""
    least = default - 1 if option.least is None else option.least
    return least + (0.5 if isinstance(default, float) else 2)


def texts(option: Option, default: object) -> list[str]:
    """What to write after an option's flag."""
    auto = ["auto"] if option.auto else []
    if option.kind == "number":
        return [""] if default is False else [str(number(option, default)), *auto]
    return {"weights": [f"given/{option.folder}"], "vocabulary": ["words.json"],
            "sampling": ["0.7"], "rule": [*RULES], "paths": ["3", "tree.json", *auto]}[option.kind]


def values(option: Option, default: object) -> list[object]:
    """What to pass as an option in Python."""
    auto = ["auto"] if option.auto else []
    if option.kind == "number" and not callable(default):
        if isinstance(default, bool):
            return [not default]
        kind = np.float64 if isinstance(default, float) else np.int64
        return [kind(number(option, default)), *auto]
    return {"weights": [GIVEN], "cache": [GIVEN], "vocabulary": [GIVEN],
            "sampling": [Sampling(0.7)], "rule": [*RULES.values()], "number": [*RULES.values()],
            "paths": [np.int64(5), np.array([[0, 1], [1, 0]]), *auto]}[option.kind]  # fmt: skip


def own_ways(method: str) -> list[str]:
    """Each of a method's own flags with each of its values, and one option by its name."""
    declared, ways, named = DECLARED[method], [], []
    for name, (option, default) in declared.options.items():
        flag = generate.flag_of(declared, name)
        if flag in generate.option_flags():
            ways += [f"{generate.flag_name(flag)} {text}" for text in texts(option, default)]
        if option.kind == "number" and isinstance(default, int | float):
            text = not default if isinstance(default, bool) else number(option, default)
            named.append(f"--option {name}={str(text).lower()}")
    if declared.of_kind("vocabulary"):
        ways.append("--vocabulary-size 40 --vocabulary words.json")
    return [way.strip() for way in ways + named[:1]]


def ways_of(method: str) -> list[str]:
    """All ways to run a method on the command line."""
    general = [f"{flag} {value}".strip() for flag, texts in VALUES.items() for value in texts]
    return general + own_ways(method)


def parts(way: str) -> list[str]:
    """The flags of a way, each with its value."""
    return re.findall(r"--[\w=-]+(?: (?!--)\S+)?", way) or [way]


def has(way: str, flag: str) -> bool:
    """Whether one of the way's flags is this one, with this value if it has one."""
    return any(part == flag or part.startswith(f"{flag} ") for part in parts(way))


def can_be_combined(a: str, b: str) -> bool:
    same = {part.split()[0] for part in parts(a)} & {part.split()[0] for part in parts(b)}
    pairs = [*REFUSED, *((y, x) for x, y in REFUSED)]
    return not same and not any(has(a, x) and has(b, y) for x, y in pairs)


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


COMMANDS = {method: covering(ways_of(method), can_be_combined) for method in DECLARED}


@pytest.fixture
def partly_accepted(monkeypatch):
    """A check that the runs of a method, so far, have accepted some drafts and rejected others."""

    def finish(run: Run, reason: str) -> None:
        runs.append(run)
        original(run, reason)

    def check(method: str) -> None:
        rounds = [x for run in runs if run.method == DECLARED[method].name for x in run.rounds]
        drafted = sum(len(step.tree) - 1 for step in rounds)
        accepted = sum(len(step.path) - 1 for step in rounds)
        assert 0 < accepted < drafted or method == "autoregressive", (accepted, drafted)

    runs, original = [], Run.finish
    monkeypatch.setattr(Run, "finish", finish)
    return check


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """The folder with a target, a draft and heads next to it, others to be given, and the files of
    methods."""
    folder = tmp_path_factory.mktemp("shelf")
    target = repeating_model(5, VOCAB, bos_id=256, eos_ids=(256,))
    save(target, TOKENIZER, folder / "target")
    for seed, place in enumerate((folder, folder / "given")):
        drafters = {kind: half_right(kind, target, seed)
                    for kind in ("draft", "medusa", "mtp", "eagle3")}  # fmt: skip
        save(drafters["draft"], TOKENIZER, place / "draft")
        settings = "target", TOKENIZER, target.dtype
        save_medusa(drafters["medusa"], place / "medusa", *settings)
        save_mtp(drafters["mtp"], place / "mtp", *settings, [1.0])
        save_eagle3(drafters["eagle3"], place / "eagle3", *settings, seed == 1)
    halves = {name: tuple(range(i, 260, 2)) for i, name in enumerate(("even", "odd"))}
    languages = {name: Language(ids, (1,) * len(ids)) for name, ids in halves.items()}
    save_vocabulary(languages, TOKENIZER, folder / "words.json")
    (folder / "page.html").touch()
    (folder / "tree.json").write_text("[[0], [1], [0, 0], [0, 1, 0]]")
    (folder / "prompt.txt").write_text("abcdabcd é abcd\n", encoding="utf-8")
    for path in FILES:
        shutil.copy(path, folder)
    return folder


def arguments_of(method: str, ways: tuple[str, ...]) -> list[str]:
    """The command line for a run."""
    line = " ".join(ways).replace("prompt Hi", "Hi").split()
    flags = {part.split()[0] for way in ways for part in parts(way)}
    if not flags & {"prompt", "--prompt-ids", "--prompt-file"}:
        line.insert(0, PROMPT)
    base = {"--dtype": "float64", "--device": "cpu", "--max-new-tokens": "9"}
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
    return plain_outcome(folder, tuple(way for way in ways if way.split()[0] in VALUES))


@pytest.mark.parametrize("method", DECLARED)
def test_commands(shelf, method, partly_accepted):
    for ways in COMMANDS[method]:
        if not SLOW & {*ways}:
            assert outcome(shelf, method, ways) == expected(shelf, ways), " ".join(ways)
    partly_accepted(method)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ways"), [
    pytest.param(method, ways, id=f"{method} {' '.join(ways)}")
    for method, runs in COMMANDS.items() for ways in runs if SLOW & {*ways}
])  # fmt: skip
def test_slow_commands(shelf, method, ways):
    assert outcome(shelf, method, ways) == expected(shelf, ways)


@pytest.mark.slow
def test_commands_in_two_processes(shelf):
    runs = [(method, ways) for method in COMMANDS for ways in COMMANDS[method]
            if not SLOW & {*ways}]  # fmt: skip
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
    flags = {action.option_strings[0] if action.option_strings else action.dest
             for action in generate.parser()._actions}  # fmt: skip
    used = {part.split()[0] for method in METHODS for way in ways_of(method) for part in parts(way)}
    assert flags - {"-h", "--method", "--model"} == used
    monkeypatch.chdir(shelf)
    for pair in REFUSED:
        refused = False
        for method in DECLARED:
            found = [next((way for way in ways_of(method) if has(way, x)), None) for x in pair]
            if all(found):
                refused = True
                last_error_line(capsys, lambda: generate.main(arguments_of(method, tuple(found))))
        assert refused, pair


# ---- Python --------------------------------------------------------------------------------------


def arguments_in_python(method: str) -> list[tuple[str, object]]:
    shared = inspect.signature(stream).parameters.keys()
    assert shared - {"model", "tokenizer", "method", "options"} == ARGUMENTS.keys()
    own = {name: values(*option) for name, option in DECLARED[method].options.items()}
    return [(name, value) for name, xs in (own | ARGUMENTS).items() for value in xs]


def given(shelf, method: str, name: str, model, tokenizer) -> object:
    """What the argument is given: a cache, or what `load` does not find next to the target."""
    if name == "cache":
        return model.new_cache()
    if name.endswith("_cache"):
        drafter = given(shelf, method, name.removesuffix("_cache"), model, tokenizer)
        return drafter.new_cache(model.config.context)
    if name == "vocabulary":
        return load_vocabulary(shelf / "words.json", model, tokenizer)
    folder = DECLARED[method].options[name][0].folder
    return load_drafter(folder, model, tokenizer, str(shelf / "given" / folder))[name]


@pytest.mark.parametrize("int8", [None, False, True], ids=["plain", "optimised", "int8"])
@pytest.mark.parametrize("method", DECLARED)
def test_arguments(shelf, method, int8, partly_accepted):
    """Each run is followed by another, which begins with its tokens and keeps its caches."""
    model, tokenizer = load(shelf / "target", "float64", "cpu")
    if int8 is not None:
        optimize(model, int8)
    ways = arguments_in_python(method)
    for run in covering(ways, lambda a, b: a[0] != b[0] and {a[0], b[0]} not in NO_TREE):
        options = {n: given(shelf, method, n, model, tokenizer) if v is GIVEN else v
                   for n, v in run}  # fmt: skip
        for name in DECLARED[method].of_kind("cache").keys() & options.keys():
            drafter = name.removesuffix("_cache")
            options.setdefault(drafter, given(shelf, method, drafter, model, tokenizer))
        plain = {name: value for name, value in options.items() if name in ARGUMENTS}
        plain.pop("cache", None)
        prompt = options.pop("prompt", plain.pop("prompt", PROMPT))
        function = METHODS.get(method, DECLARED[method].function)
        for _ in range(2):
            got = decode(model, tokenizer, prompt, function, **{"max_new_tokens": 9} | options)
            expected = decode(model, tokenizer, prompt, **{"max_new_tokens": 9} | plain)
            assert (got.tokens, got.text) == (expected.tokens, expected.text), run
            assert json.loads(json.dumps(got.as_json("m")))["stats"]["lossless"] in (True, False)
            prompt = [*got.prompt, *got.tokens, 7]
    partly_accepted(method)
