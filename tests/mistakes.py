"""Mistakes in what is proposed. Verification mends them all, so no output can show them, and the
certifier cannot; the oracles of test_proposals.py must."""

import torch

from minispec.methods import lookahead, medusa
from minispec.methods.fastmtp import Drafter
from minispec.model import Block

propose_ranks, window_layout = medusa.propose, lookahead.window_layout
chain, extend, after = Drafter.chain, Drafter.extend, lookahead.Pool.after


def hidden_of_the_round_before(heads, words, hidden, *arguments):
    """The heads read what they read a round ago."""
    before, heads.before = getattr(heads, "before", hidden), hidden
    return propose_ranks(heads, words, before, *arguments)


def window_off_by_one(lengths):
    depth, mask = window_layout(lengths)
    return depth + 1, mask


def aliased_pool(self, token: int) -> list[list[int]]:
    """The caller's list is the pool's own, and the caller appends to it."""
    guesses = after(self, token)
    if guesses:
        stored = self.known[token]
        stored.popitem()
        stored[tuple(guesses[0] + guesses[-1])] = None
    return guesses


def token_first(self, hidden, embedded, now):
    """In DeepSeek-V3's order, with a head of MiMo's."""
    pair = [self.token_layernorm(embedded), self.hidden_layernorm(hidden)]
    return self.final_layernorm(Block.forward(self, self.input_proj(torch.cat(pair, -1)), now))


def hidden_before_the_norm(self, hidden, tokens):
    """The final norm's weight undone."""
    return extend(self, hidden / self.model.model.norm.weight, tokens)


def stale_rows(self, hidden, tokens):
    """The drafts' rows stay where they were accepted, with the head's own hidden states."""
    known = getattr(self, "drafted", 0)
    keep = min(max(len(tokens) - 1, 0), known)
    if keep:
        self.cache.commit(list(range(keep)))
    return extend(self, hidden[keep:], tokens[keep:])


def chain_remembered(self, k, *arguments):
    length = self.cache.length
    guess, draft_probs = chain(self, k, *arguments)
    self.drafted = max(len(guess) - 1, 0) if self.cache.length == length else 0
    return guess, draft_probs


def position_off_by_one(self, *arguments):
    self.offset += 1
    drafts = chain(self, *arguments)
    self.offset -= 1
    return drafts
