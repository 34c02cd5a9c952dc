"""From a configuration to processes that train: checks, the plan of this machine, ranks."""
