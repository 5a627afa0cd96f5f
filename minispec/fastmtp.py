"""FastMTP (arXiv 2509.18362): one multi-token prediction head, of MiMo's layout, drafts K tokens by
running on its own output; the target verifies them in one pass.

Row j of the head takes the target's hidden state h_j, after its final norm, and token t_{j+1}, at
position j, and predicts t_{j+2}. Drafting goes on with the head's own output in the place of h.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from weakref import ref

import torch
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.checkpoint import (
    assign,
    check_attention,
    check_tokenizer,
    check_width,
    read_tensors,
    resolve,
    weight_files,
    write_tensors,
)
from minispec.cost import cost_curve, curve_at, in_passes, once
from minispec.errors import UserError
from minispec.model import Block, Config, Pass, RMSNorm, Transformer
from minispec.sampling import OneHot, Randomness, Sampling, best, probs
from minispec.tokenizer import Tokenizer
from minispec.tree import Step, Tree
from minispec.verify import accept
from minispec.vocabulary import Compressed, Subset

BEAM = 4  # nodes of a level that a tree expands
# Least temperature of a tree's probabilities: greedy stories got 4.20 tokens a pass so, 3.88 at 1
# (the shipped head, k 4, 8 nodes), as the likeliest token is the target's more often than it says.
SHARP = 0.5
MOST = 8  # the longest chain that `auto` considers
LEARN, LEAN = 0.1, 0.005  # how fast `auto` follows what was accepted; and retries longer chains

# ---- the head ------------------------------------------------------------------------------------


class Head(Block):
    """One block like the target's, fed with a hidden state and a token; MiMo's tensor names.

    Embedding and lm_head are the target's.
    """

    def __init__(self, config: Config):
        super().__init__(config, layer=0)
        size, eps = config.hidden_size, config.norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps)
        self.config = config
        self.compiled: Callable[..., Tensor] | None = None  # `layers` as a graph: compiled.py

    def forward(self, hidden: Tensor, embedded: Tensor, now: Pass) -> Tensor:
        """Hidden states (B, n, d) and embedded tokens (B, n, d) -> (B, n, d), which feeds lm_head
        and the next step."""
        return (self.compiled or self.layers)(hidden, embedded, now)

    def undo(self) -> None:
        self.compiled = None
        super().undo()

    def layers(self, hidden: Tensor, embedded: Tensor, now: Pass) -> Tensor:
        """What `forward` computes, operator by operator."""
        pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]  # hidden first
        return self.final_layernorm(super().forward(self.input_proj(torch.cat(pair, -1)), now))

    def new_cache(self, model: Transformer, capacity: int) -> KVCache:
        """The head's own cache, of one layer."""
        c = self.config

        def make(rows: int) -> KVCache:
            return KVCache(1, c.kv_heads, c.head_dim, rows, 1, model.dtype, model.device)

        if self.compiled is None:
            return make(capacity)
        return self.compiled.new_cache(make, capacity, c.context)


