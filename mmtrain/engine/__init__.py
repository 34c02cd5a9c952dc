"""The plan's instructions on a rank: stages, messages, the division of the loss, the optimizer."""
