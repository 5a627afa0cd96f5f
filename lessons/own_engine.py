"""The reader's own engine. `check` saves right answers in my_minispec.py, next to the notebooks.
Later lessons use them; what the reader has not written is minispec's.

The file belongs to the reader. Functions and imports are added to it, but nothing is replaced
unless the reader asks, except that an import of minispec's function ends once the reader's own is
there. A new version must be importable before it replaces the file.
"""

import ast
import builtins
import dis
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace

import torch
from torch import Tensor

import minispec
from minispec.cache import KVCache
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import write_text
from minispec.cli import UserError
from minispec.generate import decode
from minispec.generate.drafters import with_drafter
from minispec.generate.view import write_page
from minispec.model import Transformer
from minispec.paths import SHIPPED
from minispec.sampling import Randomness, Seeded

LESSONS = Path(__file__).resolve().parent
FILE = LESSONS / "my_minispec.py"
HEADER = '''"""My decoder. The lessons' `check` adds what I have written, once it is right."""
'''
PLACES = {  # the file's functions in the package's order: the module there, and the lesson
    "commit": ("cache", "01"), "warp": ("sampling", "02"), "mask": ("tree", "01"),
    "accept_greedy": ("verify", "00"), "residual": ("verify", "03"), "accept": ("verify", "03"),
    "accept_sibling": ("verify", "04"), "accept_certain": ("verify", "09"),
    "greedy": ("methods/autoregressive", "00"),
    "best_size": ("methods/adaptive", "04"), "best_k": ("methods/adaptive", "06"),
    "tokens_per_second": ("methods/adaptive", "10"), "best_method": ("methods/adaptive", "10"),
    "chain": ("methods/fastmtp", "06"), "best_nodes": ("methods/fastmtp", "06"),
    "add": ("methods/lookahead", "05"), "lookup": ("methods/lookahead", "05"),
    "jacobi": ("methods/lookahead", "05"), "grow_tree": ("methods/medusa", "04"),
    "fill_up": ("fast/bitwise", "09"), "attend_in_blocks": ("fast/bitwise", "09"),
    "release": ("generate", "02"), "rounds": ("generate", "10"),
    "grow_jointly": ("distill/medusa", "04"), "mtp_loss": ("distill", "07"),
    "measure_speedup": ("bench", "08"), "greedy_acceptance": ("bench", "03"),
    "next_script": ("certify", "09"), "exact_distribution": ("certify", "09"),
}  # fmt: skip
RENAMED = {("00", "accept"): "accept_greedy"}  # lesson 03 has an `accept` of its own
LOADS = "LOAD_GLOBAL", "LOAD_NAME"  # the second in the body of a class


class NotSaved(Exception):
    """Says in one line why my_minispec.py stays as it is."""


# ---- saving --------------------------------------------------------------------------------------


def save(
    function: Callable, lesson: str, name: str, judge: Callable[[Callable], str | None],
    replace: bool = False,
) -> str:  # fmt: skip
    """Save a right answer, unless the file has another function of that name and not `replace`.

    `judge` returns what is wrong with a function, or None; it judges the answer once more as it is
    in the file, where it cannot use what the notebook has defined. Returns what to tell the reader,
    to be printed after "right".
    """
    asked, name = name, RENAMED.get((lesson, name), name)
    if name not in PLACES:  # a rule that is wrong on purpose
        return ""
    try:
        text = read() if FILE.exists() else HEADER
        module, source, old = load(text), source_of(function, asked, name), source_in(text, name)
        if old == source:
            return f", as in {FILE.name}"
        if old is not None and not replace:
            call = f"{'keep' if name == 'rounds' else 'check'}({asked}, replace=True)"
            return f"\n    {FILE.name} has another {name}, which stays; {call} replaces it"
        text = with_imports(with_function(text, name, source), function, module, name)
        if fault := judge(getattr(load(text), name)):
            raise NotSaved(f"in {FILE.name}, without this notebook, {fault.splitlines()[0]}")
        write(text)
    except NotSaved as reason:
        return f"\n    not saved: {reason}"
    return f", saved in {FILE.name}" + (f" as {name}" if name != asked else "")


def read() -> str:
    """The file's text; raises NotSaved if there is none."""
    try:
        return FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise NotSaved(f"{FILE.name} cannot be read ({reason})") from None


