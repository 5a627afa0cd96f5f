"""Plans without weights: sizes computed by hand, the roofline, what methods gain, wrong input."""

import contextlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, last_error_line

from minispec import UserError
from minispec.bench import __main__ as bench
from minispec.bench import measure, shapes
from minispec.bench.shapes import (
    CARDS,
    MODEL_SHAPES,
    Hardware,
    Work,
    make_shape,
    pass_work,
    without_data,
)
from minispec.methods.adaptive import expected_tokens, grow_tree
from minispec.methods.speculative import speedup
from minispec.model import Config, Transformer

# 9 heads in 3 groups, nothing a power of two, and every kind of bias and norm
ODD = Config(50, 63, 3, 9, 3, 6, 101, 64, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)


@pytest.fixture(autouse=True)
def odd_shape(monkeypatch):
    monkeypatch.setitem(MODEL_SHAPES, "qwen2.5-0.5b", ODD)


@pytest.fixture
def planned(capsys):
    """A function that returns the plan that bench prints for these flags, as JSON."""

    def run(flags: str, *more: str) -> dict:
        bench.main([*f"--json --plan --shape {flags}".split(), *more])
        return json.loads(capsys.readouterr().out)["plan"]

    return run


def row_of(plan: dict, method: str) -> dict:
    return next(row for row in plan["methods"] if row["method"].startswith(method))


# ---- sizes ---------------------------------------------------------------------------------------


def test_llama_2_7b_by_hand(planned):
    """A layer has 4 · 4096² weights in q, k, v and o, 3 · 4096 · 11008 in the MLP and 2 · 4096 in
    norms; there are 32. Embedding and lm_head have 32000 · 4096 each. bfloat16 takes two bytes."""
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert layer == 202_383_360
    plan = planned("llama-2-7b")
    (card,) = plan["shares"]
    assert (plan["dtype"], plan["card"], plan["cached"]) == ("bfloat16", "h100", 0)
    assert card["weight_bytes"] == 2 * 6_738_415_616
    assert card["read_bytes"] == 2 * (32 * layer + 131_072_000) == 13_214_679_040
    assert card["row_flops"] == 2 * (32 * layer + 131_072_000)
    assert card["cache_bytes_per_token"] == 2 * 32 * 32 * 128 * 2 == 524_288
    assert card["sent_bytes"] == 0 and card["memory_bound_rows"] == 295  # 989 / 3.35
    # 13.2 GB at 3,350 GB/s, for 1 to 256 rows; 512 · 13.2 GFLOP at 989 TFLOP/s
    *seconds, last = card["seconds"]
    assert plan["rows"][-2:] == [256, 512] and last == pytest.approx(6.84119e-3, rel=1e-5)
    assert seconds == [pytest.approx(3.94468e-3, rel=1e-5)] * 9


@pytest.mark.parametrize(
    "ranks, weights, read, cache, sent",
    [(2, 7_000_825_856, 6_738_673_664, 262_144, 524_288),
     (4, 3_762_823_168, 3_500_670_976, 131_072, 786_432)],
)  # fmt: skip
def test_llama_2_7b_on_several_cards_by_hand(planned, ranks, weights, read, cache, sent):
    """With N = 2: (202,375,168 / 2 + 8,192) · 32 weights in layers, and all 131,072,000 of lm_head.
    Each of 64 all-reduces of 4096 · 2 bytes sends 2 (N - 1) / N of them: 8,192 with N = 2."""
    plan = planned(f"llama-2-7b --nproc {ranks}")
    whole, part = plan["shares"]
    assert (whole["ranks"], whole["weight_bytes"]) == (1, 2 * 6_738_415_616)
    assert (part["ranks"], part["weight_bytes"], part["read_bytes"]) == (ranks, weights, read)
    assert (part["cache_bytes_per_token"], part["sent_bytes"]) == (cache, sent)
    for rows, seconds, messages in zip(plan["rows"], part["seconds"], part["link_seconds"]):
        assert messages == pytest.approx(rows * sent / 450e9)
        bound = max(read / 3.35e12, rows * read / 989e12)  # two FLOP for the two bytes of a weight
        assert seconds == pytest.approx(bound + messages)


