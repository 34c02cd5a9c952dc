"""Runs, exports and answers from Python: the functions of `import mmtrain`."""
