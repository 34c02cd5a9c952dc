"""data/shards/verify.py: every changed byte that a reader would see is found, and where it is."""

import os
import random
import tarfile

import pytest
from archives import conversation, picture, write_tar

from mmtrain.data.shards.index import MissingIndex, index_path, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.shards.verify import verify_shard

LONG = "folder/" + "k" * 120  # does not fit into a ustar name: a header of its own holds it


@pytest.fixture
def shard(tmp_path):
    """A tar of three samples, one of them with a long key and a suffix in capitals, and its
    index.
    """
    files = []
    for number, key in enumerate(("a", "b", LONG)):
        files.append((f"{key}.json", conversation("<image>What?", f"Number {number}.")))
        files.append((f"{key}.PNG", picture(3 + number, 2)))
    path = write_tar(tmp_path / "s.tar", files, tarfile.PAX_FORMAT)
    write_index(path, scan_shard(path, lambda sample: None))
    return path


def members(path):
    """(key, TarInfo) of each member, as Python's tarfile reads them."""
    with tarfile.open(path) as archive:
        return [(member.name.rpartition(".")[0], member) for member in archive]


def change(path, offset, content):
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def test_a_sound_shard_has_no_damage_and_every_byte_of_its_members_was_compared(shard):
    sizes = []
    assert verify_shard(shard, sizes.append) == []
    found = [member.size for _, member in members(shard)]
    assert sizes == [found[0] + found[1], found[2] + found[3], found[4] + found[5]]


def test_every_flipped_bit_of_a_content_is_found_at_its_member(shard):
    draw = random.Random(0)
    sound = shard.read_bytes()
    for key, member in members(shard):
        for _ in range(20):
            at, bit = member.offset_data + draw.randrange(member.size), draw.randrange(8)
            change(shard, at, bytes([sound[at] ^ 1 << bit]))
            (damage,) = verify_shard(shard)
            assert (damage.shard, damage.key, damage.offset) == (
                str(shard),
                key,
                member.offset_data,
            )
            assert "CRC32" in damage.detail
            change(shard, at, sound[at : at + 1])
    assert verify_shard(shard) == []


def test_every_flipped_bit_of_a_header_is_found_at_its_member_or_the_one_that_it_leads_to(shard):
    draw = random.Random(1)
    sound = shard.read_bytes()
    for key, member in members(shard):
        for _ in range(20):
            # name, numbers, type, checksum, magic
            at, bit = member.offset + draw.randrange(257), draw.randrange(8)
            change(shard, at, bytes([sound[at] ^ 1 << bit]))
            damages = verify_shard(shard)
            assert damages, f"bit {bit} of byte {at - member.offset} in the header of {member.name}"
            assert (damages[0].key, damages[0].offset) == (key, member.offset_data)
            change(shard, at, sound[at : at + 1])


def test_behind_a_header_that_cannot_be_read_contents_are_still_compared(shard):
    (_, second), (last_key, last) = members(shard)[1], members(shard)[-1]
    change(shard, second.offset, bytes(512))
    change(shard, last.offset_data + 5, b"?")
    first, other = verify_shard(shard)
    assert (first.key, first.offset) == ("a", second.offset_data)
    assert "end of archive" in first.detail
    assert (other.key, other.offset) == (last_key, last.offset_data)


def test_a_member_that_another_one_swallows_and_one_that_the_index_does_not_know_are_found(
    tmp_path,
):
    texts = [(f"{key}.json", conversation("Hi.", key * 2000)) for key in "abc"]
    shard = write_tar(tmp_path / "s.tar", texts)
    index = scan_shard(shard, lambda sample: None)
    (b,), (c,) = index.members[1:]
    swallowing = shard.read_bytes()[b.offset : c.offset + c.size]
    write_tar(shard, [texts[0], ("b.json", swallowing)])
    write_index(shard, index)
    (damage,) = verify_shard(shard)
    assert (damage.key, damage.offset) == ("b", b.offset) and "its header says" in damage.detail
    write_tar(shard, texts)
    for column in (index.keys, index.members, index.image_sizes):
        column.pop()
    write_index(shard, index)
    (damage,) = verify_shard(shard)
    assert (damage.key, damage.offset, damage.detail) == (
        None,
        c.offset,
        "'c.json' is not in the index",
    )


def test_a_shard_of_another_size_and_a_damaged_index_are_damage_as_a_whole(shard):
    os.truncate(shard, shard.stat().st_size - 512)
    (damage,) = verify_shard(shard)
    assert (damage.shard, damage.key, damage.offset) == (str(shard), None, None)
    assert "stale" in damage.detail
    os.truncate(index_path(shard), 50)
    (damage,) = verify_shard(shard)
    assert "is damaged" in damage.detail


def test_without_an_index_there_is_nothing_to_compare_with(shard):
    index_path(shard).unlink()
    with pytest.raises(MissingIndex):
        verify_shard(shard)