class Drafter:
    """The head beside its target: its cache, and the output it drafts from.

    `offset` committed rows of the target came without hidden states (a kept cache): the head's
    cache begins behind them. Between rounds it holds a row for each other one.
    """

    def __init__(self, head: Head, model: Transformer, capacity: int, offset: int):
        self.head, self.model, self.offset = head, model, offset
        self.cache = head.new_cache(model, capacity)
        self.last: Tensor | None = None  # (1, d): the head's output at the newest token

    def run(self, hidden: Tensor, tokens: list[int], depth: Tensor | None = None,
            mask: Tensor | None = None) -> Tensor:  # fmt: skip
        """Outputs (n, d) of scratch rows: hidden states (n, d), and a token each."""
        model, n = self.model, len(tokens)
        if self.offset:
            depth = (torch.arange(n) if depth is None else depth) + self.offset
        now = model.plan(n, self.cache, depth, mask)
        embedded = model.embed(torch.tensor(tokens, device=model.device))
        return self.head(hidden[None], embedded[None], now)[0]

    def extend(self, hidden: Tensor, tokens: list[int]) -> None:
        """Take in the target's own hidden states (n, d), each with the token that came after it."""
        for start in range(0, len(tokens), 512):  # a long prompt needs no n × n mask
            part = tokens[start : start + 512]
            self.last = self.run(hidden[start : start + 512], part)[-1:]
            self.cache.commit(list(range(len(part))))

    def chain(
        self, k: int, sampling: Sampling, randomness: Randomness, vocabulary: Subset
    ) -> tuple[list[int], list[Tensor | None]]:
        """At most `k` drafts, each from the head's law over `vocabulary`; and the laws over the
        full one (None: one-hot). The cache ends as it began."""
        guess: list[int] = []
        laws: list[Tensor | None] = []
        length, hidden = self.cache.length, self.last
        while hidden is not None and len(guess) < k:
            law = probs(vocabulary.logits(self.model, hidden), sampling)
            if isinstance(law, OneHot):
                guess.append(vocabulary.full(law.tokens[0]))
                laws.append(None)
            else:
                q = vocabulary.scatter(law[0])
                guess.append(randomness.categorical(q))
                laws.append(q)
            if len(guess) < k:
                hidden = self.run(hidden, guess[-1:])
                self.cache.commit([0])
        self.cache.truncate(length)
        return guess, laws

    def tree(
        self, root: int, nodes: int, depth: int, vocabulary: Subset, temperature: float = 1.0
    ) -> Tree:
        """The `nodes` likeliest nodes by the product of the head's probabilities, at `temperature`
        (at least SHARP), along their paths, none deeper than `depth`; of a level only the BEAM
        likeliest are expanded (EAGLE-2, Li et al. 2024). The cache ends as it began."""
        if self.last is None:
            return Tree.chain(root, [])
        tokens, parents, chance = [root], [-1], [1.0]
        expanded, out = [], {0: self.last}  # node -> the head's output (1, d) there
        level, kept = [0], []
        for last in (False,) * (depth - 1) + (True,):
            logits = vocabulary.logits(self.model, torch.cat([out[i] for i in level]))
            laws = (logits / max(temperature, SHARP)).softmax(-1)
            likely, first_new = laws.topk(min(nodes, laws.shape[-1])), len(tokens)
            for node, ps, js in zip(level, likely.values.tolist(), likely.indices.tolist()):
                tokens += [vocabulary.full(j) for j in js]
                parents += [node] * len(js)
                chance += [chance[node] * p for p in ps]
            # stable: of equal chances the parent, which has the smaller number, comes first
            kept = sorted(range(1, len(tokens)), key=lambda i: -chance[i])[:nodes]
            level = [i for i in kept if i >= first_new][:BEAM]
            if last or not level:
                break
            expanded += level
            rows = subtree(tokens, parents, expanded)
            inputs = torch.cat([out[parents[i]] for i in expanded])
            outputs = self.run(inputs, rows.tokens[1:], rows.depth[1:] - 1, rows.mask[1:, 1:])
            out |= dict(zip(expanded, outputs[:, None]))
        return subtree(tokens, parents, sorted(kept))


def subtree(tokens: list[int], parents: list[int], nodes: list[int]) -> Tree:
    """The root and these nodes, parents among them before their children."""
    place = {0: 0} | {node: i for i, node in enumerate(nodes, start=1)}
    return Tree([tokens[0]] + [tokens[i] for i in nodes], [-1] + [place[parents[i]] for i in nodes])


# ---- decoding ------------------------------------------------------------------------------------


