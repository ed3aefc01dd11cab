"""Slots: states, choice, checksums, voiding; and the words on the live state."""

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from deadpool_ext import _native
from deadpool_ext.protocol.types import InvariantError, ShardSpec, SlotInfo, UsageError, Version
from deadpool_ext.replication import memfd
from deadpool_ext.replication.arena import (
    SLOTS,
    SealedSlot,
    Segment,
    SlotState,
    choose_slot,
    is_above,
    segment_bytes,
)
from deadpool_ext.replication.errors import (
    ArenaMemoryError,
    CorruptSlotError,
    SegmentFormatError,
    SlotStateError,
)

SPEC = ShardSpec(rank=3, shard_bytes=10_000, meta_capacity=600, layout_digest="0123456789abcdef")


def at(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


def content(version: Version) -> bytes:
    return bytes((version.v * 7 + version.lineage + i) & 0xFF for i in range(SPEC.shard_bytes))


def put(segment: Segment, version: Version, meta: bytes = b"meta") -> SealedSlot:
    index = segment.begin(version)
    data = content(version)
    segment.writable(index).shard[:] = data
    return segment.seal(index, meta, _native.crc32c(data))


def versions(segment: Segment) -> list[Version]:
    return [slot.version for slot in segment.slots()]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(SPEC)
    yield made
    made.close()


def test_a_new_segment_holds_nothing(segment: Segment) -> None:
    assert segment.slots() == [] and segment.newest() is None and segment.sealed() == []
    assert [segment.state(i) for i in range(SLOTS)] == [SlotState.EMPTY] * SLOTS
    assert segment.live().version is None and not segment.live().dirty


def test_sealed_content_is_read_back_by_another_mapping(segment: Segment) -> None:
    put(segment, at(4, 1), b"step four")
    other = Segment.open(segment.path)
    assert other.spec == SPEC
    assert other.sealed() == [SlotInfo(rank=3, version=at(4, 1), layout_digest=SPEC.layout_digest)]
    views = other.read(at(4, 1))
    assert views.shard.readonly and bytes(views.shard) == content(at(4, 1)) and bytes(views.meta) == b"step four"
    views.shard.release(), views.meta.release()
    other.close()


def test_an_unsealed_slot_is_never_found_inv2(segment: Segment) -> None:
    put(segment, at(1))
    index = segment.begin(at(2))
    segment.writable(index).shard[:] = content(at(2))
    assert versions(segment) == [at(1)] and segment.find(at(2)) is None
    with pytest.raises(SlotStateError):
        segment.read(at(2))


def test_the_newest_sealed_slot_is_never_overwritten_inv3(segment: Segment) -> None:
    for v in range(20):
        before = segment.newest()
        index = segment.begin(at(v))
        assert before is None or before.index != index
        assert before is None or (segment.unchanged(before) and segment.verify(before))
        segment.writable(index).shard[:] = content(at(v))
        segment.seal(index, b"", _native.crc32c(content(at(v))))
    assert versions(segment) == [at(17), at(18), at(19)]


def test_choice_over_all_small_cases_inv3() -> None:
    def sealed(index: int, v: int) -> SealedSlot:
        return SealedSlot(
            index=index, sequence=2, version=at(v), meta_bytes=0, shard_crc=0, meta_crc=0, layout_digest=""
        )

    for states in itertools.product(SlotState, repeat=SLOTS):
        holds = [i for i in range(SLOTS) if states[i] is SlotState.SEALED]
        for order in itertools.permutations(range(len(holds))):
            slots = [sealed(index, v) for index, v in zip(holds, order, strict=True)]
            for pinned in [frozenset(), *(frozenset({i}) for i in range(SLOTS))]:
                choice = choose_slot(states, slots, pinned)
                newest = max(slots, key=lambda s: s.version, default=None)
                allowed = set(range(SLOTS)) - pinned - ({newest.index} if newest else set())
                assert choice in allowed  # with three slots and one pin there always is one
                if any(i in allowed and i not in holds for i in range(SLOTS)):
                    assert choice not in holds  # nothing sealed goes while there is room
    assert choose_slot([SlotState.SEALED] * 3, [sealed(i, i) for i in range(3)], frozenset({0, 1})) is None


def test_a_pinned_slot_stays_while_versions_go_by(segment: Segment) -> None:
    slot = put(segment, at(1))
    segment.pin(slot)
    for v in range(2, 9):
        put(segment, at(v))
    assert versions(segment) == [at(1), at(7), at(8)]
    assert segment.verify(slot)
    segment.unpin()
    put(segment, at(9))
    assert versions(segment) == [at(7), at(8), at(9)]


def test_only_one_slot_is_pinned_and_only_what_is_there(segment: Segment) -> None:
    first, second = put(segment, at(1)), put(segment, at(2))
    segment.pin(first)
    with pytest.raises(InvariantError):
        segment.pin(second)
    segment.unpin()
    segment.void(second)
    with pytest.raises(SlotStateError):
        segment.pin(second)
    assert segment.pinned() == frozenset()


@pytest.mark.parametrize(
    ("version", "target", "above"),
    [
        (at(5), at(5), False),
        (at(4), at(5), False),
        (at(4, 9), at(5, 1), False),
        (at(6), at(5), True),
        (at(5, 1), at(5, 0), True),
        (at(5, 0), at(5, 1), True),
    ],
)
def test_what_is_above_a_target(version: Version, target: Version, above: bool) -> None:
    assert is_above(version, target) is above


def test_void_above_leaves_the_target_and_what_is_below(segment: Segment) -> None:
    for v in (4, 5, 6):
        put(segment, at(v))
    assert segment.void_above(at(5)) == [at(6)]
    assert versions(segment) == [at(4), at(5)]
    assert segment.void_above(at(5)) == []
    put(segment, at(6, 1))  # takes the void slot
    assert versions(segment) == [at(4), at(5), at(6, 1)]


def test_one_flipped_bit_is_never_read(segment: Segment) -> None:
    for bit in (0, 12_345, SPEC.shard_bytes * 8 - 1):
        slot = put(segment, at(bit))
        assert segment.verify(slot)
        segment.flip_bit(slot, bit)
        assert not segment.verify(slot)
        with pytest.raises(CorruptSlotError):
            segment.read(at(bit))
        segment.flip_bit(slot, bit)
        assert segment.verify(slot)


def test_metadata_are_read_without_the_shard_being_looked_at(segment: Segment) -> None:
    slot = put(segment, at(1))
    segment.flip_bit(slot, 12_345)  # in the shard
    assert bytes(segment.read_meta(at(1))) == bytes(segment.views(slot).meta)
    segment.flip_bit(slot, SPEC.shard_bytes * 8 + 3)  # in the metadata
    with pytest.raises(CorruptSlotError, match="metadata"):
        segment.read_meta(at(1))
    with pytest.raises(SlotStateError):
        segment.read_meta(at(2))


def test_a_slot_that_its_writer_has_begun_to_overwrite_is_not_voided(segment: Segment) -> None:
    slots = [put(segment, at(v)) for v in (1, 2, 3)]
    other = Segment.open(segment.path)
    assert segment.begin(at(4)) == slots[0].index
    other.void(slots[0])
    assert segment.state(slots[0].index) is SlotState.WRITING
    other.void(slots[2])
    assert segment.state(slots[2].index) is SlotState.VOID and versions(segment) == [at(2)]
    other.close()


def test_a_descriptor_with_a_flipped_bit_is_not_found(segment: Segment) -> None:
    slot = put(segment, at(1))
    raw = memfd.attach(segment.path)
    descriptor = 256 + 128 * slot.index
    for byte in range(descriptor + 16, descriptor + 16 + 48):
        raw[byte] ^= 0x10
        assert segment.slots() == []
        raw[byte] ^= 0x10
    assert segment.find(at(1)) == slot
    raw.close()


def test_a_slot_that_changed_hands_is_noticed(segment: Segment) -> None:
    old = put(segment, at(1))
    for v in (2, 3, 4):
        put(segment, at(v))
    assert not segment.unchanged(old)
    with pytest.raises(SlotStateError):
        segment.views(old)
    segment.void(old)  # no effect on its successor
    assert versions(segment) == [at(2), at(3), at(4)]


def test_sealing_a_version_again_replaces_it(segment: Segment) -> None:
    put(segment, at(1), b"first")
    put(segment, at(1), b"second")
    assert versions(segment) == [at(1)]
    assert bytes(segment.read(at(1)).meta) == b"second"


def test_metadata_beyond_its_capacity_is_refused(segment: Segment) -> None:
    index = segment.begin(at(1))
    with pytest.raises(SlotStateError, match="600"):
        segment.seal(index, bytes(601), 0)
    segment.abandon(index)
    assert segment.state(index) is SlotState.EMPTY


def test_only_the_writer_of_a_slot_may_seal_it(segment: Segment) -> None:
    index = segment.begin(at(1))
    other = Segment.open(segment.path)
    with pytest.raises(SlotStateError):
        other.seal(index, b"", 0)
    with pytest.raises(InvariantError):
        segment.begin(at(2))
    other.close()


def test_changes_counts_every_transition(segment: Segment) -> None:
    seen = [segment.changes()]
    index = segment.begin(at(1))
    seen.append(segment.changes())
    slot = segment.seal(index, b"", _native.crc32c(segment.writable(index).shard))
    seen.append(segment.changes())
    segment.void(slot)
    seen.append(segment.changes())
    assert seen == sorted(set(seen))


def test_a_writer_killed_half_way_leaves_the_rest_intact(segment: Segment) -> None:
    put(segment, at(1))
    put(segment, at(2))
    child = os.fork()
    if child == 0:
        mine = Segment.open(segment.path)
        mine.begin_mutation(3)
        mine.writable(mine.begin(at(3))).shard[:100] = bytes(100)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert versions(segment) == [at(1), at(2)] and all(segment.verify(slot) for slot in segment.slots())
    assert segment.live().dirty and segment.live().mutating == 3
    assert len(segment.reset_writing()) == 1
    assert SlotState.WRITING not in [segment.state(i) for i in range(SLOTS)]
    put(segment, at(3))
    assert versions(segment) == [at(1), at(2), at(3)]


def test_live_words(segment: Segment) -> None:
    segment.set_live(at(0))
    segment.begin_mutation(1)
    assert segment.live().version == at(0) and segment.live().dirty
    segment.set_live(at(1))
    other = Segment.open(segment.path)
    assert other.live().version == at(1) and not other.live().dirty
    other.close()


def test_too_little_memory_is_a_typed_error_with_numbers() -> None:
    with pytest.raises(ArenaMemoryError) as caught:
        Segment.create(SPEC, available=1000)
    assert isinstance(caught.value, UsageError)
    assert caught.value.needed == segment_bytes(SPEC) and caught.value.available == 1000
    for part in (str(segment_bytes(SPEC)), "1000", "data-parallel", "memory limit"):
        assert part in str(caught.value)


def test_more_than_the_machine_has_is_refused_without_allocating() -> None:
    with pytest.raises(ArenaMemoryError):
        Segment.create(ShardSpec(rank=0, shard_bytes=2**50, meta_capacity=0, layout_digest="x"))


def test_a_file_size_limit_is_a_typed_error_too() -> None:
    child = os.fork()
    if child == 0:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            Segment.create(SPEC)
        except ArenaMemoryError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_memory_limits_of_cgroups_count(tmp_path) -> None:  # type: ignore[no-untyped-def]
    job = tmp_path / "job"
    (job / "step").mkdir(parents=True)
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("900\n")
    (job / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    (job / "step" / "memory.max").write_text("max\n")
    (job / "step" / "memory.current").write_text("10\n")
    assert memfd._cgroup_headroom(tmp_path, "0::/job/step\n") == 150
    assert memfd._cgroup_headroom(tmp_path, "0::/\n") is None
    v1 = tmp_path / "memory" / "a"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("500\n")
    (v1 / "memory.usage_in_bytes").write_text("600\n")
    assert memfd._cgroup_headroom(tmp_path, "5:cpu,memory:/a\n1:name=systemd:/\n") == 0


def test_something_else_is_not_opened_as_a_segment(segment: Segment) -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, segment_bytes(SPEC))
    with pytest.raises(SegmentFormatError):
        Segment.open(f"/proc/self/fd/{fd}")
    os.close(fd)
    put(segment, at(1))
    raw = memfd.attach(segment.path)
    raw[8] ^= 1  # another abi
    with pytest.raises(SegmentFormatError, match="abi"):
        Segment.open(segment.path)
    raw.close()


def test_views_outlive_close(segment: Segment) -> None:
    put(segment, at(1))
    other = Segment.open(segment.path)
    views = other.read(at(1))
    other.close()
    assert bytes(views.shard) == content(at(1))


def test_a_rank_without_state_still_has_versions() -> None:
    empty = Segment.create(ShardSpec(rank=0, shard_bytes=0, meta_capacity=100, layout_digest="x"))
    slot = empty.seal(empty.begin(at(1)), b"m", _native.crc32c(b""))
    assert empty.verify(slot) and bytes(empty.read(at(1)).meta) == b"m"
    empty.close()
