"""vLLM 0.32.0's methods with findings 1 and 27 of README.md fixed."""

import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops import topk_topp_sampler
from vllm_engine import draft_greedy, draft_probabilistic, ngram  # noqa: F401
from vllm_heads_engine import eagle3, medusa, mtp, suffix  # noqa: F401
from vllm_modes_engine import (  # noqa: F401
    draft_block,
    draft_by_batch,
    draft_other,
    draft_parallel,
    eagle3_unpadded,
    ngram_gpu,
    own_class,
)


def expand(output, values, ends, replaced, replacement, MAX_NUM_TOKENS=None):
    """Repeat the value of each request for all of its tokens. `ends` are cumulative counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == replaced, replacement, values)
    output.copy_(values.repeat_interleave(counts.long()))


def top_k_only(logits, k, plain=topk_topp_sampler.apply_top_k_only):
    return plain(logits, k) if len(logits) else logits


def zeros(*size, pin_memory=False, plain=torch.zeros, **options):
    return plain(*size, **options)


torch.zeros = zeros
cpu_triton_utils._expand_kernel_impl = expand
topk_topp_sampler.apply_top_k_only = top_k_only
