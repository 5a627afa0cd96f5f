"""One decoder-only transformer for the llama family: llama, mistral, qwen2, qwen3, mimo.

Modules carry the tensor names of Hugging Face checkpoints, so loading is assignment.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.int8 import Int8
from minispec.linear import Joined


@dataclass(frozen=True)
class Config:
    """What the mathematics of the model depends on; `checkpoint` reads it from a config.json."""

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
    rope_scaling: dict | None = None  # rope_type llama3, linear or yarn and its parameters
    tied: bool = True  # lm_head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head's q and k, before the rotation
    bos_id: int | None = None  # begins every text, where the model was trained so
    eos_ids: tuple[int, ...] = ()  # each ends one


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the quotient in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        # tensors of each type, or every pass would make and cast them; without dimensions they go
        # with any device
        self.numbers = size**-0.5, eps**0.5
        self.roots = {
            dtype: torch.tensor(self.numbers, dtype=dtype, device="cpu").unbind()
            for dtype in (torch.float32, torch.float64)
        }

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype in self.roots else x.float()
        per_root, root_eps = self.roots[wide.dtype]
        if torch.compiler.is_compiling():  # a graph has constants, on any device
            per_root, root_eps = (wide.new_full((), number) for number in self.numbers)
        # half as many operators as F.rms_norm, which is not fused on a CPU
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        y = wide / torch.hypot(norm * per_root, root_eps)
        return (y if wide is x else y.to(x.dtype)) * self.weight


class Rope(nn.Module):
    """Rotary position embedding in the half-split form, with llama3, linear and yarn scaling."""

    def __init__(self, config: Config):
        super().__init__()
        # (head_dim / 2,), no buffer: model.to(bfloat16) must leave it in float32
        self.frequencies, self.scale = rope_frequencies(config)
        self.table: tuple[Tensor, Tensor] | None = None  # for positions from 0 on

    def lookup(
        self, position: Tensor | slice, dtype: torch.dtype, length: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`forward` of positions below `length`, from a table made once."""
        known = self.table and self.table[0]
        if known is None or len(known) < length or known.dtype != dtype or known.device != device:
            with torch.inference_mode(False):  # kept beyond a run, also for passes that are trained
                self.table = self(torch.arange(length, device=device), dtype)
        return self.table[0][position], self.table[1][position]

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (..., n, 1, head_dim), for positions (..., n), as `rotate` wants."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.frequencies.device != position.device:
            self.frequencies = self.frequencies.to(position.device)
        angle = position[..., None].to(wide) * self.frequencies.to(wide)
        cos = torch.cat([angle, angle], -1).cos()[..., None, :]
        sin = torch.cat([-angle, angle], -1).sin()[..., None, :]
        return (cos * self.scale).to(dtype), (sin * self.scale).to(dtype)


def rope_frequencies(config: Config) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions, (head_dim / 2,), and a factor."""
    d, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {}
    # always float32, as the checkpoints were trained, and never on the meta device
    index = torch.arange(0, d, 2, dtype=torch.float32, device="cpu")
    base = 1.0 / theta ** (index / d)
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    if kind == "default":
        return base, 1.0
    if kind == "linear":
        return base / factor, 1.0
    original = scaling.get("original_max_position_embeddings") or config.context
    if kind == "llama3":  # long waves stretched, short ones kept, a ramp between
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * base / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * base + (1 - keep) * base / factor, 1.0
    assert kind == "yarn", kind  # Peng et al. 2023 (arXiv 2309.00071)

    def dimension(turns: float) -> float:
        """Index of the pair that turns this often within the original context."""
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    keep = 1 - ((torch.arange(d // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    return keep * base + (1 - keep) * base / factor, yarn_scale(scaling, factor)


def yarn_scale(scaling: dict, factor: float) -> float:
    """Yarn's temperature, carried by cos and sin (0.1 ln s + 1, or DeepSeek's quotient of two)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its angle; the first half of `sin` is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass(frozen=True)
class Pass:
    """What all layers of one forward pass share."""

    cos: Tensor  # (B or 1, n, 1, head_dim)
    sin: Tensor
    visible: Tensor | None = None  # (B or 1, 1, n, keys), 0 or -inf; None: all, or see `causal`
    cache: KVCache | None = None
    slots: Tensor | None = None  # (B, n): cache rows to write; None: those behind the committed
    span: int = 0  # cache rows to read
    causal: bool = False  # each row sees itself and those before it


