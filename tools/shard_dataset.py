"""`mmtrain shard`, from a checkout: python tools/shard_dataset.py --help."""

from mmtrain.__main__ import door

if __name__ == "__main__":
    door("shard")
