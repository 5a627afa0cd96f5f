"""The Python interface: a model, a prompt and a method's name are enough."""

import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    AUTO,
    DECLARED,
    NEEDS,
    ROOT,
    TOKENIZER,
    byte_model,
    method_options,
    random_model,
    random_tokens,
)

from minispec import UserError, load
from minispec.certify.toys import (
    random_eagle3_head,
    random_medusa_heads,
    random_mtp_head,
    two_languages,
)
from minispec.checkpoints.heads import save_mtp
from minispec.checkpoints.load import save
from minispec.generate import METHODS, decode, drafters, stream

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def shipped():
    """The target under weights/, with a draft and heads next to it, and its plain output."""
    model, tokenizer = load(ROOT / "weights" / "target", "float64", "cpu")
    return model, tokenizer, decode(model, tokenizer, PROMPT, max_new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [*((name, {}) for name in METHODS), *((name, {argument: "auto"}) for name, argument in AUTO),
     *((name, {"vocabulary": None}) for name in METHODS if DECLARED[name].of_kind("vocabulary"))],
)  # fmt: skip
def test_a_method_s_name_is_enough_if_its_weights_are_next_to_the_model(shipped, method, options):
    model, tokenizer, plain = shipped
    folders = [option.folder for option in DECLARED[method].of_kind("weights").values()]
    if folders and not any(drafters.find_drafter(folder, model) for folder in folders):
        pytest.skip(f"no {' or '.join(folders)} under weights/")
    result = decode(model, tokenizer, PROMPT, method=method, max_new_tokens=12, **options)
    assert (result.text, result.tokens) == (plain.text, plain.tokens)
    assert result.stats["lossless"] == DECLARED[method].lossless


def test_drafts_and_heads_are_loaded_once_and_follow_the_model_s_dtype(monkeypatch):
    model, tokenizer = load(ROOT / "weights" / "target", "float32", "cpu")
    runs = []
    for _ in range(2):
        for dtype in torch.float32, torch.float64:
            model.to(dtype)
            runs.append(decode(model, tokenizer, PROMPT, "medusa", max_new_tokens=4).tokens)
        monkeypatch.setattr(drafters, "load_drafter", None)  # nothing can be loaded again
    assert runs[:2] == runs[2:] and all(runs)


@pytest.mark.parametrize("name", [".", "../target", "../elsewhere/link", "../elsewhere/link/."])
def test_weights_are_found_next_to_a_model_however_its_folder_is_named(name, tmp_path, monkeypatch):
    for folder in "target", "draft", "elsewhere":
        save(byte_model(), TOKENIZER, tmp_path / folder)
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "target")
    model, tokenizer = load(name, "float64", "cpu")
    assert decode(model, tokenizer, "x", "speculative", max_new_tokens=2).tokens


def test_a_stream_yields_the_text_as_it_is_generated(shipped):
    model, tokenizer, plain = shipped
    run = stream(model, tokenizer, PROMPT, method="medusa", max_new_tokens=12)
    chunks = list(run)
    assert len(chunks) == run.stats["target_passes"] > 1
    assert "".join(chunk.text for chunk in chunks) == run.text == plain.text
    assert sum((chunk.tokens for chunk in chunks), []) == run.tokens == plain.tokens


@pytest.mark.parametrize("method", NEEDS)
@pytest.mark.parametrize("options", [{}, {"k": "auto"}, {"tree": "auto"}])
def test_a_missing_draft_or_head_is_named(tmp_path, method, options):
    with pytest.raises(UserError, match=rf"needs {NEEDS[method]}= .* --[a-z3]+ DIR\)$"):
        decode(random_model(), None, [1, 2], method, **options)
    save(byte_model(), TOKENIZER, tmp_path / "target")
    model, tokenizer = load(tmp_path / "target", "float64", "cpu")
    with pytest.raises(UserError, match=r"no folder (draft|medusa|mtp|eagle3) next to .*target"):
        decode(model, tokenizer, "x", method, **options)


