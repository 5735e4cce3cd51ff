import io
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from weftline.errors import InputError
from weftline.nodes import media
from weftline.nodes.audio import resample
from weftline.nodes.image import image_claim
from weftline.nodes.media import MediaLimits, decode_audio, decode_image, to_value
from weftline.nodes.ports import PortType


def encoded(format: str, image: Image.Image | None = None, **options: object) -> bytes:
    out = io.BytesIO()
    (image or Image.new("RGB", (20, 10), (200, 30, 40))).save(out, format, **options)
    return out.getvalue()


def wav(seconds: float = 0.5, rate: int = 16_000, channels: int = 1, format: str = "WAV") -> bytes:
    out = io.BytesIO()
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    soundfile.write(out, np.stack([tone] * channels, axis=1), rate, format=format)
    return out.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG whose header claims a size; its data is one empty chunk."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_each_format_becomes_rgb(format: str) -> None:
    image = decode_image(encoded(format))
    assert image.shape == (10, 20, 3) and image.dtype == np.uint8
    assert np.abs(image[5, 10].astype(int) - [200, 30, 40]).max() < 12


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
def test_each_mode_becomes_three_channels(mode: str) -> None:
    format = "JPEG" if mode == "CMYK" else "PNG"
    assert decode_image(encoded(format, Image.new(mode, (4, 3)))).shape == (3, 4, 3)


def test_sixteen_bit_grey_keeps_its_brightness() -> None:
    grey = Image.fromarray(np.full((2, 2), 0x8000, np.uint16))
    assert decode_image(encoded("PNG", grey)).tolist() == [[[128] * 3] * 2] * 2


def test_transparency_is_shown_on_white() -> None:
    assert decode_image(encoded("PNG", Image.new("RGBA", (1, 1), (0, 0, 0, 0)))).tolist() == [[[255, 255, 255]]]


def test_exif_turns_the_picture_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encoded("JPEG", exif=exif)).shape == (20, 10, 3)