def load(text: str) -> ModuleType:
    """Import this text of my_minispec.py; raises NotSaved if it cannot be imported."""
    module = ModuleType(FILE.stem)
    module.__file__ = str(FILE)
    try:
        exec(compile(text, str(FILE), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # running a file may raise anything
        message = str(error).partition("\n")[0]
        raise NotSaved(
            f"{FILE.name} cannot be imported ({type(error).__name__}: {message}); correct it, or "
            "move it away"
        ) from None
    return module


def is_saved(lesson: str, name: str) -> bool:
    """Whether the file has the reader's answer to a task."""
    try:
        return source_in(read(), RENAMED.get((lesson, name), name)) is not None
    except (NotSaved, SyntaxError):
        return False


def write(text: str) -> None:
    """Replace the file, which stays as it was if this fails."""
    try:
        write_text(FILE, text)
    except UserError as error:
        raise NotSaved(str(error)) from None


def source_of(function: Callable, name: str, new_name: str) -> str:
    """The text of a function `name`, which gets a new name."""
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        raise NotSaved("its source cannot be found; run its cell again") from None
    if not source.startswith(f"def {name}("):
        raise NotSaved(f"write it as `def {name}(…)`")
    return source if name == new_name else re.sub(rf"\b{name}\b", new_name, source)


def functions_in(text: str) -> dict[str, ast.FunctionDef]:
    """The functions of a text by their names."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def source_in(text: str, name: str) -> str | None:
    """The text of a function in the file, or None."""
    node = functions_in(text).get(name)
    return node and "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def with_function(text: str, name: str, source: str) -> str:
    """The text with a function in its place: that of the old one, or before the first that comes
    later in the package. Minispec's is no longer imported under this name."""
    text = re.sub(rf"from solutions\.\w+ import \w+ as {name}\n", "", text)
    lines, functions, order = text.splitlines(), functions_in(text), list(PLACES)
    if name in functions:
        node = functions[name]
        lines[node.lineno - 1 : node.end_lineno] = source.splitlines()
        return "\n".join(lines) + "\n"
    later = order[order.index(name) + 1 :]
    at = min((functions[n].lineno - 1 for n in later if n in functions), default=len(lines))
    while 0 < at < len(lines) and lines[at - 1].startswith("#"):
        at -= 1
    module, lesson = PLACES[name]
    if name == "rounds":
        source += "\n\n\ndecode = decoder(rounds)  # minispec certify --impl my_minispec.py:decode"
    new = [f"# lesson {lesson}, minispec/{module}", *source.splitlines()]
    before, after = "\n".join(lines[:at]).rstrip(), "\n".join(lines[at:]).strip("\n")
    return "\n\n\n".join(part for part in (before, "\n".join(new), after) if part) + "\n"


def with_imports(text: str, function: FunctionType, module: ModuleType, name: str) -> str:
    """The text with imports of what a function uses and neither its `module` nor Python has."""
    used = {*global_names(function.__code__)} | ({"decoder"} if name == "rounds" else set())
    used -= {name, *vars(builtins), *vars(module)}
    known = {"decoder": decoder} | function.__globals__
    new = [line for line in (import_line(n, known.get(n)) for n in sorted(used)) if line]
    return after_imports(text, new)


def after_imports(text: str, new: list[str]) -> str:
    """The text with more imports after those at its top."""
    lines, at = text.splitlines(), 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom):
            break
        at = node.end_lineno
    blank = [""] if at and new and not lines[at - 1].startswith(("import", "from")) else []
    return "\n".join([*lines[:at], *blank, *new, *lines[at:]]) + "\n"


def global_names(code: CodeType) -> Iterator[str]:
    """The names that a function, or a function in it, looks up outside of it."""
    yield from code.co_freevars
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in LOADS)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from set(global_names(constant)) - {*code.co_cellvars, *code.co_freevars}


def import_line(name: str, value: object) -> str | None:
    """A line that imports a value of the notebook under its name there; None if none can."""
    if isinstance(value, ModuleType):
        known_as = value.__name__
        return f"import {known_as}" + (f" as {name}" if known_as != name else "")
    source, known_as = getattr(value, "__module__", None), getattr(value, "__name__", "")
    module = sys.modules.get(source)
    if source in (None, "__main__") or getattr(module, known_as, None) is not value:
        return None
    return f"from {source} import {known_as}" + (f" as {name}" if known_as != name else "")


# ---- using ---------------------------------------------------------------------------------------


def yours(name: str) -> Callable:
    """The reader's function of this name, or minispec's with the same arguments if there is none.
    Prints whose it is."""
    try:
        found, reason = getattr(load(read()), name, None), f"{FILE.name} has none"
    except NotSaved as error:
        found, reason = None, f"there is no {FILE.name}" if not FILE.exists() else str(error)
    if getattr(found, "__module__", None) == FILE.stem:
        print(f"{name}: yours, from {FILE.name}")
        return found
    print(f"{name}: minispec's; {reason}")
    solutions = importlib.import_module(f"solutions.lesson_{PLACES[name][1]}")
    return getattr(solutions, f"package_{name}")


