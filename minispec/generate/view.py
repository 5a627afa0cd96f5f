"""Show a run: its text, coloured by who produced each token, and a page that steps through it pass
by pass.

    python -m minispec.generate "Once upon a time" --method medusa --color=full --html trace.html
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import write_text
from minispec.generate.palette import ACCEPTED, FRESH, REJECTED, ansi, css
from minispec.generate.run import Chunk, Run
from minispec.model import Transformer
from minispec.sampling import Sampling, probs
from minispec.tree import Step

TOP_TOKENS = 8  # how many tokens of a distribution the page shows
TEMPLATE = Path(__file__).with_name("view.html")
PLACEHOLDER = "__TRACE__"  # where the page's data goes
COLOURS_PLACEHOLDER = "__PALETTE__"

# ECMA-48 styles
ACCEPTED_STYLE, FRESH_STYLE = ansi(ACCEPTED), ansi(FRESH)
REJECTED_STYLE = ansi(REJECTED) + ";9"  # struck out


def paint(chunk: Chunk, tokenizer: Tokenizer, underline: bool = False, full: bool = False) -> str:
    """A round's text, with accepted drafts in blue and the target's own token in green. With
    `full`, rejected drafts are shown struck out, before the token that replaced them. A character
    that spans several tokens has the colour of the last."""
    out, drafted = "", len(chunk.step.path) - 1
    for i, text in enumerate(chunk.texts):
        if full and i == drafted:
            out += colored(rejected_text(chunk.step, tokenizer), REJECTED_STYLE)
        out += colored(text, (ACCEPTED_STYLE if i < drafted else FRESH_STYLE) + ";4" * underline)
    return out


def colored(text: str, style: str) -> str:
    """Colour each line separately, because pagers reset colours at the end of a line."""
    return "\n".join(f"\x1b[{style}m{part}\x1b[0m" if part else "" for part in text.split("\n"))


def rejected_text(step: Step, tokenizer: Tokenizer) -> str:
    """The drafts that are not on the path, on one line, with a | after each branch."""
    text, before = "", None
    for node in range(1, len(step.tree)):
        if node not in step.path:
            if before not in (None, step.tree.parents[node]):
                text += "|"
            text, before = text + piece(tokenizer, step.tree.tokens[node]), node
    return "".join(c if c.isprintable() else "↵" if c == "\n" else ascii(c)[1:-1] for c in text)


def piece(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a single token. A token that is not text by itself, such as part of a character,
    is shown as in the vocabulary, and an unknown id as "#7"."""
    name = tokenizer.backend.id_to_token(token) if tokenizer else None
    if name is None:
        return f"#{token}"
    # decode it doubled: decoders only strip the space before the first word of a text
    once, twice = (tokenizer.backend.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    text = twice[len(once) :]
    return text if text and "\ufffd" not in text else name


def write_page(
    file: str, model: Transformer, tokenizer: Tokenizer | None, run: Run, name: str
) -> None:
    """Write a self-contained page that steps through a run; `name` is the model's name."""
    data = json.dumps(trace(model, tokenizer, run, name), ensure_ascii=False)
    data = data.replace("<", r"\u003c")  # so that no text can close the script element
    page = TEMPLATE.read_text(encoding="utf-8").replace(COLOURS_PLACEHOLDER, css())
    write_text(Path(file), page.replace(PLACEHOLDER, data))


@torch.no_grad()
def trace(model: Transformer, tokenizer: Tokenizer | None, run: Run, name: str) -> dict:
    """The page's data as a JSON object: the run's --json, its passes, and the text of each token.

    A Step does not keep the target's distributions, so they are recomputed with one pass over each
    step's tree. The cache is filled as in the run: the prompt, then the accepted paths."""
    rows = len(run.prompt) + sum(len(step.tokens) + len(step.tree) for step in run.rounds)
    cache = model.new_cache(min(rows, model.config.context))
    model.prefill(run.prompt[:-1], cache)
    passes, emitted, used = [], 0, set(run.prompt)
    for step in run.rounds:
        before = cache.length
        logits = model.logits(model(step.tree.tokens, cache, step.tree.depth, step.tree.mask)[0])
        cache.commit(step.path)
        texts = run.texts[emitted : emitted + len(step.tokens)]
        emitted += len(texts)
        passes.append(step_data(logits, step, run.sampling) | {
            "rows": before,
            "tokens": step.tokens,
            "emitted": len(texts),  # fewer than `tokens` if the run ended inside this step
            "texts": texts,
            "window": step.window,
        })  # fmt: skip
        used.update(step.tokens, step.tree.tokens, *step.window)
        used.update(x for pairs in passes[-1]["probs"] for x, _ in pairs)
    return {
        **run.as_json(name),
        "prompt": tokenizer.decode(run.prompt) if tokenizer else "",
        "sampling": vars(run.sampling),
        # four significant digits are enough for the page
        "passes": json.loads(json.dumps(passes), parse_float=lambda x: float(f"{float(x):.4g}")),
        "pieces": {token: piece(tokenizer, token) for token in sorted(used)},
    }


def step_data(logits: Tensor, step: Step, sampling: Sampling) -> dict:
    """A step's tree and the numbers behind its path. For node i, probs[i] has the likeliest tokens
    of the target's distribution after it (at temperature 0, the one at temperature 1 is shown), and
    entropy[i] is its entropy. p[i] and q[i] are the probabilities of the node's own token under
    target and draft (q is None if one-hot). chance[i] is what the rule reported for the node, if it
    tried it, and `drawn` the probability of the fresh token (None: not known)."""
    tree = step.tree
    target = probs(logits, sampling)
    shown = target if sampling.temperature > 0 else probs(logits, Sampling(1.0))
    top = shown.topk(min(TOP_TOKENS, shown.shape[-1])).indices.tolist()
    top_pairs = []  # per node: the likeliest tokens after it, its children, the fresh token
    for i, p in enumerate(shown):
        extra = tree.tokens_at(tree.children(i)) + step.tokens[-1:] * (i == step.path[-1])
        ids = list(dict.fromkeys(top[i] + extra))
        pairs = zip(ids, p[ids].tolist())
        top_pairs.append([[x, weight] for x, weight in pairs if weight > 0 or x in extra])
    parents = [0, *tree.parents[1:]]  # the root has none, and its p is not shown
    drafts = zip(map(tree.drawn_from, range(len(tree))), tree.tokens)
    return {
        "tree": {"tokens": tree.tokens, "parents": tree.parents, "path": step.path},
        "probs": top_pairs,
        "entropy": torch.special.entr(shown).sum(-1).tolist(),
        "p": shown[parents, tree.tokens].tolist(),
        "q": [None if q is None else q[x] for q, x in drafts],
        "chance": [step.chances.get(i) for i in range(len(tree))],
        "drawn": drawn_from_the_rest(target[step.path[-1]], step),
    }


def drawn_from_the_rest(p: Tensor, step: Step) -> float | None:
    """The probability of the fresh token in what is left of p (V,) after the rejected children of
    the path's last node. None if one of them was sampled, as a run does not keep all of q."""
    rejected = [i for i in step.tree.children(step.path[-1]) if i in step.chances]
    if any(step.tree.drawn_from(i) is not None for i in rejected):
        return None
    rest = p.clone()
    rest[step.tree.tokens_at(rejected)] = 0.0
    return float(rest[step.tokens[-1]] / rest.sum())
