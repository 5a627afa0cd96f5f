"""Decoders as black boxes: correct ones pass, and each seeded fault fails a row that covers it."""

import functools
import math
import queue
import random
import re
import sys
import time
from collections import Counter
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from black_boxes import (
    ACCEPTANCE,
    ORDERS,
    accepts_ends,
    after_long_prompts,
    argmax_of_one,
    changed,
    drafting,
    ends_missed_in_drafts,
    first_end_token_only,
    greedy_only,
    in_order,
    keeping_one_model,
    lookup,
    no_top_p_at_1,
    one_from_digests,
    one_seed,
    remembering,
    runs_past_the_end,
    stops_at_ends_of_the_prompt,
    stops_before_the_last_rows,
    wrong_after_64_tokens,
    wrong_at_block_borders,
    wrong_on_long_prompts,
)

from minispec.certify import examination
from minispec.certify.common import Failed, NotSupported, drafting_result
from minispec.certify.conventions import OTHER_ORDERS, Conventions, warper
from minispec.certify.examination import Examination, Request, run_rows, samples_fit
from minispec.certify.functions.checks import (
    BINARY_PROMPT,
    FUNCTION_SAMPLINGS,
    REPETITIVE_PROMPT,
    Cases,
    Limits,
    check_implementation,
    why_too_predictable,
)
from minispec.certify.functions.decoder import SECONDS_AFTER_HANGING, FunctionDecoder
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.certify.report import LOSS, PASSED, SAMPLED, conclude
from minispec.certify.requests import Asked
from minispec.certify.stream import features
from minispec.checkpoints.load import load
from minispec.cli import import_function
from minispec.generate import decode
from minispec.sampling import Sampling, probs


def check(impl, only: str = "", runs: int = 40, outcomes: int = 40, length: int = 3,
          requests: int = 200, **options):  # fmt: skip
    """Return the verdicts. No test depends on the time."""
    limits = Limits(1e9, runs, outcomes, length, requests)
    return list(check_implementation(impl, only, limits=limits, **options))


# ---- correct decoders ----------------------------------------------------------------------------


def numpy_ids(checkpoint, prompt, **options):
    return np.array(lookup(checkpoint, prompt, **options), dtype=np.int64)


@functools.cache
def tokenizer_of(checkpoint):
    return load(checkpoint, "float64", "cpu")[1]


def through_text(checkpoint, prompt, **options):
    """A decoder that works on text: each checkpoint's tokenizer must round-trip all ids."""
    tokenizer = tokenizer_of(checkpoint)
    tokens = lookup(checkpoint, tokenizer.encode(tokenizer.decode(prompt)), **options)
    return tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False)


@pytest.mark.slow
def test_a_correct_black_box_passes():
    verdicts = check(drafting(1), runs=20, outcomes=20, length=2)
    rows = {"exact": 12, "greedy": 8, "limits": 5, "sampled": 10, "statistical": 5, "drafts": 1}
    assert Counter(v.check for v in verdicts) == rows
    assert all(v.passed or "too many outcomes" in v.detail for v in verdicts), verdicts
    assert sum(v.passed is None for v in verdicts) < 6


@pytest.mark.slow
@pytest.mark.parametrize("impl", [numpy_ids, through_text])
def test_any_kind_of_integers_and_a_decoder_of_text_pass(impl):
    for name in "greedy: turns", "limits: end tokens", "sampled: all", "exact: vocab 3, T=0.7":
        assert all(v.passed for v in check(impl, name))


def test_an_engine_may_batch_requests():
    class Engine:
        def many(self, checkpoint, requests):
            sizes.append(len(requests))
            return [lookup(checkpoint, **request) for request in requests]

    sizes: list[int] = []
    (verdict,) = check(Engine(), "statistical: T=0.7")
    assert verdict.passed and sizes == [40], verdict


def test_batches_of_the_wrong_size_and_tuples_of_scalars_are_told_apart():
    class Empty:
        def many(self, checkpoint, requests):
            return []

    (verdict,) = check(Empty(), "limits: all")
    assert verdict.passed is False and "many returned 0 results for" in verdict.detail

    def scalars(checkpoint, prompt, **options):
        return tuple(np.array(lookup(checkpoint, prompt, **options)))

    assert all(v.passed for v in check(scalars, "limits: all", requests=50))


