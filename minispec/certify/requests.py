"""Requests drawn from the whole interface of a decoder, and the strata that they belong to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from minispec.certify.examination import Examination, Request
from minispec.generate import decode
from minispec.model import Transformer
from minispec.sampling import Sampling

BLOCKS = 16, 32, 64, 128, 256  # sizes of blocks and pages, around which engines differ
LONGEST = 120  # tokens of an answer
END = 1 << 30  # of no prompt or answer
TEMPERATURES = {  # band -> lowest and highest
    "T below 0.15": (0.05, 0.149), "T from 0.15": (0.15, 0.59), "T from 0.6": (0.6, 0.99),
    "T=1": (1.0, 1.0), "T above 1": (1.01, 2.0),
}  # fmt: skip
FILTERS = {(False, False): "none", (True, False): "top-k", (False, True): "top-p",
           (True, True): "top-k and top-p"}  # fmt: skip
POSITIONS = (0, 1), (1, 4), (4, 12), (12, 24), (24, 64), (64, END)
PROMPT_LENGTHS = (1, 16), (16, 33), (33, 128), (128, END)
LAST_ROWS = 8  # of the context
FIRST_TURN, LATER_TURNS = "first turn", ("answer continued", "prompt repeated")
BATCH_SIZES = 1, 2, 3, 5, 8, 24  # the last is more than most engines run at once


@dataclass
class Place:
    """A checkpoint at which requests are drawn."""

    exam: Examination
    draft: Transformer | None = None  # the draft model next to the checkpoint
    facts: dict[str, str] = field(default_factory=dict)  # about the checkpoint: kind -> stratum
    given: list[int] = field(default_factory=list)  # text for prompts, instead of the model's own
    shortest: int = 0  # max_new_tokens, and the largest one:
    longest: int = LONGEST
    longest_prompt: int = END
    served: int = END  # context of the decoder, if that is smaller than the model's
    received: Callable[[list[int]], list[int]] = list  # a prompt, as the decoder receives it

    @property
    def model(self) -> Transformer:
        return self.exam.model

    @property
    def context(self) -> int:
        return min(self.model.config.context, self.served)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens of random prompts; without end tokens if text is given, as for servers."""
        excluded = self.model.config.eos_ids if self.given else ()
        return [i for i in range(self.model.config.vocab_size) if i not in excluded]

    @cached_property
    def text(self) -> list[int]:
        """What the model likes to say. It often repeats itself, so that drafts are accepted."""
        if self.given:
            return self.given
        room = min(64, self.context - 1)
        return [1, *decode(self.model, None, [1], max_new_tokens=room, ignore_eos=True).tokens]


@dataclass
class Asked:
    """A request at a place, as one of `batch` requests in the same call."""

    place: Place
    request: Request
    turn: str = FIRST_TURN  # of a conversation, or one of LATER_TURNS
    batch: int = 1

    @property
    def certain(self) -> bool:
        """Return whether the tokens are those of greedy decoding."""
        return self.request.sampling.temperature == 0 or self.request.sampling.top_k == 1

    def strata(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield (kind, stratum, first, end): the tokens [first, end) of the answer belong to it."""
        prompt, n, sampling, _ = self.request
        band = (name for name, (_, high) in TEMPERATURES.items() if sampling.temperature <= high)
        levels = self.place.facts | {
            "all": "all tokens",
            "temperature": next(band) if sampling.temperature else "T=0",
            "filters": FILTERS[sampling.top_k > 0, sampling.top_p < 1],
            "batches": f"{'several requests' if self.batch > 1 else 'one request'} in a call",
        }
        if self.batch == 1:  # else others come between two turns
            levels["turns"] = self.turn
        low, high = next(x for x in PROMPT_LENGTHS if x[0] <= len(prompt) < x[1])
        levels["prompts"] = f"{low} to {high - 1} tokens" if high < END else f"from {low} tokens"
        yield from ((kind, stratum, 0, n) for kind, stratum in levels.items())
        for low, high in POSITIONS:
            if low < n:
                name = f"tokens {low + 1} to {high}" if high < END else f"from token {low + 1}"
                name = "first token" if high == 1 else name
                yield "positions", name, low, min(high, n)
        last = max(0, self.place.context - LAST_ROWS - len(prompt))
        if last < n:
            yield "end of the context", f"the last {LAST_ROWS} rows", last, n
        if n == 0:
            yield "lengths", "no tokens", 0, 0


def draw_sampling(rng: Random, vocab: int) -> Sampling:
    """Draw a setting; each band of temperatures is as frequent as the others."""
    low, high = rng.choice([*TEMPERATURES.values(), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)])
    top_k = rng.choice((0, 0, 0, 0, 1, 2, max(3, vocab // 2), vocab))
    top_p = rng.choice((1.0, 1.0, 1.0, 0.5, 0.8, 0.95))
    return Sampling(round(rng.uniform(low, high), 3), min(top_k, vocab), top_p)


def draw_prompt(rng: Random, place: Place, most: int) -> list[int]:
    """Draw a prompt of at most `most` tokens: random ones, a phrase again and again, or the
    model's own text."""
    size = round((most + 1) ** rng.random() - 0.5)
    if rng.random() < 0.3:
        size = rng.choice(BLOCKS) + rng.randint(-1, 1)
    if rng.random() < 0.15:
        size = most + 1 - rng.choice((1, 1, 2, 5, 8, 16))
    size = max(1, min(size, most))
    every, text = place.ids, place.text
    phrase = rng.choices(every, k=rng.randint(1, 8))
    start = rng.randrange(len(text))
    kind = rng.choice((rng.choices(every, k=size), phrase, text[start:] + text[:start]))
    return (kind * size)[:size]


def draw_length(rng: Random, place: Place, room: int) -> int:
    """Draw max_new_tokens where there is `room` left in the context."""
    most = place.longest
    n = rng.choice((round(most ** rng.random()), rng.randint(1, 24), rng.randint(1, most)))
    if rng.random() < 0.03:
        return place.shortest
    return min(n, most, room) if room > 24 or rng.random() < 0.3 else room


def conversation(rng: Random, place: Place, size: int) -> Iterator[list[Asked]]:
    """Yield batches of `size` requests for one to three turns; expects their answers."""
    turns, vocab = rng.choice((1, 1, 2, 3)), place.model.config.vocab_size
    most = place.context - 1 if turns == 1 else place.context // 4
    most = min(most, place.longest_prompt)
    talks = [(FIRST_TURN, draw_prompt(rng, place, most), draw_sampling(rng, vocab))
             for _ in range(size)]  # fmt: skip
    for left in reversed(range(turns)):
        batch = []
        for turn, prompt, sampling in talks:
            prompt = place.received(prompt)
            if 0 < len(prompt) < place.context:
                n = draw_length(rng, place, place.context - len(prompt))
                n = min(n, place.context // 4) if left else n
                request = Request(prompt, n, sampling, rng.getrandbits(31))
                batch.append(Asked(place, request, turn, size))
        answers = yield batch
        more, talks = rng.choices(place.ids, k=rng.choice((0, 0, 1, 3))), []
        for asked, answer in zip(batch, answers):
            prompt, _, sampling, _ = asked.request
            turn = rng.choices(LATER_TURNS, (0.7, 0.3))[0]
            prompt = [*prompt, *answer, *more] if turn == LATER_TURNS[0] else prompt
            sampling = sampling if rng.random() < 0.5 else draw_sampling(rng, vocab)
            talks.append((turn, prompt, sampling))
