"""Files for other programs; `cli/export.py` has the table of formats. A plot reads `extents.py` too."""
