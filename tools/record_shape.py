"""`mmtrain record`, from a checkout: python tools/record_shape.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("record")
