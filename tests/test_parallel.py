"""Ranks that share a model generate what one process generates. In most tests the ranks are threads
of this process; the slow ones start processes with torchrun."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import (
    NEEDS,
    TOKENIZER,
    VOCAB,
    equal_up_to_rounding,
    random_model,
    random_tokens,
    torchrun,
)

from minispec import UserError, distributed, optimize
from minispec.bench import __main__ as bench
from minispec.bench import measure, shapes, tables
from minispec.certify.toys import random_eagle3_head, random_medusa_heads, random_mtp_head
from minispec.checkpoints.eagle3 import load_eagle3, save_eagle3
from minispec.checkpoints.heads import load_medusa, load_mtp, save_medusa, save_mtp
from minispec.checkpoints.load import load, save
from minispec.distributed import Group
from minispec.generate import METHODS, decode, stream
from minispec.generate.__main__ import main
from minispec.generate.terminal import show
from minispec.methods import find_method
from minispec.model import Transformer, count_parameters

SHAPE = {"heads": 8, "kv_heads": 4, "intermediate_size": 24, "vocab_size": VOCAB, "bos_id": 256}
FAMILIES = {
    "llama": {},
    "llama with biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied": False,
                          "kv_heads": 1},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "kv_heads": 2},
    "mimo": {"model_type": "mimo", "qkv_bias": True, "tied": False},
}


QUICK = "llama with biases"  # the others take seconds each
PARAMETERS = [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]


@pytest.fixture(scope="module", params=PARAMETERS)
def family(request, tmp_path_factory) -> Path:
    """The folder of a random model of each family, next to those of a draft and of heads."""
    return write_family(tmp_path_factory.mktemp("models"), FAMILIES[request.param])


def write_family(folder: Path, changes: dict) -> Path:
    model = random_model(3, **SHAPE | changes)
    save(model, TOKENIZER, folder / "model")
    save(random_model(4, **SHAPE | changes | {"layers": 1}), TOKENIZER, folder / "draft")
    head, heads = random_mtp_head(model, 2), random_medusa_heads(model, 1)
    save_mtp(head, folder / "mtp", "model", TOKENIZER, torch.float64, [1.0])
    head = random_eagle3_head(model, 3)
    save_eagle3(head, folder / "eagle3", "model", TOKENIZER, torch.float64)
    save_medusa(heads, folder / "medusa", "model", TOKENIZER, torch.float64)
    return folder / "model"


# ---- ranks as threads ----------------------------------------------------------------------------


def as_rank(rank: int, size: int, monkeypatch, function, *arguments):
    """Call a function, such as load, as one of several ranks does."""
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "tensor_parallel", Group(rank, size))
        return function(*arguments)


def on_threads(size: int, monkeypatch, function) -> list:
    """Call function(rank) on a thread for each rank. The threads reduce tensors as ranks do, and
    each believes that it is rank 0."""
    barrier, parts = threading.Barrier(size, timeout=60), [None] * size
    rank_of_thread = threading.local()

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        parts[rank_of_thread.rank] = tensor
        barrier.wait()
        stacked = torch.stack(parts)
        result = stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.amax(0)
        barrier.wait()  # all have read the parts
        tensor.copy_(result)

    def run(rank):
        rank_of_thread.rank = rank
        try:
            return function(rank)
        except BaseException:
            barrier.abort()
            raise

    with monkeypatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(distributed, "tensor_parallel", Group(0, size))
        return list(pool.map(run, range(size)))


def load_parts(folder: Path, size: int, monkeypatch) -> list[Transformer]:
    """The model's shards for all ranks, in float64."""
    return [as_rank(r, size, monkeypatch, load, folder, "float64")[0] for r in range(size)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_generates_what_one_process_does(family, size, monkeypatch):
    prompt, whole = random_tokens(9, vocab=VOCAB), load(family, "float64")[0]
    parts = load_parts(family, size, monkeypatch)
    loaders = {"draft": lambda model: load(family.parent / "draft", "float64")[0],
               "mtp": lambda model: load_mtp(family.parent / "mtp", model),
               "eagle3": lambda model: load_eagle3(family.parent / "eagle3", model),
               "medusa": lambda model: load_medusa(family.parent / "medusa", model)}  # fmt: skip
    for method in METHODS:
        drafters = [*find_method(method).of_kind("weights").items()][:1]
        options = [{name: as_rank(r, size, monkeypatch, loaders[option.folder], parts[r])
                    for name, option in drafters} for r in range(size)]  # fmt: skip
        alone = {name: loaders[option.folder](whole) for name, option in drafters}
        for sampling in {}, {"temperature": 0.8, "seed": 5}:
            settings = sampling | {"max_new_tokens": 20}
            expected = decode(whole, None, prompt, method, **settings, **alone)

            def run(rank):
                return decode(parts[rank], None, prompt, method, **settings, **options[rank])

            for part in on_threads(size, monkeypatch, run):
                assert part.tokens == expected.tokens, method
                assert [s.path for s in part.rounds] == [s.path for s in expected.rounds]
                assert part.extra_parameters == expected.extra_parameters


def test_int8_weights_are_those_of_one_process(family, monkeypatch):
    prompt, whole = random_tokens(9, vocab=VOCAB), load(family, "float64")[0]
    parts = load_parts(family, 2, monkeypatch)
    optimize(whole, int8=True)
    expected = decode(whole, None, prompt, max_new_tokens=20)

    def run(rank):
        optimize(parts[rank], int8=True)
        assert distributed.count_whole(parts[rank]) == count_parameters(whole)
        return decode(parts[rank], None, prompt, max_new_tokens=20)

    assert all(part.tokens == expected.tokens for part in on_threads(2, monkeypatch, run))
    buffers = [dict(part.named_buffers()) for part in parts]
    for name, buffer in whole.named_buffers():
        for rank, of_rank in enumerate(buffers):
            config = parts[0].config
            expected = as_rank(rank, 2, monkeypatch, distributed.shard, name, buffer, config)
            assert torch.equal(of_rank[name], expected), name


def test_ranks_that_compute_different_tokens_end(family, monkeypatch):
    """As on processors that round differently: at the next pass or, after the last one, when the
    answer is shown."""
    parts, args = load_parts(family, 2, monkeypatch), Namespace(json=True, color=None, model="")

    def decode_another_prompt(rank):
        with pytest.raises(UserError, match="the ranks computed different tokens"):
            decode(parts[rank], None, [1, 2, rank])

    def show_another_answer(rank):
        run = stream(parts[rank], None, [1, 2, 3], max_new_tokens=3)
        list(run)
        run.tokens[-1] = rank
        with pytest.raises(UserError, match="the ranks computed different tokens"):
            show(run, args, None, io.StringIO())
        assert len(run.tokens) == 3

    on_threads(2, monkeypatch, decode_another_prompt)
    on_threads(2, monkeypatch, show_another_answer)


SHARED_HEADS = [(4, 4, 4), (12, 6, 3), (4, 1, 2), (4, 1, 4), (12, 2, 4), (12, 2, 6)]


@pytest.mark.parametrize("heads, kv_heads, size", SHARED_HEADS)
def test_a_rank_holds_its_share_of_the_weights_and_of_the_cache(
    heads, kv_heads, size, tmp_path, monkeypatch
):
    """With more ranks than key/value heads, each holds the one that its query heads read."""
    sizes, tokens = {"heads": heads, "kv_heads": kv_heads}, random_tokens(9)
    whole = random_model(3, **sizes, qkv_bias=True, o_bias=True)
    save(whole, None, tmp_path)
    parts, copies = load_parts(tmp_path, size, monkeypatch), max(1, size // kv_heads)
    hidden = on_threads(size, monkeypatch, lambda rank: parts[rank](tokens))
    for rank, part in enumerate(parts):
        torch.testing.assert_close(hidden[rank], whole(tokens), rtol=1e-12, atol=1e-12)
        assert part.new_cache(7).kv.nbytes * size == whole.new_cache(7).kv.nbytes * copies
        assert distributed.count_whole(part) == count_parameters(whole)
        for name, tensor in part.model.layers.state_dict().items():
            is_kv, held = "k_proj" in name or "v_proj" in name, tensor.numel() * size
            if tensor.dim() == 2:
                held_by_all = whole.model.layers.state_dict()[name].numel()
                assert held == held_by_all * (copies if is_kv else 1)


def test_only_the_part_of_a_rank_is_read(monkeypatch):
    read = []

    class Slice:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return list(self.tensor.shape)

        def __getitem__(self, key):
            read.append(self.tensor[key].numel())
            return self.tensor[key].clone()

    config = replace(random_model().config, ranks=4, kv_copies=2)
    shard, weight = partial(distributed.shard, config=config), torch.arange(48.0).view(8, 6)
    columns = weight.T.contiguous()  # (6, 8)
    monkeypatch.setattr(distributed, "tensor_parallel", Group(2, 4))
    for name, whole, part in [
        ("model.layers.0.self_attn.k_proj.weight", weight, weight[4:]),  # two ranks hold each half
        ("model.layers.0.self_attn.q_proj.weight", weight, weight[4:6]),
        ("model.mtp_layers.0.mlp.up_proj.weight", weight, weight[4:6]),
        ("self_attn.o_proj.weight", columns, columns[:, 4:6]),
        ("model.embed_tokens.weight", weight, weight),
        ("0.0.linear.weight", weight, weight),  # of Medusa heads
    ]:
        assert torch.equal(shard(name, Slice(whole)), part)
        assert read.pop() == part.numel()
        assert torch.equal(shard(name, whole), part)
    scalar = torch.tensor(2.0)  # as in quantised checkpoints, which are refused later
    assert shard("self_attn.q_proj.weight", scalar) == 2
    with pytest.raises(UserError, match=r"shape \[9, 6\], which 4 processes cannot share"):
        shard("mlp.up_proj.weight", torch.zeros(9, 6))
    bias = torch.ones(3)
    assert shard("mlp.down_proj.bias", bias).tolist() == [0, 0, 0]
    monkeypatch.setattr(distributed, "tensor_parallel", Group(0, 4))
    assert shard("mlp.down_proj.bias", bias).tolist() == [1, 1, 1]


def test_a_pickle_and_a_prefix_are_shared_too(family, tmp_path, monkeypatch):
    expected = as_rank(1, 2, monkeypatch, load, family, "float64")[0].state_dict()
    tensors = safetensors.torch.load_file(family / "model.safetensors")
    for file in family.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    renamed = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    found = as_rank(1, 2, monkeypatch, load, tmp_path, "float64")[0].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("sizes, named", [
    ((8, 4, 24), "heads, 8, must be a multiple"), ((12, 6, 30), "intermediate_size, 30, must be"),
    ((60, 5, 24), "kv_heads, 5, must be a multiple or a divisor"),
])  # fmt: skip
def test_sizes_that_cannot_be_shared_are_refused(sizes, named, tmp_path, monkeypatch):
    model = random_model(**dict(zip(("heads", "kv_heads", "intermediate_size"), sizes)))
    save(model, None, tmp_path)
    message = f"{tmp_path}: 12 processes cannot share this model: its {named}"
    with pytest.raises(UserError, match=message):
        as_rank(0, 12, monkeypatch, load, tmp_path)


def test_a_draft_that_ranks_cannot_share_is_whole_on_each(tmp_path, monkeypatch):
    draft = random_model(3, heads=3, kv_heads=3, qkv_bias=True, o_bias=True)
    save(draft, None, tmp_path)
    loaded, _ = as_rank(1, 2, monkeypatch, partial(load, draft=True), tmp_path, "float64")
    assert distributed.count_whole(loaded) == count_parameters(draft)
    assert equal_up_to_rounding(loaded(random_tokens(9)), draft(random_tokens(9)))


VARIABLES = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "1"}  # fmt: skip


@pytest.mark.parametrize("given, found", [
    (dict.fromkeys(VARIABLES, "") | {"WORLD_SIZE": "2"}, "variable RANK expected, but not set"),
    ({"WORLD_SIZE": "two"}, "invalid literal for int() with base 10: 'two'"),
    ({"RANK": "first"}, "invalid literal for int() with base 10: 'first'"),
    ({"MASTER_ADDR": ""}, "variable MASTER_ADDR expected, but not set"),
    ({"MASTER_PORT": "65536"}, "port must have value from 0 to 65535 but was 65536"),
])  # fmt: skip
def test_variables_that_torchrun_does_not_set_are_refused(given, found, monkeypatch):
    for name, value in (VARIABLES | given).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"start them with torchrun.*{re.escape(found)}"):
        distributed.connect()


