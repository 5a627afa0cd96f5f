"""Masks against the definition, random cache rows, and a model's fresh prefill."""

import random

import pytest
import torch

from minispec.certify.toys import small_model

GRADED = {
    "depth": "layout", "mask": "layout", "place": "KVCache.place", "commit": "KVCache.commit",
    "truncate": "KVCache.truncate",
    "together": "layout, KVCache.place, KVCache.commit, KVCache.truncate",
}  # fmt: skip


def random_parents(rng: random.Random, n: int) -> tuple[int, ...]:
    return (-1, *(rng.randrange(i) for i in range(1, n)))


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """The node's path from the root, the node included."""
    return ([] if parents[node] < 0 else ancestors(parents, parents[node])) + [node]


def filled(impl, length: int, seed: int = 0, capacity: int = 23):
    """A cache full of random rows, `length` of which are committed; and copies of k and v."""
    cache = impl.KVCache(2, 3, 5, capacity, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 2, 1, capacity, 3, 5, generator=generator, dtype=torch.float64)
    cache.set_storage(kv.clone(), length)
    return cache, *kv


@pytest.mark.points(2, task="depth")
def test_depth_is_the_distance_from_the_root(impl, seeds):
    for seed in seeds(12):
        rng = random.Random(seed)
        parents = random_parents(rng, rng.randint(1, 17))
        depths, depth, _ = impl.layout(parents)
        for node in range(len(parents)):
            expected = len(ancestors(parents, node)) - 1
            assert depths[node] == expected, (
                f"parents {parents}: node {node} has depth {expected}, not {depths[node]}: one "
                "more than its parent, whatever its number"
            )
        assert depth.tolist() == list(depths), "the tensor and the list must hold the same depths"


@pytest.mark.points(4, task="mask")
def test_each_node_sees_its_ancestors_and_itself(impl, seeds):
    for n, seed in zip(range(17, 0, -1), seeds(17)):
        parents = random_parents(random.Random(seed), n)
        mask = impl.layout(parents)[2]
        assert mask.dtype == torch.bool and mask.shape == (n, n), "(n, n), bool"
        right = [[j in ancestors(parents, i) for j in range(n)] for i in range(n)]
        i, j = next(iter((mask != torch.tensor(right)).nonzero().tolist()), (0, 0))
        family = "itself" if i == j else f"its ancestor {j}"
        stranger = f"its sibling {j}" if j and parents[j] == parents[i] else f"the stranger {j}"
        does = f"does not see {family}" if right[i][j] else f"sees {stranger}"
        assert mask.tolist() == right, (
            f"row {i} {does}: the mask must hold a node's ancestors and itself; parents {parents}"
        )


@pytest.mark.points(2, task="place")
def test_rows_go_behind_the_committed_ones_and_stand_at_their_depth(impl, seeds):
    for seed in seeds(12):
        rng = random.Random(seed)
        length, n = rng.randint(0, 12), rng.randint(1, 9)
        cache, *_ = filled(impl, length)
        parents = random_parents(rng, n)
        depth = torch.tensor([len(ancestors(parents, i)) - 1 for i in range(n)])
        slots, positions, _ = cache.place(n, depth, torch.eye(n, dtype=torch.bool))
        assert slots.tolist() == [list(range(length, length + n))], (
            f"{length} rows are committed: the {n} new ones go to {length}, {length + 1}, …, "
            f"not to {slots.tolist()}"
        )
        assert positions.tolist() == [[length + d for d in depth.tolist()]], (
            "a node's position is length + depth (siblings share it), not its slot"
        )
        assert cache.length == length, "a pass never advances: only commit does"


