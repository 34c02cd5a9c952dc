"""Files that leave a run: Hugging Face folders, LLaVA, peft, projector; their verification."""
