"""The lecture: a deck of slides whose figures are counted as it is written, a player to jump into, and a page a lesson.

    deck, player = ...  # see cli/lecture.py

A slide is a claim, a question with options, or a count to guess. A claim that its plans do not bear out stops the
writing.
"""
