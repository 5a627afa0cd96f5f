"""The head by its formula, drafts by passes without a cache, training by drafting."""

import random

import pytest
import torch

from minispec.certify.toys import Recorder, random_mtp_head, small_model
from minispec.methods import fastmtp
from minispec.methods.vocabulary import FullVocabulary, Subset
from minispec.model import make_context
from minispec.sampling import Sampling, Seeded, probs

GREEDY = Sampling()
GRADED = {
    "head": "MTPHead.run_block", "extend": "Drafter.extend", "chain": "Drafter.chain",
    "rounds": "Drafter.extend, Drafter.chain",
    "tree": "Drafter.grow, minispec.methods.fastmtp.HeadDrafter.tree", "weights": "step_weights",
    "labels": "Documents.labels",
    "aligned": "MTPLoss.steps, MTPLoss.plan, minispec.distill.MTPLoss.outputs",
    "parallel": "MTPLoss.steps, MTPLoss.plan, minispec.distill.MTPLoss.outputs",
    "loss": "MTPLoss.__call__",
}  # fmt: skip


def random_text(seed: int, least: int = 3) -> list[int]:
    rng = random.Random(seed)
    return rng.choices(range(24), k=rng.randint(least, 9))


def chain(drafter, *arguments) -> tuple[list[int], list]:
    """The drafts and their distributions; drafts may be a list or a tensor."""
    drafts, draft_probs = drafter.chain(*arguments)
    return drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts, draft_probs


def new_drafter(impl, head, model):
    head = impl.copy(head)
    return impl.Drafter(head, model, head.new_cache(64), 0)


def prepared(impl, model, head, tokens: list[int]):
    """A drafter that has taken in all but the newest of `tokens`, without its own `extend`."""
    drafter = new_drafter(impl, head, model)
    drafter.last = drafter.run(model(tokens[:-1])[0], tokens[1:])[-1:]
    drafter.cache.length = len(tokens) - 1
    return drafter


def fresh_rows(model, head, tokens: list[int]):
    """The head's keys and last output over all of a text at once."""
    drafter = fastmtp.HeadDrafter(head, model, head.new_cache(64), 0)
    outputs = drafter.run(model(tokens[:-1])[0], tokens[1:])
    return drafter.cache.k[0], outputs[-1:]


def fresh_drafts(head, model, tokens: list[int], k: int) -> list[int]:
    """Argmax drafts, every row of the head computed anew for each of them."""
    hidden, drafts = model(tokens[:-1])[0], []
    for _ in range(k):
        drafter = fastmtp.HeadDrafter(head, model, head.new_cache(64), 0)
        row = drafter.run(hidden, tokens[1:] + drafts)[-1:]
        drafts.append(int(model.logits(row).argmax()))
        hidden = torch.cat([hidden, row])
    return drafts


# ---- the head ------------------------------------------------------------------------------------


@pytest.mark.points(5, task="head")
def test_the_head_is_the_formula_s(impl, seeds):
    for seed in seeds(4):
        model, tokens = small_model(seed), random_text(seed)
        head, given = random_mtp_head(model, seed), impl.MTPHead(model.config).double()
        given.load_state_dict(head.state_dict())
        hidden = model(tokens)[:, :-1]  # (1, n, d)
        embedded = model.model.embed_tokens(torch.tensor([tokens[1:]]))
        now = make_context(head.rope, hidden, len(tokens) - 1, None, None, None)
        d = model.config.hidden_size
        left, right = head.input_proj.weight[:, :d], head.input_proj.weight[:, d:]
        x = head.hidden_layernorm(hidden) @ left.T + head.token_layernorm(embedded) @ right.T
        x = x + head.self_attn(head.input_layernorm(x), now)
        x = x + head.mlp(head.post_attention_layernorm(x))
        output = given(hidden, embedded)
        assert output.shape == hidden.shape, f"(B, n, d) -> (B, n, d), not {tuple(output.shape)}"
        assert (output - head.final_layernorm(x)).abs().max() < 1e-9, (
            f"seed {seed}: norm both inputs, concatenate them, the hidden state first, then "
            "input_proj, the block and the final norm"
        )


# ---- drafting ------------------------------------------------------------------------------------


