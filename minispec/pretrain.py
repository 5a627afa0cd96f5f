"""Entry point of `python -m minispec.pretrain`; see training/pretrain.py."""

from minispec.training.pretrain import main

if __name__ == "__main__":
    main()
