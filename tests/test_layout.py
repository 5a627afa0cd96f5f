"""The folders of minispec/ and the direction of its imports, as design and README describe them."""

import ast
import importlib.util
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from minispec.methods import METHODS
from minispec.verify import accept

PACKAGE = ROOT / "minispec"
FLOORS = [  # a module imports from its own floor and from those before it
    ["cli", "machine", "paths"],
    ["model", "cache", "sampling", "tree", "verify", "distributed"],
    ["methods"],
    ["checkpoints"],
    ["fast", "remote"],
    ["generate"],
    ["training"],
    ["distill", "bench", "certify"],
    ["__main__"],
]
LINES = {  # at most, of Python: 2 % more than on 2026-11-29; a change that needs more says why
    "": 1541,  # 55 for block verification and methods in a file of somebody's own
    "methods": 2246,  # 2141 before trees were drawn; 1717 before methods declared themselves
    "checkpoints": 1664, "generate": 1241, "remote": 440, "training": 745,
    "bench": 1134, "distill": 1604,
    "fast": 1605,  # 1127 before --bitwise, 1503 before rounded drafts
    "certify": 4930,  # 4840 before --bitwise; 4233 before requests were drawn
}
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_imports_from_a_floor_above_it(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports_of(path):
        assert name.partition(".")[0] != "transformers"
        if name.startswith("minispec."):
            other = name.split(".")[1]
            if other in FLOOR_OF:
                assert FLOOR_OF[other] <= FLOOR_OF[own], f"{path} imports {name}"


def test_the_side_ways_that_are_closed():
    """Methods know only their declaration, policies and vocabulary, except for hybrid, which
    combines others, and eagle3, which shares fastmtp's loop; nothing imports bench or certify."""
    for path in MODULES:
        own, imported = path.relative_to(PACKAGE).parts[0], imports_of(path)
        for target in {"bench", "certify"} - {own.removesuffix(".py"), own}:
            if own != "__main__.py":
                assert not any(name.startswith(f"minispec.{target}") for name in imported), path
        if own == "methods" and path.name != "hybrid.py":
            shared = "vocabulary", "declaration", "adaptive"
            allowed = tuple(f"minispec.methods.{name}" for name in shared)
            if path.name == "eagle3.py":
                allowed += ("minispec.methods.fastmtp",)
            others = {n for n in imported if n.startswith("minispec.methods.")}
            assert all(name.startswith(allowed) for name in others), (path, others)
        if own in ("training", "certify"):
            assert not any(name.startswith("minispec.fast") for name in imported), path
        if own == "certify" and "methods" in path.relative_to(PACKAGE).parts:
            others = "minispec.certify.functions", "minispec.certify.servers"
            assert not any(name.startswith(others) for name in imported), path


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_keeps_its_budget_of_lines(folder):
    files = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert 0.9 * LINES[folder] < lines <= LINES[folder]


# ---- lists of methods ----------------------------------------------------------------------------

# where names of methods may stand in a row, and why: the function, class or variable
OWN_LISTS = {
    "lessons/assignments/a5_lookahead": "the functions that the assignment asks for",
    "lessons/assignments/a8_engine": "the proposers that the engine of the assignment runs",
    "lessons/drawing.py METHOD_COLOURS": "a colour for each method that lesson 10 measures",
    "lessons/pictures.py EXAMPLES": "the README's pictures: a prompt and options for each",
    "lessons/solutions/pure_10.py": "the invented numbers of a task",
    "tests/test_bench.py": "the rows of one command, and two methods that take turns",
    "tests/test_captured.py": "the model alone and with one drafter of each kind: more take long",
    "tests/test_eagle3.py": "the methods that this kind of head drafts for",
    "tests/test_flags.py test_a_wrong_flag_is_one_line": "messages about these methods",
    "tests/test_generate.py": "the methods with a head's cache; one with a draft, one without",
    "tests/test_interface.py test_a_wrong_option": "messages about these methods",
    "tests/test_interface.py test_drafters_can_be_passed": "arguments of these methods",
    "tests/test_interface.py test_hybrid": "the methods whose drafters hybrid takes, too",
    "tests/test_lessons.py GALLERY": "the pages that the Makefile makes, and their lessons",
    "tests/test_real.py": "how many passes the heads for SmolLM2 save at least",
}


def listed_methods(node: ast.AST) -> set[str]:
    """The methods that are elements or keys of a literal, or the first entries of its rows. Names
    next to draft or mtp are those of folders."""
    entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    rows = [entry.elts[0] if getattr(entry, "elts", None) else entry for entry in entries]
    names = {row.value for row in rows if isinstance(row, ast.Constant)}
    return set() if {"draft", "mtp"} & names else {n for n in names if n in METHODS}


def named_parts(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The top-level functions, classes, variables and other statements of a module."""
    for node in tree.body:
        target = getattr(node, "targets", [getattr(node, "target", node)])[0]
        yield getattr(node, "name", getattr(target, "id", "")), node


def test_no_list_of_methods_is_written_by_hand():
    """Lists follow from METHODS and the declarations, as somebody would forget to extend others."""
    found = set()
    for folder in "minispec", "tests", "lessons":
        for path in (ROOT / folder).rglob("*.py"):
            if (PACKAGE / "methods") in path.parents:
                continue
            place = path.relative_to(ROOT).as_posix()
            for name, part in named_parts(ast.parse(path.read_text(encoding="utf-8"))):
                if any(len(listed_methods(node)) > 1 for node in ast.walk(part)):
                    found.add(f"{place} {name}")
    exempt = {place for place in found if any(place.startswith(own) for own in OWN_LISTS)}
    assert found == exempt
    assert all(any(place.startswith(own) for place in found) for own in OWN_LISTS)


def test_the_listing_shows_what_there_is():
    files = [*PACKAGE.glob("*.py")]
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    assert len(files) <= 12 and len(folders) <= 9
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES} == set(FLOOR_OF)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    inits = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    # a folder that is not listed would not be in the wheel
    assert inits | {"minispec.weights"} == set(project["tool"]["setuptools"]["packages"])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("```\nminispec/")[1].split("```")[0]
    assert tree.count("\n") <= 30
    for path in [*files, *folders]:
        assert path.name in tree or path.name in ("__init__.py", "__main__.py"), path


def test_the_tools_are_pinned():
    """Those of the tests, lessons and site; setuptools would also bind other packages' builds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [name for extra in ("test", "lessons", "site") for name in extras[extra]]
    pinned = re.findall(r"^([\w-]+)==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert {re.split("[<>=]", name)[0] for name in needed} <= {"setuptools", *pinned}


WRITER = r"""\.write_(text|bytes)\(|\.savefig\(|[( ]torch\.save\(|open\([^)]*"[wx]b?\""""


def test_no_file_is_overwritten_in_place():
    """A full disk would leave half of it: `atomic_write` writes another, `partial`, first."""
    for folder in PACKAGE, ROOT / "lessons", ROOT / "tests" / "gpu":
        for path in folder.rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if re.search(WRITER, line):
                    assert re.search(r"partial|devnull|, file\)", line), (path, line)


def test_the_readme_shows_accept_as_it_is():
    """Its body, after the docstring."""
    body = textwrap.dedent(inspect.getsource(accept).split('    """\n')[-1])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert body in readme and readme.count("\n") <= 180


def test_the_engines_to_run_are_those_in_the_folder():
    spec = importlib.util.spec_from_file_location("run", ROOT / "tests" / "engines" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    paths = (ROOT / "tests" / "engines").glob("*_engine.py")
    files = {path.name.removesuffix("_engine.py") for path in paths}
    assert files == {name for name, *_ in module.ENGINES}
    for function in module.FUNCTIONS:
        source = (ROOT / "tests" / "engines" / f"{function.file}_engine.py").read_text()
        assert re.search(rf"\b{function.name}\b", source), function.label