@pytest.mark.parametrize(
    "data",
    [
        png(14_000, 14_000),
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (13_999).to_bytes(3, "little") * 2 + b"\0" * 8,
        b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\0" * 20,
        b"BM" + b"\0" * 12 + struct.pack("<Iii", 40, 50_000, -50_000) + b"\0" * 30,
        b"\xff\xd8\xff\xc0\x00\x11\x08" + struct.pack(">HH", 60_000, 60_000) + b"\0" * 20,
    ],
    ids=["png", "webp", "gif", "bmp", "jpeg"],
)
def test_a_huge_picture_is_refused_by_its_header_before_it_is_decoded(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(InputError, match="pixels_max is 25000000"):
        decode_image(data)
    assert time.process_time() - started < 0.1


def test_pixels_max_is_the_callers() -> None:
    assert decode_image(encoded("PNG"), pixels_max=200).shape == (10, 20, 3)
    with pytest.raises(InputError, match="20 x 10"):
        decode_image(encoded("PNG"), pixels_max=199)


def test_animations_huge_metadata_and_empty_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="animated PNG"):
        decode_image(png(4, 4, (b"acTL", struct.pack(">II", 1000, 0))))
    with pytest.raises(InputError, match="metadata"):
        decode_image(png(4, 4, (b"iCCP", b"x" * (5 << 20))))
    with pytest.raises(InputError, match="no picture in it"):
        decode_image(png(0, 4))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + b"\0" * 40, "JPEG 2000"),
        (b"8BPS\x00\x01" + b"\0" * 40, "Photoshop"),
        (b"\xd0\xcf\x11\xe0" + b"\0" * 40, "FlashPix"),
        (b"II*\x00" + b"\0" * 40, "TIFF"),
        (b"%PDF-1.7" + b"\0" * 40, "PDF"),
        (b"\0\0\0\x18ftypavif" + b"\0" * 40, "AVIF"),
        (b"hello", "no picture that is known"),
        (b"", "no picture that is known"),
    ],
)
def test_other_formats_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(InputError, match=name):
        decode_image(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_damaged_picture_is_an_input_error_without_addresses(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    data = encoded(format, Image.fromarray(noise))
    rng = np.random.default_rng(1)
    broken = [data[:end] for end in range(0, len(data), max(len(data) // 60, 1))]
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
        broken.append(bytes(damaged))
    refused = 0
    for candidate in broken:
        try:
            assert decode_image(candidate).shape[2] == 3
        except InputError as error:
            refused += 1
            assert "0x" not in str(error) and "object at" not in str(error)
    assert refused > 20


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_each_recording_format_becomes_mono_16_khz(format: str) -> None:
    samples = decode_audio(wav(1.0, 44_100, 2, format))
    assert samples.dtype == np.float32 and samples.ndim == 1 and abs(len(samples) - 16_000) < 1500
    middle = samples[4000:12_000]
    assert abs(float(np.abs(middle).max()) - 0.5) < 0.05


def test_resampling_keeps_tones_and_removes_what_would_alias() -> None:
    time_s = np.arange(44_100) / 44_100
    kept = resample(np.sin(2 * np.pi * 1000 * time_s).astype(np.float32), 44_100, 16_000)[500:-500]
    wanted = np.sin(2 * np.pi * 1000 * (np.arange(16_000) / 16_000))[500:-500]
    assert np.abs(kept - wanted).max() < 2e-3
    removed = resample(np.sin(2 * np.pi * 10_000 * time_s).astype(np.float32), 44_100, 16_000)[500:-500]
    assert np.abs(removed).max() < 1e-3


def test_a_rate_without_a_common_divisor_costs_little() -> None:
    samples = np.random.default_rng(1).standard_normal(10 * 191_999, np.float32)
    began = time.process_time()
    resample(samples, 191_999, 16_000)
    assert time.process_time() - began < 0.25
    began = time.process_time()
    assert len(decode_audio(wav(244 / 191_999, 191_999))) == 21
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_001, 22_050, 48_000, 191_999, 192_000])
@pytest.mark.parametrize("samples", [1, 2, 7, 244])
def test_a_short_recording_of_any_rate_keeps_its_level(rate: int, samples: int) -> None:
    found = resample(np.ones(samples, np.float32), rate, 16_000)
    assert len(found) == -(-samples * 16_000 // rate)
    assert np.isfinite(found).all() and np.abs(found).max() < 1.5


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_001, 22_050, 48_000, 191_999, 192_000])
def test_any_rate_becomes_as_many_samples_as_it_should(rate: int) -> None:
    assert len(resample(np.zeros(rate, np.float32), rate, 16_000)) == 16_000


def test_an_hour_claimed_by_a_wav_header_is_refused_at_once() -> None:
    data = bytearray(wav(1.0))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 3600 * 16_000 * 2)
    with pytest.raises(InputError, match="promises 115200000 bytes"):
        decode_audio(bytes(data))


def test_an_hour_of_flac_silence_is_refused_before_it_is_decoded() -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(3600 * 8000, np.int16), 8_000, format="FLAC", subtype="PCM_16")
    assert len(out.getvalue()) < 1 << 20
    started = time.process_time()
    with pytest.raises(InputError, match=r"3600\.0 s; the limit seconds_max is 120"):
        decode_audio(out.getvalue())
    assert time.process_time() - started < 0.2


def test_a_header_that_claims_too_little_is_stopped_while_reading() -> None:
    class Liar:
        samplerate, channels, frames, format = 16_000, 1, 10, "WAV"

        def read(self, count: int, **_: object) -> np.ndarray:
            return np.zeros((count, 1), np.float32)

    from weftline.nodes.audio import _blocks

    with pytest.raises(InputError, match="more than 5 s"):
        list(_blocks(Liar(), 5.0))


