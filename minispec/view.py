"""A look at a run: its text coloured by who produced each token, and an HTML page to step through
it pass by pass.

    python -m minispec.generate "Once upon a time" --method medusa --color=full --html trace.html

Both need only the run's Steps. The target's distributions, which a Step does not keep, are computed
again after the run, with one pass over each step's tree.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Sampling, probs
from minispec.tokenizer import Tokenizer
from minispec.tree import Step, Tree
from minispec.verify import residual

TOP = 8  # tokens of a distribution that the page shows
PAGE = Path(__file__).with_name("view.html")
MARK = "__TRACE__"  # where the page's data goes

# ---- in the terminal -----------------------------------------------------------------------------

# ECMA-48 colours, readable on dark and on light: green, magenta; red and struck out
DRAFTED, FRESH, REJECTED = "32", "35", "9;31"


class Painter:
    """Colours the text of a run as it arrives: accepted drafts green, the target's own tokens
    magenta, every other pass underlined. With `full`, rejected drafts are shown too, struck out,
    before the token that replaced them.

    A character made of several tokens takes the colour of the one that completes it. Strip the
    escape codes (and struck drafts) and what remains is the run's text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], full: bool = False):
        self.tokenizer, self.full = tokenizer, full
        self.stream = tokenizer.stream(prompt)
        self.passes = 0
        self.style = FRESH
        self.waiting: list[tuple[str, str]] = []  # styles and text that the run still holds back

    def paint(self, step: Step, tokens: list[int], text: str) -> str:
        """`text`, which `step` added to the run's output by emitting `tokens`, coloured."""
        underline = ";4" if self.passes % 2 else ""
        self.passes += 1
        drafted = len(step.path) - 1
        for i, token in enumerate(tokens):
            if i == drafted and self.full:
                self.waiting.append((REJECTED, self.rejected(step)))
            who = DRAFTED if i < drafted else FRESH
            self.waiting.append((who + underline, self.stream.push(token)))
        out = []
        while self.waiting:
            self.style, piece = self.waiting.pop(0)
            if self.style == REJECTED:
                out.append(colored(piece, REJECTED))
                continue
            shown, text = text[: len(piece)], text[len(piece) :]
            out.append(colored(shown, self.style))
            if shown != piece:  # held back, or cut by a stop string
                self.waiting.insert(0, (self.style, piece[len(shown) :]))
                break
        return "".join(out) + colored(text, self.style)  # left over: half a character at the end

    def rejected(self, step: Step) -> str:
        """The drafts off the path, branch by branch."""
        text, before = "", None
        for node in depth_first(step.tree):
            if node not in step.path:
                follows = before is None or step.tree.parents[node] == before
                text += ("" if follows else "|") + visible(
                    piece(self.tokenizer, step.tree.tokens[node])
                )
                before = node
        return text


def colored(text: str, style: str) -> str:
    """Each line is coloured by itself: pagers forget a colour at the end of a line."""
    return "\n".join(f"\x1b[{style}m{part}\x1b[0m" if part else "" for part in text.split("\n"))


