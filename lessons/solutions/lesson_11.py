"""Lesson 11: EAGLE-3's fused features, the steps of training-time test, and a chain of drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import torch
from form import Oracle, Question, Task, Wrong
from own_engine import find_eagle3, watch
from probe import runner
from torch import Tensor

from minispec.certify.toys import random_eagle3_head, small_model
from minispec.distill import MTPLoss
from minispec.generate.drafters import with_drafter
from minispec.methods.eagle3 import Eagle3Head
from minispec.methods.fastmtp import HeadDrafter
from minispec.model import Backbone, Transformer
from minispec.tree import Tree
from solutions import engine
from solutions.lesson_06 import package_chain as chain
from solutions.lesson_06 import package_drafts

# ---- solutions -----------------------------------------------------------------------------------


def fuse(x, layers, chosen, fc):
    entering = []
    for i, layer in enumerate(layers):
        if i in chosen:
            entering.append(x)
        x = layer(x)
    return x, fc(torch.cat(entering, -1))


def unroll(run, fused, tokens, steps):
    n, hidden, outputs = fused.shape[1], fused, []
    row = torch.arange(n)
    text, own = row[:, None] >= row, row[:, None] == row
    for k in range(steps):
        mask = torch.cat([text] + [own] * k, 1)
        hidden = run(hidden, tokens[:, k + 1 : k + 1 + n], row + k, mask)
        outputs.append(hidden)
    return outputs


def draft_three(model, text, probs, randomness):
    drafter = find_eagle3(model)
    states = watch(model, drafter.layers)

    def propose(text, hidden, path):
        three = torch.cat([states[i] for i in drafter.layers], -1)
        new = text[len(text) - len(path) :]
        return Tree.chain(text[-1], chain(drafter, drafter.fc(three[path]), new, 3) if new else [])

    return propose


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_fuse(x, layers, chosen, fc):
    body = SimpleNamespace(
        embed_tokens=lambda x: x, norm=lambda x: x,
        layers=[lambda x, _, layer=layer: layer(x) for layer in layers],
    )  # fmt: skip
    states = Backbone.forward(body, x, None, chosen)
    head = SimpleNamespace(target_size=x.shape[-1], fc=fc)
    return states[..., : x.shape[-1]], Eagle3Head.project_features(head, states)


def package_unroll(run, fused, tokens, steps):
    def run_block(hidden, embedded, ctx):
        position, mask = ctx.cos, ctx.attn_mask[0, 0]
        return run(hidden, embedded, position, mask)

    head = SimpleNamespace(
        embed=lambda tokens, target: tokens, project_features=lambda hidden: hidden,
        run_block=run_block, rope=lambda at, dtype: (at[0], None),
    )  # fmt: skip
    target = SimpleNamespace(device=fused.device, dtype=fused.dtype)
    loss = SimpleNamespace(head=head, target=target, weights=[0] * steps, aligned=True)
    loss.plan = lambda n, k, keys: MTPLoss.plan(loss, n, k, keys)
    return MTPLoss.outputs(loss, fused, tokens)


def package_draft_three(model, text, probs, randomness):
    draft = find_eagle3(model)
    states = watch(model, draft.layers)

    def propose(text, hidden, path):
        features = draft.fc(torch.cat([*map(states.get, draft.layers)], -1))
        return package_drafts(draft, text, features[path])

    return propose


# ---- fuse: cases ---------------------------------------------------------------------------------

D = 4
TOLERANCE = 1e-9  # the same sums in another order


@dataclass(frozen=True)
class Stack:
    """A target of random layers, some tokens, and the layers whose inputs are asked for."""

    seed: int
    layers: int
    chosen: tuple[int, ...]
    tokens: int

    def weight(self, i: int, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + i)
        return torch.randn(rows, columns, dtype=torch.float64, generator=generator) / rows**0.5

    @property
    def x(self) -> Tensor:
        return self.weight(99, self.tokens, D) * self.tokens**0.5

    def layer(self, i: int, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight(i, D, D))

    def fc(self, x: Tensor) -> Tensor:
        return x @ self.weight(98, len(self.chosen) * D, D)


def random_stack(seed: int) -> Stack:
    rng = random.Random(seed)
    layers = rng.randint(4, 9)
    chosen = sorted(rng.sample(range(layers), 3))
    while chosen[-1] == layers - 1 or chosen == [*range(layers - 3, layers)]:
        chosen = sorted(rng.sample(range(layers), 3))
    return Stack(seed, layers, tuple(chosen), rng.randint(1, 5))


STACKS = [Stack(0, 7, (2, 3, 4), 1), Stack(1, 8, (0, 4, 5), 2), *map(random_stack, range(2, 24))]


@dataclass
class Fused:
    """What `fuse` returns, and how many times it ran a layer."""

    last: Tensor
    fused: Tensor
    calls: int


class CountedLayers(list):
    """The layers of a Stack, as functions of a hidden state, which count their calls."""

    def __init__(self, case: Stack):
        super().__init__(self.counted(case, i) for i in range(case.layers))
        self.calls = 0

    def counted(self, case: Stack, i: int) -> Callable:
        def layer(x):
            self.calls += 1
            if not isinstance(x, Tensor) or x.shape != (case.tokens, D):
                raise Wrong(f"a layer gets {shape_of(x)}; it takes hidden states (n, d)")
            if self.calls > 100:
                raise Wrong("it keeps running layers; each needs to run once")
            return case.layer(i, x)

        return layer


def shape_of(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def run_fuse(function: Callable, case: Stack) -> Fused:
    layers, wide = CountedLayers(case), len(case.chosen) * D

    def fc(x):
        if not isinstance(x, Tensor) or x.shape != (case.tokens, wide):
            raise Wrong(f"`fc` gets {shape_of(x)} where d is {D}; it takes the chosen states side "
                        f"by side, (n, {len(case.chosen)} d): torch.cat(…, -1)")  # fmt: skip
        return case.fc(x)

    x = case.x
    found = function(x, layers, case.chosen, fc)
    if not torch.equal(x, case.x):
        raise Wrong("it changes `x` in place, which belongs to the caller: write x = layer(x)")
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong("it must return two tensors: the last state, and what `fc` returns")
    for state, name in zip(found, ("the first", "the second")):
        if not isinstance(state, Tensor) or state.shape != (case.tokens, D):
            raise Wrong(f"{name} of what it returns is {shape_of(state)}; both are (n, d)")
    return Fused(*found, layers.calls)


def fused_afresh(case: Stack) -> Fused:
    """Every state is computed again, from the first layer on."""

    def entering(n: int) -> Tensor:
        x = case.x
        for i in range(n):
            x = case.layer(i, x)
        return x

    fused = sum(  # fc's columns for one of the states
        entering(i) @ case.weight(98, len(case.chosen) * D, D)[j * D : (j + 1) * D]
        for j, i in enumerate(case.chosen)
    )
    return Fused(entering(case.layers), fused, case.layers)


def fused_distance(a: Fused, b: Fused) -> float:
    if a.calls != b.calls:
        return 1.0
    return max(float((x - y).abs().max()) for x, y in ((a.last, b.last), (a.fused, b.fused)))


def show_stack(case: Stack) -> str:
    return f"{case.layers} layers, chosen = {case.chosen}"


def show_fused(case: Stack, got: Fused, expected: Fused) -> str:
    if got.calls != expected.calls:
        return f"{show_stack(case)}: it runs layers {got.calls} times instead of {expected.calls}"
    last, fused = (float((a - b).abs().max()) for a, b in (
        (got.last, expected.last), (got.fused, expected.fused)))  # fmt: skip
    return f"{show_stack(case)}: the last state is off by {last:.1e}, the fused one by {fused:.1e}"


def diagnose_fuse(results: list[tuple[Stack, Fused, Fused]]) -> str | None:
    pairs = [
        (got, right) for _, got, right in results if not fused_distance(got, right) <= TOLERANCE
    ]
    if all(fused_distance(replace(a, calls=b.calls), b) <= TOLERANCE for a, b in pairs):
        return "all is right, but it runs layers more than once; one pass has all states"
    if all(float((a.last - b.last).abs().max()) <= TOLERANCE for a, b in pairs):
        return "the last state is right, but the fused one is not"
    return None


# ---- fuse: mistakes ------------------------------------------------------------------------------


def faulty_fuse(wrong: str) -> Callable:
    """`fuse` with one mistake."""

    def fuse(x, layers, chosen, fc):
        states = [x]
        for layer in layers:
            states.append(layer(x) + (x if wrong == "adds x" else 0))
            x = states[-1]
        picked = {
            "leaving": [states[i + 1] for i in chosen], "from 1": [states[i - 1] for i in chosen],
            "the top": states[-len(chosen) - 1 : -1], "reversed": [states[i] for i in chosen[::-1]],
            "one": [states[chosen[-1]]] * len(chosen), "last": [x] * len(chosen),
        }.get(wrong, [states[i] for i in chosen])  # fmt: skip
        joined = torch.cat(picked, -1)
        if wrong == "interleaved":
            joined = torch.stack(picked, -1).flatten(-2)
        last = states[-2] if wrong == "too early" else x
        return (fc(joined), last) if wrong == "swapped" else (last, fc(joined))

    return fuse


def stops_early(x, layers, chosen, fc):
    """It does not run the layers after the last chosen one."""
    entering = []
    for i, layer in enumerate(layers[: chosen[-1] + 1]):
        if i in chosen:
            entering.append(x)
        x = layer(x)
    return x, fc(torch.cat(entering, -1))


def always_the_first(x, layers, chosen, fc):
    """It forgets that each layer reads what the one before has returned."""
    states = [x, *(layer(x) for layer in layers)]
    return states[-1], fc(torch.cat([states[i] for i in chosen], -1))


FUSE_MISTAKES = {
    "it takes what leaves the chosen layers; what enters them is wanted, so keep x before the "
    "layer runs": faulty_fuse("leaving"),
    "layers are counted from 0, so what enters layer 0 is x itself": faulty_fuse("from 1"),
    "the chosen states are in the wrong order: the lowest comes first": faulty_fuse("reversed"),
    "it takes the last layers, not the chosen ones": faulty_fuse("the top"),
    "it takes the same state for all of the chosen layers; each has its own": (
        faulty_fuse("one"), faulty_fuse("last")
    ),
    "the numbers of the states alternate; the whole of the first comes first: torch.cat, not "
    "torch.stack": faulty_fuse("interleaved"),
    "it adds x to what a layer returns, but the layer has added it already": faulty_fuse("adds x"),
    "the first that it returns is what enters the last layer; it must be what leaves it": (
        faulty_fuse("too early")
    ),
    "it returns the two in the wrong order: the last state comes first": faulty_fuse("swapped"),
    "it stops after the last chosen layer; the target needs the state after all layers to score": (
        stops_early
    ),
    "every layer reads the first x; a layer reads what the one before has returned": (
        always_the_first
    ),
}  # fmt: skip

# ---- unroll: cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Documents of n + K + 1 tokens or a few more, with n rows each, and K steps."""

    seed: int
    documents: int
    rows: int
    steps: int
    tokens: int


