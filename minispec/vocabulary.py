"""Language-aware vocabulary compression (FastMTP, section 3.3; FR-Spec, arXiv 2502.14856): a draft
reads only those rows of lm_head that its text's language uses often.

    python -m minispec.vocabulary --model weights/target --text en=stories.txt,talk.txt \\
        --text zh=zh.txt --size 2048 --out weights/mtp/vocabulary.json

The target still verifies over the full vocabulary, so a wrong guess of the language costs speed,
never text.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import WEIGHTS, check_fingerprint, load_pickle, read_tokenizer
from minispec.errors import Parser, UserError, command, prepare_file, read_json
from minispec.linear import Joined
from minispec.model import Transformer
from minispec.tokenizer import Tokenizer

WINDOW = 32  # tokens of the latest text by which its language is known
SURE = 4.0  # a token so many times as frequent in one language as in any other votes for it
MOST = 0.8  # share of the votes that makes a text of one language, not a mixed one


@dataclass(frozen=True)
class Language:
    """Its frequent tokens, most frequent first, and how often each was seen."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]


def count(texts: Iterable[list[int]], forced: list[int], size: int) -> Language:
    """The `size` most frequent tokens of `texts`, `forced` ones in any case and first."""
    seen: Counter[int] = Counter()
    for tokens in texts:
        seen.update(tokens)
    ranked = sorted(seen.keys() - set(forced), key=lambda token: (-seen[token], token))
    ids = list(dict.fromkeys(forced)) + ranked
    return Language(tuple(ids[:size]), tuple(seen[token] for token in ids[:size]))


# ---- at a draft's lm_head ------------------------------------------------------------------------


class Subset:
    """Logits over some rows of lm_head; `ids` None: over all."""

    @torch.inference_mode(False)  # kept beyond a run, also for heads that are trained
    @torch.no_grad()
    def __init__(self, model: Transformer, ids: list[int] | None = None):
        self.size = model.config.vocab_size
        self.ids = ids
        if ids is not None:
            self.index = torch.tensor(ids, device=model.device)
            rows = nn.Linear(1, 1, bias=False, device="meta")
            rows.weight = nn.Parameter(model.head_rows(self.index), requires_grad=False)
            self.rows = Joined(rows)  # W[V_high], (|V_high|, d)

    def __len__(self) -> int:
        """|V_high|."""
        return self.size if self.ids is None else len(self.ids)

    def logits(self, model: Transformer, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., |V_high|)."""
        return model.logits(hidden) if self.ids is None else self.rows(hidden)

    def full(self, j: int) -> int:
        """The token that the small vocabulary numbers `j`."""
        return j if self.ids is None else self.ids[j]

    def scatter(self, law: Tensor) -> Tensor:
        """A law over the subset, (|V_high|,), as one over the vocabulary, (V,), on the host."""
        if self.ids is None:
            return law
        return law.new_zeros(self.size).scatter(0, self.index.cpu(), law)


class Compressed:
    """The languages' subsets of a model's lm_head, and which of them a text calls for."""

    def __init__(self, languages: dict[str, Language], model: Transformer):
        self.model, self.languages = model, languages
        self.subsets: dict[tuple[str, ...], Subset] = {}
        self.votes = votes(languages)

    def pick(self, tokens: list[int]) -> Subset:
        """The subset for what comes after `tokens`: their language's, or the union of those they
        mix. All languages' where nothing tells; the full vocabulary where no language is known."""
        names = self.spoken(tokens)
        if names not in self.subsets:
            ids = dict.fromkeys(i for name in names for i in self.languages[name].ids)
            self.subsets[names] = Subset(self.model, list(ids) if self.languages else None)
        return self.subsets[names]

    def spoken(self, tokens: list[int]) -> tuple[str, ...]:
        """The languages of the latest tokens: the one with MOST of the votes, else all that have
        some."""
        found = Counter(self.votes[t] for t in tokens[-WINDOW:] if t in self.votes)
        names = tuple(sorted(found)) or tuple(sorted(self.languages))
        for name, n in found.items():
            if n >= MOST * found.total():
                return (name,)
        return names


def votes(languages: dict[str, Language]) -> dict[int, str]:
    """Tokens that tell a language: SURE times as frequent there as in every other."""
    share: dict[int, dict[str, float]] = {}
    for name, language in languages.items():
        total = sum(language.counts) + 1
        for token, n in zip(language.ids, language.counts):
            share.setdefault(token, {})[name] = n / total
    result = {}
    for token, by_name in share.items():
        best = max(by_name, key=by_name.get)
        others = [p for name, p in by_name.items() if name != best]
        if len(languages) > 1 and by_name[best] > SURE * max(others, default=0.0):
            result[token] = best
    return result


