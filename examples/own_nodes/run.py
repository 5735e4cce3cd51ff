"""Run pipeline.yaml in worker processes and print its outputs as they arrive: `python examples/own_nodes/run.py`."""

from pathlib import Path

import weftline

ARTICLE = """\
A loom has two sets of threads. The warp is stretched on it. A shuttle carries the weft through it. Patterns come from
lifting other warp threads in each row."""


def main() -> None:
    with weftline.load(Path(__file__).with_name("pipeline.yaml")).open() as session:
        for event in session.stream(article=ARTICLE.replace("\n", " ")):
            if not event.last:
                print(f"{event.output}: {event.value}")
            elif event.output == "words":
                print(f"words: {', '.join(event.value)}")


if __name__ == "__main__":
    main()
