"""Flags that do not apply to the method, or name missing files: one line and exit code 2."""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import pytest
from conftest import ROOT

from minispec import UserError
from minispec.__main__ import COMMANDS
from minispec.cli import OutputFile, OutputFolder, Parser, Source
from minispec.generate import __main__ as generate
from minispec.generate.__main__ import flag_of, option_flags
from minispec.methods import METHODS, find_method

MODULES = {
    name: import_module(f"minispec.{module}") for name, (module, _) in COMMANDS.items()
}


@cache
def parsers() -> dict[str, Parser]:
    """The parser of every command, such as "bench" or "distill mtp"."""
    found: dict[str, Parser] = {}

    def parse_args(parser, *_):
        found[name] = parser
        raise UserError("not parsed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", parse_args)
        for name, module in MODULES.items():
            pytest.raises(SystemExit, module.main, [])
    for action in found["distill"]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"distill {name}": parser for name, parser in action.choices.items()}
    return found


@pytest.mark.parametrize(
    "method, arguments, message",
    [
        ("jacobi", "--window 3", "--window is for --method lookahead"),
        ("lookahead", "--block 3", "--block is for --method jacobi"),
        ("lookahead", "--ngram 1", "ngram 1: must be at least 2"),
        ("medusa", "--tree nonsense", "must be auto, a number of nodes"),
        ("medusa", "--heads nowhere", "no such directory: nowhere"),
        ("speculative", "--tree 3", "--tree is for --method eagle3, fastmtp, hybrid, medusa, "),
        ("fastmtp", "--tree 4 --k 3", "--k drafts a chain and --tree a tree; choose one"),
        ("eagle3", "--tree x", "--tree x must be auto or a whole number, from 1 to 999"),
        ("fastmtp", "--tree x", "--tree x must be auto or a whole number, from 1 to 999"),
        ("jacobi", "--tree 4", "medusa, medusa-typical, not for jacobi"),
        ("fastmtp", "--heads nowhere", "no such directory: nowhere"),
        ("hybrid", "--heads nowhere", "no such directory: nowhere"),
        ("hybrid", "--draft nowhere", "no such directory: nowhere"),
        ("hybrid", "--draft a --heads b", "--draft and --heads are mutually exclusive"),
        ("hybrid", "--draft a --vocabulary none", "--vocabulary is for heads, not for --draft"),
        ("fastmtp", "--vocabulary nowhere.json", "nowhere.json cannot be read"),
        ("fastmtp", "--k many", "--k many must be auto or a whole number, at least 1"),
        ("fastmtp", "--vocabulary-size 0", "0 must be a whole number, at least 1"),
        ("fastmtp", "--vocabulary none --vocabulary-size 9", "no vocabulary to take 9 tokens from"),
    ],
)
def test_a_wrong_flag_is_one_line(method, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["x", "--method", method, *arguments.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


# ---- outputs and what they must not overwrite ----------------------------------------------------

TEXTS = {"prompt", "system", "stop", "chat", "ask", "server", "name", "key_env", "only", "device",
         "dtype", "option"}  # fmt: skip
NAMES_FILES = "weights", "vocabulary", "paths"  # kinds of options


def test_every_flag_that_names_something_to_read_is_a_source():
    """A flag that takes any text is listed in TEXTS, is a method's option that names no file or has
    `type=Source`, which protects what it names from being overwritten."""
    methods = list(map(find_method, METHODS))
    files = {flag_of(m, name) for m in methods for name in m.of_kind(*NAMES_FILES)}
    assert files == {"draft", "heads", "vocabulary", "tree"}
    texts = TEXTS | option_flags().keys() - files
    for name, parser in parsers().items():
        for action in parser._actions:
            if action.nargs != 0 and not action.choices and action.type in (None, str):
                assert action.dest in (texts if name == "generate" else TEXTS), action.dest


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A model's folder, a link to it, a text and a folder of texts, in the current folder."""
    for file in "model/config.json", "texts/a.txt", "text.jsonl", "README.md", "engine.py":
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "linked.jsonl").symlink_to("text.jsonl")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "kind, output, source",
    [
        (OutputFolder, "model", "model"),
        (OutputFolder, "link", "model"),
        (OutputFolder, "other/../model/.", "link"),
        (OutputFolder, "model", "model/config.json"),
        (OutputFolder, ".", "README.md"),
        (OutputFile, "text.jsonl", "text.jsonl"),
        (OutputFile, "text.jsonl", "linked.jsonl"),
        (OutputFile, "link/config.json", "model"),
        (OutputFile, "engine.py", "engine.py:decode"),
    ],
)
def test_an_output_that_is_an_input_is_refused(files, kind, output, source):
    p = Parser()
    p.add_argument("--out", type=kind)
    p.add_argument("--read", type=Source, action="append")
    with pytest.raises(UserError, match=f"--out .* would overwrite --read {source}"):
        p.parse_args(["--out", output, "--read", "other", "--read", source])


