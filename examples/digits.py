"""The digits classifier, as your own model's file would be: ``ingot export examples.digits:model ...`` finds it.

    python -m examples.digits

trains it for some seconds and writes digits.pth (the weights), digits.npz (training images, for calibration),
held-out.npz (images and labels it has never seen) and one.npy (one held-out image, in a batch of one).
"""

import numpy as np
import torch

from ingot.demo import Digits, load, predict, train

model = Digits

if __name__ == "__main__":
    training, held_out = load()
    trained = train(training, progress=lambda epoch, loss: print(f"epoch {epoch}: loss {loss:.4f}"))
    accuracy = (predict(trained, held_out.images) == held_out.labels).mean()
    print(f"accuracy on held-out images: {accuracy:.4f}")
    torch.save(trained.state_dict(), "digits.pth")
    np.savez("digits.npz", image=training.images, label=training.labels)
    np.savez("held-out.npz", image=held_out.images, label=held_out.labels)
    np.save("one.npy", held_out.images[:1])
