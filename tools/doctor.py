"""`mmtrain doctor`, from a checkout: python tools/doctor.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("doctor")
