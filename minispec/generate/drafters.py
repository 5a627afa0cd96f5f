"""Find and load the draft model or heads that a method needs, and choose how much they draft. By
default they are loaded from next to the target.
"""

import copy
import os
from collections.abc import Callable
from inspect import Parameter
from numbers import Integral
from pathlib import Path

from minispec import paths
from minispec.checkpoints.eagle3 import is_eagle3, load_eagle3
from minispec.checkpoints.heads import PUBLISHED_TREES, load_medusa, load_mtp, load_vocabulary
from minispec.checkpoints.load import load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, read_json
from minispec.fast import optimize, optimize_drafter
from minispec.fast.cost import cost_curve, draft_cost, head_costs, heads_cost
from minispec.methods import find_method
from minispec.methods.adaptive import AdaptiveK, AdaptiveNodes, AdaptiveTree, Policy, grow_tree
from minispec.methods.declaration import Method
from minispec.methods.eagle3 import OWN_VOCABULARY
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import Vocabulary
from minispec.model import Transformer
from minispec.tree import RankPath

WIDTHS = 1, 2, 4, 8  # of a level that `--tree auto` may expand
# the flags that name what lies in each folder: of generate, and of bench
FLAGS = {"draft": ("--draft", "--draft"), "medusa": ("--heads", "--heads"),
         "mtp": ("--heads", "--mtp"), "eagle3": ("--heads", "--eagle3")}  # fmt: skip


def with_drafter(
    method: str | Callable | Method, model: Transformer, tokenizer: Tokenizer | None, options: dict
) -> dict:
    """Return the method's options. Load a missing draft or heads from next to the model."""
    for argument, folder in missing_drafters(find_method(method), model, options).items():
        key = folder, model.device, model.dtype, tokenizer is None
        if key not in model.memo:
            model.memo[key] = load_drafter(folder, model, tokenizer)
        optimize_drafter(model.memo[key], model)  # in case the model was optimised in the meantime
        options = model.memo[key] | {name: x for name, x in options.items() if name != argument}
    return options


def missing_drafters(method: Method, model: Transformer, options: dict) -> dict[str, str]:
    """The arguments that a method needs and the options lack, and the folder of each: those without
    a default or, if all have one and none is given, the first that lies next to the model. Raises
    UserError if one of them does not."""
    folders = {name: option.folder for name, option in method.of_kind("weights").items()}
    required = {n: f for n, f in folders.items() if method.options[n][1] is Parameter.empty}
    if not required and not any(options.get(name) is not None for name in folders):
        required = {n: f for n, f in folders.items() if find_drafter(f, model)} or folders
        required = dict([*required.items()][:1])
    missing = {n: f for n, f in required.items() if options.get(n) is None}
    if all(find_drafter(folder, model) for folder in missing.values()):
        return missing
    wanted = [" or ".join(parts) for parts in (
        [f"{name}=" for name in folders], *([FLAGS[f][i] for f in folders.values()] for i in (0, 1))
    )]  # fmt: skip
    places = f"; there is no folder {' or '.join(folders.values())} next to {model.source}"
    raise UserError(
        f"{method.name} needs {wanted[0]} (on the command line, {wanted[1]} DIR; for bench, "
        f"{wanted[2]} DIR){places if getattr(model, 'source', None) else ''}"
    )


def load_drafter(
    folder: str, model: Transformer, tokenizer: Tokenizer | None,
    source: str | os.PathLike | None = None, vocabulary: str | None = None, size: int | None = None,
) -> dict:  # fmt: skip
    """Load a draft model or heads, as the options of a method. `folder` is draft, medusa, mtp,
    eagle3, or the name of a method; `source` is by default that folder next to the model.

    Heads also get the `vocabulary` of a file, by default the vocabulary.json next to them, if any,
    with at most `size` tokens per language. "none" is the full vocabulary. An EAGLE-3 head has its
    own; it may also take the place of a FastMTP head.
    """
    if folder not in FLAGS:
        folder = next(option.folder for option in find_method(folder).of_kind("weights").values())
    source = find_drafter(folder, model) if source is None else source
    if source is None:
        raise UserError(f"there is no folder {folder} next to {model.source or 'the model'}")
    if folder == "draft":
        draft, draft_tokenizer = load(source, model.dtype, str(model.device), draft=True)
        check_vocabularies(tokenizer, draft_tokenizer, model, draft)
        return {"draft": draft}
    if folder == "eagle3" or folder == "mtp" and is_eagle3(source):
        if (vocabulary, size) != (None, None):
            raise UserError(OWN_VOCABULARY)
        return {"head": load_eagle3(source, model, tokenizer)}
    place = Path(source).parent if Path(source).is_file() else Path(source)
    if vocabulary is None and (place / "vocabulary.json").exists():
        vocabulary = place / "vocabulary.json"
    draft_vocabulary = None
    if vocabulary not in (None, "none"):
        draft_vocabulary = load_vocabulary(vocabulary, model, tokenizer, size)
    elif size is not None:
        raise UserError(f"no vocabulary to take {size} tokens from; use --vocabulary or put a file "
                        f"next to the heads, {place / 'vocabulary.json'}")  # fmt: skip
    name, load_heads = ("head", load_mtp) if folder == "mtp" else ("heads", load_medusa)
    heads = load_heads(source, model, tokenizer)
    heads.vocabulary(model, draft_vocabulary)  # raises UserError if it does not fit them
    return {name: heads, "vocabulary": draft_vocabulary}


