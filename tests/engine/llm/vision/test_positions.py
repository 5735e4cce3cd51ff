"""Positions in three dimensions, compared with transformers' own."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from weftline.engine.llm.vision.families import FAMILIES
from weftline.engine.llm.vision.layout import video_layout_of
from weftline.engine.llm.vision.positions import RotaryPositions
from weftline.engine.llm.vision.prompt import PromptImage


def image(start: int, rows: int, columns: int) -> PromptImage:
    return PromptImage((range(start, start + rows * columns),), (rows, columns), b"")


def test_a_picture_advances_by_its_longer_side():
    found = RotaryPositions([image(2, 2, 3)])
    assert found.rows(0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert found.shift == -3


def test_any_part_is_the_same_part_of_all():
    found = RotaryPositions([image(3, 2, 2), image(9, 1, 5)])
    whole = found.rows(0, 30)
    for start in range(30):
        for count in range(1, 30 - start):
            assert (found.rows(start, count) == whole[:, start : start + count]).all()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_are_those_of_transformers(models, family):
    model, rng = models(family).reference.model, random.Random(3)
    for _ in range(20):
        images, kinds, at, grids = [], [], 0, []
        for _ in range(rng.randint(1, 3)):
            text = rng.randint(1, 9)
            rows, columns = rng.randint(1, 5), rng.randint(1, 5)
            images.append(image(at + text, rows, columns))
            kinds += [0] * text + [1] * (rows * columns)
            grids.append([1, rows * 2, columns * 2])
            at = len(kinds)
        kinds += [0] * rng.randint(1, 9)
        expected, shift = model.get_rope_index(
            torch.ones(1, len(kinds), dtype=torch.long),
            mm_token_type_ids=torch.tensor([kinds], dtype=torch.int),
            image_grid_thw=torch.tensor(grids),
        )
        found = RotaryPositions(images)
        assert (found.rows(0, len(kinds)) == expected[:, 0].numpy()).all()
        assert found.shift == int(shift)


def part(start: int, rows: int, columns: int, number: int, time: int) -> PromptImage:
    return dataclasses.replace(image(start, rows, columns), part=number, time=time)


def test_parts_of_a_video_follow_each_other_in_time():
    found = RotaryPositions([part(2, 1, 2, 0, 0), part(4, 1, 2, 1, 2), part(6, 1, 2, 2, 4)])
    assert found.rows(0, 10).tolist() == [
        [0, 1, 2, 2, 4, 4, 6, 6, 4, 5],
        [0, 1, 2, 2, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 2, 3, 2, 3, 4, 5],
    ]
    assert (found.shift, found.shift_at(1), found.shift_at(8)) == (-4, 0, -4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_of_videos_are_those_of_transformers(models, family):
    made = models(family)
    model, rng = made.reference.model, random.Random(4)
    config, processor = made.reference.config, made.processor.video_processor
    layout = video_layout_of(FAMILIES[family], config, processor, None)
    for _ in range(40):
        images, kinds, grids, videos, seconds = [], [], [], [], []
        for _ in range(rng.randint(1, 3)):
            kinds += [0] * rng.randint(1, 9)
            rows, columns, parts = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 6)
            if rng.random() < 0.3:
                images.append(image(len(kinds), rows, columns))
                grids.append([1, rows * 2, columns * 2])
                kinds += [1] * (rows * columns)
                continue
            fps = rng.choice((24.0, 1.0, 0.25, rng.uniform(0.2, 40)))
            for number, time in enumerate(layout.times_of(2 * parts, fps)):
                images.append(part(len(kinds), rows, columns, number, time))
                kinds += [2] * (rows * columns)
            videos.append([parts, rows * 2, columns * 2])
            seconds.append(2 / fps)
        kinds += [0] * rng.randint(1, 9)
        expected, _ = model.get_rope_index(
            torch.ones(1, len(kinds), dtype=torch.long),
            mm_token_type_ids=torch.tensor([kinds], dtype=torch.int),
            image_grid_thw=torch.tensor(grids) if grids else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            second_per_grid_ts=torch.tensor(seconds) if seconds else None,
        )
        found = RotaryPositions(images)
        assert (found.rows(0, len(kinds)) == expected[:, 0].numpy()).all()
        for start in range(len(kinds) + 2):
            whole = found.rows(0, len(kinds) + 4)
            assert (found.rows(start, 2) == whole[:, start : start + 2]).all()
