"""Compiled passes compute what the operators do: the same model without graphs is the oracle."""

import os
import random
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model, random_tokens
from test_model import random_tree
from torch._dynamo.testing import CompileCounterWithBackend

from minispec import compiled
from minispec.certify import random_head
from minispec.compiled import (
    Compiled,
    Function,
    compile_head,
    compile_model,
    digest,
    graph_on_gpu,
    reads_32_bits,
)
from minispec.errors import UserError
from minispec.fastmtp import fastmtp
from minispec.generate import decode
from minispec.linear import pack, packable
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded


def first_tokens(steps, n: int) -> list[int]:
    found: list[int] = []
    while len(found) < n:
        found += next(steps).tokens
    return found[:n]


def interpreted(module, whole: bool) -> None:
    """Graphs that run operator by operator: the plumbing without a compiler."""
    module.compiled = Compiled(module, Function(module), whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_plumbing_equals_the_plain_pass_on_random_rounds(whole, seed):
    rng = random.Random(seed)
    plain, graphed = random_model(seed), random_model(seed)
    interpreted(graphed, whole)
    caches = plain.new_cache(200), graphed.new_cache(200)
    prompt = random_tokens(rng.randint(1, 90), seed)  # of more than MOST rows: as ever
    for model, cache in zip((plain, graphed), caches):
        model.prefill(prompt, cache)
    for _ in range(6):
        tree = random_tree(rng, rng.randint(1, 12))
        ours, theirs = (
            model(tree.tokens, cache, tree.depth, tree.mask)
            for model, cache in zip((graphed, plain), caches[::-1])
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        node, path = len(tree) - 1, []
        while node >= 0:
            path, node = [node, *path], tree.parents[node]
        for cache in caches:
            cache.commit(path)
    for ours, theirs in zip(caches[0].k, caches[1].k):
        n = caches[0].length
        torch.testing.assert_close(ours[:, :n], theirs[:, :n], rtol=0, atol=1e-12)


def test_fastmtp_through_graphs_says_the_same():
    model = random_model(1)
    head, prompt = random_head(model, 3), random_tokens(9)
    plain = first_tokens(fastmtp(model, prompt, Sampling(), Seeded(0), head=head, k=3), 30)
    interpreted(model, False)
    interpreted(head, False)
    graphed = first_tokens(fastmtp(model, prompt, Sampling(), Seeded(0), head=head, k=3), 30)
    assert graphed == plain


def test_batches_run_as_without_graphs():
    model = random_model()
    model.compiled = Compiled(model, None)  # would fail if called
    cache = model.new_cache(32, batch=2)
    model(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache)
    model([1, 2, 3])  # and passes without a cache


def test_conversion_drops_the_graphs():
    model = random_model()
    interpreted(model, False)
    assert model.double().compiled is None


def test_the_digest_knows_weights_config_and_how_they_are_kept(monkeypatch):
    a, b = random_model(0), random_model(1)
    assert digest(a) == digest(random_model(0)) != digest(b)
    here = digest(a)
    assert digest(random_model(0, norm_eps=2e-5)) != here
    for place in "torch.get_num_threads", "torch.__version__", "minispec.compiled.processor":
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda: "another")
            assert digest(a) != here
    for place, other in (("compiled.MOST", 128), ("int8.multiplies_bytes", lambda: "perhaps")):
        with monkeypatch.context() as patch:
            patch.setattr(f"minispec.{place}", other)
            assert digest(a) != here
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    kinds = {"float32": torch.float32, "halves": torch.bfloat16, "int8": torch.float32}
    found = [
        digest(random_model(seed).to(dtype).float().prepare(quantize=kind == "int8"))
        for seed in (0, 1, 0)
        for kind, dtype in kinds.items()
    ]
    assert found[:3] == found[6:] and len(set(found)) == 6


def test_there_are_graphs_for_two_kinds_of_device():
    with pytest.raises(UserError, match="there for cpu and cuda, not for meta"):
        compile_model(random_model().to("meta"))


def test_a_graph_is_handed_its_tensors_in_the_order_of_the_export(monkeypatch):
    seen = []
    run = SimpleNamespace(loader=SimpleNamespace(run=lambda tensors: [seen.append(tensors)]))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: run)
    graph = compiled.opened("x.pt2")
    arguments = (["a", "b"], "cos", "sin", "visible", "slots", ["k0", "k1"], ["v0", "v1"])
    graph(*arguments)
    assert seen == [torch.utils._pytree.tree_leaves(arguments)]


