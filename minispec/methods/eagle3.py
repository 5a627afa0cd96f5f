"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer drafts a chain or a tree by running on its
own output, as FastMTP's head does.

Row j of the head reads three hidden states of the target at token j, from a low, a middle and a
high layer, and token t_{j+1}, at position j, and predicts t_{j+2}. For further drafts, it reads its
own output, before its norm, instead of the three. Its own lm_head has only the frequent tokens.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.cli import UserError
from minispec.methods.declaration import (
    Cache,
    DraftSampling,
    K,
    Nodes,
    Verify,
    head_weights,
    method,
)
from minispec.methods.fastmtp import HEAD_CASES, RecurrentHead, fastmtp
from minispec.methods.vocabulary import SubsetIds, Vocabulary
from minispec.model import Attention, Block, Config, ForwardContext, Rope, Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step
from minispec.verify import accept

OWN_VOCABULARY = "an EAGLE-3 head has its own vocabulary; omit the other one"


def default_layers(n: int) -> tuple[int, ...]:
    """The layers of n whose inputs a head reads: 2, n / 2 and n - 3. Below n = 7, some coincide."""
    return tuple(sorted({min(2, n - 1), n // 2, max(n - 3, 0)}))


class Midlayer(Block):
    """A block like the target's, but q, k and v are made from an embedding and a hidden state. With
    `norm_before_residual`, the residual is the normed hidden state."""

    def __init__(self, config: Config, norm_before_residual: bool):
        super().__init__(config, layer=0)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer=0, width=2 * config.hidden_size)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        normed = self.hidden_norm(hidden)
        pair = torch.cat([self.input_layernorm(embedded), normed], -1)  # in this order
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(pair, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))

    def extra_repr(self) -> str:
        return f"norm_before_residual={self.norm_before_residual}"


class Eagle3Head(RecurrentHead, SubsetIds):
    """The head of section 3.1, with the published names of its tensors. Its sizes, in `config`, may
    differ from those of the `target`'s config. It is its own vocabulary: `ids` are the tokens of
    lm_head's rows. With `embedding`, it has its own, too."""

    def __init__(
        self, config: Config, target: Config, ids: list[int], feature_layers: tuple[int, ...],
        norm_before_residual: bool = False, embedding: bool = False,
    ):  # fmt: skip
        super().__init__()
        d, features = config.hidden_size, len(feature_layers) * target.hidden_size
        self.config, self.rope, self.feature_layers = config, Rope(config), feature_layers
        self.target_size, self.size = target.hidden_size, target.vocab_size
        self.fc = nn.Linear(features, d, bias=False)
        self.midlayer = Midlayer(config, norm_before_residual)
        self.norm = nn.RMSNorm(d, config.norm_eps)
        self.lm_head = nn.Linear(d, len(ids), bias=False)
        if embedding:
            vectors = torch.zeros(self.size, d)
            self.embed_tokens = nn.Embedding.from_pretrained(vectors, freeze=False)
        self.host_ids = torch.tensor(ids, device="cpu")
        self.register_buffer("ids", self.host_ids.clone(), persistent=False)

    def vocabulary(self, model: Transformer, chosen: Vocabulary | None = None) -> "Eagle3Head":
        """Return the head itself. Raises UserError if another vocabulary was chosen."""
        if chosen not in (None, self):
            raise UserError(OWN_VOCABULARY)
        return self

    def embed(self, tokens: Tensor, model: Transformer) -> Tensor:
        """See RecurrentHead."""
        own = getattr(self, "embed_tokens", None)
        return model.model.embed_tokens(tokens) if own is None else own(tokens)

    def project_features(self, hidden: Tensor) -> Tensor:
        """Reduce the target's hidden states, each followed by those that enter `feature_layers`, to
        (..., n, d)."""
        return self.fc(hidden[..., self.target_size :])

    def run_block(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """See MTPHead."""
        return self.midlayer(hidden, embedded, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs (..., d) -> logits (..., number of ids)."""
        return self.lm_head(self.norm(hidden))


@method(
    "eagle3", bench=[{"k": 3}, {"k": "auto"}, {"tree": 60}], cases=HEAD_CASES,
    waits={"": (1, None), "tree": (2, None)},
)  # fmt: skip
def eagle3(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, head: Annotated[Eagle3Head, head_weights("eagle3")], k: K = 3,
    tree: Nodes = 0, draft_sampling: DraftSampling = None, head_cache: Cache = None,
    rule: Verify = accept,
) -> Iterator[Step]:  # fmt: skip
    """Draft with an EAGLE-3 head, in the loop of `fastmtp`: a chain of `k` tokens, or the paper's
    dynamic tree. The arguments are those of `fastmtp`, without a vocabulary, as the head has its
    own."""
    return fastmtp(
        model, prompt, sampling, randomness, cache=cache, head=head, k=k, tree=tree,
        draft_sampling=draft_sampling, head_cache=head_cache, rule=rule,
    )  # fmt: skip
