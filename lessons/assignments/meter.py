"""The part of the score that runs in the decoder's process: what it computes is counted there."""

import io
import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minispec import paths
from minispec.certify.examination import Request
from minispec.certify.functions.checks import Limits, check_implementation
from minispec.certify.functions.decoder import FunctionDecoder
from minispec.certify.report import conclude, print_table
from minispec.cli import import_function

aten = torch.ops.aten
LEFT = {  # operators that multiply matrices -> which argument is the left one
    aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten._int_mm: 0, aten._weight_int8pack_mm: 0,
    aten.addmm: 1, aten.baddbmm: 1, aten.addmv: 1, aten.addmm_: 1, aten.baddbmm_: 1, aten.addmv_: 1,
}  # fmt: skip


class Meter(TorchDispatchMode):
    """Counts every matrix product of torch, whichever model it belongs to: work[n] is the number of
    weights that n rows were multiplied with. The shorter side is taken for the rows, so a product
    and its transpose count alike. scaled_dot_product_attention is not counted."""

    def __init__(self):
        super().__init__()
        self.work: Counter[int] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, left = kwargs or {}, LEFT.get(op.overloadpacket)
        if left is None:
            with self:  # in inference mode, some operators consist of others
                result = op.decompose(*args, **kwargs)
            return op(*args, **kwargs) if result is NotImplemented else result
        result = op(*args, **kwargs)
        *batch, n, m = 1, *result.shape
        self.work[min(n, m)] += math.prod(batch) * args[left].shape[-1] * max(n, m)
        return result


def answer(
    impl: str, checkpoint: str, prompt: list[int], length: int
) -> tuple[list[int], dict[int, int]]:
    """Decode a prompt. Returns the new tokens and the work, that of importing `impl` included."""
    ticks = count()
    time.perf_counter = lambda: float(next(ticks))  # "auto" finds that everything takes as long
    paths.CACHE = Path(checkpoint) / "cache"  # which holds no timings of this machine
    with torch.no_grad(), Meter() as meter:
        decoder = FunctionDecoder(import_function(impl), checkpoint)
        (tokens,) = decoder.batch([Request(prompt, length)])
    return tokens, dict(meter.work)


@torch.no_grad()
def certificate(impl: str, limits: dict, rows: dict) -> Iterator[str | tuple[int, str]]:
    """The lines of the certifier's table; then its exit code and verdict."""
    verdicts = []
    for verdict in check_implementation(import_function(impl), limits=Limits(**limits), **rows):
        line = io.StringIO()
        verdicts += print_table([verdict], line)
        yield line.getvalue()
    yield conclude(verdicts)
