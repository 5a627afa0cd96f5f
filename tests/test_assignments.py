"""The assignments grade: the reference earns everything, the starters nothing, and each wrong
answer loses the points of its task and of those that build on it, but no others.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import mistakes
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from minispec import cache, distill, tree
from minispec.certify import mutants
from minispec.certify.mutants import MUTANTS
from minispec.methods import adaptive, fastmtp, lookahead, medusa, speculative, vocabulary
from minispec.methods.prompt_lookup import lookup
from minispec.model import Pass
from minispec.sampling import Sampling
from minispec.tree import Tree
from minispec.verify import residual

FOLDER = ROOT / "lessons" / "assignments"
ASSIGNMENTS = sorted(path.name for path in FOLDER.iterdir() if (path / "starter.py").exists())


class Watch:
    """A plugin that keeps what the failed tests of a graded run raised, and the grades."""

    def __init__(self):
        self.raised: list[BaseException] = []
        self.grades = None

    def pytest_exception_interact(self, call):
        self.raised.append(call.excinfo.value)

    def pytest_sessionfinish(self, session):
        self.grades = session.config.grades


def grade(assignment: str, impl: str, *more: str) -> tuple[int, Watch]:
    """The exit code of a graded run in this process, and what a Watch saw of it."""
    watch = Watch()
    options = ["-q", "--tb=no", "--no-summary", "--capture=no", "-p", "no:cacheprovider"]
    options += ["-p", "no:unraisableexception"]  # which collects garbage five times at the end
    path = str(FOLDER / assignment)
    # importlib: a second conftest.py must not take the place of the first
    code = pytest.main(
        [path, f"--impl={impl}", "--import-mode=importlib", *options, *more], [watch]
    )
    return int(code), watch


def lost(watch: Watch) -> set[str]:
    """Tasks that are short of points."""
    points = {task: watch.grades.of(task) for task in watch.grades.tasks}
    return {task for (_, task), (earned, possible) in points.items() if earned < possible}


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- reference and starter -----------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_reference_earns_all_points_and_the_readmes_name_them(assignment):
    code, watch = grade(assignment, "minispec")
    earned, possible = watch.grades.total
    assert code == 0 and earned == possible > 0 and not lost(watch)
    readme = (FOLDER / assignment / "README.md").read_text(encoding="utf-8")
    for _, task in watch.grades.tasks:
        points = watch.grades.of((assignment, task))[1]
        assert re.search(rf"^\| {task} \|.*\| {points} \|$", readme, re.MULTILINE), (task, points)
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{assignment}\].*\| {possible} \|$", overview, re.MULTILINE), possible


def test_the_starters_raise_not_implemented_and_nothing_else():
    code, watch = grade("", "starter")
    count = sum(len(tests) for tests in watch.grades.tasks.values())
    assert code == 1 and watch.grades.total[0] == 0 and len(watch.raised) >= count
    assert {type(error) for error in watch.raised} == {NotImplementedError}


def test_points_are_for_tests_that_ran_and_passed():
    assert grade("a2_accept", "minispec", "-k", "greedy")[1].grades.total == (3, 3)
    assert grade("a2_accept", "starter", "-x")[1].grades.total[0] == 0


@pytest.mark.parametrize(
    "impl, message",
    [
        ("nowhere.py", "--impl nowhere.py: no such file"),
        ("no.such.module", "--impl no.such.module: cannot be imported (ModuleNotFoundError"),
        ("{tmp}/odd.py", "cannot be imported (SyntaxError"),
    ],
)
def test_an_implementation_that_is_not_there_is_one_line(impl, message, tmp_path, capsys):
    (tmp_path / "odd.py").write_text("def accept(:")
    options = [f"--impl={impl.format(tmp=tmp_path)}", "--import-mode=importlib"]
    code = pytest.main([str(FOLDER / "a2_accept"), *options])
    err = capsys.readouterr().err.strip()
    assert code == pytest.ExitCode.USAGE_ERROR and message in err and "\n" not in err


def test_a_folder_holds_a_file_per_assignment_and_a_missing_name_is_one_line(tmp_path):
    (tmp_path / "a2_accept.py").write_text("from minispec.verify import residual")
    _, watch = grade("a2_accept", str(tmp_path))
    tests = watch.grades.tasks
    assert all(t.passed for t in tests["a2_accept", "residual"].values())
    for graded in tests["a2_accept", "greedy"].values():
        assert graded.hint == f"{tmp_path / 'a2_accept.py'} has no accept"
    _, watch = grade("a1_cache_and_mask", str(tmp_path))
    assert {t.hint for tests in watch.grades.tasks.values() for t in tests.values()} == {
        f"{tmp_path} has no a1_cache_and_mask.py"
    }


def signatures(module: ModuleType, names: list[str] | None = None) -> dict[str, str]:
    """Of a module's functions and its classes' methods; of dotted annotations the last name."""
    names = names or [n for n, x in vars(module).items() if here(x, module)]
    found = {}
    for name in names:
        x = getattr(module, name)
        members = (
            {f"{name}.{n}": f for n, f in vars(x).items()} if inspect.isclass(x) else {name: x}
        )
        for member, function in members.items():
            if callable(function) and (inspect.isfunction(function) or not inspect.isclass(x)):
                text = str(inspect.signature(function)).replace("'", "")
                found[member] = re.sub(r"[\w.]+\.(\w+)", r"\1", text)
    return found


def here(x: object, module: ModuleType) -> bool:
    return getattr(x, "__module__", None) == module.__name__


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_signatures_of_starter_and_reference_agree(assignment):
    starter = signatures(load(FOLDER / assignment / "starter.py", f"{assignment}_stubs"))
    solution = load(FOLDER / assignment / "reference.py", f"{assignment}_solution")
    classes_and_functions = sorted({name.split(".")[0] for name in starter})
    reference = signatures(solution, classes_and_functions)
    assert starter and {name: reference.get(name) for name in starter} == starter


# ---- wrong answers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """The reference of an assignment with a mistake: some of its names replaced, or one of the
    certifier's mutants at work in the package. It loses points in the tasks `lost`, and only there.
    """

    assignment: str
    name: str
    lost: set[str]
    names: dict[str, object] = field(default_factory=dict)
    mutant: bool = False  # the one of MUTANTS called `name`


def changed(kind: type, **methods: Callable) -> type:
    """The class with other methods."""
    return type(kind.__name__, (kind,), methods)


# a1


def depth_is_the_number(parents):
    return list(range(len(parents))), torch.arange(len(parents)), tree.layout(parents)[2]


def siblings_see_each_other(parents):
    depths, depth, mask = tree.layout(parents)
    same = torch.tensor(parents)[:, None] == torch.tensor(parents)
    return depths, depth, mask | (same & torch.ones_like(mask).tril())


def blind_to_itself(parents):
    depths, depth, mask = tree.layout(parents)
    return depths, depth, mask & ~torch.eye(len(parents), dtype=torch.bool)


def positions_by_slot(self, n, depth, mask):
    return cache.KVCache.place(self, n, torch.arange(n), mask)


def mask_ignored(self, n, depth, mask):
    return cache.KVCache.place(self, n, depth, torch.ones_like(mask).tril())


def commit_keys_only(self, path):
    kept = [v.clone() for v in self.v]
    cache.KVCache.commit(self, path)
    self.v = kept


A1 = [
    Wrong("a1_cache_and_mask", name, {task, "together"}, names)
    for name, task, names in (
        ("depth is the node's number", "depth", {"layout": depth_is_the_number}),
        ("siblings see each other", "mask", {"layout": siblings_see_each_other}),
        ("a node does not see itself", "mask", {"layout": blind_to_itself}),
        ("positions by slot", "place",
         {"KVCache": changed(cache.KVCache, place=positions_by_slot)}),
        ("the mask ignored", "place", {"KVCache": changed(cache.KVCache, place=mask_ignored)}),
        ("accepted rows not moved", "commit",
         {"KVCache": changed(cache.KVCache, commit=mutants.commit_in_place)}),
        ("a row too many", "commit",
         {"KVCache": changed(cache.KVCache, commit=mutants.commit_one_too_many)}),
        ("keys moved, values not", "commit",
         {"KVCache": changed(cache.KVCache, commit=commit_keys_only)}),
        ("a stale row kept", "truncate",
         {"KVCache": changed(cache.KVCache, truncate=mutants.truncate_one_short)}),
    )
]  # fmt: skip

# a2


def residual_not_normalised(p, q, x):
    rest = residual(p, q, x)
    return rest if rest is None else 0.5 * rest


def rejects_where_nothing_is_left(target, tree, randomness):
    at = [0]
    while True:
        p = target[at[-1]]
        for child in tree.children(at[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            if randomness.bernoulli(min(1.0, float(p[x] / (1 if q is None else q[x])))):
                at.append(child)
                break
            rest = residual(p, q, x)
            p = p if rest is None else rest
        else:
            return at, randomness.categorical(p)


A2 = [
    Wrong("a2_accept", "resamples from p", {"residual"}, {"residual": mutants.resample_from_p}),
    Wrong("a2_accept", "a rejection resamples from p", {"residual", "chain", "tree", "rounding"},
          mutant=True),
    Wrong("a2_accept", "not normalised", {"residual"}, {"residual": residual_not_normalised}),
    Wrong("a2_accept", "lenient", {"chain", "tree"}, {"accept": mutants.lenient}),
    Wrong("a2_accept", "argmax bonus", {"chain", "tree"}, {"accept": mutants.argmax_bonus}),
    Wrong("a2_accept", "argmax root", {"chain", "tree"}, {"accept": mutants.argmax_root}),
    Wrong("a2_accept", "judged by the distribution after it", {"greedy", "chain", "tree"},
          {"accept": mutants.probs_after_the_draft}),
    Wrong("a2_accept", "independent paths", {"greedy", "chain", "tree", "rounding"},
          {"accept": mutants.best_of_independent_paths}),
    Wrong("a2_accept", "siblings untried", {"greedy", "chain", "tree", "rounding"},
          {"accept": mutants.child_of_the_root_only}),
    Wrong("a2_accept", "no guard for rounding", {"rounding"},
          {"accept": rejects_where_nothing_is_left}),
]  # fmt: skip

# a3


def first_occurrence(tokens, k, ngram):
    for n in range(min(ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def only_whole_drafts(tokens, k, ngram):
    guess = lookup(tokens, k, ngram)
    return guess if len(guess) == k else []


def without_warpers(draft, cache, tokens, k, sampling, *more):
    plain = Sampling(sampling.temperature)
    return speculative.propose(draft, cache, tokens, k, plain, *more)


def like_the_target(*arguments, draft_sampling=None, **options):
    return speculative.speculative(*arguments, **options)


def from_no_row(method):
    """A method that ignores the cache it is given."""

    def started(*arguments, cache=None, **options):
        return method(*arguments, **options)

    return started


A3 = [
    Wrong("a3_draft_target", name, lost, mutant=True)
    for name, lost in (
        ("a greedy draft with its softmax", {"propose", "lossless"}),
        ("an unlikely draft dropped after its draw", {"propose", "lossless", "caches"}),
        ("a reduced vocabulary not renormalised", {"propose", "lossless"}),
        ("acceptance lenient by 0.8", {"lossless"}),
        ("the bonus has no warpers", {"lossless"}),
        ("top-k without effect", {"lossless"}),
        ("a stale draft row kept", {"lossless", "caches"}),
        ("one row committed too many", {"propose", "lossless", "caches"}),
    )
] + [
    Wrong("a3_draft_target", "no bonus token", {"formula"},
          {"tokens_per_pass": lambda alpha, gamma: sum(alpha**i for i in range(gamma))}),
    Wrong("a3_draft_target", "the drafts are free", {"formula"},
          {"speedup": lambda alpha, gamma, c: sum(alpha**i for i in range(gamma + 1))}),
    Wrong("a3_draft_target", "a draft without warpers", {"propose"},
          {"propose": without_warpers}),
    Wrong("a3_draft_target", "the draft draws as the target", {"lossless"},
          {"speculative": like_the_target}),
    Wrong("a3_draft_target", "kept rows unused", {"caches"},
          {"speculative": from_no_row(speculative.speculative)}),
    Wrong("a3_draft_target", "the first occurrence", {"lookup"}, {"lookup": first_occurrence}),
    Wrong("a3_draft_target", "only whole drafts", {"lookup"}, {"lookup": only_whole_drafts}),
]  # fmt: skip

# a4


def without_residual(self, x):
    return F.silu(self.linear(x))


def heads_with(forward):
    """Heads whose residual blocks compute something else."""
    block = changed(medusa.ResBlock, forward=forward)

    class Heads(medusa.Heads):
        def __init__(self, *sizes):
            with mock.patch.object(medusa, "ResBlock", block):
                super().__init__(*sizes)

    return Heads


def one_block_for_all(self, hidden, model):
    hidden = self[0][: self.layers](hidden)
    outputs = torch.stack([head[self.layers :](hidden) for head in self])
    return model.logits(outputs) if self.shared else outputs


def random_bias(*arguments):
    heads = medusa.untrained(*arguments)
    for head in heads:
        head[0].linear.bias.data.normal_()
    return heads


def off_by_one(tokens, prompt, heads):
    return distill.labels_of(tokens, prompt, heads + 1)[:, 1:]


def not_merged(root, paths, candidates):
    tokens, parents = [root], [-1]
    for path in paths:
        for depth, rank in enumerate(path):
            parents.append(len(tokens) - 1 if depth else 0)
            tokens.append(candidates[depth][rank])
    return Tree(tokens, parents)


def next_head(heads, *arguments):
    """Reads the heads one too early."""
    return medusa.propose(lambda *more: heads(*more).roll(1, 0), *arguments)


def any_number_of_nodes(heads, model, hidden, root, chosen, room):
    return medusa.propose(heads, model, hidden, root, chosen, len(chosen))


def leaves_only(accuracy, paths):
    inner = {path[:n] for path in paths for n in range(len(path))}
    return adaptive.expected(accuracy, [path for path in paths if path not in inner])


def breadth_first(accuracy, nodes):
    return sorted(adaptive.grow_tree(accuracy, 1000), key=lambda path: (len(path), path))[:nodes]


def by_depth(accuracy, nodes):
    return sorted(adaptive.grow_tree(accuracy, nodes), key=lambda path: (len(path), path))


def strictest(target, tree, epsilon, delta):
    return medusa.typical_path(target, tree, max(epsilon, delta), delta)


A4 = [
    Wrong("a4_medusa", name, {task}, names)
    for name, task, names in (
        ("no residual", "heads", {"Heads": heads_with(without_residual)}),
        ("one block for all", "heads", {"Heads": changed(medusa.Heads, forward=one_block_for_all)}),
        ("random bias", "start", {"untrained": random_bias}),
        ("labels off by one", "labels", {"labels_of": off_by_one}),
        ("paths not merged", "tree", {"from_paths": not_merged}),
        ("another head's tokens", "propose", {"propose": next_head}),
        ("more nodes than fit", "propose", {"propose": any_number_of_nodes}),
        ("leaves only", "expected", {"expected": leaves_only}),
        ("breadth first", "grow", {"grow_tree": breadth_first}),
        ("the best in another order", "grow", {"grow_tree": by_depth}),
        ("without the entropy", "typical", {"typical_path": strictest}),
    )
] + [Wrong("a4_medusa", "ranks of heads with p / q", {"propose"}, mutant=True)]

# a5


def separate_chains(root, chains):
    tokens, parents = [root], [-1]
    for chain in chains:
        parents += [len(tokens) - 1 + i if i else 0 for i in range(len(chain))]
        tokens += chain
    return Tree(tokens, parents)


def causal_window(lengths):
    distance, seen = lookahead.window_layout(lengths)
    return distance, torch.ones_like(seen).tril()


def without_current(self, current, said):
    grams = lookahead.Window.advance(self, current, said)
    return [gram for gram in grams if gram[0] != current]


def by_accepted(self, current, said):
    grams = lookahead.Window.advance(self, current, said)
    self.rows = [row[1:] for row in self.rows]
    return grams


def without_root(self, nodes):
    return [row for row in lookahead.Window.said_by(self, nodes) if row]


def first_in_first_out(self, gram):
    if list(gram[1:]) not in self.after(gram[0]):
        lookahead.Pool.add(self, gram)


def all_n_grams(self, tokens, n, new):
    lookahead.Pool.add_all(self, tokens, n, len(tokens))


def guess_not_moved(model, prompt, sampling, randomness, **options):
    """Every round guesses the prompt's tokens again."""
    original = lookahead.jacobi(model, prompt, sampling, randomness, **options)
    yield next(original)
    tokens = list(prompt)
    while True:
        again = lookahead.jacobi(model, tokens, sampling, randomness, block=options["block"])
        next(again)
        step = next(again)
        tokens += step.tokens
        yield step


