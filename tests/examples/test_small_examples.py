"""The small examples answer rightly in worker processes, and each command of examples/README.md prints what it says."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnxruntime")
import onnxruntime
import torch

from examples.models import tiny_onnx
from examples.models.scenes import demo_picture
from weftline.engine.session import Session, load
from weftline.errors import InputError, PipelineError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("classifier", "tabular", "embedding", "user_node")
WORD = re.compile(r"[\w.+-]+|[^\w\s]")


@pytest.fixture(scope="module")
def flower() -> Iterator[Session]:
    with load(EXAMPLES / "tabular.yaml").open() as session:
        yield session


@pytest.fixture(scope="module")
def sharpen() -> Iterator[Session]:
    with load(EXAMPLES / "user_node.yaml").open() as session:
        yield session


@pytest.mark.slow
def test_the_tiny_models_are_small_and_right_on_unseen_data() -> None:
    torch.set_num_threads(1)
    paths = {path.name: path for path in tiny_onnx.SHIPPED.glob("*.onnx")}
    assert set(paths) == {"shape-classifier.onnx", "tabular.onnx"}
    for path in paths.values():
        assert path.stat().st_size < 300_000
        assert b'File "' not in path.read_bytes(), f"{path.name} holds stack traces of the machine it was made on"
    images, shapes = tiny_onnx.objects("held_out", 60)
    (scores,) = onnxruntime.InferenceSession(paths["shape-classifier.onnx"]).run(None, {"image": images.numpy()})
    assert np.mean(scores.argmax(1) == shapes.numpy()) >= 0.95


@pytest.mark.slow
def test_the_classifier_names_every_object_of_the_demo_picture() -> None:
    with load(EXAMPLES / "classifier.yaml").open() as session:
        for cut, shape in tiny_onnx.cut_out(demo_picture()):
            result = session.run(photo=cut)
            assert result["label"] == shape
            assert result["scores"].shape == (4,) and result["scores"].dtype == np.float32
            assert result["scores"].sum() == pytest.approx(1, abs=1e-5)
            assert result["scores"].min() >= 0


def test_the_tabular_step_names_nearly_all_unseen_flowers(flower: Session) -> None:
    unseen = tiny_onnx.flowers(100, seed=2)
    right = 0
    for measures, habitat, species in zip(unseen.measures, unseen.habitat, unseen.species, strict=True):
        result = flower.run(measures=measures, habitat=habitat)
        assert result["species"].dtype == np.int64 and result["species"].shape == ()
        assert result["probabilities"].argmax() == result["species"]
        assert result["probabilities"].sum() == pytest.approx(1, abs=1e-5)
        right += int(result["species"] == species)
    assert right >= 95


def test_the_tabular_step_reads_both_inputs(flower: Session) -> None:
    measures = [4.0, 1.2, 5.8, 2.8]
    meadow, marsh = (flower.run(measures=measures, habitat=habitat)["species"] for habitat in (0, 1))
    assert (tiny_onnx.SPECIES[meadow], tiny_onnx.SPECIES[marsh]) == ("reedstar", "sunbell")


def test_the_tabular_step_refuses_a_row_of_the_wrong_length(flower: Session) -> None:
    with pytest.raises(InputError, match=r"measures.*float32\[4\]"):
        flower.run(measures=[4.0, 1.2], habitat=0)


@pytest.mark.slow
def test_the_embedding_example_returns_mean_states_and_similarity(tmp_path: Path) -> None:
    one, other = "How many red circles are there?", "Which shapes?"
    expected = _random_llama(tmp_path / "models" / "shapes-chat", (one, other))
    for name in ("embedding.yaml", "functions.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    with load(tmp_path / "embedding.yaml").open() as session:
        result = session.run(text=one, other=other)
        same = session.run(text=other, other=other)
    assert result["embedding"].dtype == np.float32
    assert result["embedding"] == pytest.approx(expected[0], abs=1e-5)
    assert result["similarity"] == pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)
    assert result["similarity"] < 0.99
    assert same["similarity"] == pytest.approx(1, abs=1e-5)


def _random_llama(folder: Path, texts: tuple[str, ...]) -> np.ndarray:
    """Write a tiny Llama of random weights that reads letters, and return its embeddings of texts: float32 [N, 16]."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    letters = {letter: place for place, letter in enumerate(["<pad>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), initializer_range=0.5, **sizes)).eval()
    network.save_pretrained(folder)
    with torch.inference_mode():
        ids = [torch.tensor([[letters[letter] for letter in text]]) for text in texts]
        means = torch.cat([network.model(one).last_hidden_state.mean(1) for one in ids])
    return torch.nn.functional.normalize(means, dim=-1).numpy()


