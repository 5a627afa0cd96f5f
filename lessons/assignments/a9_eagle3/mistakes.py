"""Wrong answers to assignment 9. A head never changes the text, so only hidden states, logits and
losses show them."""

import torch
import torch.nn.functional as F

from lessons.assignments.grading import Mistake
from minispec.checkpoints.eagle3 import read_ids
from minispec.distill import AllSteps
from minispec.distill.documents import cross_entropy
from minispec.methods.eagle3 import Eagle3Head, default_layers
from minispec.model import ForwardContext

project_features = Eagle3Head.project_features

# ---- the head ------------------------------------------------------------------------------------


def block(wrong: str):
    """A Midlayer with one mistake."""

    def forward(self, hidden, embedded, ctx):
        normed, token = self.hidden_norm(hidden), self.input_layernorm(embedded)
        if wrong == "other norms":
            normed, token = self.input_layernorm(hidden), self.hidden_norm(embedded)
        pair = [hidden if wrong == "hidden not normed" else normed,
                embedded if wrong == "token not normed" else token]  # fmt: skip
        attended = self.self_attn(
            torch.cat(pair if wrong == "hidden first" else pair[::-1], -1), ctx
        )
        residual = normed if self.norm_before_residual else hidden
        residual = {"never before": hidden, "always before": normed, "token": embedded,
                    "none": 0}.get(wrong, residual)  # fmt: skip
        x = residual + attended
        read = x if wrong == "MLP not normed" else self.post_attention_layernorm(x)
        return self.mlp(read) + (0 if wrong == "MLP alone" else x)

    return forward


def first_columns(self, hidden):
    return self.fc(hidden[..., : -self.target_size])


def reversed_features(self, hidden):
    last, *three = hidden.split(self.target_size, -1)
    return self.fc(torch.cat(three[::-1], -1))


def normed_features(self, hidden):
    return self.norm(project_features(self, hidden))


def without_the_norm(self, hidden):
    return self.lm_head(hidden)


# ---- its tokens ----------------------------------------------------------------------------------


def popped(tensors):
    return tensors.pop("d2t", None), tensors.pop("t2d", None)


def takes_offsets_for_tokens(where, tensors, count, vocab):
    d2t, _ = popped(tensors)
    return list(range(vocab)) if d2t is None else d2t.tolist()


def subtracts_the_offset(where, tensors, count, vocab):
    d2t, _ = popped(tensors)
    return list(range(vocab)) if d2t is None else [i - x for i, x in enumerate(d2t.tolist())]


def needs_d2t(where, tensors, count, vocab):
    return read_ids(where, tensors, count, vocab) if "d2t" in tensors else []


def checks_nothing(where, tensors, count, vocab):
    d2t, _ = popped(tensors)
    return list(range(vocab)) if d2t is None else [i + x for i, x in enumerate(d2t.tolist())]


# ---- training ------------------------------------------------------------------------------------


def with_plan(position=lambda at, k: at + k, mask=lambda text, own, k: [text] + [own] * k):
    """Another position or mask in step k + 1."""

    def wrong(self, n, k, keys):
        at = torch.arange(n)
        text, own = at[:, None] >= at, at[:, None] == at
        seen = torch.cat(mask(text, own, k), 1)[None, None]
        rope = self.head.rope(position(at, k)[None], self.target.dtype)
        return ForwardContext(*rope, seen, keys)

    return wrong


def outputs_with(read=lambda output, fused: output, first=lambda k: k + 1):
    """Training-time test, where a step reads another hidden state or other tokens."""

    def wrong(self, hidden, tokens):
        n, keys, found = hidden.shape[1], AllSteps(), []
        output = fused = self.head.project_features(hidden)
        for k in range(len(self.weights)):
            embedded = self.head.embed(tokens[:, first(k) : first(k) + n], self.target)
            read_now = read(output, fused)
            output = self.head.run_block(read_now, embedded, self.plan(n, k, keys))
            found.append(output)
        return found

    return wrong


def loss_with(
    distribution=lambda self, after, label: self.draft_head.logits(after).softmax(-1),
    counts=lambda self, label: self.draft_head.to_subset_ids(label) >= 0,
    first=lambda k: k + 1,
    mean=cross_entropy,
    weight=lambda self, k: self.weights[k],
):
    """The loss, with another distribution p, other rows, states, weights, or another mean."""

    def wrong(self, index):
        states, tokens, labels = self.gather(index)
        n, total = labels[0].shape[1], 0.0
        for k, x in enumerate(self.outputs(states[:, :n], tokens)):
            real = counts(self, labels[k])
            after = states[:, first(k) :][:, :n][real][:, : self.target.config.hidden_size]
            p = distribution(self, after, labels[k][real])
            total += weight(self, k) * mean(self.logits(x[real]), labels[k][real], p)
        return total

    return wrong


def labels_only(self, after, label):
    return F.one_hot(self.draft_head.to_subset_ids(label), len(self.draft_head)).float()


def cut_off(self, after, label):
    return self.target.logits(after).softmax(-1)[:, self.head.host_ids]


def nan_without_rows(logits, label, p):
    return F.cross_entropy(logits, p)


def over_all_rows(logits, label, p):
    return F.cross_entropy(logits, p, reduction="sum") / 10


def other_way_round(logits, label, p):
    return cross_entropy(p.log(), label, logits.softmax(-1))


