"""Replaces polyspec_llama: ids count on; llama.cpp's rule fails at the third."""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, sys
words = sys.argv[1:]
if words == ["--help"]:
    sys.exit(print("Usage: ...\\n\\nllama.cpp: ggml 0.1, commit 1a2b"))
value = lambda name: words[words.index(name) + 1]
assert "--ids" in words and "--json" in words and "--seed" in words
last = int(value("--prompt").split()[-1])
ids = [(last + n + 1) % 2048 for n in range(int(value("--tokens")))]
if "--rule" in words and value("--rule") == "llama.cpp":
    ids[2] = 0
assert ("--windows" in words) == words[1].endswith(".gguf")
print(json.dumps({{"ids": ids, "seconds": 7.5, "prompt_seconds": 1.5, "levels": []}}))
"""


def write(folder: Path) -> list[Path]:
    """Write the program, and empty files for a target and a draft."""
    files = [folder / name for name in ("polyspec_llama", "target.gguf", "draft.gguf")]
    for file in files:
        file.write_text(_PROGRAM.format(python=sys.executable))
    files[0].chmod(0o755)
    return files