def test_the_baseline_and_the_decoder_share_the_time(tmp_path):
    def note_seconds(exam):
        shares.append(exam.seconds)
        return True, ""

    shares, plain = [], FunctionDecoder(lookup)
    cases = Cases(tmp_path, FunctionDecoder(lookup), plain, Limits())
    rows = cases.rows("", ("exact", "statistical"))
    rows = [row._replace(function=note_seconds, arguments=()) for row in rows]
    assert len(list(run_rows(rows, 100.0))) == len(shares) == 2 * len(rows)
    assert max(shares[: len(rows) + 1]) < 25.0


# ---- seeded faults -------------------------------------------------------------------------------


def when_sampled(other):
    """Prompt lookup if greedy, otherwise another decoder."""
    return lambda *args, **options: (other if options["temperature"] else lookup)(*args, **options)


def fades(checkpoint, prompt, **options):
    tokens = lookup(checkpoint, prompt, **options)
    return tokens[:3] + [0] * len(tokens[3:])


one_token_more = changed(max_new_tokens=lambda options: options["max_new_tokens"] + 1)
LENGTHS, ENDS, LAST = "limits: all", "limits: end tokens", "limits: end of the context"
GREEDY, PROMPTS, POSITIONS = "greedy: all", "greedy: prompts", "greedy: positions"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, right, wrong, stratum",
    [
        (changed(temperature=1.0), [LENGTHS], [GREEDY], ""),
        (wrong_on_long_prompts, [LENGTHS], [PROMPTS], "33 to 127 tokens"),
        (wrong_at_block_borders, [LENGTHS], [PROMPTS], "tokens"),
        (wrong_after_64_tokens, ["limits: lengths"], [POSITIONS], "from token 65"),
        (first_end_token_only, ["limits: lengths"], [ENDS], "in generation_config.json"),
        (runs_past_the_end, ["limits: lengths"], [ENDS], ""),
        (ends_missed_in_drafts, ["limits: lengths"], [ENDS], ""),
        (stops_at_ends_of_the_prompt, ["limits: lengths"], [ENDS], ""),
        (stops_before_the_last_rows, ["limits: lengths"], [LAST], "the last 8 rows"),
        (when_sampled(runs_past_the_end), [GREEDY], [ENDS], ""),
        (when_sampled(fades), [], ["greedy: filters"], "top-k"),
        (one_token_more, [GREEDY], [LENGTHS], ""),
    ],
)  # fmt: skip
def test_a_fault_fails_exactly_the_rows_that_cover_it(fault, right, wrong, stratum):
    for name in right + wrong:
        verdicts = check(fault, name)
        assert verdicts and all(v.passed == (name in right) for v in verdicts), verdicts
        assert all(v.evidence["tokens"] is not None for v in verdicts if not v.passed)
        assert name in right or all(stratum in v.detail for v in verdicts), verdicts


@pytest.mark.slow
def test_a_state_that_is_kept_between_calls_is_detected():
    for fault, row in (remembering(), "limits: turns"), (keeping_one_model(), GREEDY):
        (verdict,) = check(fault, row, requests=400)
        assert verdict.passed is False, verdict


def clamped(low: float, high: float):
    """Temperatures above 0 are clamped."""
    return changed(
        temperature=lambda o: o["temperature"] and min(max(o["temperature"], low), high)
    )


