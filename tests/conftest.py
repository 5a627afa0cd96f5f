"""What tests share: tiny random models with drafts and heads, a tokenizer of bytes, and the folders
of real ones."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minispec import cost
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.methods.medusa import MedusaHeads, untrained
from minispec.model import Config, Transformer
from minispec.toys import random_head, random_heads, small_model
from minispec.tree import Tree

torch.set_num_threads(1)  # tests' tensors are tiny: two threads would only wait for one another
cost.MOMENT = 0.0  # nor does it matter how well a cost is measured
ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not on this machine")


def random_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Transformer:
    """The certifier's tiny random Transformer, over 32 tokens and a context of 256."""
    vocab, context = changes.pop("vocab_size", 32), changes.pop("context", 256)
    return small_model(seed, vocab, context, **changes).to(dtype)


def random_tokens(n: int, seed: int = 0, vocab: int = 32) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tree(rng: random.Random, n: int, vocab: int = 32) -> Tree:
    parents = [-1] + [rng.randrange(i) for i in range(1, n)]
    return Tree([rng.randrange(vocab) for _ in range(n)], parents)


def companions(model: Transformer) -> dict[str, dict]:
    """Small random drafts and heads, where the model is, as the options of methods that need them;
    their trees branch, and some of their guesses are right."""
    heads = {"heads": random_heads(model, 1).to(model.device)}
    return {
        "speculative": {"draft": random_model(1, layers=1).to(model.device), "k": 3},
        "medusa": heads | {"tree": [(0, 0, 0), (1,), (0, 1), (2, 0, 1)]},
        "medusa-typical": heads,
        "fastmtp": {"head": random_head(model, 2).to(model.device), "k": 3},
    }


def last_line_of_refusal(capsys, command) -> str:
    """The one line that a command ends with, with exit code 2, after its progress."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        command()
    error = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and error.startswith("minispec: ")
    return error


WORDS = "the cat sat on a mat and saw one red bird fly over it".split()


def tales(n: int) -> str:
    """Random words: `n` documents of a text file."""
    rng = random.Random(0)
    return "\n<|endoftext|>\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(n))


# ---- text ----------------------------------------------------------------------------------------

END, USER, ASSISTANT, END_TURN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + CHAT_TEMPLATE  # as many published templates do


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, USER, ASSISTANT, END_TURN])
    return Tokenizer(backend, {"bos_token": END, "eos_token": END}, chat_template)


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.size


def byte_model(seed: int = 0, context: int = 256, eos: tuple[int, ...] = ()) -> Transformer:
    """A random model of TOKENIZER's bytes."""
    return random_model(seed, vocab_size=VOCAB, context=context, bos_id=256, eos_ids=eos)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A byte-level model on disk."""
    path = tmp_path_factory.mktemp("model")
    save(byte_model(eos=(256,)), TOKENIZER, path)
    return str(path)


# ---- a model whose text is known -----------------------------------------------------------------


def count_up(vocab: int, heads: int) -> tuple[Transformer, MedusaHeads]:
    """A model that says t + 1 after t, and heads that know it."""
    config = Config(vocab, 2, 1, 1, 1, vocab, vocab, 64, tied=False)
    model = Transformer(config).double()
    for name, p in model.named_parameters():
        p.data.fill_(1.0 if "norm" in name else 0.0)
        p.requires_grad_(False)
    one = torch.eye(vocab, dtype=torch.float64)
    model.model.embed_tokens.weight.data.copy_(one)
    model.lm_head.weight.data.copy_(one.roll(1, 0))
    made = untrained(heads, 1, model, shared=False)
    for k, head in enumerate(made):
        head[-1].weight.data.copy_(one.roll(k + 2, 0))
    return model, made.requires_grad_(False)
