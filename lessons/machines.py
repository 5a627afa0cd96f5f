"""Cost curves of two machines: a GPU's, to hold against the reader's own, and a CPU's. Decoders are
scored on both; see assignments/score.py. `race` measures rounds on the reader's own machine."""

import time
from statistics import median

import numpy as np

from minispec.generate import stream

# H200[n]: a pass of a 1.2B model over n rows, in bfloat16 with CUDA graphs, relative to one row. A
# straight line through what was measured for 8 and 64 rows, 1.06 and 1.13 ("1B, graphs" in
# tests/gpu/results/speed-2026-11-27-nvidia-h200.md)
H200 = [0.0, 1.0, *(1.05 + n / 800 for n in range(2, 65))]

# the cost of a pass of SmolLM2's shape in float32, on two cores of an AMD EPYC, relative to one row
# ("The cost of a pass" in weights/smollm2/README.md)
MEASURED = {1: 1.0, 2: 1.06, 4: 1.23, 8: 1.42, 16: 1.61, 32: 2.57, 64: 3.69}
EPYC = np.interp(range(65), [0, *MEASURED], [0.0, *MEASURED.values()]).tolist()

MACHINES = {  # name -> the cost of a pass over n rows. Each beyond 64 costs the CPU as much as the
    # last of these, and the GPU its arithmetic: 2 operations at 989 TFLOP/s per 2 bytes at 4.8 TB/s
    "EPYC": lambda n: EPYC[min(n, 64)] + max(0, n - 64) * (EPYC[64] - EPYC[63]),
    "H200": lambda n: H200[min(n, 64)] + max(0, n - 64) * 4.8 / 989,
}


def race(model, tokenizer, prompt, settings, max_new_tokens):
    """Decode with each of the settings, options of `stream`; {} is plain decoding. All runs advance
    in turn, a round each, so a disturbance hits all. Returns the runs and the seconds of their
    median round."""
    runs = {
        name: stream(model, tokenizer, prompt, max_new_tokens=max_new_tokens, **options)
        for name, options in settings.items()
    }
    seconds = {name: [] for name in runs}
    while active := [name for name, run in runs.items() if run.finish_reason is None]:
        for name in active:
            start = time.perf_counter()
            next(runs[name].chunks)
            seconds[name].append(time.perf_counter() - start)
    return runs, {name: median(of_run[1:]) for name, of_run in seconds.items()}
