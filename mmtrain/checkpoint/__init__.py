"""A checkpoint's life, and the files to read for each part of it.

what it is       step_folder.py; what its tensors are: engine/optimizer.py
a run writes it  training/loop.py --> write.py --> step_folder.py
a run resumes    launching/training.py --> resume.py --> training/loop.py --> load.py -->
                 run_folder.py, `go_back`
"""
