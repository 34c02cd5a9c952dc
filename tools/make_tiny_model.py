"""`mmtrain tiny`, from a checkout: python tools/make_tiny_model.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("tiny")
