"""Every method of the package as a proposer, for one engine. Given: read it before you begin.

A proposer proposes a tree, may let rows of its own ride along in the target's pass, and learns from
what came of them. It never touches the target's cache, and it decides nothing about acceptance.
"""

from torch import Tensor

from minispec.certify.methods import cases
from minispec.methods import lookahead, medusa, speculative
from minispec.methods.adaptive import FixedNodes, Policy, as_policy
from minispec.methods.fastmtp import HeadDrafter
from minispec.methods.lookahead import Pool, Window, initial_guess
from minispec.methods.prompt_lookup import lookup
from minispec.methods.vocabulary import FullVocabulary
from minispec.sampling import Randomness, Sampling
from minispec.tree import Tree


class Proposer:
    """Proposes nothing: plain decoding. The others say how they differ."""

    def begin(self, tokens: list[int], hidden: Tensor, capacity: int) -> None:
        """After the prefill: the prompt; the target's hidden states (n, d) of what was fed, which
        ends before the prompt's last token; and how many rows fit into the target's cache."""

    def propose(
        self, tokens: list[int], free_rows: int, sampling: Sampling, randomness: Randomness
    ) -> Tree:
        """The tree below the newest of all `tokens`; at most `free_rows` nodes, root included."""
        return Tree.chain(tokens[-1], [])

    def beside(self, tree: Tree, free_rows: int) -> tuple[list[int], Tensor, Tensor]:
        """Tokens that ride along behind the tree's in a pass of at most `free_rows` rows; and the
        depth (n,) and mask (n, n) of all rows, the tree's first."""
        return [], tree.depth, tree.mask

    def learn(self, tokens: list[int], tree: Tree, path: list[int], hidden: Tensor) -> None:
        """After the commit: all tokens, the round's new ones (as many as `path` is long) included;
        and the target's hidden states (n, d) of all rows of the pass."""


class Drafted(Proposer):
    """Chains of `k` drafts, which a subclass draws in `drafts`; `k` is a number, or a policy that
    learns how many pay."""

    def __init__(self, k: int | Policy, draft_sampling: Sampling | None):
        self.k, self.sampling = k, draft_sampling

    def propose(self, tokens, free_rows, sampling, randomness):
        k = min(self.k if isinstance(self.k, int) else self.k.choose(), free_rows - 1)
        drafts = self.drafts(tokens, k, self.sampling or sampling, randomness)
        return Tree.chain(tokens[-1], *drafts)

    def learn(self, tokens, tree, path, hidden):
        if not isinstance(self.k, int):
            self.k.observe(drafted=len(tree) - 1, accepted=len(path) - 1)


class Draft(Drafted):
    """A small draft model."""

    def __init__(self, model, draft, k: int | Policy = 4, draft_sampling=None):
        super().__init__(k, draft_sampling)
        self.draft, self.vocabulary = draft, model.config.vocab_size

    def begin(self, tokens, hidden, capacity):
        self.cache = self.draft.new_cache(capacity)

    def drafts(self, tokens, k, sampling, randomness):
        return speculative.propose(
            self.draft, self.cache, tokens, k, sampling, randomness, self.vocabulary
        )

    def learn(self, tokens, tree, path, hidden):
        super().learn(tokens, tree, path, hidden)
        self.cache.truncate(min(self.cache.length, len(tokens) - 1))


class Lookup(Drafted):
    """The text so far."""

    def __init__(self, model, k: int | Policy = 10, ngram: int = 3):
        super().__init__(k, None)
        self.ngram = ngram

    def drafts(self, tokens, k, sampling, randomness):
        return lookup(tokens, k, self.ngram), []


class Medusa(Proposer):
    """Heads on the target's hidden state."""

    def __init__(self, model, heads, tree: list[medusa.RankPath] | Policy,
                 vocabulary=None):  # fmt: skip
        self.heads, self.tree = heads, tree
        self.vocabulary = vocabulary or FullVocabulary(model)
        self.policy = tree if hasattr(tree, "choose") else None
        if self.policy is None:
            self.tree = medusa.with_prefixes(tree, len(heads), model.config.vocab_size)

    def begin(self, tokens, hidden, capacity):
        self.hidden = hidden[-1:]

    def propose(self, tokens, free_rows, sampling, randomness):
        draft_head, root = self.vocabulary.select(tokens), tokens[-1]
        tree = self.tree if self.policy is None or self.policy.drafting() else []
        return medusa.propose(self.heads, draft_head, self.hidden, root, tree, free_rows - 1)

    def learn(self, tokens, tree, path, hidden):
        if self.policy is not None:
            self.policy.observe(drafted=len(tree) - 1, accepted=len(path) - 1)
        self.hidden = hidden[path[-1:]]


