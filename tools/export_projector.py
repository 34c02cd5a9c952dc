"""`mmtrain export`, from a checkout: python tools/export_projector.py --help."""

from mmtrain.__main__ import run_as_script

if __name__ == "__main__":
    run_as_script("export")
