"""The head by its formula, its tokens by their marks, and training by drafting."""

import random

import pytest
import torch

from minispec.certify.toys import random_eagle3_head, randomise, small_model
from minispec.methods.eagle3 import Midlayer
from minispec.methods.fastmtp import HeadDrafter
from minispec.model import make_context

GRADED = {
    "layers": "default_layers", "midlayer": "Midlayer.forward",
    "head": "Eagle3Head.project_features, Eagle3Head.logits", "ids": "read_ids",
    "unroll": "MTPLoss.outputs, MTPLoss.plan", "loss": "MTPLoss.__call__",
}  # fmt: skip


def model_of(seed: int):
    return small_model(seed, layers=7)


@pytest.mark.points(2, task="layers")
def test_the_layers_are_a_low_a_middle_and_a_high_one(impl):
    for n in (30, 7, 8, 32, 3, 6, 2, 1):
        right = sorted({min(2, n - 1), n // 2, max(n - 3, 0)})
        given = [*impl.default_layers(n)]
        assert given == right, f"of {n} layers: {right}, not {given}"


# ---- the head ------------------------------------------------------------------------------------


@pytest.mark.points(6, task="midlayer")
def test_the_block_is_the_formula_s(impl, seeds):
    for seed in seeds(4):
        model, before = model_of(seed), seed % 2 == 1
        layer, given = (kind(model.config, before).double() for kind in (Midlayer, impl.Midlayer))
        given.load_state_dict(randomise(layer, seed).state_dict())
        hidden, embedded = torch.randn(
            2, 1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        ctx = make_context(model.rope, hidden, 5, None, None, None)
        normed = layer.hidden_norm(hidden)
        pair = torch.cat([layer.input_layernorm(embedded), normed], -1)
        x = layer.self_attn(pair, ctx) + (normed if before else hidden)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        output = given(hidden, embedded, ctx)
        assert output.shape == hidden.shape, f"(B, n, d) -> (B, n, d), not {tuple(output.shape)}"
        assert (output - x).abs().max() < 1e-9, (
            f"norm_before_residual {before}: the attention reads [norm(embedded); norm(hidden)], "
            "and is added to the hidden state; then the MLP"
        )


def copied_head(impl, model, seed: int):
    """A random head, and the implementation's with the same weights."""
    head = random_eagle3_head(model, seed)
    ids, layers = head.host_ids.tolist(), head.feature_layers
    given = impl.Eagle3Head(model.config, model.config, ids, layers).double()
    given.load_state_dict(head.state_dict())
    return head, given


@pytest.mark.points(4, task="head")
def test_features_go_in_and_logits_come_out(impl, seeds):
    for seed in seeds(4):
        model = model_of(seed)
        head, given = copied_head(impl, model, seed)
        states = model([3, 1, 4, 1, 5], feature_layers=head.feature_layers)
        fused = given.project_features(states)
        assert fused.shape == (1, 5, 16), f"(..., n, d), here (1, 5, 16), not {tuple(fused.shape)}"
        assert (fused - states[..., 16:] @ head.fc.weight.T).abs().max() < 1e-9, (
            "`fc` reads the three states that follow the last one, in their order"
        )
        logits = given.logits(fused)
        scale = (fused.square().mean(-1, keepdim=True) + head.config.norm_eps).rsqrt()
        right = (fused * scale * head.norm.weight) @ head.lm_head.weight.T
        assert logits.shape == right.shape, f"{tuple(right.shape)}, not {tuple(logits.shape)}"
        assert (logits - right).abs().max() < 1e-9, "the head's own norm, then its own lm_head"


@pytest.mark.points(3, task="ids")
def test_the_tokens_of_lm_head_s_rows(impl, seeds):
    for seed in seeds(6):
        rng = random.Random(seed)
        ids = sorted(rng.sample(range(12), rng.randint(2, 9)))
        d2t, marks = [token - i for i, token in enumerate(ids)], [i in ids for i in range(12)]
        for with_marks in (False, True):
            tensors = {"fc.weight": torch.zeros(1), "d2t": torch.tensor(d2t)}
            tensors |= {"t2d": torch.tensor(marks)} if with_marks else {}
            given = [*impl.read_ids("a head", tensors, len(ids), 12)]
            assert given == ids, f"d2t {d2t}: the tokens are {ids}, not {given}"
        given = [*impl.read_ids("a head", {}, 12, 12)]
        assert given == [*range(12)], f"without d2t, row i is token i, not {given}"


@pytest.mark.points(1, task="ids")
def test_wrong_marks_are_refused(impl):
    right = torch.tensor([True, False, True, False])
    for d2t, marks, count, what in (
        ([0, 1], ~right, 2, "t2d marks other tokens"), ([0, 1], right, 3, "3 tokens are expected"),
        ([0, -1], None, 2, "two rows are the same token"), ([0, 4], None, 2, "5 of 4 tokens"),
    ):  # fmt: skip
        tensors = {"d2t": torch.tensor(d2t)} | ({} if marks is None else {"t2d": marks})
        try:
            found = impl.read_ids("a head", tensors, count, 4)
        except Exception as error:
            found = type(error).__name__
            if found in ("NotImplementedError", "Borrowed"):
                raise
        assert found == "UserError", f"d2t {d2t}, {what}: a UserError, not {found}"


# ---- training ------------------------------------------------------------------------------------


def loss_of(impl, model, head, steps: int, **given):
    """The loss of `steps` steps, without documents; `given` are in the place of its own methods."""
    loss = impl.MTPLoss(head, model, None, steps, 0.5, True, True)
    for name, method in given.items():
        setattr(loss, name, method)
    return loss


@pytest.mark.points(7, task="unroll")
def test_training_time_test_is_drafting(impl, seeds):
    """Step k at row i is the head extended to i, then run on its own output with true tokens."""
    for seed in seeds(3):
        rng, model = random.Random(seed), model_of(seed)
        head, text = random_eagle3_head(model, seed), rng.sample(range(24), rng.randint(6, 9))
        states = model(text, feature_layers=head.feature_layers)[:, : len(text) - 2]
        tokens, n = torch.tensor([text + [0] * 4]), len(text) - 2
        outputs = loss_of(impl, model, head, 4).outputs(states, tokens)
        assert len(outputs) == 4, f"one tensor of outputs a step, not {len(outputs)}"
        for i in range(n):
            drafter = HeadDrafter(head, model, head.new_cache(64), 0)
            fused = head.project_features(states[0, : i + 1])
            right = drafter.run(fused, text[1 : i + 2])[-1:]
            drafter.cache.length = i + 1
            for k in range(4):
                worst = (right[0] - outputs[k][0, i]).abs().max()
                assert worst < 1e-9, (
                    f"step {k + 1}, row {i} is not what drafting does: step k at row i stands at "
                    "position i + k - 1 and sees step 1 up to row i, then row i of later steps"
                )
                right = drafter.run(right, [int(tokens[0, i + k + 2])])
                drafter.cache.length = i + k + 2


@pytest.mark.points(1, task="unroll")
def test_gradients_flow_through_all_steps(impl, seeds):
    (seed,) = seeds(1)
    model, text = model_of(seed), [3, 1, 4, 1, 5, 9]
    head = random_eagle3_head(model, seed)
    states = model(text, feature_layers=head.feature_layers)[:, :-2].requires_grad_(True)
    outputs = loss_of(impl, model, head, 3).outputs(states, torch.tensor([text + [0] * 4]))
    assert outputs[2].requires_grad, (
        "step 3 does not depend on what step 1 read: do not detach between steps"
    )


@pytest.mark.points(6, task="loss")
def test_the_loss_compares_distributions_over_the_head_s_tokens(impl, seeds):
    for case, seed in enumerate(seeds(6)):
        model = model_of(seed).float()
        head, generator = random_eagle3_head(model, seed), torch.Generator().manual_seed(seed)
        states = torch.randn(2, 7, 64, generator=generator)
        found = [torch.randn(2, 5, 16, generator=generator) for _ in range(2)]
        labels = [torch.randint(24, (2, 5), generator=generator) for _ in range(2)]
        for label in labels:
            label[torch.rand(2, 5, generator=generator) < 0.3] = -100
        if case == 0:
            labels[1][:] = -100  # no document is that long
        tokens, ids = torch.zeros(2, 9, dtype=torch.long), head.host_ids.tolist()
        loss = loss_of(
            impl, model, head, 2, gather=lambda index: (states, tokens, labels),
            outputs=lambda hidden, tokens: found,
        )  # fmt: skip
        right = 0.0
        for k, weight in enumerate((2 / 3, 1 / 3)):
            last = states[:, k + 1 : k + 6, :16]
            p = (last @ model.lm_head.weight[ids].T).softmax(-1)
            each = -(p * head.logits(found[k]).log_softmax(-1)).sum(-1)
            kept = torch.isin(labels[k], torch.tensor(ids))
            right += weight * float(each[kept].mean()) if kept.any() else 0.0
        given = float(loss(torch.tensor([0, 1])))
        assert given == pytest.approx(right, abs=1e-4), (
            f"{given:.4f} instead of {right:.4f}: Σ weight_k · CE_k between the target's and the "
            "head's distribution over the head's tokens, over the rows whose label is one of them"
        )
