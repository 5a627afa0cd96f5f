"""Hints, solutions, known wrong answers and checks of the lessons; see ../form.py."""