A5 = [
    Wrong("a5_lookahead", name, lost, names)
    for name, lost, names in (
        ("the guess begins anew", {"jacobi"}, {"jacobi": guess_not_moved}),
        ("a causal window", {"window_layout", "together"}, {"window_layout": causal_window}),
        ("positions off by one", {"window_layout", "together"},
         {"window_layout": mistakes.window_off_by_one}),
        ("guesses see the window", {"beside"}, {"beside": mutants.guesses_see_the_window}),
        ("the current token forgotten", {"said_by"},
         {"Window": changed(lookahead.Window, said_by=without_root)}),
        ("column 0 not harvested", {"advance"},
         {"Window": changed(lookahead.Window, advance=without_current)}),
        ("moves two columns", {"advance"},
         {"Window": changed(lookahead.Window, advance=by_accepted)}),
        ("first in, first out", {"pool"},
         {"Pool": changed(lookahead.Pool, add=first_in_first_out)}),
        ("all n-grams again", {"pool"}, {"Pool": changed(lookahead.Pool, add_all=all_n_grams)}),
        ("an aliased pool", {"pool"},
         {"Pool": changed(lookahead.Pool, after=mistakes.aliased_pool)}),
        ("separate chains", {"trie"}, {"merged": separate_chains}),
        ("kept rows unused", {"jacobi"}, {"jacobi": from_no_row(lookahead.jacobi)}),
    )
]  # fmt: skip