MISTAKES = [
    Mistake("layers", "the layers are counted from 1",
            {"default_layers": lambda n: tuple(i + 1 for i in default_layers(n))}),
    Mistake("layers", "the high one is the last layer: n - 3 is meant",
            {"default_layers": lambda n: tuple(sorted({min(2, n - 1), n // 2, n - 1}))}),
    Mistake("layers", "a small target has no layers 2 or n - 3: move them to those there are",
            {"default_layers": lambda n: (2, n // 2, n - 3)}),
    Mistake("layers", "layers that coincide count once",
            {"default_layers": lambda n: tuple(sorted((min(2, n - 1), n // 2, max(n - 3, 0))))}),
    Mistake("midlayer", "the hidden state comes first, as in MiMo's head: here the token does",
            {"Midlayer.forward": block("hidden first")}),
    Mistake("midlayer", "the hidden state is not normed",
            {"Midlayer.forward": block("hidden not normed")}),
    Mistake("midlayer", "the token is not normed", {"Midlayer.forward": block("token not normed")}),
    Mistake("midlayer", "each input goes through the other's norm",
            {"Midlayer.forward": block("other norms")}),
    Mistake("midlayer", "norm_before_residual is not read: the residual is never normed",
            {"Midlayer.forward": block("never before")}),
    Mistake("midlayer", "the residual is normed although norm_before_residual is false",
            {"Midlayer.forward": block("always before")}),
    Mistake("midlayer", "the residual is the token: it is the hidden state",
            {"Midlayer.forward": block("token")}),
    Mistake("midlayer", "the attention is added to nothing: the residual is missing",
            {"Midlayer.forward": block("none")}),
    Mistake("midlayer", "the MLP reads what has not been normed",
            {"Midlayer.forward": block("MLP not normed")}),
    Mistake("midlayer", "the MLP is added to nothing", {"Midlayer.forward": block("MLP alone")}),
    Mistake("head", "`fc` reads the last state and two of the three: skip the last one",
            {"Eagle3Head.project_features": first_columns}),
    Mistake("head", "the three states are in the wrong order: the lowest layer's comes first",
            {"Eagle3Head.project_features": reversed_features}),
    Mistake("head", "the features are normed", {"Eagle3Head.project_features": normed_features}),
    Mistake("head", "the norm before lm_head is missing", {"Eagle3Head.logits": without_the_norm}),
    Mistake("ids", "d2t holds a token minus its row's number, not a token",
            {"read_ids": takes_offsets_for_tokens}),
    Mistake("ids", "the offset is subtracted: add it to the row's number",
            {"read_ids": subtracts_the_offset}),
    Mistake("ids", "a head without d2t drafts all tokens", {"read_ids": needs_d2t}),
    Mistake("ids", "files that contradict themselves are not refused",
            {"read_ids": checks_nothing}),
    Mistake("unroll", "every step stands at position i: step k is k - 1 further on",
            {"MTPLoss.plan": with_plan(position=lambda at, k: at)}),
    Mistake("unroll", "a row sees other rows' later steps: of these it sees only its own",
            {"MTPLoss.plan": with_plan(mask=lambda text, own, k: [text] * (k + 1))}),
    Mistake("unroll", "a later step sees its own row of step 1 only: it sees rows 0 to i",
            {"MTPLoss.plan": with_plan(
                mask=lambda text, own, k: [own if k else text] + [own] * k)}),
    Mistake("unroll", "a row sees the whole of step 1, also what comes after it",
            {"MTPLoss.plan": with_plan(mask=lambda text, own, k: [text | ~text] + [own] * k)}),
    Mistake("unroll", "a step does not see the steps between step 1 and its own",
            {"MTPLoss.plan": with_plan(
                mask=lambda text, own, k: [text] + [own & False] * (k - 1) + [own] * (k > 0))}),
    Mistake("unroll", "every step reads the fused features: read the output of the step before",
            {"MTPLoss.outputs": outputs_with(read=lambda output, fused: fused)}),
    Mistake("unroll", "every step reads the tokens of step 1: step k reads token i + k",
            {"MTPLoss.outputs": outputs_with(first=lambda k: 1)}),
    Mistake("unroll", "step k reads token i + k - 1",
            {"MTPLoss.outputs": outputs_with(first=lambda k: k)}),
    Mistake("unroll", "gradients stop between the steps",
            {"MTPLoss.outputs": outputs_with(read=lambda output, fused: output.detach())}),
    Mistake("loss", "it learns the tokens: `soft` means the target's distributions",
            {"MTPLoss.__call__": loss_with(distribution=labels_only)}),
    Mistake("loss", "p is cut off, not made of the logits of the head's tokens: its sum is below 1",
            {"MTPLoss.__call__": loss_with(distribution=cut_off)}),
    Mistake("loss", "rows count whose token the head does not have",
            {"MTPLoss.__call__": loss_with(counts=lambda self, label: label >= 0)}),
    Mistake("loss", "p comes from the state of the token before",
            {"MTPLoss.__call__": loss_with(first=lambda k: k)}),
    Mistake("loss", "every step has the distributions of step 1",
            {"MTPLoss.__call__": loss_with(first=lambda k: 1)}),
    Mistake("loss", "a step without rows gives NaN: it adds 0",
            {"MTPLoss.__call__": loss_with(mean=nan_without_rows)}),
    Mistake("loss", "the mean is over all rows, also those that do not count",
            {"MTPLoss.__call__": loss_with(mean=over_all_rows)}),
    Mistake("loss", "p and q are the wrong way round",
            {"MTPLoss.__call__": loss_with(mean=other_way_round)}),
    Mistake("loss", "all steps weigh the same: use self.weights",
            {"MTPLoss.__call__": loss_with(weight=lambda self, k: 1 / len(self.weights))}),
]  # fmt: skip
