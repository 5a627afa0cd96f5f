"""Decoding with CUDA graphs, on the simulated device."""

import copy
import pickle
import random
from collections.abc import Iterator

import pytest
import simulated
import torch
from conftest import (
    kinds_of_cases,
    method_options,
    random_model,
    random_tokens,
    random_tree,
    waits_of,
)
from simulated import DEVICE, Simulated, SimulatedDevice

from minispec import Sampling
from minispec.cache import KVCache
from minispec.certify.methods import cases
from minispec.certify.toys import two_languages
from minispec.fast import Int8Linear, captured, optimize_drafter, swap
from minispec.fast.captured import Graphs, capture_passes
from minispec.generate import METHODS, decode, stream
from minispec.methods.adaptive import AdaptiveNodes
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.tree import Step

# a policy of nodes expands another tree with graphs, of a static shape
METHOD_OF = {
    case: method for method in METHODS
    for case, options in kinds_of_cases(method, random_model(5, layers=1)).items()
    if AdaptiveNodes not in map(type, options.values()) and "probing" not in case
}  # fmt: skip


@pytest.fixture(autouse=True)
def simulated_graphs(monkeypatch):
    monkeypatch.setattr(captured, "capture", simulated.capture)
    monkeypatch.setattr(captured, "warm_up", lambda run: run())
    monkeypatch.setattr(captured, "addresses", simulated.addresses)
    with SimulatedDevice():
        yield


def captured_model(seed: int = 5) -> Transformer:
    model = random_model(seed, layers=1).to(DEVICE)
    capture_passes(model)
    return model


def captured_options(method: str, model: Transformer) -> dict:
    """A draft or heads that decode with graphs like the model."""
    options = method_options(model).get(method, {})
    for value in options.values():
        if isinstance(value, torch.nn.Module):
            capture_passes(value)
    return options


def options_of(case: str, model: Transformer) -> dict:
    """The options of a case, for a model on the host."""
    return cases.fresh_options(kinds_of_cases(METHOD_OF[case], model)[case])


def captured_case(case: str, model: Transformer) -> dict:
    """The same options for a captured model."""
    options = options_of(case, random_model(5, layers=1))
    for name, value in options.items():
        if isinstance(value, torch.nn.Module):
            capture_passes(value.to(DEVICE))
        elif name == "vocabulary":
            options[name] = two_languages(model)
    return options


def graphs_of(model: Transformer) -> list[tuple]:
    """The keys of a model's graphs."""
    return list(model.graphs.captured)


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_replays_equal_plain_passes(seed):
    """Random chains and trees, with commits, in each span of a cache."""
    rng, model, plain = random.Random(seed), captured_model(seed), random_model(seed, layers=1)
    cache, expected = model.new_cache(700), plain.new_cache(700)
    for length in rng.randint(0, 240), 250, 508, 690:
        tokens = random_tokens(length)
        for one, its_cache in (model, cache), (plain, expected):
            its_cache.truncate(0)
            one.prefill(tokens, its_cache)
        for _ in range(3):
            tree = random_tree(rng, rng.randint(1, min(9, expected.free_rows)))
            shape = (tree.depth, tree.mask) if rng.random() < 0.7 else ()
            hidden = model(tree.tokens, cache, *shape).cpu()
            assert torch.allclose(hidden, plain(tree.tokens, expected, *shape), atol=1e-10)
            path = sorted({0, rng.randrange(len(tree))})
            cache.commit(path)
            expected.commit(path)
    assert {span for _, _, span, *_ in graphs_of(model)} >= {256, 512}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", METHOD_OF)
def test_a_method_decodes_as_without_graphs_and_captures_them_once(case, temperature):
    settings = {"temperature": temperature, "max_new_tokens": 8, "seed": 3}
    plain, model, prompt = random_model(5, layers=1), captured_model(), random_tokens(9)
    expected = decode(plain, None, prompt, METHOD_OF[case], **settings, **options_of(case, plain))
    trees, graphs = [(x.tree.tokens, x.tree.parents) for x in expected.rounds], []
    options = captured_case(case, model)
    for _ in range(2):
        run = decode(model, None, prompt, METHOD_OF[case], **settings,
                     **cases.fresh_options(options))  # fmt: skip
        assert run.tokens == expected.tokens
        assert [(x.tree.tokens, x.tree.parents) for x in run.rounds] == trees
        graphs.append(graphs_of(model))
    assert graphs[0] == graphs[1] != []


FIXED = [case for case, method in METHOD_OF.items() if all(
    isinstance(x, int | list | torch.nn.Module)
    for x in options_of(case, random_model(5, layers=1)).values()
)]  # fmt: skip