top_k_2 = changed(top_k=lambda options: min(options["top_k"], 2))
no_top_p_with_top_k = changed(top_p=lambda o: 1.0 if o["top_k"] > 1 else o["top_p"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, right, wrong",
    [
        (clamped(0.5, 9.0), "statistical: T=0.7", "sampled: temperature"),
        (clamped(0.0, 1.5), "exact: vocab 3, T=1.5 top-k 2", "exact: vocab 3, T=2"),
        (top_k_2, "exact: vocab 3, T=1.5 top-k 2", "exact: vocab 3, T=2"),
        (changed(top_p=1.0), "exact: vocab 3, T=1.5 top-k 2", "statistical: T=0.7"),
        (no_top_p_with_top_k, "exact: vocab 3, T=0.7", "exact: vocab 3, T=1.5 top-k 3"),
    ],
)
def test_a_missing_warper_is_detected_where_it_matters(fault, right, wrong):
    (verdict,) = check(fault, right)
    assert verdict.passed, verdict
    (verdict,) = check(fault, wrong, runs=200)
    assert verdict.passed is False, verdict


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_warpers_is_named_as_a_convention(order):
    verdicts = check(ORDERS[order], "exact: vocab 3, T=1.5 top-k 3", length=2)
    verdicts += check(ORDERS[order], "statistical: T=1.5 top-k 3")
    verdicts = [v for v in verdicts if v.passed is not True]
    assert verdicts and all(v.passed is None for v in verdicts), verdicts
    assert all("convention: " in v.detail and order in v.detail for v in verdicts)


def test_a_token_that_another_order_leaves_no_choice_is_no_loss():
    """Top-p before temperature leaves one token, which is the same for every seed, so a decoder
    need not draw it."""

    def impl(checkpoint, prompt, **options):
        if options["max_new_tokens"] == 1:
            return argmax_of_one(checkpoint, prompt, **options)
        return ORDERS["top-p before temperature"](checkpoint, prompt, **options)

    (verdict,) = check(impl, "exact: vocab 3, T=1.5 top-k 3", length=2)
    assert verdict.passed is None, verdict


@pytest.mark.parametrize("judged, passed", [(2, None), (3, True)])
def test_an_exact_row_without_time_for_three_tokens_proves_nothing(monkeypatch, judged, passed):
    """Some decoders draft nothing for the second token. Here the time is over once sequences of
    `judged` tokens have been judged."""
    now, calls, resolve = time.monotonic, [], Conventions.resolve
    monkeypatch.setattr(Conventions, "resolve", lambda *a: calls.append(1) or resolve(*a))
    monkeypatch.setattr(time, "monotonic", lambda: now() + 1e12 * (len(calls) >= judged))
    (verdict,) = check(lookup, "exact: vocab 3, T=2 top-k 3 top-p 1", length=4)
    assert verdict.passed is passed and (passed or "time to enumerate three" in verdict.detail)


def test_each_order_keeps_other_tokens():
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = Sampling(1.5, 3, 0.8)
    ours = warper(both)(logits)
    assert torch.allclose(ours, probs(logits, both))
    kept = [ours > 0, *(warper(both, order)(logits) > 0 for order in OTHER_ORDERS.values())]
    assert not any(torch.equal(a, b) for a, b in combinations(kept, 2))


@pytest.mark.slow
def test_orders_that_contradict_each_other_are_a_loss():
    """Top-p comes before the temperature, but only if there is a top-k."""

    def mixed(o):
        return Sampling(1.0 if o["top_k"] else o["temperature"], o["top_k"], o["top_p"])

    verdicts = check(in_order(mixed), "exact: vocab 3, T=", length=2)
    assert any(v.passed is False for v in verdicts), verdicts


@pytest.mark.parametrize("pair", [(wrong_on_long_prompts, lookup), (lookup, wrong_on_long_prompts)])
def test_a_greedy_difference_from_the_baseline_is_a_loss(pair):
    impl, baseline = pair
    ours, row = check(impl, "greedy: prompts", baseline=baseline)
    assert (ours.check, ours.passed) == ("baseline", True if baseline is lookup else None)
    assert row.passed is False and "differs at token" in row.detail and "top-2 gap" in row.detail


def test_a_decoder_that_has_another_model_like_its_baseline_does_not_fail():
    """Its texts have other tokens, so the checkpoint's end tokens may never come up."""

    @functools.cache
    def another_model(checkpoint):
        model, _ = load(checkpoint, "float64", "cpu")
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        return model

    def impl(checkpoint, prompt, **options):
        return decode(another_model(checkpoint), None, prompt, **options).tokens

    rows = [v for v in check(impl, requests=100, checks=("greedy", "limits"), baseline=impl)]
    assert all(v.passed for v in rows if v.check != "baseline"), rows
    assert any(v.passed is None for v in rows if v.check == "baseline"), rows


@pytest.mark.slow
def test_with_a_baseline_a_deviating_convention_passes():
    """A decoder that ignores top-p in both plain and speculative decoding is lossless."""
    other = changed(top_p=1.0)
    rows = check(other, "exact: vocab 3, T=1.5", length=2, baseline=other)
    rows += check(other, "statistical: T=0.7", baseline=other)
    assert all(v.passed is not False for v in rows if v.check != "baseline"), rows
    differ = [v.case for v in rows if v.check == "baseline" and not v.passed]
    assert len(differ) == 2 and all("top-p 0.8" in case for case in differ)
    rows = check(lookup, "exact: vocab 3, T=0.7", length=2, baseline=other)
    assert [v.passed for v in rows if v.check == "exact"] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [lambda tokens: tokens[:-1], lambda tokens: [99, *tokens[1:]]])
