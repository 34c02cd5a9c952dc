"""`mmtrain export`, from a checkout: python tools/export_projector.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("export")
