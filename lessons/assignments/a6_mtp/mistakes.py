"""Wrong answers to assignment 6. The head and its drafts never change the text, so only hidden
states, cache rows and distributions show them."""

import torch

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec.distill import AllSteps, Documents, MTPLoss, step_weights
from minispec.distill.documents import cross_entropy
from minispec.methods.fastmtp import HeadDrafter
from minispec.model import Block, ForwardContext
from minispec.sampling import draw

extend, chain = HeadDrafter.extend, HeadDrafter.chain
labels, plan = Documents.labels, MTPLoss.plan
DRAW = "minispec.methods.fastmtp.draw"


# ---- the head ------------------------------------------------------------------------------------


def token_first(self, hidden, embedded, ctx):
    pair = [self.token_layernorm(embedded), self.hidden_layernorm(hidden)]
    return self.final_layernorm(Block.forward(self, self.input_proj(torch.cat(pair, -1)), ctx))


def without_norms(self, hidden, embedded, ctx):
    x = self.input_proj(torch.cat([hidden, embedded], -1))
    return self.final_layernorm(Block.forward(self, x, ctx))


def norms_swapped(self, hidden, embedded, ctx):
    pair = [self.token_layernorm(hidden), self.hidden_layernorm(embedded)]
    return self.final_layernorm(Block.forward(self, self.input_proj(torch.cat(pair, -1)), ctx))


def without_the_final_norm(self, hidden, embedded, ctx):
    pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]
    return Block.forward(self, self.input_proj(torch.cat(pair, -1)), ctx)


# ---- drafting ------------------------------------------------------------------------------------


def hidden_before_the_norm(self, hidden, tokens):
    extend(self, hidden / self.model.model.norm.weight, tokens)


def not_committed(self, hidden, tokens):
    if tokens:
        self.last = self.run(hidden, tokens)[-1:]


def first_output(self, hidden, tokens):
    if tokens:
        self.last = self.run(hidden, tokens)[:1]
        self.cache.commit(list(range(len(tokens))))


def one_row(self, hidden, tokens):
    if tokens:
        self.last = self.run(hidden, tokens)[-1:]
        self.cache.commit([0])


def stale_rows(self, hidden, tokens):
    """Rows of accepted drafts are kept, although they come from the head's own hidden states."""
    drafted = getattr(self, "drafted", 0)
    keep = min(max(len(tokens) - 1, 0), drafted)
    if keep:
        self.cache.commit(list(range(keep)))
    extend(self, hidden[keep:], tokens[keep:])


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


def not_rolled_back(self, k, sampling, randomness, draft_head):
    drafts, draft_probs, hidden = [], [], self.last
    while hidden is not None and len(drafts) < k:
        token, q = draw(draft_head.logits(hidden), sampling, randomness)
        drafts.append(int(draft_head.to_full_ids(token)))
        draft_probs.append(q if q is None else draft_head.scatter(q))
        if len(drafts) < k:
            hidden = self.run(hidden, drafts[-1:])
            self.cache.commit([0])
    return drafts, draft_probs


def same_hidden_state(self, k, sampling, randomness, draft_head):
    """Every step reads the output at the newest token, not its own."""
    drafts, draft_probs, hidden, length = [], [], self.last, self.cache.length
    while hidden is not None and len(drafts) < k:
        token, q = draw(draft_head.logits(hidden), sampling, randomness)
        drafts.append(int(draft_head.to_full_ids(token)))
        draft_probs.append(q if q is None else draft_head.scatter(q))
        hidden = self.run(self.last, drafts[-1:])
        self.cache.commit([0])
    self.cache.truncate(length)
    return drafts, draft_probs


def last_overwritten(self, k, sampling, randomness, draft_head):
    guess, draft_probs = chain(self, k, sampling, randomness, draft_head)
    if len(guess) > 1:
        length = self.cache.length
        self.last = self.run(self.last, guess[:1])
        self.cache.truncate(length)
    return guess, draft_probs


# ---- the tree ------------------------------------------------------------------------------------


def grown(wrong: str):
    """A tree with one mistake. Each path is run by itself."""

    def grow(self, newest, n, width, depth, draft_head):
        length, last = self.cache.length, self.last
        level, candidates, own = {(): 0.0 if wrong == "adds" else 1.0}, {}, {}
        for _ in range(depth if last is not None else 0):
            expanded = sorted(level, key=level.get, reverse=True)[:width]
            if wrong == "expands the first":
                expanded = list(level)[:width]
            above, level = level, {}
            for row, path in enumerate(expanded):
                p = draft_head.logits(output_at(self, path, row, length, wrong))[0].softmax(-1)
                ids = draft_head.to_full_ids(torch.arange(len(p))).tolist()
                for x, prob in zip(range(len(p)) if wrong == "index" else ids, p.tolist()):
                    own[*path, x] = prob
                    level[*path, x] = above[path] + prob if wrong == "adds" else above[path] * prob
            self.cache.truncate(length)
            candidates = level if wrong == "last level" else candidates | level
        values = own if wrong == "own" else candidates
        kept = sorted(values, key=values.get, reverse=True)[: n - (wrong == "n - 1")]
        nodes = [(), *(kept if wrong in ("adds", "own", "last level") else sorted(kept, key=len))]
        if wrong == "deepest first":
            nodes[1:] = nodes[:0:-1]
        if wrong == "not rolled back" and nodes[1:]:
            self.run(last, list(nodes[1]))
            self.cache.commit([0])
        parents = [nodes.index(path[:-1]) if path[:-1] in nodes else 0 for path in nodes[1:]]
        return [newest, *(path[-1] for path in nodes[1:])], [-1, *parents]

    return grow


