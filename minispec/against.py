"""transformers' own decoding of the same checkpoint, for comparison (`reference` extra)."""

import argparse
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from minispec.generate import Run
from minispec.model import Transformer
from minispec.timing import middle_of_turns


@dataclass
class Theirs:
    """What the benchmark reads of a Run."""

    tokens: list[int]
    decode_seconds: float
    cache: object
    rounds: list = field(default_factory=list)
    stats: dict = field(default_factory=lambda: {"extra_parameters": 0})


def transformers_runs(
    args: argparse.Namespace, model: Transformer, plain: list[Run]
) -> dict[str, list[Theirs]]:
    """`generate`, plain and with --draft as the assistant, on the prompts of `plain`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def read(name: str):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype)
        return loaded.to(model.device).eval()

    target, assistants = read(args.model), {"transformers": None}
    if args.draft:
        assistants["transformers, assisted"] = read(args.draft)
    found: dict[str, list[Theirs]] = {name: [] for name in assistants}
    for i, run in enumerate(tqdm([plain[0], *plain], unit="prompt")):  # the first warms up
        tasks = {
            name: partial(generated, target, assistant, run, args.max_new_tokens)
            for name, assistant in assistants.items()
        }
        for name, theirs in middle_of_turns(tasks, args.repeat if i else 1).items():
            if i:
                found[name].append(theirs)
    return found


@torch.no_grad()
def generated(target, assistant, run: Run, n: int) -> Theirs:
    """Greedy tokens after the run's prompt, and the seconds they would take without the prefill:
    those of all but the first, which comes with it, scaled to all."""
    ids = torch.tensor([run.prompt], device=target.device)

    def timed(count: int) -> tuple[list[int], float]:
        begin = time.perf_counter()
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, do_sample=False,
            max_new_tokens=count, eos_token_id=list(run.eos_ids) or None, pad_token_id=0,
        )  # fmt: skip
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - begin

    _, prefill = timed(1)
    tokens, seconds = timed(n)
    seconds = max(seconds - prefill, 1e-9) * len(tokens) / max(len(tokens) - 1, 1)
    return Theirs(tokens, seconds, run.cache)
