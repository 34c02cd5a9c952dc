"""The stock classes of transformers that a run can become, one file each."""
