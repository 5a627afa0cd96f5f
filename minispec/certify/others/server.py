"""Check that a server decodes exactly as the checkpoint it claims to serve."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from minispec.certify.common import GREEDY, Verdict, describe, drafting_result
from minispec.certify.compare import divergence
from minispec.certify.others.client import (
    Answer,
    ConnectionLost,
    NotSupported,
    RequestError,
    Server,
    is_stop_reason,
)
from minispec.certify.others.context import (
    ANSWER_TOKENS,
    CONCURRENCY,
    HIGH_TEMPERATURE,
    TIME_LIMIT_MINUTES,
    Result,
    ServerContext,
    in_vocabulary,
    largest_gap,
    make_prompts,
    run_concurrently,
    tolerance_of,
    with_eos,
)
from minispec.certify.others.distribution import (
    SAMPLE_TOKENS,
    SERVER_SAMPLINGS,
    Samples,
    seeds_work,
)
from minispec.certify.others.scoring import answer_logits, gaps
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Sampling

SERVER_CHECKS = "greedy", "limits", "load", "distribution"
REQUESTS = 2000  # the approximate number of requests, by default

# ---- the test ------------------------------------------------------------------------------------


def check_server(
    server: Server, model: Transformer, tokenizer: Tokenizer | None, baseline: Server | None = None,
    requests: int = REQUESTS, precision: float | torch.dtype = torch.float32,
    checks: tuple[str, ...] = SERVER_CHECKS, samplings: tuple[Sampling, ...] = SERVER_SAMPLINGS,
) -> Iterator[Verdict]:  # fmt: skip
    """Yield verdicts on a server of `model`, with roughly `requests` requests.

    A baseline is a server of the same model that decodes plainly. The server must then equal the
    baseline instead of our model; a row reports where the baseline itself differs from ours."""
    prompts, servers = make_prompts(model, tokenizer), list(filter(None, (server, baseline)))
    for one in servers:
        one.probe(next(iter(prompts.values()))[0])
    ctx = ServerContext(server, baseline, model, tokenizer, 0.0, requests, samplings, checks, {})
    max_prompt = min(model.config.context, *(s.context for s in servers)) - ANSWER_TOKENS
    for category, candidates in prompts.items():
        received = [ctx.as_received(ids) for ids in candidates]
        if fitting := [ids for ids in received if 0 < len(ids) <= max_prompt]:
            ctx.prompts[category] = fitting
    if not ctx.prompts:
        context = max_prompt + ANSWER_TOKENS
        raise UserError(f"a context of {context} tokens is too short for any prompt")
    ctx.tolerance = tolerance_of(precision, model, ctx.prompts)
    before = server.draft_counts()
    for check, case, function, *arguments in rows(ctx):
        try:
            passed, detail = evaluate(function, ctx, *arguments)
        except ConnectionLost as error:
            yield Verdict(check, case, False, str(error))
            return
        yield Verdict(check, case, passed, detail)
        if check == "server" and not passed:
            return  # a different model: the other checks would be meaningless
    after = server.draft_counts()
    passed, detail = drafting_since(before, after)
    yield Verdict("drafts", f"in {server.requests} requests", passed, detail)


def evaluate(function: Callable, ctx: ServerContext, *arguments) -> Result:
    """Run one check; a request that the server rejects fails it."""
    if ctx.out_of_time:
        return None, f"skipped: {TIME_LIMIT_MINUTES} minutes are over (reduce --requests)"
    try:
        return function(ctx, *arguments)
    except NotSupported as error:
        return None, f"not checked: {error}"
    except RequestError as error:
        return False, str(error)


def rows(ctx: ServerContext) -> Iterator[tuple]:
    """Yield (check, case, function, its arguments after the context)."""
    yield "server", str(ctx.server.name), is_this_model
    ids = all(server.returns_ids for server in (ctx.server, ctx.baseline) if server)
    for category, prompts in ctx.prompts.items() if "greedy" in ctx.checks else ():
        if ctx.baseline:
            yield "baseline", f"greedy, {category}", baseline_is_greedy, prompts
        yield "greedy", category, is_greedy, prompts
    if "limits" in ctx.checks:
        yield "limits", "stop strings", honours_stop_strings
        yield "limits", "streaming", streams_same_text
        yield from token_limits(ctx) if ids else [("limits", "all other limits", needs_ids)]
    if "load" in ctx.checks:
        yield "load", f"{CONCURRENCY} concurrent, mixed temperatures", handles_load
    if "distribution" in ctx.checks:
        yield from distribution_rows(ctx) if ids else [("distribution", "all", needs_ids)]


def token_limits(ctx: ServerContext) -> Iterator[tuple]:
    yield "limits", "lengths", keeps_lengths
    yield "limits", "end of greedy answers", ends_at_eos
    for end in ctx.model.config.eos_ids:
        yield "limits", f"end token {end}", obeys_eos, end
    yield "limits", "logprobs", logprobs_match
    yield "limits", "several choices", returns_choices


def distribution_rows(ctx: ServerContext) -> Iterator[tuple]:
    yield "distribution", "seeds", seeds_work
    samples = Samples(ctx)
    for sampling in ctx.samplings:
        if ctx.baseline:
            case = f"distribution, {describe(sampling)}"
            yield "baseline", case, samples.judge_baseline, sampling
        yield "distribution", describe(sampling), samples.judge_server, sampling


def needs_ids(ctx: ServerContext) -> Result:
    raise NotSupported("the server returns no token ids")


# ---- the right model -----------------------------------------------------------------------------


def is_this_model(ctx: ServerContext) -> Result:
    """Check that logprobs, or first tokens if there are none, match the checkpoint."""
    server, differences, best, lengths = ctx.server, [], [], []
    for ids in next(iter(ctx.prompts.values()))[:5]:
        try:
            answer = server.ask(ids, 4, logprobs=1)
        except RequestError:
            answer = server.ask(ids, 4)
        differences += logprob_differences(ctx, ids, answer) or []
        first = with_eos(ctx, ids, answer)[:1]
        best.append(bool(first) and largest_gap(ctx, ids, first)[0] < ctx.tolerance)
        lengths.append((len(ids), answer.prompt_tokens or len(ids)))
    accepts = "token ids" if server.accepts_ids else "text"
    returns = "token ids" if server.returns_ids else "text, encoded by our tokenizer"
    summary = f"accepts {accepts}, returns {returns}; tolerance {ctx.tolerance:.2g}"
    typical = sorted(differences)[len(differences) // 2] if differences else 0.0
    if typical > max(0.5, ctx.tolerance) and sum(best) < len(best):
        return False, f"another model or other weights: logprobs differ from ours by {typical:.1f}"
    if sum(best) < len(best) / 2:
        share = f"only {sum(best)} of {len(best)} prompts continue as ours do"
        return False, f"another model, other weights, or wrong from the first token: {share}"
    for ours, theirs in lengths:
        if ours != theirs:
            counts = f"the server counts {theirs} tokens for a prompt of {ours}"
            return False, f"{counts}: does it add BOS or a chat template?"
    return True, summary


def logprob_differences(
    ctx: ServerContext, prompt: list[int], answer: Answer
) -> list[float] | None:
    """Return how far each logprob is from ours, or None if the answer has none."""
    n = min(len(answer.tokens), len(answer.logprobs or []))
    if n == 0 or not answer.has_ids or not in_vocabulary(ctx, answer.tokens):
        return None
    logits = answer_logits(ctx.model, prompt, answer.tokens[:n])
    ours = logits.log_softmax(-1)[torch.arange(n), answer.tokens[:n]]
    return (ours - torch.tensor(answer.logprobs[:n], dtype=torch.float64)).abs().tolist()


# ---- greedy --------------------------------------------------------------------------------------


def is_greedy(ctx: ServerContext, prompts: list[list[int]]) -> Result:
    """Check that every token is the most probable at its position, up to ties; ask for every answer
    twice. With a baseline, check that the answers equal the baseline's, up to ties."""
    same, ties, total = 0, 0, 0
    for ids in prompts:
        answers = [ctx.server.ask(ids, ANSWER_TOKENS) for _ in range(2)]
        ctx.answers.append((ids, answers[0]))
        plain = ctx.baseline and with_eos(ctx, ids, ctx.baseline.ask(ids, ANSWER_TOKENS))
        for answer in answers:
            tokens = with_eos(ctx, ids, answer)
            if not tokens:
                return False, f"prompt of {len(ids)} tokens: the answer is empty"
            if plain is None:
                gap, at, n_gaps = largest_gap(ctx, ids, tokens)
            else:
                n = min(len(plain), len(tokens))
                at, gap = divergence(ctx.model, ids, tokens[:n], plain[:n])
                n_gaps = at is not None
            if n_gaps and gap >= ctx.tolerance:
                where = f"prompt of {len(ids)} tokens, token {at}: {tokens[at : at + 3]}"
                return False, f"{where}, {gap:.3g} below the best: {ctx.not_a_tie}"
            same, ties, total = same + (not n_gaps), ties + n_gaps, total + len(tokens)
    low, high = wilson_interval(same, 2 * len(prompts))
    reference = "the baseline's" if ctx.baseline else "ours"
    detail = f"{same} of {2 * len(prompts)} answers equal {reference} ({low:.0%} to {high:.0%})"
    return True, f"{detail}; {ties} ties in {total} tokens"


