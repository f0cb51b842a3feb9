"""Part of the stand-in for CuPy."""
