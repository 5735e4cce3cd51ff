"""Tile sizes of paged attention for each GPU.

Two kinds of rounds: *decode*, where the padded round has few rows for each sequence, so that tiles are small and the
time goes into reading keys and values; and *prefill*, where tiles are large and the time goes into multiplying. A
round of both kinds runs with prefill's sizes.

Hopper's rows of width 128 are the fastest of those that were timed on an H200 (docs/gpu-validation.md). The others were
chosen from sizes: a program's registers (65 536 for all threads of a multiprocessor, at most 255 for one;
docs/kernels.md has what the compiler made of each row) and its shared memory, of which a multiprocessor has 164 KiB on
an A100 and 228 KiB on an H100. Reading a key takes two loads, its page's number and then the key, and Triton divides
the stages between them: of 5 stages, 2 are steps of keys and values under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.llm.kernels.launch import power_of_two

PROGRAMS = 1024
"""Programs that keep a large GPU busy: about eight for each of its 108 to 132 multiprocessors."""
SPLITS_MIN, SPLITS_MAX = 4, 64
"""Splits of a sequence: some even when sequences are many, since one of them may be much longer than the rest."""
SEQUENCES_TILE = 512
"""Sequences that a program looks at in one go to find its own: as many as rounds have, so that one is enough."""
_SPLIT_KEYS = ((16, 64), (64, 128))
"""(pairs of a sequence and a key head, fewest keys worth a split): few pairs leave most of a GPU idle at 256."""
SPLIT_KEYS_MANY = 256
"""Fewest keys worth a split of many: its part (4 bytes a number) is about a hundredth of what it reads."""
SPLIT_ROWS = 8
"""Sequences of more rows are not split: they have several tiles, and the parts of many rows would be much to write."""
DECODE_ROWS = 1
"""Padded rounds of so many rows for each sequence, or fewer, run with decode's sizes. A CUDA graph of more rows than a
round may have sequences is padded to all of those, so its rows for each say little: it serves prompts too."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tile sizes and launch parameters of one compiled attention kernel.

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
    (True, 128): AttentionConfig(16, 64, 4, 3),
    (True, 256): AttentionConfig(16, 32, 4, 5),
    # prefill: 128 lanes are two groups of four warps, each at a multiplication of 64 lanes, which Hopper has
    (False, 64): AttentionConfig(128, 64, 8, 5),
    # of width 128 one group is faster: a decoding row beside a prompt takes a tile of its own, mostly empty
    (False, 128): AttentionConfig(64, 32, 4, 3),
    (False, 256): AttentionConfig(128, 32, 8, 3),
}
_AMPERE = {
    # less shared memory; 99 KiB on its smaller cards, so that no row takes more
    (True, 64): AttentionConfig(16, 128, 4, 5),
    (True, 128): AttentionConfig(16, 64, 4, 5),
    (True, 256): AttentionConfig(16, 32, 4, 3),
    (False, 64): AttentionConfig(128, 64, 8, 3),
    (False, 128): AttentionConfig(128, 32, 8, 5),
    (False, 256): AttentionConfig(64, 32, 8, 3),
}
# keys of 8 bits that are read bit by bit take more registers: 128 lanes spill
_BITS = {(False, 128): AttentionConfig(64, 32, 8, 5)}
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
    """Return the tile width of a head: the next power of two, at least 16; the rest is masked."""
    return max(16, power_of_two(width))


def attention_config(
    rows: int, sequences: int, group: int, width: int, number_bytes: int, arch: int, bits: bool = False
) -> AttentionConfig:
    """Select the tile sizes for a padded round.

    rows, sequences: of the padded round.   group: query heads that share a key head.   width: the larger of a head's.
    number_bytes:    of the query's numbers, 2 or 4.   arch: such as 80 or 90.   bits: float8 is read bit by bit.
    """
    table = _FLOAT32 if number_bytes == 4 else _HOPPER if arch >= 90 else _AMPERE
    tile = min(max(width_tile(width), 64), 256)
    row = (rows <= DECODE_ROWS * sequences, tile)
    found = _BITS[row] if bits and row in _BITS and number_bytes == 2 else table[row]
    lanes = max(found.lanes, power_of_two(group))
    return AttentionConfig(lanes, found.step_keys, found.warps, found.stages)


def splits_for(sequences: int, kv_heads: int) -> int:
    """Return the largest number of splits of a sequence, a power of two."""
    wanted = max(PROGRAMS // (sequences * kv_heads), 1)
    return min(max(1 << (wanted.bit_length() - 1), SPLITS_MIN), SPLITS_MAX)


def split_keys_for(sequences: int, kv_heads: int) -> int:
    """Return the fewest keys of one split; fewer programs get shorter splits."""
    pairs = sequences * kv_heads
    return next((keys for most, keys in _SPLIT_KEYS if pairs <= most), SPLIT_KEYS_MANY)