# a6


def heads_loss_over_all(self, index):
    """One mean over the rows of all steps."""
    hidden, tokens, labels = self.gather(index)
    logits = self.steps(hidden, tokens)
    return F.cross_entropy(torch.cat(logits).flatten(0, 1), torch.cat(labels).flatten())


def one_step_late(self, index, k):
    return distill.Documents.labels(self, index, k + 1)


def labels_of_the_prompt_too(self, index, k):
    self.prompts, before = torch.zeros_like(self.prompts), self.prompts
    labels = distill.Documents.labels(self, index, k)
    self.prompts = before
    return labels


def always_parallel(self, n, k, keys):
    self.aligned, before = False, self.aligned
    plan = distill.MTPLoss.plan(self, n, k, keys)
    self.aligned = before
    return plan


def positions_stay(self, n, k, keys):
    """Aligned, but every step stands where the first stood."""
    plan = distill.MTPLoss.plan(self, n, k, keys)
    if not self.aligned:
        return plan
    cos, sin = self.head.rope(torch.arange(n)[None], self.target[0].dtype)
    return Pass(cos, sin, plan.visible, plan.cache)


def detached(self, hidden, tokens):
    layers = self.head.layers
    with mock.patch.object(self.head, "layers", lambda h, *more: layers(h.detach(), *more)):
        return distill.MTPLoss.steps(self, hidden, tokens)


