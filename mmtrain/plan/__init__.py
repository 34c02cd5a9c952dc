"""Who holds, trains and runs what, in which order, in what time and memory; without torch."""
