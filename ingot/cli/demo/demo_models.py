"""The models of ``ingot demo``: found in the store, where an earlier run has left them, or trained and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.output import note, progress
from ingot.errors import InvalidArchive

if TYPE_CHECKING:
    from ingot.demo import Data, Digits
    from ingot.model_store import Archive, Store
    from ingot.tensors import Array

_SOURCES = {
    "digits": "ingot.demo:Digits",
    "digit-pictures": "ingot.demo.pictures:Pictures",
    "docstrings": "ingot.demo.docstrings:Docstrings",
}


def digits(store: Store, training: Data) -> tuple[str, Path]:
    """Return the reference of the classifier of digits, in two variants, and its checkpoint."""
    found = _find(store, "digits")
    if found is not None and (checkpoint := _checkpoint(store, store.get(found))).is_file():
        note(f"Reusing {found} from {store.root}")
        return found, checkpoint
    return _make_digits(store, training)


def others(store: Store, checkpoint: Path) -> dict[str, str]:
    """Return the references of the models with steps by their names.

    Args:
        store: where they are, or are put.
        checkpoint: of the classifier of digits, which also classifies pictures.
    """
    makers: dict[str, Callable[[Callable[[str], None]], Archive]] = {
        "digit-pictures": lambda step: _pictures(checkpoint, step),
        "docstrings": _docstrings,
    }
    return {name: _find(store, name) or _stored(store, name, make) for name, make in makers.items()}


def classes(checkpoint: Path, held_out: Data) -> Array:
    """Return the classes of images as PyTorch computes them."""
    from ingot import demo

    return demo.predict(_trained(checkpoint), held_out.images)


def _find(store: Store, name: str) -> str | None:
    """Return the reference of a model of an earlier run; None if there is none, or another version of Ingot made it."""
    for tag in store.tags(name):
        try:
            source = store.get(f"{name}:{tag}").variant().serving.provenance.source
        except InvalidArchive as error:
            note(f"Passing over {name}:{tag}: {error}")
            continue
        if source == _SOURCES[name]:
            return f"{name}:{tag}"
    return None


def _checkpoint(store: Store, archive: Archive) -> Path:
    return store.root / "demo" / f"{archive.descriptor.hex}.pth"


def _make_digits(store: Store, training: Data) -> tuple[str, Path]:
    with progress("Importing PyTorch", log=True) as step:
        import torch

        from ingot import demo
        from ingot.export import export_model
        from ingot.quant import QuantConfig, StaticInt8, quantize

        def on_epoch(epoch: int, loss: float) -> None:
            step(f"Training on {len(training.images)} handwritten digits: epoch {epoch}, loss {loss:.4f}")

        model = demo.train(training, progress=on_epoch)
        exported = export_model(
            model,
            inputs=[demo.INPUT],
            output_names=["logits"],
            name="digits",
            source=_SOURCES["digits"],
            progress=step,
        )
        # By name and forced, so that there is an int8 model to look at however busy the machine is.
        config = QuantConfig(recipe=StaticInt8(), force=True)
        archive = quantize(exported, {"image": training.images}, config=config, progress=step)
        step("Storing")
        reference = f"digits:{store.next_version('digits')}"
        store.push(archive, reference)
        checkpoint = _checkpoint(store, archive)
        checkpoint.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), checkpoint)
    note(f"Trained, exported, quantized and stored as {reference} in {store.root}")
    return reference, checkpoint


def _trained(checkpoint: Path) -> Digits:
    from ingot import demo
    from ingot.export.source import load_checkpoint

    model = demo.Digits().eval()
    load_checkpoint(model, checkpoint)
    return model


def _stored(store: Store, name: str, make: Callable[[Callable[[str], None]], Archive]) -> str:
    with progress(f"Making the model {name}", log=True) as step:
        archive = make(step)
        reference = f"{name}:{store.next_version(name)}"
        store.push(archive, reference)
    note(f"Exported and stored as {reference}")
    return reference


def _pictures(checkpoint: Path, step: Callable[[str], None]) -> Archive:
    """Export the classifier of digits with a step that reads files of pictures."""
    from ingot.demo.pictures import INPUT, SIZE, Pictures
    from ingot.export import export_model
    from ingot.steps import image_classification

    steps = image_classification(
        [str(digit) for digit in range(10)], size=SIZE, mean=(0, 0, 0), std=(1, 1, 1), filter="box"
    )
    return export_model(
        Pictures(_trained(checkpoint)).eval(),
        inputs=[INPUT],
        output_names=["logits"],
        name="digit-pictures",
        source=_SOURCES["digit-pictures"],
        steps=steps,
        progress=step,
    )


def _docstrings(step: Callable[[str], None]) -> Archive:
    """Train a classifier of texts, and export it with its tokenizer."""
    from ingot.demo import docstrings
    from ingot.export import export_model
    from ingot.steps import text_classification

    training, _ = docstrings.load()
    step(f"Training on {len(training.texts)} paragraphs of the standard library's docstrings")
    serialized = docstrings.tokenizer(training)
    steps = text_classification(serialized, docstrings.LABELS, pair="", max_length=docstrings.LONGEST)
    return export_model(
        docstrings.train(training, serialized),
        inputs=list(docstrings.INPUTS),
        output_names=["logits"],
        name="docstrings",
        source=_SOURCES["docstrings"],
        steps=steps,
        progress=step,
    )
