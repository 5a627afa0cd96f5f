"""The package as it is installed from a wheel, without this repository."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TOKENIZER, byte_model
from served import CorrectServer, serving

from minispec import load, paths
from minispec.checkpoints.load import save

IMPLEMENTATION = """
from functools import cache
from minispec import load
from minispec.generate import decode
loaded = cache(lambda folder: load(folder, "float32", "cpu"))
def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    return decode(*loaded(checkpoint), prompt, max_new_tokens=max_new_tokens, seed=seed,
                  temperature=temperature, top_k=top_k, top_p=top_p).tokens
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An empty folder into which a freshly built wheel was installed."""
    built, site = (tmp_path_factory.mktemp(name) for name in ("wheel", "site"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # built from a copy: setuptools leaves its build folder next to the sources
    copy = built / "source"
    files = subprocess.run(["git", "ls-files", "minispec", "weights/smollm2", "*.toml", "*.md",
                            "LICENSE"], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    for name in files.stdout.split():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "-w", built, copy], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """A command of the installed package, run in another folder with an empty cache."""
    env = os.environ | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True,
                          text=True, timeout=300)  # fmt: skip


@pytest.mark.slow
def test_it_generates_and_certifies_in_any_folder(installed, tmp_path):
    save(byte_model(eos=(256,)), TOKENIZER, tmp_path / "model")
    page = ["--html", "page.html"]
    for command in ["-m", "minispec.generate"], [str(installed / "bin" / "minispec"), "generate"]:
        done = run(installed, tmp_path, *command, "hi", "--model", "model", "--json", *page)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model"] == "model" and (tmp_path / "page.html").exists()
    (tmp_path / "mine.py").write_text(IMPLEMENTATION)
    certify = ["-m", "minispec.certify", "--impl", "mine.py:plain", "--checks", "greedy,limits"]
    done = run(installed, tmp_path, *certify, "--requests", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    server = CorrectServer(*load(tmp_path / "model", "float64", "cpu"))
    with serving(server) as url, torch.no_grad():
        certify = ["-m", "minispec.certify", "--server", url, "--checks", "limits", "--json"]
        done = run(installed, tmp_path, *certify, "--model", "model")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"]


@pytest.mark.slow
def test_heads_for_the_default_model_come_with_it(installed, tmp_path):
    """Which is downloaded into the user's cache folder, after one line that says so."""
    assert {each.name for each in (installed / "minispec/weights/smollm2").iterdir()} == {
        "medusa", "mtp"
    }  # fmt: skip
    done = run(installed, tmp_path, "-c", "from minispec import paths as p; "
               "print(p.TOY.exists(), p.SMOLLM2, p.SMOLLM2_HEADS)")  # fmt: skip
    toy, real, heads = done.stdout.split()
    assert toy == "False" and Path(real) == tmp_path / "cache" / "minispec" / "smollm2"
    assert Path(heads) == installed / "minispec" / "weights" / "smollm2"
    os.environ["PIP_NO_INDEX"] = "1"
    done = run(installed, tmp_path, "-m", "minispec.generate", "hi", "--method", "fastmtp")
    del os.environ["PIP_NO_INDEX"]
    assert done.returncode == 2 and "downloading SmolLM2-135M-Instruct (93 MB" in done.stderr
    if (paths.SMOLLM2 / "target" / "config.json").exists():  # as it would be after the download
        (Path(real) / "target").rmdir()  # made when its folder was tried, before the download
        (Path(real) / "target").symlink_to(paths.SMOLLM2 / "target")
        done = run(installed, tmp_path, "-m", "minispec.generate", "hi", "--method", "fastmtp",
                   "--max-new-tokens", "8", "--stats")  # fmt: skip
        assert done.returncode == 0 and "fastmtp: 8 tokens" in done.stderr, done.stderr


@pytest.mark.slow
def test_the_workflow_of_the_certifiers_readme_runs_in_a_fresh_environment(tmp_path):
    """Its steps in order, with this commit, and torch in the version at hand."""
    readme = (ROOT / "minispec" / "certify" / "README.md").read_text(encoding="utf-8")
    workflow = readme.split("```yaml\n")[1].split("```")[0]
    engine = readme.split("```python\n")[1].split("```")[0]
    (tmp_path / "engine.py").write_text(engine)
    assert "timeout-minutes: " in workflow
    install_torch, install, certify = re.findall(r"- run: (.*)", workflow)
    assert install_torch == "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    assert "@COMMIT" in install and certify.startswith("minispec certify --impl engine.py:decode")
    venv.create(tmp_path / "venv", with_pip=True)
    env = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
    env["PATH"] = f"{tmp_path / 'venv' / 'bin'}:{env['PATH']}"
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    here = re.sub(r"git\+https://\S+@COMMIT", f"git+file://{ROOT}@{head}", install)
    steps = f"pip install torch=={torch.__version__}", here, f"{certify} --only 'limits: lengths'"
    for step in steps:
        done = subprocess.run(step, shell=True, cwd=tmp_path, env=env, capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode == 0, (step, done.stdout[-1000:], done.stderr[-1000:])
    assert "no loss found" in done.stdout and "lengths" in (tmp_path / "lossless.xml").read_text()
