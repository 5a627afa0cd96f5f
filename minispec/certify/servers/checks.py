"""Check that a server decodes exactly as the checkpoint it claims to serve."""

import time
from collections.abc import Iterator

import torch

from minispec.certify import examination
from minispec.certify.common import GREEDY, NotSupported, Result, Verdict, describe, drafting_result
from minispec.certify.examination import Request, Row, is_greedy, keeps_lengths, samples_fit
from minispec.certify.near_ties import compare_texts
from minispec.certify.requests import BATCH_SIZES, Place
from minispec.certify.servers import context
from minispec.certify.servers.context import ANSWER_TOKENS, ServerContext, ServerDecoder
from minispec.certify.stream import Stream, judge_row
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.model import Transformer
from minispec.remote.client import RequestError, Server
from minispec.remote.identity import greedy_answer, logprob_differences, mismatch
from minispec.sampling import Sampling

SERVER_CHECKS = "greedy", "load", "limits", "sampled", "distribution"
DRAWN_KINDS = "all", "temperature", "filters", "prompts", "turns", "batches"
DRAWN_SHARE, DRAWN_PROMPT = 0.3, 300  # of the requests; the longest drawn prompt
REQUESTS = 3000  # the approximate number of requests, by default
SAMPLE_TOKENS, MIN_ANSWERS = 8, 60  # tokens per sampled answer; answers per sampling
HIGH_TEMPERATURE = Sampling(1.5)
SERVER_SAMPLINGS = (
    Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8),
    Sampling(1.3, top_k=20, top_p=0.9),
)  # fmt: skip

def check_server(
    server: Server, model: Transformer, tokenizer: Tokenizer | None, baseline: Server | None = None,
    requests: int = REQUESTS, precision: float | torch.dtype = torch.float32,
    checks: tuple[str, ...] = SERVER_CHECKS, samplings: tuple[Sampling, ...] = SERVER_SAMPLINGS,
    only: str = "",
) -> Iterator[Verdict]:  # fmt: skip
    """Yield verdicts on a server of `model`, with roughly `requests` requests.

    `only` selects rows by a part of "check: case". A baseline is a server of the same model that
    decodes plainly. The server must then equal the baseline instead of our model; a row reports
    where the baseline itself differs from ours."""
    prompts = context.make_prompts(model, tokenizer)
    for one in filter(None, (server, baseline)):
        one.probe(next(iter(prompts.values()))[0])
    seconds = 60 * context.TIME_LIMIT_MINUTES
    end = time.monotonic() + seconds
    decoder = ServerDecoder(server, model, tokenizer, end)
    plain = ServerDecoder(baseline, model, tokenizer, end) if baseline else None
    ctx = ServerContext(decoder, model, plain, requests=requests)
    ctx.choose_prompts(prompts)
    ctx.tolerance = context.tolerance_of(precision, model, ctx.prompts)
    is_model = Row("server", str(server.name), ctx, is_this_model, (), False)
    requested = (row for row in rows(ctx, samplings, only) if row.check in checks)
    selected = examination.select(requested, only)
    before = server.draft_counts()
    try:
        for verdict in examination.run_rows([is_model, *selected], seconds):
            yield verdict
            if verdict.check == "server" and not verdict.passed:
                return
    except RequestError:  # the server cannot be reached, as the last row says
        return
    result = None, "no draft statistics: only plain decoding may have been tested"
    if after := server.draft_counts():
        result = drafting_result(*(b - a for a, b in zip(before or (0, 0), after)))
    yield Verdict("drafts", f"in {server.requests} requests", *result)


def rows(ctx: ServerContext, samplings: tuple[Sampling, ...], only: str) -> Iterator[Row]:
    for kind, prompts in ctx.prompts.items():
        yield Row("greedy", kind, ctx, is_greedy, (prompts, ANSWER_TOKENS))
    every = [ids for prompts in ctx.prompts.values() for ids in prompts]
    yield Row("bits", "all prompts", ctx, compare_texts, (every, ANSWER_TOKENS), False)
    mixed = f"{context.CONCURRENCY} concurrent, mixed temperatures"
    yield Row("load", mixed, ctx, handles_load, (), False)
    if not ctx.has_ids:
        for check in "limits", "sampled", "distribution":
            yield Row(check, "all", ctx, needs_ids, (), False)
        return
    yield Row("limits", "lengths", ctx, lengths_are_right, (), False)
    yield Row("limits", "end of greedy answers", ctx, ends_are_right, (), False)
    for end in ctx.model.config.eos_ids:
        yield Row("limits", f"end token {end}", ctx, obeys_eos, (end,), False)
    yield Row("limits", "logprobs", ctx, logprobs_match, (), False)
    yield from drawn_rows(ctx, only)
    yield Row("distribution", "seeds", ctx, seeds_work, (), False)
    for sampling in samplings:
        yield Row("distribution", describe(sampling), ctx, fits, (sampling, ctx), weight=1.0)


def drawn_rows(ctx: ServerContext, only: str) -> Iterator[Row]:
    """Drawn requests, as to functions; of a server only the sampled tokens are judged by them."""
    given = [token for prompts in ctx.prompts.values() for ids in prompts for token in ids]
    place = Place(ctx, None, {}, given[:1000], 1, ANSWER_TOKENS, DRAWN_PROMPT)
    rows = [Row("sampled", kind, ctx, judge_row) for kind in DRAWN_KINDS if ctx.accepts_ids]
    rows = examination.select(rows, only)
    kinds = {(row.check, row.case) for row in rows}
    most = int(DRAWN_SHARE * ctx.requests / len(ctx.servers))
    stream = Stream([place], kinds, BATCH_SIZES, most)
    stream.plain = stream.of_baseline()
    for i, row in enumerate(rows):  # the first to be judged takes the time of all
        yield row._replace(arguments=(stream, "sampled", row.case), weight=3.0 * (i == 0))