@pytest.mark.parametrize(
    ("rate", "channels", "found"), [(768_000, 1, "768000 Hz"), (4_000, 1, "4000 Hz"), (16_000, 9, "9 ch")]
)
def test_odd_rates_and_channel_counts_are_refused(rate: int, channels: int, found: str) -> None:
    with pytest.raises(InputError, match=found):
        decode_audio(wav(0.01, rate, channels))


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_damaged_recordings_are_input_errors_without_addresses(format: str) -> None:
    data = wav(0.3, format=format)
    rng = np.random.default_rng(2)
    broken = [data[:end] for end in range(0, len(data), max(len(data) // 50, 1))]
    for _ in range(50):
        damaged = bytearray(data)
        damaged[rng.integers(min(len(data), 200))] ^= 1 << rng.integers(8)
        broken.append(bytes(damaged))
    refused = 0
    for candidate in broken:
        try:
            assert decode_audio(candidate, seconds_max=60).dtype == np.float32
        except InputError as error:
            refused += 1
            assert "0x" not in str(error) and "object at" not in str(error)
    assert refused > 5


def test_audio_arrays_are_scaled_and_checked() -> None:
    audio = PortType("audio")
    assert to_value(audio, np.array([16384, -32768], np.int16)).tolist() == [0.5, -1.0]
    right = np.zeros(16, np.float32)
    assert to_value(audio, right) is right
    for wrong in (np.zeros((2, 8), np.float32), np.array([np.nan]), np.array([30_000.0]), np.zeros(0), np.array(["a"])):
        with pytest.raises(InputError):
            to_value(audio, wrong)
    with pytest.raises(InputError, match="seconds_max is 1"):
        to_value(audio, np.zeros(16_001, np.float32), MediaLimits(seconds_max=1))


def test_image_arrays_and_pillow_pictures_are_taken() -> None:
    image = PortType("image")
    right = np.zeros((2, 3, 3), np.uint8)
    assert to_value(image, right) is right
    for taken in (right[..., 0], right[..., :1], np.zeros((2, 3, 4), np.uint8), right[:, ::-1], Image.new("L", (3, 2))):
        value = to_value(image, taken)
        assert value.shape == (2, 3, 3) and value.flags.c_contiguous
    for wrong, fix in ((right.astype(np.float32), "255"), (np.zeros((3, 8, 9), np.uint8), "transpose"), (7, "got")):
        with pytest.raises(InputError, match=fix):
            to_value(image, wrong)
    with pytest.raises(InputError, match="pixels_max is 5"):
        to_value(image, right, MediaLimits(pixels_max=5))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_view_of_a_picture_gives_what_its_bytes_give(format: str) -> None:
    data = encoded(format)
    view = memoryview(b"..." + data)[3:]
    assert image_claim(view) == image_claim(data)
    assert decode_image(view).tobytes() == decode_image(data).tobytes()


def test_only_views_that_may_change_are_copied() -> None:
    image, data = PortType("image"), encoded("PNG")
    read_only = media.encoded(image, memoryview(data), MediaLimits())
    changing = media.encoded(image, memoryview(bytearray(data)), MediaLimits())
    assert read_only is not None and isinstance(read_only.data, memoryview)
    assert changing is not None and isinstance(changing.data, bytes)


def test_paths_are_opened_only_for_callers_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(encoded("PNG"))
    inside = MediaLimits(paths=True)
    assert to_value(PortType("image"), tmp_path / "photo.png", inside).shape == (10, 20, 3)
    assert to_value(PortType("image"), str(tmp_path / "photo.png"), inside).shape == (10, 20, 3)
    with pytest.raises(InputError, match="send the bytes"):
        to_value(PortType("image"), tmp_path / "photo.png")
    for wrong in (tmp_path / "absent.png", tmp_path, Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(InputError):
            to_value(PortType("image"), wrong, inside)
    with pytest.raises(InputError, match="the limit is 10"):
        to_value(PortType("bytes"), tmp_path / "photo.png", MediaLimits(paths=True, bytes_max=10))


def test_tensors_are_compared_with_their_port() -> None:
    wanted = PortType.parse("float32[N, N, 3]")
    right = np.zeros((2, 2, 3), np.float32)
    assert to_value(wanted, right) is right
    assert to_value(wanted, right[:, ::-1]).flags.c_contiguous
    assert to_value(wanted, right.astype(">f4")).dtype.isnative
    assert to_value(wanted, right.tolist()).dtype == np.float32
    out = io.BytesIO()
    np.save(out, right)
    assert to_value(wanted, out.getvalue()).shape == (2, 2, 3)
    for wrong in (
        right.astype(np.float64),
        np.zeros((2, 3, 3), np.float32),
        right[0],
        [[1], [1, 2]],
        "text",
        out.getvalue()[:-4],
    ):
        with pytest.raises(InputError):
            to_value(wanted, wrong)


def test_numbers_become_a_tensor_only_if_it_holds_them() -> None:
    assert to_value(PortType.parse("uint8[]"), 255).tolist() == 255
    for wrong in (256, -1, 0.5):
        with pytest.raises(InputError, match="exactly"):
            to_value(PortType.parse("uint8[]"), wrong)
    with pytest.raises(InputError, match="object"):
        to_value(PortType("tensor"), np.array([{}], object))


def test_a_pickled_npy_is_not_loaded(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.save(out, np.array([Harm(tmp_path / "ran")], object), allow_pickle=True)
    with pytest.raises(InputError):
        to_value(PortType("tensor"), out.getvalue())
    assert not (tmp_path / "ran").exists()


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_text_and_json_are_checked() -> None:
    assert to_value(PortType("text"), "naïve".encode()) == "naïve"
    assert to_value(PortType("json"), b'{"a": [1]}') == {"a": [1]}
    assert to_value(PortType("json"), "a text") == "a text"
    nested: list[object] = []
    for _ in range(100):
        nested = [nested]
    for type, wrong in (
        ("text", b"\xff"), ("text", 7), ("text", "\ud800"), ("json", b"{"), ("json", b"[" * 100_000), ("json", nested),
        ("json", {(1, 2): 3}), ("json", object()), ("bytes", "text"), ("detections", []),
    ):  # fmt: skip
        with pytest.raises(InputError):
            to_value(PortType(type), wrong)


def test_a_list_takes_what_its_elements_take() -> None:
    grey = np.zeros((2, 3), np.uint8)
    values = to_value(PortType.parse("list[image]"), (encoded("PNG"), grey), MediaLimits())
    assert [value.shape for value in values] == [(10, 20, 3), (2, 3, 3)]
    assert to_value(PortType.parse("list[text]"), ["a", b"b"]) == ["a", "b"]
    assert to_value(PortType.parse("list[list[json]]"), [[], [{}, None]]) == [[], [{}, None]]
    assert to_value(PortType.parse("list[image]"), []) == []


def test_an_array_of_one_more_dim_is_a_list_of_its_rows() -> None:
    rows = to_value(PortType.parse("list[float32[3]]"), np.ones((2, 3), np.float32))
    assert isinstance(rows, list) and [row.tolist() for row in rows] == [[1, 1, 1]] * 2
    assert len(to_value(PortType.parse("list[image]"), np.zeros((4, 5, 6, 3), np.uint8))) == 4
    with pytest.raises(InputError, match=r"wants list\[image\] \(a list\), got uint8\[5, 6, 3\]"):
        to_value(PortType.parse("list[image]"), np.zeros((5, 6, 3), np.uint8))


@pytest.mark.parametrize("raw", ["text", b"bytes", Path("/etc/passwd"), 7, None, {"a": 1}])
def test_what_is_no_list_is_no_list_of_anything(raw: object) -> None:
    with pytest.raises(InputError, match="a list"):
        to_value(PortType.parse("list[text]"), raw, MediaLimits(paths=True))


def test_limits_hold_for_each_element_and_the_error_names_it() -> None:
    small = MediaLimits(pixels_max=50, bytes_max=400)
    fits = np.zeros((5, 5, 3), np.uint8)
    with pytest.raises(InputError, match=r"element 1: .*pixels_max"):
        to_value(PortType.parse("list[image]"), [fits, np.zeros((10, 10, 3), np.uint8)], small)
    with pytest.raises(InputError, match=r"element 0: .*limit is 400"):
        to_value(PortType.parse("list[text]"), ["x" * 401], small)
    with pytest.raises(InputError, match="element 1: element 0: wants"):
        to_value(PortType.parse("list[list[text]]"), [[], [7]])
    with pytest.raises(InputError, match="element 0: a path"):
        to_value(PortType.parse("list[image]"), ["photo.png"])


def test_masked_numbers_are_no_values_of_a_tensor() -> None:
    wanted, numbers = PortType.parse("float32[N]"), np.array([1, 2], np.float32)
    with pytest.raises(InputError, match=r"masked numbers\n    fix: fill them, x.filled"):
        to_value(wanted, np.ma.masked_array(numbers, [False, True]))
    assert to_value(wanted, np.ma.masked_array(numbers, [False, False])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("dtype", "fix"), [("bfloat16", "pass the numbers as a list"), ("float8_e5m2", "torch tensor")]
)
def test_the_fix_for_dtypes_that_numpy_lacks_is_none_of_numpy(dtype: str, fix: str) -> None:
    with pytest.raises(InputError, match=fix):
        to_value(PortType.parse(f"{dtype}[N]"), np.ones(2, np.float32))
