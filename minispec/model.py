"""A decoder-only transformer for the llama family: llama, mistral, qwen2, qwen3, mimo.

Modules are named as in Hugging Face checkpoints, so a checkpoint is this model's state dict.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.sampling import OneHot, Sampling, probs

CHUNK = 512  # tokens per prefill pass, so that a long prompt of n tokens needs no n × n mask


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a model; `checkpoints/config.py` reads them from a config.json."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int  # max_position_embeddings
    model_type: str = "llama"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # rope_type (llama3, linear or yarn) and its parameters
    tied: bool = True  # lm_head shares the embedding's weight
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head's q and k, before the rotation
    bos_id: int | None = None  # starts every prompt, if the model was trained that way
    eos_ids: tuple[int, ...] = ()  # any of these ends the text
    ranks: int = 1  # that share the model (see distributed.py); the sizes are a rank's share
    kv_copies: int = 1  # ranks that hold the same key/value heads


# ---- positions -----------------------------------------------------------------------------------


class Rope:
    """Rotary position embedding (Su et al. 2021) in its half-split form, with llama3, linear and
    yarn scaling."""

    def __init__(self, config: Config):
        # not a buffer: model.to(bfloat16) must leave the frequencies (head_dim / 2,) in float32
        self.frequencies, self.scale = rope_frequencies(config)

    def __call__(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (..., n, 1, head_dim / 2), for positions (..., n)."""
        precise = torch.promote_types(dtype, torch.float32)
        self.frequencies = self.frequencies.to(position.device)
        angle = (position[..., None].to(precise) * self.frequencies.to(precise))[..., None, :]
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) of x (..., n, heads, head_dim) by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rope_frequencies(config: Config) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, (head_dim / 2,), and a factor for cos and sin."""
    d, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {}
    # always in float32, as in training, and never on the meta device
    index = torch.arange(0, d, 2, dtype=torch.float32, device="cpu")
    base = 1.0 / theta ** (index / d)
    rope_type, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    if rope_type == "default":
        return base, 1.0
    if rope_type == "linear":
        return base / factor, 1.0
    original = scaling.get("original_max_position_embeddings") or config.context
    if rope_type == "llama3":  # stretch long waves, keep short ones, interpolate in between
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * base / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * base + (1 - keep) * base / factor, 1.0
    assert rope_type == "yarn", rope_type  # Peng et al. 2023 (arXiv 2309.00071)

    def pair_with(turns: float) -> float:
        """Index of the pair that makes this many turns within the original context."""
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    # the paper's defaults are 32 and 1
    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    keep = 1 - ((torch.arange(d // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    return keep * base + (1 - keep) * base / factor, yarn_scale(scaling, factor)


def yarn_scale(scaling: dict, factor: float) -> float:
    """YaRN's attention temperature, applied to cos and sin: 0.1 ln s + 1, or, as in DeepSeek, the
    ratio of two such terms."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


@dataclass(frozen=True)
class ForwardContext:
    """Inputs that all layers share during one forward pass over n rows."""

    cos: Tensor  # (B or 1, n, 1, head_dim / 2)
    sin: Tensor
    attn_mask: Tensor | None = None  # (B or 1, 1, n, keys), 0 or -inf; None: causal
    cache: KVCache | None = None
    slots: Tensor | None = None  # (B, n), the cache rows that this pass writes


def make_context(
    rope: Rope, like: Tensor, n: int, cache: KVCache | None, depth: Tensor | None,
    mask: Tensor | None,
) -> ForwardContext:  # fmt: skip
    """Compute positions and attention mask for a pass over `n` rows, with the device and dtype of
    `like`. The other arguments are those of Transformer.forward."""
    depth = torch.arange(n, device=like.device) if depth is None else depth.to(like.device)
    mask = mask if mask is None else mask.to(like.device)
    if cache is None:
        attn_mask = None if mask is None else additive_mask(mask[None, None], like)
        return ForwardContext(*rope(depth[None], like.dtype), attn_mask)
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=like.device).tril()
    slots, position, attn_mask = cache.place(n, depth, mask)
    return ForwardContext(*rope(position, like.dtype), additive_mask(attn_mask, like), cache, slots)