def test_missing_and_unknown_tokens_fail_the_rows_of_samples(wrong):
    def impl(checkpoint, prompt, **options):
        return wrong(lookup(checkpoint, prompt, **options))

    for name in "exact: vocab 3, T=0.7", "statistical: T=0.7":
        (verdict,) = check(when_sampled(impl), name)
        assert verdict.passed is False, verdict


# ---- sampling faults -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ACCEPTANCE)
def test_a_wrong_acceptance_has_its_exact_bias(mistake):
    fault = drafting(2, **dict([ACCEPTANCE[mistake]]))
    case = "vocab 2, T=1 top-k 0 top-p 1"
    if mistake == "reduced":  # to two of three tokens
        case = "vocab 3, T=2 top-k 3 top-p 1"
    verdict, *_ = check(fault, f"exact: {case}", outcomes=60, length=4)
    assert verdict.passed is False and verdict.detail.startswith("TV "), verdict


@pytest.mark.slow
def test_a_correct_acceptance_is_proven_past_its_drafts():
    case = "exact: vocab 2, T=1 top-k 0 top-p 1, good draft"
    verdict, _ = check(drafting(2), case, outcomes=60, length=5)
    assert verdict.passed and "% of 5 tokens" in verdict.detail, verdict


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["flat bonus", "best bonus"])
def test_a_wrong_bonus_token_after_five_drafts_is_detected(mistake):
    """An earlier version ended its rows after six tokens, in which five drafts and their bonus
    token rarely occur."""
    fault = drafting(5, **dict([ACCEPTANCE[mistake]]))
    (verdict, _) = check(fault, "statistical: T=1 top-k 0 top-p 1, good", runs=1600)
    assert verdict.passed is False, verdict


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["lenient", "typical", "flat bonus"])
def test_a_wrong_acceptance_is_detected_in_samples(mistake):
    fault = drafting(2, **dict([ACCEPTANCE[mistake]]))
    names = f"statistical: {T_1}", f"statistical: {T_1}, good draft"
    assert any(v.passed is False for name in names for v in check(fault, name, runs=1600))


T_1, END_TOKEN, AFTER_LONG = "T=1 top-k 0 top-p 1", ", end token", ", long prompt"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, correct, row, unseen",
    [
        (no_top_p_at_1, lookup, "exact: vocab 3, T=1 top-k 0 top-p 0.8", "exact: vocab 3, T=0.7"),
        (no_top_p_at_1, lookup, "statistical: T=1 top-k 0 top-p 0.8", "statistical: T=0.7"),
        (argmax_of_one, lookup, f"exact: vocab 2, {T_1}", f"statistical: {T_1}"),
        (accepts_ends, drafting(1), f"exact: vocab 3, {T_1}{END_TOKEN}", f"exact: vocab 2, {T_1}"),
        (accepts_ends, drafting(1), "sampled: end tokens", f"statistical: {T_1}"),
        (after_long_prompts, drafting(1), f"exact: vocab 3, {T_1}{AFTER_LONG}",
         f"exact: vocab 2, {T_1}"),
        (one_seed, lookup, f"statistical: {T_1}", "limits: all"),
    ],
)  # fmt: skip
def test_a_bias_that_most_rows_miss_has_a_row_that_sees_it(fault, correct, row, unseen):
    check_name = row.partition(":")[0]
    assert conclude(check(fault, row, runs=800)) == (LOSS, f"LOSS in {check_name} (1)")
    for impl, name in (correct, row), (fault, unseen):
        code, verdict = conclude(check(impl, name, runs=200))
        assert code == PASSED and verdict.startswith("no loss found"), (name, verdict)