def last_of_all_rows(self, hidden, tokens):
    """Rows are not committed."""
    fastmtp.Drafter.extend(self, hidden, tokens)
    self.cache.lengths = [max(self.cache.length - len(tokens), 0)]


def no_rollback(self, k, *more):
    drafts = fastmtp.Drafter.chain(self, k, *more)
    self.cache.lengths = [self.cache.length + max(k - 1, 0)]
    return drafts


A6 = [
    Wrong("a6_mtp", name, lost, names)
    for name, lost, names in (
        ("token before hidden", {"head"},
         {"Head": changed(fastmtp.Head, layers=mistakes.token_first)}),
        ("hidden before the norm", {"extend", "rounds"},
         {"Drafter": changed(fastmtp.Drafter, extend=mistakes.hidden_before_the_norm)}),
        ("rows not committed", {"extend", "rounds"},
         {"Drafter": changed(fastmtp.Drafter, extend=last_of_all_rows)}),
        ("stale rows", {"rounds"},
         {"Drafter": changed(fastmtp.Drafter, extend=mistakes.stale_rows,
                             chain=mistakes.chain_remembered)}),
        ("positions off by one", {"chain"},
         {"Drafter": changed(fastmtp.Drafter, chain=mistakes.position_off_by_one)}),
        ("no rollback", {"chain", "rounds"},
         {"Drafter": changed(fastmtp.Drafter, chain=no_rollback)}),
        ("q over the full vocabulary", {"chain"},
         {"Drafter": changed(fastmtp.Drafter, chain=mutants.probs_over_all)}),
        ("weights not normalised", {"weights"},
         {"step_weights": lambda steps, beta: [beta**k for k in range(steps)]}),
        ("labels a step late", {"labels"},
         {"Documents": changed(distill.Documents, labels=one_step_late)}),
        ("labels of the prompt", {"labels"},
         {"Documents": changed(distill.Documents, labels=labels_of_the_prompt_too)}),
        ("aligned is parallel", {"aligned"},
         {"MTPLoss": changed(distill.MTPLoss, plan=always_parallel)}),
        ("aligned, positions stay", {"aligned"},
         {"MTPLoss": changed(distill.MTPLoss, plan=positions_stay)}),
        ("detached steps", {"parallel"}, {"MTPLoss": changed(distill.MTPLoss, steps=detached)}),
        ("one mean over all steps", {"loss"},
         {"MTPLoss": changed(distill.MTPLoss, forward=heads_loss_over_all)}),
    )
]  # fmt: skip

