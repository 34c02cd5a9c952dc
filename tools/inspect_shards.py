"""`mmtrain inspect`, from a checkout: python tools/inspect_shards.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("inspect")
