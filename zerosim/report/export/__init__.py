"""Files that other programs open; `cli/export.py` has the table of formats. `extents.py` is read by a plot too."""