def test_hybrid_takes_the_head_next_to_the_model_or_else_the_draft(tmp_path):
    save(byte_model(), TOKENIZER, tmp_path / "target")
    model, tokenizer = load(tmp_path / "target", "float64", "cpu")
    with pytest.raises(UserError, match=r"hybrid needs head= or draft= .*no folder mtp or draft"):
        decode(model, tokenizer, "x", "hybrid")
    plain = decode(model, tokenizer, "abcabc", max_new_tokens=20)
    save(byte_model(1), TOKENIZER, tmp_path / "draft")
    head = random_mtp_head(model, 0)
    sizes = [sum(p.numel() for p in drafter.parameters()) for drafter in (byte_model(1), head)]
    for size, k in itertools.product(sizes, (2, "auto")):
        if size == sizes[1]:
            save_mtp(head, tmp_path / "mtp", "", TOKENIZER, torch.float64, [1.0])
            model, tokenizer = load(tmp_path / "target", "float64", "cpu")
        run = decode(model, tokenizer, "abcabc", "hybrid", k=k, max_new_tokens=20)
        assert run.tokens == plain.tokens and run.stats["extra_parameters"] == size
    for method in "speculative", "fastmtp":  # hybrid's drafter is not taken for theirs
        assert decode(model, tokenizer, "abcabc", method, max_new_tokens=20).tokens == plain.tokens


def test_a_prompt_may_be_text_a_list_a_tuple_an_array_or_a_tensor():
    model, ids = byte_model(), TOKENIZER.encode("hello")
    plain = decode(model, TOKENIZER, "hello", max_new_tokens=8)
    for prompt in (ids, tuple(ids), iter(ids), np.array(ids), np.array(ids, dtype=np.uint16),
                   torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):  # fmt: skip
        run = decode(model, TOKENIZER, prompt, max_new_tokens=8)
        assert run.prompt == ids and run.tokens == plain.tokens
        assert all(type(token) is int for token in run.prompt)
    run = decode(model, TOKENIZER, "", max_new_tokens=3)  # only the BOS token
    assert run.prompt == [256] and len(run.tokens) == 3


INVALID_PROMPT = "a prompt must be text or token ids, as a list "


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([[1, 2]], INVALID_PROMPT), ([1.0, 2.0], INVALID_PROMPT), ([1, "a"], INVALID_PROMPT),
     (np.array([1.5]), INVALID_PROMPT), (np.array([[1, 2]]), INVALID_PROMPT),
     (torch.tensor([1.5]), INVALID_PROMPT), (torch.tensor([[1, 2]]), INVALID_PROMPT),
     (torch.tensor(1), INVALID_PROMPT), (None, INVALID_PROMPT),
     (bytearray(b"hello"), INVALID_PROMPT), ([], "the prompt is empty"),
     ([3, 999], "prompt id 999 is out of range"), ([-1], "prompt id -1 is out of range"),
     ("text", "no tokenizer.json"), ([1] * 256, "has 256 tokens, but the context is only 256")],
    ids=lambda x: repr(x)[:20],
)  # fmt: skip
def test_an_invalid_prompt_is_rejected(prompt, message):
    with pytest.raises(UserError, match=message):
        decode(random_model(), None, prompt)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_without_tokenizer_json_the_error_says_how_to_make_one(name, tmp_path):
    """The folder has a tokenizer in another format, which transformers can convert."""
    save(byte_model(), None, tmp_path)
    (tmp_path / name).touch()
    model, tokenizer = load(tmp_path, "float64", "cpu")
    with pytest.raises(UserError, match=rf"no tokenizer.json; .* {name}: .*save_pretrained\(DIR"):
        decode(model, tokenizer, "text")
    assert decode(model, tokenizer, [1, 2], max_new_tokens=3).tokens


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("magic", {}, "unknown method 'magic'; choose from autoregressive, "),
        ("medsua", {}, "unknown method 'medsua'; did you mean medusa?"),
        (["medusa"], {}, r"unknown method \['medusa'\]; "),
        ("autoregressive", {"temperature": 10**400}, "temperature 100+.*00: must be a number"),
        ("autoregressive", {"kk": 3}, "unexpected keyword argument 'kk'"),
        ("autoregressive", {"max_new_tokens": -1}, "must be a whole number, at least 0"),
        ("autoregressive", {"max_new_tokens": 2.5}, "must be a whole number"),
        ("autoregressive", {"temperature": -0.1}, "temperature -0.1: must be 0"),
        ("autoregressive", {"temperature": "hot"}, "temperature 'hot': must be a number"),
        ("autoregressive", {"top_k": 2.5}, "top_k 2.5: must be a whole number"),
        ("autoregressive", {"top_p": None}, "top_p None: must be a number"),
        ("autoregressive", {"stop": ("",)}, "must not be empty"),
        ("autoregressive", {"stop": "a"}, "has no tokenizer.json"),
        ("prompt-lookup", {"ngram": "auto"}, "ngram 'auto': must be a whole number"),
        ("prompt-lookup", {"k": 0}, "k 0: must be at least 1"),
        ("jacobi", {"block": 256}, "block 256: must be from 1 to 255"),
        ("lookahead", {"window": None}, "window None: must be a whole number"),
        ("lookahead", {"window": 0}, "window 0: must be at least 1"),
        ("lookahead", {"guesses": -1}, "guesses -1: must be at least 0"),
        ("lookahead", {"window": 64, "ngram": 5}, "256 rows cannot fit into a cache of 256"),
        ("speculative", {"k": "many"}, "k 'many': must be a whole number"),
        ("speculative", {"k": 0}, "k 0: must be at least 1"),
        ("speculative", {"draft": "weights/draft"}, "'weights/draft': has the wrong type, str"),
        ("speculative", {"draft_sampling": 0.5}, "draft_sampling 0.5: has the wrong type, float"),
        ("medusa", {"heads": 5}, "heads 5: has the wrong type, int"),
        ("medusa", {"tree": [(0,)] * 9999}, "the tree has 9999 paths: at most 4096 are supported"),
        ("medusa", {"tree": 5}, "tree 5: these heads have no measured accuracies"),
        ("medusa", {"tree": [5]}, r"the tree \[5\]: must be rank paths, such as \[\(0,\), \(0, 1"),
        ("medusa", {"tree": [(40,)]}, "rank 40: must be an integer from 0 to 31"),
        ("medusa-typical", {"epsilon": 10**400}, "epsilon 1.*0: must be a number"),
        ("hybrid", {"lookup_k": 0}, "lookup_k 0: must be at least 1"),
        ("hybrid", {"lookup_k": "many"}, "lookup_k 'many': must be a whole number"),
        ("fastmtp", {"head": random_model()}, "has the wrong type, Transformer"),
        ("fastmtp", {"vocabulary": "en.json"}, "vocabulary 'en.json': has the wrong type, str"),
        ("hybrid", {"head": random_eagle3_head(random_model(), 0),
                    "vocabulary": two_languages(random_model())},
         "an EAGLE-3 head has its own vocabulary; omit the other one"),
    ],
)
def test_a_wrong_option_is_rejected_before_the_run_starts(method, options, message):
    model = random_model()
    given = method_options(model).get(str(method), {})
    with pytest.raises(UserError, match=message):
        stream(model, None, [1], method, **given | options)


