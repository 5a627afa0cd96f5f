"""A GPU's cost curve, to hold against the reader's own."""

# H200[n]: a pass of a 1.2B model over n rows, in bfloat16 with CUDA graphs, relative to one row. A
# straight line through what was measured for 8 and 64 rows, 1.06 and 1.13 ("1B, graphs" in
# tests/gpu/results/speed-2026-11-27-nvidia-h200.md)
H200 = [0.0, 1.0, *(1.05 + n / 800 for n in range(2, 65))]
