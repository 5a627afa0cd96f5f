"""Shared by the tests: tiny random models, drafts and heads, a byte tokenizer, and the folders of
real checkpoints."""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from types import FunctionType

import pytest
import torch
from half_right import half_right_cases
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minispec import paths
from minispec.certify.methods import cases
from minispec.certify.toys import (
    random_eagle3_head,
    random_medusa_heads,
    random_mtp_head,
    small_model,
)
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.fast import cost, products
from minispec.methods import METHODS, find_method
from minispec.methods.medusa import MedusaHeads, new_heads
from minispec.model import Config, Transformer
from minispec.tree import Tree

DECLARED = {name: find_method(name) for name in METHODS}
NEEDS = {  # the draft or heads that a method cannot do without
    name: argument for name, method in DECLARED.items() for argument in method.of_kind("weights")
    if method.options[argument][1] is Parameter.empty
}  # fmt: skip
AUTO = [(name, argument) for name, method in DECLARED.items()
        for argument, (option, _) in method.options.items() if option.auto]  # fmt: skip
torch.set_num_threads(1)  # the tests' tensors are tiny: a second thread would only slow them down
cost.TURN_SECONDS = 0.0  # no test needs accurate costs
products.TURNS = 1
ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not on this machine")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Tests leave no files in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CACHE", tmp_path_factory.mktemp("cache"))
        yield


def random_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Transformer:
    """The certifier's tiny random Transformer, with 32 tokens and a context of 256."""
    vocab, context = changes.pop("vocab_size", 32), changes.pop("context", 256)
    return small_model(seed, vocab, context, **changes).to(dtype)


def random_tokens(n: int, seed: int = 0, vocab: int = 32) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def equal_up_to_rounding(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two models with equal weights have equal outputs. The bits may differ: a kernel may
    sum in another order where weights lie at other addresses, as loaded ones do."""
    return torch.allclose(a, b, rtol=0, atol=1000 * torch.finfo(b.dtype).eps * float(b.abs().max()))


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, so writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def half_right_drafters():
    with half_right_cases(), torch.no_grad():
        yield


def random_tree(rng: random.Random, n: int, vocab: int = 32) -> Tree:
    parents = [-1] + [rng.randrange(i) for i in range(1, n)]
    return Tree([rng.randrange(vocab) for _ in range(n)], parents)


def method_options(model: Transformer) -> dict[str, dict]:
    """What each method drafts with: small random drafts or heads, on the model's device. Their
    trees branch, and some of their guesses are right."""
    heads = random_medusa_heads(model, 1)
    heads.tree = [(0, 0, 0), (0, 1), (1,), (2, 0, 1)]
    drafters = {"draft": random_model(1, layers=1), "medusa": heads,
                "mtp": random_mtp_head(model, 2), "eagle3": random_eagle3_head(model, 2)}
    options = {}
    for name in METHODS:
        weights = find_method(name).of_kind("weights").items()
        options[name] = {argument: drafters[option.folder].to(model.device)
                         for argument, option in [*weights][:1]}  # fmt: skip
    return options


def kinds_of_cases(
    method: str, model: cases.Target, seed: int = 0, first: bool = False
) -> dict[str, dict]:
    """The options of a few of a method's cases, by their names: the last of each kind and, if
    `first`, the first as well. Cases of one kind have the same options, chosen by the same kinds of
    policies, and the same drafter."""
    kinds: dict[tuple, list] = {}
    for name, options in cases.cases_of(find_method(method), model, seed):
        values = [(key, type(x), x if isinstance(x, bool | FunctionType) else 0)
                  for key, x in options.items()]  # fmt: skip
        kinds.setdefault(("probing" in name, *values), []).append((name, options))
    return dict(case for kind in kinds.values() for case in (kind[:1] if first else []) + kind[-1:])


def waits_of(method: str, options: dict) -> tuple[int, int | None]:
    """What the method declares for these options."""
    waits = find_method(method).waits

    def chosen(name: str, _: str, auto: str) -> bool:
        return bool(options.get(name)) and (not auto or hasattr(options[name], "choose"))

    return waits[next((name for name in waits if chosen(*name.partition("="))), "")]


def last_error_line(capsys, command) -> str:
    """The error line of a command that must exit with code 2; lines of progress may precede it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        command()
    error = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and error.startswith("minispec: ")
    return error


def torchrun(size: int, *arguments: str, **options) -> subprocess.Popen:
    """Start `size` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(size), *map(str, arguments)]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, **pipes, env=environment, **options)


def browser(profile: Path) -> list[str]:
    """The command of a browser without a window. Lines with CONSOLE in its stderr are messages."""
    return [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={profile}",
    ]  # fmt: skip


WORDS = "the cat sat on a mat and saw one red bird fly over it".split()


def random_documents(n: int) -> str:
    """A text file of `n` documents, made of random words."""
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
) + CHAT_TEMPLATE  # many published templates have such a check


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A tokenizer with one token per byte, followed by the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, USER, ASSISTANT, END_TURN])
    return Tokenizer(backend, {"bos_token": END, "eos_token": END}, chat_template)


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.size


def byte_model(seed: int = 0, context: int = 256, eos: tuple[int, ...] = ()) -> Transformer:
    """A random model over the tokens of TOKENIZER."""
    return random_model(seed, vocab_size=VOCAB, context=context, bos_id=256, eos_ids=eos)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A byte-level model on disk."""
    path = tmp_path_factory.mktemp("model")
    save(byte_model(eos=(256,)), TOKENIZER, path)
    return str(path)


# ---- a model with known output -------------------------------------------------------------------


def counting_model(vocab: int, heads: int) -> tuple[Transformer, MedusaHeads]:
    """A model that predicts t + 1 after t, and heads that agree with it."""
    config = Config(vocab, 2, 1, 1, 1, vocab, vocab, 64, tied=False)
    model = Transformer(config).double()
    for name, p in model.named_parameters():
        p.data.fill_(1.0 if "norm" in name else 0.0)
        p.requires_grad_(False)
    identity = torch.eye(vocab, dtype=torch.float64)
    model.model.embed_tokens.weight.data.copy_(identity)
    model.lm_head.weight.data.copy_(identity.roll(1, 0))
    medusa_heads = new_heads(heads, 1, model, shared=False)
    for k, head in enumerate(medusa_heads):
        head[-1].weight.data.copy_(identity.roll(k + 2, 0))
    return model, medusa_heads.requires_grad_(False)
