"""Assignment 8: one engine for every proposer. Fill in the functions; see README.md."""

from collections.abc import Iterator

from lessons.assignments.a8_engine.proposers import Proposer
from minispec.cache import KVCache
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step


def engine(
    model: Transformer, proposer: Proposer, prompt: list[int], sampling: Sampling,
    randomness: Randomness, *, cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Decode with whatever `proposer` proposes, never ending: first an empty `Step()` for the
    prefill, then one Step(new tokens, tree, path) a round.

    `cache` (default: a new one of the model's) may hold a prefix of the prompt already: feed what
    it lacks. The order: `proposer.begin` after the prefill; then, every round, `propose`, `beside`,
    one pass over the tree's tokens and those that ride along, `accept` over the tree,
    `cache.commit`, `learn`. A proposer may use all the room that the cache has. After every round
    the cache holds all tokens but the last.

    Example: the tree is 7 with the children 4 and 2, and one token rides along, so the pass has 4
    rows. `accept` looks at the first 3, chooses 2 and draws 9: commit([0, 2]), learn(…, 9], tree,
    [0, 2], all 4 hidden states), Step([2, 9], tree, [0, 2]).
    """
    raise NotImplementedError


def black_box(
    checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float, top_k: int,
    top_p: float, seed: int,
) -> list[int]:  # fmt: skip
    """Your engine as the certifier wants it (`minispec.certify.functions.decoder.Implementation`),
    with a proposer that needs no weights of its own and saves passes where a text repeats itself
    (`Jacobi` saves none there).

    Returns the new tokens after `prompt`: exactly `max_new_tokens`, or fewer if one of
    `model.config.eos_ids` comes, which is then the last. `minispec.load(checkpoint, "float64",
    "cpu")` gives the model (and a tokenizer). Load it once: calls come in thousands.

    Example: max_new_tokens is 3, and rounds of 2 tokens give 5, 6, 7, 8: return [5, 6, 7]. If 6 is
    an end token, return [5, 6].
    """
    raise NotImplementedError