@pytest.mark.parametrize("case", FIXED)
def test_a_greedy_round_takes_few_launches(case):
    """At most ten, and more if the host waits for the drafts: two for a head's tree, more for those
    of a draft model. A tree's path may have to be moved to the end of the cache."""
    model = captured_model()
    options = captured_case(case, model)
    waits = waits_of(METHOD_OF[case], options)[0]
    most = 10 if waits == 1 else 12 if options.get("head") else 22
    rounds, few = greedy_rounds(model, METHOD_OF[case], options), []
    for _ in range(12):
        Simulated.launches = Simulated.synchronisations = 0
        step = next(rounds)
        if step.path != list(range(len(step.path))):
            Simulated.launches -= 7
        assert Simulated.launches <= most or Simulated.launches > 30  # not all from graphs
        few.append(Simulated.launches <= most and Simulated.synchronisations == waits)
    assert any(few)


def greedy_rounds(model: Transformer, method: str, options: dict) -> Iterator[Step]:
    rounds = METHODS[method](model, random_tokens(9), Sampling(), Seeded(), **options)
    while True:
        with torch.inference_mode():
            step = next(rounds)
        yield step


@pytest.mark.slow
def test_runs_that_take_turns_have_their_own_memory():
    model, plain = captured_model(), random_model(5, layers=1)
    prompts = [random_tokens(9), random_tokens(12, seed=2)]
    options = captured_options("fastmtp", model) | {"max_new_tokens": 8}
    runs = [stream(model, None, prompt, "fastmtp", **options) for prompt in prompts]
    for _ in zip(*runs):
        pass
    for run, prompt in zip(runs, prompts):
        expected = decode(plain, None, prompt, max_new_tokens=8).tokens
        for _ in run:
            pass
        assert run.tokens == expected


def test_a_kept_cache_keeps_its_graphs():
    model, plain = captured_model(), random_model(5, layers=1)
    cache, options = model.new_cache(128), captured_options("fastmtp", model)
    options |= {"cache": cache, "max_new_tokens": 6}
    first = decode(model, None, random_tokens(9), "fastmtp", **options)
    before = set(graphs_of(model))
    prompt = random_tokens(9) + first.tokens + [3, 1]
    second = decode(model, None, prompt, "fastmtp", **options)
    assert second.tokens == decode(plain, None, prompt, max_new_tokens=6).tokens
    assert before and set(graphs_of(model)) >= before


def test_an_unused_cache_gives_its_memory_to_the_next():
    graphs = Graphs()

    def new_cache(capacity: int) -> KVCache:
        return graphs.new_cache(1, 2, 4, capacity, torch.float64, DEVICE)

    def key(cache: KVCache) -> tuple:
        return captured.memory_key(cache)

    first, second = new_cache(100), new_cache(200)
    assert key(first) != key(second) and graphs.unused == []
    first.kv.fill_(7)
    copied, before = copy.copy(first), key(first)
    del first
    assert graphs.unused == []
    del copied
    third = new_cache(256)
    assert key(third) == before and third.capacity == 256 and not third.kv.cpu().any()
    graphs.captured["key"] = "graph"
    del second
    fourth = new_cache(257)  # too large for what is free
    assert graphs.captured == {} and graphs.unused == []
    del fourth
    assert [memory.capacity for memory in graphs.unused] == [512]


def test_without_graphs_decoding_goes_on(monkeypatch, capsys):
    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "capture", fails)
    model = captured_model()
    for method in "autoregressive", "fastmtp":
        run = decode(model, None, random_tokens(9), method, max_new_tokens=8,
                     **captured_options(method, model))  # fmt: skip
        expected = decode(random_model(5, layers=1), None, random_tokens(9), max_new_tokens=8)
        assert run.tokens == expected.tokens
    assert capsys.readouterr().err.count("CUDA graphs do not work here") == 2  # model, head


def test_a_failed_capture_affects_no_other_model(monkeypatch):
    first, second, works = captured_model(), captured_model(6), captured.capture

    def fails(run):
        raise RuntimeError("this model cannot be captured")

    monkeypatch.setattr(captured, "capture", fails)
    decode(first, None, random_tokens(9), max_new_tokens=4)
    monkeypatch.setattr(captured, "capture", works)
    decode(second, None, random_tokens(9), max_new_tokens=4)
    assert not graphs_of(first) and graphs_of(second)


@pytest.mark.parametrize("assign", ["a parameter", "load_state_dict"])
@pytest.mark.parametrize("method", ["autoregressive", "medusa", "fastmtp"])
def test_new_weights_get_new_graphs(method, assign):
    """In the model or in its heads, and in a cache with graphs."""
    model, other = captured_model(5), random_model(6, layers=1).to(DEVICE)
    options, others = captured_options(method, model), method_options(other).get(method, {})
    for _ in range(2):
        decode(model, None, random_tokens(9), method, max_new_tokens=8, **options)
    pairs = [(model, other), *((options[name], others[name]) for name in options)]
    for network, source in pairs:
        if not isinstance(network, torch.nn.Module):
            continue
        if assign == "load_state_dict":
            network.load_state_dict(source.state_dict(), assign=True)
            continue
        for (name, old), new in zip(network.named_parameters(), source.parameters()):
            module, _, last = name.rpartition(".")
            setattr(network.get_submodule(module), last, torch.nn.Parameter(new.detach()))
    run = decode(model, None, random_tokens(9), method, max_new_tokens=8, **options)
    expected = decode(other, None, random_tokens(9), method, max_new_tokens=8, **others)
    assert (run.tokens, run.stats["accepted"]) == (expected.tokens, expected.stats["accepted"])


