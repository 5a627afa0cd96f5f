"""A server's decoding, from outside: is it that of the checkpoint it says it serves?"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from minispec.certify.compare import divergence
from minispec.certify.others.blackbox import drafts_something, short
from minispec.certify.others.client import (
    Answer,
    ConnectionLost,
    NotOffered,
    Refused,
    Server,
    ended_by,
)
from minispec.certify.others.drawn import DRAWN, SAMPLED, Drawn, seeds_matter
from minispec.certify.others.exam import (
    AT_ONCE,
    HOT,
    LENGTH,
    MINUTES,
    Row,
    ServerContext,
    at_once,
    known,
    prompts_for,
    tolerance_of,
    with_eos,
    worst,
)
from minispec.certify.others.scoring import answer_logits, gaps
from minispec.certify.ours.cases import GREEDY
from minispec.certify.ours.checks import Verdict
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Sampling

CHECKS = "greedy", "limits", "load", "distribution"
REQUESTS = 2000  # about as many, unless told otherwise

# ---- the examination -----------------------------------------------------------------------------


def check_server(
    server: Server, model: Transformer, tokenizer: Tokenizer | None, baseline: Server | None = None,
    requests: int = REQUESTS, precision: float | torch.dtype = torch.float32,
    checks: tuple[str, ...] = CHECKS, samplings: tuple[Sampling, ...] = SAMPLED,
) -> Iterator[Verdict]:  # fmt: skip
    """Verdicts on a server of `model`. With a baseline, a server of the same model that decodes
    plainly, that is what it must equal; where that differs from ours, a row says so. At most about
    so many requests are made."""
    prompts, servers = prompts_for(model, tokenizer), list(filter(None, (server, baseline)))
    for each in servers:
        each.probe(next(iter(prompts.values()))[0])
    exam = ServerContext(server, baseline, model, tokenizer, 0.0, requests, samplings, checks, {})
    free_rows = min(model.config.context, *(each.context for each in servers)) - LENGTH
    for kind, each in prompts.items():
        if fitting := [read for ids in each if 0 < len(read := exam.as_read(ids)) <= free_rows]:
            exam.prompts[kind] = fitting
    if not exam.prompts:
        raise UserError(f"a context of {free_rows + LENGTH} tokens leaves no room for prompts")
    exam.tolerance = tolerance_of(precision, model, exam.prompts)
    before = server.drafts()
    for check, case, row, *given in rows(exam):
        try:
            passed, detail = examined(row, exam, *given)
        except ConnectionLost as error:
            yield Verdict(check, case, False, str(error))
            return
        yield Verdict(check, case, passed, detail)
        if check == "server" and not passed:
            return  # of another model
    after = server.drafts()
    passed, detail = speculated(before, after)
    yield Verdict("drafts", f"in {server.requests} requests", passed, detail)


def examined(row: Callable, exam: ServerContext, *given) -> Row:
    """One row's verdict; what the server refuses fails it."""
    if exam.late:
        return None, f"not asked: {MINUTES} minutes are over (--requests makes it shorter)"
    try:
        return row(exam, *given)
    except NotOffered as error:
        return None, f"not offered: {error}"
    except Refused as error:
        return False, str(error)


def rows(exam: ServerContext) -> Iterator[tuple]:
    """(check, case, function, its arguments after the exam)."""
    yield "server", str(exam.server.name), is_this_model
    ids = all(each.gives_ids for each in (exam.server, exam.baseline) if each)
    for kind, prompts in exam.prompts.items() if "greedy" in exam.checks else ():
        if exam.baseline:
            yield "baseline", f"greedy, {kind}", baseline_is_greedy, prompts
        yield "greedy", kind, is_greedy, prompts
    if "limits" in exam.checks:
        yield "limits", "stop strings", stops
        yield "limits", "streaming", streams
        yield from limits_of_ids(exam) if ids else [("limits", "all others", needs_ids)]
    if "load" in exam.checks:
        yield "load", f"{AT_ONCE} at once, of mixed temperatures", bears_load
    if "distribution" in exam.checks:
        yield from samples(exam) if ids else [("distribution", "all", needs_ids)]