@pytest.mark.parametrize("salt, passed, snippet", [
    (3, None, "from sources other than"), (4, True, "TV "),
])  # fmt: skip
def test_a_single_token_may_be_drawn_from_a_hidden_source(salt, passed, snippet):
    """Its first calls may agree by chance, as if nothing were drawn."""
    verdict, *_ = check(partial(one_from_digests, salt=salt), f"exact: vocab 2, {T_1}, good draft")
    assert verdict.passed is passed and snippet in verdict.detail, verdict


class Drawn:
    """An engine that draws tokens from our distributions, in microseconds; `bias` is moved from the
    most to the least probable token."""

    def __init__(self, model, bias: float):
        self.model, self.bias, self.rows = model, bias, {}

    def row(self, tokens: tuple[int, ...], position: int) -> list[float]:
        if (tokens, position) not in self.rows:
            p = probs(self.model.logits(self.model([*tokens])[0, -1:]), Sampling(1.0))[0]
            if position == 2:
                moved = min(self.bias, float(p.max()))
                p[p.argmax()], p[p.argmin()] = p.max() - moved, p.min() + moved
            self.rows[tokens, position] = p.tolist()
        return self.rows[tokens, position]

    def many(self, checkpoint, requests):
        return [self.one(**request) for request in requests]

    def one(self, prompt, max_new_tokens, seed, **options):
        rng, tokens = random.Random(seed), tuple(prompt)
        for position in range(max_new_tokens):
            row = self.row(tokens, position)
            tokens = (*tokens, *rng.choices(range(len(row)), row))
        return list(tokens[len(prompt) :])


def fitted(bias: float, runs: int, tmp_path):
    folder, model = write_checkpoint(tmp_path, 22, vocab=4)
    exam = Examination(FunctionDecoder(Drawn(model, bias)).at(folder), model)
    return samples_fit(exam, Request(REPETITIVE_PROMPT, 4, Sampling(1.0)), runs)


@pytest.mark.slow
def test_runs_are_doubled_until_a_small_bias_is_detected(tmp_path):
    passed, detail = fitted(0.06, 10**6, tmp_path)
    assert passed is False, detail
    assert fitted(0.06, 400, tmp_path)[0]  # an earlier version always stopped here
    passed, detail = fitted(0.0, 10**6, tmp_path)
    assert passed and re.search(r"a TV of 0.0[123] at one token", detail), detail


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [*FUNCTION_SAMPLINGS, Sampling(2.0, top_k=4)])
def test_distributions_that_are_too_sharp_are_not_passed(sampling, tmp_path):
    """They allow one sequence only, which a biased decoder finds as well."""
    folder, model = write_checkpoint(tmp_path, 22, vocab=4, flatness=50.0)
    exam = Examination(FunctionDecoder(lookup).at(folder), model)
    passed, detail = samples_fit(exam, Request(REPETITIVE_PROMPT, 4, sampling), 100)
    assert passed is None and "proves little" in detail
    assert "proves little" in why_too_predictable(model, warper(sampling))


# ---- exceptions, options and reports -------------------------------------------------------------


def raises_late(checkpoint, prompt, **options):
    yield 1
    raise ValueError("no such luck")


def test_an_exception_fails_the_rows_of_its_requests():
    verdicts = check(when_sampled(raises_late), checks=("greedy", "limits", "sampled"), requests=60)
    wrong = {(v.check, v.case): v.detail for v in verdicts if v.passed is False}
    assert ("sampled", "turns") in wrong and ("limits", "turns") in wrong
    message = "raised ValueError: no such luck (prompt of"
    assert all(message in detail for detail in wrong.values()), verdicts
    assert not [v for v in verdicts if v.check == "sampled" and v.passed]
    for function, snippet in (
        (lambda *_, **options: "hello", "must return token ids, not 'hello'"),
        (lambda *_, **options: sys.exit(0), "raised SystemExit: 0"),
        (raises_late, "raised ValueError: no such luck"),
    ):
        (verdict,) = check(function, LENGTHS)
        assert not verdict.passed and snippet in verdict.detail