@pytest.mark.points(3, task="place")
def test_rows_see_the_committed_ones_and_what_the_mask_says(impl, seeds):
    for seed in seeds(12):
        rng = random.Random(seed)
        length, n = rng.randint(0, 12), rng.randint(1, 9)
        cache, *_ = filled(impl, length)
        mask = torch.tensor([[rng.random() < 0.5 for _ in range(n)] for _ in range(n)])
        visible = cache.place(n, torch.arange(n), mask)[2]
        assert visible.shape == (1, 1, n, length + n), (
            f"visible is {tuple(visible.shape)}, not (1, 1, {n}, {length + n}): rows behind this "
            "pass are stale, and nobody may see them"
        )
        seen = visible[0, 0]
        assert seen[:, :length].all(), "every row sees every committed row"
        assert torch.equal(seen[:, length:], mask), (
            "scratch rows see each other as the mask says: its column j is cache row length + j"
        )


@pytest.mark.points(1, task="place")
def test_a_pass_that_does_not_fit_is_refused(impl):
    cache, *_ = filled(impl, length=20)
    eye = torch.eye(4, dtype=torch.bool)
    cache.place(3, torch.arange(3), eye[:3, :3])
    with pytest.raises(ValueError):
        cache.place(4, torch.arange(4), eye)


@pytest.mark.points(5, task="commit")
def test_the_path_s_rows_follow_the_committed_ones(impl, seeds):
    for seed in seeds(30):
        rng = random.Random(seed)
        length = rng.randint(0, 10)
        path = sorted(rng.sample(range(12), rng.randint(0, 6)))
        cache, k, v = filled(impl, length, seed)
        cache.commit(list(path))
        kept = [*range(length), *(length + row for row in path)]
        assert cache.length == len(kept), (
            f"{length} rows and path {path} make {len(kept)}, not {cache.length}: what counts "
            "is the path's length, not its last row"
        )
        for name, rows, before in (("k", torch.stack(cache.k), k), ("v", torch.stack(cache.v), v)):
            for at, source in enumerate(kept):
                assert torch.equal(rows[:, :, at], before[:, :, source]), (
                    f"{length} committed rows, path {path}: row {at} of {name} must be what row "
                    f"{source} was, in every layer; read a row before you overwrite it"
                )


@pytest.mark.points(2, task="truncate")
def test_truncate_moves_the_boundary_and_nothing_else(impl):
    for length in range(9):
        cache, k, v = filled(impl, length=8)
        cache.truncate(length)
        assert cache.length == length, f"truncate({length}) leaves {length} committed rows"
        same = torch.equal(torch.stack(cache.k), k) and torch.equal(torch.stack(cache.v), v)
        assert same, "truncate moves the boundary and changes no row"


@pytest.mark.points(5, task="together")
def test_after_random_rounds_the_cache_equals_a_fresh_prefill(impl, seeds):
    """Trees scored, paths committed, tails forgotten: no row may show what happened before."""
    for seed in seeds(4):
        rng, model = random.Random(seed), small_model(seed)
        c = model.config
        cache = impl.KVCache(c.layers, c.kv_heads, c.head_dim, 64, dtype=torch.float64)
        tokens: list[int] = []
        for round_ in range(8):
            if tokens and rng.random() < 0.3:
                tokens = tokens[: rng.randint(0, len(tokens))]
                cache.truncate(len(tokens))
            parents = random_parents(rng, rng.randint(1, 9))
            nodes = rng.choices(range(24), k=len(parents))
            _, depth, mask = impl.layout(parents)
            model(nodes, cache, depth, mask)
            path = ancestors(parents, rng.randrange(len(parents)))
            cache.commit(path)
            tokens += [nodes[i] for i in path]
            assert cache.length == len(tokens), (
                f"seed {seed}, round {round_}: {cache.length} rows for {len(tokens)} tokens"
            )
            fresh = model.new_cache()
            model(tokens, fresh)  # scratch rows, but rows
            for name in ("k", "v"):
                both = (torch.stack(getattr(x, name)) for x in (cache, fresh))
                kept, right = (rows[:, :, : len(tokens)] for rows in both)
                worst = (kept - right).abs().amax((0, 1, 3, 4))
                wrong = (worst > 1e-10).nonzero().flatten().tolist()
                assert float(worst.max()) < 1e-10, (
                    f"seed {seed}, round {round_}: row {wrong[0]} of {name} is not what a fresh "
                    f"pass over the {len(tokens)} committed tokens writes"
                )
