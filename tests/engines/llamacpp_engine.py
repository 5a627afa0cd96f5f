"""llama.cpp's server (xllamacpp 2026.10.11549), as black boxes for the certifier."""

import os
from multiprocessing.pool import ThreadPool

import httpx
from batches import batching
from gguf_file import PRECISION, convert
from llamacpp_server import start
from serve import LLAMACPP_MODES

CACHE = {"float32": "f32", "bfloat16": "bf16"}[PRECISION]
FLAGS = f"-c 4096 -np 8 -t 1 -fa off -ctk {CACHE} -ctv {CACHE}"
SAMPLERS = {"samplers": ["temperature", "top_k", "top_p"], "min_p": 0.0, "repeat_penalty": 1.0}


def engine(mode: str, room: int = 8):
    """Make a decoding function from a mode of serve.py. The engine's context is longer by `room`:
    answers with drafts end before the end of the context (finding 28 of README.md)."""
    servers: dict = {}  # the last one, by checkpoint

    def load(checkpoint: str):
        if checkpoint not in servers:
            servers.clear()
            model, draft = convert(checkpoint, room=room), ""
            if os.path.exists(f"{checkpoint}/draft"):
                draft = convert(f"{checkpoint}/draft", room=room)
            flags = f"{FLAGS} {LLAMACPP_MODES[mode]}".format(draft=draft).split()
            servers[checkpoint] = start(["-m", model, *flags])
        return servers[checkpoint]

    def many(checkpoint: str, requests: list[dict]) -> list:
        address = load(checkpoint).listening_address

        def ask(request: dict) -> dict:
            if not request["max_new_tokens"]:  # it would generate one
                return {"tokens": []}
            body = request | SAMPLERS | {"return_tokens": True}
            body["n_predict"] = body.pop("max_new_tokens")
            return httpx.post(f"{address}/completion", json=body, timeout=120).json()

        with ThreadPool(len(requests)) as pool:
            answers = pool.map(ask, requests)
        timings = [answer.get("timings", {}) for answer in answers]
        drafted, accepted = (sum(t.get(name, 0) for t in timings)
                             for name in ("draft_n", "draft_n_accepted"))  # fmt: skip
        tokens = [answer["tokens"] for answer in answers]
        return [(tokens[0], drafted, accepted), *tokens[1:]]

    return batching(many)


plain, draft, draft_probabilistic = map(engine, ("plain", "draft", "draft-probabilistic"))
ngram_map, ngram_map4v, ngram_mod, ngram_cache, several = map(
    engine, ("map", "map4v", "mod", "cache", "several")
)
ngram, ngram_at_end = engine("ngram"), engine("ngram", room=0)
