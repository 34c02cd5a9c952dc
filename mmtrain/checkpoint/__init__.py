"""A checkpoint's life, a module each.

what it is on disk     step_folder
a run writes it        write, into the folder that run_folder makes
a run goes on from it  choose (the launcher decides) --> load (each rank gets what it trains) --> run_folder.go_back
"""
