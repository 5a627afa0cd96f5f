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
ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"  # further series of a plot

LEGEND = {"accepted": ACCEPTED, "rejected": REJECTED, "fresh": FRESH}

CUBE = 0, 95, 135, 175, 215, 255  # the intensities of a channel in a terminal's cube of colours


def css() -> str:
    """The legend's colours as CSS custom properties."""
    return " ".join(f"--{name}: {colour};" for name, colour in LEGEND.items())


def ansi(colour: str) -> str:
    """The parameters of the escape sequence that selects the nearest of the 216 colours of a
    terminal's cube. Not all terminals have 24-bit colours."""
    channels = bytes.fromhex(colour.removeprefix("#"))
    red, green, blue = (min(range(6), key=lambda i: abs(CUBE[i] - x)) for x in channels)
    return f"38;5;{16 + 36 * red + 6 * green + blue}"