@pytest.mark.parametrize(
    "kind, output, source",
    [
        (OutputFolder, "model/mtp", "model"),
        (OutputFolder, "new", "model"),
        (OutputFolder, ".", "model"),
        (OutputFolder, ".", "linked.jsonl"),
        (OutputFolder, ".", "engine.py:decode"),
        (OutputFolder, "other", "owner/model"),
        (OutputFile, "page.html", "."),
        (OutputFile, "model/page.html", "model"),
        (OutputFile, "text.jsonl", "."),
    ],
)
def test_other_outputs_are_accepted(files, kind, output, source):
    p = Parser()
    p.add_argument("--out", type=kind)
    p.add_argument("--read", type=Source)
    assert str(p.parse_args(["--out", output, "--read", source]).out) == output


@pytest.mark.parametrize(
    "command, flags",
    [
        ("generate", "x --model model --html link/config.json"),
        ("certify", "--impl engine.py:decode --junit engine.py"),
        ("certify", "--compare text.jsonl linked.jsonl --junit text.jsonl"),
        ("pretrain", "--data texts --out texts"),
        ("pretrain", "--data texts --tokenizer model/config.json --out link"),
        ("pretrain", "--data texts --init link --out model"),
        ("distill", "generate --model model --data text.jsonl --out linked.jsonl"),
        ("distill", "generate --model model --data texts --out texts/a.txt"),
        ("distill", "draft --model model --generated text.jsonl --out model"),
        ("distill", "medusa --model model --generated text.jsonl --init other --out other"),
        ("distill", "mtp --model other --own text.jsonl --vocabulary model/config.json --out link"),
        ("distill", "mtp --generated text.jsonl --out default"),
        ("distill", "vocabulary --model model --text en=text.jsonl,texts --out texts/a.txt"),
        ("distill", "export --model model --mtp other --out other"),
        ("distill", "export --medusa model/config.json --out model"),
    ],
)
def test_no_command_overwrites_what_it_reads(files, tmp_path, command, flags, capsys, monkeypatch):
    (tmp_path / "default").mkdir()
    monkeypatch.setattr(MODULES["distill"], "default_model", lambda: "default")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        MODULES[command].main(flags.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and " would overwrite --" in error
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- commands in the documentation ---------------------------------------------------------------

DOCUMENTS = [ROOT / "Makefile", *ROOT.glob("*.md")] + [
    path for folder, kinds in (("minispec", "md py"), ("lessons", "md ipynb"), ("tests", "md mk"),
                               ("weights", "md"))
    for kind in kinds.split() for path in (ROOT / folder).rglob(f"*.{kind}")
]  # fmt: skip
QUOTED = re.compile(rf"minispec[. ]({'|'.join(MODULES)})\b([^`|;#\n]*)")


def quoted_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The name and the words of each of our commands in a text, with the variables of make."""
    text = re.sub(r"\\\n\s*", " ", text)  # lines that continue
    variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*)$", text, re.MULTILINE))
    for _ in range(3):
        text = re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)
    for name, arguments in QUOTED.findall(text):
        # a line of a notebook ends with an escaped newline
        words = [re.split(r"=|\\n", word)[0].strip('.,:")') for word in arguments.split()]
        with_first = " ".join([name, *words[:1]])
        yield with_first if with_first in parsers() else name, words


def test_documented_commands_have_only_flags_that_exist():
    found, unknown = 0, []
    for path in DOCUMENTS:
        for name, words in quoted_commands(path.read_text(encoding="utf-8")):
            flags = [word for word in words if word.startswith("--")]
            known = parsers()[name]._option_string_actions
            found += len(flags)
            unknown += [f"{path}: {name} {flag}" for flag in flags if flag not in known]
    assert found > 200 and not unknown, unknown
