"""zerosim: train a real GPT over N virtual ranks with DDP and ZeRO-1, 2, 3, every byte counted."""

__version__ = "0.1.0"
