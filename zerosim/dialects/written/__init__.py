"""Files for other frameworks, one module each: `written(config)` returns a file's text.

A file says everything of a configuration that the framework's file can say, and no more. `dialects/writing.py` finds
the rest: it reads the text back.
"""
