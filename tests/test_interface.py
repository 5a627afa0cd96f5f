"""The Python interface: a model, a prompt and a method's name are enough."""

import numpy as np
import pytest
import torch
from conftest import ROOT, random_model
from test_generate import TOKENIZER, byte_model

from minispec import UserError, load
from minispec.certify import random_head, random_heads
from minispec.checkpoint import save
from minispec.generate import LOSSY, METHODS, decode, stream

PROMPT = "Once upon a time"
NEEDS = [("speculative", "draft"), ("medusa", "heads"), ("medusa-typical", "heads"),
         ("fastmtp", "head")]  # fmt: skip


@pytest.fixture(scope="module")
def shipped():
    """The target under weights/, with a draft and heads beside it; and its plain answer."""
    model, tokenizer = load(ROOT / "weights" / "target", "float64", "cpu")
    return model, tokenizer, decode(model, tokenizer, PROMPT, max_new_tokens=12)


@pytest.mark.parametrize("method", METHODS)
def test_a_name_is_enough_where_weights_lie_beside_the_model(shipped, method):
    model, tokenizer, plain = shipped
    result = decode(model, tokenizer, PROMPT, method=method, max_new_tokens=12)
    assert (result.text, result.tokens) == (plain.text, plain.tokens)
    assert result.stats["lossless"] == (method not in LOSSY)


@pytest.mark.parametrize(
    ("method", "options"),
    [("speculative", {"k": "auto"}), ("fastmtp", {"k": "auto"}), ("medusa", {"tree": "auto"}),
     ("medusa-typical", {"tree": "auto"})],
)  # fmt: skip
def test_auto_is_enough_too(shipped, method, options):
    model, tokenizer, plain = shipped
    result = decode(model, tokenizer, PROMPT, method=method, max_new_tokens=12, **options)
    assert result.tokens == plain.tokens
    assert result.stats["drafted"] > 0 or "tree" in options  # a tree may not pay here


def test_what_lies_beside_a_model_is_loaded_once(shipped, monkeypatch):
    model, tokenizer, plain = shipped
    for method, _ in NEEDS:
        decode(model, tokenizer, PROMPT, method, max_new_tokens=1)
    monkeypatch.setattr(model, "source", None)  # nowhere to look again
    for method, _ in NEEDS:
        run = decode(model, tokenizer, PROMPT, method, max_new_tokens=5)
        assert run.tokens == plain.tokens[:5]


def test_a_stream_gives_the_text_as_it_comes(shipped):
    model, tokenizer, plain = shipped
    run = stream(model, tokenizer, PROMPT, method="medusa", max_new_tokens=12)
    chunks = list(run)
    assert len(chunks) == run.stats["target_passes"] > 1
    assert "".join(chunk.text for chunk in chunks) == run.text == plain.text
    assert sum((chunk.tokens for chunk in chunks), []) == run.tokens == plain.tokens


# ---- without companions --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "argument"), NEEDS)
@pytest.mark.parametrize("given", [{}, {"k": "auto"}, {"tree": "auto"}])
def test_what_is_missing_is_named(method, argument, given):
    with pytest.raises(UserError, match=f"{method} needs {argument}=, .* --(draft|heads) DIR"):
        decode(random_model(), None, [1, 2], method, **given)


def test_a_directory_without_companions_is_named(tmp_path):
    save(byte_model(), TOKENIZER, tmp_path / "target")
    model, tokenizer = load(tmp_path / "target", "float64", "cpu")
    with pytest.raises(UserError, match=r"needs head=.* no folder mtp beside .*target"):
        decode(model, tokenizer, "x", "fastmtp")


def test_a_draft_or_heads_may_be_given():
    model = random_model()
    plain = decode(model, None, [1, 2], max_new_tokens=20)
    for method, argument, companion in (
        ("speculative", "draft", random_model(1)),
        ("medusa", "heads", random_heads(model, 0)),
        ("fastmtp", "head", random_head(model, 0)),
    ):
        result = decode(model, None, [1, 2], method, max_new_tokens=20, **{argument: companion})
        assert result.tokens == plain.tokens
        size = sum(p.numel() for p in companion.parameters())
        assert result.stats["extra_parameters"] == size


# ---- prompts -------------------------------------------------------------------------------------


def test_text_list_tuple_array_and_tensor_are_one_prompt():
    model, ids = byte_model(), TOKENIZER.encode("hello")
    plain = decode(model, TOKENIZER, "hello", max_new_tokens=8)
    for prompt in (ids, tuple(ids), iter(ids), np.array(ids), np.array(ids, dtype=np.uint16),
                   torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):  # fmt: skip
        run = decode(model, TOKENIZER, prompt, max_new_tokens=8)
        assert run.prompt == ids and run.tokens == plain.tokens
        assert all(type(token) is int for token in run.prompt)