def find_drafter(folder: str, model: Transformer) -> Path | None:
    """The folder of the draft or heads, inside the model's or next to it (as under weights/)."""
    source = getattr(model, "source", None)
    if not source:
        return None
    real = source.resolve()  # "." has no parent, and a link has two
    folders = [path / folder for path in (source, source.parent, real.parent)]
    hub = f"models--{paths.SMOLLM2_ID.replace('/', '--')}"
    if hub in real.parts or real == (paths.SMOLLM2 / "target").resolve():
        folders.append(paths.SMOLLM2_HEADS / folder)
    if folder == "mtp" and model.config.model_type == "mimo":
        folders.insert(0, source)  # its checkpoints contain their own head
    # a broken link is reported when it is read
    return next((path for path in folders if os.path.lexists(path / "config.json")), None)


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


def with_policies(
    method: str | Callable | Method, model: Transformer, options: dict
) -> dict:
    """The options, with each "auto" replaced by a policy for this machine, and a number of nodes
    for Medusa heads by the tree that they grow."""
    method, policies = find_method(method), {}
    for name, (option, _) in method.options.items():
        chosen = options.get(name)
        if chosen is None and option.auto == "copies" and options.get("k") == "auto":
            chosen = "auto"
        if isinstance(chosen, str) and chosen == "auto":
            policies[name] = policy_of(option.auto, method, model, options)
        elif option.kind == "paths" and isinstance(chosen, Integral):
            policies[name] = tree_of(options["heads"], int(chosen), model.config.context)
    return options | policies


def policy_of(what: str, method: Method, model: Transformer, options: dict) -> Policy:
    """The policy that "auto" stands for, by `what` it chooses: drafts, copies, nodes or paths."""
    head, draft, heads = map(options.get, ("head", "draft", "heads"))
    if what == "nodes" and head is None:
        raise UserError(f"{method.name}: a tree needs a head; pass head= (on the command line, "
                        "--heads)")  # fmt: skip
    curve, vocabulary = cost_curve(model), options.get("vocabulary")
    if what == "nodes":
        costs = head_costs(model, head, vocabulary, WIDTHS)
        return AdaptiveNodes(curve, costs, head.acceptance)
    if what == "paths":
        return AdaptiveTree(curve, heads_cost(model, heads, vocabulary), heads.accuracy)
    if what == "drafts" and head is not None:
        return AdaptiveK(curve, head_costs(model, head, vocabulary)[1], 8, head.acceptance)
    from_text = what == "copies" or draft is None  # which costs nothing
    return AdaptiveK(curve, 0.0 if from_text else draft_cost(model, draft))


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


def tree_costs(
    model: Transformer, heads: MedusaHeads, vocabulary: Vocabulary | None
) -> list[float]:
    """The cost of a round with a tree of 0, 1, … nodes on this machine, in passes over one token.
    Optimises the model and a copy of the heads first, as for decoding."""
    heads = copy.deepcopy(heads)
    optimize(model)
    optimize_drafter({"heads": heads, "vocabulary": vocabulary}, model)
    drafting = heads_cost(model, heads, vocabulary)
    return [cost + drafting for cost in cost_curve(model)[1:]]


def read_paths(value: str) -> list[RankPath] | int | str:
    """The value of --tree for Medusa heads: "auto", a number of nodes, or a list of paths."""
    if value == "auto" or value.isdecimal() and len(value) < 20:
        return value if value == "auto" else int(value)
    if value not in PUBLISHED_TREES and not Path(value).exists():
        raise UserError(
            f"--tree {value}: must be auto, a number of nodes, one of "
            f"{', '.join(PUBLISHED_TREES)}, or a JSON file of paths such as [[0], [0, 0], [1]]"
        )
    return PUBLISHED_TREES.get(value) or read_json(Path(value), list)
