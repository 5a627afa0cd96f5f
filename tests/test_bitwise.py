"""With --bitwise, speculative decoding gives plain decoding's very numbers."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from minispec import load
from minispec.bench import __main__ as bench
from minispec.certify.methods.checks import check_bits
from minispec.certify.toys import small_model
from minispec.cli import UserError
from minispec.fast import bitwise, optimize
from minispec.fast.bitwise import BlockAttention, SteadyLinear, make_bitwise
from minispec.generate import decode
from minispec.generate.__main__ import main
from minispec.methods import METHODS, find_method
from minispec.model import attend

# 51 tokens for the toy, so that runs cross the border of the first block of 64 keys
PROMPT = "Once upon a time there was a little girl named Lily. She had a red ball. " * 2
DTYPES = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def toy(request):
    model, tokenizer = load("weights/target", dtype=request.param, device="cpu")
    optimize(model, bitwise=True)
    return model, tokenizer


def run(toy, method, n=70, **options):
    model, tokenizer = toy
    cache = model.new_cache(n + 120)
    found = decode(model, tokenizer, PROMPT, method, max_new_tokens=n, ignore_eos=True,
                   cache=cache, **options)  # fmt: skip
    return found, cache.kv[:, :, :, : cache.length]


def runs_without(*folders):
    """Names and options of the rows of `bench`, but for methods that need weights in `folders`."""
    for method in map(find_method, METHODS):
        needed = {option.folder for option in method.of_kind("weights").values()}
        if method.lossless and not needed & {*folders}:
            yield from ((method.name, options) for options in method.bench)


def check_runs(toy, n, *folders):
    plain, plain_rows = run(toy, "autoregressive", n)
    accepted = 0
    for name, options in runs_without(*folders):
        ours, rows = run(toy, name, n, **options)
        assert ours.tokens == plain.tokens, (name, options)
        both = min(rows.shape[3], plain_rows.shape[3])
        assert torch.equal(rows[:, :, :, :both], plain_rows[:, :, :, :both]), (name, options)
        accepted += n - len(ours.rounds)
    assert accepted > n


def test_tokens_and_cache_rows_are_those_of_plain_decoding(toy):
    check_runs(toy, 30, "eagle3")


def test_a_kept_cache_equals_a_fresh_one(toy):
    model, tokenizer = toy
    kept = model.new_cache(256)
    first = decode(model, tokenizer, PROMPT, "fastmtp", k=3, max_new_tokens=60, cache=kept)
    longer = tokenizer.encode(PROMPT) + first.tokens + tokenizer.encode(" Then she")
    fresh = model.new_cache(256)
    for cache in kept, fresh:
        model.prefill(longer[cache.length :], cache)
    n = len(longer)
    assert torch.equal(kept.kv[:, :, :, :n], fresh.kv[:, :, :, :n])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8(dtype):
    model, tokenizer = load("weights/target", dtype=dtype, device="cpu")
    optimize(model, int8=True, bitwise=True)
    alone, together = model.new_cache(), model.new_cache()
    for cache, chunk in (alone, 1), (together, 29):
        model.prefill(tokenizer.encode(PROMPT)[:66], cache, chunk)
    assert torch.equal(alone.kv, together.kv)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("threads", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_odd_sizes(dtype, threads):
    """Sizes that are no multiples of anything; one key head per query head, and one for all."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kv_heads in 1, 3:
            model = small_model(
                kv_heads, vocab=67, context=150, dtype=dtype, hidden_size=27, heads=3,
                kv_heads=kv_heads, head_dim=10, intermediate_size=85, qkv_bias=True,
            )  # fmt: skip
            with contextlib.suppress(UserError):  # this machine may have no such product
                make_bitwise(model)
                alone, together = model.new_cache(), model.new_cache()
                tokens = [i * 7 % 67 for i in range(141)]
                expected = torch.cat(list(model.prefill_chunks(tokens, alone, chunk=1)), 1)
                found = torch.cat(list(model.prefill_chunks(tokens, together, chunk=47)), 1)
                assert torch.equal(found, expected) and torch.equal(alone.kv, together.kv)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_long_runs_of_every_case():
    assert all(row.passed for row in check_bits(tokens=600))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_real_model(dtype):
    """The rows of `bench`, on a text of 600 tokens, which crosses nine borders of blocks."""
    toy = load("smollm2", dtype=dtype, device="cpu")
    optimize(toy[0], bitwise=True)
    check_runs(toy, 600, "draft", "eagle3")


def test_attention_is_that_of_the_plain_model():
    for n, span, kv_heads in (1, 1, 1), (5, 64, 2), (40, 150, 4):
        q = torch.randn(1, n, 4, 6, dtype=torch.float64)
        k, v = torch.randn(2, 1, span, kv_heads, 6, dtype=torch.float64)
        seen = torch.rand(n, span) < 0.5
        seen[:, 0] = True
        mask = torch.zeros(1, 1, n, span, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(BlockAttention()(q, k, v, mask), attend(q, k, v, mask))


def test_the_flag(capsys):
    main(["--prompt-ids", "5,6,7", "--bitwise", "--method", "fastmtp", "--max-new-tokens", "3"])
    assert capsys.readouterr().out
    for command, words in (main, ["a"]), (bench.main, []):
        with pytest.raises(SystemExit) as exit:
            command([*words, "--bitwise", "--compile"])
        assert exit.value.code == 2
        assert capsys.readouterr().err.endswith("--bitwise and --compile cannot be combined: omit "
                                                "one of them\n")  # fmt: skip


# ---- what goes wrong -----------------------------------------------------------------------------


def not_filled_up(monkeypatch):
    monkeypatch.setattr(bitwise, "filled", lambda x, multiple: x)


def keys_in_the_order_of_slots(monkeypatch):
    def plan(seen, dtype):
        extra = -seen.shape[1] % bitwise.BLOCK
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        return F.pad(mask, (0, extra), value=-torch.inf), None

    monkeypatch.setattr(bitwise, "plan", plan)


def one_block_for_all_keys(monkeypatch):
    def call(self, q, k, v, attn_mask):
        monkeypatch.setattr(bitwise, "BLOCK", k.shape[1])
        self.mask = None
        return plain(self, q, k, v, attn_mask)

    plain = BlockAttention.__call__
    monkeypatch.setattr(BlockAttention, "__call__", call)


def plain_attention(monkeypatch):
    monkeypatch.setattr(BlockAttention, "__call__", lambda self, *inputs: attend(*inputs))


def the_first_row_in_float64(monkeypatch):
    def forward(self, x):
        y = plain(self, x)
        row = F.linear(x[..., :1, :].double(), self.weight.double())
        return torch.cat([row.to(y.dtype), y[..., 1:, :]], -2)

    plain = SteadyLinear.forward
    monkeypatch.setattr(SteadyLinear, "forward", forward)


MISTAKES = [not_filled_up, keys_in_the_order_of_slots, one_block_for_all_keys, plain_attention,
            the_first_row_in_float64]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_caught(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(UserError, match="--bitwise: on this machine, the numbers of a row in"):
        for seed in range(3):
            make_bitwise(small_model(seed, dtype=torch.float32, head_dim=16, context=200))
    monkeypatch.setattr(bitwise, "check", lambda model: None)
    found = not all(row.passed for row in check_bits("fastmtp"))
    # the oldest kernels sum 30 tokens alike, in whatever order their keys are
    assert found or mistake is keys_in_the_order_of_slots
