"""Count what a round of each method launches on a GPU: operators outside graphs, graphs and copies,
and how often the host waits. Runs without a GPU, on the simulated device of the tests.

    python tests/gpu/launches.py
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import simulated  # noqa: E402
import torch  # noqa: E402
from conftest import method_options, random_model, random_tokens  # noqa: E402

from minispec import Sampling  # noqa: E402
from minispec.fast import captured  # noqa: E402
from minispec.generate import METHODS  # noqa: E402
from minispec.sampling import Seeded  # noqa: E402

TREES = {"fastmtp, tree": {"tree": 8}, "hybrid, tree": {"tree": 8}}
ROUNDS = 40  # in most of which no graph is captured


def median_round(row: str, temperature: float, graphs: bool) -> tuple[int, int]:
    """Launches and synchronisations of the median round."""
    method = row.split(",")[0]
    model = random_model(layers=2).to(simulated.DEVICE)
    options = method_options(model).get(method, {}) | TREES.get(row, {})
    if graphs:
        for network in (model, *options.values()):
            if isinstance(network, torch.nn.Module):
                captured.capture_passes(network)
    rounds = METHODS[method](model, random_tokens(9), Sampling(temperature), Seeded(), **options)
    counts = []
    for _ in range(ROUNDS):
        simulated.Simulated.launches = simulated.Simulated.synchronisations = 0
        with torch.inference_mode():
            next(rounds)
        counts.append((simulated.Simulated.launches, simulated.Simulated.synchronisations))
    return sorted(counts[1:])[ROUNDS // 2]


if __name__ == "__main__":
    captured.capture, captured.warm_up = simulated.capture, lambda run: run()
    captured.addresses = simulated.addresses
    print("| method | temperature | launches, eager | launches, graphs | synchronisations |")
    print("|---|---|---|---|---|")
    with simulated.SimulatedDevice():
        for row in [*METHODS, *TREES]:
            for temperature in 0.0, 0.7:
                eager, _ = median_round(row, temperature, graphs=False)
                launches, waits = median_round(row, temperature, graphs=True)
                print(f"| {row} | {temperature} | {eager} | {launches} | {waits} |", flush=True)
