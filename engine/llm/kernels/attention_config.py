"""How large the pieces of paged attention are on which GPU: one small table, with reasons.

Two kinds of rounds: *decode*, where the padded round has few rows for each sequence, so that tiles are small and the
time goes into reading keys and values; and *prefill*, where tiles are large and the time goes into multiplying. A
round of both kinds runs with prefill's sizes.

No row of this table was timed on a GPU. They were chosen from sizes: a program's registers (65 536 for all threads of
a multiprocessor, at most 255 for one; docs/kernels.md has what the compiler made of each row) and its shared memory, of
which a multiprocessor has 164 KiB on an A100 and 228 KiB on an H100. Reading a key takes two loads, its page's number
and then the key, and Triton divides the stages between them: of 5 stages, 2 are steps of keys and values under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.llm.kernels.launch import power_of_two

PROGRAMS = 1024
"""Programs that keep a large GPU busy: about eight for each of its 108 to 132 multiprocessors."""
SPLITS_MIN, SPLITS_MAX = 4, 64
"""Splits of a sequence: some even when sequences are many, since one of them may be much longer than the rest."""
SPLIT_KEYS = 256
"""Fewest keys worth a split: its part (4 bytes a number) is then about a hundredth of what it reads."""
SPLIT_ROWS = 8
"""Sequences of more rows are not split: they have several tiles, and the parts of many rows would be much to write."""
DECODE_ROWS = 4
"""Padded rounds of so many rows for each sequence, or fewer, run with decode's sizes."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The sizes of one compiled form.

    lanes:     pairs of a row and a query head in a tile; at least 16, the smallest matrix that GPUs multiply.
    step_keys: keys read at a time.
    warps, stages: as in a `Launch`.
    """

    lanes: int
    step_keys: int
    warps: int
    stages: int


# (decode, width tile) -> sizes, for numbers of 16 bits with keys of 16 or 8
_HOPPER = {
    # decode: the smallest tile, and several programs on a multiprocessor; nothing but reading takes time
    (True, 64): AttentionConfig(16, 128, 4, 5),
    (True, 128): AttentionConfig(16, 64, 4, 5),
    (True, 256): AttentionConfig(16, 32, 4, 5),
    # prefill: 128 lanes are two groups of four warps, each at a multiplication of 64 lanes, which Hopper has
    (False, 64): AttentionConfig(128, 64, 8, 5),
    (False, 128): AttentionConfig(128, 64, 8, 5),
    (False, 256): AttentionConfig(128, 32, 8, 3),
}
_AMPERE = {
    # less shared memory; 99 KiB on its smaller cards, so that no row takes more
    (True, 64): AttentionConfig(16, 128, 4, 5),
    (True, 128): AttentionConfig(16, 64, 4, 5),
    (True, 256): AttentionConfig(16, 32, 4, 3),
    (False, 64): AttentionConfig(128, 64, 8, 3),
    (False, 128): AttentionConfig(128, 32, 8, 5),  # 64 keys spill with keys of 8 bits
    (False, 256): AttentionConfig(64, 32, 8, 3),
}
# float32 is for comparing, not for speed: small tiles, since each multiplication is done as three of shorter numbers
_FLOAT32 = {
    (True, 64): AttentionConfig(16, 32, 4, 3),
    (True, 128): AttentionConfig(16, 32, 8, 3),
    (True, 256): AttentionConfig(16, 16, 8, 3),
    (False, 64): AttentionConfig(32, 32, 8, 3),
    (False, 128): AttentionConfig(16, 32, 4, 3),  # 32 lanes spill, a little, with Triton 3.6
    (False, 256): AttentionConfig(16, 16, 8, 3),  # 32 lanes spill
}


def width_tile(width: int) -> int:
    """Return the tile that holds a head of `width`: a power of two, the rest is masked."""
    return max(16, power_of_two(width))


def attention_config(
    rows: int, sequences: int, group: int, width: int, number_bytes: int, arch: int
) -> AttentionConfig:
    """Return the sizes for a padded round.

    rows, sequences: of the padded round.   group: query heads that share a key head.   width: the larger of a head's.
    number_bytes:    of the query's numbers, 2 or 4.   arch: such as 80 or 90.
    """
    table = _FLOAT32 if number_bytes == 4 else _HOPPER if arch >= 90 else _AMPERE
    tile = min(max(width_tile(width), 64), 256)
    found = table[rows <= DECODE_ROWS * sequences, tile]
    lanes = max(found.lanes, power_of_two(group))
    return AttentionConfig(lanes, found.step_keys, found.warps, found.stages)


def splits_for(sequences: int, kv_heads: int) -> int:
    """Return into how many splits a sequence can be cut at most, a power of two."""
    wanted = max(PROGRAMS // (sequences * kv_heads), 1)
    return min(max(1 << (wanted.bit_length() - 1), SPLITS_MIN), SPLITS_MAX)
