"""With --bitwise, speculative decoding gives plain decoding's very numbers."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minispec import load
from minispec.certify.methods.checks import check_bits
from minispec.certify.toys import small_model
from minispec.cli import UserError
from minispec.fast import bitwise, optimize
from minispec.fast.bitwise import BlockAttention, SteadyLinear, make_bitwise
from minispec.generate import decode, stream
from minispec.model import attend

PROMPT = "Once upon a time there was a little girl named"
DTYPES = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def toy(request):
    model, tokenizer = load("weights/target", dtype=request.param, device="cpu")
    optimize(model, bitwise=True)
    return model, tokenizer


def run(toy, method, n=90, **options):
    model, tokenizer = toy
    cache = model.new_cache(256)
    found = decode(model, tokenizer, PROMPT, method, max_new_tokens=n, ignore_eos=True,
                   cache=cache, **options)  # fmt: skip
    return found, cache.kv[:, :, :, : cache.length]


@pytest.mark.parametrize(
    "method, options",
    [("fastmtp", {"k": 3}), ("fastmtp", {"tree": 32}), ("hybrid", {"tree": "auto"})],
)
def test_tokens_and_cache_rows_are_those_of_plain_decoding(toy, method, options):
    plain, plain_rows = run(toy, "autoregressive")
    ours, rows = run(toy, method, **options)
    assert ours.tokens == plain.tokens and ours.stats["tokens_per_pass"] > 2
    n = min(rows.shape[3], plain_rows.shape[3])
    assert torch.equal(rows[:, :, :, :n], plain_rows[:, :, :, :n])


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
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


def test_attention_is_that_of_the_plain_model():
    for n, span, kv_heads in (1, 1, 1), (5, 64, 2), (40, 150, 4):
        q = torch.randn(1, n, 4, 6, dtype=torch.float64)
        k, v = torch.randn(2, 1, span, kv_heads, 6, dtype=torch.float64)
        seen = torch.rand(n, span) < 0.5
        seen[:, 0] = True
        mask = torch.zeros(1, 1, n, span, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(BlockAttention()(q, k, v, mask), attend(q, k, v, mask))


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
    assert not all(row.passed for row in check_bits("fastmtp"))
