"""Plain English: what a program can check (`test_plain_english.py`), and random sentences for a person (`draw.py`)."""