def additive_mask(attn_mask: Tensor, like: Tensor) -> Tensor:
    """0 where a row attends to a key, -inf elsewhere. Built once per pass; SDPA would otherwise
    convert the boolean mask in every layer."""
    return like.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Attention of q (B, n, heads, head_dim) over k and v (B, keys, kv_heads, head_dim), of q's
    shape. All query heads that share a key head attend as rows of one head: grouped queries and a
    mask together would keep SDPA on a GPU from using a fused kernel."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if attn_mask is None:
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True
        )  # (B, heads, n, head_dim)
        return y.transpose(1, 2)
    n, group = q.shape[1], q.shape[2] // k.shape[1]
    rows = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = attn_mask.repeat(1, 1, group, 1)
    y = F.scaled_dot_product_attention(rows, k, v, mask)  # (B, kv_heads, group · n, head_dim)
    return y.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).flatten(2, 3)


# ---- layers --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention over the cache or, without one, over the rows of the pass. Its input
    has `width` columns (default: hidden_size)."""

    def __init__(self, config: Config, layer: int, width: int | None = None):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.attend = attend  # fast/bitwise.py gives it another order of sums
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        width = width or config.hidden_size
        self.q_proj = nn.Linear(width, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = norm(config.head_dim, config.norm_eps)
        self.k_norm = norm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        B, n, _ = x.shape
        q = self.q_proj(x).view(B, n, -1, self.head_dim)  # (B, n, heads, head_dim)
        k = self.k_proj(x).view(B, n, -1, self.head_dim)  # (B, n, kv_heads, head_dim)
        v = self.v_proj(x).view(B, n, -1, self.head_dim)
        q = rotate(self.q_norm(q), ctx.cos, ctx.sin)
        k = rotate(self.k_norm(k), ctx.cos, ctx.sin)
        if ctx.cache is not None:
            k, v = ctx.cache.write(self.layer, ctx.slots, k, v)  # (B, span, kv_heads, head_dim)
        return self.o_proj(self.attend(q, k, v, ctx.attn_mask).reshape(B, n, -1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        d, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(d, inner, bias)
        self.up_proj = nn.Linear(d, inner, bias)
        self.down_proj = nn.Linear(inner, d, bias)
        self.activation = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, blocks and final norm. Checkpoints prefix their names with `model.`."""

    def __init__(self, config: Config):
        super().__init__()
        # not normal, as nn.Embedding's default: on the meta device, that imports torch's compiler
        vectors = torch.empty(config.vocab_size, config.hidden_size).uniform_(-1, 1)
        self.embed_tokens = nn.Embedding.from_pretrained(vectors, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, tokens: Tensor, ctx: ForwardContext, feature_layers: tuple[int, ...] = ()
    ) -> Tensor:
        x = self.embed_tokens(tokens)  # (B, n, hidden_size)
        features = []
        for i, block in enumerate(self.layers):
            if i in feature_layers:
                features.append(x)
            x = block(x, ctx)
        x = self.norm(x)
        return torch.cat([x, *features], -1) if features else x


