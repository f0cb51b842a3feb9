"""A Hugging Face config.json as a model.

`read.py` is the loop over the table of `families.py`: a row for each model_type. `keys.py` checks values, `rope.py`,
`blocks.py` and `rows.py` read what several keys say together, `other_keys.py` knows the rest.
"""
