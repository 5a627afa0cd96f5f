"""minispec's own methods that need no heads, with --bitwise, as black boxes for the certifier."""

import functools
import os

from minispec.checkpoints.load import load
from minispec.fast import optimize
from minispec.generate import decode


@functools.cache
def read(checkpoint):
    model, _ = load(checkpoint, os.environ.get("PRECISION", "float32"), "cpu")
    optimize(model, bitwise=True)
    return model


def generate(method, checkpoint, prompt, *, drafted=True, **options):
    drafters = {"draft": read(f"{checkpoint}/draft")} if method == "speculative" else {}
    run = decode(read(checkpoint), None, prompt, method, **drafters, **options)
    return (run.tokens, run.stats["drafted"], run.stats["accepted"]) if drafted else run.tokens


plain = functools.partial(generate, "autoregressive", drafted=False)
prompt_lookup = functools.partial(generate, "prompt-lookup")
speculative = functools.partial(generate, "speculative")
jacobi = functools.partial(generate, "jacobi")
lookahead = functools.partial(generate, "lookahead")
