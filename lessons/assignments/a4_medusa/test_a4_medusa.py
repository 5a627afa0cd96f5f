"""Heads by their formula, trees against all trees, labels and typical paths by definition."""

import itertools
import math
import random

import pytest
import torch

from minispec.certify.toys import randomise, small_model
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import FullVocabulary, Subset
from minispec.sampling import OneHot
from minispec.tree import Tree

GRADED = {
    "heads": "ResBlock.__init__, ResBlock.forward, MedusaHeads.__init__, MedusaHeads.forward",
    "start": "new_heads", "labels": "labels_of", "tree": "from_paths",
    "propose": "propose, minispec.methods.medusa.best_candidates", "expected": "expected_tokens",
    "grow": "grow_tree, minispec.methods.adaptive.best_first", "typical": "typical_path",
}  # fmt: skip


def random_heads(impl, model, seed: int, layers: int, shared: bool):
    """Heads, and the random weights that they were given."""
    size, vocab = model.config.hidden_size, None if shared else model.config.vocab_size
    heads = impl.MedusaHeads(3, layers, size, vocab).double()
    names = {f"{k}.{i}.linear.{part}" for k in range(3) for i in range(layers) for part in
             ("weight", "bias")}  # fmt: skip
    names |= set() if shared else {f"{k}.{layers}.weight" for k in range(3)}
    found = set(heads.state_dict())
    assert found == names, (
        f"3 heads of {layers} blocks{', with lm_head' if shared else ''}: parameters "
        f"{sorted(names)}, not {sorted(found)}"
    )
    weights = randomise(MedusaHeads(3, layers, size, vocab).double(), seed).state_dict()
    heads.load_state_dict(weights)
    return heads, weights


