"""Every right decoder of the table passes drawn requests, and biased ones fail the rows that see
them."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import BIASED, RIGHT

from minispec.certify.conventions import Conventions
from minispec.certify.functions.checks import Cases, Limits, check_implementation
from minispec.certify.functions.decoder import FunctionDecoder
from minispec.certify.functions.toy_checkpoints import POOL
from minispec.certify.requests import BATCH_SIZES
from minispec.certify.stream import KINDS, Stream, judge_row

FAST = {  # biased decoder -> a row that fails
    "TenFaults": "limits: all", "CapAt48": "limits: all", "OneTooMany": "limits: lengths",
    "UnmaskedPadding": "greedy: batches", "AnyDraftInMixedBatch": "greedy: batches",
    "SwapsBatch": "limits: batches", "OneSettingPerBatch": "greedy: batches",
    "WrongSecondTurn": "greedy: turns", "SampledWithTopP": "greedy: filters",
    "NoEndInDrafts": "limits: end tokens", "LastEndTokenOnly": "limits: end tokens",
    "LongPromptWindow": "greedy: prompts", "BlockBorder": "greedy: prompts",
    "DraftForShortPrompts": "greedy: prompts", "OneModel": "greedy: all",
    "NoTopPWithTopK": "sampled: filters",
}  # fmt: skip
SLOW = {
    "TenFaultsAlone": "limits: all", "KeepsAnswers": "limits: turns",
    "DefaultTopK": "sampled: vocabulary", "WrongResidualLate": "sampled: positions",
    "ArgmaxInLastRows": "sampled: end of the context", "ColdIsGreedy": "sampled: temperature",
    "ConstantSeed": "sampled: all", "FewSeeds": "sampled: positions", "Lenient": "sampled: all",
    "ResamplesFromTarget": "sampled: all", "ExcludesOnly": "sampled: all",
    "SquaredBonus": "sampled: all", "GreedyBonus": "sampled: all", "Typical": "sampled: all",
    "MinP": "sampled: all", "LastRowOfFirstTurn": "sampled: positions",
}  # fmt: skip
EXACT = {  # drawn requests need more tokens, as the bias is small or has either sign
    "ResidualBeforeTopP": "exact: vocab 4, T=1", "OneCoin": "exact: vocab 4, T=0.7",
    "CoinAlsoDraws": "exact: vocab 3, T=1 top-k 0 top-p 1, end token",
    "HotIsClamped": "exact: vocab 3, T=2",
    "TemperatureTwice": "exact: vocab 2, T=1 top-k 0 top-p 1",
    "LossyFirstToken": "exact: vocab 2, T=1 top-k 0 top-p 1",
}  # fmt: skip
# within three minutes: noise repeats in other contexts, and a bias of 0.01 depends on the text
UNSEEN = {"GumbelReused", "Wraps", "RepetitionPenalty"}


@functools.cache
def pool():
    """The checkpoints at which requests are drawn, shared by these tests."""
    root = Path(tempfile.mkdtemp())
    cases = Cases(root, FunctionDecoder(None), None, Limits())
    return root, [cases.place(i) for i in range(len(POOL))]


def verdicts(impl, requests: int, rows: set[str] | None = None, seed: int = 0) -> dict:
    """Return the results of rows of drawn requests, by name."""
    root, places = pool()
    sizes, shared = BATCH_SIZES if hasattr(impl, "many") else (1,), Conventions()
    every = {(check, kind) for check, kinds in KINDS.items() for kind in kinds}
    chosen = {x for x in every if rows is None or ": ".join(x) in rows}
    exams = [replace(place.exam, decoder=FunctionDecoder(impl).at(str(root / place.exam.name)),
                     conventions=shared, evidence={}) for place in places]  # fmt: skip
    places = [replace(place, exam=exam) for place, exam in zip(places, exams)]
    stream = Stream(places, chosen, sizes, requests, seed)
    stream.run(1e9)
    return {": ".join(x): judge_row(exams[0], stream, *x) for x in chosen}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow)
                                  if name not in ("HiddenCoin", "Batched") else name
                                  for name in RIGHT])  # fmt: skip
def test_a_right_decoder_passes_drawn_requests(name):
    found = verdicts(RIGHT[name](), 150)
    assert not [row for row, (passed, _) in found.items() if passed is False], found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_right_decoder_passes_with_any_seed(seed):
    found = verdicts(RIGHT["HiddenCoinOnly"](), 150, seed=seed)
    assert not [row for row, (passed, _) in found.items() if passed is False], found


@pytest.mark.parametrize("name", FAST)
def test_a_fault_of_single_answers_is_found_in_few_requests(name):
    ((passed, detail),) = verdicts(BIASED[name](), 150, {FAST[name]}).values()
    assert passed is False, detail


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_bias_is_found_in_many_tokens(name):
    ((passed, detail),) = verdicts(BIASED[name](), 2500, {SLOW[name]}).values()
    assert passed is False, detail


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_bias_that_depends_on_the_context_is_found_by_exact_rows(name):
    limits = Limits(1e9, outcomes=60, length=3)
    found = list(check_implementation(BIASED[name](), EXACT[name], limits=limits))
    assert found[0].passed is False, found


def test_the_table_is_complete():
    assert len(BIASED) >= 30 and len(RIGHT) >= 20
    assert BIASED.keys() - {*FAST, *SLOW, *EXACT} == UNSEEN