@pytest.mark.points(4, task="extend")
def test_extending_piece_by_piece_is_one_pass_over_all(impl, seeds):
    for seed in seeds(6):
        rng, model, tokens = random.Random(seed), small_model(seed), random_text(seed, 5)
        head, hidden, at = random_mtp_head(model, seed), model(tokens)[0], 0
        drafter = new_drafter(impl, head, model)
        drafter.extend(hidden[:0], [])
        assert drafter.last is None and drafter.cache.length == 0, "nothing to take in, no output"
        while at < len(tokens) - 1:
            n = min(rng.randint(0, 3), len(tokens) - 1 - at)
            drafter.extend(hidden[at : at + n], tokens[at + 1 : at + 1 + n])
            at += n
        keys, last = fresh_rows(model, head, tokens)
        assert drafter.cache.length == at, (
            f"{drafter.cache.length} rows for {at} hidden states: commit one for each"
        )
        worst = (drafter.cache.k[0] - keys)[:, :at].abs().max()
        assert worst < 1e-9, "row j must be made from h_j and the token after it, t_{j+1}"
        assert (drafter.last - last).abs().max() < 1e-9, "`last` is the output at the newest token"


@pytest.mark.points(4, task="chain")
def test_greedy_drafts_are_those_of_passes_without_a_cache(impl, seeds):
    for i, seed in enumerate(seeds(6)):
        model, tokens, k = small_model(seed), random_text(seed), 1 + i
        head = random_mtp_head(model, seed)
        drafter = prepared(impl, model, head, tokens)
        length, last = drafter.cache.length, drafter.last
        guess, draft_probs = chain(drafter, k, GREEDY, Seeded(), FullVocabulary(model))
        right = fresh_drafts(head, model, tokens, k)
        assert guess == right, (
            f"{guess} instead of {right}: every step reads the head's own output and the newest "
            "draft, one position further on"
        )
        assert draft_probs == [None] * k, "an argmax is one-hot: its distribution is None"
        assert drafter.cache.length == length and torch.equal(drafter.last, last), (
            "the drafts' rows come from the head's own hidden states: roll the cache back to the "
            "text, and leave `last` alone"
        )
    empty = new_drafter(impl, head, model)
    drafts = chain(empty, 3, GREEDY, Seeded(), FullVocabulary(model))
    assert drafts == ([], []), "without a hidden state there are no drafts"


@pytest.mark.points(4, task="chain")
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(impl, seeds):
    for seed in seeds(6):
        rng, model, tokens = random.Random(seed), small_model(seed), random_text(seed)
        head, sampling, randomness = random_mtp_head(model, seed), Sampling(0.9), Recorder(seed)
        ids = rng.sample(range(24), 7)
        subset = Subset(model.lm_head.weight, ids)
        drafter = prepared(impl, model, head, tokens)
        guess, draft_probs = chain(drafter, 3, sampling, randomness, subset)
        assert guess == [ids[j] for j in randomness.drawn] and len(guess) == 3, (
            "k = 3 tokens, each as it was drawn from the subset"
        )
        for i, (q, drawn) in enumerate(zip(draft_probs, randomness.probs, strict=True)):
            assert torch.equal(q, subset.scatter(drawn)), (
                f"draft {i} was drawn from another distribution than is returned: drawn from a "
                "small vocabulary, q is the softmax over that vocabulary, 0 elsewhere"
            )
            hidden = model(tokens[:-1])[0]
            for t in range(i + 1):
                drafter = fastmtp.HeadDrafter(head, model, head.new_cache(64), 0)
                out = drafter.run(hidden, tokens[1:] + guess[:t])[-1:]
                hidden = torch.cat([hidden, out])
            right = torch.zeros(24, dtype=torch.float64)
            right[ids] = probs(model.logits(out)[:, ids], sampling)[0]
            assert (q - right).abs().max() < 1e-9, f"draft {i}: q is not the head's own"


@pytest.mark.points(3, task="rounds")
def test_after_every_round_the_cache_follows_the_text(impl, seeds):
    """Draft, accept a few, extend with the target's own hidden states."""
    for seed in seeds(4):
        rng, model, tokens = random.Random(seed), small_model(seed), random_text(seed)
        head = random_mtp_head(model, seed)
        drafter = new_drafter(impl, head, model)
        drafter.extend(model(tokens[:-1])[0], tokens[1:])
        for round_ in range(5):
            guess, _ = chain(drafter, 3, GREEDY, Seeded(), FullVocabulary(model))
            new = guess[: rng.randint(0, 3)] + [rng.randrange(24)]
            hidden = model(tokens + new[:-1])[0, len(tokens) - 1 :]
            tokens = tokens + new
            drafter.extend(hidden, new)
            keys, last = fresh_rows(model, head, tokens)
            n = len(tokens) - 1
            assert drafter.cache.length == n, f"round {round_}: {drafter.cache.length} rows for {n}"
            worst = (drafter.cache.k[0] - keys)[:, :n].abs().amax((0, 2, 3))
            wrong = (~(worst <= 1e-9)).nonzero().flatten().tolist()
            assert not wrong and (drafter.last - last).abs().max() < 1e-9, (
                f"round {round_}: row {wrong[:1]} is not what a fresh pass gives: the rows of "
                "accepted drafts are made anew from the target's hidden states"
            )


