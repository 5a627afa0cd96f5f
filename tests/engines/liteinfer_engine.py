"""liteinfer 0.7.0, which batches continuously, as black boxes for the certifier. It does not
speculate, and needs triton even on a CPU. It reads end tokens only from the tokenizer, and the
certifier's has none."""

import asyncio
import atexit
import functools

import torch
from batches import batching
from end_tokens import end_tokens
from liteinfer import AsyncLLM, SamplingParams

loop = asyncio.new_event_loop()


@functools.cache
def load(checkpoint: str) -> AsyncLLM:
    """Start an engine whose text consists of the ids."""
    limits = dict(max_num_seqs=8, max_waiting_seqs=2**20)
    llm = AsyncLLM(checkpoint, dtype=torch.float32, device="cpu", **limits)
    loop.run_until_complete(llm.start())
    atexit.register(lambda: loop.run_until_complete(llm.stop()))
    llm.engine.tokenizer.encode = list
    return llm


def many(fixed, checkpoint, requests):
    llm, stop = load(checkpoint), end_tokens(checkpoint) if fixed else None

    async def answer(request):
        n = request["max_new_tokens"]
        if n == 0:  # it does not accept 0
            return []
        params = SamplingParams(
            request["temperature"], request["top_p"], request["top_k"] or -1, max_tokens=n,
            stop_token_ids=stop, seed=request["seed"])  # fmt: skip
        return (await llm.generate([request["prompt"]], params))[0].token_ids

    async def answers():
        return await asyncio.gather(*map(answer, requests))

    return loop.run_until_complete(answers())


plain = batching(functools.partial(many, False))
plain_fixed = batching(functools.partial(many, True))  # it names the end tokens in every request
