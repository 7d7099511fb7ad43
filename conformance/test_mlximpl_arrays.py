"""The array functions of mlximpl, by example: for engines that keep the state of a cache themselves."""

import mlx.core as mx
import pytest

import mlximpl


def columns(*tokens: int, size: int = 2) -> mx.array:
    """One row (1, 1, S, size) whose columns name their token."""
    return mx.array([[[[float(t)] * size for t in tokens]]]).reshape(1, 1, len(tokens), size)


def rows(*tokens: list[int]) -> mx.array:
    """A batch (B, 1, S, 2), one list of tokens a row."""
    return mx.concatenate([columns(*row) for row in tokens])


def names(array: mx.array) -> list[list[int]]:
    """The tokens that a batch's columns name."""
    read: list[list[float]] = array[:, 0, :, 0].tolist()  # type: ignore[assignment]
    return [[int(t) for t in row] for row in read]


def bits(mask: mx.array) -> list[list[str]]:
    """A mask (B, 1, N, T) as strings, one a query."""
    read: list[list[list[bool]]] = mask[:, 0].tolist()  # type: ignore[assignment]
    return [["".join("1" if seen else "." for seen in query) for query in row] for row in read]


def test_decode_mask_of_one_query() -> None:
    assert bits(mlximpl.decode_mask([0, 3], n=1, width=5)) == [["11111"], ["...11"]]


def test_decode_mask_of_several_queries_with_a_window() -> None:
    mask = mlximpl.decode_mask([0, 2], n=3, width=5, window=2)
    assert mask.shape == (2, 1, 3, 5)
    assert mask.dtype == mx.bool_
    assert bits(mask) == [[".11..", "..11.", "...11"], ["..1..", "..11.", "...11"]]


def test_decode_mask_takes_an_array_of_pads() -> None:
    mask = mlximpl.decode_mask(mx.array([1, 0]), n=2, width=2)
    assert bits(mask) == [["..", ".1"], ["1.", "11"]]


def test_a_query_that_is_a_pad_sees_nothing_and_attention_stays_finite() -> None:
    mask = mlximpl.decode_mask([4], n=1, width=2)
    assert bits(mask) == [[".."]]
    x = mx.ones((1, 1, 2, 8))
    out = mx.fast.scaled_dot_product_attention(x[:, :, :1], x, x, scale=1.0, mask=mask)
    assert mx.isfinite(out).all().item()


def test_ring_mask_lies_in_slot_order() -> None:
    # Slots 0 to 4 hold the columns 2 3 4 0 1: the newest token is in slot 2.
    assert bits(mlximpl.ring_mask([0], width=5, slot=2)) == [["11111"]]
    assert bits(mlximpl.ring_mask([1], width=5, slot=2)) == [["111.1"]]
    assert bits(mlximpl.ring_mask([0, 4], width=5, slot=2, window=2)) == [[".11.."], ["..1.."]]
    assert bits(mlximpl.ring_mask([3], width=5, slot=4)) == [["...11"]]


@pytest.mark.parametrize(("width", "slot", "window"), [(1, 0, None), (4, 0, 1), (4, 3, 2), (6, 1, 5)])
def test_ring_mask_is_the_decode_mask_in_another_order(width: int, slot: int, window: int | None) -> None:
    pads = [0, 1, width]
    ring = bits(mlximpl.ring_mask(pads, width, slot, window))
    straight = bits(mlximpl.decode_mask(pads, 1, width, window))
    order = [(s - slot - 1) % width for s in range(width)]
    assert ring == [["".join(query[c] for c in order) for query in row] for row in straight]


def test_masks_refuse_what_they_cannot_answer() -> None:
    with pytest.raises(ValueError, match="3 queries do not fit into 2 columns"):
        mlximpl.decode_mask([0], n=3, width=2)
    with pytest.raises(ValueError, match="N is 0"):
        mlximpl.decode_mask([0], n=0, width=2)
    with pytest.raises(ValueError, match="window_size must be at least 1, not 0"):
        mlximpl.ring_mask([0], width=4, slot=1, window=0)
    with pytest.raises(ValueError, match="slot 4 does not lie in a ring of 4 slots"):
        mlximpl.ring_mask([0], width=4, slot=4)


def test_merge_rows_aligns_to_the_right() -> None:
    pairs = [(columns(*t), columns(*t, size=3)) for t in ((1, 2), (3, 4, 5, 6), ())]
    keys, values, left_padding, width = mlximpl.merge_rows(pairs)
    assert names(keys) == [[0, 0, 1, 2], [3, 4, 5, 6], [0, 0, 0, 0]]
    assert keys.shape == (3, 1, 4, 2)
    assert values.shape == (3, 1, 4, 3)
    assert (left_padding, width) == ([2, 0, 4], 4)


