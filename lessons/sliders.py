"""Pictures with sliders. Without a front end that shows sliders, each is drawn once."""

import importlib.util
import sys
from collections.abc import Callable

from drawing import draw_formula, draw_overlap
from IPython import get_ipython
from IPython.display import display


def drag_overlap(p: list[float], q: list[float]) -> None:
    """Let the reader drag the weights of two distributions and see how much of them overlaps."""
    columns = [
        {f"{name}({i})": (0.01, weight, 1.0) for i, weight in enumerate(weights)}
        for name, weights in (("p", p), ("q", q))
    ]

    def draw(**weights: float) -> None:
        both = [[weights[name] for name in column] for column in columns]
        draw_overlap(*([weight / sum(column) for weight in column] for column in both))

    drag(draw, columns)


def drag_formula(alpha: float, gamma: int, c: float) -> None:
    """Let the reader drag the acceptance rate, the number of drafts and the cost of a draft."""
    ranges = {"α": (0.0, alpha, 0.99), "γ": (0, gamma, 10), "c": (0.0, c, 1.0)}
    drag(lambda **values: draw_formula(*values.values()), [ranges])


def drag(draw: Callable, columns: list[dict[str, tuple]]) -> None:
    """Call draw(**values), again whenever a value is dragged. A column of sliders maps names to
    (lowest, value, highest), which are whole numbers or not."""
    if not can_drag():
        return draw(**{name: value for column in columns for name, (_, value, _) in column.items()})
    from ipywidgets import FloatSlider, HBox, IntSlider, VBox, interactive_output

    def slider(name: str, low: float, value: float, high: float) -> FloatSlider | IntSlider:
        kind, step = (IntSlider, 1) if isinstance(value, int) else (FloatSlider, 0.01)
        return kind(value=value, min=low, max=high, step=step, description=name)

    sliders = [{name: slider(name, *at) for name, at in column.items()} for column in columns]
    every = {name: each for column in sliders for name, each in column.items()}
    boxes = [VBox([*column.values()]) for column in sliders]
    display(HBox(boxes), interactive_output(draw, every))


def can_drag() -> bool:
    """Return whether ipywidgets is installed and somebody uses this notebook. Programs that only
    run it, such as nbconvert, say that nobody can type."""
    kernel = getattr(get_ipython(), "kernel", None)
    request = kernel.get_parent() if kernel else {}
    used = request.get("content", {}).get("allow_stdin") or "google.colab" in sys.modules
    return bool(used and importlib.util.find_spec("ipywidgets"))
