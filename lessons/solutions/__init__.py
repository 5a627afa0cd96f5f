"""Hints, solutions, known wrong answers and checks of the lessons; see ../form.py. What needs no
torch is in pure_*.py."""

import sys
from pathlib import Path

# lesson 09 imports lessons.assignments, also if my_minispec.py is imported from elsewhere
sys.path.append(str(Path(__file__).resolve().parents[2]))
