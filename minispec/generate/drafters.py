"""Find and load the draft model or heads that a method needs, and choose how much they draft. By
default they are loaded from next to the target.
"""

import contextlib
import os
from numbers import Integral
from pathlib import Path
from typing import Literal

from minispec import paths
from minispec.checkpoints.eagle3 import is_eagle3, load_eagle3
from minispec.checkpoints.heads import PUBLISHED_TREES, load_medusa, load_mtp, load_vocabulary
from minispec.checkpoints.load import load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, read_json
from minispec.fast import optimize, optimize_drafter
from minispec.fast.cost import cost_curve, draft_cost, head_costs, heads_cost
from minispec.methods.adaptive import AdaptiveK, AdaptiveNodes, AdaptiveTree, grow_tree
from minispec.methods.eagle3 import OWN_VOCABULARY
from minispec.methods.medusa import UNSHARED, MedusaHeads
from minispec.methods.vocabulary import Vocabulary
from minispec.model import Transformer
from minispec.tree import RankPath

WIDTHS = 1, 2, 4, 8  # of a level that `--tree auto` may expand
# what a method needs in addition to the model: (argument, folder it is shipped in, flags)
REQUIRED_DRAFTERS = {
    "speculative": ("draft", "draft", "--draft DIR"),
    "medusa": ("heads", "medusa", "--heads DIR"),
    "medusa-typical": ("heads", "medusa", "--heads DIR"),
    "fastmtp": ("head", "mtp", "--heads DIR; for bench, --mtp DIR"),
    "eagle3": ("head", "eagle3", "--heads DIR; for bench, --eagle3 DIR"),
}


def with_drafter(
    method: str, model: Transformer, tokenizer: Tokenizer | None, options: dict
) -> dict:
    """The method's options; a missing draft or missing heads are loaded from next to the model."""
    method = drafter_of(method, model, options.get("head"), options.get("draft"))
    argument, folder, _ = REQUIRED_DRAFTERS.get(method, (None, None, None))
    if argument is None or options.get(argument) is not None:
        return options
    key = folder, model.device, model.dtype, tokenizer is None
    if key not in model.memo:
        model.memo[key] = load_drafter(method, model, tokenizer)
    optimize_drafter(model.memo[key], model)  # in case the model was optimised in the meantime
    return model.memo[key] | {name: value for name, value in options.items() if name != argument}


def load_drafter(
    method: str, model: Transformer, tokenizer: Tokenizer | None, source: str | None = None,
    vocabulary: str | None = None, size: int | None = None,
) -> dict:  # fmt: skip
    """Load what the method needs, as its options, from `source` (default: from next to the model).

    Heads also get the `vocabulary` of a file, by default the vocabulary.json next to them, if any,
    with at most `size` tokens per language. "none" is the full vocabulary. An EAGLE-3 head has its
    own; hybrid, which drafts with fastmtp's head, takes such a head as well.
    """
    source = find_drafter(method, model) if source is None else source
    if method == "speculative":
        draft, draft_tokenizer = load(source, model.dtype, str(model.device), draft=True)
        check_vocabularies(tokenizer, draft_tokenizer, model, draft)
        return {"draft": draft}
    if method == "eagle3" or method == "fastmtp" and is_eagle3(source):
        if (vocabulary, size) != (None, None):
            raise UserError(OWN_VOCABULARY)
        return {"head": load_eagle3(source, model, tokenizer)}
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    if vocabulary is None and (folder / "vocabulary.json").exists():
        vocabulary = folder / "vocabulary.json"
    draft_vocabulary = None
    if vocabulary not in (None, "none"):
        draft_vocabulary = load_vocabulary(vocabulary, model, tokenizer, size)
    elif size is not None:
        raise UserError(f"no vocabulary to take {size} tokens from; use --vocabulary or put a file "
                        f"next to the heads, {folder / 'vocabulary.json'}")  # fmt: skip
    if method == "fastmtp":
        return {"head": load_mtp(source, model, tokenizer), "vocabulary": draft_vocabulary}
    heads = load_medusa(source, model, tokenizer)
    if draft_vocabulary and not heads.shared:
        raise UserError(UNSHARED)
    return {"heads": heads, "vocabulary": draft_vocabulary}


def drafter_of(method: str, model: Transformer, head: object = None, draft: object = None) -> str:
    """Which method's drafter a method uses: its own, except for hybrid. With a `head` hybrid uses
    fastmtp's, with a `draft` speculative's; without either, the first of the two that is found
    next to the model."""
    if method != "hybrid":
        return method
    if head is not None or draft is not None:
        return "speculative" if head is None else "fastmtp"
    for candidate in "fastmtp", "speculative":
        with contextlib.suppress(UserError):
            find_drafter(candidate, model)
            return candidate
    raise UserError("hybrid needs head= or draft= (on the command line, --heads or --draft DIR; "
                    "for bench, --mtp or --draft DIR); there is no folder mtp or draft next to "
                    "the model")  # fmt: skip