def needs_ids(ctx: ServerContext) -> Result:
    raise NotSupported("the server returns no token ids")


def is_this_model(ctx: ServerContext) -> Result:
    """Check that logprobs, or first tokens if there are none, match the checkpoint."""
    server, answers = ctx.server, []
    for ids in next(iter(ctx.prompts.values()))[:5]:
        answer = greedy_answer(server, ids, 4)
        answers.append((ids, answer, ctx.decoder.with_end(ids, 4, answer)[:1]))
    accepts = "token ids" if server.accepts_ids else "text"
    returns = "token ids" if server.returns_ids else "text, encoded by our tokenizer"
    summary = f"accepts {accepts}, returns {returns}; tolerance {ctx.tolerance:.2g}"
    problem = mismatch(ctx.model, answers, ctx.tolerance)
    return not problem, problem or summary


# ---- limits --------------------------------------------------------------------------------------


def lengths_are_right(ctx: ServerContext) -> Result:
    """Check that answers have exactly max_tokens tokens if no end token comes."""
    return keeps_lengths(ctx, ctx.long_answer()[0], [*range(1, 12)])


def ends_are_right(ctx: ServerContext) -> Result:
    """Check that answers end after the first end token: if some so far have one, only those."""
    answers, eos_ids = ctx.greedy_answers(), ctx.model.config.eos_ids
    ending = [ids for ids, tokens in answers if not set(eos_ids).isdisjoint(tokens)]
    prompts = ending or [ids for ids, _ in answers]
    return examination.ends_correctly(ctx, prompts[:8], ANSWER_TOKENS)


def obeys_eos(ctx: ServerContext, end: int) -> Result:
    """Check that an answer ends at once if logit_bias makes this end token the best."""
    ids, before = ctx.long_answer()
    bias = {str(end): 100}
    ctx.remember(Request(ids, 4), logit_bias=bias)
    answer = ctx.decoder.ask(Request(ids, 4), logit_bias=bias)
    if answer.tokens[:1] == before[:1]:
        raise NotSupported("logit_bias has no effect")
    passed = answer.ended and not answer.tokens
    return passed, "ends the answer" if passed else f"continues: {answer.tokens}"


def logprobs_match(ctx: ServerContext) -> Result:
    differences = []
    for ids in next(iter(ctx.prompts.values())):
        answer = ctx.decoder.ask(Request(ids, ANSWER_TOKENS), logprobs=1)
        differences += logprob_differences(ctx.model, ids, answer)
    if not differences:
        raise NotSupported("answers have no logprobs")
    worst = max(differences)
    return worst < ctx.tolerance, f"at most {worst:.2g} from ours, for {len(differences)} tokens"


def handles_load(ctx: ServerContext) -> Result:
    """Check that greedy answers stay correct while others are sampled concurrently."""
    prompts = [ids for kind in ctx.prompts.values() for ids in kind][:16]
    samplings = GREEDY, HIGH_TEMPERATURE
    requests = [Request(ids, ANSWER_TOKENS, s) for ids in prompts for s in samplings]
    answers, ties = ctx.decoder.batch(requests), 0
    for request, tokens in list(zip(requests, answers))[::2]:  # the greedy ones
        plain = examination.baseline_tokens(ctx, request.prompt, request.n)
        kept = tokens[: request.n]
        problem, differing, _ = examination.difference(ctx, request.prompt, kept, plain)
        if ctx.has_ids:
            problem = examination.wrong_end(tokens, request.n, ctx.model.config.eos_ids) or problem
        if problem:
            ctx.remember(request, tokens=tokens)
            return False, f"prompt of {len(request.prompt)} tokens: {problem}"
        ties += differing
    return True, f"{len(prompts)} greedy and {len(prompts)} sampled answers; {ties} ties"


# ---- samples -------------------------------------------------------------------------------------


def seeds_work(ctx: ServerContext) -> Result:
    """Check that answers differ between seeds, and whether equal seeds give equal answers."""
    ids, seeds = ctx.long_answer()[0], (1, 1, *range(2, 8))
    samples = [tuple(ctx.tokens(ids, SAMPLE_TOKENS, HIGH_TEMPERATURE, seed)) for seed in seeds]
    if len(set(samples)) == 1:
        return False, "the same answer for every seed: nothing is sampled"
    if samples[0] != samples[1]:
        return None, "different answers for the same seed: seeds are ignored"
    return True, f"equal seeds agree; {len(set(samples))} different answers from 7 seeds"


def fits(exam: ServerContext, sampling: Sampling, ctx: ServerContext) -> Result:
    """Test as many samples as the remaining requests allow. `ctx` has the baseline too, also while
    that is examined itself."""
    left = ctx.requests - sum(server.requests for server in ctx.servers)
    runs = max(0, int(exam.share * left / len(exam.servers)))
    if runs < MIN_ANSWERS:
        return None, f"only {runs} answers from --requests; increase it"
    return samples_fit(exam, Request(ctx.sampled_prompt, SAMPLE_TOKENS, sampling), runs)
