"""A target whose text repeats itself, and drafters that are often right and often wrong: with them,
the tests of methods see drafts accepted and rejected. They are built from the target's weights, not
trained, so each is made in milliseconds and is the same on every machine.

Four tokens, 4i to 4i + 3, follow each other in a circle. An embedding holds i, as a random vector,
and the place in the circle; lm_head reads the next place. The layers disturb this: now and then the
text leaves its circle.
"""

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from minispec.certify.methods import cases
from minispec.certify.toys import small_model
from minispec.methods.eagle3 import Eagle3Head, default_layers
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import MedusaHeads
from minispec.model import Transformer

SIZE, PLACES = 32, 4  # of an embedding, of which the first are the place in the circle
TREE = [(0, 0, 0), (0, 1), (1, 0), (2,)]  # of Medusa's heads


def next_place(times: int = 1) -> Tensor:
    """The matrix that turns a token's embedding into that of its successor in the circle."""
    matrix = torch.eye(SIZE, dtype=torch.float64)
    matrix[:PLACES, :PLACES] = matrix[:PLACES, :PLACES].roll(times, 0)
    return matrix


def blur(module: nn.Module, seed: int, share: float = 0.15) -> nn.Module:
    """Add noise to all parameters: this share of their own size."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.add_(share * p.square().mean().sqrt() * noise)
    return module.double().requires_grad_(False).eval()


def repeating_model(seed: int, vocab: int = 24, context: int = 256, **changes) -> Transformer:
    """A target that repeats itself, in float64. `changes` are fields of its Config."""
    model = small_model(seed, vocab, context, hidden_size=SIZE, head_dim=8, tied=False,
                        **{"layers": 1} | changes)  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    circles = -(-vocab // PLACES)
    circle = torch.randn(circles, SIZE - PLACES, generator=generator, dtype=torch.float64)
    circle *= 20**0.5 / circle.norm(dim=1, keepdim=True)
    place = 12**0.5 * torch.eye(PLACES, dtype=torch.float64)
    parts = place.repeat(circles, 1), circle.repeat_interleave(PLACES, 0)
    embedding = torch.cat(parts, 1)[:vocab]  # of unit size in every component
    model.model.embed_tokens.weight.data = embedding.clone()
    model.lm_head.weight.data = 0.6 * embedding @ next_place()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0)
        if "o_proj" in name or "down_proj" in name:
            p.data.mul_(0.15)
    return model


def half_right(folder: str, model: Transformer, seed: int = 0) -> nn.Module:
    """The draft or heads of this folder's kind for a `repeating_model`."""
    makers = {"draft": draft_model, "medusa": medusa_heads, "mtp": mtp_head, "eagle3": eagle3_head}
    return makers[folder](model, seed)


def draft_model(model: Transformer, seed: int) -> Transformer:
    return blur(copy.deepcopy(model), seed)


def medusa_heads(model: Transformer, seed: int) -> MedusaHeads:
    """Four heads, which share lm_head. Head k moves the place by k + 1."""
    heads = MedusaHeads(4, 1, SIZE, None).double()
    for k, (block,) in enumerate(heads):
        block.linear.weight.data = next_place(k + 1) - next_place(0)
        block.linear.bias.data[:PLACES] = 6.0  # where SiLU is linear
    heads.tree = TREE
    ranks = torch.arange(10, dtype=torch.float64)
    heads.accuracy = torch.stack([0.6 * 0.8**k * 0.4**ranks for k in range(4)])
    return blur(heads, seed)


def mtp_head(model: Transformer, seed: int) -> MTPHead:
    """The target's first layer. It reads the token, and the place after the hidden state's."""
    head = MTPHead(model.config).double()
    head.load_state_dict(model.model.layers[0].state_dict(), strict=False)
    head.input_proj.weight.data = torch.cat([0.4 * next_place(), 0.6 * next_place(0)], 1)
    return blur(head, seed)


def eagle3_head(model: Transformer, seed: int) -> Eagle3Head:
    """Keeps the circle of the token that entered the target's first layer. Attention to the row
    itself replaces the place by that of the row's token. Drafts four fifths of the tokens."""
    c, places = model.config, torch.arange(PLACES)
    ids = [token for token in range(c.vocab_size) if token % 5 != seed % 5]
    head = Eagle3Head(c, c, ids, default_layers(c.layers)).double()
    for p in head.parameters():
        p.data.fill_(1.0 if p.dim() == 1 else 0.0)
    head.fc.weight.data[PLACES:, PLACES:SIZE] = torch.eye(SIZE - PLACES)
    head.lm_head.weight.data = model.lm_head.weight[ids].clone()
    attention = head.midlayer.self_attn
    for matrix in attention.q_proj, attention.k_proj:  # the same: the closest row scores highest
        matrix.weight.data.view(-1, c.head_dim, 2 * SIZE)[:, :2, :PLACES] = 2.0
    attention.v_proj.weight.data[places, places] = 1.0  # of the token
    attention.v_proj.weight.data[PLACES + places, SIZE + places] = 1.0  # of the hidden state
    change = torch.cat([torch.eye(PLACES), -torch.eye(PLACES)], 1)
    attention.o_proj.weight.data[:PLACES, : 2 * PLACES] = change
    return blur(head, seed)


@contextlib.contextmanager
def half_right_cases() -> Iterator[None]:
    """The certifier's cases have these drafters if their target is a `repeating_model`."""

    def drafter_for(folder, model, seed):
        repeats = model.config.hidden_size == SIZE
        return half_right(folder, model, seed) if repeats else original(folder, model, seed)

    original = cases.drafter_for
    with mock.patch.object(cases, "drafter_for", drafter_for):
        yield
