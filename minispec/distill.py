"""Entry point of `python -m minispec.distill`; see training/distill/."""

from minispec.training.distill import main

if __name__ == "__main__":
    main()
