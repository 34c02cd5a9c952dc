"""Torch modules of a stage: `encoder`, `trained` (projector, LoRA), `llm`, `weights`."""
