"""Sizes of paged attention: which row of the table a round gets, and how often its sequences are cut."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from weftline.engine.llm.kernels.attention_config import attention_config, split_keys_for, splits_for, width_tile


def test_one_row_for_each_sequence_is_decoding() -> None:
    assert attention_config(64, 64, 4, 128, 2, 90).lanes == 16
    assert attention_config(72, 64, 4, 128, 2, 90).lanes == 64


def test_all_heads_of_a_key_head_fit_into_a_tile() -> None:
    for group, arch in itertools.product((1, 7, 16, 20, 71), (80, 90)):
        assert attention_config(8, 8, group, 64, 2, arch).lanes >= max(group, 16)


def test_every_width_and_dtype_has_a_row() -> None:
    for width, number_bytes, arch, rows in itertools.product((16, 64, 80, 256), (2, 4), (80, 86, 90, 100), (8, 800)):
        assert attention_config(rows, 8, 4, width, number_bytes, arch).stages >= 2


def test_widths_are_powers_of_two_and_at_least_16() -> None:
    assert [width_tile(width) for width in (1, 16, 64, 80, 96, 128, 129)] == [16, 16, 64, 128, 128, 128, 256]


def test_few_sequences_are_cut_more_often_than_many() -> None:
    assert [splits_for(sequences, 8) for sequences in (1, 4, 16, 64, 500)] == [64, 32, 8, 4, 4]


def test_few_sequences_have_short_splits_so_that_most_of_a_gpu_works() -> None:
    assert [split_keys_for(sequences, 8) for sequences in (1, 2, 4, 8, 9, 64)] == [64, 64, 128, 128, 256, 256]
    # programs of Llama 8B's attention at 1 024 and 4 096 tokens, on 132 multiprocessors
    for sequences, tokens, least, most in ((1, 1024, 128, 128), (1, 4096, 512, 512), (8, 1024, 512, 512)):
        splits = min(tokens // split_keys_for(sequences, 8), splits_for(sequences, 8))
        assert least <= sequences * 8 * splits <= most
