"""`mmtrain doctor`: checks of a machine, from the driver to a pipeline."""