def fastmtp(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, head: Head, k: int | Literal["auto"] = 3, tree: int = 0,
    vocabulary: Compressed | None = None, draft_sampling: Sampling | None = None,
) -> Iterator[Step]:  # fmt: skip
    """K = `k` drafts a round from one head, section 3 of the paper; with `tree` = m instead the m
    likeliest nodes of depth at most k.

    The head draws with `draft_sampling` (default: as the target does) over the `vocabulary` of the
    text's language (default: the full one). Any choice is lossless.
    """
    check_sizes(k, tree)
    cache = cache or model.new_cache()
    drafter = Drafter(head, model, cache.capacity, offset=cache.length)
    words, drawn = vocabulary or Compressed({}, model), draft_sampling or sampling
    tokens = list(prompt)
    hidden = model.prefill(tokens[cache.length : -1], cache)[0]
    drafter.extend(hidden, tokens[drafter.offset + 1 :])
    length = Length(drafter, words) if k == "auto" else None
    yield Step()
    while True:
        depth, room = length.best() if length else k, cache.room - 1
        if tree:
            nodes = min(tree, room)
            deepest = min(depth, room // BEAM)
            guess = drafter.tree(tokens[-1], nodes, deepest, words.pick(tokens), drawn.temperature)
        else:
            drafts = drafter.chain(min(depth, room), drawn, randomness, words.pick(tokens))
            guess = Tree.chain(tokens[-1], *drafts)
        hidden = model(guess.tokens, cache, guess.depth, guess.mask)[0]
        path, fresh = accept(probs(model.logits(hidden), sampling), guess, randomness)
        cache.commit(path)
        new = guess.tokens_at(path[1:]) + [fresh]
        drafter.extend(hidden[path], new)  # in the place of the drafts' rows: the target's own
        if length:
            length.observe(guess, path)
        tokens += new
        yield Step(new, guess, path)


def check_sizes(k: int | str, tree: int) -> None:
    """Raise UserError for numbers of drafts that cannot be."""
    if k != "auto" and k < 1:
        raise UserError(f"k {k}: must be auto or at least 1")
    if k == "auto" and tree:
        raise UserError("k auto is for chains: give a tree its depth, as k 4")
    if tree < 0:
        raise UserError(f"tree {tree}: must be 0 (a chain) or a number of nodes")


class Length:
    """K for the next round: the most tokens for the cost of K drafts and a pass over K + 1 tokens.

    rate[i] is the chance that draft i + 1 is accepted if those before it were, a running mean of
    earlier rounds; behind a round's chain it leans a little to that of the draft before, or long
    chains that would pay were never found. Costs are measured once.
    """

    def __init__(self, drafter: Drafter, words: Compressed):
        self.curve = cost_curve(drafter.model)
        head, model = drafter.head, drafter.model
        subset = words.pick([])
        key = ref(head), head.compiled is not None, len(subset)
        self.draft = once(model, key, lambda: draft_cost(head, model, subset))
        self.rate = [0.8] * MOST  # prior

    def best(self) -> int:
        return max(range(1, len(self.rate) + 1), key=self.speedup)

    def speedup(self, k: int) -> float:
        """Over plain decoding."""
        tokens, chance = 1.0, 1.0
        for rate in self.rate[:k]:
            chance *= rate
            tokens += chance
        return tokens / (curve_at(self.curve, k + 1) + k * self.draft)

    def observe(self, tree: Tree, path: list[int]) -> None:
        for i, rate in enumerate(self.rate):
            if i < len(path) and tree.children(path[i]):  # a draft was tried there
                self.rate[i] += LEARN * ((len(path) > i + 1) - rate)
            elif i >= max(1, len(tree) - 1):
                self.rate[i] += LEAN * (self.rate[i - 1] - rate)


def draft_cost(head: Head, model: Transformer, vocabulary: Subset) -> float:
    """Of one draft, in passes of the target over one token."""
    drafter = Drafter(head, model, 8, offset=0)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def one_draft() -> list:
        return best(vocabulary.logits(model, drafter.run(hidden, [0])))

    return in_passes(one_draft, model)


# ---- checkpoints ---------------------------------------------------------------------------------

PREFIX = "model.mtp_layers.0."


def load_head(
    source: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None
) -> Head:
    """The head in a directory, a hub id or a file: a whole MiMo model, or the head alone.

    Raises UserError for a missing or misshapen tensor, and for heads of another tokenizer or model.
    """
    tensors, folder = read_head(source)
    check_tokenizer(str(source), folder, tokenizer)
    norm = tensors.get("hidden_layernorm.weight")
    if isinstance(norm, Tensor):
        check_width(str(source), norm.numel(), model)
    check_attention(str(source), folder, model.config)
    with torch.device("meta"):
        head = Head(model.config)
    assign(head, iter(tensors.items()), str(source), model.dtype, model.device)
    return head.eval().prepare()


def read_head(source: str | os.PathLike) -> tuple[dict[str, Tensor], Path]:
    """A head's tensors, under the names of Head's parameters, and the directory they lie in."""
    path = Path(source)
    folder = path.parent if path.is_file() else resolve(source)
    files = [path] if path.is_file() else weight_files(folder)
    tensors = {
        name.removeprefix(PREFIX): tensor
        for file in files
        for name, tensor in read_tensors(file)
        if name.startswith(PREFIX)
    }
    if not tensors:
        raise UserError(f"{source} has no prediction head: no tensors {PREFIX}*")
    return tensors, folder


def head_tensors(head: Head) -> dict[str, Tensor]:
    """Under MiMo's names; the head is unprepared afterwards."""
    head.undo()
    return {PREFIX + name: p.detach() for name, p in head.named_parameters()}


def save_head(
    head: Head, directory: Path, base: str, tokenizer: Tokenizer | None, dtype: torch.dtype,
    weights: list[float],
) -> None:  # fmt: skip
    """Write the head alone, in MiMo's names, that `load_head` reads; `weights` are those of its
    steps in the loss."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to("cpu", dtype).contiguous() for name, t in head_tensors(head).items()}
    write_tensors(tensors, directory / "model.safetensors")
    c = head.config
    config = {
        "base_model_name_or_path": base,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": len(weights),
        "mtp_loss_step_weights": [round(weight, 4) for weight in weights],
        "tokenizer_fingerprint": tokenizer.fingerprint if tokenizer else None,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
