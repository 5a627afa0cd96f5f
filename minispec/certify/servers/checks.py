"""Check that a server decodes exactly as the checkpoint it claims to serve."""

import time
from collections.abc import Iterator
from itertools import chain

import torch

from minispec.certify import examination
from minispec.certify.common import NotSupported, Result, Verdict, describe, drafting_result
from minispec.certify.examination import Request, Row, samples_fit
from minispec.certify.near_ties import compare_texts
from minispec.certify.requests import Place
from minispec.certify.servers import context
from minispec.certify.servers.context import ANSWER_TOKENS, ServerContext, ServerDecoder
from minispec.certify.stream import drawn_rows
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.model import Transformer
from minispec.remote.client import RequestError, Server
from minispec.remote.identity import greedy_answer, logprob_differences, mismatch
from minispec.sampling import Sampling

SERVER_CHECKS = "greedy", "limits", "sampled", "distribution"
DRAWN_KINDS = {  # of strata of drawn requests, by check
    "greedy": ("all", "filters", "prompts", "turns", "batches"),
    "limits": ("all", "turns", "batches"),
    "sampled": ("all", "temperature", "filters", "prompts", "turns", "batches"),
}  # fmt: skip
DRAWN_SHARE, LONGEST_DRAWN = 0.3, 300  # of the requests; tokens of a drawn prompt
TOGETHER = 1, 1, 1, 3, 8  # drawn requests that are sent at once
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
    requested = (row for row in rows(ctx, checks, samplings, only) if row.check in checks)
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


def rows(
    ctx: ServerContext, checks: tuple[str, ...], samplings: tuple[Sampling, ...], only: str
) -> Iterator[Row]:
    every = [ids for prompts in ctx.prompts.values() for ids in prompts]
    given = [token for ids in every for token in ids][:1000]
    place = Place(ctx, None, {}, given, 1, ANSWER_TOKENS, LONGEST_DRAWN, ctx.context,
                  ctx.as_received)  # fmt: skip
    drawn = DRAWN_KINDS.keys() & set(checks) if ctx.has_ids else {"greedy"}
    kinds = {check: DRAWN_KINDS[check] for check in DRAWN_KINDS if check in drawn}
    most = int(DRAWN_SHARE * ctx.requests / len(ctx.servers))
    yield from drawn_rows(kinds, only, lambda: [place], TOGETHER, most, 3.0)
    yield Row("bits", "all prompts", ctx, compare_texts, (every, ANSWER_TOKENS), False)
    if not ctx.has_ids:
        for check in "limits", "sampled", "distribution":
            yield Row(check, "all", ctx, needs_ids, (), False)
        return
    for end in ctx.model.config.eos_ids:
        yield Row("limits", f"end token {end}", ctx, obeys_eos, (end,), False)
    yield Row("limits", "logprobs", ctx, logprobs_match, (), False)
    yield Row("distribution", "seeds", ctx, seeds_work, (), False)
    for sampling in samplings:
        yield Row("distribution", describe(sampling), ctx, fits, (sampling, ctx), weight=1.0)


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


def obeys_eos(ctx: ServerContext, end: int) -> Result:
    """Check that an answer ends at once if logit_bias makes this end token the best."""
    bias, eos_ids = {str(end): 100}, ctx.model.config.eos_ids
    for ids in chain(*ctx.prompts.values()):
        before = ctx.tokens(ids, 4)
        if before and before[0] not in eos_ids:
            ctx.remember(Request(ids, 4), logit_bias=bias)
            answer = ctx.decoder.ask(Request(ids, 4), logit_bias=bias)
            if answer.tokens[:1] == before[:1]:
                raise NotSupported("logit_bias has no effect")
            passed = answer.ended and not answer.tokens
            return passed, "ends the answer" if passed else f"continues: {answer.tokens}"
    raise NotSupported("every answer ends at once")


def logprobs_match(ctx: ServerContext) -> Result:
    differences = []
    for ids in next(iter(ctx.prompts.values())):
        answer = ctx.decoder.ask(Request(ids, ANSWER_TOKENS), logprobs=1)
        differences += logprob_differences(ctx.model, ids, answer)
    if not differences:
        raise NotSupported("answers have no logprobs")
    worst = max(differences)
    return worst < ctx.tolerance, f"at most {worst:.2g} from ours, for {len(differences)} tokens"


# ---- samples -------------------------------------------------------------------------------------


def seeds_work(ctx: ServerContext) -> Result:
    """Check that answers differ between seeds, and whether equal seeds give equal answers."""
    ids, seeds = ctx.sampled_prompt, (1, 1, *range(2, 8))
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
