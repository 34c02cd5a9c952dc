"""Scores of a run by lmms-eval: its environment, its driver, the questions."""
