"""The reader's own engine. `check` saves right answers in my_minispec.py, next to the notebooks.
Later lessons use them; what the reader has not written is minispec's.

The file belongs to the reader. Functions and imports are added to it, but nothing is replaced
unless the reader asks, except that an import of minispec's function ends once the reader's own is
there, and that a later lesson's `rounds` takes the place of an earlier one's. A new version must be
importable before it replaces the file. `grow` adds a line to the table in my_minispec.md.
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
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, ModuleType, SimpleNamespace

import torch
from torch import Tensor

import minispec
from minispec.checkpoints.eagle3 import load_eagle3
from minispec.checkpoints.load import find_smollm2
from minispec.checkpoints.weights import write_text
from minispec.cli import UserError
from minispec.fast.cost import interleaved_min_times
from minispec.generate import decode
from minispec.generate.drafters import with_drafter
from minispec.generate.view import write_page
from minispec.methods.eagle3 import Eagle3Head, default_layers
from minispec.model import Transformer
from minispec.paths import SHIPPED
from minispec.sampling import Randomness

LESSONS = Path(__file__).resolve().parent
FILE = LESSONS / "my_minispec.py"
HEADER = '''"""My decoder. The lessons' `check` adds what I have written, once it is right."""
'''
PLACES = {  # the file's functions in the package's order: the module there, and the lesson
    "commit": ("cache", "01"), "warp": ("sampling", "02"), "mask": ("tree", "01"),
    "accept_greedy": ("verify", "00"), "residual": ("verify", "03"), "accept": ("verify", "03"),
    "accept_sibling": ("verify", "04"), "accept_certain": ("verify", "09"),
    "greedy": ("methods/autoregressive", "00"),
    "fuse": ("methods/eagle3", "11"), "watch": ("methods/eagle3", "11"),
    "draft_three": ("methods/eagle3", "11"),
    "best_size": ("methods/adaptive", "04"), "best_k": ("methods/adaptive", "06"),
    "tokens_per_second": ("methods/adaptive", "10"), "best_method": ("methods/adaptive", "10"),
    "draft_one": ("methods/speculative", "03"), "draft_siblings": ("methods/speculative", "04"),
    "chain": ("methods/fastmtp", "06"), "draft_chain": ("methods/fastmtp", "06"),
    "best_nodes": ("methods/fastmtp", "06"), "draft_frequent": ("methods/vocabulary", "07"),
    "add": ("methods/lookahead", "05"), "lookup": ("methods/lookahead", "05"),
    "jacobi": ("methods/lookahead", "05"), "draft_itself": ("methods/lookahead", "05"),
    "grow_tree": ("methods/medusa", "04"), "ngrams": ("methods/prompt_lookup", "10"),
    "draft_hybrid": ("methods/hybrid", "10"),
    "fill_up": ("fast/bitwise", "09"), "attend_in_blocks": ("fast/bitwise", "09"),
    "find_draft": ("generate/drafters", "03"), "find_words": ("generate/drafters", "07"),
    "find_eagle3": ("generate/drafters", "11"), "release": ("generate", "02"),
    "rounds": ("generate", "04"), "decoder": ("generate", "01"),
    "grow_jointly": ("distill/medusa", "04"), "mtp_loss": ("distill", "07"),
    "unroll": ("distill", "11"),
    "measure_speedup": ("bench", "08"), "greedy_acceptance": ("bench", "03"),
    "next_script": ("certify", "09"), "exact_distribution": ("certify", "09"),
}  # fmt: skip
RENAMED = {("00", "accept"): "accept_greedy"}  # lesson 03 has an `accept` of its own
VERSIONS = {"rounds": ("01", "02", "03", "04")}  # lessons that ask for more of the same function
# they load, look and count; copied into the file when something uses them
GIVEN = "find_draft", "find_words", "find_eagle3", "watch", "ngrams"
STAGES = {  # what decodes after a lesson, and what the lesson has swapped in
    "00": ("greedy", "a loop of passes"),
    "01": ("decoder(rounds)", "cache and mask"),
    "02": ("decoder(rounds)", "sampling"),
    "03": ("decoder(rounds, drafter=draft_one)", "one draft, accept"),
    "04": ("decoder(rounds, drafter=draft_siblings)", "three siblings"),
    "05": ("decoder(rounds, drafter=draft_itself)", "Jacobi, n-grams"),
    "06": ("decoder(rounds, drafter=draft_chain)", "a head's chain"),
    "07": ("decoder(rounds, drafter=draft_frequent)", "frequent words"),
    "10": ("decoder(rounds, drafter=draft_hybrid)", "copies, or a chain"),
    "11": ("decoder(rounds, drafter=draft_three)", "EAGLE-3's three states"),
}
QUESTION = (
    "Turn this sentence into a list of facts: The old lighthouse on Gull Island was built in 1871, "
    "stands 34 metres tall and was painted white and red."
)
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
        if old is not None and not replace and lesson_of(text, name) >= lesson:
            call = f"check({asked}, replace=True)"
            return f"\n    {FILE.name} has another {name}, which stays; {call} replaces it"
        text = with_imports(with_function(text, name, source, lesson), function, module, name)
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


def lesson_of(text: str, name: str) -> str:
    """The lesson for which a function of the file was written, "" if there is no such function."""
    found = re.search(rf"^# lesson (\d\d), .*\ndef {name}\(", text, re.MULTILINE)
    return found[1] if found else ("99" if source_in(text, name) is not None else "")


def with_function(text: str, name: str, source: str, lesson: str) -> str:
    """The text with a function in its place: that of the old one, or before the first that comes
    later in the package. Minispec's is no longer imported under this name."""
    text = re.sub(rf"from solutions\.\w+ import (\w+ as )?{name}\n", "", text)
    lines, functions, order = text.splitlines(), functions_in(text), list(PLACES)
    heading = f"# lesson {lesson}, minispec/{PLACES[name][0]}"
    if name in functions:
        at, end = functions[name].lineno - 1, functions[name].end_lineno
        if lines[at - 1].startswith("# lesson "):
            lines[at - 1] = heading
        lines[at:end] = source.splitlines()
        return "\n".join(lines) + "\n"
    later = [functions[n].lineno - 1 for n in order[order.index(name) + 1 :] if n in functions]
    stages = [i for i, line in enumerate(lines) if line.startswith("decode = ")]
    at = min([*later, *stages], default=len(lines))
    while 0 < at < len(lines) and lines[at - 1].startswith("#"):
        at -= 1
    before, after = "\n".join(lines[:at]).rstrip(), "\n".join(lines[at:]).strip("\n")
    return "\n\n\n".join(part for part in (before, f"{heading}\n{source}", after) if part) + "\n"


def with_imports(text: str, function: FunctionType, module: ModuleType, name: str) -> str:
    """The text with imports of what a function uses and neither its `module` nor Python has. What
    is given (see GIVEN) is copied."""
    signature = ast.parse(source_in(text, name)).body[0]
    parts = [signature.args, *filter(None, [signature.returns])]
    hints = {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
    names, new = {*global_names(function.__code__)} | hints, []
    for used in sorted(names - {name, *vars(builtins), *vars(module)}):
        value = function.__globals__.get(used)
        if used in GIVEN and isinstance(value, FunctionType) and value.__module__ == __name__:
            if source_in(text, used) is None:
                text = with_function(text, used, source_of(value, used, used), PLACES[used][1])
                text = with_imports(text, value, module, used)
        elif line := import_line(used, value):
            new.append(line)
    return after_imports(text, [line for line in new if line not in text.splitlines()])


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
    if getattr(minispec, known_as, None) is value:
        source = minispec.__name__
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


def certify(*flags: str, function: str = "decode", folder: Path | None = None) -> bool:
    """Examine a function of the file as the shell would, and print the table and the verdict. With
    a `folder`, examine the file there, and print the rows that fail and the verdict only. Returns
    whether no loss was found."""
    if function != "decode" and not is_saved("", function):
        print(f"{FILE.name} has no {function} yet")
        return False
    command = "-m", "minispec", "certify", "--impl", f"{FILE.name}:{function}", *flags
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (LESSONS.parent, LESSONS)))}
    done = subprocess.run([sys.executable, *command], cwd=folder or FILE.parent, env=environment,
                          text=True, capture_output=True)  # fmt: skip
    print(shlex.join(["minispec", *command[2:]]))
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    shown = [line for line in lines[:-1] if line.startswith("FAIL")] if folder else lines[:-1]
    print(*shown, *lines[-1:], sep="\n")
    return done.returncode == 0


def replay(prompt: str = "Once upon a time", tokens: int = 60) -> None:
    """Let the toy tell a story at temperature 0.8, with every draft judged by the reader's `accept`
    of lesson 03, and write the page that steps through the run."""
    own, file = yours("accept"), FILE.with_name("my_run.html")

    def rule(target, tree, randomness):
        drafts, q = tree.tokens[1:], [tree.drawn_from(i) for i in range(1, len(tree))]
        asked = Asked(randomness)
        n, fresh = own([*target], q, drafts, asked)
        return [*range(n + 1)], fresh, dict(zip(range(1, len(tree)), asked.chances))

    model, tokenizer = minispec.load(SHIPPED / "target")
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


# ---- growing -------------------------------------------------------------------------------------


def grow(lesson: str) -> None:
    """Certify what the file decodes with after a lesson, let it answer the question, and add a line
    to the table. A part that the reader has not written is the solution's; such a line is shown and
    not kept."""
    expression, part = STAGES[lesson]
    try:
        text, missing = text_after(lesson)
        with TemporaryDirectory() as folder:
            write_text(Path(folder, FILE.name), text)
            certified = certify_stage(lesson, Path(folder))
        row = lesson, part, *answer_of(text), certified
        if not missing:
            write(text)
    except NotSaved as reason:
        print(f"not grown: {reason}")
        return
    if missing:
        print(f"minispec's, not in {FILE.name} yet: {', '.join(missing)}")
    print_table(row, keep=not missing)


def text_after(lesson: str) -> tuple[str, list[str]]:
    """The file's text as it decodes after a lesson, and the functions in it that are not the
    reader's."""
    text = read() if FILE.exists() else HEADER
    load(text)  # raises NotSaved if it cannot be imported
    expression, missing = STAGES[lesson][0], []
    wanted = re.findall(r"\b(?:greedy|decoder|rounds|draft_\w+)\b", expression)
    for name in wanted:  # which grows
        has, needs = lesson_of(text, name), lesson_needed(name, lesson)
        if name in VERSIONS and has > needs:
            raise NotSaved(f"{FILE.name} has {name} of lesson {has}; its line in the table is that "
                           "lesson's")  # fmt: skip
        if has < needs and name not in GIVEN:
            tasks = importlib.import_module(f"solutions.lesson_{needs}").TASKS
            solution = next(task.solution for task in tasks if task.name == name)
            text = with_function(text, name, source_of(solution, name, name), needs)
            text = with_imports(text, solution, load(text), name)
            missing.append(name)
        used = global_names(getattr(load(text), name).__code__)
        wanted += sorted({*used} & PLACES.keys() - {*wanted})
    lines = [line for line in text.splitlines() if not line.startswith("decode = ")]
    stage = f"decode = {expression}  # lesson {lesson}: minispec certify --impl {FILE.name}:decode"
    return "\n".join(lines).rstrip() + f"\n\n\n{stage}\n", missing


def lesson_needed(name: str, lesson: str) -> str:
    """The lesson whose version of a function decodes after `lesson`."""
    return max([v for v in VERSIONS.get(name, ()) if v <= lesson], default=PLACES[name][1])


GREEDY = "--greedy-only", "--requests", "100"
EXACT = "--checks", "exact", "--only", "T=1 top-k 0 top-p 0.8", "--outcomes", "20", "--length", "2"


def certify_stage(lesson: str, folder: Path) -> str:
    """Examine the file in a folder; from lesson 02 on it also samples. Returns a cell of the
    table."""
    checks = {"greedy": GREEDY} | ({"exact": EXACT} if lesson >= "02" else {})
    found = {name: certify(*flags, folder=folder) for name, flags in checks.items()}
    return ", ".join(name if right else f"LOSS in {name}" for name, right in found.items())


def answer_of(text: str, tokens: int = 40) -> tuple[str, str, str, str]:
    """Let the text's `decode` answer the question. Returns the model's name, the tokens per pass,
    the tokens per second, prompt included, and the speed relative to minispec's plain decoding, in
    turn with it. Prints the answer."""
    plain_load = minispec.load
    minispec.load = cache(plain_load)  # a decoder of lesson 00 loads for each text
    try:
        name, folder, prompt = question()
        model, tokenizer = minispec.load(folder)
        settings = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
        own = partial(load(text).decode, folder, prompt, max_new_tokens=tokens, **settings)
        passes: list[list[int]] = []
        hook = model.register_forward_pre_hook(lambda _, inputs: passes.append([*inputs[0]]))
        new = own()
        hook.remove()
        plain = partial(decode, model, tokenizer, prompt, max_new_tokens=tokens)
        mine, other = interleaved_min_times([own, plain], turns=2, turn_seconds=0)
    finally:
        minispec.load = plain_load
    print(repr(tokenizer.decode(new)))
    # a pass over the prompt alone yields no token; then the next begins with the prompt's last
    alone = len(passes) > 1 and passes[1][0] == prompt[-1] != prompt[0]
    per_pass = len(new) / (len(passes) - alone)
    return name, f"{per_pass:.2f}", f"{len(new) / mine:.1f}", f"{other / mine:.2f}"


def question() -> tuple[str, str, list[int]]:
    """SmolLM2, its folder and the question; without it, those of the story model and the beginning
    of a story."""
    try:
        folder = str(find_smollm2())
    except UserError:
        folder = str(SHIPPED / "target")
        return "stories", folder, minispec.load(folder)[1].encode("Once upon a time")
    prompt = minispec.load(folder)[1].chat([{"role": "user", "content": QUESTION}])
    return "SmolLM2", folder, prompt


COLUMNS = "lesson", "new part", "model", "tokens per pass", "tokens/s", "speed", "certified"


def print_table(row: tuple[str, ...], keep: bool) -> None:
    """Print the table of all lessons with this row in its place, and keep it if asked to."""
    file, rows = FILE.with_suffix(".md"), {}
    for line in file.read_text(encoding="utf-8").splitlines()[2:] if file.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells
    rows[row[0]] = row
    table = [COLUMNS, *(rows[number] for number in sorted(rows))]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print(*lines, sep="\n")
    if keep:
        write_text(file, "\n".join(lines) + "\n")


# ---- given ---------------------------------------------------------------------------------------


def find_draft(model: Transformer, text: list[int]) -> object:
    """Given: what drafts for a model, the FastMTP head next to it or, if there is none, its draft
    model, which ignores the hidden states. `run`, `cache` and `model` are as in lesson 06. The
    cache has room for drafts beyond the end of the context."""
    found, size = with_drafter("hybrid", model, None, {}), model.config.context + 8
    if "head" in found:
        return found["head"].start(model, found["head"].new_cache(size))
    draft, rows = found["draft"], found["draft"].new_cache(size)
    draft(text[:1], rows)  # the token that is the second of no pair
    rows.commit([0])
    return SimpleNamespace(
        run=lambda hidden, tokens: draft(tokens, rows)[0], cache=rows, model=draft
    )


def find_words(model: Transformer, text: list[int]) -> Tensor:
    """Given: the ids (n,) of the tokens that are frequent in the text's language, from the list
    next to the FastMTP head. If there is none, every other token."""
    vocabulary = with_drafter("hybrid", model, None, {}).get("vocabulary")
    every_other = torch.arange(0, model.config.vocab_size, 2, device=model.device)
    return every_other if vocabulary is None else vocabulary.select(text).ids


def find_eagle3(model: Transformer) -> object:
    """Given: the EAGLE-3 head next to the model, or in my_eagle3 next to this file, or else a new
    one that has learnt nothing. It is what `find_draft` returns, with the `layers` whose inputs it
    reads, and `fc`."""
    config, mine = model.config, Path(__file__).with_name("my_eagle3")
    try:
        head = with_drafter("eagle3", model, None, {})["head"]
    except minispec.UserError:
        try:
            head = load_eagle3(mine, model) if mine.exists() else None
        except minispec.UserError:  # it is another model's
            head = None
    if head is None:
        layers = default_layers(config.layers)
        with torch.device("meta"):  # without weights, which would be drawn
            head = Eagle3Head(config, config, [*range(config.vocab_size)], layers)
        weights = head.state_dict().items()
        waves = {name: torch.arange(1.0, w.numel() + 1).sin().view(w.shape) for name, w in weights}
        head.load_state_dict(waves, assign=True)
        head.to(model.device, model.dtype).requires_grad_(False)

    def logits(output):
        full = output.new_full((len(output), config.vocab_size), -torch.inf)
        full[:, head.ids] = head.logits(output)
        return full

    drafter = head.start(model, head.new_cache(config.context + 8))
    return SimpleNamespace(
        run=drafter.run, cache=drafter.cache, model=SimpleNamespace(logits=logits),
        layers=head.feature_layers, fc=head.fc,
    )  # fmt: skip


def watch(model: Transformer, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """Given: the hidden states (n, d) that entered these layers in the latest pass of the model."""
    states = {}

    def keep(i, inputs):
        states[i] = inputs[0][0]

    for hook in model.memo.pop("hooks of watch", []):
        hook.remove()
    model.memo["hooks of watch"] = [
        model.model.layers[i].register_forward_pre_hook(lambda _, inputs, i=i: keep(i, inputs))
        for i in layers
    ]
    return states


def ngrams(tokens: list[int], new: int, key: int = 3, n: int = 3) -> Iterator[tuple]:
    """Given: for `lookup` after the last `key` tokens instead of one: (key, token, … of n), for
    each place that ends with one of the last `new` tokens."""
    for end in range(max(key + n, len(tokens) - new + 1), len(tokens) + 1):
        yield tuple(tokens[end - n - key : end - n]), *tokens[end - n : end]