class Jacobi(Proposer):
    """What the last pass said."""

    def __init__(self, model, block: int = 8):
        self.model, self.block = model, block

    def begin(self, tokens, hidden, capacity):
        self.guess = initial_guess(tokens, self.block)

    def propose(self, tokens, free_rows, sampling, randomness):
        return Tree.chain(tokens[-1], self.guess[: free_rows - 1])

    def learn(self, tokens, tree, path, hidden):
        predicted = self.model.logits(hidden[len(path) :]).argmax(-1).tolist()
        self.guess = predicted + self.guess[len(predicted) :]


class Lookahead(Proposer):
    """N-grams of Jacobi trajectories; the window rides along."""

    def __init__(self, model, window: int = 5, ngram: int = 4, guesses: int = 5,
                 pool_from_prompt: bool = False):  # fmt: skip
        self.model, self.sizes, self.ngram = model, (window, ngram), ngram
        self.pool, self.learns_text = Pool(guesses), pool_from_prompt

    def begin(self, tokens, hidden, capacity):
        self.window = Window(tokens, *self.sizes)
        if self.learns_text:
            self.pool.add_all(tokens, self.ngram, len(tokens))

    def propose(self, tokens, free_rows, sampling, randomness):
        return Tree.merged(tokens[-1], self.pool.after(tokens[-1])).first(free_rows)

    def beside(self, tree, free_rows):
        fits = len(tree) + len(self.window.tokens) <= free_rows
        self.riding = self.window.tokens if fits else []
        return self.riding, *lookahead.combined_mask(tree, self.window if fits else None)

    def learn(self, tokens, tree, path, hidden):
        if len(hidden) == len(tree) + len(self.window.tokens):
            rows = self.window.predicting_rows(len(tree))
            predicted = self.model.logits(hidden[rows]).argmax(-1).tolist()
            for gram in self.window.advance(tree.tokens[0], predicted):
                self.pool.add(gram)
        if self.learns_text:
            self.pool.add_all(tokens, self.ngram, len(path))


class MTP(Drafted):
    """A prediction head on its own output: a chain or, with a `tree`, that many nodes."""

    def __init__(self, model, head, k: int | Policy = 3, tree: int | Policy = 0,
                 vocabulary=None, draft_sampling=None):  # fmt: skip
        self.nodes = as_policy(tree, FixedNodes) if tree != 0 else None
        super().__init__(self.nodes or k, draft_sampling)
        self.model, self.head = model, head
        self.vocabulary = vocabulary or FullVocabulary(model)

    def begin(self, tokens, hidden, capacity):
        offset = len(tokens) - 1 - len(hidden)  # rows of a kept cache have no hidden states
        cache = self.head.new_cache(capacity)
        self.drafter = HeadDrafter(self.head, self.model, cache, offset, nodes=self.nodes or 0)
        self.drafter.extend(hidden, tokens[offset + 1 :])

    def propose(self, tokens, free_rows, sampling, randomness):
        if self.nodes is None:
            return super().propose(tokens, free_rows, sampling, randomness)
        draft_head = self.vocabulary.select(tokens)
        return self.drafter.tree(tokens, free_rows - 1, draft_head, {})

    def drafts(self, tokens, k, sampling, randomness):
        draft_head = self.vocabulary.select(tokens)
        drafts, draft_probs = self.drafter.chain(k, sampling, randomness, draft_head)
        return drafts.tolist(), draft_probs

    def learn(self, tokens, tree, path, hidden):
        super().learn(tokens, tree, path, hidden)
        self.drafter.extend(hidden[path], tokens[-len(path) :])


class Forest(Proposer):
    """The certifier's drafted trees of every shape and kind: for proofs, not for speed."""

    def __init__(self, model, draft, shape: str, kind: str):
        self.draft, self.shape, self.kind = draft, cases.TREE_SHAPES[shape], kind

    def propose(self, tokens, free_rows, sampling, randomness):
        shape = self.shape[:free_rows]
        return cases.grow(self.draft, tokens, shape, self.kind, sampling, randomness)


PROPOSERS = {
    "speculative": Draft,
    "prompt-lookup": Lookup,
    "medusa": Medusa,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "fastmtp": MTP,
}  # by the name of their method in `minispec.generate.METHODS`
