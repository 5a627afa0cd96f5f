"""What a server draws: is it drawn from the distribution it should be?"""

from minispec.certify.others.client import Refused, Server
from minispec.certify.others.exam import HOT, MINUTES, Row, ServerContext, at_once, known
from minispec.certify.others.scoring import Sequence, least_p, one_end, scored
from minispec.certify.others.statistics import FALSE_ALARM
from minispec.sampling import Sampling, probs

DRAWN, LEAST = 8, 60  # tokens of an answer; answers of a row
SAMPLED = (
    Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8),
    Sampling(1.3, top_k=20, top_p=0.9),
)  # fmt: skip


def half_copied(exam: ServerContext) -> list[int]:
    """The beginning of a text, and again a part of it: what was copied goes on about every other
    time, so that a draft from the prompt is accepted as often as refused."""
    model, texts = exam.model, [ids for each in exam.prompts.values() for ids in each][:8]
    found = [(1.0, texts[0])]
    for ids in texts:
        for n in range(2, min(len(ids), 12)):
            prompt = [*ids[:12], *ids[:n]]
            if exam.as_read(prompt) == prompt:
                p = probs(model.logits(model(prompt)[0, -1:]), Sampling(1.0))[0]
                found.append((abs(float(p[ids[n]]) - 0.5), prompt))
    return min(found)[1]


def seeds_matter(exam: ServerContext) -> Row:
    ids = exam.long()[0]
    drawn = [tuple(exam.server.ask(ids, DRAWN, HOT, seed).tokens) for seed in (1, 1, *range(2, 8))]
    if len(set(drawn)) == 1:
        return False, "repeats itself, whatever the seed: nothing is drawn"
    if drawn[0] != drawn[1]:
        return None, "draws anew for an equal seed: seeds are ignored"
    return True, f"equal for equal seeds, {len(set(drawn[1:]))} of {len(drawn) - 1} different"


class Drawn:
    """What the server, and its baseline, drew: all samplings mixed, eight requests at a time."""

    def __init__(self, exam: ServerContext):
        self.exam = exam
        self.prompt: list[int] = []
        self.found: dict[tuple[Server, Sampling], list[Sequence]] = {}
        self.refused: dict[tuple[Server, Sampling], Refused] = {}

    def draw(self) -> None:
        """All requests, once."""
        exam, ends = self.exam, self.exam.model.config.eos_ids
        self.prompt = half_copied(exam)
        servers = list(filter(None, (exam.server, exam.baseline)))
        left = exam.requests - sum(server.requests for server in servers)
        each = max(0, left // (len(exam.samplings) * len(servers)))
        jobs = [(s, how, i) for i in range(each) for how in exam.samplings for s in servers]

        def one(job: tuple[Server, Sampling, int]) -> Sequence | None:
            server, sampling, i = job
            if exam.late or (server, sampling) in self.refused:
                return None
            seed = 1000 + exam.samplings.index(sampling) * each + i
            try:
                answer = server.ask(self.prompt, DRAWN, sampling, seed)
            except Refused as error:
                self.refused[server, sampling] = error
                return None
            return one_end(answer.tokens + list(ends[:1]) * answer.ended, ends)

        for (server, sampling, _), sequence in zip(jobs, at_once(one, jobs, "drawing")):
            if sequence is not None:
                self.found.setdefault((server, sampling), []).append(sequence)

    def row(self, exam: ServerContext, sampling: Sampling) -> Row:
        """χ² against our distribution, or against what the baseline drew."""
        return self.judge(exam.server, sampling, exam.baseline)

    def plain(self, exam: ServerContext, sampling: Sampling) -> Row:
        passed, detail = self.judge(exam.baseline, sampling, None)
        return passed or None, detail

    def judge(self, server: Server, sampling: Sampling, baseline: Server | None) -> Row:
        if not self.prompt:
            self.draw()
        for each in server, baseline:
            if (each, sampling) in self.refused:
                raise self.refused[each, sampling]
        drawn = self.found.get((server, sampling), [])
        other = self.found.get((baseline, sampling), [])
        if len(drawn) < LEAST or (baseline and len(other) < LEAST):
            why = f"in {MINUTES} minutes" if self.exam.late else "of --requests: ask for more"
            return None, f"only {len(drawn)} answers {why}"
        if any(not s or not known(self.exam, list(s)) for s in drawn + other):
            return False, "an answer is empty, or has a token that there is not"
        found = scored(self.exam.model, self.prompt, drawn + other, sampling, self.exam.tolerance)
        if found.never and not baseline:
            return False, f"drew {found.never}, which has probability 0: are all warpers applied?"
        if found.unsure > 0.01:
            return None, f"rounding may decide what is kept, by {found.unsure:.0%} of the answers"
        p, detail = least_p(found, drawn, other if baseline else None)
        return p > FALSE_ALARM, detail
