"""What drafts for a target: the draft model or the heads that a method needs, from where the user
says or from beside the target, and how much they draft.
"""

from pathlib import Path
from typing import Literal

from minispec.checkpoints import places
from minispec.checkpoints.heads import PUBLISHED, load_medusa, load_mtp, load_vocabulary
from minispec.checkpoints.load import load
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cost import cost_curve, draft_cost, head_cost, heads_cost
from minispec.errors import UserError, read_json
from minispec.fast import optimize
from minispec.methods.adaptive import AdaptiveK, AdaptiveTree, grow_tree
from minispec.methods.medusa import UNSHARED, MedusaHeads
from minispec.methods.vocabulary import Vocabulary
from minispec.model import Transformer
from minispec.tree import RankPath

# what a method needs beside its model: the argument, and the folder it is shipped in
NEEDS = {
    "speculative": ("draft", "draft"),
    "medusa": ("heads", "medusa"),
    "medusa-typical": ("heads", "medusa"),
    "fastmtp": ("head", "mtp"),
}


def with_drafter(
    method: str, model: Transformer, tokenizer: Tokenizer | None, options: dict
) -> dict:
    """The method's options; where they lack a draft or heads, those that lie beside the model."""
    argument, folder = NEEDS.get(method, (None, None))
    if argument is None or options.get(argument) is not None:
        return options
    key = folder, model.device, model.dtype, tokenizer is None
    if key not in model.memo:
        model.memo[key] = load_drafter(method, model, tokenizer)
    return model.memo[key] | {name: value for name, value in options.items() if name != argument}


def load_drafter(
    method: str, model: Transformer, tokenizer: Tokenizer | None, source: str | None = None,
    vocabulary: str | None = None, size: int | None = None,
) -> dict:  # fmt: skip
    """What the method needs, as its options: from `source`, by default from beside the model.

    With heads comes the `vocabulary` of a file ("none": the full one), by default the one beside
    the heads, if there is one; of each language at most `size` tokens.
    """
    source = found_beside(method, model) if source is None else source
    if method == "speculative":
        draft, its_tokenizer = load(source, model.dtype, str(model.device))
        check_vocabularies(tokenizer, its_tokenizer, model, draft)
        return {"draft": draft}
    beside = Path(source).parent if Path(source).is_file() else Path(source)
    if vocabulary is None and (beside / "vocabulary.json").exists():
        vocabulary = beside / "vocabulary.json"
    words = None
    if vocabulary not in (None, "none"):
        words = load_vocabulary(vocabulary, model, tokenizer, size)
    elif size is not None:
        raise UserError(f"no vocabulary of which to take {size} tokens: give one, or put it beside "
                        f"the heads, as {beside / 'vocabulary.json'}")  # fmt: skip
    if method == "fastmtp":
        return {"head": load_mtp(source, model, tokenizer), "vocabulary": words}
    heads = load_medusa(source, model, tokenizer)
    if words and not heads.shared:
        raise UserError(UNSHARED)
    return {"heads": heads, "vocabulary": words}


def found_beside(method: str, model: Transformer) -> Path:
    """The folder of the draft or heads beside the model's (as under weights/), or in its own."""
    argument, folder = NEEDS[method]
    source, flag = getattr(model, "source", None), "draft" if argument == "draft" else "heads"
    folders = [source / folder, source.parent / folder] if source else []
    if source and is_smollm2(source):
        folders.append(places.REAL_HEADS / folder)
    if source and method == "fastmtp" and model.config.model_type == "mimo":
        folders.insert(0, source)  # its checkpoints contain their own head
    for each in folders:
        if (each / "config.json").exists():
            return each
    where = f", and there is no folder {folder} beside {source}" if source else ""
    raise UserError(f"{method} needs {argument}=, on the command line --{flag} DIR{where}")


def is_smollm2(source: Path) -> bool:
    """Whether a model was loaded from the Hugging Face cache of SmolLM2, or from our download."""
    hub = f"models--{places.REAL_ID.replace('/', '--')}"
    return hub in source.parts or source == places.REAL / "target"


def check_vocabularies(
    tokenizer: Tokenizer | None, other: Tokenizer | None, model: Transformer, draft: Transformer
) -> None:
    """Refuse a draft that has other words. Added tokens may differ: one that a draft lacks, or
    drafts in vain, costs speed, never correctness. Nor do padding rows count."""
    if tokenizer and other:
        same = tokenizer.words(other) == other.words(tokenizer)
    else:  # without both tokenizers there is no way to tell what is padding
        same = draft.config.vocab_size == model.config.vocab_size
    if not same:
        raise UserError("the draft's vocabulary differs: use one with the target's tokenizer")


def with_policies(method: str, model: Transformer, options: dict) -> dict:
    """The options, with policies for this machine in the place of "auto"."""
    policies, vocabulary = {}, options.get("vocabulary")
    if options.get("k") == "auto":
        if method == "speculative":
            policies["k"] = AdaptiveK(cost_curve(model), draft_cost(model, options["draft"]))
        else:
            cost = head_cost(model, options["head"], vocabulary)
            policies["k"] = AdaptiveK(cost_curve(model), cost, most=8)
    if options.get("tree") == "auto":
        cost = heads_cost(model, options["heads"], vocabulary)
        policies["tree"] = AdaptiveTree(cost_curve(model), cost)
    return options | policies


def tree_costs(
    model: Transformer, heads: MedusaHeads, vocabulary: Vocabulary | None
) -> list[float]:
    """The cost of a round with a tree of 0, 1, … nodes on this machine, in passes over one token.
    The model is optimized first, as it is for decoding."""
    optimize(model)
    drafting = heads_cost(model, heads, vocabulary)
    return [cost + drafting for cost in cost_curve(model)[1:]]


def read_tree_option(value: str, heads: MedusaHeads, most: int) -> list[RankPath] | Literal["auto"]:
    """What --tree means: a list of paths, or "auto". A number grows a tree of so many nodes, `most`
    at most: more never fit."""
    if value == "auto":
        return value
    if value.isdecimal() and len(value) < 20:
        if heads.accuracy is None:
            raise UserError(
                f"--tree {value}: these heads came without accuracies to grow a tree by: measure "
                "them with minispec.distill tree, or take --tree auto, which needs none"
            )
        return grow_tree(heads.accuracy, min(int(value), most))
    if value not in PUBLISHED and not Path(value).exists():
        raise UserError(
            f"--tree {value}: neither auto, nor a number of nodes, nor one of "
            f"{', '.join(PUBLISHED)}, nor a JSON file of paths like [[0], [0, 0], [1]]"
        )
    return PUBLISHED.get(value) or read_json(Path(value), list)