@pytest.mark.slow
def test_the_users_node_sharpens_as_its_formula_says(sharpen: Session) -> None:
    photo = np.asarray(Image.open(EXAMPLES / "data" / "photo.png").convert("RGB"))
    result = sharpen.run(photo=EXAMPLES / "data" / "photo.png")
    assert result["sharpened"].shape == photo.shape and result["sharpened"].dtype == np.uint8
    weights = np.exp(-0.5 * np.arange(-2.0, 3.0) ** 2)  # a radius of 2 px has a standard deviation of 1 px
    weights /= weights.sum()
    for y, x in ((60, 235), (170, 250), (291, 489), (400, 20)):
        window = photo[y - 2 : y + 3, x - 2 : x + 3].astype(np.float64)
        blurred = np.einsum("i,j,ijc->c", weights, weights, window)
        wanted = np.clip(photo[y, x] + 1.5 * (photo[y, x] - blurred), 0, 255)
        assert result["sharpened"][y, x] == pytest.approx(wanted, abs=0.51)
    assert result["sharpness"]["after"] > 1.2 * result["sharpness"]["before"] > 0


@pytest.mark.parametrize("size", [(1, 1), (3, 200)], ids=str)
def test_the_users_node_leaves_a_flat_picture_of_any_size_as_it_is(sharpen: Session, size: tuple[int, int]) -> None:
    flat = np.full((*size, 3), 77, np.uint8)
    result = sharpen.run(photo=flat)
    assert np.array_equal(result["sharpened"], flat)
    assert result["sharpness"] == {"before": 0.0, "after": 0.0}


def test_a_wrong_option_of_the_users_node_is_refused_with_its_line(tmp_path: Path) -> None:
    written = (EXAMPLES / "user_node.yaml").read_text()
    (tmp_path / "user_node.yaml").write_text(written.replace("radius_px: 2", "radius_px: 99"))
    shutil.copy(EXAMPLES / "user_node.py", tmp_path)
    with pytest.raises(PipelineError) as refused:
        load(tmp_path / "user_node.yaml")
    (problem,) = refused.value.problems
    line = 1 + written[: written.index("radius_px")].count("\n")
    assert (problem.path, problem.line, problem.expected) == ("steps.sharpen.radius_px", line, "1 to 16")


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", [*SMALL, "control_flow"])
def test_the_readmes_command_prints_what_the_readme_says(name: str, tmp_path: Path) -> None:
    """Words are compared as they are, numbers within a hundredth, `...` with any; loading and timings are left out."""
    if name in ("embedding", "control_flow") and not (EXAMPLES / "models" / "shapes-chat" / "config.json").is_file():
        pytest.skip("the bundled chat model is not in this checkout")
    command, shown = _from_readme(name)
    words = [str(tmp_path / "saved") if word == "demo-out" else word for word in command[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "weftline", *words], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    printed, promised = (WORD.findall(text) for text in (done.stdout.partition("\n\n")[0], shown))
    assert promised, "the README shows nothing below the command"
    assert len(printed) == len(promised) and all(map(_alike, printed, promised)), done.stdout
    if "--save" in command:
        assert Image.open(tmp_path / "saved" / "sharpened.png").size == (640, 480)


def _alike(printed: str, promised: str) -> bool:
    try:
        return promised == "..." or float(printed) == pytest.approx(float(promised), abs=0.01)
    except ValueError:
        return printed == promised


def _from_readme(name: str) -> tuple[list[str], str]:
    """Return the words of the README's command for an example, and the lines shown below it."""
    for block in re.findall(r"```console\n\$ (.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL):
        command, _, shown = block.partition("\n")
        if f"run examples/{name}.yaml" in command:
            return shlex.split(command), shown.strip()
    pytest.fail(f"examples/README.md has no command for {name}.yaml")