def find_drafter(method: str, model: Transformer) -> Path:
    """The folder of the draft or heads, inside the model's or next to it (as under weights/)."""
    argument, folder, flags = REQUIRED_DRAFTERS[method]
    advice = f"{method} needs {argument}= (on the command line, {flags})"
    source = getattr(model, "source", None)
    if not source:
        raise UserError(advice)
    real = source.resolve()  # "." has no parent, and a link has two
    folders = [path / folder for path in (source, source.parent, real.parent)]
    hub = f"models--{paths.SMOLLM2_ID.replace('/', '--')}"
    if hub in real.parts or real == (paths.SMOLLM2 / "target").resolve():
        folders.append(paths.SMOLLM2_HEADS / folder)
    if method == "fastmtp" and model.config.model_type == "mimo":
        folders.insert(0, source)  # its checkpoints contain their own head
    for candidate in folders:
        if os.path.lexists(candidate / "config.json"):  # a broken link is reported when it is read
            return candidate
    raise UserError(f"{advice}; there is no folder {folder} next to {source}")


def check_vocabularies(
    tokenizer: Tokenizer | None, other: Tokenizer | None, model: Transformer, draft: Transformer
) -> None:
    """Reject a draft with a different vocabulary. Padding rows and added tokens may differ: a token
    that only one of the models has costs speed, never correctness."""
    if tokenizer and other:
        same = tokenizer.matches(other)
    else:  # without both tokenizers, padding cannot be recognised
        same = draft.config.vocab_size == model.config.vocab_size
    if not same:
        raise UserError("the draft's vocabulary differs; use a draft with the target's tokenizer")


def with_policies(method: str, model: Transformer, options: dict) -> dict:
    """The options, with each "auto" replaced by a policy for this machine, and a number of nodes
    for Medusa heads by the tree that they grow."""
    if method == "hybrid" and options.get("k") == "auto":
        options = {"lookup_k": "auto"} | options
    policies, heads = {}, options.get("heads")
    if options.get("k") == "auto":
        policies["k"] = k_policy(model, options)
    if options.get("lookup_k") == "auto":
        policies["lookup_k"] = k_policy(model, {})
    if options.get("tree") == "auto" and options.get("head") is not None:
        head = options["head"]
        costs = head_costs(model, head, options.get("vocabulary"), WIDTHS)
        policies["tree"] = AdaptiveNodes(cost_curve(model), costs, head.acceptance)
    elif options.get("tree") == "auto" and heads is None:
        raise UserError(f"{method}: a tree needs a head; pass head= (on the command line, --heads)")
    elif options.get("tree") == "auto":
        cost = heads_cost(model, heads, options.get("vocabulary"))
        policies["tree"] = AdaptiveTree(cost_curve(model), cost, heads.accuracy)
    elif heads is not None and isinstance(options.get("tree"), Integral):
        policies["tree"] = tree_of(heads, int(options["tree"]), model.config.context)
    return options | policies


def tree_of(heads: MedusaHeads, nodes: int, max_nodes: int) -> list[RankPath]:
    """The best tree of that many nodes, at most `max_nodes`, since more would never fit."""
    if nodes < 0:
        raise UserError(f"tree {nodes}: must be at least 0 nodes")
    if heads.accuracy is None:
        raise UserError(
            f"tree {nodes}: these heads have no measured accuracies to grow a tree from; measure "
            "them with `minispec distill tree`, or use auto, which needs none"
        )
    return grow_tree(heads.accuracy, min(nodes, max_nodes))


def k_policy(model: Transformer, options: dict) -> AdaptiveK:
    """The policy for K: what drafts is a head, a draft model, or the text, which costs nothing."""
    head, draft, curve = options.get("head"), options.get("draft"), cost_curve(model)
    if head is not None:
        cost = head_costs(model, head, options.get("vocabulary"))[1]
        return AdaptiveK(curve, cost, max_k=8, acceptance=head.acceptance)
    return AdaptiveK(curve, 0.0 if draft is None else draft_cost(model, draft))


def tree_costs(
    model: Transformer, heads: MedusaHeads, vocabulary: Vocabulary | None
) -> list[float]:
    """The cost of a round with a tree of 0, 1, … nodes on this machine, in passes over one token.
    Optimises both first, as for decoding."""
    optimize(model)
    optimize_drafter({"heads": heads, "vocabulary": vocabulary}, model)
    drafting = heads_cost(model, heads, vocabulary)
    return [cost + drafting for cost in cost_curve(model)[1:]]


def read_tree_option(value: str, options: dict) -> list[RankPath] | int | Literal["auto"]:
    """The value of --tree: "auto", a number of nodes or, with Medusa heads, a list of paths."""
    heads = options.get("heads")
    if value == "auto":
        return value
    if value.isdecimal() and len(value) < (4 if heads is None else 20) and (heads or int(value)):
        return int(value)
    if heads is None:
        raise UserError(f"--tree {value}: must be auto or a number of nodes from 1 to 999")
    if value not in PUBLISHED_TREES and not Path(value).exists():
        raise UserError(
            f"--tree {value}: must be auto, a number of nodes, one of "
            f"{', '.join(PUBLISHED_TREES)}, or a JSON file of paths such as [[0], [0, 0], [1]]"
        )
    return PUBLISHED_TREES.get(value) or read_json(Path(value), list)
