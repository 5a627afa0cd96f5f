"""Lesson 06: a chain of drafts from one head; for its other tasks, see pure_06.py."""

import random
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from form import Oracle, Question, Task, Wrong
from own_engine import find_draft
from torch import Tensor

from minispec.certify.toys import random_mtp_head, small_model
from minispec.methods import fastmtp
from minispec.methods.adaptive import AcceptanceRates, AdaptiveK, best_draft_size
from minispec.methods.fastmtp import MTPHead
from minispec.methods.vocabulary import FullVocabulary
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.tree import Tree
from solutions import engine
from solutions.common import call
from solutions.pure_06 import BEST_K, BEST_NODES, accumulate_values

# ---- solutions -----------------------------------------------------------------------------------


def chain(drafter, hidden, tokens, k):
    output = drafter.run(hidden, tokens)[-1:]
    drafter.cache.commit(list(range(len(tokens))))
    length = drafter.cache.length
    drafts = [int(drafter.model.logits(output).argmax())]
    while len(drafts) < k:
        output = drafter.run(output, drafts[-1:])
        drafter.cache.commit([0])
        drafts.append(int(drafter.model.logits(output).argmax()))
    drafter.cache.truncate(length)
    return drafts


def draft_chain(model, text, probs, randomness):
    drafter = find_draft(model, text)

    def propose(text, hidden, path):
        new = text[len(text) - len(path) :]
        drafts = chain(drafter, hidden[path], new, 3) if new else []
        return Tree.chain(text[-1], drafts)

    return propose


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_chain(drafter, hidden, tokens, k):
    drafter.last = drafter.run(hidden, tokens)[-1:]  # as HeadDrafter.extend, also of a draft model
    drafter.cache.commit(list(range(len(tokens))))
    vocabulary = FullVocabulary(drafter.model)
    return fastmtp.HeadDrafter.chain(drafter, k, Sampling(), Seeded(), vocabulary)[0].tolist()


def package_best_k(rates, cost, draft_cost):
    return AdaptiveK(cost, draft_cost, max_k=len(rates), acceptance=rates).best()


def package_best_nodes(probs, parents, n):
    paths = [()]
    for i, parent in enumerate(parents):  # candidates are in the place of tokens
        paths.append((*paths[parent + 1], i))
    values = dict(zip(paths[1:], accumulate_values(probs, parents)))
    return fastmtp.best_tree(-1, values, n).tokens[1:]


def package_drafts(draft, text, hidden):
    """A tree of three drafts; hidden (n, d) are the states before the last n tokens of the text."""
    if len(hidden) == 0:
        return Tree([text[-1]], [-1])
    drafts = package_chain(draft, hidden, text[-len(hidden) :], 3)
    return Tree([text[-1], *drafts], [-1, 0, 1, 2])


def package_draft_chain(model, text, probs, randomness):
    draft = find_draft(model, text)
    return lambda text, hidden, path: package_drafts(draft, text, hidden[path])


# ---- chain: cases --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A text and its rounds: K, and how many tokens of the text are known in that round."""

    seed: int
    tokens: tuple[int, ...]
    rounds: tuple[tuple[int, int], ...]


def random_text(seed: int) -> Text:
    rng = random.Random(seed)
    rounds, end = [], rng.randint(2, 5)
    for i in range(3):
        rounds.append(((seed + i) % 4 + 1, end))
        end += rng.randint(1, 3)
    return Text(seed, tuple(rng.choices(range(24), k=end)), tuple(rounds))


TOLERANCE = 1e-9  # one pass over n rows and n passes over one round differently
TEXTS = [random_text(seed) for seed in range(16)]


@cache
def target_and_head(seed: int) -> tuple[Transformer, MTPHead]:
    target = small_model(seed)
    return target, random_mtp_head(target, seed + 100)


class Drafter(fastmtp.HeadDrafter):
    """A drafter without what the reader writes. It counts the rows that the head runs on."""

    rows, calls = 0, 0

    def run(self, hidden, tokens) -> Tensor:
        shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        if not isinstance(hidden, Tensor) or hidden.dim() != 2:
            raise Wrong(f"`run` gets hidden states of shape {shape}; it takes (n, d): output[-1:] "
                        "keeps both dimensions")  # fmt: skip
        n = len(tokens) if hasattr(tokens, "__len__") else None
        if n is None or isinstance(tokens, Tensor) and tokens.dim() != 1:
            raise Wrong("`run` gets a single token; it takes a list: [draft]")
        if n != len(hidden):
            raise Wrong(f"`run` gets {len(hidden)} hidden states and {n} tokens; they are pairs")
        self.rows, self.calls = self.rows + n, self.calls + 1
        if self.calls > 50:
            raise Wrong("it keeps running the head; K drafts need K calls of `run`")
        return super().run(hidden, tokens)

    def extend(self, *_):
        raise Wrong("this is what you write: use drafter.run, drafter.cache and drafter.model")

    chain = enqueue = flush_pending = extend