# a7


def without_forced(texts, forced, size):
    return vocabulary.count(texts, [], size)


def the_most_frequent_votes(languages):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "SURE", 1.0)
        return vocabulary.votes(languages)


def of_the_whole_text(self, tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "WINDOW", 10**6)
        return vocabulary.Compressed.spoken(self, tokens)


def made_each_time(self, tokens):
    self.subsets.clear()
    return vocabulary.Compressed.pick(self, tokens)


def packed_in_front(self, probs):
    """Entry j is taken for token j."""
    return F.pad(probs, (0, self.size - len(probs)))


def half_of_it(self, probs):
    return 0.5 * vocabulary.Subset.scatter(self, probs)


def rows_of_others(self, hidden):
    return vocabulary.Subset.logits(self, hidden).roll(1, -1)


A7 = [
    Wrong("a7_vocabulary", name, lost, names)
    for name, lost, names in (
        ("forced tokens left out", {"count"}, {"count": without_forced}),
        ("rows of other tokens", {"subset"},  # worse drafts, and no output shows it
         {"Subset": changed(vocabulary.Subset, logits=rows_of_others)}),
        ("j taken for the token", {"subset", "lossless"},
         {"Subset": changed(vocabulary.Subset, full=lambda self, j: j)}),
        ("packed in front", {"scatter", "lossless"},
         {"Subset": changed(vocabulary.Subset, scatter=packed_in_front)}),
        ("sums to a half", {"scatter", "lossless"},
         {"Subset": changed(vocabulary.Subset, scatter=half_of_it)}),
        ("any majority votes", {"votes"}, {"votes": the_most_frequent_votes}),
        ("the whole text", {"spoken"},
         {"Compressed": changed(vocabulary.Compressed, spoken=of_the_whole_text)}),
        ("made each time", {"pick"},
         {"Compressed": changed(vocabulary.Compressed, pick=made_each_time)}),
    )
]  # fmt: skip

