"""The commands of `mmtrain`, one file each; `train` and `plan` are in `launch.py`."""
