"""`mmtrain convert`, from a checkout: python tools/convert_weights.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("convert")