def waits_forever(checkpoint, prompt, **options):
    queue.Queue().get()


def test_a_call_that_does_not_return_fails_and_a_row_that_takes_long_is_skipped(monkeypatch):
    decoder = FunctionDecoder(waits_forever, seconds=[0.1])
    with pytest.raises(Failed, match=r"did not return within 0 s \(prompt of 1 tokens, max_new_t"):
        decoder.batch([Request([1], 1)])
    assert decoder.seconds == [SECONDS_AFTER_HANGING]
    monkeypatch.setattr(examination, "ROW_SECONDS", 0.1)
    monkeypatch.setattr(examination, "PATIENCE", 0)
    (verdict,) = check_implementation(waits_forever, "limits: lengths", limits=Limits(0.1))
    assert verdict.passed is None and "not enough time: the row did not return" in verdict.detail
    time.sleep(0.2)  # no alarm is left


def test_an_exception_is_reported_with_the_decoders_own_line(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text("import torch\n\n\n@torch.no_grad()\ndef decode(*_, **options):\n"
                    "    return torch.nn.functional.linear(torch.ones(2), torch.ones(3, 4))\n")
    (verdict,) = check(import_function(f"{file}:decode"), "limits: lengths")
    assert verdict.detail.startswith("no tokens: raised RuntimeError: ")
    assert verdict.detail.endswith("; engine.py, line 6)")


def test_unsupported_options_are_skipped():
    verdicts = check(greedy_only, LENGTHS) + check(greedy_only, "T=0.")
    verdicts += check(greedy_only, "sampled: turns")
    assert {v.passed for v in verdicts if v.check == "limits"} == {True}
    assert {v.passed for v in verdicts if v.check in SAMPLED} == {None}
    assert {v.detail for v in verdicts if v.passed is None} == {"not supported: no sampling"}
    with pytest.raises(NotSupported):
        FunctionDecoder(greedy_only).batch([Request([1], 1, Sampling(1.0))])


def test_temperature_1_is_a_kind_of_request_of_its_own():
    def kind(temperature):
        return features(Asked(None, Request([1], 1, Sampling(temperature))))

    assert kind(0.0) != kind(1.0) != kind(0.9) == kind(1.5)


def test_an_exception_fails_the_exact_rows_too():
    def not_for_one_token(checkpoint, prompt, **options):
        if options["max_new_tokens"] == 1:
            raise ValueError("one is too few")
        return lookup(checkpoint, prompt, **options)

    def draws_from_nothing(checkpoint, prompt, **options):
        return torch.multinomial(torch.full((3,), math.nan), 2, True).tolist()

    for function, snippet in (not_for_one_token, "one is too few"), (draws_from_nothing, "probab"):
        (verdict,) = check(function, "exact: vocab 3, T=0.6")
        assert verdict.passed is False and snippet in verdict.detail
    with pytest.raises(Failed, match="probab"):
        FunctionDecoder(draws_from_nothing).batch([Request(BINARY_PROMPT, 1)])


def test_a_run_without_drafts_or_without_rejections_is_reported():
    for counts, passed, snippet in (
        ((0, 0), None, "no token was drafted"), ((5, 5), None, "no rejection"),
        ((5, 2), True, "drafts accepted"),
    ):  # fmt: skip
        (_, verdict) = check(partial(counted, counts=counts), LENGTHS, requests=10)
        assert verdict.passed is passed and snippet in verdict.detail
    assert drafting_result(5, 2) == (True, "2 of 5 drafts accepted")


def counted(checkpoint, prompt, *, counts, max_new_tokens, **options):
    """Reports these counts after the first token of an answer, and no drafts for no tokens."""
    tokens = lookup(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens, *(counts if tokens else (0, 0)))