# ---- files ---------------------------------------------------------------------------------------


def load_vocabulary(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None,
    size: int | None = None,
) -> Compressed:  # fmt: skip
    """The languages of a file that this module wrote, or FastMTP's list of ids in a .pt; of each
    at most `size` tokens."""
    path = Path(path)
    if size is not None and size < 1:
        raise UserError(f"vocabulary size {size}: must be at least 1")
    if not path.exists():
        raise UserError(f"no such vocabulary file: {path}")
    if path.suffix == ".pt":
        languages = {path.stem: published(path)}
    else:
        languages = read_languages(path, tokenizer)
    for name, language in languages.items():
        if not language.ids:
            raise UserError(f"{path}: {name} has no tokens")
        wrong = [i for i in language.ids if not 0 <= i < model.config.vocab_size]
        if wrong:
            raise UserError(
                f"{path}: id {wrong[0]} of {name} is outside the target's vocabulary of "
                f"{model.config.vocab_size}: it was made for another model"
            )
    cut = {n: Language(each.ids[:size], each.counts[:size]) for n, each in languages.items()}
    return Compressed(cut, model)


def published(path: Path) -> Language:
    """FastMTP's map: a list or tensor of ids, most frequent first."""
    try:
        ids = torch.as_tensor(load_pickle(path)).tolist()
        return Language(tuple(dict.fromkeys(int(i) for i in ids)), (0,) * len(set(ids)))
    except Exception as error:  # whatever reading a damaged pickle raises
        raise UserError(f"{path} is not a list of token ids: {error}") from None


def read_languages(path: Path, tokenizer: Tokenizer | None) -> dict[str, Language]:
    raw = read_json(path)
    check_fingerprint(str(path), raw.get("tokenizer_fingerprint"), tokenizer)
    try:
        languages = {
            name: Language(tuple(map(int, each["ids"])), tuple(map(int, each["counts"])))
            for name, each in raw["languages"].items()
        }
        for name, each in languages.items():
            if len(each.ids) != len(each.counts) or min(each.counts, default=0) < 0:
                raise ValueError(f"{name} needs a count, from 0, for each id")
        return languages
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a file of minispec.vocabulary: {error!r}") from None


def save_vocabulary(languages: dict[str, Language], tokenizer: Tokenizer, path: Path) -> None:
    rows = {n: {"ids": each.ids, "counts": each.counts} for n, each in languages.items()}
    whole = {"tokenizer_fingerprint": tokenizer.fingerprint, "languages": rows}
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")


# ---- command line --------------------------------------------------------------------------------


@command
def main(argv: list[str] | None = None) -> None:
    from minispec.pretrain import read_documents  # methods import this module; they need no text

    p = Parser(prog="python -m minispec.vocabulary", description=__doc__.split("\n\n")[0])
    p.add_argument(
        "--model", default=str(WEIGHTS / "target"), help="a directory with a tokenizer.json"
    )
    p.add_argument("--text", action="append", required=True, metavar="NAME=FILE,…",
                   help="a language and its texts: .txt, .jsonl, a folder of Python files "
                        "(repeat)")  # fmt: skip
    p.add_argument("--size", type=int, default=2048, help="tokens of each language")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    tokenizer = read_tokenizer(args.model)
    if args.size < 1:
        raise UserError(f"--size {args.size}: must be at least 1")
    prepare_file(args.out, "--out")
    languages = {}
    for text in args.text:
        name, _, files = text.partition("=")
        if not (name and files):
            raise UserError(f"--text {text}: must be NAME=FILE, as en=stories.txt")
        if name in languages:
            raise UserError(f"--text {text}: {name} came before: put commas between its files")
        missing = [file for file in files.split(",") if not Path(file).exists()]
        if missing:
            raise UserError(f"--text {text}: no such file: {missing[0]}")
        documents = (d for file in files.split(",") for d in read_documents(Path(file)))
        texts = (tokenizer.encode(d) for d in tqdm(documents, desc=name, unit="document"))
        languages[name] = count(texts, tokenizer.special_ids, args.size)
        total = sum(languages[name].counts)
        if not total:
            raise UserError(f"--text {text}: holds no text (of a folder the .py files are read)")
        print(f"{name}: {len(languages[name].ids)} of {tokenizer.size} tokens, {total} seen")
    save_vocabulary(languages, tokenizer, args.out)


if __name__ == "__main__":
    main()