@pytest.mark.points(6, task="tree")
def test_a_tree_has_the_best_nodes_of_passes_without_a_cache(impl, seeds):
    for seed in seeds(12):
        rng, model, tokens = random.Random(seed), small_model(seed), random_text(seed)
        head, ids = random_mtp_head(model, seed), rng.sample(range(24), 6)
        n, width, depth = rng.randint(6, 8), rng.randint(2, 4), rng.randint(2, 3)
        drafter, draft_head = prepared(impl, model, head, tokens), Subset(model.lm_head.weight, ids)
        length, last = drafter.cache.length, drafter.last
        found, parents = drafter.grow(tokens[-1], n, width, depth, draft_head)
        assert len(found) == len(parents) and (found[0], parents[0]) == (tokens[-1], -1), (
            "a token and a parent for each node, and the newest token first, with the parent -1"
        )
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i), (
            f"seed {seed}: parents {parents}: a parent comes before its children"
        )
        paths = [()]
        for token, parent in zip(found[1:], parents[1:]):
            paths.append((*paths[parent], token))
        right = best_paths(head, model, tokens, ids, n, width, depth)
        assert sorted(paths[1:]) == sorted(right), (
            f"seed {seed}, n = {n}, width {width}, depth {depth}: the paths {sorted(paths[1:])} "
            f"instead of {sorted(right)}: those whose probabilities have the largest product"
        )
        assert drafter.cache.length == length and torch.equal(drafter.last, last), (
            "the drafts' rows come from the head's own hidden states: roll the cache back to the "
            "text, and leave `last` alone"
        )
    empty = new_drafter(impl, head, model)
    tree = empty.grow(5, 4, 2, 2, draft_head)
    assert tree == ([5], [-1]), "without a hidden state there are no drafts"


def best_paths(head, model, tokens: list[int], ids: list[int], n: int, width: int, depth: int):
    """The paths of highest value, every row of the head computed anew for each path."""
    level, candidates = {(): 1.0}, {}
    for _ in range(depth):
        expanded = sorted(level, key=level.get, reverse=True)[:width]
        level = {
            (*path, x): level[path] * p
            for path in expanded
            for x, p in zip(ids, fresh_probs(head, model, tokens, list(path), ids))
        }
        candidates |= level
    return sorted(candidates, key=candidates.get, reverse=True)[:n]


def fresh_probs(head, model, tokens: list[int], path: list[int], ids: list[int]) -> list[float]:
    """The head's probabilities of `ids` after a path of drafts."""
    hidden = model(tokens[:-1])[0]
    for i in range(len(path) + 1):
        drafter = fastmtp.HeadDrafter(head, model, head.new_cache(64), 0)
        row = drafter.run(hidden, tokens[1:] + path[:i])[-1:]
        hidden = torch.cat([hidden, row])
    return model.logits(row)[0, ids].softmax(-1).tolist()


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.points(1, task="weights")
def test_weights_fall_by_beta_and_sum_to_1(impl):
    for steps, beta in ((1, 0.6), (3, 0.6), (5, 0.25), (4, 1.0)):
        right = [beta**k / sum(beta**j for j in range(steps)) for k in range(steps)]
        given = impl.step_weights(steps, beta)
        assert given == pytest.approx(right), f"K={steps}, β={beta}: {right}, not {given}"


def documents_of(kind, model, seed: int):
    rng = random.Random(seed)
    rows = [rng.choices(range(24), k=n) for n in (7, 4, 9)]
    prompts = [rng.randint(0, len(row)) for row in rows]
    return rows, prompts, kind(rows, prompts, [model(row)[0] for row in rows])


@pytest.mark.points(3, task="labels")
def test_a_label_is_a_generated_token_of_the_same_document(impl, seeds):
    for seed in seeds(6):
        model = small_model(0)
        rows, prompts, documents = documents_of(impl.Documents, model, seed)
        index = torch.tensor(random.Random(seed).choices(range(3), k=4))
        for k in range(1, 5):
            labels = documents.labels(index, k)
            assert labels.shape == (4, 7), "(B, T - 2): the longest document has T = 9 tokens"
            for b, d in enumerate(index.tolist()):
                inside = range(prompts[d], len(rows[d]))
                right = [rows[d][i + k + 1] if i + k + 1 in inside else -100 for i in range(7)]
                assert labels[b].tolist() == right, (
                    f"step {k} of a document of {len(rows[d])} tokens with a prompt of "
                    f"{prompts[d]}: labels {labels[b].tolist()} instead of {right}"
                )