def baseline_is_greedy(ctx: ServerContext, prompts: list[list[int]]) -> Result:
    plain = replace(ctx, server=ctx.baseline, baseline=None, answers=[])
    passed, detail = is_greedy(plain, prompts)
    return passed or None, detail


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a rate."""
    z, p = 1.96, hits / n
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n)


# ---- limits --------------------------------------------------------------------------------------


def keeps_lengths(ctx: ServerContext) -> Result:
    """Check that answers have exactly max_tokens tokens if no end token comes."""
    ids = ctx.long_answer()[0]
    answers = [ctx.server.ask(ids, n) for n in range(1, 12)]
    if problem := [n for n, answer in enumerate(answers, 1) if len(answer.tokens) != n]:
        return False, f"max_tokens {problem[:4]} not respected"
    if reasons := [answer.reason for answer in answers if answer.ended]:
        return False, f"max_tokens 1 to 11 respected, but finish_reason is {reasons[0]!r}"
    return True, f"max_tokens 1 to 11 respected{unchecked(answers)}"


def unchecked(answers: list[Answer]) -> str:
    """Describe how many answers could not be checked because they have no finish_reason."""
    missing = sum(answer.reason is None for answer in answers)
    return f"; {missing} without a finish_reason could not be checked" if missing else ""


def ends_at_eos(ctx: ServerContext) -> Result:
    """Check that every greedy answer ends where an end token is the best, and only there."""
    for ids, answer in ctx.greedy_answers():
        if problem := wrong_end(ctx, ids, answer):
            return False, f"prompt of {len(ids)} tokens: {problem}"
    answers = [answer for _, answer in ctx.answers]
    ended = f"{sum(answer.ended for answer in answers)} of {len(answers)} greedy answers"
    return True, f"{ended} ended with an end token{unchecked(answers)}"


def wrong_end(ctx: ServerContext, prompt: list[int], answer: Answer) -> str:
    """Describe what is wrong with the end of an answer, or return "". Text answers always pass."""
    eos_ids, tokens = ctx.model.config.eos_ids, answer.tokens
    if not answer.has_ids or not in_vocabulary(ctx, tokens):
        return ""
    if passed_over := [token for token in tokens if token in eos_ids]:
        return f"continues after the end token {passed_over[0]}"
    if answer.ended:
        below = [gaps(ctx.model, prompt, [*tokens, end])[-1] for end in eos_ids]
        if min(below, default=math.inf) >= ctx.tolerance:
            why = f"finish_reason {answer.reason!r}"
            return f"ends after {len(tokens)} tokens without an end token ({why})"
    elif len(tokens) != ANSWER_TOKENS:
        return f"{len(tokens)} tokens instead of {ANSWER_TOKENS}"
    return ""


def obeys_eos(ctx: ServerContext, end: int) -> Result:
    """Check that an answer ends at once if logit_bias makes this end token the best."""
    ids, before = ctx.long_answer()
    answer = ctx.server.ask_optional("logit_bias", ids, 4, logit_bias={str(end): 100})
    if answer.tokens[:1] == before.tokens[:1]:
        raise NotSupported("logit_bias has no effect")
    passed = answer.ended and not answer.tokens
    problem = f"continues: {answer.tokens}, finish_reason {answer.reason!r}"
    return passed, f"ends the answer{unchecked([answer])}" if passed else problem


def honours_stop_strings(ctx: ServerContext) -> Result:
    """Check that a stop string that spans two tokens ends the answer just before it."""
    if ctx.tokenizer is None:
        return None, "--model has no tokenizer"
    answers = []
    for ids, answer in ctx.greedy_answers():
        if not in_vocabulary(ctx, answer.tokens):
            return False, f"prompt of {len(ids)} tokens: an id outside the vocabulary"
        for n in range(2, ANSWER_TOKENS, 7):
            boundary = len(ctx.tokenizer.decode(answer.tokens[:n]))
            stop = answer.text[max(0, boundary - 2) : boundary + 2]
            if len(stop) < 2 or "\ufffd" in stop:  # an incomplete character
                continue
            expected = answer.text[: answer.text.index(stop)]
            stopped = ctx.server.ask(ids, ANSWER_TOKENS, stop=[stop])
            answers.append(stopped)
            if stopped.text != expected and ctx.server.ask(ids, ANSWER_TOKENS).text != answer.text:
                raise NotSupported("answers are not reproducible, so rounding decides")
            if stopped.text != expected:
                text = stopped.text[-30:]
                return False, f"stop {stop!r}: {text!r} instead of {expected[-30:]!r}"
            if stopped.reason and not stopped.ended:
                return False, f"stop {stop!r}: stopped, but finish_reason is {stopped.reason!r}"
        if len(answers) > 8:
            break
    detail = f"{len(answers)} strings across token boundaries{unchecked(answers)}"
    return bool(answers) or None, detail


def streams_same_text(ctx: ServerContext) -> Result:
    answers = ctx.greedy_answers()[:6]
    for ids, answer in answers:
        text, reason = ctx.server.ask_streaming(ids, ANSWER_TOKENS)
        if text != answer.text and ctx.server.ask(ids, ANSWER_TOKENS).text != answer.text:
            raise NotSupported("answers are not reproducible, so rounding decides")
        if text != answer.text:
            streamed, complete = text[-30:], answer.text[-30:]
            return False, f"prompt of {len(ids)} tokens: {streamed!r} instead of {complete!r}"
        if is_stop_reason(reason) != is_stop_reason(answer.reason):
            reasons = f"finish_reason {reason!r} instead of {answer.reason!r}"
            return False, f"prompt of {len(ids)} tokens: {reasons} when streamed"
    detail = f"{len(answers)} streamed answers equal the unstreamed ones"
    return True, detail + unchecked([answer for _, answer in answers])


def logprobs_match(ctx: ServerContext) -> Result:
    differences = []
    for ids in next(iter(ctx.prompts.values())):
        answer = ctx.server.ask_optional("logprobs", ids, ANSWER_TOKENS, logprobs=1)
        differences += logprob_differences(ctx, ids, answer) or []
    if not differences:
        raise NotSupported("answers have no logprobs")
    worst = max(differences)
    return worst < ctx.tolerance, f"at most {worst:.2g} from ours, for {len(differences)} tokens"


def returns_choices(ctx: ServerContext) -> Result:
    ids = ctx.long_answer()[0]
    ctx.server.ask_optional("n", ids, 1, sampling=HIGH_TEMPERATURE, n=2)
    choices = ctx.server.choices(ids, SAMPLE_TOKENS, HIGH_TEMPERATURE, seed=1, n=4)
    different = len({tuple(choice.tokens) for choice in choices})
    detail = f"n = 4: {len(choices)} choices, {different} of them different"
    return len(choices) == 4 and different > 1, detail


# ---- load ----------------------------------------------------------------------------------------


def handles_load(ctx: ServerContext) -> Result:
    """Check that greedy answers stay correct while others are sampled concurrently."""
    prompts = [ids for category in ctx.prompts.values() for ids in category][:16]
    jobs = [(ids, sampling) for ids in prompts for sampling in (GREEDY, HIGH_TEMPERATURE)]
    answers = run_concurrently(lambda job: ctx.server.ask(job[0], ANSWER_TOKENS, job[1]), jobs)
    ties = 0
    for (ids, sampling), answer in zip(jobs, answers):
        if sampling is GREEDY:
            gap, at, n_gaps = largest_gap(ctx, ids, with_eos(ctx, ids, answer))
            ties += n_gaps > 0
            problem = f"token {at} is {gap:.3g} below the best" if gap >= ctx.tolerance else ""
            if problem := problem or wrong_end(ctx, ids, answer):
                return False, f"prompt of {len(ids)} tokens: {problem}"
    return True, f"{len(prompts)} greedy and {len(prompts)} sampled answers; {ties} with ties"


def drafting_since(before: tuple[int, int] | None, after: tuple[int, int] | None) -> Result:
    """Check, by the server's counters, that drafts were both accepted and rejected."""
    if after is None:
        return None, "no draft statistics: only plain decoding may have been tested"
    drafted, accepted = (b - a for a, b in zip(before or (0, 0), after))
    return drafting_result(int(drafted), int(accepted))
