"""Config files of published checkpoints: sizes, rotation and end tokens are those that transformers
reads. The longest context is checked too, which transformers does not compute."""

import json

import pytest
import torch
from conftest import GOLDEN

from minispec.checkpoints.config import as_list, config_json, read_config
from minispec.model import Transformer, count_parameters, rope_frequencies

CONFIGS = json.loads((GOLDEN.parent / "published.json").read_text())
GOLD = json.loads((GOLDEN.parent / "golden_published.json").read_text())
MAX_CONTEXTS = {  # if not max_position_embeddings
    "Mistral-7B-v0.1": 4096,  # the sliding window
    "Mistral-7B-OpenOrca": 4096,
    "vicuna-7b-v1.5-16k": 16384,  # max_sequence_length
    "Qwen2.5-7B-Instruct with the card's yarn": 131072,  # factor × original length
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_as_in_transformers(name, tmp_path):
    for file, content in CONFIGS[name].items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    config, gold = read_config(tmp_path), GOLD[name]
    with torch.device("meta"):
        assert count_parameters(Transformer(config)) == gold["parameters"]
    assert config.bos_id == gold["bos_token_id"]
    assert config.eos_ids == tuple(as_list(gold["eos_token_id"]))
    assert config.context == MAX_CONTEXTS.get(name, gold["max_position_embeddings"])
    frequencies, scale = rope_frequencies(config)
    torch.testing.assert_close(frequencies[::9], torch.tensor(gold["frequencies"]))
    assert scale == pytest.approx(gold["scale"])
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, torch.float32)))
    assert read_config(tmp_path) == config  # saved and read again