def test_grouped_heads_by_hand(planned):
    """llama-3.2-1b: 8 of 32 heads have keys, and lm_head is the embedding."""
    layer = 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    lm_head = 128256 * 2048
    plan = planned("llama-3.2-1b --nproc 8 --card a100")
    whole, part = plan["shares"]
    assert whole["read_bytes"] == 2 * (16 * layer + lm_head) == 2_471_624_704
    assert whole["weight_bytes"] == whole["read_bytes"] + 2 * 2048  # the final norm
    assert whole["cache_bytes_per_token"] == 2 * 16 * 8 * 64 * 2 == 32_768
    assert part["read_bytes"] == 2 * (16 * ((layer - 4096) // 8 + 4096) + lm_head) == 768_737_280
    assert part["cache_bytes_per_token"] == 4_096
    assert part["sent_bytes"] == 16 * 2 * 2048 * 2 * 2 * 7 / 8 == 229_376
    assert whole["seconds"][0] == pytest.approx(2_471_624_704 / 2.039e12)


def test_a_part_is_what_splitting_the_tensors_leaves(planned):
    """q, k, v, gate and up are split by rows, o and down by columns; the rest is whole. Three of
    nine ranks hold the same keys and values."""
    split = re.compile(r".*([qkv]_proj|gate_proj|up_proj)\.(weight|bias)|.*(o|down)_proj\.weight")
    model = Transformer(ODD)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for ranks in 1, 3, 9:
        kv_parts = min(ranks, 3)
        parts = {n: size // (kv_parts if re.search("[kv]_proj", n) else ranks)
                 if split.fullmatch(n) else size for n, size in sizes.items()}  # fmt: skip
        plan = planned(f"qwen2.5-0.5b --dtype float32 --flops 1 --nproc {ranks}")
        share = plan["shares"][-1]
        assert share["weight_bytes"] == 4 * sum(parts.values())
        assert share["cache_bytes_per_token"] == model.new_cache(1).kv.nbytes / kv_parts
        assert share["sent_bytes"] == pytest.approx(3 * 2 * 50 * 4 * 2 * (ranks - 1) / ranks)
        read = sum(n for name, n in parts.items() if "layers." in name) + 101 * 50
        assert share["read_bytes"] == 4 * read


def test_the_cache_is_read_too(planned):
    """2,000 tokens: 2,000 rows of keys and values, and q · k and p · v with each of them."""
    empty, full = (planned(f"llama-3.1-8b --cached {n}")["shares"][0] for n in (0, 2000))
    assert full["read_bytes"] - empty["read_bytes"] == 2000 * 131_072
    assert full["row_flops"] - empty["row_flops"] == 2000 * 32 * 4 * 4096
    assert full["seconds"][0] > empty["seconds"][0]


def test_int8_takes_half_the_bytes(planned):
    whole, rounded = (planned(f"llama-2-7b {flags}") for flags in ("", "--quantize int8"))
    assert rounded["quantize"] == "int8"
    read = [plan["shares"][0]["read_bytes"] for plan in (whole, rounded)]
    assert 1.99 < read[0] / read[1] < 2


def test_a_model_that_fits_on_no_machine_here(planned):
    plan = planned("llama-3.1-70b --nproc 8 --draft llama-3.1-8b")
    assert plan["shares"][0]["weight_bytes"] == pytest.approx(2 * 70553.7e6, rel=1e-6)
    assert plan["shares"][1]["weight_bytes"] > plan["shares"][0]["weight_bytes"] / 8


# ---- the roofline --------------------------------------------------------------------------------


def test_a_pass_is_bound_by_memory_then_by_arithmetic():
    hardware, work = Hardware(bandwidth=10.0, flops=100.0, link=5.0), Work(40, 90, sent_bytes=2.0)
    assert [hardware.seconds(work, n) for n in (1, 4, 5)] == pytest.approx([4.4, 5.6, 4.5 + 2])
    assert hardware.memory_bound_rows(work) == 4
    assert hardware.seconds(Work(40, 90)) == 4.0


def test_flags_replace_the_figures_of_a_card(planned):
    plan = planned("llama-2-7b --card rtx-4090 --bandwidth 20 --link 0.5 --nproc 2")
    assert (plan["bandwidth"], plan["flops"], plan["link"]) == (20e9, CARDS["rtx-4090"].flops, 5e8)
    assert plan["source"].startswith("--bandwidth, --link; otherwise NVIDIA")
    share = plan["shares"][1]
    assert share["seconds"][0] == pytest.approx(6_738_673_664 / 20e9 + 524_288 / 5e8)


def test_a_measured_machine_has_the_same_roofline():
    model = shapes.random_weights(ODD, "float32", "cpu")
    measure.COPY_BYTES, measure.MATMUL_SIZE = 2**20, 64
    measured = measure.measure_machine(model)
    work = pass_work(model)
    assert measured["pass_bytes"] == work.read_bytes
    assert measured["cache_bytes_per_token"] == 2 * 3 * 3 * 6 * 4
    for n, floor in enumerate(measured["floor"]):
        slower = max(measured["memory_floor"], n * measured["compute_floor"])
        assert floor * measured["pass_seconds"] == pytest.approx(slower)


# ---- what methods gain ---------------------------------------------------------------------------


def best_speedup(rates: list[float], cost: float, max_k: int) -> float:
    """By brute force: 1 + a1 + a1 a2 + … tokens for a pass as long as any other, and K drafts."""
    tokens, reached, best = 1.0, 1.0, 1.0
    for k in range(1, max_k + 1):
        reached *= rates[min(k, len(rates)) - 1]
        tokens += reached
        best = max(best, tokens / (1 + k * cost))
    return best


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_a_draft_gains_what_leviathan_et_al_expect(planned, rate):
    """Memory-bound passes cost the same for any number of rows, as theorem 3.8 assumes."""
    plan = planned(f"llama-3.1-8b --acceptance {rate} --draft llama-3.2-1b")
    cost = planned("llama-3.2-1b")["shares"][0]["seconds"][0] / plan["shares"][0]["seconds"][0]
    row = row_of(plan, "speculative (llama-3.2-1b draft)")
    assert row["speedup"] == pytest.approx(max(speedup(rate, k, cost) for k in range(17)))
    assert row["drafts"] > 0 if rate > 0.2 else row["drafts"] == 0
    plain = row_of(plan, "autoregressive")
    assert (plain["speedup"], plain["drafts"], plain["acceptance"]) == (1.0, 0, [])
    assert plain["tokens_per_second"] == pytest.approx(1 / plan["shares"][0]["seconds"][0])
    assert row["tokens_per_second"] == pytest.approx(
        row["speedup"] * plain["tokens_per_second"]
    )  # fmt: skip


def test_drafts_that_cost_nothing(planned):
    row = row_of(planned("llama-2-7b"), "speculative (free draft)")
    assert (row["drafts"], row["acceptance"], row["round_cost"]) == (16, [0.8], 1.0)
    assert row["speedup"] == pytest.approx(speedup(0.8, 16, 0.0))
    assert row["acceptance_source"] == "assumed, see --acceptance"


def test_heads_gain_what_their_config_says(planned, tmp_path):
    """FastMTP's head of llama-2-7b: one layer, 2 · 4096² weights to join its inputs, three norms.
    Medusa's heads: 4096² + 4096 weights each. All of them read lm_head once."""
    rates, accuracy = [0.7, 0.5], [[0.6, 0.2], [0.4, 0.1], [0.3, 0.0]]
    config = {"mtp_acceptance": rates, "medusa_accuracy": accuracy, "version": "2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = str(tmp_path)
    plan = planned("llama-2-7b", "--mtp", folder, "--heads", folder, "--acceptance", "0.1")
    target, lm_head = 6_607_339_520, 131_072_000
    head = 202_383_360 + 2 * 4096**2 + 3 * 4096 + lm_head
    row = row_of(plan, "fastmtp")
    assert (row["acceptance"], row["acceptance_source"]) == (rates, f"measured with {folder}")
    assert row["speedup"] == pytest.approx(best_speedup(rates, head / target, 8))

    row, measured = row_of(plan, "medusa"), torch.tensor(accuracy, dtype=torch.float64)
    cost = (3 * (4096**2 + 4096) + lm_head) / target
    gains = [expected_tokens(measured, grow_tree(measured, n)) / (1 + cost) for n in range(1, 63)]
    assert row["acceptance"] == [0.6, 0.4, 0.3]
    assert row["round_cost"] == pytest.approx(1 + cost)
    assert row["speedup"] == pytest.approx(max(gains)) and row["speedup"] > 1.5


def test_heads_with_their_own_projections_read_those(planned, tmp_path):
    config = {"medusa_accuracy": [[0.5]] * 2, "medusa_num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = row_of(planned("llama-2-7b", "--heads", str(tmp_path)), "medusa")
    cost = 2 * (3 * (4096**2 + 4096) + 131_072_000) / 6_607_339_520
    assert row["round_cost"] == pytest.approx(1 + cost)


def test_without_flags_heads_are_as_right_as_those_of_smollm2(planned):
    plan = planned("llama-2-7b")
    config = json.loads((ROOT / "weights/smollm2/mtp/config.json").read_text())
    assert row_of(plan, "fastmtp")["acceptance"] == config["mtp_acceptance"]
    assert len(row_of(plan, "medusa")["acceptance"]) == 4
    row = row_of(planned("llama-2-7b --acceptance 0.5"), "fastmtp")
    assert (row["acceptance"], row["acceptance_source"]) == ([0.5], "--acceptance")


def test_drafts_that_do_not_pay_are_not_drafted(planned, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_accuracy": [[0.01, 0.0]]}))
    plan = planned("llama-2-7b --acceptance 0", "--heads", str(tmp_path))
    assert [(row["drafts"], row["speedup"]) for row in plan["methods"]] == [(0, 1.0)] * 4


def test_ranks_draft_together(planned):
    """A head's layer is split like the target's; its messages are those of one layer."""
    row = row_of(planned("llama-2-7b --nproc 2 --acceptance 0.9 --link 0.5"), "fastmtp")
    assert row["drafts"] > 0
    weights = 202_375_168 // 2 + 8192 + 2 * 4096**2 + 3 * 4096 + 131_072_000
    draft = 2 * weights / 3.35e12 + 2 * 4096 * 2 / 5e8
    plain, target = (6_738_673_664 / 3.35e12 + n * 524_288 / 5e8 for n in (1, row["drafts"] + 1))
    assert row["round_cost"] == pytest.approx((target + row["drafts"] * draft) / plain)


def test_a_draft_that_ranks_cannot_share_is_whole_on_each():
    args = bench.parse("--shape llama-3.1-70b --plan".split())
    whole, of_rank = (make_shape(args, "llama-3.1-8b", n, draft=True) for n in (1, 64))
    assert pass_work(of_rank, cached=9) == pass_work(whole, cached=9)


# ---- output --------------------------------------------------------------------------------------


def test_the_tables_and_where_their_figures_come_from(capsys):
    bench.main("--shape llama-2-7b --nproc 2 --draft llama-2-7b".split())
    out = capsys.readouterr().out
    facts, sizes, passes, methods = out.strip().split("\n\n")
    assert "llama-2-7b in bfloat16, 0 tokens in the cache, on h100:" in facts
    assert "3,350 GB/s of memory, 989 TFLOP/s, 450 GB/s between ranks (NVIDIA's data" in facts
    assert "lower bounds" in facts and "Acceptance of fastmtp: " in facts
    cells = [re.split(r" {2,}", line.strip()) for line in sizes.splitlines()]
    assert cells[0] == ["one card", "each of 2 ranks"]
    assert cells[1] == ["weights", "13.48 GB", "7.00 GB"]
    assert ["sent per row of a pass", "0 B", "524.29 kB"] in cells
    assert "one card: ms" in passes and "2 ranks: ms for messages" in passes
    assert len({len(line) for line in passes.splitlines()}) == 1  # aligned
    assert methods.splitlines()[2].startswith("speculative (llama-2-7b draft)")
    bench.main("--shape llama-2-7b --plan".split())
    assert "sent per row" not in capsys.readouterr().out


def test_json_says_what_command_made_it(capsys):
    bench.main("--shape llama-2-7b --plan --json".split())
    about = json.loads(capsys.readouterr().out)["about"]
    assert about["command"] == "python -m minispec.bench --shape llama-2-7b --plan --json"


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, free, fits", [(1, 300_000, True), (2, 300_000, False)])
def test_a_model_that_does_not_fit_in_memory_is_refused(monkeypatch, ranks, free, fits):
    """Enough for one model, not for two shards."""
    memory = SimpleNamespace(available=free)
    monkeypatch.setattr(shapes.psutil, "virtual_memory", lambda: memory)
    config = replace(ODD, ranks=ranks)
    line = "the weights need 450.67 kB, but 300.00 kB are free; --plan needs no memory"
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match=line):
        shapes.check_memory(config, torch.float32)


def test_no_data_is_allocated():
    model = without_data(lambda: Transformer(replace(ODD, vocab_size=2**40)), torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight


# ---- wrong input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--nproc 5", "llama-2-7b: 5 processes cannot share this model: its heads, 32, must be"),
        ("--nproc 64", "its heads, 32, must be a multiple of the number of processes"),
        ("--shape qwen2.5-0.5b --nproc 2", "its heads, 9, must be"),
        ("--draft smollm2-135m", "the draft's vocabulary differs"),
        ("--draft nowhere", "--draft nowhere: with --shape, choose one of smollm2-135m,"),
        ("--mtp nowhere", "--mtp nowhere: there is no config.json"),
        ("--heads nowhere", "--heads nowhere: there is no config.json"),
        ("--nproc 0", "must be a whole number"), ("--nproc 1.5", "must be a whole number"),
        ("--bandwidth 0", "must be a number"), ("--flops nan", "must be a number"),
        ("--link -1", "must be a number"), ("--cached -1", "must be a whole number"),
        ("--card gpu", "invalid choice"), ("--acceptance 1.1 --plan", "must be a number"),
        ("--plan --repeats 2", "a plan measures nothing; omit --repeats"),
        ("--plan --markdown", "a plan measures nothing; omit --markdown"),
        ("--plan --bitwise", "a plan measures nothing; omit --bitwise"),
        ("--nproc 2 --device cpu --compile", "a plan measures nothing; omit --device, --compile"),
        ("--plan --dtype float32", "give the card's rate with --flops"),
        ("--plan --dtype int4", "dtype int4 is not supported"),
        ("--plan --model x", "--shape has its own weights and prompt; omit --model"),
    ],
)  # fmt: skip
def test_wrong_flags_are_reported_in_one_line(flags, message, capsys):
    shape = [] if "--shape" in flags else ["--shape", "llama-2-7b"]
    assert message in last_error_line(capsys, lambda: bench.main([*shape, *flags.split()]))


@pytest.mark.parametrize("flag", ["--plan", "--nproc 2", "--cached 0", "--card h100", "--link 1"])
def test_a_plan_requires_a_shape(flag, capsys):
    line = last_error_line(capsys, lambda: bench.main(flag.split()))
    assert line == f"minispec: {flag.split()[0]}: requires --shape"


@pytest.mark.parametrize(
    "flag, config, message",
    [
        ("--mtp", {}, "has no mtp_acceptance; measure it with minispec.distill acceptance"),
        ("--mtp", {"mtp_acceptance": [2]}, "must be a list of rates from 0 to 1"),
        ("--heads", {}, "has no medusa_accuracy; measure it with minispec.distill tree"),
        ("--heads", {"medusa_accuracy": []}, "has no medusa_accuracy"),
        ("--heads", {"medusa_accuracy": [0.5]}, "each head needs a list of accuracies"),
        ("--heads", {"medusa_accuracy": [[0.5], ["x"]]}, "invalid medusa_choices or"),
        ("--heads", {"medusa_accuracy": [[]]}, "must hold rates from 0 to 1"),
        ("--heads", {"medusa_accuracy": [[1.5]]}, "must hold rates from 0 to 1"),
        ("--heads", {"medusa_accuracy": [[float("nan")]]}, "must hold rates from 0 to 1"),
        ("--heads", {"medusa_accuracy": [[0.5]], "medusa_num_layers": -1}, "a whole number from 0"),
    ],
)  # fmt: skip
def test_unsuitable_heads_are_reported_in_one_line(flag, config, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--shape", "llama-2-7b", flag, str(tmp_path)]
    assert message in last_error_line(capsys, lambda: bench.main(flags))