@dataclass
class Drafted:
    """What a round leaves: the drafts, the head's rows in its cache, and how many rows it ran on
    that nobody needs. A run on the last draft does not count; many loops have it."""

    drafts: list[int]
    cached: Tensor  # (2, length, heads, head_dim), keys and values
    wasted: int

    @property
    def length(self) -> int:
        return self.cached.shape[1]


def cached_rows(drafter: fastmtp.HeadDrafter, length: int) -> Tensor:
    return drafter.cache.kv[:, 0, 0, :length].clone()


def run_chain(function, case: Text) -> list[Drafted]:
    target, head = target_and_head(case.seed)
    drafter, outcomes, seen = Drafter(head, target, head.new_cache(64), offset=0), [], 0
    for k, end in case.rounds:
        states = target(list(case.tokens[: end - 1]))[0]  # of all tokens but the newest
        drafter.rows = drafter.calls = 0
        drafts = call(
            partial(function, drafter), k,
            hidden=states[seen:], tokens=list(case.tokens[seen + 1 : end]),
        )  # fmt: skip
        if not isinstance(drafts, list):
            raise Wrong(f"it returns a {type(drafts).__name__}; drafts must be a list")
        if any(type(draft) is not int for draft in drafts):
            raise Wrong("a draft is a Tensor; drafts must be of type int: int(logits.argmax())")
        wasted = max(0, drafter.rows - (end - 1 - seen) - k)
        outcomes.append(Drafted(drafts, cached_rows(drafter, drafter.cache.length), wasted))
        seen = end - 1
    return outcomes


@cache
def fresh_chain(case: Text) -> list[Drafted]:
    """Without a cache: every draft takes a pass of the head over all of the text."""
    target, head = target_and_head(case.seed)
    outcomes = []
    for k, end in case.rounds:
        hidden, tokens = target(list(case.tokens[: end - 1]))[0], list(case.tokens[1:end])
        drafter = fastmtp.HeadDrafter(head, target, head.new_cache(64), offset=0)
        drafter.run(hidden, tokens)
        cached = cached_rows(drafter, end - 1)
        drafts: list[int] = []
        for _ in range(k):
            embedded = target.model.embed_tokens(torch.tensor(tokens + drafts))
            output = head(hidden[None], embedded[None])[0, -1:]
            drafts.append(int(target.logits(output).argmax()))
            hidden = torch.cat([hidden, output])
        outcomes.append(Drafted(drafts, cached, 0))
    return outcomes


def round_distance(a: Drafted, b: Drafted) -> float:
    if a.drafts != b.drafts or a.length != b.length or a.wasted != b.wasted:
        return 1.0
    return float((a.cached - b.cached).abs().max()) if a.length else 0.0


def chain_distance(a: list[Drafted], b: list[Drafted]) -> float:
    return max(map(round_distance, a, b))


def show_rounds(case: Text) -> str:
    ends = [1, *(end for _, end in case.rounds)]
    new = ", ".join(f"{b - a}" for a, b in zip(ends, ends[1:]))
    ks = ", ".join(str(k) for k, _ in case.rounds)
    return f"K = {ks} in rounds with {new} new pairs"


def show_chain(case: Text, got: list[Drafted], expected: list[Drafted]) -> str:
    """Describe the first round that is wrong."""
    pairs = enumerate(zip(got, expected))
    i = next(i for i, (a, b) in pairs if not round_distance(a, b) <= TOLERANCE)
    a, b = got[i], expected[i]
    if a.drafts != b.drafts:
        what = f"the drafts are {a.drafts} instead of {b.drafts}"
    elif a.length != b.length:
        what = f"the drafts are right, but the cache's rows are {a.length} instead of {b.length}"
    elif not float((a.cached - b.cached).abs().max()) <= TOLERANCE:
        what = "the cache has rows that a fresh pass over the text does not give"
    else:
        what = f"the head ran on {a.wasted} rows more than it needs"
    return f"{show_rounds(case)}: in round {i + 1} {what}"


