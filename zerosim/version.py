"""The version, for everybody who prints or writes it."""

__version__ = "0.1.0"