def keep(rounds: Callable, replace: bool = False) -> Callable:
    """Save lesson 10's loop with the functions that it uses. Returns the file's `decode` (see
    `decoder`) or, if it has none, one that uses the notebook's functions."""
    print("rounds: kept" + save(rounds, "10", "rounds", lambda function: None, replace))
    try:
        return getattr(load(read()), "decode", None) or decoder(rounds)
    except NotSaved:
        return decoder(rounds)


def certify(*flags: str, function: str = "decode") -> None:
    """Examine a function of the file as the shell would, and print the table and the verdict."""
    if function != "decode" and not is_saved("", function):
        print(f"{FILE.name} has no {function} yet")
        return
    command = "-m", "minispec", "certify", "--impl", f"{FILE.name}:{function}", *flags
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (LESSONS.parent, LESSONS)))}
    done = subprocess.run(
        [sys.executable, *command], cwd=FILE.parent, env=environment, text=True, capture_output=True
    )
    print(shlex.join(["minispec", *command[2:]]))
    print(done.stdout.strip() or done.stderr.strip())


def replay(prompt: str = "Once upon a time", tokens: int = 60) -> None:
    """Let the toy tell a story at temperature 0.8, with every draft judged by the reader's `accept`
    of lesson 03, and write the page that steps through the run."""
    own, file = yours("accept"), FILE.with_name("my_run.html")

    def rule(target, tree, randomness):
        drafts, q = tree.tokens[1:], [tree.drawn_from(i) for i in range(1, len(tree))]
        asked = Asked(randomness)
        n, fresh = own([*target], q, drafts, asked)
        return [*range(n + 1)], fresh, dict(zip(range(1, len(tree)), asked.chances))

    model, tokenizer = load_once(SHIPPED / "target")
    run = decode(model, tokenizer, prompt, "speculative", k=3, temperature=0.8, seed=1,
                 max_new_tokens=tokens, rule=rule)  # fmt: skip
    write_page(file, model, tokenizer, run, "the story model")
    print(f"open {file.name}: {len(run.tokens)} tokens from {len(run.rounds)} passes")


class Asked:
    """A Randomness that remembers the chances of acceptance, which the page shows."""

    def __init__(self, randomness: Randomness):
        self.randomness, self.categorical, self.chances = randomness, randomness.categorical, []

    def bernoulli(self, p: float) -> bool:
        self.chances.append(float(p))
        return self.randomness.bernoulli(p)


# ---- what surrounds the loop ---------------------------------------------------------------------


def decoder(rounds: Callable) -> Callable:
    """Make the function that `minispec certify --impl` examines from lesson 10's loop."""

    @torch.no_grad()
    def decode(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        """Return the new tokens. `checkpoint` is a folder, or a model and its tokenizer."""
        model, tokenizer = load_once(checkpoint) if isinstance(checkpoint, str) else checkpoint
        new, settings = [], (temperature, top_k, top_p)
        drafter = new_drafter(model, tokenizer, prompt)
        source = rounds(model, drafter, list(prompt), settings, Seeded(seed))
        for token in islice((token for tokens in source for token in tokens), max_new_tokens):
            new.append(token)
            if token in model.config.eos_ids:
                break
        return new

    return decode


load_once = cache(minispec.load)


def new_drafter(model: Transformer, tokenizer: Tokenizer, prompt: list[int]) -> object:
    """What `chain` runs: the FastMTP head that belongs to a model or, if there is none, its draft
    model, which ignores the hidden states."""
    found = with_drafter("hybrid", model, tokenizer, {})
    if "head" in found:
        head = found["head"]
        return head.start(model, head.new_cache(model.config.context))
    draft = found["draft"]
    rows = draft.new_cache()
    draft(prompt[:1], rows)  # which is the second token of no pair
    rows.commit([0])
    return SimpleNamespace(
        run=lambda hidden, tokens: draft(tokens, rows)[0], cache=rows, model=draft
    )


def prefill(model: Transformer, cache: KVCache, tokens: list[int]) -> Tensor:
    """Feed and commit the tokens. Returns their hidden states (n, d)."""
    none = model.model.norm.weight.new_empty(0, model.config.hidden_size)  # for a prompt of one
    return torch.cat([none, *(chunk[0] for chunk in model.prefill_chunks(tokens, cache))])


def ngrams(tokens: list[int], new: int, key: int = 3, n: int = 3) -> Iterator[tuple]:
    """For `lookup` after the last `key` tokens instead of one: (key, token, … of n), for each place
    that ends with one of the last `new` tokens."""
    for end in range(max(key + n, len(tokens) - new + 1), len(tokens) + 1):
        yield tuple(tokens[end - n - key : end - n]), *tokens[end - n : end]
