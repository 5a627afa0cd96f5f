"""A look at a run: its text coloured by who produced each token, and an HTML page to step through
it pass by pass.

    python -m minispec.generate "Once upon a time" --method medusa --color=full --html trace.html
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate.run import Chunk, Run
from minispec.model import Transformer
from minispec.sampling import Sampling, probs
from minispec.tree import Step
from minispec.verify import residual

TOP = 8  # tokens of a distribution that the page shows
PAGE = Path(__file__).with_name("view.html")
MARK = "__TRACE__"  # where the page's data goes

# ECMA-48 colours, readable on dark and on light: green, magenta; red and struck out
DRAFTED, FRESH, REJECTED = "32", "35", "9;31"


def paint(chunk: Chunk, tokenizer: Tokenizer, underline: bool = False, full: bool = False) -> str:
    """A round's text: accepted drafts green, the target's own token magenta; with `full` the
    rejected drafts too, struck out, before the token that replaced them.

    What several tokens make together, as the bytes of a character, takes the colour of the last.
    """
    out, drafted = "", len(chunk.step.path) - 1
    for i, text in enumerate(chunk.texts):
        if full and i == drafted:
            out += colored(rejected(chunk.step, tokenizer), REJECTED)
        out += colored(text, (DRAFTED if i < drafted else FRESH) + ";4" * underline)
    return out


def colored(text: str, style: str) -> str:
    """Each line is coloured by itself: pagers forget a colour at the end of a line."""
    return "\n".join(f"\x1b[{style}m{part}\x1b[0m" if part else "" for part in text.split("\n"))


def rejected(step: Step, tokenizer: Tokenizer) -> str:
    """The drafts off the path, on one line; a | where a branch ends."""
    text, before = "", None
    for node in range(1, len(step.tree)):
        if node not in step.path:
            if before not in (None, step.tree.parents[node]):
                text += "|"
            text, before = text + piece(tokenizer, step.tree.tokens[node]), node
    return "".join(c if c.isprintable() else "↵" if c == "\n" else ascii(c)[1:-1] for c in text)


def piece(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a single token; where it is no text by itself, as some bytes of a character, the
    name that the vocabulary gives it; unknown ids as #7."""
    name = tokenizer.backend.id_to_token(token) if tokenizer else None
    if name is None:
        return f"#{token}"
    # decoded twice: decoders strip only the space before a text's first word
    once, twice = (tokenizer.backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    text = twice[len(once) :]
    return text if text and "\ufffd" not in text else name


def write_page(
    file: str, model: Transformer, tokenizer: Tokenizer | None, run: Run, name: str
) -> None:
    """Write a self-contained page to step through a run of the model of this name."""
    data = json.dumps(trace(model, tokenizer, run, name), ensure_ascii=False)
    data = data.replace("<", r"\u003c")  # so that no text ends its script element
    page = PAGE.read_text(encoding="utf-8").replace(MARK, data)
    Path(file).write_text(page, encoding="utf-8")


@torch.no_grad()
def trace(model: Transformer, tokenizer: Tokenizer | None, run: Run, name: str) -> dict:
    """What the page shows, as a JSON object: the run's --json, its passes, the text of each token.

    A Step does not keep the target's distributions: they are computed again, with one pass over
    each step's tree. The cache is filled as in the run: the prompt, then the accepted paths.
    """
    rows = len(run.prompt) + sum(len(step.tokens) + len(step.tree) for step in run.rounds)
    cache = model.new_cache(min(rows, model.config.context))
    model.prefill(run.prompt[:-1], cache)
    passes, done, lossless = [], 0, run.stats["lossless"]
    for step in run.rounds:
        before = cache.length
        logits = model.logits(model(step.tree.tokens, cache, step.tree.depth, step.tree.mask)[0])
        cache.commit(step.path)
        texts = run.texts[done : done + len(step.tokens)]
        done += len(texts)
        passes.append(
            {
                "rows": before,
                "tokens": step.tokens,
                "emitted": len(texts),  # fewer than `tokens` if the run ended among them
                "texts": texts,
                "window": step.window,
                **scored(logits, step, run.sampling, lossless),
            }
        )
    mentioned = set(run.prompt)
    for now in passes:
        mentioned.update(now["tokens"], now["tree"]["tokens"], *now["window"])
        mentioned.update(x for pairs in now["probs"] for x, _ in pairs)
    return {
        **run.as_json(name),
        "prompt": tokenizer.decode(run.prompt) if tokenizer else "",
        "sampling": vars(run.sampling),
        "passes": passes,
        "pieces": {token: piece(tokenizer, token) for token in sorted(mentioned)},
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