def output_at(self, path, row, length, wrong):
    """The head's output at a node, which is the `row`-th of its level."""
    if wrong != "sees its siblings":
        self.cache.truncate(length)
    output, text_and_others = self.last, self.cache.length - length
    for i, token in enumerate(path):
        at = row if wrong == "row as position" else -text_and_others
        hidden = self.last if wrong == "same hidden state" else output
        output = self.run(hidden, [token], torch.tensor([at]))
        self.cache.commit([0])
    return output


# ---- training ------------------------------------------------------------------------------------


def without_prompts(self, index, k):
    prompts, self.prompts = self.prompts, torch.zeros_like(self.prompts)
    found = labels(self, index, k)
    self.prompts = prompts
    return found


def past_the_end(self, index, k):
    lengths, self.lengths = self.lengths, torch.full_like(self.lengths, self.tokens.shape[1])
    found = labels(self, index, k)
    self.lengths = lengths
    return found


def one_early(self, index, k):
    return labels(self, index, k - 1)


def with_plan(change):
    """The package's plan, changed: change(self, n, k, keys, the plan)."""
    return lambda self, n, k, keys: change(self, n, k, keys, plan(self, n, k, keys))


def same_position(self, n, k, keys, right):
    at = torch.arange(n)[None]
    return ForwardContext(*self.head.rope(at, self.target.dtype), right.attn_mask, right.cache)


def all_later_rows(self, n, k, keys, right):
    """Step k sees the rows up to i of every step."""
    if not self.aligned:
        return right
    prefix = torch.ones(n, n, dtype=torch.bool).tril()
    mask = torch.cat([prefix] * (k + 1), 1)[None, None]
    at = torch.arange(n)[None] + k
    return ForwardContext(*self.head.rope(at, self.target.dtype), mask, keys)


def own_keys_only(self, n, k, keys, right):
    at = torch.arange(n)[None] + k * self.aligned
    return ForwardContext(*self.head.rope(at, self.target.dtype))


def shared_keys(self, n, k, keys, right):
    """Parallel steps see the keys of the steps before as well."""
    prefix = torch.ones(n, n, dtype=torch.bool).tril()
    mask = torch.cat([prefix] * (k + 1), 1)[None, None]
    at = torch.arange(n)[None]
    return ForwardContext(*self.head.rope(at, self.target.dtype), mask, keys)


def steps_with(change):
    """`steps`, where a step reads change(output of the step before, what step 1 read)."""

    def wrong(self, hidden, tokens):
        n, keys, found, first = hidden.shape[1], AllSteps(), [], hidden
        for k in range(len(self.weights)):
            embedded = self.target.model.embed_tokens(tokens[:, k + 1 : k + 1 + n])
            x = self.head.run_block(change(hidden, first), embedded, self.plan(n, k, keys))
            hidden = x
            found.append(self.logits(x))
        return found

    return wrong


def token_one_early(self, hidden, tokens):
    return MTPLoss.steps(self, hidden, tokens.roll(1, 1))


def weighted(mean, weight=lambda self, k: self.weights[k]):
    """The loss, with another mean over rows or other weights."""

    def wrong(self, index):
        hidden, tokens, labels = self.gather(index)
        logits = self.steps(hidden, tokens)
        return sum(weight(self, k) * mean(x, label)
                   for k, (x, label) in enumerate(zip(logits, labels)))  # fmt: skip

    return wrong


def over_all_rows(logits, labels):
    return cross_entropy(logits[labels >= 0], labels[labels >= 0]) * (labels >= 0).double().mean()


def nan_without_rows(logits, labels):
    return torch.nn.functional.cross_entropy(logits[labels >= 0], labels[labels >= 0])


def summed(logits, labels):
    kept = labels >= 0
    return torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum")


def labelled(logits, labels):
    return cross_entropy(logits[labels >= 0], labels[labels >= 0])


