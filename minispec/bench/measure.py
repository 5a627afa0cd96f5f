"""Measure the machine, what other processes use of it, and the methods; summarise the runs."""

import contextlib
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import truediv
from os.path import basename
from typing import TypeVar

import psutil
import torch
from tqdm import tqdm

from minispec import distributed
from minispec.bench.methods import PLAIN, Methods
from minispec.bench.shapes import Hardware, pass_work
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note
from minispec.fast.cost import ROW_COUNTS, cost_curve, interleaved_min_times, one_pass
from minispec.generate import decode
from minispec.generate.run import Run, acceptance
from minispec.methods.adaptive import curve_at
from minispec.model import Transformer

T = TypeVar("T")
COPY_BYTES, MATMUL_SIZE = 2**28, 2048  # sizes of the copy and of the square product
MAX_OTHERS_SHARE = 0.5  # of the cores, for other processes; above it, speeds are not reported

LOOK_SECONDS = 0.0005
# the parts of decoding and the functions or files that run them; the first one found counts
PARTS = {"prefill": {"prefill", "read_prompt"}, "policy": {"adaptive.py"}, "drafts": {"propose"},
         "target pass": {"model.py", "compiled.py", "captured.py", "probs"}}  # fmt: skip


def measure_machine(model: Transformer) -> dict:
    """Measure what determines the speedups on this machine, as --json prints it. A pass cannot be
    faster than reading its weights once at the bandwidth of a copy, or than doing its
    multiplications at the rate of a large matrix product."""
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=model.dtype, device=model.device)
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=model.device)
    pass_seconds, copy, matmul = interleaved_min_times(
        [one_pass(model, 1), lambda: target.copy_(source)[-1].item(),
         lambda: (a @ a)[-1, -1].item()], turns=5,
    )  # fmt: skip
    hardware = Hardware(2 * COPY_BYTES / copy, 2 * MATMUL_SIZE**3 / matmul)
    work, curve = pass_work(model), cost_curve(model)
    return {
        "pass_seconds": pass_seconds,  # for one token
        "pass_bytes": work.read_bytes,  # by each rank
        "ranks": model.config.ranks,
        "sent_bytes": work.sent_bytes,  # by each rank, per row of a pass
        "cache_bytes_per_token": model.new_cache(1).kv.nbytes,
        "memory_floor": work.read_bytes / hardware.bandwidth,  # seconds per pass
        "compute_floor": work.row_flops / hardware.flops,  # seconds per row
        "rows": [n for n in ROW_COUNTS if n < len(curve)],  # where the curve was measured
        "curve": curve,  # pass(n) / pass(1)
        "floor": [hardware.seconds(work, n) / pass_seconds for n in range(len(curve))],
    }


