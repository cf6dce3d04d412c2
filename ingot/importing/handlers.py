"""TorchServe's handlers: the code before and behind a model, which Ingot does not run."""

from __future__ import annotations

from ingot.errors import InvalidArgument

_CLASSES = "and take the softmax and the largest classes of the answer"
_DEFAULT = {
    "image_classifier": "decode images, resize to 256, crop to 224, normalize with the mean and deviation of ImageNet, "
    + _CLASSES,
    "image_segmenter": "decode images, resize to 256, crop to 224, normalize with the mean and deviation of ImageNet, "
    "and take the largest class of each pixel",
    "object_detector": "decode images to numbers from 0 to 1, and drop the boxes of a score below 0.5",
    "text_classifier": f"split texts into tokens and look these up in the vocabulary, {_CLASSES}",
    "base_handler": "send tensors, and take the answer as tensors",
}


def note_on(handler: str | None, model: str, consent: bool) -> tuple[str, ...]:
    """Return a note on what a handler does that clients now must.

    Args:
        handler: a default one's name, a Python file, ``file:function``, or None.
        model: what the message calls the model.
        consent: a handler of the author's may be left behind.

    Raises:
        InvalidArgument: there is such a handler, and no consent.
    """
    if not handler:
        return ()
    if handler in _DEFAULT:
        return (f"TorchServe's handler {handler} is not taken over: clients must {_DEFAULT[handler]}",)
    if not consent:
        raise InvalidArgument(
            f"{model} has a handler of its own, '{handler[:200]}': code before and behind the model, which Ingot does "
            "not run; with --without-handler the model alone is imported, and clients do what the handler did"
        )
    return (f"the handler {handler[:200]} is not taken over: clients must do what it did before and behind the model",)
