"""Wrong answers to assignment 8. Most are the engine with one of its steps done wrong."""

import torch

from lessons.assignments import mutants
from lessons.assignments.a8_engine import reference
from lessons.assignments.a8_engine.proposers import Lookup
from lessons.assignments.grading import Mistake
from minispec.methods.autoregressive import autoregressive
from minispec.sampling import Sampling, Seeded, probs
from minispec.tree import Step
from minispec.verify import accept

black_box = reference.black_box


def engine_with(
    *, accept=accept, probs=probs, fed=lambda tokens, cache: tokens[cache.length : -1],
    room=lambda cache: cache.free_rows, layout=lambda depth, mask: (depth, mask),
    committed=lambda path: path, told=lambda tokens, new, tree, path, hidden: hidden,
):  # fmt: skip
    """The engine, with each of its steps open to a mistake."""

    def engine(model, proposer, prompt, sampling, randomness, *, cache=None):
        cache, tokens = cache or model.new_cache(), list(prompt)
        none = torch.empty(1, 0, model.config.hidden_size, dtype=model.dtype)
        hidden = [none, *model.prefill_chunks(fed(tokens, cache), cache)]
        proposer.begin(tokens, torch.cat(hidden, 1)[0], cache.capacity)
        yield Step()
        while True:
            tree = proposer.propose(tokens, room(cache), sampling, randomness)
            riding, depth, mask = proposer.beside(tree, room(cache))
            hidden = model(tree.tokens + riding, cache, *layout(depth, mask))[0]
            target = probs(model.logits(hidden[: len(tree)]), sampling)
            path, fresh, *_ = accept(target, tree, randomness)
            cache.commit(committed(path))
            new = tree.tokens_at(path[1:]) + [fresh]
            tokens += new
            proposer.learn(tokens, tree, path, told(tokens, new, tree, path, hidden))
            yield Step(new, tree, path)

    return engine


right = engine_with()


def plain(model, proposer, prompt, sampling, randomness, *, cache=None):
    """Plain decoding: the proposer is not asked."""
    return autoregressive(model, prompt, sampling, randomness, cache=cache)


def accepts_nothing(target, tree, randomness):
    return [0], randomness.categorical(target[0])


def plain_black_box(
    checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed
):  # fmt: skip
    model, tokens = reference.loaded(checkpoint), []
    sampling = Sampling(temperature, top_k, top_p)
    for step in autoregressive(model, prompt, sampling, Seeded(seed)):
        tokens += step.tokens
        if len(tokens) == max_new_tokens or set(tokens) & set(model.config.eos_ids):
            return tokens


def without_the_given_cache(*arguments, cache=None):
    yield from right(*arguments)


def steps_in_a_list(*arguments, **options):
    return iter([step for step, _ in zip(right(*arguments, **options), range(20))])


def without_the_prefill(*arguments, **options):
    steps = right(*arguments, **options)
    next(steps)
    yield from steps


def token_by_token(*arguments, **options):
    """A round of several tokens becomes several steps."""
    for step in right(*arguments, **options):
        for i, token in enumerate(step.tokens[:-1]):
            yield Step([token], step.tree, step.path[: i + 2])
        yield Step(step.tokens[-1:], step.tree, step.path)


def repeats_the_root(*arguments, **options):
    for step in right(*arguments, **options):
        root = step.tree.tokens[:1] if step.tree else []
        yield Step(root + step.tokens, step.tree, step.path)


# ---- the black box -------------------------------------------------------------------------------


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = black_box(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


def without_the_end_token(checkpoint, prompt, **options):
    tokens = black_box(checkpoint, prompt, **options)
    ends = reference.loaded(checkpoint).config.eos_ids
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def whole_rounds(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """The run ends with the round that reaches its length."""
    model, tokens = reference.loaded(checkpoint), []
    sampling = Sampling(temperature, top_k, top_p)
    for step in right(model, Lookup(model), prompt, sampling, Seeded(seed)):
        tokens += step.tokens
        if len(tokens) >= max_new_tokens or set(tokens) & set(model.config.eos_ids):
            return tokens


def always_greedy(checkpoint, prompt, *, temperature, **options):
    return black_box(checkpoint, prompt, temperature=0.0, **options)


MISTAKES = [
    Mistake("exact, greedy, cache, rounds, limits, engine", "it is plain decoding: the proposer is "
            "not asked", {"engine": plain}),
    Mistake("exact, rounds", "what was proposed is scored, but never accepted",
            {"engine": engine_with(accept=accepts_nothing)}),
    Mistake("exact, rounds", "it accepts too often, as with p / (0.8 q)",
            {"engine": engine_with(accept=mutants.lenient)}),
    Mistake("exact, rounds", "the fresh token is the argmax: draw it",
            {"engine": engine_with(accept=mutants.argmax_root)}),
    Mistake("exact", "the bonus token is drawn without top-k and top-p",
            {"engine": engine_with(probs=mutants.bonus_without_warpers)}),
    Mistake("exact, greedy, rounds, limits", "a draft is judged by the distribution after it",
            {"engine": engine_with(accept=mutants.probs_after_the_draft)}),
    Mistake("greedy, cache", "the pass has a chain's depth and mask, not those of `beside`",
            {"engine": engine_with(layout=lambda depth, mask: (None, None))}),
    Mistake("greedy, cache", "the path's rows are counted, not kept: commit the path itself",
            {"engine": engine_with(committed=lambda path: list(range(len(path))))}),
    Mistake("cache", "everything up to the path's last row is committed",
            {"engine": engine_with(committed=lambda path: list(range(path[-1] + 1)))}),
    Mistake("cache", "the given cache is not used", {"engine": without_the_given_cache}),
    Mistake("greedy, rounds", "`learn` gets the hidden states of the path only: it needs all",
            {"engine": engine_with(told=lambda tokens, new, tree, path, hidden: hidden[path])}),
    Mistake("limits", "proposals may have more rows than the cache has left",
            {"engine": engine_with(room=lambda cache: cache.capacity)}),
    Mistake("rounds, limits", "a kept cache is fed the whole prompt again",
            {"engine": engine_with(fed=lambda tokens, cache: tokens[:-1])}),
    Mistake("engine", "the steps come in a list: yield each as it comes",
            {"engine": steps_in_a_list}),
    Mistake("engine, rounds", "the first step is not the prefill's",
            {"engine": without_the_prefill}),
    Mistake("rounds", "a round of several tokens is yielded as several steps",
            {"engine": token_by_token}),
    Mistake("engine", "a round yields its root again: that was the last round's fresh token",
            {"engine": repeats_the_root}),
    Mistake("black box", "it is plain decoding: use a proposer that drafts",
            {"black_box": plain_black_box}),
    Mistake("black box", "it runs on after an end token", {"black_box": runs_past_the_end}),
    Mistake("black box", "the end token is left out: it is the last",
            {"black_box": without_the_end_token}),
    Mistake("black box", "the last round is not cut", {"black_box": whole_rounds}),
    Mistake("black box", "the temperature has no effect", {"black_box": always_greedy}),
]  # fmt: skip
