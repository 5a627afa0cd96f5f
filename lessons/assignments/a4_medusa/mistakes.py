"""Wrong answers to assignment 4, each a function of the reference with one slip."""

import itertools
import math

import torch
import torch.nn.functional as F

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec import distill
from minispec.methods import adaptive, medusa
from minispec.sampling import OneHot
from minispec.tree import Tree

new_heads, propose, typical_path = medusa.new_heads, medusa.propose, medusa.typical_path
from_paths, grow_tree = Tree.from_paths, adaptive.grow_tree


# ---- heads ---------------------------------------------------------------------------------------


def without_the_skip(self, x):
    return F.silu(self.linear(x))


def relu_block(self, x):
    return x + F.relu(self.linear(x))


def one_head_for_all(self, hidden, draft_head):
    outputs = torch.stack([self[0](hidden)] * len(self))
    return draft_head.logits(outputs) if self.shared else outputs


def one_on_another(self, hidden, draft_head):
    """Each head reads the output of the one before."""
    outputs = []
    for head in self:
        for block in head[: self.layers]:
            hidden = block(hidden)
        outputs.append(hidden if self.shared else head[-1](hidden))
    outputs = torch.stack(outputs)
    return draft_head.logits(outputs) if self.shared else outputs


def random_start(heads, layers, model, shared):
    new = new_heads(heads, layers, model, shared)
    for head in new:
        for block in head[:layers]:
            torch.nn.init.ones_(block.linear.weight)
    return new


def tied_to_the_target(heads, layers, model, shared):
    new = new_heads(heads, layers, model, shared)
    if not shared:
        for head in new:
            head[-1].weight = model.lm_head.weight
    return new


def in_float32(heads, layers, model, shared):
    return new_heads(heads, layers, model, shared).float()


# ---- labels and trees ----------------------------------------------------------------------------


def labels_from(shift):
    """Head k's label is token t + k + 2 + shift."""

    def wrong(tokens, prompt, heads):
        shifted = tokens[shift:] if shift > 0 else [-100] * -shift + tokens
        labels = distill.labels_of(shifted, max(prompt - shift, 0), heads)
        return F.pad(labels, (0, 0, 0, max(shift, 0)), value=-100)[: len(tokens)]

    return wrong


def with_prompt(tokens, prompt, heads):
    return distill.labels_of(tokens, 0, heads)


def prompt_by_label(tokens, prompt, heads):
    """Only the labels in the prompt are left out, not their rows."""
    labels = distill.labels_of(tokens, 0, heads)
    for t, k in itertools.product(range(len(tokens)), range(heads)):
        if t + k + 2 < prompt:
            labels[t, k] = -100
    return labels


def one_node_per_path(root, paths, candidates):
    """Every path is a chain of its own."""
    tokens, parents = [root], [-1]
    for path in paths:
        for depth, rank in enumerate(path):
            parents.append(len(tokens) - 1 if depth else 0)
            tokens.append(candidates[depth][rank])
    return Tree(tokens, parents)


def from_first_candidates(root, paths, candidates):
    return from_paths(root, paths, [candidates[0]] * len(candidates))


def depth_one_too_deep(root, paths, candidates):
    return from_paths(root, paths, candidates[1:] + candidates[:1])


def without_to_full_ids(heads, draft_head, hidden, *arguments):
    class Indices:
        logits = draft_head.logits

        @staticmethod
        def to_full_ids(token):
            return token

    return propose(heads, Indices, hidden, *arguments)


def once_a_head(heads, draft_head, hidden, *arguments):
    for _ in range(len(heads) - 1):
        if len(hidden):
            heads(hidden[0], draft_head)
    return propose(heads, draft_head, hidden, *arguments)


def beyond_the_room(heads, draft_head, hidden, root, tree, free_rows):
    return propose(heads, draft_head, hidden, root, tree, free_rows + 1)


# ---- the best tree -------------------------------------------------------------------------------


def without_the_root(accuracy, paths):
    return adaptive.expected_tokens(accuracy, paths) - 1


def last_accuracy_only(accuracy, paths):
    return 1 + sum(float(accuracy[len(path) - 1, path[-1]]) for path in paths)


def leaves_only(accuracy, paths):
    inner = {path[:n] for path in paths for n in range(1, len(path))}
    return adaptive.expected_tokens(accuracy, [path for path in paths if path not in inner])


def breadth_first(accuracy, nodes):
    return sorted(grow_tree(accuracy, 1000), key=lambda path: (len(path), path))[:nodes]


def depth_first(accuracy, nodes):
    return sorted(grow_tree(accuracy, 1000))[:nodes]


def useless_nodes_too(accuracy, nodes):
    return grow_tree(accuracy.clamp(min=1e-9), nodes)