def test_objects_of_other_libraries_are_rejected():
    model = byte_model()

    class Foreign:  # like transformers' models and tokenizers
        config = model.config

        def encode(self, text):
            return [1]

    for arguments, message in (
        ((Foreign(), None, [1]), "the model is a Foreign: pass the one that load returns"),
        (("weights/target", None, [1]), "the model is a str"),
        ((model, Foreign(), "x"), "the tokenizer is a Foreign: pass the one that load returns"),
    ):
        with pytest.raises(UserError, match=message):
            stream(*arguments)
    for wrong in 5, Foreign(), np.random.default_rng(0):
        with pytest.raises(UserError, match="randomness .*: must have bernoulli and categorical"):
            stream(model, TOKENIZER, "x", randomness=wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_a_surrounding_autocast_changes_nothing(method, dtype):
    model = random_model(dtype=torch.float32)
    options = method_options(model).get(method, {})
    plain = decode(model, None, [1, 2], method, max_new_tokens=9, **options)
    with torch.autocast("cpu", dtype):
        run = decode(model, None, [1, 2], method, max_new_tokens=9, **options)
        assert run.tokens == plain.tokens
        for _, name in (case for case in AUTO if case[0] == method):
            decode(model, None, [1, 2], method, max_new_tokens=9, **options | {name: "auto"})
        assert torch.is_autocast_enabled("cpu")


def test_a_draft_s_cache_can_be_kept_between_runs():
    model, draft = random_model(), random_model(1)
    caches = {"cache": model.new_cache(64), "draft_cache": draft.new_cache(64)}
    options = {"method": "speculative", "draft": draft, "max_new_tokens": 8}
    first = decode(model, None, [1, 2, 3], **options, **caches)
    prompt = [1, 2, 3, *first.tokens, 5, 6]
    for cache in caches.values():
        cache.truncate(min(cache.length, 3 + 7))
    fed, forward = [], draft.forward
    draft.forward = lambda tokens, *more: fed.append(len(tokens)) or forward(tokens, *more)
    second = decode(model, None, prompt, **options, **caches)
    assert sum(fed) < len(prompt) + 8 * 5 and max(fed) <= 4  # never the whole prompt again
    assert second.tokens == decode(model, None, prompt, max_new_tokens=8).tokens
    for wrong in random_model(layers=1).new_cache(64), draft.new_cache(32), 5:
        with pytest.raises(UserError, match="cache"):
            stream(model, None, [1], "speculative", draft=draft, draft_cache=wrong,
                   cache=model.new_cache(64))  # fmt: skip


@pytest.mark.parametrize("options", [{"k": 3}, {"tree": 6}])
@pytest.mark.parametrize(
    "method", [name for name in METHODS if "head_cache" in DECLARED[name].of_kind("cache")]
)
def test_with_its_cache_a_head_drafts_in_the_next_turn_as_if_it_had_read_all_of_the_text(
    method, options
):
    """Also if the next turn repeats only a part of the first one's text."""
    model, head = random_model(), method_options(random_model())[method]["head"]
    options = options | {"method": method, "head": head, "max_new_tokens": 12}
    for kept in 15, 9, 3, 1:
        caches = {"cache": model.new_cache(99), "head_cache": head.new_cache(99)}
        first = decode(model, None, random_tokens(5), **options, **caches)
        prompt = (first.prompt + first.tokens)[:kept] + random_tokens(7, 1)
        for cache in caches.values():
            cache.truncate(min(kept, cache.length))
        second, fresh = (decode(model, None, prompt, **options, **c) for c in (caches, {}))
        assert second.tokens == fresh.tokens and second.stats["cached_tokens"] == kept
        assert [step.tree for step in second.rounds] == [step.tree for step in fresh.rounds]
    for wrong in model.new_cache(99), head.new_cache(9), 5:
        with pytest.raises(UserError, match="cache"):
            stream(model, None, [1], **options, head_cache=wrong, cache=model.new_cache(64))


class Choice:
    """Randomness from NumPy."""

    rng = np.random.default_rng(0)

    def bernoulli(self, p):
        return self.rng.random() < p

    def categorical(self, probs):
        return self.rng.choice(len(probs), p=probs.numpy())


@pytest.mark.parametrize("options", [
    {"temperature": Fraction(1, 2), "top_p": Fraction(9, 10)},
    {"temperature": np.float32(0.5), "top_p": np.float16(0.9), "top_k": np.int64(5)},
    {"temperature": 0.5, "max_new_tokens": np.uint8(200), "seed": np.int64(3)},
    {"temperature": 0.5, "randomness": Choice()},
    {"method": "medusa-typical", "epsilon": Fraction(1, 3), "temperature": 1},
], ids=lambda options: " ".join(options))  # fmt: skip
def test_numbers_of_any_type_are_accepted_and_the_result_is_json(options):
    model = random_model()
    options = method_options(model).get(options.get("method"), {}) | options
    cache = model.new_cache(np.int64(256))
    model.prefill([1, 2, 3], cache)
    cache.truncate(np.int64(2))
    run = decode(model, None, [1, 2, 3], **{"max_new_tokens": 9, "cache": cache} | options)
    written = json.loads(json.dumps(run.as_json(Path("model"))))
    assert written["stats"] == run.stats and type(run.sampling.temperature) is float
    assert len(run.tokens) == options.get("max_new_tokens", 9)


def test_drafters_can_be_passed_and_integers_can_be_numpy_s():
    model, three = random_model(), np.int64(3)
    draft, heads, head = random_model(1), random_medusa_heads(model, 0), random_mtp_head(model, 0)
    plain = decode(model, None, [1, 2], max_new_tokens=9)
    for method, options in (
        ("speculative", {"draft": draft, "k": three}),
        ("speculative", {"draft": draft, "k": 10**20}),  # as many as fit
        ("medusa", {"heads": heads, "tree": ((0,), (0, 1))}),
        ("medusa", {"heads": heads, "tree": np.array([[0, 0], [1, 0]])}),
        ("fastmtp", {"head": head}),
        ("eagle3", {"head": random_eagle3_head(model, 0)}),
        ("lookahead", {"window": three, "ngram": three, "guesses": three}),
    ):
        run = decode(model, None, [1, 2], method, max_new_tokens=np.int64(9), **options)
        assert run.tokens == plain.tokens
        drafter = options.get(NEEDS.get(method), None)
        size = sum(p.numel() for p in drafter.parameters()) if drafter else 0
        assert run.stats["extra_parameters"] == size