@pytest.mark.parametrize(
    "prompt",
    [[[1, 2]], [1.0, 2.0], [1, "a"], np.array([1.5]), np.array([[1, 2]]), torch.tensor([1.5]),
     torch.tensor([[1, 2]]), torch.tensor(1), 7, None],
    ids=repr,
)  # fmt: skip
def test_what_is_no_sequence_of_ids_is_refused(prompt):
    with pytest.raises(UserError, match="a prompt must be text, or one sequence of token ids"):
        decode(byte_model(), TOKENIZER, prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3, 999], "prompt id 999 is out of range"),
        ([-1], "prompt id -1 is out of range"),
        ([1] * 256, "has 256 tokens, the context only 256"),
        ("text", "no tokenizer.json"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(prompt, message):
    with pytest.raises(UserError, match=message):
        decode(random_model(), None, prompt)


def test_an_empty_prompt_begins_with_bos_where_the_model_has_one():
    run = decode(byte_model(), TOKENIZER, "", max_new_tokens=3)
    assert run.prompt == [256] and len(run.tokens) == 3


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("magic", {}, "unknown method 'magic': use one of autoregressive, "),
        ("autoregressive", {"kk": 3}, "unexpected keyword argument 'kk'"),
        ("prompt-lookup", {"kk": 3}, "unexpected keyword argument 'kk'"),
        ("lookahead", {"tree": "auto"}, "unexpected keyword argument 'tree'"),
        ("autoregressive", {"sampling": 3}, "multiple values for argument 'sampling'"),
        ("prompt-lookup", {"k": "auto"}, "k 'auto': must be a whole number"),
        ("prompt-lookup", {"k": 0}, "k 0 and ngram 3: must both be at least 1"),
        ("jacobi", {"block": 2.5}, "block 2.5: must be a whole number"),
        ("jacobi", {"block": 256}, "block 256: must be from 1 to 255"),
        ("lookahead", {"window": None}, "window None: must be a whole number"),
        ("lookahead", {"window": 0}, "window 0: must be at least 1"),
        ("lookahead", {"ngram": 1}, "ngram 1: must be at least 2"),
        ("lookahead", {"guesses": -1}, "guesses -1: must be at least 0"),
        ("lookahead", {"window": 64, "ngram": 5}, "256 rows never fit into a cache of 256"),
        ("autoregressive", {"max_new_tokens": -1}, "must not be negative"),
        ("autoregressive", {"max_new_tokens": 2.5}, "must be a whole number"),
        ("autoregressive", {"temperature": -0.1}, "temperature -0.1: must be 0"),
        ("autoregressive", {"stop": ("",)}, "must not be empty"),
        ("autoregressive", {"stop": "a"}, "need a tokenizer.json"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_clear_line(method, options, message):
    with pytest.raises(UserError, match=message):
        decode(random_model(), None, [1], method, **options)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("speculative", {"kk": 3}, "unexpected keyword argument 'kk'"),
        ("speculative", {"k": "many"}, "k 'many': must be a whole number"),
        ("speculative", {"k": 0}, "k 0: must be auto or at least 1"),
        ("speculative", {"draft": "weights/draft"}, "draft 'weights/draft': is no draft"),
        ("medusa", {"k": 3}, "unexpected keyword argument 'k'"),
        ("medusa", {"tree": "wide"}, "tree 'wide': is no tree"),
        ("medusa", {"tree": 5}, r"the tree 5: must be paths of ranks, as \[\(0,\), \(0, 1\)\]"),
        ("medusa", {"tree": [0, 1]}, r"the tree \[0, 1\]: must be paths of ranks"),
        ("medusa", {"tree": [(0,) * 5]}, "the tree is 5 deep, but there are only 4 heads"),
        ("medusa", {"tree": [(40,)]}, "rank 40: must be an integer from 0 to 31"),
        ("fastmtp", {"k": 0}, "k 0: must be auto or at least 1"),
        ("fastmtp", {"tree": 4}, "unexpected keyword argument 'tree'"),
    ],
)  # fmt: skip
def test_a_wrong_option_beside_a_draft_or_heads(method, options, message):
    model = random_model()
    companions = {"speculative": {"draft": model}, "medusa": {"heads": random_heads(model, 0)},
                  "fastmtp": {"head": random_head(model, 0)}}  # fmt: skip
    with pytest.raises(UserError, match=message):
        decode(model, None, [1], method, **companions[method] | options)


def test_whole_numbers_may_be_numpy_s():
    model, three = random_model(), np.int64(3)
    plain = decode(model, None, [1, 2], max_new_tokens=9)
    for method, options in (
        ("speculative", {"draft": random_model(1), "k": three}),
        ("medusa", {"heads": random_heads(model, 0), "tree": ((0,), (0, 1))}),
        ("lookahead", {"window": three, "ngram": three, "guesses": three}),
    ):
        run = decode(model, None, [1, 2], method, max_new_tokens=np.int64(9), **options)
        assert run.tokens == plain.tokens


def test_what_lies_beside_the_model_follows_it_to_another_type():
    model, tokenizer = load(ROOT / "weights" / "target", "float32", "cpu")
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        run = decode(model, tokenizer, "Once upon a time", method="medusa", max_new_tokens=4)
        assert len(run.tokens) == 4


def test_the_full_vocabulary_can_be_asked_for():
    model, tokenizer = load(ROOT / "weights" / "target", "float32", "cpu")
    options = {"method": "fastmtp", "max_new_tokens": 8}
    small = decode(model, tokenizer, "Once upon a time", **options)
    full = decode(model, tokenizer, "Once upon a time", vocabulary=None, **options)
    assert small.tokens == full.tokens


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("speculative", {"draft": 3}, "draft 3: is no draft"),
        ("medusa", {"heads": 5}, "heads 5: is no heads"),
        ("autoregressive", {"temperature": "hot"}, "temperature 'hot': must be a number"),
        ("autoregressive", {"top_k": 2.5}, "top_k 2.5: must be a whole number"),
        ("autoregressive", {"top_p": None}, "top_p None: must be a number"),
    ],
)
def test_an_object_of_another_kind_is_one_clear_line(method, options, message):
    with pytest.raises(UserError, match=message):
        decode(random_model(), None, [1, 2, 3], method, **options)