def test_merge_rows_takes_blocks_and_a_least_width() -> None:
    block = rows([1, 2], [3, 4])
    merged = mlximpl.merge_rows([(block, block), (columns(5), columns(5))], width=3)
    assert names(merged.keys) == [[0, 1, 2], [0, 3, 4], [0, 0, 5]]
    assert merged.left_padding == [1, 1, 2]


def test_merge_rows_refuses_rows_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="merge of no rows"):
        mlximpl.merge_rows([])
    wide, narrow = columns(1, size=4), columns(1, size=2)
    with pytest.raises(ValueError, match=r"keys of 4 float32.*keys of 2 float32"):
        mlximpl.merge_rows([(wide, wide), (narrow, narrow)])
    with pytest.raises(ValueError, match="differ in rows, heads or columns"):
        mlximpl.merge_rows([(columns(1), columns(1, 2))])


@pytest.mark.parametrize("kept", [[0], [2, 3], [3, 1], [1, 1, 2], [-1, 0], [0, 1, 2, 3], []])
def test_filter_rows(kept: list[int]) -> None:
    batch = rows([0, 1], [10, 11], [20, 21], [30, 31])
    keys, values = mlximpl.filter_rows(batch, -batch, kept)
    assert names(keys) == [names(batch)[row] for row in kept]
    assert mx.array_equal(values, -keys)
    assert keys.shape == (len(kept), 1, 2, 2)


def test_filter_rows_takes_an_array_and_refuses_a_missing_row() -> None:
    batch = rows([0], [1])
    keys, _ = mlximpl.filter_rows(batch, batch, mx.array([1]))
    assert names(keys) == [[1]]
    with pytest.raises(IndexError, match=r"filter rows \[5\], but the batch holds 2 rows"):
        mlximpl.filter_rows(batch, batch, [5])
    with pytest.raises(ValueError, match="whole number"):
        mlximpl.filter_rows(batch, batch, [True, False])


def test_filter_rows_does_not_keep_the_rows_that_left() -> None:
    others = mx.get_active_memory()
    batch = mx.zeros((64, 1, 256, 64))
    mx.eval(batch)
    taken = batch.nbytes
    keys, values = mlximpl.filter_rows(batch, batch, [7])
    mx.eval(keys, values)
    del batch
    mx.synchronize()
    assert mx.get_active_memory() - others < taken / 4


@pytest.mark.parametrize("head", range(1, 6))
def test_temporal_view_with_a_sink(head: int) -> None:
    slots = list(range(100, 106))
    ordered = [100, *slots[head:], *slots[1:head]]
    assert names(mlximpl.temporal_view(columns(*slots), head, keep=1)) == [ordered]


def test_temporal_view_refuses_a_head_outside() -> None:
    with pytest.raises(ValueError, match="head 7 with 0 sinks"):
        mlximpl.temporal_view(columns(1, 2), 7)
    with pytest.raises(ValueError, match="head 0 with 1 sinks"):
        mlximpl.temporal_view(columns(1, 2), 0, keep=1)


def test_roll_rows_moves_right_pads_to_the_front() -> None:
    batch = rows([1, 2, 9], [3, 4, 5], [6, 9, 9], [7, 9, 9])
    assert names(mlximpl.roll_rows(batch, [1, 0, 2, 2])) == [[9, 1, 2], [3, 4, 5], [9, 9, 6], [9, 9, 7]]
    assert names(mlximpl.roll_rows(batch, [1, 0, 0, 2], width=2))[0] == [2, 1, 9]
    with pytest.raises(ValueError, match="4 rows of 3 columns"):
        mlximpl.roll_rows(batch, [4, 0, 0, 0])


def test_no_array_given_is_changed() -> None:
    batch = rows([1, 2, 3], [4, 5, 6])
    for _ in range(2):
        mlximpl.merge_rows([(batch, batch), (columns(7), columns(7))])
        mlximpl.filter_rows(batch, batch, [1])
        mlximpl.roll_rows(batch, [1, 2])
        mlximpl.temporal_view(batch, 1)
        assert names(batch) == [[1, 2, 3], [4, 5, 6]]


def test_what_does_not_move_is_handed_out_as_a_new_array() -> None:
    given = mx.arange(4.0).reshape(2, 1, 2, 1)
    filtered, _ = mlximpl.filter_rows(given, given, [0, 1])
    for taken in (filtered, mlximpl.roll_rows(given, [0, 0])):
        taken[...] = 0
        assert given.reshape(-1).tolist() == [0, 1, 2, 3]


def test_roll_rows_refuses_what_the_array_has_not() -> None:
    array = mx.arange(4.0).reshape(2, 1, 2, 1)
    with pytest.raises(ValueError, match="width 9, but the array has 2 columns"):
        mlximpl.roll_rows(array, [0, 1], width=9)
    with pytest.raises(ValueError, match=r"must be \(B, H, S, D\)"):
        mlximpl.roll_rows(array[0], [0])
    with pytest.raises(ValueError, match=r"must be \(B, H, S, D\)"):
        mlximpl.temporal_view(array[0], 1)
