"""`mmtrain index`, from a checkout: python tools/index_shards.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("index")
