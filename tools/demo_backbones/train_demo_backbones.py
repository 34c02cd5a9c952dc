"""Make the demo's frozen models: an LLM trained on text alone and a vision encoder trained on pictures alone.

    python tools/demo_backbones/train_demo_backbones.py --out DIR                  both, 12 minutes on two cores
    python tools/demo_backbones/train_demo_backbones.py --out mmtrain/demo         replace those of mmtrain
    python tools/demo_backbones/train_demo_backbones.py --out DIR --only vision

OUT gets llm/ (a transformers Llama and its tokenizer), vision/ (timm's local folder format) and backbones.json (steps,
accuracies, seconds). Equal arguments and versions on equal hardware give equal weights.

The encoder needs scikit-learn, whose package holds the handwriting: pip install 'mmtrain[demo]'
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import train_demo_llm
import train_demo_vision
import transformers

from mmtrain.base.printing import run_command, tell

PARTS = {"vision": (train_demo_vision.train, 3000), "llm": (train_demo_llm.train, 1200)}  # and its steps


def train_backbones(options: argparse.Namespace) -> None:
    """Train what the options name, and record how; raises OSError."""
    record_file = options.out / "backbones.json"
    options.out.mkdir(parents=True, exist_ok=True)  # what cannot be written should not show after minutes
    record = json.loads(record_file.read_text()) if record_file.is_file() else {}
    for name in [options.only] if options.only else PARTS:
        train, default_steps = PARTS[name]
        steps = options.steps or default_steps
        result = train(options.out / name, steps, options.seed, options.threads)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record[name] = {"steps": steps, "seed": options.seed, "threads": options.threads, **versions, **result}
        tell(json.dumps(record[name]))
    record_file.write_text(json.dumps(record, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for llm/, vision/ and backbones.json")
    parser.add_argument("--only", choices=PARTS, help="train one of them; the other's files stay as they are")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: what made the shipped ones)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and noise (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args(arguments)
    if options.threads < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--steps and --threads are at least 1")
    transformers.utils.logging.disable_progress_bar()
    return run_command(lambda: train_backbones(options))


if __name__ == "__main__":
    sys.exit(main())