# a8: the reference's own verbs replaced

solution = load(FOLDER / "a8_engine" / "reference.py", "the_engine")


def forgets_the_kept_cache(model, proposer, prompt, sampling, randomness, *, cache=None):
    yield from solution.engine(model, proposer, prompt, sampling, randomness)


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = solution.black_box(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


A8 = [
    Wrong("a8_engine", name, lost, names)
    for name, lost, names in (
        ("acceptance lenient by 0.8", {"exact", "rounds"}, {"accept": mutants.lenient}),
        ("the bonus is an argmax", {"exact", "rounds"}, {"accept": mutants.argmax_bonus}),
        ("a draft judged by the distribution after it",
         {"exact", "greedy", "rounds", "limits", "black box"},
         {"accept": mutants.probs_after_the_draft}),
        ("the bonus has no warpers", {"exact", "black box"},
         {"probs": mutants.bonus_without_warpers}),
        ("a kept cache forgotten", {"cache", "rounds"}, {"engine": forgets_the_kept_cache}),
        ("runs past the end", {"black box"}, {"black_box": runs_past_the_end}),
    )
]  # fmt: skip

WRONG = A1 + A2 + A3 + A4 + A5 + A6 + A7 + A8


def cases() -> list:
    """The short tests have one of each assignment but the last, whose cases take seconds."""
    seen, params = {"a8_engine"}, []
    for wrong in WRONG:
        marks = [pytest.mark.slow] if wrong.assignment in seen else []
        params.append(pytest.param(wrong, id=f"{wrong.assignment}, {wrong.name}", marks=marks))
        seen.add(wrong.assignment)
    return params


@pytest.mark.parametrize("wrong", cases())
def test_a_wrong_answer_loses_the_points_of_its_task(wrong, monkeypatch):
    if wrong.mutant:
        (mutant,) = (m for m in MUTANTS if m.name == wrong.name)
        with mutant.apply():
            code, watch = grade(wrong.assignment, "minispec")
    else:
        module = load(FOLDER / wrong.assignment / "reference.py", "a_wrong_answer")
        for name, mistake in wrong.names.items():
            assert hasattr(module, name)
            setattr(module, name, mistake)
        code, watch = grade(wrong.assignment, "a_wrong_answer")
    assert code == 1 and lost(watch) == wrong.lost