def limits_of_ids(exam: ServerContext) -> Iterator[tuple]:
    yield "limits", "lengths", keeps_lengths
    yield "limits", "where greedy answers end", ends
    for end in exam.model.config.eos_ids:
        yield "limits", f"end token {end}", stops_at, end
    yield "limits", "logprobs", gives_logprobs
    yield "limits", "several choices", chooses


def samples(exam: ServerContext) -> Iterator[tuple]:
    yield "distribution", "seeds", seeds_matter
    drawn = Drawn(exam)
    for sampling in exam.samplings:
        if exam.baseline:
            yield "baseline", f"distribution, {short(sampling)}", drawn.plain, sampling
        yield "distribution", short(sampling), drawn.row, sampling


def needs_ids(exam: ServerContext) -> Row:
    raise NotOffered("token ids in its answers")


# ---- the right model -----------------------------------------------------------------------------


def is_this_model(exam: ServerContext) -> Row:
    """Its logprobs, or where it gives none its first tokens, are those of the checkpoint."""
    server, off, best, counted = exam.server, [], [], []
    asked = next(iter(exam.prompts.values()))[:5]
    for ids in asked:
        try:
            answer = server.ask(ids, 4, logprobs=1)
        except Refused:
            answer = server.ask(ids, 4)
        found = logprob_differences(exam, ids, answer)
        off += found or []
        first = with_eos(exam, ids, answer)[:1]
        best.append(bool(first) and worst(exam, ids, first)[0] < exam.tolerance)
        counted.append((len(ids), answer.prompt_tokens or len(ids)))
    how = "token ids" if server.takes_ids else "text"
    gives = "token ids" if server.gives_ids else "text, read by our tokenizer"
    said = f"takes {how}, gives {gives}; tolerance {exam.tolerance:.2g}"
    typical = sorted(off)[len(off) // 2] if off else 0.0
    if typical > max(0.5, exam.tolerance) and sum(best) < len(best):
        return False, f"another model or other weights: logprobs differ from ours by {typical:.1f}"
    if sum(best) < len(best) / 2:
        return False, (
            f"another model, other weights, or wrong from the first token on: of {len(best)} "
            f"prompts {sum(best)} go on as ours"
        )
    for ours, theirs in counted:
        if ours != theirs:
            said = f"it reads {ours} tokens of prompt as {theirs}"
            return False, f"{said}: does it add a BOS, or a chat template?"
    return True, said


def logprob_differences(exam: ServerContext, prompt: list[int], answer: Answer) -> list[float] | None:
    """How far each of its logprobs is from ours; None where it gives none."""
    n = min(len(answer.tokens), len(answer.logprobs or []))
    if n == 0 or not answer.given or not known(exam, answer.tokens):
        return None
    logits = answer_logits(exam.model, prompt, answer.tokens[:n])
    ours = logits.log_softmax(-1)[torch.arange(n), answer.tokens[:n]]
    return (ours - torch.tensor(answer.logprobs[:n], dtype=torch.float64)).abs().tolist()


# ---- greedy --------------------------------------------------------------------------------------


def is_greedy(exam: ServerContext, prompts: list[list[int]]) -> Row:
    """Every token of every answer, each asked for twice, is the best of its place, but for ties.
    With a baseline, the answers are the baseline's, but for ties."""
    same, ties, total = 0, 0, 0
    for ids in prompts:
        answers = [exam.server.ask(ids, LENGTH) for _ in range(2)]
        exam.answers.append((ids, answers[0]))
        plain = exam.baseline and with_eos(exam, ids, exam.baseline.ask(ids, LENGTH))
        for answer in answers:
            tokens = with_eos(exam, ids, answer)
            if not tokens:
                return False, f"{len(ids)} tokens of prompt: no tokens"
            if plain is None:
                gap, at, others = worst(exam, ids, tokens)
            else:
                n = min(len(plain), len(tokens))
                at, gap = divergence(exam.model, ids, tokens[:n], plain[:n])
                others = at is not None
            if others and gap >= exam.tolerance:
                where = f"{len(ids)} tokens of prompt, token {at}: {tokens[at : at + 3]}"
                return False, f"{where}, {gap:.3g} below the best: {exam.no_tie}"
            same, ties, total = same + (not others), ties + others, total + len(tokens)
    low, high = interval(same, 2 * len(prompts))
    of = "its baseline's" if exam.baseline else "ours"
    detail = f"{same} of {2 * len(prompts)} answers are {of} ({low:.0%} to {high:.0%})"
    return True, f"{detail}; {ties} ties in {total} tokens"


def baseline_is_greedy(exam: ServerContext, prompts: list[list[int]]) -> Row:
    plain = replace(exam, server=exam.baseline, baseline=None, answers=[])
    passed, detail = is_greedy(plain, prompts)
    return passed or None, detail


def interval(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z, p = 1.96, hits / n
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n)


# ---- limits --------------------------------------------------------------------------------------


def keeps_lengths(exam: ServerContext) -> Row:
    ids = exam.long()[0]
    answers = [exam.server.ask(ids, n) for n in range(1, 12)]
    if wrong := [n for n, answer in enumerate(answers, 1) if len(answer.tokens) != n]:
        return False, f"max_tokens {wrong[:4]} not kept"
    if reasons := [answer.reason for answer in answers if answer.ended]:
        return False, f"max_tokens 1 to 11 kept, but finish_reason is {reasons[0]!r}"
    return True, f"max_tokens 1 to 11 kept{unseen(answers)}"


def unseen(answers: list[Answer]) -> str:
    """What could not be checked, as the server did not say why its answers ended."""
    silent = sum(answer.reason is None for answer in answers)
    return f"; {silent} without a finish_reason, which could not be checked" if silent else ""


def ends(exam: ServerContext) -> Row:
    """Every greedy answer ended where an end token was the best, and nowhere else."""
    for ids, answer in exam.greedy():
        if wrong := wrong_end(exam, ids, answer):
            return False, f"{len(ids)} tokens of prompt: {wrong}"
    answers = [answer for _, answer in exam.answers]
    ended = f"{sum(answer.ended for answer in answers)} of {len(answers)} greedy answers"
    return True, f"{ended} ended by an end token{unseen(answers)}"


def wrong_end(exam: ServerContext, prompt: list[int], answer: Answer) -> str:
    """What is wrong with where an answer ends, if anything is; and if it gives ids."""
    eos, said = exam.model.config.eos_ids, answer.tokens
    if not answer.given or not known(exam, said):
        return ""
    if late := [token for token in said if token in eos]:
        return f"goes on after the end token {late[0]}"
    if answer.ended:
        below = [gaps(exam.model, prompt, [*said, end])[-1] for end in eos]
        if min(below, default=math.inf) >= exam.tolerance:
            why = f"finish_reason {answer.reason!r}"
            return f"ends after {len(said)} tokens, by no end token ({why})"
    elif len(said) != LENGTH:
        return f"{len(said)} tokens instead of {LENGTH}"
    return ""


def stops_at(exam: ServerContext, end: int) -> Row:
    """An end token that a bias makes the best ends the answer at once."""
    ids, before = exam.long()
    answer = exam.server.offered("logit_bias", ids, 4, logit_bias={str(end): 100})
    if answer.tokens[:1] == before.tokens[:1]:
        raise NotOffered("logit_bias has no effect")
    passed = answer.ended and not answer.tokens
    wrong = f"goes on: {answer.tokens}, finish_reason {answer.reason!r}"
    return passed, f"ends the answer{unseen([answer])}" if passed else wrong


def stops(exam: ServerContext) -> Row:
    """Strings that begin within one token and end within another end the answer before them."""
    if exam.tokenizer is None:
        return None, "no tokenizer: no text"
    tried = []
    for ids, answer in exam.greedy():
        if not known(exam, answer.tokens):
            return False, f"{len(ids)} tokens of prompt: an id that is not in the vocabulary"
        for n in range(2, LENGTH, 7):
            border = len(exam.tokenizer.decode(answer.tokens[:n]))
            stop = answer.text[max(0, border - 2) : border + 2]
            if len(stop) < 2 or "\ufffd" in stop:  # half a character
                continue
            expected = answer.text[: answer.text.index(stop)]
            found = exam.server.ask(ids, LENGTH, stop=[stop])
            tried.append(found)
            if found.text != expected and exam.server.ask(ids, LENGTH).text != answer.text:
                raise NotOffered("the same text twice: rounding decides")
            if found.text != expected:
                return False, f"stop {stop!r}: {found.text[-30:]!r} instead of {expected[-30:]!r}"
            if found.reason and not found.ended:
                return False, f"stop {stop!r}: the text ends there, by {found.reason!r}"
        if len(tried) > 8:
            break
    return bool(tried) or None, f"{len(tried)} strings across the borders of tokens{unseen(tried)}"


def streams(exam: ServerContext) -> Row:
    asked = exam.greedy()[:6]
    for ids, answer in asked:
        text, reason = exam.server.streamed(ids, LENGTH)
        if text != answer.text and exam.server.ask(ids, LENGTH).text != answer.text:
            raise NotOffered("the same text twice: rounding decides")
        if text != answer.text:
            return False, f"{len(ids)} tokens of prompt: {text[-30:]!r}, not {answer.text[-30:]!r}"
        if ended_by(reason) != ended_by(answer.reason):
            said = f"finish_reason {reason!r}, and {answer.reason!r} if it is not streamed"
            return False, f"{len(ids)} tokens of prompt: {said}"
    said = f"{len(asked)} streamed answers are those that came at once"
    return True, said + unseen([answer for _, answer in asked])


def gives_logprobs(exam: ServerContext) -> Row:
    found = []
    for ids in next(iter(exam.prompts.values())):
        answer = exam.server.offered("logprobs", ids, LENGTH, logprobs=1)
        found += logprob_differences(exam, ids, answer) or []
    if not found:
        raise NotOffered("logprobs")
    passed = max(found) < exam.tolerance
    return passed, f"of {len(found)} tokens, at most {max(found):.2g} from ours"


def chooses(exam: ServerContext) -> Row:
    ids = exam.long()[0]
    exam.server.offered("n", ids, 1, sampling=HOT, n=2)
    found = exam.server.choices(ids, DRAWN, HOT, seed=1, n=4)
    different = len({tuple(each.tokens) for each in found})
    return len(found) == 4 and different > 1, f"{different} different of {len(found)}, n = 4"


# ---- load ----------------------------------------------------------------------------------------


def bears_load(exam: ServerContext) -> Row:
    """Greedy answers are what they were alone while hot ones are drawn beside them."""
    every = [ids for each in exam.prompts.values() for ids in each][:16]
    jobs = [(ids, sampling) for ids in every for sampling in (GREEDY, HOT)]
    found = at_once(lambda job: exam.server.ask(job[0], LENGTH, job[1]), jobs)
    others = 0
    for (ids, sampling), answer in zip(jobs, found):
        if sampling is GREEDY:
            gap, at, several = worst(exam, ids, with_eos(exam, ids, answer))
            others += several > 0
            wrong = f"token {at} is {gap:.3g} below the best" if gap >= exam.tolerance else ""
            if wrong := wrong or wrong_end(exam, ids, answer):
                return False, f"{len(ids)} tokens of prompt: {wrong}"
    return True, f"{len(every)} greedy answers beside as many hot ones, {others} with ties"


def speculated(before: tuple[int, int] | None, after: tuple[int, int] | None) -> Row:
    """Whether what was tested is speculation at all, as far as the server tells."""
    if after is None:
        return None, "it tells of no drafts: what passed may be plain decoding"
    drafted, accepted = (b - a for a, b in zip(before or (0, 0), after))
    return drafts_something(int(drafted), int(accepted))
