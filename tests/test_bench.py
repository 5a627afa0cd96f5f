"""The benchmark counts what it says, compares with plain decoding, and writes its contract."""

import json

import pytest
from conftest import random_model
from test_generate import TOKENIZER, byte_model

from minispec import bench
from minispec.checkpoint import save
from minispec.generate import decode
from minispec.tree import Step, Tree


def test_alpha_counts_tried_drafts_only():
    """4 drafted, 1 accepted: 2 were tried. 2 drafted and accepted: 2 were tried. None drafted."""

    class Rounds:
        rounds = [
            Step([1, 9], Tree.chain(0, [1, 2, 3, 4]), [0, 1]),
            Step([1, 2, 9], Tree.chain(0, [1, 2]), [0, 1, 2]),
            Step([9], Tree.chain(0, []), [0]),
        ]

    assert bench.alpha([Rounds()]) == 3 / 4
    Rounds.rounds = Rounds.rounds[2:]
    assert bench.alpha([Rounds()]) is None


def test_a_method_that_differs_from_plain_decoding_is_counted():
    model = random_model()
    a, b = (decode(model, None, [x], max_new_tokens=5) for x in (1, 2))
    row = bench.summarise("stories_en", "x", [a, b], [a, a], k=None, c=0.1, flat=1.0)
    assert row.differing == 1 and row.tokens_per_pass == 1.0 and row.predicted_speedup is None
    row = bench.summarise("stories_en", "x", [a], [a], k=3, c=0.1, flat=1.3)
    assert row.speedup == 1.0 and row.differing == 0


def test_the_command_writes_json_and_refuses_nonsense(tmp_path, capsys):
    save(byte_model(), TOKENIZER, tmp_path)
    options = ["--model", str(tmp_path), "--draft", str(tmp_path), "--heads", "", "--mtp", "",
               "--device", "cpu"]  # fmt: skip
    bench.main([*options, "--max-new-tokens", "6", "--json", "--k", "2", "--dtype", "float64"])
    out = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in out["rows"]}
    assert rows["autoregressive"]["speedup"] == 1.0 and rows["autoregressive"]["alpha"] is None
    assert rows["speculative k=2"]["alpha"] == 1.0  # the draft is the target
    assert rows["speculative k=2"]["predicted_tokens_per_pass"] == 3.0
    assert all(row["differing"] == 0 for row in rows.values())
    for wrong in (["--k", "0"], ["--draft", "nowhere"], ["--data", str(tmp_path)]):
        with pytest.raises(SystemExit) as caught:
            bench.main([*options, *wrong])
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("minispec: ")