def test_processes_that_do_not_come_are_not_waited_for_forever(monkeypatch):
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    for name, value in (VARIABLES | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", timedelta(seconds=0.5))
    with pytest.raises(UserError, match="the processes did not find each other; .*timed out"):
        distributed.connect()


def test_one_process_under_torchrun_is_not_shared(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    distributed.join(share_models=True)
    assert distributed.tensor_parallel == Group()


def test_a_shared_model_is_not_compiled(family, monkeypatch):
    model = as_rank(0, 2, monkeypatch, load, family)[0]
    with pytest.raises(UserError, match="cannot be compiled: omit --compile"):
        as_rank(0, 2, monkeypatch, lambda: optimize(model, compiled=True))


@pytest.mark.parametrize("size", [1, 2])
def test_bench_measures_shards_of_random_weights(size, monkeypatch, capsys):
    monkeypatch.setattr(measure, "COPY_BYTES", 2**10)
    monkeypatch.setattr(measure, "MATMUL_SIZE", 8)
    config = replace(random_model().config, heads=4, kv_heads=2, intermediate_size=32)
    parts = [as_rank(rank, size, monkeypatch, shapes.random_weights, config, "float64")
             for rank in range(size)]  # fmt: skip

    def run(rank):
        machine = measure.measure_machine(parts[rank])
        tables.show_machine(machine, parts[rank])
        return machine, decode(parts[rank], None, [1, 2], max_new_tokens=9).tokens

    (machine, tokens), *others = on_threads(size, monkeypatch, run)
    assert all(other[1] == tokens for other in others)
    whole = random_model(heads=4, kv_heads=2, intermediate_size=32)
    assert machine["ranks"] == size
    assert machine["cache_bytes_per_token"] == whole.new_cache(1).kv.nbytes / size
    assert machine["sent_bytes"] == 2 * 2 * 16 * 8 * 2 * (size - 1) / size  # by hand: 2 layers
    printed = capsys.readouterr().out
    assert f"{count_parameters(whole) / 1e6:.1f}M parameters" in printed
    assert (f"per row on each of {size} ranks; the cache" in printed) == (size > 1)


def as_world(rank: int, monkeypatch) -> None:
    """Pretend to be one of two processes, of which the other has the same values."""

    def all_gather_object(values, value):
        values[:] = [value] * len(values)

    monkeypatch.setattr(distributed, "world", Group(rank, 2))
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)


def test_bench_plans_for_the_processes_of_torchrun(monkeypatch, capsys):
    bench.main("--shape llama-2-7b --nproc 2 --json".split())
    expected = json.loads(capsys.readouterr().out)["plan"]
    as_world(0, monkeypatch)
    bench.main("--shape llama-2-7b --plan --json".split())
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == expected and expected["shares"][1]["sent_bytes"] > 0
    assert found["about"]["command"].startswith("torchrun --nproc-per-node 2 -m minispec.bench ")


def test_the_time_of_all_ranks_is_that_of_the_benchmark(monkeypatch):
    """Two cores: each rank used one of them, and nobody else did anything."""
    clocks = iter([(0.0, 0.0, 0.0), (20.0, 20.0, 10.0)])
    as_world(0, monkeypatch)
    monkeypatch.setattr(measure, "read_cpu_seconds", lambda: next(clocks))
    assert measure.watch(lambda: "done") == ("done", 0.0)


# ---- processes -----------------------------------------------------------------------------------


def own_lines(text: str) -> list[str]:
    """The lines of minispec among those of torchrun."""
    return [line for line in text.splitlines() if line.startswith("minispec: ")]


def in_one_process(capsys, *arguments: str) -> dict:
    main(list(map(str, arguments)))
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_command_line_prints_what_one_process_prints(size, tmp_path, capsys):
    model = write_family(tmp_path, FAMILIES["qwen3"])
    for method in NEEDS:
        flags = ["--model", model, "--method", method, "--json", "--dtype", "float64",
                 "--max-new-tokens", "30", "--temperature", "0.7", "--seed", "3"]  # fmt: skip
        flags += ["--quantize", "int8"] if method == "speculative" else []
        out, error = torchrun(size, "-m", "minispec.generate", "Once", *flags).communicate()
        expected, found = in_one_process(capsys, "Once", *flags), json.loads(out or "{}")
        assert found["tokens"] == expected["tokens"], error
        assert found["stats"]["extra_parameters"] == expected["stats"]["extra_parameters"]


@pytest.mark.slow
def test_policies_use_the_measurements_of_one_rank(tmp_path, capsys):
    model = write_family(tmp_path, FAMILIES["llama"])
    flags = ["--model", model, "--dtype", "float64", "--json", "--max-new-tokens", "60", "Once"]
    command = ["-m", "minispec.generate", "--method", "fastmtp", "--k", "auto", *flags]
    out, error = torchrun(2, *command).communicate()
    expected = in_one_process(capsys, *flags)
    assert json.loads(out)["tokens"] == expected["tokens"], error


@pytest.mark.slow
def test_all_ranks_receive_the_turns_of_a_chat(tmp_path):
    save(random_model(3, **SHAPE), TOKENIZER, tmp_path)
    flags = ["-m", "minispec.generate", "--model", tmp_path, "--dtype", "float64", "--chat",
             "--method", "prompt-lookup", "--max-new-tokens", "20"]  # fmt: skip
    turns = "one\ntwo\n\nthree\n"
    alone, shared = (torchrun(size, *flags, stdin=subprocess.PIPE).communicate(turns)
                     for size in (1, 2))  # fmt: skip
    assert alone[0] == shared[0] and alone[0].count("\n") >= 3, shared[1]


@pytest.mark.slow
def test_errors_end_all_processes_with_one_line(tmp_path):
    model = write_family(tmp_path, FAMILIES["llama"])
    run = torchrun(3, "-m", "minispec.generate", "Once", "--model", model)
    assert own_lines(run.communicate(timeout=60)[1]) == [
        f"minispec: {model}: 3 processes cannot share this model: its heads, 8, must be a multiple "
        "of the number of processes"
    ]
    run = torchrun(2, "-m", "minispec.generate", "Once", "--model", model, "--k", "3")
    assert len(own_lines(run.communicate(timeout=60)[1])) == 1
    (model / "model.safetensors").write_bytes(b"damaged")
    run = torchrun(2, "-m", "minispec.generate", "Once", "--model", model)
    lines = own_lines(run.communicate(timeout=60)[1])
    assert len(lines) == 1 and "cannot be read" in lines[0]


def start_ranks(ranks: list[int], *arguments) -> list[subprocess.Popen]:
    """Start some of two processes as torchrun would, without one that ends them."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    variables = VARIABLES | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                             "PYTHONPATH": str(Path.cwd())}  # fmt: skip
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen([sys.executable, *map(str, arguments)], **pipes, text=True,
                         env=os.environ | variables | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in ranks
    ]  # fmt: skip


KILLED = """
import os, signal, sys
from minispec import distributed
from minispec.generate import __main__ as command
def dies(*arguments):
    if distributed.tensor_parallel.rank == {rank}:
        {death}
    return before(*arguments)
before, {name} = {name}, dies
command.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank, name, death, expected", [
    (0, "distributed.dist.all_reduce", "os.kill(os.getpid(), 9)", "exchange .* probably ended"),
    (1, "distributed.dist.all_reduce", "os.kill(os.getpid(), 9)", "exchange .* probably ended"),
    (1, "command.load", "raise OSError(28, 'No space left')", "rank 1: .*No space left"),
])  # fmt: skip
def test_a_rank_that_dies_ends_the_others(rank, name, death, expected, tmp_path):
    model = write_family(tmp_path, FAMILIES["llama"])
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(rank=rank, name=name, death=death))
    children = start_ranks([0, 1], script, "Once", "--model", model)
    children[rank].wait(60)
    start = time.monotonic()
    _, error = children[1 - rank].communicate(timeout=60)
    assert time.monotonic() - start < 10 and children[1 - rank].returncode == 2
    *_, line = own_lines(error)
    assert "Traceback" not in error
    assert re.search(expected, line), line


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["joining", "generating", "idle"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_ctrl_c_ends_each_rank(moment, order, tmp_path):
    """torchrun passes Ctrl-C on to one rank after the other. Each may be waiting for the other."""
    save(random_model(3, context=8192, **SHAPE), TOKENIZER, tmp_path)
    ranks = order[:1] if moment == "joining" else order
    flags = ["--model", tmp_path, "--chat", "--max-new-tokens", "4000", "--ignore-eos"]
    if moment == "idle":
        flags[-2] = "4"
    children = dict(zip(ranks, start_ranks(ranks, "-m", "minispec.generate", "Once", *flags)))
    if moment == "joining":
        time.sleep(6)  # to import torch and to wait for the other
    else:
        children[0].stdout.read(1)
        time.sleep(1)
    for rank in ranks:
        assert children[rank].poll() is None
        children[rank].send_signal(signal.SIGINT)
        time.sleep(0.5)
    ends = [children[rank].wait(10) for rank in ranks]
    assert ends[0] == -signal.SIGINT  # the other may first notice that this one has ended
    assert "Traceback" not in "".join(child.stderr.read() for child in children.values())


@pytest.mark.slow
@pytest.mark.parametrize("size, source", [(2, "--model"), (3, "--shape")])
def test_bench_compares_methods_with_a_shared_model(size, source, tmp_path):
    which = ["smollm2-135m"]
    if source == "--model":
        which = [write_family(tmp_path, FAMILIES["qwen3"]), "--prompts", "2"]
    flags = ["--busy", "--repeats", "1", "--max-new-tokens", "5"]
    command = ["-m", "minispec.bench", source, *which, *flags]
    out, error = torchrun(size, *command).communicate()
    assert f"per row on each of {size} ranks" in out and "\nspeculative k=4  " in out, error
    out, error = torchrun(size, *command, "--json").communicate()
    report = json.loads(out)
    assert report["machine"]["ranks"] == size and report["machine"]["sent_bytes"] > 0
    assert len(report["rows"]) > 5 and all(row["differing"] == 0 for row in report["rows"])


# ---- distill -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind, flags", [
    ("mtp", ["--k", "2", "--soft"]), ("mtp", ["--k", "3"]), ("medusa", ["--heads", "2"]),
    ("draft", ["--layers", "1", "--width", "16", "--heads", "2", "--ffn", "24"]),
])  # fmt: skip
def test_two_processes_train_what_one_process_trains(kind, flags, tmp_path):
    save(random_model(1, torch.float32, vocab_size=VOCAB, bos_id=256), TOKENIZER, tmp_path / "it")
    rows = [{"tokenizer": TOKENIZER.fingerprint, "options": {}}]
    rows += [{"kind": "story", "prompt": random_tokens(2 + i % 3, i, VOCAB),
              "tokens": random_tokens(1 + i % 17, 99 + i, VOCAB)} for i in range(150)]  # fmt: skip
    heads = []
    for size in 1, 2:
        own = [tmp_path / f"{name}{size}.jsonl" for name in "abc"]
        for i, file in enumerate(own):
            of_file = [rows[0], *rows[1 + i :: 3]]
            file.write_text("".join(json.dumps(row) + "\n" for row in of_file))
        out = tmp_path / f"{kind}{size}"
        command = ["-m", "minispec.distill", kind, "--model", tmp_path / "it", "--generated", *own,
                   "--out", out, "--steps", "5", "--rows", "6", "--context", "16"]  # fmt: skip
        run = torchrun(size, *command, *flags)
        error = run.communicate(timeout=120)[1]
        assert run.returncode == 0, error
        (file,) = out.glob("*.safetensors")
        heads.append(safetensors.torch.load_file(file))
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [["--temperature", "0"], ["--top-p", "0.9"]])
def test_two_processes_generate_the_documents_of_one(sampling, tmp_path):
    save(random_model(1, vocab_size=VOCAB, bos_id=256, eos_ids=(65,)), TOKENIZER, tmp_path / "it")
    prompts = [{"prompt": chr(97 + i % 26) * (1 + i % 5)} for i in range(60)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for size in 1, 2, 3:
        for documents in 10, 25:  # the second run continues the first
            flags = ["--model", tmp_path / "it", "--data", tmp_path / "asked.jsonl",
                     "--tokens", "9", "--batch", "7", "--documents", documents, "--keep-duplicates",
                     "--dtype", "float64", "--out", tmp_path / f"own{size}.jsonl"]  # fmt: skip
            run = torchrun(size, "-m", "minispec.distill", "generate", *flags, *sampling)
            error = run.communicate(timeout=120)[1]
            assert run.returncode == 0, error
    texts = [(tmp_path / f"own{size}.jsonl").read_text() for size in (1, 2, 3)]
    assert texts[0].count("\n") > 25 and texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_what_runs_in_one_process_says_so(tmp_path):
    vocabulary = ["distill", "vocabulary", "--text", "en=x", "--out", tmp_path / "it.json"]
    for module, *arguments in vocabulary, ["certify"]:
        run = torchrun(2, "-m", f"minispec.{module}", *arguments)
        lines = own_lines(run.communicate(timeout=60)[1])
        name = "vocabulary" if module == "distill" else module
        assert lines == [f"minispec: {name} runs in one process: start it without torchrun"]