class Transformer(nn.Module):
    """`hidden = model(tokens)`, then `model.logits(hidden)`. It knows nothing about speculation."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.rope = config, Rope(config)
        self.source: Path | None = None  # the directory it was loaded from
        self.memo: dict = {}  # drafts and heads loaded for this model, and measured costs
        # how it runs, if `fast` has changed that; copies and pickles of the model are plain again
        self.compiled: Callable[..., Tensor] | None = None  # in place of self.model
        self.graphs = None  # a captured.PassGraphs: caches and passes for CUDA graphs
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def __getstate__(self) -> dict:
        """Copies and pickles start with an empty memo."""
        return self.__dict__ | {"memo": {}}

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def new_cache(self, capacity: int | None = None, sequences: int | None = None) -> KVCache:
        """Return an empty cache, for a batch if there are `sequences`. Its default capacity is the
        model's context length."""
        c = self.config
        sizes = c.layers, c.kv_heads, c.head_dim, capacity or c.context, self.dtype, self.device
        if self.graphs is not None and sequences is None:
            return self.graphs.new_cache(*sizes)
        return KVCache(*sizes, sequences or 1)

    def forward(
        self, tokens: list[int] | Tensor, cache: KVCache | None = None,
        depth: Tensor | None = None, mask: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:  # fmt: skip
        """Tokens (n,) or (B, n) -> hidden states after the final norm, (B, n, hidden_size).

        The rows follow the cache's committed prefix, which all of them attend to, and are written
        after it as scratch. `depth` (n,) is each row's distance from the first row. `mask` (n, n)
        is true at [i, j] if row i attends to row j; every row attends to itself. (With more columns
        than rows, it begins with the last rows of the prefix.) By default the rows are a plain
        causal continuation. Without a cache there is no prefix.

        The hidden states that enter `feature_layers`, which are counted from 0, follow those after
        the norm in each row: (B, n, (1 + number of layers) * hidden_size).
        """
        run = self.plain_pass if self.graphs is None else self.graphs.run_pass
        return run(tokens, cache, depth, mask, feature_layers)

    def plain_pass(
        self, tokens: list[int] | Tensor, cache: KVCache | None, depth: Tensor | None,
        mask: Tensor | None, feature_layers: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        """`forward` without CUDA graphs."""
        tokens = torch.as_tensor(tokens, device=self.device)
        tokens = tokens[None] if tokens.dim() == 1 else tokens  # (B, n)
        ctx = make_context(self.rope, self.model.norm.weight, tokens.shape[1], cache, depth, mask)
        run = self.compiled or self.model
        return run(tokens, ctx, feature_layers=feature_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., vocab_size)."""
        return self.lm_head(hidden)

    def score(
        self, tokens: list[int] | Tensor, cache: KVCache, sampling: Sampling,
        depth: Tensor | None = None, mask: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[list[int], Tensor, Tensor | OneHot]:  # fmt: skip
        """A pass over tokens (n,), which may be on the device, as in `forward`, and the
        distributions after them (see `probs`), with one synchronisation. Returns the tokens, the
        hidden states (n, ...) and the distributions."""
        arguments = tokens, cache, depth, mask, feature_layers
        if self.graphs is not None and sampling.temperature == 0:
            if found := self.graphs.score(*arguments):
                return found
        on_host = torch.as_tensor(tokens).to("cpu", non_blocking=True)
        hidden = self(*arguments)[0]
        p = probs(self.logits(hidden[:, : self.config.hidden_size]), sampling)  # waits
        return on_host.tolist(), hidden, p

    def prefill(self, tokens: list[int] | Tensor, cache: KVCache, chunk: int = CHUNK) -> Tensor:
        """Feed and commit `tokens`, (n,) or (B, n), in chunks. Returns the hidden state of the last
        token, (B, 1, hidden_size), or (1, 0, hidden_size) if there are no tokens."""
        last = torch.empty(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for hidden in self.prefill_chunks(tokens, cache, chunk):
            last = hidden[:, -1:]
        return last

    def prefill_chunks(
        self, tokens: list[int] | Tensor, cache: KVCache, chunk: int = CHUNK, **options
    ) -> Iterator[Tensor]:
        """Feed and commit `tokens`. Yields the hidden states (B, n, hidden_size) of each chunk.
        `options` are passed to `forward`."""
        tokens = torch.as_tensor(tokens)
        for start in range(0, tokens.shape[-1], chunk):
            part = tokens[..., start : start + chunk]
            hidden = self(part, cache, **options)
            cache.commit(list(range(part.shape[-1])))
            yield hidden


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, with int8 weights but without token ids. A tied weight counts once."""
    tensors = *module.parameters(), *module.buffers()
    return sum(tensor.numel() for tensor in tensors if tensor.dtype != torch.int64)
