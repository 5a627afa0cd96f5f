"""Mistakes in proposals. Verification corrects them all, so they never change the output and the
certifier cannot find them. The oracles in test_proposals.py must."""

from unittest import mock

import torch

from minispec.methods import medusa
from minispec.methods.fastmtp import HeadDrafter
from minispec.model import Backbone

propose_ranks = medusa.propose
chain, extend, enqueue = HeadDrafter.chain, HeadDrafter.extend, HeadDrafter.enqueue
run, expand = HeadDrafter.run, HeadDrafter.expand


def hidden_of_the_previous_round(heads, draft_head, hidden, *arguments):
    """The heads read the hidden state of the previous round."""
    previous, heads.previous = getattr(heads, "previous", hidden), hidden
    return propose_ranks(heads, draft_head, previous, *arguments)


def hidden_before_the_norm(self, hidden, tokens):
    """The head reads hidden states without the final norm's weight."""
    return extend(self, hidden / self.model.model.norm.weight, tokens)


def stale_rows(self, hidden, tokens):
    """Rows of accepted drafts are kept, although they come from the head's own hidden states."""
    drafted = getattr(self, "drafted", 0)
    keep = min(max(len(tokens) - 1, 0), drafted)
    if keep:
        self.cache.commit(list(range(keep)))
    return extend(self, hidden[keep:], tokens[keep:])


def chain_remembered(self, k, *arguments):
    length = self.cache.length
    guess, draft_probs = chain(self, k, *arguments)
    self.drafted = max(len(guess) - 1, 0) if self.cache.length == length else 0
    return guess, draft_probs


def siblings_seen(self, hidden, tokens, depth=None, mask=None):
    """A row of the head sees all rows of its tree, not only its ancestors."""
    return run(self, hidden, tokens, depth, None if mask is None else torch.ones_like(mask))


def rows_as_positions(self, hidden, tokens, depth=None, mask=None):
    """A node is at the position of its row, not of its depth."""
    return run(self, hidden, tokens, None, mask)


def rows_of_the_tree_kept(self, *arguments):
    """The head's rows of rejected branches stay in its cache."""
    length = self.cache.length
    with mock.patch.object(self.cache, "truncate"):
        found = expand(self, *arguments)
    self.cache.truncate(min(self.cache.length, length + 1))
    return found


def only_after_own_drafts(self, hidden, tokens):
    """The head never reads tokens that were copied from the text."""
    if len(tokens) < 3:
        enqueue(self, hidden, tokens)


def position_off_by_one(self, *arguments):
    self.offset += 1
    drafts = chain(self, *arguments)
    self.offset -= 1
    return drafts


# ---- EAGLE-3 -------------------------------------------------------------------------------------

backbone = Backbone.forward


def features_reversed(self, hidden):
    """The features are in another order."""
    features = hidden[..., self.target_size :].split(self.target_size, -1)
    return self.fc(torch.cat(features[::-1], -1))


def normed_block(self, hidden, embedded, ctx):
    """Later steps read the output after the norm, as those of FastMTP's head do."""
    return self.norm(self.midlayer(hidden, embedded, ctx))


def normed_logits(self, hidden):
    return self.lm_head(hidden)


def d2t_as_ids(where, tensors, count, vocab):
    """d2t holds differences, not ids."""
    tensors.pop("t2d")
    return tensors.pop("d2t").tolist()


def outputs_of_the_layers(self, tokens, ctx, feature_layers=()):
    """The features leave the layers instead of entering them."""
    return backbone(self, tokens, ctx, tuple(i + 1 for i in feature_layers))


def embedding_second(self, hidden, embedded, ctx):
    """The attention reads the hidden state first, as MiMo's layer does."""
    pair = torch.cat([self.hidden_norm(hidden), self.input_layernorm(embedded)], -1)
    x = hidden + self.self_attn(pair, ctx)
    return x + self.mlp(self.post_attention_layernorm(x))


def residual_always_before_its_norm(self, hidden, embedded, ctx):
    """`norm_before_residual` is ignored."""
    pair = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
    x = hidden + self.self_attn(pair, ctx)
    return x + self.mlp(self.post_attention_layernorm(x))
