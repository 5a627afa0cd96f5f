"""Check whether a decoder is lossless: prove it for this package, test it for any other. Exit code:
0 no loss found, 1 a loss, 2 nothing was examined, 3 sampling was not. The last line says so.

    python -m minispec.certify                                  run all checks on this package
    python -m minispec.certify --impl package.module:function   test a function
    python -m minispec.certify --server URL --model DIR         test a server with /v1/completions
    python -m minispec.certify --compare a.jsonl b.jsonl --model DIR     explain how two runs differ

The exact check sums over *every* random outcome of the real decoding loops, so passing it is a
proof for the toy models used; the tests show that each check can fail, with 33 deliberate bugs. A
function that draws its random numbers from torch, NumPy or Python's random is enumerated too, as
far as the time allows (functions/enumeration.py); its signature is in functions/decoder.py. A
server's greedy tokens are checked one by one against our float64 logits, and its samples with χ²
tests (servers/checks.py).
"""
