"""`python -m minispec.fetch`; see checkpoints/fetch.py."""

from minispec.checkpoints.fetch import main

if __name__ == "__main__":
    main()
