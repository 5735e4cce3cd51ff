"""The steps of benchmarks/deaths.py: each adds its letter, so that an answer shows whether it went the right way."""


def a(text: str) -> str:
    return text + "a"


def b(text: str) -> str:
    return text + "b"


def c(text: str) -> str:
    return text + "c"
