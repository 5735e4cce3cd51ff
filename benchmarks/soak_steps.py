"""The steps of benchmarks/soak.py. `Hoards` keeps a part of its inputs if configured: a planted leak."""

# ruff: noqa: F821 - port types are no names


def more(x: "float32[N]") -> "float32[N]":
    return x + 1


def halves(x: "float32[N]") -> "float32[M]":
    return x[: len(x) // 2]


class Honest:
    """Shouts, and refuses what is bad."""

    def __call__(self, text: str) -> str:
        if text.startswith("bad"):
            raise ValueError("this one is bad")
        return text.upper()


class Hoards(Honest):
    """The same, and keeps 4 KB of each call."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __call__(self, text: str) -> str:
        self.kept.append(bytearray(b"x" * 4_000))
        return super().__call__(text)