MISTAKES = [
    Mistake("head", "the token comes first, as in DeepSeek-V3's code: here the hidden state does",
            {"MTPHead.run_block": token_first}),
    Mistake("head", "the two inputs are not normed", {"MTPHead.run_block": without_norms}),
    Mistake("head", "each input goes through the other's norm",
            {"MTPHead.run_block": norms_swapped}),
    Mistake("head", "the final norm is missing", {"MTPHead.run_block": without_the_final_norm}),
    Mistake("extend, rounds", "the head reads hidden states from before the target's final norm",
            {"Drafter.extend": hidden_before_the_norm}),
    Mistake("extend, rounds", "the rows are not committed", {"Drafter.extend": not_committed}),
    Mistake("extend", "`last` is the first output, not the newest token's",
            {"Drafter.extend": first_output}),
    Mistake("extend, rounds", "one row is committed, however many came",
            {"Drafter.extend": one_row}),
    Mistake("rounds", "accepted drafts keep the rows made from the head's own hidden states",
            {"Drafter.extend": stale_rows, "Drafter.chain": chain_remembered}),
    Mistake("chain", "the drafts' positions are off by one",
            {"Drafter.chain": position_off_by_one}),
    Mistake("chain, rounds", "the drafts' rows stay in the cache",
            {"Drafter.chain": not_rolled_back}),
    Mistake("chain", "every step reads the output at the newest token: read the head's own",
            {"Drafter.chain": same_hidden_state}),
    Mistake("chain", "`last` is not what it was", {"Drafter.chain": last_overwritten}),
    Mistake("chain", "q is the softmax over the full vocabulary: the draft came from the subset",
            {"Drafter.chain": mutants.probs_over_all}),
    Mistake("chain", "an argmax draft is returned with its softmax",
            {DRAW: mutants.greedy_draft_with_softmax}),
    Mistake("tree", "a value is the sum of the probabilities: it is their product",
            {"Drafter.grow": grown("adds")}),
    Mistake("tree", "a value is the node's own probability: multiply by those of its ancestors",
            {"Drafter.grow": grown("own")}),
    Mistake("tree", "a child comes before its parent", {"Drafter.grow": grown("deepest first")}),
    Mistake("tree", "a row sees its siblings: only the text and its ancestors",
            {"Drafter.grow": grown("sees its siblings")}),
    Mistake("tree", "the rows of a level follow each other: all are at the position of their depth",
            {"Drafter.grow": grown("row as position")}),
    Mistake("tree", "every node reads the output at the newest token: read that of its parent",
            {"Drafter.grow": grown("same hidden state")}),
    Mistake("tree", "a level expands the first of its candidates, not the best",
            {"Drafter.grow": grown("expands the first")}),
    Mistake("tree", "only the last level's candidates are kept: the best of all levels are",
            {"Drafter.grow": grown("last level")}),
    Mistake("tree", "the tokens are indices of the subset: to_full_ids turns them into tokens",
            {"Drafter.grow": grown("index")}),
    Mistake("tree", "the newest token counts as one of the n nodes",
            {"Drafter.grow": grown("n - 1")}),
    Mistake("tree", "the tree's rows stay in the cache",
            {"Drafter.grow": grown("not rolled back")}),
    Mistake("weights", "the weights are not divided by their sum",
            {"step_weights": lambda steps, beta: [beta**k for k in range(steps)]}),
    Mistake("weights", "the exponents begin with 1: those of the first step are 0",
            {"step_weights": lambda steps, beta: [beta * x for x in step_weights(steps, beta)]}),
    Mistake("weights", "the weights grow from step to step",
            {"step_weights": lambda steps, beta: step_weights(steps, beta)[::-1]}),
    Mistake("labels", "tokens of the prompt are labels", {"Documents.labels": without_prompts}),
    Mistake("labels", "padding behind the document is a label", {"Documents.labels": past_the_end}),
    Mistake("labels", "step k's label is token i + k: one further on",
            {"Documents.labels": one_early}),
    Mistake("aligned", "every step stands at position i: step k is k - 1 further on",
            {"MTPLoss.plan": with_plan(same_position)}),
    Mistake("aligned", "a row sees other rows' later steps: of these it sees only its own",
            {"MTPLoss.plan": with_plan(all_later_rows)}),
    Mistake("aligned", "a step sees only its own keys: the cache holds those of earlier steps",
            {"MTPLoss.plan": with_plan(own_keys_only)}),
    Mistake("parallel", "steps see each other's keys: in parallel training only their own",
            {"MTPLoss.plan": with_plan(shared_keys)}),
    Mistake("aligned, parallel", "every step reads the target's hidden state: read the step before",
            {"MTPLoss.steps": steps_with(lambda hidden, first: first)}),
    Mistake("aligned, parallel", "step k reads token i + k - 1",
            {"MTPLoss.steps": token_one_early}),
    Mistake("parallel", "gradients stop between the steps",
            {"MTPLoss.steps": steps_with(lambda hidden, first: hidden.detach())}),
    Mistake("loss", "the mean is over all rows, also those without a label",
            {"MTPLoss.__call__": weighted(over_all_rows)}),
    Mistake("loss", "a step without labels gives NaN: it adds 0",
            {"MTPLoss.__call__": weighted(nan_without_rows)}),
    Mistake("loss", "cross-entropies are summed, not averaged",
            {"MTPLoss.__call__": weighted(summed)}),
    Mistake("loss", "all steps weigh the same: use the α_k",
            {"MTPLoss.__call__": weighted(labelled, lambda self, k: 1 / len(self.weights))}),
]  # fmt: skip