def diagnose_chain(results: list[tuple[Text, list[Drafted], list[Drafted]]]) -> str | None:
    """Name what is wrong in the first wrong round of each case; later ones may follow from it."""
    pairs = [
        next(pair for pair in zip(got, expected) if not round_distance(*pair) <= TOLERANCE)
        for _, got, expected in results
        if not chain_distance(got, expected) <= TOLERANCE
    ]
    if any(len(a.drafts) != len(b.drafts) for a, b in pairs):
        return "it must return K drafts"
    if any(a.drafts != b.drafts for a, b in pairs):
        return None
    if any(a.length != b.length for a, b in pairs):
        return "the drafts are right, but the cache has more or fewer rows than the text has pairs"
    if all(float((a.cached - b.cached).abs().max()) <= TOLERANCE for a, b in pairs):
        return "all is right, but the head runs on more rows than necessary"
    return "the drafts are right, but a row of the cache is not that of its pair"


# ---- chain: mistakes -----------------------------------------------------------------------------


def faulty(wrong: str, runs_last: bool = False):
    """A chain with one mistake. With `runs_last`, the head also runs on the last draft."""

    def chain(drafter, hidden, tokens, k):
        model, kv, start = drafter.model, drafter.cache, drafter.cache.length

        def best(outputs):
            logits = model.logits(outputs)
            if wrong.startswith("softmax"):
                return int(logits.softmax(0)[-1].argmax())
            row = 0 if wrong == "the first row's argmax" else -1
            return int(logits.argmax() if wrong == "argmax over all rows" else logits[row].argmax())

        if wrong == "only the newest pair":
            hidden, tokens = hidden[-1:], tokens[-1:]
        outputs = drafter.run(hidden, tokens)
        output = outputs[:1] if wrong == "first output" else outputs[-1:]
        if wrong == "starts with the text's token":
            k -= 1
        if wrong not in ("commits nothing", "commits no pair"):
            kv.commit([0] if wrong == "commits one pair" else list(range(len(tokens))))
        every = wrong in ("argmax over all rows", "softmax over rows", "the first row's argmax")
        length, drafts = kv.length, [best(outputs if every else output)]
        while len(drafts) < k + runs_last:
            state = hidden[-1:] if wrong == "the target's hidden state" else output
            newest = tokens[-1:] if wrong == "the text's token" else drafts[-1:]
            if wrong == "the draft before":
                newest = [*tokens[-1:], *drafts][-2:-1]
            output = drafter.run(state, newest)
            if wrong not in ("commits no draft", "commits nothing"):
                kv.commit([len(drafts) - 1 if wrong == "commits row i" else 0])
            drafts.append(best(output))
        lengths = {
            "keeps the drafts' rows": kv.length, "drops all rows": start,
            "counts k rows": kv.length - k, "the number of pairs": len(tokens),
        }  # fmt: skip
        kv.truncate(lengths.get(wrong, length))
        first = tokens[-1:] if wrong == "starts with the text's token" else []
        return first + drafts[:k]

    return chain


def either(wrong: str):
    """A mistake of chains that run the head on the last draft, and of those that do not."""
    return faulty(wrong), faulty(wrong, runs_last=True)


CHAIN_MISTAKES = {
    "the drafts' rows stay in the cache. They were made from the head's own outputs; truncate the "
    "cache to the rows of the pairs": either("keeps the drafts' rows"),
    "the rows of the pairs are dropped together with those of the drafts; the next round needs "
    "them": either("drops all rows"),
    "it does not commit a draft's row, so the next draft overwrites it and does not see it": either(
        "commits no draft"
    ),
    "it commits nothing, so every call of `run` starts at the same row": either("commits nothing"),
    "it commits one row of the new pairs; all of them stay": either("commits one pair"),
    "it commits the drafts' rows but not those of the new pairs, which the first draft then "
    "overwrites: commit all n before": either("commits no pair"),
    "it takes the argmax over the logits of all rows; only the last one predicts the draft": either(
        "argmax over all rows"
    ),
    "its softmax runs over the rows, not over the tokens; the argmax of the logits needs none": (
        *either("softmax over rows"), *either("softmax over a row")
    ),
    "each draft reads the target's hidden state again; from the second draft on, the head must "
    "read its own output": either("the target's hidden state"),
    "each draft reads the last token of the text again; from the second draft on, the head must "
    "read the draft before": either("the text's token"),
    "the token is one draft too old: with the output that gave draft i goes draft i itself": either(
        "the draft before"
    ),
    "the first draft comes from the output of the first new pair; it must be the last one, "
    "output[-1:]": (*either("first output"), *either("the first row's argmax")),
    "commit counts the rows of the last call of `run` from 0, so a draft's row is [0]": either(
        "commits row i"
    ),
    "it removes K rows at the end, but K drafts have only K - 1: the last one was not run": faulty(
        "counts k rows"
    ),
    "it truncates to the number of new pairs; a length counts the rows of earlier rounds, too": (
        either("the number of pairs")
    ),
    "its first draft is the last token of the text; drafts come after it": either(
        "starts with the text's token"
    ),
    "it runs the head on the newest pair only, so the rows of the other new pairs are missing": (
        either("only the newest pair")
    ),
}  # fmt: skip