class Attention(nn.Module):
    """Grouped-query attention over the cache, or over the pass itself."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = None
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.qkv: Joined | None = None  # of the three projections, once prepared
        self.out: Joined | None = None

    def prepare(self, quantize: bool) -> None:
        self.qkv = Joined(self.q_proj, self.k_proj, self.v_proj, quantize=quantize)
        self.out = Joined(self.o_proj, quantize=quantize)

    def project(self, x: Tensor) -> Tensor:
        """q, k and v side by side."""
        if self.qkv is not None:
            return self.qkv(x)
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        B, n, _ = x.shape
        qkv = self.project(x).view(B, n, -1, self.head_dim)  # (B, n, heads + 2 kv_heads, head_dim)
        turning = self.heads + self.kv_heads
        qk, v = qkv.narrow(2, 0, turning), qkv.narrow(2, turning, self.kv_heads)
        if self.q_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        qk = rotate(qk, now.cos, now.sin)
        q, k = qk.narrow(2, 0, self.heads), qk.narrow(2, self.heads, self.kv_heads)
        if now.cache is not None:
            k, v = now.cache.write(self.layer, now.slots, k, v, now.span)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=now.visible,
            is_causal=now.causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # (B, heads, n, head_dim)
        return (self.out or self.o_proj)(y.transpose(1, 2).reshape(B, n, -1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=config.mlp_bias)
        self.up_proj = nn.Linear(*sizes, bias=config.mlp_bias)
        self.down_proj = nn.Linear(*reversed(sizes), bias=config.mlp_bias)
        self.gate_up: Joined | None = None  # of both, once prepared
        self.down: Joined | None = None

    def prepare(self, quantize: bool) -> None:
        self.gate_up = Joined(self.gate_proj, self.up_proj, quantize=quantize)
        self.down = Joined(self.down_proj, quantize=quantize)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up is not None:
            gate, up = self.gate_up(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return (self.down or self.down_proj)(F.silu(gate) * up)


class Preparable(nn.Module):
    """A module that `prepare` makes fit for inference. Its own `.to()`, `.train()`, `state_dict()`
    and `load_state_dict()` call `undo` first, as joined or packed copies would not follow; who
    reads its `parameters()` calls it himself."""

    def undo(self) -> None:
        """Plain layers again."""
        raise NotImplementedError

    def _apply(self, *arguments, **options):  # what .to(), .double() and .cuda() go through
        self.undo()
        return super()._apply(*arguments, **options)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.undo()
        return super().train(mode)

    def load_state_dict(self, *arguments, **options):
        self.undo()
        return super().load_state_dict(*arguments, **options)

    def state_dict(self, *arguments, **options):
        self.undo()
        return super().state_dict(*arguments, **options)

    def __getstate__(self):  # what copy.deepcopy and torch.save of a whole module go through
        self.undo()
        return super().__getstate__()


class Block(Preparable):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def prepare(self, quantize: bool = False) -> "Block":
        """Join and pack weights for inference; converting the block undoes it."""
        self.undo()
        self.self_attn.prepare(quantize)
        self.mlp.prepare(quantize)
        return self

    def undo(self) -> None:
        for part, name in (
            (self.self_attn, "qkv"), (self.self_attn, "out"), (self.mlp, "gate_up"),
            (self.mlp, "down"),
        ):  # fmt: skip
            if getattr(part, name) is not None:
                getattr(part, name).undo()
                setattr(part, name, None)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), now)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, blocks and final norm: what checkpoints prefix with `model.`."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Transformer(Preparable):
    """`hidden = model(tokens)`, then `model.logits(hidden)`: it knows nothing of speculation."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.rope = Rope(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.head: Joined | None = None  # of lm_head, once prepared
        self.compiled: Callable[..., Tensor] | None = None  # `layers` as a graph: compiled.py

    def prepare(self, quantize: bool = False) -> "Transformer":
        """Join and pack weights for inference, or make them int8: fewer operators a pass, and flat
        cost over the rows of a draft. The weights must not change any more; converting the model
        undoes it."""
        self.undo()
        for block in self.model.layers:
            block.prepare(quantize)
        return self.prepare_head(quantize)

    def prepare_head(self, quantize: bool = False) -> "Transformer":
        """`prepare` for lm_head alone, and an embedding tied to it."""
        self.head = None
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.head = Joined(self.lm_head, quantize=quantize, looked_up=self.config.tied)
        if self.config.tied:
            self.model.embed_tokens.weight = self.lm_head.weight
        return self

    def prepare_part(self, name: str, quantize: bool = False) -> None:
        """`prepare` for the part whose parameter `name` has come, if that was its last one: called
        for each as it is loaded, so that all weights are never there twice."""
        if name.startswith("model.layers."):
            block = self.model.layers[int(name.split(".")[2])]
            if not any(p.is_meta for p in block.parameters()):
                block.prepare(quantize)
        elif name == ("model.embed_tokens.weight" if self.config.tied else "lm_head.weight"):
            self.prepare_head(quantize)

    def undo(self) -> None:
        """Plain layers again; int8 weights become the floats they stand for."""
        self.compiled = None
        for block in self.model.layers:
            block.undo()
        if self.head is not None:
            self.head.undo()
            self.head = None
            if self.config.tied:
                self.model.embed_tokens.weight = self.lm_head.weight

    @property
    def quantized(self) -> bool:
        """Whether its linear layers are int8."""
        return self.head is not None and isinstance(self.head.packed, Int8)

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def new_cache(self, capacity: int | None = None, batch: int = 1) -> KVCache:
        """An empty cache, by default as long as the context; for graphs on a GPU some longer."""
        c, capacity = self.config, capacity or self.config.context

        def make(rows: int) -> KVCache:
            each = c.layers, c.kv_heads, c.head_dim
            return KVCache(*each, rows, batch, self.dtype, self.device)

        if self.compiled is None or batch > 1:
            return make(capacity)
        return self.compiled.new_cache(make, capacity, c.context)

    def forward(
        self,
        tokens: list[int] | Tensor,
        cache: KVCache | None = None,
        depth: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, (B, n, hidden_size), of tokens (n,) or (B, n).

        The rows follow the cache's committed prefix, which all of them see, and are written behind
        it as scratch. `depth` (n,) is each row's distance from the first row and `mask` (n, n) says
        which rows it sees (itself included); absent, the rows are a plain causal continuation.
        Without a cache there is no prefix.
        """
        tokens = torch.as_tensor(tokens, device=self.device)
        tokens = tokens[None] if tokens.dim() == 1 else tokens  # (B, n)
        now = self.plan(tokens.shape[1], cache, depth, mask)
        return (self.compiled or self.layers)(tokens, now)

    def embed(self, tokens: Tensor) -> Tensor:
        """(...) -> (..., hidden_size)."""
        if self.head is not None and self.config.tied:
            return self.head.rows(tokens)
        return self.model.embed_tokens(tokens)

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of lm_head's weights, (..., hidden_size)."""
        return self.lm_head.weight[ids] if self.head is None else self.head.rows(ids)

    def layers(self, tokens: Tensor, now: Pass) -> Tensor:
        """From tokens (B, n) to their hidden states (B, n, hidden_size)."""
        x = self.embed(tokens)
        for block in self.model.layers:
            x = block(x, now)
        return self.model.norm(x)

    def prefill(self, tokens: list[int], cache: KVCache, block: int = 512) -> Tensor:
        """Feed and commit `tokens`, a block at a time so that a long prompt needs no n × n mask;
        their hidden states (1, n, hidden_size)."""
        hidden = [torch.empty(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)]
        for start in range(0, len(tokens), block):
            part = tokens[start : start + block]
            hidden.append(self(part, cache))
            cache.commit(list(range(len(part))))
        return torch.cat(hidden[1:] or hidden, 1)

    def plan(
        self, n: int, cache: KVCache | None, depth: Tensor | None, mask: Tensor | None
    ) -> Pass:
        """Positions and visibility of a pass over `n` rows."""
        weight = self.model.norm.weight  # asked once: a module's attributes take their time
        device, dtype = weight.device, weight.dtype
        if n == 1 and cache is not None and len(cache.lengths) == 1 and cache.room:
            at = cache.length + (0 if depth is None else int(depth))  # one row, which sees all
            turned = self.rope.lookup(slice(at, at + 1), dtype, cache.capacity, device)
            return Pass(*(each[None] for each in turned), cache=cache, span=cache.length + 1)
        depth = torch.arange(n, device=device) if depth is None else depth.to(device)
        mask = mask if mask is None else mask.to(device)
        if cache is None:
            cos, sin = self.rope(depth[None], dtype)
            if mask is None:
                return Pass(cos, sin, causal=True)
            return Pass(cos, sin, self.bias(mask)[None, None])
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        slots, position, visible = cache.place(n, depth, mask)
        turned = self.rope.lookup(position, dtype, cache.capacity, device)
        slots = None if len(cache.lengths) == 1 else slots  # a slice is cheaper than indices
        return Pass(*turned, self.bias(visible), cache, slots, visible.shape[-1])

    def bias(self, visible: Tensor) -> Tensor:
        """0 where a row sees a key, else -inf: made once a pass, where attention would turn a mask
        of booleans into this anew in every layer."""
        zeros = self.model.norm.weight.new_zeros(visible.shape)
        return zeros.masked_fill_(~visible, -math.inf)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., vocab_size)."""
        return self.lm_head(hidden) if self.head is None else self.head(hidden)


def count_parameters(module: nn.Module) -> int:
    """How many numbers it holds; a tied weight counts once."""
    return sum(p.numel() for p in module.parameters())