def loss_of(impl, model, head, aligned: bool, k: int = 3, **given):
    """The loss of `k` steps, without documents; `given` are methods in the place of its own."""
    loss = impl.MTPLoss(head, model, None, k, 0.6, aligned)
    for name, method in given.items():
        setattr(loss, name, method)
    return loss


@pytest.mark.points(6, task="aligned")
def test_aligned_training_is_drafting(impl, seeds):
    """Step k at row i is the head extended to i, then run on its own output with true tokens."""
    for seed in seeds(3):
        model, text = small_model(seed), random_text(seed, 6)
        head, n = random_mtp_head(model, seed), len(text) - 2
        hidden, tokens = model(text)[:, :n], torch.tensor([text + [0] * 4])
        logits = loss_of(impl, model, head, True, 4).steps(hidden, tokens)
        assert len(logits) == 4, "one tensor of logits a step"
        for i in range(n):
            drafter = fastmtp.HeadDrafter(head, model, head.new_cache(64), 0)
            out = drafter.run(hidden[0, : i + 1], text[1 : i + 2])[-1:]
            drafter.cache.length = i + 1
            for k in range(4):
                worst = (model.logits(out)[0] - logits[k][0, i]).abs().max()
                assert worst < 1e-9, (
                    f"step {k + 1}, row {i} is not what drafting does: step k at row i stands at "
                    "position i + k - 1 and sees step 1 up to row i, then row i of later steps"
                )
                out = drafter.run(out, [int(tokens[0, i + k + 2])])
                drafter.cache.length = i + k + 2


@pytest.mark.points(3, task="parallel")
def test_parallel_training_keeps_position_and_mask(impl, seeds):
    for seed in seeds(3):
        model, text = small_model(seed), random_text(seed, 6)
        head, n = random_mtp_head(model, seed), len(text) - 2
        x, tokens = model(text)[:, :n], torch.tensor([text + [0] * 4])
        logits = loss_of(impl, model, head, False).steps(x, tokens)
        for k in range(3):
            embedded = model.model.embed_tokens(tokens[:, k + 1 : k + 1 + n])
            x = head(x, embedded)
            assert (logits[k] - model.logits(x)).abs().max() < 1e-9, (
                f"step {k + 1}: the positions and the causal mask of step 1, on the head's own "
                "output and the true token i + k"
            )


@pytest.mark.points(1, task="parallel")
def test_gradients_flow_through_all_steps(impl, seeds):
    (seed,) = seeds(1)
    model, text = small_model(seed), random_text(seed, 6)
    hidden = model(text)[:, :-2].requires_grad_(True)
    loss = loss_of(impl, model, random_mtp_head(model, seed), False)
    logits = loss.steps(hidden, torch.tensor([text + [0] * 4]))
    assert logits[2].requires_grad, (
        "step 3 does not depend on what step 1 read: do not detach between steps"
    )


@pytest.mark.points(4, task="loss")
def test_the_loss_weighs_means_over_labelled_rows(impl, seeds):
    for i, seed in enumerate(seeds(6)):
        generator = torch.Generator().manual_seed(seed)
        logits = [torch.randn(2, 5, 24, generator=generator) for _ in range(3)]
        labels = [torch.randint(24, (2, 5), generator=generator) for _ in range(3)]
        for k, label in enumerate(labels):
            label[torch.rand(2, 5, generator=generator) < 0.3 * k] = -100
        if i == 0:
            labels[2][:] = -100  # no document is that long
        hidden = torch.zeros(2, 5, 16)
        loss = loss_of(
            impl, small_model(0), None, True,
            gather=lambda index: (hidden, torch.zeros(2, 8, dtype=torch.long), labels),
            steps=lambda hidden, tokens: logits,
            outputs=lambda hidden, tokens: logits, logits=lambda x: x,  # the package's
        )  # fmt: skip
        right = 0.0
        for weight, each, label in zip((25 / 49, 15 / 49, 9 / 49), logits, labels):
            logs = each.log_softmax(-1).gather(-1, label.clamp(min=0)[..., None])[..., 0]
            kept = label >= 0
            right += weight * float(-logs[kept].mean()) if kept.any() else 0.0
        given = float(loss(torch.tensor([0, 1])))
        assert given == pytest.approx(right, abs=1e-5), (
            f"{given:.4f} instead of {right:.4f}: Σ α_k · CE_k, each CE_k the mean over its own "
            "rows with a label (0 if there is none), α for K = 3 and β = 0.6"
        )