# ---- draft_chain ---------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(head, text, ends)
    for head in (False, True)
    for text, ends in (
        ((1, 2, 0, 2), (3, 4)), ((2, 0, 0, 1, 2, 1), (2, 5, 6)), ((1, 2), (1, 2)),
        ((0, 1, 2, 2, 0, 1, 1, 0, 2), (4, 5, 8, 9)),
    )
]  # fmt: skip


def right_chain(case, text: list[int], randomness) -> Tree:
    return Tree.chain(text[-1], engine.fresh_chain(case, text, 3) if len(text) > 1 else [])


DRAFT_MISTAKES = {
    "the drafter is new in every round and has forgotten the text: find it once, outside of "
    "`propose`": engine.altered(
        draft_chain, ("        new =", "        drafter = find_draft(model, text)\n        new =")
    ),
    "it drafts two tokens; K is 3": engine.altered(draft_chain, ("new, 3)", "new, 2)")),
    "the chain is a tree of siblings: each draft follows the one before it": engine.altered(
        draft_chain, ("Tree.chain(text[-1], drafts)",
                      "Tree([text[-1], *drafts], [-1] + [0] * len(drafts))"),
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "second_given_first": (0, 1), "draft_cost_full": (0, 2), "best_k_full": range(6),
    "best_k_8192": range(6), "gain_of_60": (0, 20), "best_tree": range(61),
}  # fmt: skip
TASKS = [
    Task(
        name="chain",
        package=package_chain,
        solution=chain,
        judge=Oracle(
            TEXTS, run_chain, fresh_chain, chain_distance, show_chain,
            f"{3 * len(TEXTS)} rounds give the drafts and the cache of passes over the whole text",
            tolerance=TOLERANCE, arguments=show_rounds, diagnose=diagnose_chain,
        ),
        hints=(
            "Run the head on all new pairs and commit their rows. The last output gives the first "
            "draft. That output and that draft are the next pair, a row of its own.",
            "A call of `run` sees only committed rows, so commit([0]) after each draft's row. Note "
            "the length of the cache before that, and truncate to it at the end.",
        ),
        mistakes=CHAIN_MISTAKES,
        shows=(fastmtp.HeadDrafter.extend, fastmtp.HeadDrafter.chain),
    ),
    replace(BEST_K, package=package_best_k, shows=(best_draft_size, AcceptanceRates.accept_probs)),
    replace(BEST_NODES, package=package_best_nodes, shows=(fastmtp.best_tree,)),
    Task(
        name="draft_chain",
        package=package_draft_chain,
        solution=draft_chain,
        judge=engine.drafters(
            DRAFTINGS, engine.exact_drafts(right_chain), f"{len(DRAFTINGS)} texts"
        ),
        hints=(
            "It is `draft_one` of lesson 03 with your `chain`, which commits the pairs itself.",
            "chain(drafter, hidden[path], text[-len(path):], 3) are the drafts, and nobody draws "
            "them: Tree.chain(text[-1], drafts). Without pairs there are none.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(fastmtp.HeadDrafter.propose,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "After the same text, the same head drafts 10 tokens greedily instead of 3. Can the round "
        "yield fewer tokens?",
        False,
        "the first three drafts are the same and more can only follow them; what suffers is the "
        "cost of the round.",
    ),
    Question(
        "A bug gives the head each token with the hidden state of a wrong one. How does it show?",
        "c",
        "the target judges every draft by its own hidden states, so wrong pairs only make worse "
        "drafts.",
        ("the text becomes wrong", "the shapes do not match", "fewer drafts are accepted"),
    ),
    Question(
        "Of all rounds, 60 % accept draft 1 and 30 % accept draft 2. What is the conditional rate "
        "of draft 2?",
        0.5,
        "of the rounds that accepted draft 1, 0.3 / 0.6 accept draft 2 as well.",
    ),
    Question(
        "A round with K drafts yields 2.4 tokens at a cost of 1.5. One more draft would be "
        "accepted in 30 % of all rounds and add 0.2 to the cost. Is it worth it?",
        False,
        "(2.4 + 0.3) / (1.5 + 0.2) = 1.59 is less than 2.4 / 1.5 = 1.60.",
    ),
    Question(
        "Two of three drafts are accepted. From whose hidden states are the rows made that the "
        "head's cache keeps for them?",
        "a",
        "the target's pass has computed the true hidden states, and rows made from them replace "
        "those of the drafting.",
        (
            "the target's",
            "the head's own outputs, which were good enough to be accepted",
            "the first is from the target, the second from the head",
        ),
    ),
]
