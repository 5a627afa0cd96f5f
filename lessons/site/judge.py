"""Judges answers written on a page of the site, in the browser's Python; see static/python.js."""

import importlib
import json
import traceback
from contextlib import redirect_stdout, suppress
from io import StringIO

from form import examine, find_gap


def judge(number: str, name: str, imports: str, source: str) -> str:
    """Return whether the answer is right, and what there is to say about it, as JSON. It may use
    the lesson's other functions and what the cells above import, but not torch."""
    tasks = importlib.import_module(f"solutions.pure_{number}").TASKS
    (task,) = (task for task in tasks if task.name == name)
    scope = {other.name: other.solution for other in tasks if other is not task}
    for line in imports.splitlines():
        with suppress(ImportError, SyntaxError):
            exec(line, scope)
    with redirect_stdout(StringIO()) as printed:
        try:
            exec(compile(source, "answer", "exec"), scope)
            fault, right = f"there is no `def {name}(…)`", ""
            if name in scope:
                fault = find_gap(task, scope[name])
            if not fault:
                fault, right = examine(task, scope[name])
        except Exception as error:
            fault = describe(error)
    verdict = f"{name}: {fault or right}".replace("\n", "\n    ")
    return json.dumps({"right": not fault, "text": printed.getvalue() + verdict})


def describe(error: Exception) -> str:
    """Say what an error is and, if that is known, in which line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "answer"]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}{f' in line {line}' if line else ''}: {what}"