def children_before_parents(accuracy, nodes):
    return grow_tree(accuracy, nodes)[::-1]


# ---- typical acceptance --------------------------------------------------------------------------


def threshold(rule):
    """Typical acceptance, by another test: rule(p(x), H(p), ε, δ)."""

    def wrong(target, tree, epsilon, delta):
        paths, likelihood = {0: [0]}, {0: 1.0}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent in paths:
                p = target[parent]
                x, entropy = float(p[tree.tokens[node]]), float(torch.special.entr(p).sum())
                if rule(x, entropy, epsilon, delta):
                    paths[node] = paths[parent] + [node]
                    likelihood[node] = likelihood[parent] * x
        return max(paths.values(), key=lambda path: (len(path), likelihood[path[-1]]))

    return wrong


def after_the_node(target, tree, epsilon, delta):
    """Each token is judged by the distribution after itself."""
    rows = [target[i] for i in range(len(tree))]
    shifted = [rows[tree.children(i)[0]] if tree.children(i) else rows[i] for i in range(len(tree))]
    return typical_path(shifted, tree, epsilon, delta)


def entropy_of_zero(target, tree, epsilon, delta):
    """0 · log 0 is NaN, and no probability exceeds a NaN."""
    return [0] if isinstance(target, OneHot) else typical_path(target, tree, epsilon, delta)


MISTAKES = [
    Mistake("heads", "a block returns SiLU(W x + b) without adding x",
            {"minispec.methods.medusa.ResBlock.forward": without_the_skip}),
    Mistake("heads", "a block's activation is not SiLU",
            {"minispec.methods.medusa.ResBlock.forward": relu_block}),
    Mistake("heads", "all heads use the weights of the first",
            {"MedusaHeads.forward": one_head_for_all}),
    Mistake("heads", "each head reads the output of the one before: all read the hidden state",
            {"MedusaHeads.forward": one_on_another}),
    Mistake("start", "a block is not the identity at first", {"new_heads": random_start}),
    Mistake("start", "the projections are lm_head itself, not a copy",
            {"new_heads": tied_to_the_target}),
    Mistake("start", "the heads do not have the model's type", {"new_heads": in_float32}),
    Mistake("labels", "head k learns token t + k + 3: one too late", {"labels_of": labels_from(1)}),
    Mistake("labels", "head k learns token t + k + 1: head 0 repeats lm_head",
            {"labels_of": labels_from(-1)}),
    Mistake("labels", "tokens of the prompt are learned", {"labels_of": with_prompt}),
    Mistake("labels", "a row with one label in the prompt keeps its others",
            {"labels_of": prompt_by_label}),
    Mistake("tree", "paths do not share their beginnings", {"from_paths": one_node_per_path}),
    Mistake("tree", "every depth takes its tokens from candidates[0]",
            {"from_paths": from_first_candidates}),
    Mistake("tree", "depth d takes its tokens from candidates[d]: from [d - 1]",
            {"from_paths": depth_one_too_deep}),
    Mistake("propose", "the best tokens are returned with their softmax: they were not drawn",
            {"propose": mutants.ranks_with_softmax}),
    Mistake("propose", "indices of the draft's head are taken for tokens: use `to_full_ids`",
            {"propose": without_to_full_ids}),
    Mistake("propose", "the heads run more than once", {"propose": once_a_head}),
    Mistake("propose", "the tree has more than `free_rows` nodes below its root",
            {"propose": beyond_the_room}),
    Mistake("expected", "the token that comes in any case is left out",
            {"expected_tokens": without_the_root}),
    Mistake("expected", "a node adds its own accuracy: multiply along its path",
            {"expected_tokens": last_accuracy_only}),
    Mistake("expected", "only leaves are counted", {"expected_tokens": leaves_only}),
    Mistake("grow", "siblings come before children, whatever they gain",
            {"grow_tree": breadth_first}),
    Mistake("grow", "children come before siblings, whatever they gain",
            {"grow_tree": depth_first}),
    Mistake("grow", "nodes that gain nothing are added", {"grow_tree": useless_nodes_too}),
    Mistake("grow", "children come before their parents", {"grow_tree": children_before_parents}),
    Mistake("typical", "the bound is δ exp(-H) alone: it is at most ε",
            {"typical_path": threshold(lambda x, h, e, d: x > d * math.exp(-h))}),
    Mistake("typical", "the bound is ε alone: it falls with the entropy",
            {"typical_path": threshold(lambda x, h, e, d: x > e)}),
    Mistake("typical", "the entropy of a one-hot distribution is NaN: 0 log 0 is 0",
            {"typical_path": entropy_of_zero}),
    Mistake("typical", "a token is judged by the distribution after it",
            {"typical_path": after_the_node}),
]  # fmt: skip
