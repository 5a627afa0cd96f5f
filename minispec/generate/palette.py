"""One palette, by meaning, for the lessons' pictures, README's, `--color` and the `--html` page.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish.
"""

ACCEPTED = "#0072B2"  # blue: an accepted draft
REJECTED = "#D55E00"  # vermilion: a rejected draft
FRESH = "#009E73"  # green: the target's own token
CONTEXT = "#7F7F7F"  # grey: earlier text, or a draft that has not been judged yet
PALE = "#DDDDDD"  # earlier text in the background, or a draft that was never looked at
LINE = "#BBBBBB"  # edges of a tree
HIDDEN = "#F2F2F2"  # what a mask hides
INK, LIGHT_INK = "#767676", "#808080"  # letters and axes, to be read on white and on black
ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"  # further series of a plot

LEGEND = {"accepted": ACCEPTED, "rejected": REJECTED, "fresh": FRESH}

# the nearest of a terminal's 256 colours that can be read on black and on white
TERMINAL = {ACCEPTED: 32, REJECTED: 166, FRESH: 29}


def css() -> str:
    """The legend's colours as CSS custom properties."""
    return " ".join(f"--{name}: {colour};" for name, colour in LEGEND.items())


def ansi(colour: str) -> str:
    """The parameters of the escape sequence that selects a colour of the legend."""
    return f"38;5;{TERMINAL[colour]}"