def measure(
    model: Transformer, tokenizer: Tokenizer | None, methods: Methods, prompts: list, n: int,
    temperature: float = 0.0, others: dict[str, Callable] | None = None,
    parts: dict[str, dict] | None = None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Decode each prompt with every method in turn, which is one repeat of the measurement; return
    table row -> its runs, one per prompt. The first prompt is decoded an extra time beforehand as a
    warm-up. `others` are decoders from other libraries: given a prompt, they return the attributes
    of a Run that the table needs. `parts`, if passed, receives each row's `time_shares`."""
    ours = partial(decode, model, tokenizer, max_new_tokens=n, temperature=temperature)
    decoders = {row: partial(ours, **{"method": row.split()[0]} | options)
                for row, options in methods.items()} | (others or {})  # fmt: skip
    runs = {row: [] for row in decoders}
    for prompt in tqdm([prompts[0], *prompts], unit="prompt"):
        for row, decoder in decoders.items():
            runs[row].append(decoder(prompt))
    if parts is not None:
        parts |= {row: time_shares(decoder, prompts[0]) for row, decoder in decoders.items()}
    return {row: by_prompt[1:] for row, by_prompt in runs.items()}


def time_shares(decoder: Callable[[list[int]], Run], prompt: list[int]) -> dict[str, float]:
    """Decode, and return the share of each part of a round in the time of all rounds. A timer looks
    at the stack every LOOK_SECONDS. During a long call of C++ code the look is late; the time since
    the look before counts for the part that it finds: one of PARTS, or "other Python"."""
    seconds = Counter()
    latest = time.perf_counter()

    def look(_, frame) -> None:
        nonlocal latest
        passed, names = time.perf_counter() - latest, set()
        while frame:
            names |= {frame.f_code.co_name, basename(frame.f_code.co_filename)}
            frame = frame.f_back
        seconds[next((part for part in PARTS if PARTS[part] & names), "other Python")] += passed
        latest = time.perf_counter()  # without the time of the look

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        decoder(prompt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    del seconds["prefill"]
    total = seconds.total()
    return {part: passed / total for part, passed in seconds.most_common()}


# ---- other processes ----------------------------------------------------------------------------


def check_others(share: float | None, when: str, consequence: str, busy: bool) -> None:
    """Raise UserError, or with --busy note it, if other processes used too much of the cores."""
    if (share or 0.0) > MAX_OTHERS_SHARE:
        fault = f"{when}, other processes used {share:.0%} of the cores"
        if not busy:
            raise UserError(f"{fault}, so {consequence}; wait until they end, or add --busy")
        note(f"{fault}, so speeds may be wrong")


def others_share_now() -> float | None:
    """The share of the cores that other processes use while this one sleeps."""
    return watch(partial(time.sleep, 1.0))[1]


def watch(work: Callable[[], T]) -> tuple[T, float | None]:
    """Do the work on all ranks; return its result and the share of the cores' time that other
    processes used meanwhile, from 0 to 1. It is None if the system does not count this time."""
    before = read_cpu_seconds()
    result = work()
    elapsed, busy, own = (b - a for a, b in zip(before, read_cpu_seconds()))
    own = sum(distributed.all_gather(own))  # all ranks run on this machine
    # some sandboxes have a /proc/stat that never changes
    share = min(max((busy - own) / elapsed, 0.0), 1.0) if elapsed > 0 else None
    return result, distributed.from_rank_0(lambda: share)


def read_cpu_seconds() -> tuple[float, float, float]:
    """The time of the cores that this process may use: in total, the part in which they were busy,
    and the part used by this process and its descendants, such as torch's compilers."""
    process, cores = psutil.Process(), psutil.cpu_times(percpu=True)
    if hasattr(process, "cpu_affinity"):  # a container may list all cores of its host
        cores = [cores[n] for n in process.cpu_affinity() if n < len(cores)] or cores
    elapsed = sum(sum(core[:8]) for core in cores)  # the other fields are parts of the first two
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    own = 0.0
    for member in process, *process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            own += sum(member.cpu_times()[:4])  # with the children for which it has waited
    return elapsed, elapsed - idle, own


# ---- statistics ----------------------------------------------------------------------------------


def seconds_per_token(run: Run) -> float:
    return run.decode_seconds / max(len(run.tokens), 1)


def per_pass(runs: list[Run]) -> float:
    """Tokens per forward pass of the target, over all runs; 0 if the passes were not recorded."""
    passes = sum(len(run.rounds) for run in runs)
    return sum(len(run.tokens) for run in runs) / passes if passes else 0.0


def alpha(runs: list[Run]) -> float | None:
    """Share of the draft tokens that the rule tried and accepted."""
    steps = [step for run in runs for step in run.rounds]
    tested = sum(len(step.chances) for step in steps)
    return sum(len(step.path) - 1 for step in steps) / tested if tested else None


def rows_per_pass(runs: list[Run]) -> float:
    """Mean number of rows in a pass: those of the tree and of lookahead's window."""
    steps = [step for run in runs for step in run.rounds]
    return statistics.mean(len(s.tree) + sum(map(len, s.window)) for s in steps) if steps else 0.0


def timing(plain: list[list[Run]], repeats: list[list[Run]]) -> dict[str, float | None]:
    """Summarise a method's times. Both arguments hold a list per repeat, with a run per prompt."""
    plain_times, times = ([[*map(seconds_per_token, runs)] for runs in its]
                          for its in (plain, repeats))  # fmt: skip
    by_repeat = [[*map(truediv, *pair)] for pair in zip(plain_times, times)]
    by_prompt = list(map(statistics.median, zip(*by_repeat)))
    means = list(map(statistics.mean, by_repeat))
    return {
        "speedup": statistics.median(by_prompt),
        "mean": statistics.mean(by_prompt),
        "min": min(by_prompt),
        "max": max(by_prompt),
        # how well the mean over prompts repeats
        "half_range": (max(means) - min(means)) / 2 if len(means) > 1 else None,
        "tokens_per_second": 1 / statistics.median(map(statistics.median, zip(*times))),
    }


def table_of(
    kind: str, temperature: float, repeats: list[dict[str, list[Run]]], machine: dict
) -> list[dict]:
    """Summarise each method over all prompts, in rows as --json prints them. Only times and tokens
    are taken from all `repeats` of `measure`, the rest from the first."""
    table, plain = [], [runs[PLAIN] for runs in repeats]
    for method, its_runs in repeats[0].items():
        its_repeats = [runs[method] for runs in repeats]
        rows = rows_per_pass(its_runs)
        pairs = zip(sum(plain, []), sum(its_repeats, []))  # of runs
        table.append({
            "kind": kind,
            "temperature": temperature,
            "method": method,
            "prompts": len(its_runs),
            "repeats": len(repeats),
            **timing(plain, its_repeats),
            "tokens_per_pass": per_pass(its_runs) or None,
            "rows_per_pass": rows,
            "pass_cost": curve_at(machine["curve"], round(rows)),  # of a pass over that many rows
            "acceptance": alpha(its_runs),  # probability that a tested draft token is accepted
            "by_step": acceptance([s for run in its_runs for s in run.rounds])["conditional"],
            "differing": None if temperature else sum(a.tokens != b.tokens for a, b in pairs),
            "extra_parameters": its_runs[0].extra_parameters,
        })  # fmt: skip
    return table