def test_copies_have_no_graphs():
    model = captured_model()
    cache = model.new_cache(64)
    with torch.no_grad():
        model([1, 2, 3], cache)
    options = captured_options("medusa", model) | captured_options("fastmtp", model)
    for network in model, *options.values():
        assert network.graphs is not None and copy.deepcopy(network).graphs is None
    assert graphs_of(model) and pickle.loads(pickle.dumps(model.graphs)) is None


@torch.no_grad()
def test_a_cache_that_another_model_uses():
    """Models of one layout, of which one is quantised later, share a cache."""
    first, second, cache = captured_model(5), captured_model(6), captured_model(5).new_cache(64)
    plain = {first: random_model(5, layers=1), second: random_model(6, layers=1)}

    def check(model: Transformer) -> None:
        cache.truncate(0)
        hidden = model([1, 2], cache).cpu()
        assert torch.allclose(hidden, plain[model]([1, 2], plain[model].new_cache(64)))

    for model in first, second, first:
        check(model)
    for model in first, plain[first]:
        swap(model, Int8Linear)
    check(first)
    assert (len(graphs_of(first)), len(graphs_of(second))) == (2, 1)


@pytest.mark.slow
def test_a_head_that_two_models_use():
    first, second = captured_model(5), captured_model(6)
    head, expected = captured_options("fastmtp", first), []
    for model in random_model(5, layers=1), random_model(6, layers=1):
        options = method_options(random_model(5, layers=1))["fastmtp"]
        expected.append(decode(model, None, random_tokens(9), "fastmtp", **options,
                               max_new_tokens=20, temperature=1.0))  # fmt: skip
    for model, run in zip((first, second), expected):
        again = decode(model, None, random_tokens(9), "fastmtp", **head, max_new_tokens=20,
                       temperature=1.0)  # fmt: skip
        assert (again.tokens, again.stats["accepted"]) == (run.tokens, run.stats["accepted"])


def test_a_model_of_another_dtype_gets_other_memory():
    model = captured_model()
    decode(model, None, random_tokens(9), max_new_tokens=4)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.to(torch.float32)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert decode(model, None, random_tokens(9), max_new_tokens=4).stats["dtype"] == "float32"


@torch.no_grad()
def test_a_cache_has_the_interface_of_a_plain_one():
    model, plain = captured_model(), random_model(5, layers=1)
    assert model.new_cache(1).kv.shape == plain.new_cache(1).kv.shape  # bench counts its bytes
    results = []
    for one in model, plain:
        cache = one.new_cache(10)
        one.prefill(random_tokens(9), cache)
        with pytest.raises(ValueError, match="2 more tokens do not fit"):
            one([1, 2], cache)
        with pytest.raises(RuntimeError, match="shape mismatch"):
            one(torch.tensor([[1], [2]]), cache)
        copied = copy.copy(cache)
        del cache
        one.prefill([7, 8], one.new_cache(10))  # must not get the memory that the copy uses
        results.append(one([1], copied).cpu())
        copied.set_storage(copied.kv.clone(), 5)  # which is not the memory of the graphs
        results.append(one([1, 2], copied).cpu())
    assert all(map(torch.allclose, results[:2], results[2:]))


@pytest.mark.slow
def test_graphs_do_not_accumulate(monkeypatch):
    monkeypatch.setattr(captured, "MAX_GRAPHS", 9)
    model, options = captured_model(), method_options(random_model(5, layers=1))["fastmtp"]
    options["head"] = options["head"].to(DEVICE)
    capture_passes(options["head"])
    for _ in range(8):
        vocabulary = Subset(model.lm_head.weight, list(range(20)))
        decode(model, None, random_tokens(9), "fastmtp", **options, vocabulary=vocabulary,
               max_new_tokens=6)  # fmt: skip
        assert 0 < len(graphs_of(options["head"])) <= 9


def test_a_draft_gets_graphs_like_its_model():
    draft = random_model(1, layers=1).to(DEVICE)
    optimize_drafter({"draft": draft}, random_model(5, layers=1).to(DEVICE))
    assert draft.graphs is None
    optimize_drafter({"draft": draft}, captured_model())
    assert draft.graphs is not None


def test_training_is_not_captured():
    model = captured_model()
    cache = model.new_cache(64)
    model([1, 2, 3], cache)
    assert not graphs_of(model)
