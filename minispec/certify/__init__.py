"""Is this decoder lossless? Ours, proven; anyone's, tested.

    python -m minispec.certify                                  every check of every method here
    python -m minispec.certify --impl package.module:function   a black box (blackbox.py says what)
    python -m minispec.certify --server URL --model DIR         a server of /v1/completions
    python -m minispec.certify --compare a.jsonl b.jsonl --model DIR     explain two runs

The exact check sums over *every* random outcome of the real decoding loops, so passing it is a
proof for the toy models at hand; the mutants show that each check can fail. A black box whose
random numbers come from torch is followed through every outcome as well (takeover.py). Of a server
each greedy token is judged by our logits in float64, and what it draws by χ² (server.py).
"""