def test_no_folder_no_compiler_or_a_failing_one_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        compile_model(random_model().float())

    def broken(*arguments, **options):
        raise RuntimeError("an internal error of g++")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", broken)
    model = random_model(0).float()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        compile_model(model)
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(UserError, match="failed .RuntimeError: an internal error.* go on without"):
        compile_model(model)
    assert not list(tmp_path.rglob("*.pt2"))
    model([1, 2, 3], model.new_cache())  # and the model still works
    path = compiled.cache_folder() / f"{digest(model)}.pt2"
    path.write_text("torn")
    with pytest.raises(UserError, match="cannot be opened .* delete it"):
        compile_model(model)


def test_a_graph_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    """Inductor read weights in another order than they lay in, without a word."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = random_model(0).float()

    def right(*arguments):
        return Function(model)(*arguments)

    def lost(*arguments):
        return right(*arguments) * torch.nan

    def scaled(*arguments):
        return right(*arguments) * 1.01

    def mask_unread(inputs, cos, sin, visible, *others):
        return right(inputs, cos, sin, torch.zeros_like(visible), *others)

    def cache_unwritten(*arguments):
        *others, keys, values = arguments
        return right(*others, [x.clone() for x in keys], values)

    mistake = right

    def written(function, arguments, path):
        path.write_text("")

    def read(path):
        return lambda *arguments: mistake(*arguments)

    monkeypatch.setattr(compiled, "check_compiler", lambda device: None)
    monkeypatch.setattr(compiled, "ahead_of_time", written)
    monkeypatch.setattr(compiled, "opened", read)
    compile_model(model)
    (kept,) = tmp_path.rglob("*.pt2")
    kept.unlink()
    for mistake in lost, scaled, mask_unread, cache_unwritten:
        with pytest.raises(UserError, match="off by .* without --compile"):
            compile_model(model)
        assert not list(tmp_path.rglob("*.pt2"))


def test_a_single_row_has_a_graph_of_its_own_where_weights_need_32_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, ran = [], []

    def written(function, arguments, path):
        made.append(len(arguments[4]))  # rows
        path.write_text("")

    def read(path):
        return lambda inputs, *others: ran.append((path.stem.endswith("-one"), inputs[0].shape[1]))

    monkeypatch.setattr(compiled, "check_compiler", lambda device: None)
    monkeypatch.setattr(compiled, "check", lambda module, examples, graph: None)
    monkeypatch.setattr(compiled, "ahead_of_time", written)
    monkeypatch.setattr(compiled, "opened", read)
    monkeypatch.setattr(compiled, "reads_32_bits", lambda module: True)
    for _ in range(2):  # the second time only what is missing
        compile_model(model := random_model(0).float())
        one, several = sorted(tmp_path.rglob("*.pt2"), key=lambda file: "one" not in file.stem)
        several.unlink()
    assert sorted(made[:2]) == [1, 5] and made[2:] == [5]
    for n in (1, 2, compiled.MOST):
        model.compiled.graph([torch.zeros(1, n)])
    assert ran == [(True, 1), (False, 2), (False, compiled.MOST)]
    monkeypatch.setattr(compiled, "reads_32_bits", lambda module: False)
    compile_model(model := random_model(0).float())
    model.compiled.graph([torch.zeros(1, 1)])
    assert ran[-1] == (False, 1)


def test_which_layers_read_32_bits(monkeypatch):
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    size = torch.nn.Linear(64, 64)
    packs = packable(size.weight) and pack(size.weight.detach()) is not None
    assert reads_32_bits(random_model(0).float().prepare()) == packs
    for other in (random_model(0).float(), random_model(0).float().prepare(quantize=True),
                  random_model(0).bfloat16().prepare(),
                  random_model(0).bfloat16().float().prepare()):  # fmt: skip
        assert not reads_32_bits(other)
    head_alone = random_model(0).float().prepare_head()
    assert head_alone.head is not None and not reads_32_bits(head_alone)


def test_files_that_nobody_opens_are_deleted_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, days = compiled.cache_folder(), 24 * 3600
    for name, age in (("of_today.pt2", 1), ("of_old.pt2", 31), ("killed.7.part.pt2", 31)):
        (folder / name).write_text("")
        os.utime(folder / name, times=(time.time() - age * days,) * 2)
    (folder / "a_folder").mkdir()
    os.utime(folder / "a_folder", times=(0, 0))
    opened = folder / f"{digest(random_model(0))}.pt2"
    monkeypatch.setattr(compiled, "check_compiler", lambda device: None)
    monkeypatch.setattr(compiled, "ahead_of_time", lambda function, arguments, path: path.touch())
    monkeypatch.setattr(compiled, "check", lambda module, examples, graph: None)
    monkeypatch.setattr(compiled, "opened", lambda path: None)
    for _ in range(2):
        compile_model(random_model(0))
        kept = {file.name for file in folder.iterdir() if file.is_file()}
        assert kept == {"of_today.pt2", opened.name}
        assert time.time() - opened.stat().st_mtime < days
        os.utime(opened, times=(0, 0))


def test_gpu_graphs_compute_the_same_where_the_backend_is_eager():
    """CUDA graphs need a GPU; what is captured does not."""
    plain, graphed = random_model(2, context=150), random_model(2, context=150)
    counter = CompileCounterWithBackend("aot_eager")  # it knows that layers share a cache's memory
    graph = graph_on_gpu(graphed, backend=counter)
    graphed.compiled = Compiled(graphed, graph, whole=True)
    with torch.inference_mode():
        for _ in range(2):
            caches = plain.new_cache(), graphed.new_cache(40)
            assert caches[1].capacity == 150  # rounded up, as far as that goes
            for n in (3, 1, 4, 64, 1, 7, 33, 2, *(3,) * 10, 1, 2, 1, 1):
                tokens = random_tokens(n, n)
                ours, theirs = graphed(tokens, caches[1]), plain(tokens, caches[0])
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
                for cache in caches:
                    cache.commit(list(range(n)))
            assert caches[1].room == 0 and counter.frame_count == 5  # of 1, 2, 4, 8 and 64 rows


def test_memory_of_caches_is_used_again_where_its_place_counts():
    model = random_model()
    interpreted(model, True)
    first = model.new_cache(100)
    model.prefill([1, 2, 3], first)
    place, second = first.k[0].data_ptr(), model.new_cache(100)
    assert second.k[0].data_ptr() != place  # while the first is there
    del first
    with torch.inference_mode():
        third = model.new_cache(90)
        assert third.k[0].data_ptr() == place and third.length == 0 and not third.k[0].any()
    model([1, 2], third)  # written outside of inference mode, too
    assert model.new_cache(100, batch=2).k[0].shape[0] == 2


@pytest.mark.gpu
def test_on_a_gpu_graphs_decode_what_eager_passes_do():
    """In float64, so that tokens must be equal; every run has a cache of its own."""
    plain, graphed = random_model(2).cuda(), random_model(2).cuda()
    draft, head = random_model(3).cuda(), random_head(plain, 5).cuda()
    for each in (graphed, draft):
        compile_model(each)
    compile_head(head, graphed)
    assert all(each.compiled is not None for each in (graphed, draft, head))
    methods = {
        "autoregressive": {}, "speculative": {"draft": draft, "k": 3},
        "lookahead": {"window": 2, "ngram": 3, "guesses": 2}, "fastmtp": {"head": head, "k": 2},
    }  # fmt: skip
    for prompt in ([1, 2, 3], [4]):
        expected = decode(plain, None, prompt, max_new_tokens=30).tokens
        for method, options in methods.items():
            run = decode(graphed, None, prompt, method, max_new_tokens=30, **options)
            assert run.tokens == expected, method
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", "packed", "halves", "int8", "int8 without products of bytes"]
)
def test_compiled_ahead_of_time(tmp_path, monkeypatch, kind):
    """The real thing, with a C++ compiler: a target and a head, chains and trees; then kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("minispec.int8.LARGE", 0)
    if "without" in kind:
        monkeypatch.setattr("minispec.int8.multiplies_bytes", lambda: False)
    quantize = "int8" in kind
    if kind != "plain":
        monkeypatch.setattr("minispec.linear.SMALL", 0)

    def made() -> Transformer:
        model = random_model(3, hidden_size=64, intermediate_size=96, head_dim=16)
        return stored(model).prepare(quantize)

    def stored(module):
        return module.to(torch.bfloat16 if kind == "halves" else torch.float32).float()

    plain, graphed = made(), made()
    heads = [stored(random_head(plain, 5)).prepare() for _ in range(2)]
    compile_model(graphed)
    compile_head(heads[1], graphed)
    files = sorted(file.stem.partition("-")[2] for file in tmp_path.rglob("*.pt2"))
    assert files == ["", ""] + ["one"] * sum(map(reads_32_bits, (plain, heads[0])))
    rng = random.Random(0)
    caches = plain.new_cache(300), graphed.new_cache(300)
    # sums in float32 may be in any order
    with torch.no_grad():
        for n in (1, 1, 2, 7, 30, 64, 1, 90, 3):
            tree = random_tree(rng, n)
            expected = plain(tree.tokens, caches[0], tree.depth, tree.mask)
            found = graphed(tree.tokens, caches[1], tree.depth, tree.mask)
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
            for cache in caches:
                cache.commit([0])
    monkeypatch.setattr(compiled, "ahead_of_time", None)  # the second time nothing is compiled
    compile_model(made())
    prompt = random_tokens(9)
    said = [
        first_tokens(fastmtp(m, prompt, Sampling(), Seeded(0), head=h, k=3), 20)
        for m, h in zip((plain, graphed), heads)
    ]
    assert said[0] == said[1]
