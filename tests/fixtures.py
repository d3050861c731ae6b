"""Fixtures for all tests."""

import fcntl
import gc
import os
import pickle
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import typer

# Without a device the kernels run in Triton's interpreter. Every `triton.jit` reads this, even in
# Triton, so it is set before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


from specdec_cli import demo
from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.engine.memory import budget, estimate
from specdec_cli.models import attention, description, gate, tokenizer, tp
from specdec_cli.report import plots
from specdec_cli.report.drawings import canvas

T = TypeVar("T")
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt"}


FROZEN = pytest.StashKey[tuple[Path, int]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze imported objects: they live to the end, and the collector need not traverse them.

    Transformers imports a model's code when a test first asks for it. Building an engine collects,
    so that a test which finds all of it unfrozen pays for that in each of its engines.
    """
    state = item.path, len(sys.modules)
    if item.session.stash.get(FROZEN, None) != state:
        item.session.stash[FROZEN] = state
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def thawed_at_the_end(pytestconfig: pytest.Config) -> Iterator[None]:
    """Let the interpreter free all at its end: libraries tell what is left.

    A worker frees nothing, and pytest's last collections need not traverse what it has imported.
    """
    yield
    if not hasattr(pytestconfig, "workerinput"):
        gc.unfreeze()


@pytest.fixture
def steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory as it is now: an estimate and a measurement see the same."""
    there = budget.available_memory()
    for module in (budget, estimate):
        monkeypatch.setattr(module, "available_memory", lambda: there)


Probed = tuple[list[LayerShape], list[dict[str, Any]]]


@pytest.fixture(scope="session", autouse=True)
def probed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Pass a model through the gate once: its trial pass is a tenth of what a command costs.

    A rank's part of it, which differs in the shapes of its weights, passes once too. Ranks that are
    forks of this process tell each other what has passed.
    """
    known: dict[tuple[Any, ...], Probed] = {}
    told, tests = tmp_path_factory.mktemp("probed"), os.getpid()

    def probe(model: Any, name: str) -> list[LayerShape]:
        config = model.config.to_dict() | {"_name_or_path": ""}
        shapes = [(path, tuple(weight.shape)) for path, weight in model.named_parameters()]
        kind = type(model), repr(config), tuple(shapes)
        own = [vars(module) for module in model.modules()]

        def probed() -> Probed:
            layers = gate.probe(model, name)
            return layers, [{key: of[key] for key in of.keys() & {attention._WINDOW}} for of in own]

        if kind not in known:
            shared = os.getpid() != tests and type(model).__module__.startswith("transformers.")
            known[kind] = told_once(told, repr(kind), probed) if shared else probed()
        layers, windows = known[kind]
        for of, window in zip(own, windows, strict=True):
            of.update(window)  # the trial pass leaves them in the layers
        return layers

    with pytest.MonkeyPatch.context() as patch:
        for module in (description, tp):
            patch.setattr(module, "probe", probe)
        yield


def told_once(folder: Path, key: str, make: Callable[[], T]) -> T:
    """Return what `make` returned in the first process that asked for `key`; others wait for it.

    If it raises, each process calls it.
    """
    with open(folder / sha256(key.encode()).hexdigest(), "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if held := file.read():
            value: T = pickle.loads(held)
            return value
        value = make()
        file.write(pickle.dumps(value))
        return value


@pytest.fixture(scope="session", autouse=True)
def nothing_drawn_on_meta() -> Iterator[None]:
    """Make modules on meta without drawing numbers that they cannot hold: a third of their time."""

    def only_real(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

        return drawn

    with pytest.MonkeyPatch.context() as patch:
        for name in ("kaiming_uniform_", "normal_", "uniform_"):
            patch.setattr(torch.nn.init, name, only_real(getattr(torch.nn.init, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def modules_copied_at_once() -> Iterator[None]:
    """Copy modules in 40 % of the time: a general copy looks at each name, number and empty dict of
    hooks. Every model that is loaded is a copy of its description."""
    plain = {str, int, float, bool, type(None), torch.dtype, torch.device}

    def copied(module: Any, memo: dict[int, Any]) -> Any:
        made = memo[id(module)] = type(module).__new__(type(module))
        own = vars(made)
        for name, value in vars(module).items():
            kind = type(value)
            if kind not in plain and id(value) not in memo and kind in (dict, OrderedDict):
                held = memo[id(value)] = kind()
                for key, one in value.items():
                    held[key] = one if type(one) in plain else deepcopy(one, memo)
            own[name] = value if kind in plain else deepcopy(value, memo)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "__deepcopy__", copied, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers_read_once() -> Iterator[None]:
    """Read a folder's tokenizer once, by its files: the demo's takes as long as a short text."""
    read = tokenizer._loaded
    known: dict[Any, tokenizer.PretrainedTokenizer] = {}

    def loaded(load: Any, name: str, hint: str) -> tokenizer.PretrainedTokenizer:
        (place, *_) = load.args
        if not isinstance(place, Path):
            return read(load, name, hint)
        files = [file for file in sorted(place.iterdir()) if file.suffix not in WEIGHTS]
        held = tuple((file.name, file.read_bytes()) for file in files if file.is_file())
        key = load.func, tuple(load.keywords.items()), name, held
        if key not in known:
            known[key] = read(load, name, hint)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_loaded", loaded)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the parser of the same commands once: that takes half of what a refused one costs."""
    build = typer.main.get_command
    built: dict[tuple[Any, ...], Any] = {}

    def get_command(app: typer.Typer) -> Any:
        key = app, *app.registered_commands
        if key not in built:
            built[key] = build(app)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        yield


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA only if there is one."""
    return torch.device(request.param)


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Skip plots, which take longer to draw than small sweeps take to run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_cli.commands.status.write_pictures", lambda folder: None)
        yield


def without_pixels(patch: pytest.MonkeyPatch) -> None:
    """Draw plots for pages only: a picture of pixels takes as long."""

    def picture(figure: Any, form: str, name: str) -> bytes:
        return b"" if form == "png" else canvas.picture_of(figure, form, name)

    patch.setattr(plots, "picture_of", picture)


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no pictures of pixels in a test that reads none."""
    without_pixels(monkeypatch)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled files with the two drafts, of 2 layers, as target and draft.

    They propose for each other as for the target of 8 layers. `demo:draft-distilled` is the target.
    """
    folder = tmp_path_factory.mktemp("small") / "demo"
    folder.mkdir()
    models = {"target": "draft", "draft": "draft-distilled", "draft-distilled": "draft"}
    for path in demo.FOLDER.iterdir():
        if path.name not in models:
            (folder / path.name).symlink_to(path)
    for name, original in models.items():
        shutil.copytree(demo.FOLDER / original, folder / name)
    return folder


@pytest.fixture
def smaller_demo(small_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `demo:target` and `demo:draft` be the smaller ones in one test."""
    monkeypatch.setattr(demo, "FOLDER", small_models)
