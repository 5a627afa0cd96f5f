"""Every method of the package as a proposer, for one engine. Given: read it before you begin.

A proposer proposes a tree, may let rows of its own ride along in the target's pass, and learns from
what came of them. It never touches the target's cache, and it decides nothing about acceptance.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from minispec import certify, fastmtp, lookahead, medusa, speculative
from minispec.methods.fastmtp import Drafter
from minispec.methods.lookahead import Window, from_prompt, pool_of
from minispec.methods.prompt_lookup import lookup
from minispec.sampling import Randomness, Sampling
from minispec.tree import Tree
from minispec.methods.vocabulary import Compressed


class Proposer:
    """Proposes nothing: plain decoding. The others say how they differ."""

    def begin(self, tokens: list[int], hidden: Tensor, capacity: int) -> None:
        """After the prefill: the prompt; the target's hidden states (n, d) of what was fed, which
        ends before the prompt's last token; and how many rows the target's cache holds."""

    def propose(
        self, tokens: list[int], room: int, sampling: Sampling, randomness: Randomness
    ) -> Tree:
        """The tree below the newest of all `tokens`; at most `room` nodes, the root included."""
        return Tree.chain(tokens[-1], [])

    def beside(self, tree: Tree, room: int) -> tuple[list[int], Tensor, Tensor]:
        """Tokens that ride along behind the tree's in a pass of at most `room` rows; and depth (n,)
        and mask (n, n) of all rows, the tree's first."""
        return [], tree.depth, tree.mask

    def learn(self, tokens: list[int], tree: Tree, path: list[int], hidden: Tensor) -> None:
        """After the commit: all tokens with the round's new ones, as many as `path` is long; and
        the target's hidden states (n, d) of all rows of the pass."""


class Draft(Proposer):
    """A small draft model."""

    def __init__(self, model, draft, k: int | Literal["auto"] = 4, draft_sampling=None):
        self.draft, self.k, self.sampling = draft, k, draft_sampling
        self.vocabulary = model.config.vocab_size
        self.length = speculative.Length(model, draft) if k == "auto" else None

    def begin(self, tokens, hidden, capacity):
        self.cache = self.draft.new_cache(capacity)

    def propose(self, tokens, room, sampling, randomness):
        k = min(self.length.best() if self.length else self.k, room - 1)
        drafts = speculative.propose(
            self.draft, self.cache, tokens, k, self.sampling or sampling, randomness,
            self.vocabulary,
        )  # fmt: skip
        return Tree.chain(tokens[-1], *drafts)

    def learn(self, tokens, tree, path, hidden):
        self.cache.truncate(min(self.cache.length, len(tokens) - 1))
        if self.length:
            self.length.observe(len(path) - 1, len(tree) - 1)


class Lookup(Proposer):
    """The text so far."""

    def __init__(self, model, k: int = 10, ngram: int = 3):
        self.k, self.ngram = k, ngram

    def propose(self, tokens, room, sampling, randomness):
        return Tree.chain(tokens[-1], lookup(tokens, min(self.k, room - 1), self.ngram))


class Medusa(Proposer):
    """Heads on the target's hidden state."""

    def __init__(self, model, heads, tree):
        self.proposed = medusa.proposer(heads, model, tree)

    def begin(self, tokens, hidden, capacity):
        self.hidden = hidden[-1:]

    def propose(self, tokens, room, sampling, randomness):
        return self.proposed(self.hidden, tokens[-1], room - 1)

    def learn(self, tokens, tree, path, hidden):
        self.hidden = hidden[path[-1:]]


class Jacobi(Proposer):
    """What the last pass said."""

    def __init__(self, model, block: int = 8):
        self.model, self.block = model, block

    def begin(self, tokens, hidden, capacity):
        self.guess = from_prompt(tokens, self.block)

    def propose(self, tokens, room, sampling, randomness):
        return Tree.chain(tokens[-1], self.guess[: room - 1])

    def learn(self, tokens, tree, path, hidden):
        said = self.model.logits(hidden[len(path) :]).argmax(-1).tolist()
        self.guess = said + self.guess[len(said) :]


class Lookahead(Proposer):
    """N-grams of Jacobi trajectories; the window rides along."""

    def __init__(self, model, window: int = 5, ngram: int = 4, guesses: int = 5,
                 pool_from_prompt: bool = False, earlier: Sequence[list[int]] = ()):  # fmt: skip
        self.model, self.sizes, self.ngram = model, (window, ngram), ngram
        self.pool, self.learns_text = pool_of(earlier, ngram, guesses), pool_from_prompt

    def begin(self, tokens, hidden, capacity):
        self.window = Window(tokens, *self.sizes)
        if self.learns_text:
            self.pool.add_all(tokens, self.ngram, len(tokens))

    def propose(self, tokens, room, sampling, randomness):
        return Tree.merged(tokens[-1], self.pool.after(tokens[-1])).first(room)

    def beside(self, tree, room):
        fits = len(tree) + len(self.window.tokens) <= room
        self.riding = self.window.tokens if fits else []
        return self.riding, *lookahead.beside(tree, self.window if fits else None)

    def learn(self, tokens, tree, path, hidden):
        if len(hidden) == len(tree) + len(self.window.tokens):
            rows = self.window.said_by(len(tree))
            said = self.model.logits(hidden[rows]).argmax(-1).tolist()
            for gram in self.window.advance(tree.tokens[0], said):
                self.pool.add(gram)
        if self.learns_text:
            self.pool.add_all(tokens, self.ngram, len(path))


class MTP(Proposer):
    """A prediction head on its own output: a chain of `k`, or a dynamic tree of `tree` nodes."""

    def __init__(self, model, head, k: int = 3, tree: int = 0, vocabulary=None,
                 draft_sampling=None):  # fmt: skip
        self.model, self.head, self.k, self.nodes = model, head, k, tree
        self.words, self.sampling = vocabulary or Compressed({}, model), draft_sampling

    def begin(self, tokens, hidden, capacity):
        offset = len(tokens) - 1 - len(hidden)  # rows of a kept cache have no hidden states
        self.drafter = Drafter(self.head, self.model, capacity, offset)
        self.drafter.extend(hidden, tokens[offset + 1 :])

    def propose(self, tokens, room, sampling, randomness):
        words = self.words.pick(tokens)
        if self.nodes:
            depth = min(self.k, (room - 1) // fastmtp.BEAM)
            nodes, drawn = min(self.nodes, room - 1), self.sampling or sampling
            return self.drafter.tree(tokens[-1], nodes, depth, words, drawn.temperature)
        drafts = self.drafter.chain(
            min(self.k, room - 1), self.sampling or sampling, randomness, words
        )
        return Tree.chain(tokens[-1], *drafts)

    def learn(self, tokens, tree, path, hidden):
        self.drafter.extend(hidden[path], tokens[-len(path) :])


class Forest(Proposer):
    """The certifier's drafted trees of any shape and kind: for proofs, not for speed."""

    def __init__(self, model, draft, shape: list[int], kind: str):
        self.draft, self.shape, self.kind = draft, shape, kind

    def propose(self, tokens, room, sampling, randomness):
        return certify.grow(self.draft, tokens, self.shape[:room], self.kind, sampling, randomness)


PROPOSERS = {
    "speculative": Draft,
    "prompt-lookup": Lookup,
    "medusa": Medusa,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "fastmtp": MTP,
}  # by the name of their method in `minispec.generate.METHODS`