def random_texts(seed: int) -> Texts:
    rng = random.Random(seed)
    rows, steps = rng.randint(2, 5), rng.randint(1, 4)
    return Texts(seed, rng.randint(1, 2), rows, steps, rows + steps + rng.randint(1, 3))


TEXTS = [Texts(0, 1, 2, 1, 4), Texts(1, 1, 3, 2, 6), *map(random_texts, range(2, 14))]


@cache
def models(seed: int) -> tuple[Transformer, Eagle3Head]:
    target = small_model(seed, layers=7)
    return target, random_eagle3_head(target, seed + 50)


@cache
def inputs(case: Texts) -> tuple[Tensor, Tensor]:
    """The fused features (B, n, d) and the tokens (B, T)."""
    target, head = models(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(24, (case.documents, case.tokens), generator=generator)
    states = target(tokens[:, : case.rows], feature_layers=head.feature_layers)
    return head.project_features(states), tokens


class Watched:
    """The `run` of an answer: a head that says what it cannot use."""

    def __init__(self, case: Texts):
        target, head = models(case.seed)
        self.case, self.plain, self.calls = case, runner(head, target), 0

    def __call__(self, hidden, tokens, position, mask):
        B, n, k = self.case.documents, self.case.rows, self.calls + 1
        self.calls = k
        if k > self.case.steps:
            raise Wrong(f"it runs more than K = {self.case.steps} steps")
        if not isinstance(hidden, Tensor) or hidden.shape != (B, n, 16):
            raise Wrong(f"`run` gets hidden states of {shape_of(hidden)}; they are (B, n, d)")
        if not hidden.requires_grad:
            raise Wrong("no gradient flows into the step before: do not detach what `run` returns")
        if not isinstance(tokens, Tensor) or tokens.shape != (B, n):
            raise Wrong(f"`run` gets tokens of {shape_of(tokens)} in step {k}; it takes one for "
                        f"each row, (B, n), here ({B}, {n})")  # fmt: skip
        if not isinstance(position, Tensor) or position.shape != (n,):
            raise Wrong(f"`run` gets positions of {shape_of(position)}; they are (n,)")
        if not isinstance(mask, Tensor) or mask.shape != (n, k * n):
            raise Wrong(f"in step {k} the mask has {shape_of(mask)}; it has a column for each row "
                        f"of the steps so far, (n, k n), here ({n}, {k * n})")  # fmt: skip
        if mask.dtype != torch.bool:
            raise Wrong(f"the mask is of {mask.dtype}; True and False say what a row sees")
        if not mask.any(1).all():
            raise Wrong(f"in step {k} a row sees nothing; each sees at least itself")
        return self.plain(hidden, tokens, position, mask)


def run_unroll(function: Callable, case: Texts) -> list[Tensor]:
    fused, tokens = inputs(case)
    before = tokens.clone()
    with torch.enable_grad():
        outputs = function(Watched(case), fused.clone().requires_grad_(), before, case.steps)
    if not torch.equal(tokens, before):
        raise Wrong("it changes `tokens`, which belong to the caller")
    if not isinstance(outputs, list | tuple) or len(outputs) != case.steps:
        raise Wrong(f"it must return a list of K = {case.steps} outputs, one for each step")
    if not all(isinstance(x, Tensor) and x.shape == fused.shape for x in outputs):
        raise Wrong("each of what it returns must be what `run` has returned, (B, n, d)")
    return [x.detach() for x in outputs]


@cache
def drafted(case: Texts) -> list[Tensor]:
    """What drafting does, one row at a time: the head has read the text up to row i, and then runs
    on its own output, with the text's next tokens for drafts."""
    (target, head), (fused, tokens) = models(case.seed), inputs(case)
    outputs = [torch.empty_like(fused) for _ in range(case.steps)]
    for b in range(case.documents):
        for i in range(case.rows):
            drafter = HeadDrafter(head, target, head.new_cache(64), offset=0)
            output = drafter.run(fused[b, : i + 1], tokens[b, 1 : i + 2])[-1:]
            drafter.cache.commit(list(range(i + 1)))
            for k in range(case.steps):
                outputs[k][b, i] = output[0]
                output = drafter.run(output, tokens[b, i + k + 2 : i + k + 3])
                drafter.cache.commit([0])
    return outputs


def off(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
    """How far each step's outputs are from the right ones."""
    return [float((x - y).abs().max()) for x, y in zip(a, b)]


def show_texts(case: Texts) -> str:
    return f"{case.documents} documents of {case.rows} rows, K = {case.steps}"


def show_unroll(case: Texts, got: list[Tensor], expected: list[Tensor]) -> str:
    by_step = off(got, expected)
    k = next(k for k, distance in enumerate(by_step) if not distance <= TOLERANCE)
    return f"{show_texts(case)}: step {k + 1} is the first that is wrong, by {by_step[k]:.1e}"


def diagnose_unroll(results: list[tuple[Texts, list[Tensor], list[Tensor]]]) -> str | None:
    by_step = [off(got, expected) for _, got, expected in results]
    if any(not steps[0] <= TOLERANCE for steps in by_step):
        return "step 1 is wrong: row i reads token i + 1 at position i and sees rows 0 to i"
    return "step 1 is right, but a later step is not what drafting does"


# ---- unroll: mistakes ----------------------------------------------------------------------------


def faulty_unroll(
    reads: Callable = lambda fused, output: output,
    token: Callable = lambda k: k + 1,
    position: Callable = lambda row, k: row + k,
    mask: Callable = lambda text, own, k: [text] + [own] * k,
) -> Callable:
    """`unroll` with another hidden state, first token, position or mask in step k (from 0)."""

    def unroll(run, fused, tokens, steps):
        n, output, outputs = fused.shape[1], fused, []
        row = torch.arange(n)
        text, own = row[:, None] >= row, row[:, None] == row
        for k in range(steps):
            seen = torch.cat(mask(text, own, k), 1)
            read = tokens[:, token(k) : token(k) + n]
            output = run(reads(fused, output), read, position(row, k), seen)
            outputs.append(output)
        return outputs

    return unroll


UNROLL_MISTAKES = {
    "every step reads the fused features; from step 2 on, the head reads its own output": (
        faulty_unroll(reads=lambda fused, output: fused)
    ),
    "every step reads the same tokens; step k reads token i + k in row i": faulty_unroll(
        token=lambda k: 1
    ),
    "its tokens are one too early: row i of step 1 reads token i + 1": faulty_unroll(
        token=lambda k: k
    ),
    "its tokens are one too late: row i of step 1 reads token i + 1": faulty_unroll(
        token=lambda k: k + 2
    ),
    "every step has the positions of step 1; a draft is one position further on": faulty_unroll(
        position=lambda row, k: row
    ),
    "all rows of a step are at the same position; row i of step k is at i + k - 1": faulty_unroll(
        position=lambda row, k: torch.full_like(row, k)
    ),
    "in later steps a row sees the rows before it, too. Those are drafts after other texts; of a "
    "later step a row sees only itself": faulty_unroll(
        mask=lambda text, own, k: [text] * (k + 1)
    ),
    "a step sees its own rows only; it must see the text, that is step 1's rows up to i, and its "
    "drafts so far": (
        faulty_unroll(mask=lambda text, own, k: [torch.zeros_like(own)] * k + [text]),
        faulty_unroll(mask=lambda text, own, k: [torch.zeros_like(own)] * k + [own if k else text]),
    ),
    "a step does not see the steps between step 1 and itself, which are the drafts before": (
        faulty_unroll(
            mask=lambda text, own, k: [text] + [torch.zeros_like(own)] * (k - 1) + [own] * (k > 0)
        )
    ),
    "a later step does not see itself": faulty_unroll(
        mask=lambda text, own, k: [text] + [own] * (k - 1) + [torch.zeros_like(own)] * (k > 0)
    ),
    "of step 1 a later step sees its own row only; the text up to there is in rows 0 to i": (
        faulty_unroll(mask=lambda text, own, k: [own] * (k + 1) if k else [text])
    ),
    "the columns are in the wrong order: the rows of step 1 come first": faulty_unroll(
        mask=lambda text, own, k: [own] * k + [text]
    ),
    "a row sees rows after it, whose tokens it should predict: the mask is the wrong way round": (
        faulty_unroll(mask=lambda text, own, k: [text.T] + [own] * k)
    ),
    "a row sees all rows of step 1, also those after it, whose tokens it should predict": (
        faulty_unroll(mask=lambda text, own, k: [torch.ones_like(text)] + [own] * k)
    ),
}  # fmt: skip

# ---- draft_three ---------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(True, text, ends)
    for text, ends in (
        ((1, 2, 0, 2, 1), (3, 5)), ((2, 0, 0, 1), (2, 4)), ((1, 2), (1, 2)), ((0, 1, 1, 2), (4,)),
    )
]  # fmt: skip


def right_three(case: engine.Drafting, text: list[int], randomness) -> Tree:
    """The head's best chain, from passes over the whole text."""
    model, drafts = engine.checkpoint(True), []
    if len(text) == 1:
        return Tree.chain(text[-1], drafts)
    head = with_drafter("eagle3", model, None, {})["head"]
    hidden = head.project_features(model(text[:-1], feature_layers=head.feature_layers))
    for _ in range(3):
        embedded = head.embed(torch.tensor(text[1:] + drafts), model)
        output = head(hidden, embedded[None])[:, -1:]
        hidden = torch.cat([hidden, output], 1)
        drafts.append(int(head.ids[head.logits(output[0, 0]).argmax()]))
    return Tree.chain(text[-1], drafts)


DRAFT_MISTAKES = {
    "the states are side by side in the wrong order; that of the lowest layer comes first": (
        engine.altered(draft_three, ("for i in drafter.layers]", "for i in drafter.layers[::-1]]"))
    ),
    "there are too few drafts: three": engine.altered(draft_three, ("new, 3)", "new, 2)")),
    "it reads the states of the first rows; those of `path` are the new pairs'": engine.altered(
        draft_three, ("three[path]", "three[[0] * len(path)]")
    ),
}

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "last_knows_token": (0, 1), "three_know_token": (0, 1), "tau_trained": (1, 4),
    "second_given_first": (0, 1), "gain_of_tree": (0, 20),
}  # fmt: skip
TASKS = [
    Task(
        name="fuse",
        package=package_fuse,
        solution=fuse,
        judge=Oracle(
            STACKS, run_fuse, fused_afresh, fused_distance, show_fused,
            f"{len(STACKS)} stacks of layers give the states of fresh passes",
            tolerance=TOLERANCE, arguments=show_stack, diagnose=diagnose_fuse,
        ),
        hints=(
            "Go through the layers once, with their numbers: enumerate(layers). Before a chosen "
            "layer runs, keep x in a list.",
            "torch.cat(list, -1) puts the three side by side, (n, 3 d); `fc` makes (n, d) of them. "
            "After the loop, x is the last state.",
        ),
        mistakes=FUSE_MISTAKES,
        shows=(Backbone.forward,),
    ),
    Task(
        name="unroll",
        package=package_unroll,
        solution=unroll,
        judge=Oracle(
            TEXTS, run_unroll, drafted, lambda a, b: max(off(a, b)), show_unroll,
            f"{len(TEXTS)} batches: every row of every step is what drafting computes there",
            tolerance=TOLERANCE, arguments=show_texts, diagnose=diagnose_unroll,
        ),
        hints=(
            "In a loop over k = 0 … K - 1, `run` gets what it has returned before (at first "
            "`fused`), tokens[:, k + 1 : k + 1 + n] and the positions torch.arange(n) + k.",
            "With row = torch.arange(n), row[:, None] >= row is step 1's block of the mask, and "
            "row[:, None] == row that of any later step. torch.cat(blocks, 1) joins them.",
        ),
        mistakes=UNROLL_MISTAKES,
        shows=(MTPLoss.outputs, MTPLoss.plan),
    ),
    Task(
        name="draft_three",
        package=package_draft_three,
        solution=draft_three,
        judge=engine.drafters(
            DRAFTINGS, engine.exact_drafts(right_three), f"{len(DRAFTINGS)} texts"
        ),
        hints=(
            "It is `draft_chain` of lesson 06, but in the place of hidden[path] stand the fused "
            "features of these rows. Call `watch` once, before the first pass.",
            "torch.cat([states[i] for i in drafter.layers], -1)[path] are the three states of the "
            "new pairs; drafter.fc makes (n, d) of them, for `chain`.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(HeadDrafter.flush_pending,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "What does it cost the target to hand out the three hidden states?",
        "a",
        "the pass that scores the drafts computes every layer's input anyway.",
        ("almost nothing", "three more passes", "the passes become three times as slow"),
    ),
    Question(
        "A round accepts two drafts. From what are the rows made that the head's cache keeps for "
        "them?",
        "b",
        "as in lesson 06, the target's pass has computed the three true states of these tokens.",
        (
            "from the head's own outputs, since the drafts were right",
            "from the target's three states",
            "from the target's last state",
        ),
    ),
    Question(
        "In step 3 of training-time test, how many rows does row 4 see (rows are counted from 0)?",
        7.0,
        "it sees rows 0 to 4 of step 1, and row 4 of steps 2 and 3.",
    ),
    Question(
        "A head was trained with step 1 only. Which of its drafts suffers most?",
        "b",
        "draft 1 is step 1, but later drafts read outputs that the head has never seen as inputs.",
        ("the first", "the second and later ones", "all alike"),
    ),
    Question(
        "The three states come from the wrong layers, because of a bug. Does the text change?",
        False,
        "the target judges every draft, so a bug in the head costs speed only.",
    ),
]