def paths_of(tree: Tree) -> dict[tuple[int, ...], int]:
    """Tokens from below the root to a node -> the node."""
    paths = {0: ()}
    for node in range(1, len(tree)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    assert len(set(paths.values())) == len(paths), "two siblings hold the same token: merge them"
    return {path: node for node, path in paths.items()}


@pytest.mark.points(4, task="heads")
def test_a_head_is_its_residual_blocks_and_its_projection(impl, seeds):
    for seed, (layers, shared) in zip(seeds(6), itertools.product((0, 1, 3), (True, False))):
        model = small_model(seed)
        heads, weights = random_heads(impl, model, seed, layers, shared)
        hidden = model([3, 1, 4, 1, 5])  # (1, 5, d)
        logits = heads(hidden, model)
        assert logits.shape == (3, 1, 5, 24), f"(K, ..., V) is (3, 1, 5, 24), not {logits.shape}"
        for k in range(3):
            x = hidden
            for i in range(layers):
                y = x @ weights[f"{k}.{i}.linear.weight"].T + weights[f"{k}.{i}.linear.bias"]
                x = x + y * y.sigmoid()
            right = model.logits(x) if shared else x @ weights[f"{k}.{layers}.weight"].T
            assert (logits[k] - right).abs().max() < 1e-9, (
                f"head {k} of {layers} blocks{', with lm_head' if shared else ''}: each block adds "
                "SiLU(W x + b) to x, with this head's own W and b; the projection comes last"
            )


@pytest.mark.points(1, task="heads")
def test_one_hidden_state_gives_one_row_a_head(impl, seeds):
    (seed,) = seeds(1)
    model = small_model(seed)
    heads, _ = random_heads(impl, model, seed, 1, False)
    hidden = model([1, 2, 3])[0]
    one, all_ = heads(hidden[-1], model), heads(hidden, model)
    assert one.shape == (3, 24) and all_.shape == (3, 3, 24), "(..., d) -> (K, ..., V), any shape"
    assert (one - all_[:, -1]).abs().max() < 1e-9, "a row's logits depend on its neighbours"


@pytest.mark.points(2, task="start")
def test_untrained_heads_begin_as_the_lm_head(impl, seeds):
    for seed, (layers, shared) in zip(seeds(4), itertools.product((1, 2), (True, False))):
        model = impl.copy(small_model(seed))
        hidden = model([3, 1, 4])
        said, heads = model.logits(hidden), impl.new_heads(4, layers, model, shared)
        weights = heads.state_dict()
        assert len(heads) == 4 and len(weights) == 4 * (2 * layers + (not shared)), (
            "4 heads of the blocks asked for, each with a projection of its own unless shared"
        )
        assert {weight.dtype for weight in weights.values()} == {model.dtype}, "the model's type"
        assert (heads(hidden, model) - said).abs().max() < 1e-9, (
            "every head begins by saying what lm_head says: a block is the identity if its weight "
            "and its bias are 0"
        )
        heads.load_state_dict({name: weight + 1 for name, weight in weights.items()})
        assert torch.equal(model.logits(hidden), said), (
            "a copy of lm_head: training the heads must not change the target"
        )


@pytest.mark.points(3, task="labels")
def test_head_k_says_the_token_at_t_plus_k_plus_2(impl, seeds):
    for seed in seeds(20):
        rng = random.Random(seed)
        tokens = rng.sample(range(100), rng.randint(1, 9))
        prompt, heads = rng.randint(0, len(tokens)), rng.randint(1, 4)
        labels = impl.labels_of(list(tokens), prompt, heads)
        assert labels.shape == (len(tokens), heads), "(positions, heads)"
        for t, k in itertools.product(range(len(tokens)), range(heads)):
            at = t + k + 2
            learns = t + 2 >= prompt and at < len(tokens)
            right = tokens[at] if learns else -100
            assert int(labels[t, k]) == right, (
                f"{tokens}, prompt of {prompt}: head {k} at position {t} has label {right}, not "
                f"{int(labels[t, k])}: lm_head says t + 1, so head k says t + k + 2; a row with a "
                "label in the prompt has none"
            )


@pytest.mark.points(3, task="tree")
def test_rank_paths_pick_candidates_by_depth_and_share_their_beginnings(impl, seeds):
    for seed in seeds(20):
        rng = random.Random(seed)
        candidates = [rng.sample(range(100), 5) for _ in range(4)]
        chosen = {tuple(rng.choices(range(5), k=rng.randint(1, 4))) for _ in range(6)}
        nodes = {path[:n] for path in chosen for n in range(1, len(path) + 1)}
        paths = sorted(nodes, key=lambda path: (len(path), path))
        tree = impl.from_paths(7, [list(path) for path in paths], candidates)
        assert tree.tokens[0] == 7 and tree.parents[0] == -1, "node 0 is the root"
        right = [tuple(candidates[d][r] for d, r in enumerate(path)) for path in paths]
        found = paths_of(tree)
        assert set(found) - {()} == set(right), (
            f"paths {paths}: depth d takes its ranks from candidates[d - 1]; {found} is not {right}"
        )
        assert [found[path] for path in right] == list(range(1, len(tree))), "nodes in their order"


class RollingHeads:
    """Head k says the hidden state rolled by k; it counts its calls."""

    def __init__(self, heads: int):
        self.heads, self.calls = heads, 0

    def __len__(self) -> int:
        return self.heads

    def __call__(self, hidden, draft_head):
        self.calls += 1
        return torch.stack([hidden.roll(k, -1) for k in range(self.heads)])


@pytest.mark.points(3, task="propose")
def test_the_tree_holds_the_heads_best_tokens(impl, seeds):
    for seed in seeds(10):
        rng, model = random.Random(seed), small_model(seed, vocab=11)
        hidden = torch.randn(1, 11, generator=torch.Generator().manual_seed(seed)).double()
        heads, depth = RollingHeads(4), rng.randint(1, 4)
        chosen = {tuple(rng.choices(range(4), k=rng.randint(1, depth))) for _ in range(5)}
        nodes = {path[:n] for path in chosen for n in range(1, len(path) + 1)}
        paths, free_rows = sorted(nodes, key=lambda path: (len(path), path)), rng.choice([99, 3])
        ids = rng.sample(range(11), 11) if seed % 2 else list(range(11))  # of what is drafted from
        draft_head = Subset(model.lm_head.weight, ids) if seed % 2 else FullVocabulary(model)
        tree = impl.propose(heads, draft_head, hidden, 9, paths, free_rows)
        ranked = [hidden[0].roll(k).argsort(descending=True).tolist() for k in range(4)]
        best = [[ids[j] for j in row] for row in ranked]
        right = {tuple(best[d][r] for d, r in enumerate(path)) for path in paths[:free_rows]}
        assert tree.tokens[0] == 9 and set(paths_of(tree)) - {()} == right, (
            f"room for {free_rows} nodes: depth d + 1 holds head d's tokens by rank, best first, "
            "also in a tree less deep than there are heads; draft_head.to_full_ids turns indices "
            "into tokens"
        )
        assert all(tree.drawn_from(node) is None for node in range(len(tree))), (
            "a head's best tokens were not drawn from its softmax: they are one-hot, None"
        )
        assert heads.calls == 1, "call the heads once a round, on one hidden state"


@pytest.mark.points(1, task="propose")
def test_without_a_hidden_state_or_paths_the_root_stands_alone(impl):
    model, some, none = small_model(0), torch.zeros(1, 24).double(), torch.zeros(0, 24).double()
    for hidden, paths in ((none, [(0,), (1,)]), (some, [])):
        draft_head = FullVocabulary(model)
        tree = impl.propose(RollingHeads(2), draft_head, hidden, 5, paths, 99)
        assert (tree.tokens, tree.parents) == ([5], [-1]), f"the root alone, not {tree}"


def random_accuracy(seed: int, heads: int = 3, ranks: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(heads, ranks, generator=generator) / ranks).sort(descending=True).values


def gain(accuracy: torch.Tensor, path) -> float:
    return math.prod(float(accuracy[depth, rank]) for depth, rank in enumerate(path))


EVERY = [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]


@pytest.mark.points(2, task="expected")
def test_each_node_adds_the_chance_that_its_path_is_right(impl, seeds):
    for seed in seeds(10):
        accuracy = random_accuracy(seed)
        paths = sorted({p[:n] for p in random.Random(seed).sample(EVERY, 5) for n in (1, 2, 3)})
        right = 1 + sum(gain(accuracy, path) for path in paths)
        given = impl.expected_tokens(accuracy, paths)
        assert abs(given - right) < 1e-6, (
            f"{given:.4f}, not {right:.4f}: one token comes in any case, and each node, inner ones "
            "too, adds the product of the accuracies along its path"
        )
    one = impl.expected_tokens(random_accuracy(seed), [])
    assert one == 1.0, "without a tree a pass yields one token"


@pytest.mark.points(4, task="grow")
def test_the_grown_tree_is_the_best_of_all(impl, seeds):
    trees = [
        paths for paths in itertools.combinations(EVERY, 4)
        if all(len(p) == 1 or p[:-1] in paths for p in paths)
    ]  # fmt: skip
    for seed in seeds(4):
        accuracy = random_accuracy(seed)
        gains = {path: gain(accuracy, path) for path in EVERY}
        best = max(sum(map(gains.get, paths)) for paths in trees)
        grown = [tuple(path) for path in impl.grow_tree(accuracy, 4)]
        assert all(len(p) == 1 or p[:-1] in grown[:i] for i, p in enumerate(grown)), (
            f"{grown}: a parent must come before its child"
        )
        reached = sum(map(gains.get, grown))
        assert len(grown) == 4 and abs(reached - best) < 1e-6, (
            f"{grown} gains {reached:.4f}, the best tree of 4 nodes {best:.4f}: next comes the "
            "node with the largest product, whether sibling or child"
        )


@pytest.mark.points(1, task="grow")
def test_it_takes_the_best_first_and_stops_where_nothing_is_gained(impl, seeds):
    grown = impl.grow_tree(torch.tensor([[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]), 9)
    assert grown == [(0,), (0, 0)], f"a token that is never right gains nothing: not {grown}"
    deep = impl.grow_tree(torch.tensor([[0.9, 0.1], [0.8, 0.1]]), 3)
    assert deep == [(0,), (0, 0), (1,)], f"best first, whether sibling or child: not {deep}"
    (seed,) = seeds(1)
    whole = impl.grow_tree(random_accuracy(seed + 1) + 0.01, 1000)
    assert len(set(whole)) == len(whole) == 39, "3 heads of 3 ranks have 3 + 9 + 27 nodes"


@pytest.mark.points(3, task="typical")
def test_typical_acceptance_takes_the_longest_path_that_is_typical_enough(impl, seeds):
    for seed in seeds(30):
        rng = random.Random(seed)
        parents = [-1] + [rng.randrange(i) for i in range(1, 12)]
        tree = Tree([rng.randrange(5) for _ in parents], parents)
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        target = (rng.choice([1, 3]) * target).softmax(-1)
        epsilon, delta = rng.choice([(0.09, 0.3), (0.3, 0.9), (0.05, 2.0)])
        paths = {0: ([0], 1.0)}
        for node, parent in list(enumerate(parents))[1:]:
            entropy = -sum(p * math.log(p) for p in target[parent].tolist())
            p = float(target[parent, tree.tokens[node]])
            if parent in paths and p > min(epsilon, delta * math.exp(-entropy)):
                paths[node] = ([*paths[parent][0], node], paths[parent][1] * p)
        right = max(paths.values(), key=lambda found: (len(found[0]), found[1]))[0]
        given = impl.typical_path(target, tree, epsilon, delta)
        assert given == right, (
            f"ε={epsilon}, δ={delta}: {given} instead of {right}: p(x) > min(ε, δ exp(-H)) at "
            "every step, p being what follows the parent; the longest such path, of several the "
            "likeliest"
        )


@pytest.mark.points(1, task="typical")
def test_a_greedy_target_is_followed_by_typical_acceptance_too(impl):
    tree = Tree([9, 5, 3, 7, 8], [-1, 0, 0, 2, 2])
    path = impl.typical_path(OneHot([3, 3, 8, 0, 6], 10), tree, 0.09, 0.3)
    assert path == [0, 2, 4], (
        "a one-hot distribution has no entropy: 0 · log 0 is 0, and only its token is accepted"
    )
