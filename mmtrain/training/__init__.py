"""One rank's life: the loop, evaluation, records, the console."""