def visible(text: str) -> str:
    """The text on one line, with control characters spelled out."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else ascii(c)[1:-1] for c in text)


def depth_first(tree: Tree) -> list[int]:
    """The nodes, branch by branch."""
    order, ahead = [], [0]
    while ahead:
        order.append(ahead.pop())
        ahead += reversed(tree.children(order[-1]))
    return order


# ---- the text of one token -----------------------------------------------------------------------


def piece(tokenizer: Tokenizer | None, token: int) -> str:
    r"""The text of a single token; bytes that form no character as \xe4, unknown ids as #7."""
    name = tokenizer.backend.id_to_token(token) if tokenizer else None
    if name is None:
        return f"#{token}"
    # decoded twice: decoders strip only the space before a text's first word
    once, twice = (tokenizer.backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    text = twice[len(once) :]
    return spelled(name) if "\ufffd" in text or not text else text


def spelled(name: str) -> str:
    r"""The bytes of an incomplete character, from the way its vocabulary spells them."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)  # byte fallback
    if byte:
        return rf"\x{byte[1].lower()}"
    if not all(c in BYTE for c in name):
        return name
    return bytes(BYTE[c] for c in name).decode("utf-8", errors="backslashreplace")


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable ones stand for themselves, the
    others start at U+0100."""
    alphabet = sorted(ByteLevel.alphabet())
    table = {c: ord(c) for c in alphabet if ord(c) < 256}
    others = [byte for byte in range(256) if byte not in table.values()]
    return table | dict(zip((c for c in alphabet if ord(c) >= 256), others))


BYTE = byte_alphabet()


# ---- the page ------------------------------------------------------------------------------------


def write_page(
    file: str, model: Transformer, tokenizer: Tokenizer | None, rounds: list[Step], facts: dict,
    sampling: Sampling,
) -> None:  # fmt: skip
    """Write a self-contained page to step through a run; `facts` is its --json object."""
    data = json.dumps(trace(model, tokenizer, rounds, facts, sampling), ensure_ascii=False)
    data = data.replace("<", r"\u003c")  # so that no text ends its script element
    try:
        Path(file).write_text(
            PAGE.read_text(encoding="utf-8").replace(MARK, data), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"--html {file}: cannot be written ({error.strerror})") from None


@torch.no_grad()
def trace(
    model: Transformer, tokenizer: Tokenizer | None, rounds: list[Step], facts: dict,
    sampling: Sampling,
) -> dict:  # fmt: skip
    """What the page shows, as a JSON object: the run's `facts`, its passes, the text of each token.

    The cache is filled as in the run: the prompt, then the accepted path of each tree.
    """
    prompt, emitted = facts["prompt_ids"], facts["tokens"]
    most = sum(len(step.tokens) for step in rounds) + max((len(s.tree) for s in rounds), default=0)
    cache = model.new_cache(min(len(prompt) + most, model.config.context))
    model.prefill(prompt[:-1], cache)
    stream = tokenizer.stream(prompt) if tokenizer else None
    eos = model.config.eos_ids if facts["finish_reason"] == "eos" else ()
    passes, done = [], 0
    for step in rounds:
        tree, before = step.tree, cache.length
        logits = model.logits(model(tree.tokens, cache, tree.depth, tree.mask)[0])
        cache.commit(step.path)
        new = emitted[done : done + len(step.tokens)]
        done += len(new)
        passes.append(
            {
                "rows": before,
                "tokens": step.tokens,
                "emitted": len(new),  # fewer than `tokens` if the run ended among them
                "texts": [stream.push(t) if stream and t not in eos else "" for t in new],
                "window": step.window,
                **scored(logits, step, sampling, facts["stats"]["lossless"]),
            }
        )
    if stream and passes and passes[-1]["texts"]:
        passes[-1]["texts"][-1] += stream.flush()
    return {
        **facts,
        "prompt": tokenizer.decode(prompt) if tokenizer else "",
        "sampling": vars(sampling),
        "passes": passes,
        "pieces": {token: piece(tokenizer, token) for token in sorted(mentioned(prompt, passes))},
    }


def scored(logits: Tensor, step: Step, sampling: Sampling, lossless: bool) -> dict:
    """A step's tree and what decided its path. Of node i: probs[i], the likeliest tokens of the
    target's distribution after it (at temperature 0, of the one at temperature 1, whose likeliest
    token greedy takes); entropy[i] of that distribution; p[i] and q[i], the probabilities that
    target and draft gave the node's own token (q None: one-hot); chance[i] of being accepted, where
    `accept` tried it."""
    tree = step.tree
    target = probs(logits, sampling)
    shown = target if sampling.temperature > 0 else probs(logits, Sampling(1.0))
    # typical acceptance, our one lossy rule, decides as `accept` does only at temperature 0
    walked = lossless or sampling.temperature == 0
    chance, last = decided(target, step) if walked else ([None] * len(tree), target[step.path[-1]])
    top = shown.topk(min(TOP, shown.shape[-1])).indices.tolist()
    listed = []  # after each node: the likeliest tokens, those drafted there, the fresh one
    for i, p in enumerate(shown):
        more = tree.tokens_at(tree.children(i)) + step.tokens[-1:] * (i == step.path[-1])
        ids = list(dict.fromkeys(top[i] + more))
        pairs = zip(ids, p[ids].tolist())
        listed.append([[x, short(weight)] for x, weight in pairs if weight > 0 or x in more])
    above = [0, *tree.parents[1:]]  # parents; the root's p is not shown
    q = [tree.drawn_from(i) for i in range(len(tree))]
    return {
        "tree": {"tokens": tree.tokens, "parents": tree.parents, "path": step.path},
        "probs": listed,
        "entropy": [short(h) for h in torch.special.entr(shown).sum(-1).tolist()],
        "p": [short(shown[i, x]) for i, x in zip(above, tree.tokens)],
        "q": [None if each is None else short(each[x]) for each, x in zip(q, tree.tokens)],
        "chance": chance,
        "drawn": short(last[step.tokens[-1]]),  # the fresh token's probability where the walk ended
    }


def decided(target: Sequence[Tensor], step: Step) -> tuple[list[float | None], Tensor]:
    """Repeat `accept`'s walk with its outcome known: the chance min(1, p / q) of every node it
    tried, where p is what earlier rejections left of the target's distribution; and the last p."""
    tree = step.tree
    chance: list[float | None] = [None] * len(tree)
    for node in step.path:
        p = target[node]
        for child in tree.children(node):
            x, q = tree.tokens[child], tree.drawn_from(child)
            chance[child] = short(min(1.0, float(p[x]) / (1.0 if q is None else float(q[x]))))
            if child in step.path:
                break
            rest = residual(p, q, x)
            p = p if rest is None else rest
    return chance, p


def short(x: float | Tensor) -> float:
    """Four digits are enough for a page."""
    return float(f"{float(x):.4g}")


def mentioned(prompt: list[int], passes: list[dict]) -> set[int]:
    """Every token that the page may show."""
    found = set(prompt)
    for now in passes:
        found.update(now["tokens"], now["tree"]["tokens"], *now["window"])
        found.update(x for pairs in now["probs"] for x, _ in pairs)
    return found
