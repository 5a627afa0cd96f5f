"""Check that a server's samples come from the right distribution."""

from minispec.certify.others.client import RequestError, Server
from minispec.certify.others.context import (
    HIGH_TEMPERATURE,
    TIME_LIMIT_MINUTES,
    Result,
    ServerContext,
    in_vocabulary,
    run_concurrently,
)
from minispec.certify.others.scoring import Tokens, normalise_end, score, smallest_p
from minispec.certify.statistics import FALSE_ALARM
from minispec.sampling import Sampling, probs

SAMPLE_TOKENS, MIN_ANSWERS = 8, 60  # tokens per answer; answers per sampling
SERVER_SAMPLINGS = (
    Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8),
    Sampling(1.3, top_k=20, top_p=0.9),
)  # fmt: skip


def half_predictable_prompt(ctx: ServerContext) -> list[int]:
    """Make a prompt that repeats its own beginning, such that copying the next token is right about
    half the time. Drafts by prompt lookup are then accepted as often as rejected."""
    model, texts = ctx.model, [ids for prompts in ctx.prompts.values() for ids in prompts][:8]
    candidates = [(1.0, texts[0])]
    for ids in texts:
        for n in range(2, min(len(ids), 12)):
            prompt = [*ids[:12], *ids[:n]]
            if ctx.as_received(prompt) == prompt:
                p = probs(model.logits(model(prompt)[0, -1:]), Sampling(1.0))[0]
                candidates.append((abs(float(p[ids[n]]) - 0.5), prompt))
    return min(candidates)[1]


def seeds_work(ctx: ServerContext) -> Result:
    """Check that answers differ between seeds, and whether equal seeds give equal answers."""
    ids = ctx.long_answer()[0]
    answers = [
        ctx.server.ask(ids, SAMPLE_TOKENS, HIGH_TEMPERATURE, seed) for seed in (1, 1, *range(2, 8))
    ]
    samples = [tuple(answer.tokens) for answer in answers]
    if len(set(samples)) == 1:
        return False, "the same answer for every seed: nothing is sampled"
    if samples[0] != samples[1]:
        return None, "different answers for the same seed: seeds are ignored"
    return True, f"equal seeds agree; {len(set(samples))} different answers from 7 seeds"


class Samples:
    """Samples from the server and its baseline, requested concurrently with all samplings mixed."""

    def __init__(self, ctx: ServerContext):
        self.ctx = ctx
        self.prompt: list[int] = []
        self.samples: dict[tuple[Server, Sampling], list[Tokens]] = {}
        self.failures: dict[tuple[Server, Sampling], RequestError] = {}

    def request_all(self) -> None:
        """Send all requests, once."""
        ctx, eos_ids = self.ctx, self.ctx.model.config.eos_ids
        self.prompt = half_predictable_prompt(ctx)
        servers = list(filter(None, (ctx.server, ctx.baseline)))
        requests_left = ctx.requests - sum(server.requests for server in servers)
        per_sampling = max(0, requests_left // (len(ctx.samplings) * len(servers)))
        jobs = [
            (server, sampling, i)
            for i in range(per_sampling) for sampling in ctx.samplings for server in servers
        ]  # fmt: skip

        def sample(job: tuple[Server, Sampling, int]) -> Tokens | None:
            server, sampling, i = job
            if ctx.out_of_time or (server, sampling) in self.failures:
                return None
            seed = 1000 + ctx.samplings.index(sampling) * per_sampling + i
            try:
                answer = server.ask(self.prompt, SAMPLE_TOKENS, sampling, seed)
            except RequestError as error:
                self.failures[server, sampling] = error
                return None
            return normalise_end(answer.tokens + list(eos_ids[:1]) * answer.ended, eos_ids)

        results = run_concurrently(sample, jobs, "sampling")
        for (server, sampling, _), sequence in zip(jobs, results):
            if sequence is not None:
                self.samples.setdefault((server, sampling), []).append(sequence)

    def judge_server(self, ctx: ServerContext, sampling: Sampling) -> Result:
        """Compare with our distribution by χ², or with the baseline's samples."""
        return self.judge(ctx.server, sampling, ctx.baseline)

    def judge_baseline(self, ctx: ServerContext, sampling: Sampling) -> Result:
        passed, detail = self.judge(ctx.baseline, sampling, None)
        return passed or None, detail

    def judge(self, server: Server, sampling: Sampling, baseline: Server | None) -> Result:
        if not self.prompt:
            self.request_all()
        for source in server, baseline:
            if (source, sampling) in self.failures:
                raise self.failures[source, sampling]
        samples = self.samples.get((server, sampling), [])
        other = self.samples.get((baseline, sampling), [])
        if len(samples) < MIN_ANSWERS or (baseline and len(other) < MIN_ANSWERS):
            late = f"within {TIME_LIMIT_MINUTES} minutes"
            why = late if self.ctx.out_of_time else "from --requests; increase it"
            return None, f"only {len(samples)} answers {why}"
        if any(not s or not in_vocabulary(self.ctx, list(s)) for s in samples + other):
            return False, "an answer is empty, or contains a token outside the vocabulary"
        scores = score(self.ctx.model, self.prompt, samples + other, sampling, self.ctx.tolerance)
        if scores.impossible and not baseline:
            detail = f"sampled {scores.impossible}, which has probability 0"
            return False, f"{detail}: are all warpers applied?"
        if scores.uncertain > 0.01:
            share = f"{scores.uncertain:.0%} of the answers"
            return None, f"rounding may decide which tokens are kept in {share}"
        p, detail = smallest_p(scores, samples, other if baseline else None)
        return p > FALSE_ALARM, detail
